"""What was done to a corpus before, kept inside the files it was cut into.

A promise about a corpus covers how it was made of the one before: a share held out by number, or
sentences removed because somebody else wrote them too, let one person's text decide what is left
of another's. `train.parquet` and `validation.parquet` of a prepared corpus carry its settings in
their metadata, canaries are planted with them, and the next `prepare` finds them there. A data
frame, or a file that other tools wrote anew, has no history to tell.
"""

import json
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.core.files import read_json, read_sealed
from tightlip.core.run_folder import run_around
from tightlip.corpus.formats import kind_of

ID = "id.json"  # of a prepared corpus
OWN_RECORD = "guarantee.json"  # beside a model's weights
_NAME = b"tightlip.history"
# Of the settings of a preparation, those by which one text can decide about another.
_KEPT = ("split", "deduplicate")


def step_of(settings: dict[str, Any], source_fingerprint: str) -> dict[str, Any]:
    """One preparation, as the next one will read of it."""
    return {name: settings[name] for name in _KEPT} | {"source_fingerprint": source_fingerprint}


def metadata_of(history: list[dict[str, Any]]) -> dict[bytes, bytes] | None:
    """The history as a Parquet file's metadata."""
    return {_NAME: json.dumps(history).encode()} if history else None


def history_of(source: Any) -> list[dict[str, Any]]:
    """Every preparation that a corpus came through, the first one first; empty where none is told.

    Of a folder of files, what any of them came through.
    """
    if isinstance(source, pa.Table):
        return _read(source.schema)
    if not isinstance(source, str | Path) or not Path(source).exists():
        return []
    steps: list[dict[str, Any]] = []
    for file in files_under(Path(source)):
        if kind_of(file) == "parquet":
            steps += [step for step in _read(_schema(file)) if step not in steps]
    return steps


def files_under(path: Path) -> list[Path]:
    """The file itself, or all files of a folder."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def sources_of(prepared: Path) -> set[str]:
    """Fingerprints of the text that a prepared corpus was made from, and of what that was cut from."""
    record = prepared / "prepared.json"
    if not record.is_file():
        return set()
    known = read_json(record)
    return {known["source_fingerprint"], *fingerprints(known.get("history", []))}


def fingerprints(history: list[dict[str, Any]]) -> set[str]:
    return {step["source_fingerprint"] for step in history}


def preparation_behind(folder: Path) -> Path | None:
    """The prepared corpus that a tokenizer's folder came out of: it stands in it, or in a run on
    it; None where neither is known, as of a copy."""
    for above in (folder.resolve(), *folder.resolve().parents[:2]):
        if (above / "prepared.json").is_file():
            return above
    run = run_around(folder)
    return None if run is None else run.corpus_folder


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What is known to have shaped a model, through all the runs that it came out of.

    `sources` are fingerprints of text that its weights learnt and `vocabulary` of text that its
    words were learnt from; `names` are random names of corpora, which is all that a private run
    tells; `texts` are fingerprints of training parts. `folders` are the prepared corpora of all
    these that still stand where they were.
    """

    sources: frozenset[str] = frozenset()
    vocabulary: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = ()

    def learnt(self, *, sources: Set[str], name: str, text_fingerprint: str) -> bool:
        """Whether the weights learnt this corpus, or another part or preparation of its text."""
        named = bool(name) and name in self.names
        return named or bool(self.sources & sources) or text_fingerprint in self.texts


def origin_of(model: Path) -> Origin:
    """What the model's own record and the runs around and before it tell.

    Holds:
        chained: a run that went on from another has that one's origin too.
        copied: a copy of a model's folder tells as much as its own record does.
        unknown: of a model from elsewhere it is empty.
    """
    known: dict[str, set[str]] = {"sources": set(), "vocabulary": set(), "names": set()}
    texts: set[str] = set()
    folders: dict[Path, None] = {}
    seen: set[Path] = set()
    at: Path | None = model.resolve()
    while at is not None and at not in seen:
        seen.add(at)
        _add_own_record(at, known)
        run = run_around(at)
        if run is None:
            break
        corpus = run.corpus_folder.resolve()
        _add_own_record(run.model_folder, known)
        known["sources"] |= sources_of(corpus)
        known["names"] |= {name for name in [name_of(corpus)] if name is not None}
        texts.add(str(run.config["corpus"].get("corpus_fingerprint")))
        words, made_in = vocabulary_behind(corpus)
        known["vocabulary"] |= words
        folders |= dict.fromkeys((corpus, *made_in))
        before = Path(str(run.config.get("train", {}).get("model", "")))
        at = before.resolve() if before.is_dir() and before.is_absolute() else None
    return Origin(
        **{name: frozenset(each) for name, each in known.items()},
        texts=frozenset(texts),
        folders=tuple(folder for folder in folders if (folder / "prepared.json").is_file()),
    )


def vocabulary_behind(prepared: Path) -> tuple[set[str], list[Path]]:
    """Fingerprints of the text that a prepared corpus' words were learnt from, and the prepared
    corpora that its tokenizer was handed on through."""
    known: dict[str, set[str]] = {"vocabulary": set()}
    through: list[Path] = []
    at: Path | None = prepared
    while at is not None and at not in through and (at / "prepared.json").is_file():
        through.append(at)
        given = read_json(at / "prepared.json")["settings"].get("tokenizer")
        if given is None:
            return known["vocabulary"] | sources_of(at), through[1:]
        _add_own_record(Path(given), known)
        at = preparation_behind(Path(given))
    return known["vocabulary"], through[1:]


def learnt_from(prepared: Path, start: Path | None, name: str) -> dict[str, list[str]]:
    """What a model's own record says that it was made of, so that a copy still tells.

    A private run gives its corpus' random `name` in place of its text's fingerprints: whoever
    knows all of a text but one document could tell from them whether that one was in.
    """
    before = Origin() if start is None else origin_of(start)
    own, (words, _) = sources_of(prepared), vocabulary_behind(prepared)
    told, hidden, names = (set(), own, {name}) if name else (own, set(), set())
    return {
        "sources": sorted(before.sources | told),
        "vocabulary": sorted((before.vocabulary | words) - hidden),
        "names": sorted(before.names | names),
    }


def _add_own_record(model: Path, known: dict[str, set[str]]) -> None:
    """What lies beside a model's weights, in `guarantee.json`."""
    path = model / OWN_RECORD
    record = read_json(path) if path.is_file() else {}
    learnt = record.get("learnt_from") or {}  # a model of an earlier version has none
    for name, values in known.items():
        values |= {str(each) for each in learnt.get(name, ())}
    if "names" in known and record.get("corpus_fingerprint"):
        known["names"].add(str(record["corpus_fingerprint"]))


def name_of(prepared: Path) -> str | None:
    """The random name of a prepared corpus, where it was ever asked for one."""
    path = prepared / ID
    return str(read_sealed(path)[0]["id"]) if path.is_file() else None


def _schema(file: Path) -> pa.Schema | None:
    try:
        return pq.read_schema(file)
    except (pa.ArrowException, OSError):
        return None  # no Parquet after all: whoever reads its rows says so


def _read(schema: pa.Schema | None) -> list[dict[str, Any]]:
    written = (schema.metadata or {}).get(_NAME) if schema is not None else None
    return json.loads(written) if written else []
