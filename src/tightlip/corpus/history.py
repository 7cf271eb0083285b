"""What was done to a corpus before, kept inside the files it was cut into.

A promise about a corpus covers how it was made of the one before: a share held out by number, or
sentences removed because somebody else wrote them too, let one person's text decide what is left
of another's. `train.parquet` and `validation.parquet` of a prepared corpus carry its settings in
their metadata, canaries are planted with them, and the next `prepare` finds them there. A data
frame, or a file that other tools wrote anew, has no history to tell.
"""

import json
import secrets
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tightlip.core import register
from tightlip.core.files import read_json, read_sealed
from tightlip.core.register import OWN_RECORD
from tightlip.core.run_folder import RunRecord, run_around
from tightlip.corpus.formats import parquet_files

ID = "id.json"  # of a prepared corpus
_NAME = b"tightlip.history"
# Of the settings of a preparation, those by which one text can decide about another.
_KEPT = ("split", "deduplicate")


def step_of(
    settings: dict[str, Any], source_fingerprint: str, people: Sequence[str]
) -> dict[str, Any]:
    """One preparation, as the next one will read of it."""
    kept = {name: settings[name] for name in _KEPT}
    return kept | {"source_fingerprint": source_fingerprint, "people": [*people]}


def metadata_of(history: list[dict[str, Any]]) -> dict[bytes, bytes] | None:
    """The history as a Parquet file's metadata."""
    return {_NAME: json.dumps(history).encode()} if history else None


def history_of(source: Any) -> list[dict[str, Any]]:
    """Every preparation that a corpus came through, the first one first; empty where none is told.

    Of a folder of files, what any of them came through.
    """
    if isinstance(source, pa.Table):
        return _read(source.schema)
    if not isinstance(source, str | Path):
        return []
    steps: list[dict[str, Any]] = []
    for schema in parquet_files(source).values():
        steps += [step for step in _read(schema) if step not in steps]
    return steps


def sources_of(prepared: Path) -> set[str]:
    """Fingerprints of the text that a prepared corpus was made from, and of what that was cut from."""
    record = prepared / "prepared.json"
    if not record.is_file():
        return set()
    known = read_json(record)
    return {known["source_fingerprint"], *fingerprints(known.get("history", []))}


def fingerprints(history: list[dict[str, Any]]) -> set[str]:
    return {step["source_fingerprint"] for step in history}


def marks_of(prepared: Path) -> set[str]:
    """All that a prepared corpus is known by: fingerprints of its text, its own id, its people's."""
    return sources_of(prepared) | _ids_of(prepared)


def _ids_of(prepared: Path) -> set[str]:
    return {*people_of(prepared), *filter(None, [name_of(prepared)])}


def people_of(prepared: Path) -> tuple[str, ...]:
    """The ids of those who wrote a prepared corpus; none before it has a name."""
    path = prepared / ID
    if not path.is_file():
        return ()
    record = read_sealed(path)[0]
    return tuple(map(str, record.get("people") or [record["id"]]))


def people_in(history: list[dict[str, Any]]) -> list[str]:
    """The people of the corpora that another was cut from."""
    return list(dict.fromkeys(each for step in history for each in step.get("people", ())))


def new_name(
    sources: Set[str],
    people: Sequence[str],
    name: str | None = None,
    *,
    folder: Path,
    apart: bool = False,
) -> dict[str, Any]:
    """A random id for the corpus in `folder`, or its own `name`, and the ids of its people: those
    that are given, those of a corpus of the same text that was prepared here before, or a new one.
    With `apart` it is declared that none of them is among the people of any other corpus registered
    so far.

    Holds:
        same_text: text that is prepared twice has the same people, whatever the settings.
        kept: the register has a line for it, with its folder, when this returns.
    """
    name, place = name or secrets.token_hex(16), str(folder.resolve())
    ids: dict[str, None] = dict.fromkeys(people)

    def line(entries: list[register.Entry]) -> register.Entry | None:
        corpora = [each for each in entries if each["kind"] == register.CORPUS]
        same = [each for each in corpora if sources & {*each["sources"]}]
        ids.update(dict.fromkeys(one for each in same for one in each["people"]))
        if not ids:
            ids[name] = None
        known = {one for each in corpora for one in each["people"]} - {*ids}
        declared = {"apart": sorted(known)} if apart and known else {}
        is_new = not any(
            {*ids} == {*each["people"]}
            and sources <= {*each["sources"]}
            and place == each.get("folder")
            for each in same
        )
        if not is_new and not declared:
            return None
        line = {"kind": register.CORPUS, "people": [*ids], "sources": sorted(sources)}
        return line | {"folder": place} | declared

    register.add(line)
    return {"id": name, "people": [*ids]}


def still_prepared(line: register.Entry) -> Path | None:
    """Where the text of a corpus' line in the register lies prepared, if it still does."""
    folder = Path(str(line.get("folder")))
    try:
        is_whole = (folder / "train.parquet").is_file()
        return folder if is_whole and sources_of(folder) == {*line["sources"]} else None
    except OSError:  # somebody else's by now
        return None


def marks_behind(fingerprint: str) -> set[str]:
    """What a file is known by: its fingerprint, and the ids of its people where it was prepared here
    before."""
    lines = [e for e in register.entries(register.CORPUS) if fingerprint in e["sources"]]
    return {fingerprint, *(each for line in lines for each in line["people"])}


def preparation_behind(folder: Path) -> Path | None:
    """The prepared corpus that a tokenizer's folder came out of: it stands in it, or in a run on
    it; None where neither is known, as of a copy."""
    for above in (folder.resolve(), *folder.resolve().parents[:2]):
        if (above / "prepared.json").is_file():
            return above
    run = run_around(folder)
    return None if run is None else run.corpus_folder


@dataclass(kw_only=True)
class Origin:
    """What is known to have shaped a model, through all the runs that it came out of.

    `learnt` are the marks (see `marks_of`) of all text that its weights learnt, `openly` of that
    which they learnt without privacy, and `words` of what its words were learnt from. `folders` are
    the prepared corpora of all these that still stand where they were, `open_folders` those that
    were trained on without privacy.
    """

    learnt: set[str] = field(default_factory=set)
    openly: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    is_known: bool = False
    corpora: dict[Path, bool] = field(default_factory=dict)  # whether it was without privacy

    @property
    def folders(self) -> list[Path]:
        return [folder for folder in self.corpora if (folder / "prepared.json").is_file()]

    @property
    def open_folders(self) -> list[Path]:
        return [folder for folder in self.folders if self.corpora[folder]]

    def add_record(self, model: Path) -> None:
        """What lies beside a model's weights, in `guarantee.json`."""
        path = model / OWN_RECORD
        if not path.is_file():
            return
        record = read_json(path)
        self.is_known |= {"mechanism", "standing"} <= {*record}  # or it says nothing
        learnt = record.get("learnt_from") or {}
        for name in ("learnt", "openly", "words"):
            getattr(self, name).update(map(str, learnt.get(name, ())))
        if record.get("withdrawn"):  # the noise was not what it was said to be
            self.openly.update(map(str, learnt.get("learnt", ())))
        # Version 0.2 before it was released: fingerprints, of private runs only names.
        self.openly |= {*learnt.get("sources", ())}
        self.words |= {*learnt.get("vocabulary", ())}
        self.learnt |= {*learnt.get("sources", ()), *learnt.get("names", ())}
        if record.get("corpus_fingerprint"):
            self.learnt.add(str(record["corpus_fingerprint"]))

    def add_run(self, run: RunRecord) -> None:
        """What a run's own folder tells, and its corpus where that still stands."""
        self.is_known = True
        self.add_record(run.model_folder)
        corpus = run.corpus_folder.resolve()
        marks = marks_of(corpus) | {str(run.config["corpus"].get("corpus_fingerprint"))}
        is_open = run.guarantee.get("epsilon") is None
        self.learnt |= marks
        self.openly |= marks if is_open else set()
        words, through = vocabulary_behind(corpus)
        self.words |= words
        self.corpora |= {corpus: is_open} | dict.fromkeys(through, False)


def origin_of(model: Path) -> Origin:
    """What the model's own record and the runs around and before it tell.

    Holds:
        chained: a run that went on from another has that one's origin too.
        copied: a copy of a model's folder tells as much as its own record does.
        unknown: of a model from elsewhere it is empty.
    """
    origin, seen = Origin(), set[Path]()
    at: Path | None = model.resolve()
    while at is not None and at not in seen:
        seen.add(at)
        origin.add_record(at)
        if (run := run_around(at)) is None:
            break
        origin.add_run(run)
        before = Path(str(run.config.get("train", {}).get("model", "")))
        at = before.resolve() if before.is_dir() and before.is_absolute() else None
    return origin


def vocabulary_behind(prepared: Path) -> tuple[set[str], list[Path]]:
    """Marks of the text that a prepared corpus' words were learnt from, and the prepared corpora
    that its tokenizer was handed on through, the one that made it last."""
    origin, through = Origin(), list[Path]()
    at: Path | None = prepared
    while at is not None and at not in through and (at / "prepared.json").is_file():
        through.append(at)
        record = read_json(at / "prepared.json")
        if (given := record["settings"].get("tokenizer")) is None:
            return origin.words | marks_of(at), through[1:]
        origin.add_record(Path(given))
        # A path as it was given leads nowhere from another folder, or once what it led to is gone.
        origin.words.update(record.get("words", ()))
        known = [*map(Path, record.get("words_from", ()))]
        there = (each for each in known if (each / "prepared.json").is_file())
        at = next(there, None) if known else preparation_behind(Path(given))
    return origin.words, through[1:]


def words_given_by(tokenizer: Path) -> dict[str, list[str]]:
    """What a corpus that is given a tokenizer keeps of it: random ids of those whose text it was learnt
    from, and the corpora that it was handed on through, the one that made it last."""
    origin, given_by = Origin(), preparation_behind(tokenizer)
    origin.add_record(tokenizer)
    marks, through = (set[str](), list[Path]()) if given_by is None else vocabulary_behind(given_by)
    return {
        "words": sorted(ids_among(origin.words | marks)),
        "words_from": [str(each.resolve()) for each in [given_by, *through] if each is not None],
    }


def learnt_from(prepared: Path, start: Path | None, *, is_private: bool) -> dict[str, list[str]]:
    """What a model's own record says that it was made of, so that a copy still tells.

    Random ids only: whoever knows all of a text but one document could tell from its fingerprint
    whether that one was in.
    """
    before = Origin() if start is None else origin_of(start)
    ids = _ids_of(prepared)
    told = {
        "learnt": before.learnt | ids,
        "openly": before.openly | (set() if is_private else ids),
        "words": before.words | vocabulary_behind(prepared)[0],
    }
    return {name: sorted(ids_among(marks)) for name, marks in told.items()}


def ids_among(marks: set[str]) -> set[str]:
    """Random ids have 32 digits; a fingerprint of text has 64, and an earlier version told some."""
    return {each for each in marks if len(each) == 32}


def name_of(prepared: Path) -> str | None:
    """The random name of a prepared corpus, where it was ever asked for one."""
    path = prepared / ID
    return str(read_sealed(path)[0]["id"]) if path.is_file() else None


def _read(schema: pa.Schema | None) -> list[dict[str, Any]]:
    written = (schema.metadata or {}).get(_NAME) if schema is not None else None
    return json.loads(written) if written else []
