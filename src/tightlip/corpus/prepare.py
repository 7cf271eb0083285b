"""From the corpus people have to a folder that training and scanning read.

    prepared.json        settings, statistics, fingerprints, private releases
    id.json              random ids of the corpus and of its people
    tokenizer/           Hugging Face files
    train.parquet        user, text and further columns, as cleaned
    validation.parquet   what was held out, or came as a file of its own
    train/, validation/  the same documents as tokens (see tokens.py)

Everything else follows from the source, the settings and the seed, but for a vocabulary with noise.
"""

import contextlib
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tightlip.core import files, register
from tightlip.core.checksums import checked_whole
from tightlip.core.errors import DamagedError, GuaranteeError, UsageError
from tightlip.core.progress import log, task
from tightlip.core.settings import takes
from tightlip.corpus import history, prepare_chats
from tightlip.corpus.cleaning import Cleaner
from tightlip.corpus.encoding import saved_tokenizer, tokenizer_fingerprint
from tightlip.corpus.prepare_config import PrepareConfig, check_owners, check_split, splitter_for
from tightlip.corpus.private_vocabulary import build_private_tokenizer
from tightlip.corpus.readers import Corpus, open_corpus
from tightlip.corpus.rendered import template_of
from tightlip.corpus.shared_text import warnings_of_held_out
from tightlip.corpus.tables import AttributeTypes, Metadata, TableWriter
from tightlip.corpus.tokens import TokenizedCorpus, open_tokenized, tokenize_documents
from tightlip.corpus.vocabulary import build_tokenizer


@dataclass(frozen=True, kw_only=True)
class PreparedCorpus:
    """A prepared folder, its tokens mapped."""

    folder: Path
    train: TokenizedCorpus
    validation: TokenizedCorpus | None
    statistics: dict[str, Any]
    settings: dict[str, Any]
    tokenizer_folder: Path
    releases: list[dict[str, Any]]
    learnt_vocabulary: bool  # from this very text, without noise
    history: list[dict[str, Any]]  # what the text came through before
    validation_fingerprint: str | None = None  # of a file of held-out text


def is_prepared(folder: Path) -> bool:
    return (folder / "prepared.json").is_file()


def open_prepared(folder: Path) -> PreparedCorpus:
    """The prepared corpus in `folder`."""
    if not is_prepared(folder):
        raise UsageError(
            f"{folder} is no prepared corpus (no prepared.json). Run: tightlip prepare CORPUS --out {folder}"
        )
    record = files.read_json(folder / "prepared.json")
    held = folder / "validation"
    with files.damage_in_words(folder / "prepared.json"):
        if "validation" in record["statistics"] and not held.exists():
            raise DamagedError(
                f"{held} is missing: {folder} was prepared with text held out. Put a whole copy back, or prepare it again."
            )
        return PreparedCorpus(
            folder=folder,
            train=open_tokenized(folder / "train"),
            validation=open_tokenized(held) if held.exists() else None,
            statistics=record["statistics"],
            settings=record["settings"],
            tokenizer_folder=folder / "tokenizer",
            releases=record.get("releases", []),
            learnt_vocabulary=_learnt_vocabulary(record),
            history=record.get("history", []),
            validation_fingerprint=record.get("validation_fingerprint"),
        )


def _learnt_vocabulary(record: dict[str, Any]) -> bool:
    """As the record says; one of an earlier version says it by its settings."""
    learnt = record["settings"].get("tokenizer") is None and not record.get("releases")
    return bool(record.get("learnt_vocabulary", learnt))


def corpus_id(folder: Path) -> str:
    """The random name of a prepared corpus; an earlier version gave it none until it was asked.

    A ledger names its corpus by it. A hash of the text would tell whoever knows all of it but
    one document whether that one was in.
    """
    path = folder / history.ID
    if not path.exists():
        fresh = files.partial_beside(folder / f"id-{secrets.token_hex(8)}")
        behind = files.read_json(folder / "prepared.json").get("history", [])
        try:
            people = history.people_in(behind)
            whose = history.new_name(history.sources_of(folder), people, folder=folder)
            files.write_sealed(fresh, whose)
            # A link, not a rename: of two that ask at once the first decides for both.
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        except PermissionError as error:
            raise UsageError(
                f"{folder} cannot be written, and a private run keeps a random name for its corpus in it. Make it "
                "writable for one run, or copy it."
            ) from error
        finally:
            fresh.unlink(missing_ok=True)
    return str(history.name_of(folder))


def registered_people(folder: Path) -> tuple[str, ...]:
    """The ids of those who wrote a prepared corpus, which the register then knows by its text too."""
    people = {*history.people_of(folder)}
    lines = register.entries(register.CORPUS)
    if people and not any(people & {*line["people"]} for line in lines):
        log.warning(
            "%s knows nothing of %s, which was prepared with another register or before this one: private runs on the same "
            "people that stand there are not counted here.",
            *(register.register_path(), folder),
        )
    name, sources = corpus_id(folder), history.sources_of(folder)
    return (*history.new_name(sources, history.people_of(folder), name, folder=folder)["people"],)


def prepare_corpus(source: Any, out: Path, config: PrepareConfig) -> PreparedCorpus:
    """Read, clean, split and tokenise `source` into `out`, which appears when all is done.

    Holds:
        deterministic: same source, settings and seed, same files, unless `vocabulary_noise` is set; but
            for the corpus' own random id.
        kept: what is there from the same source and settings is returned untouched, nothing redrawn.
    """
    corpus = _opened(source, config)
    held_out = held_out_corpus(config)
    given = saved_tokenizer(config.tokenizer) if config.tokenizer is not None else None
    identity: dict[str, Any] = {
        "settings": asdict(config),
        "source_fingerprint": corpus.fingerprint(),
        "validation_fingerprint": None if held_out is None else held_out.fingerprint(),
        "given_tokenizer_fingerprint": None if given is None else tokenizer_fingerprint(given),
        "template_fingerprint": prepare_chats.template_fingerprint(corpus, given, config),
    }
    with files.claimed(out):
        if files.names_in(out):
            return _already_there(out, identity)
        _write_prepared(corpus, held_out, given, identity, out, config)
    return open_prepared(out)


def _write_prepared(
    corpus: Corpus,
    held_out: Corpus | None,
    given: Any,
    identity: dict[str, Any],
    out: Path,
    config: PrepareConfig,
) -> None:
    of_chats = prepare_chats.is_of_chats(corpus, given, config)
    whose = _name_for(corpus, identity["source_fingerprint"], config, out)
    with files.folder_written_whole(out) as folder:
        files.write_sealed(folder / history.ID, whose)
        source, people = identity["source_fingerprint"], whose["people"]
        done = [*corpus.history, history.step_of(identity["settings"], source, people)]
        metadata = history.metadata_of(done)
        if of_chats:
            tokenizer = _save_tokenizer(folder, given, config)
            statistics = prepare_chats.write_chats(
                corpus, held_out, tokenizer, folder, config, metadata
            )
        else:
            statistics = _write_documents(corpus, held_out, folder, config, metadata)
            tokenizer = _save_tokenizer(folder, given, config)
        statistics |= _write_tokens(folder, tokenizer, config)
        if held_out is not None:
            statistics["warnings"] += warnings_of_held_out(folder, held_out)
        if held_out is not None and config.public_validation is not None:
            from tightlip.corpus.public_text import check_public_validation

            check_public_validation(held_out, {*history.fingerprints(done), *people}, folder)
        files.write_json(
            folder / "prepared.json",
            {
                "source": corpus.name,
                **identity,
                "history": corpus.history,
                **_vocabulary_facts(config, history.fingerprints(done) | {*people}),
                "statistics": statistics,
            },
        )


def _name_for(corpus: Corpus, source: str, config: PrepareConfig, out: Path) -> dict[str, Any]:
    """A random name for a corpus, with the ids of its people: those of what it was cut from, of
    the corpus that the settings say is of the same people, or of the same text prepared before."""
    inherited = history.people_in(corpus.history)
    if config.people is not None:
        corpus_id(open_prepared(Path(config.people)).folder)
        inherited += history.people_of(Path(config.people))
    try:
        sources = {source, *history.fingerprints(corpus.history)}
        return history.new_name(sources, inherited, folder=out, apart=config.other_people)
    except GuaranteeError as error:
        # Plain training needs no register, and private training asks again.
        log.warning("%s", error)
        name = secrets.token_hex(16)
        return {"id": name, "people": inherited or [name]}


def _opened(source: Any, config: PrepareConfig) -> Corpus:
    prepare_chats.refuse_rendered(source)
    return open_corpus(source, **_columns(config))


def _columns(config: PrepareConfig) -> dict[str, Any]:
    names = ("user_column", "text_column", "bad_rows", "format")
    return {name: getattr(config, name) for name in names}


def held_out_corpus(config: PrepareConfig) -> Corpus | None:
    """The file of held-out text that the settings name, read with the corpus' own columns.

    It is cleaned like the training text, but by itself: what it holds depends on the file and the
    settings alone, so that several runs on different text can be judged on the very same documents.
    """
    if config.validation is None:
        return None
    path = Path(config.validation)
    if path.name == "validation" and is_prepared(path.parent):  # another corpus' held-out part
        path = path.with_suffix(".parquet")
    if config.public_validation is None:
        return _opened(path, config)
    from tightlip.corpus.public_text import open_public  # which reads prepared corpora itself

    return open_public(path, **_columns(config))


def _already_there(out: Path, identity: dict[str, Any]) -> PreparedCorpus:
    if not is_prepared(out):
        raise UsageError(f"{out} exists and is no prepared corpus. Choose another --out.")
    record = files.read_json(out / "prepared.json")
    # A folder from before a setting existed was made as its default says.
    record["settings"] = asdict(PrepareConfig()) | record["settings"]
    # Held-out text is known by its text: the file may have moved since.
    same_text = record.get("validation_fingerprint") == identity["validation_fingerprint"]
    for name in ("validation", "public_validation"):
        if same_text and record["settings"][name] and identity["settings"][name]:
            record["settings"][name] = identity["settings"][name]
    if {name: record.get(name) for name in identity} == identity:
        return open_prepared(checked_whole(out))
    asked, there = identity["settings"], record["settings"]
    changed = [name for name, value in asked.items() if there.get(name) != value]
    what = "another source, tokenizer or chat template"
    if changed:
        what = f"other settings ({', '.join(changed)})"
    if not changed and not same_text:
        what = f"other text in {identity['settings']['validation']}"
    raise UsageError(f"{out} exists with {what}. Choose another --out, or delete it first.")


def _vocabulary_facts(config: PrepareConfig, marks: set[str]) -> dict[str, Any]:
    """Whether the words were learnt from this text, or other text with one of its `marks`, and
    what was released of it."""
    if config.tokenizer is None:
        release = config.release()
        releases = [] if release is None else [release.record()]
        return {"releases": releases, "learnt_vocabulary": not releases}
    given = history.words_given_by(Path(config.tokenizer))
    handed_on = map(Path, given["words_from"])
    made_in = next((each for each in handed_on if marks & history.marks_of(each)), None)
    if made_in is None:
        return {"releases": [], "learnt_vocabulary": False, **given}
    record = files.read_json(made_in / "prepared.json")
    releases = record.get("releases", [])
    return {"releases": releases, "learnt_vocabulary": _learnt_vocabulary(record), **given}


def _write_documents(
    corpus: Corpus, held_out: Corpus | None, folder: Path, config: PrepareConfig, metadata: Metadata
) -> dict[str, Any]:
    """train.parquet and validation.parquet; returns what is known before tokenising."""
    cleaned, held = folder / "cleaned.parquet", folder / "validation.parquet"
    cleaner, types, users = _write_cleaned(corpus, cleaned, config)
    per_user = cleaner.documents_per_user
    splitter = splitter_for(per_user, config)
    with (
        TableWriter(folder / "train.parquet", types, metadata, users=users) as train,
        TableWriter(held, types, metadata, users=users) as rest,
    ):
        for batch in open_corpus(cleaned).batches():
            out = list(map(splitter.is_held_out, batch.users, batch.texts))
            train.write(batch, [not is_out for is_out in out])
            rest.write(batch, out)
    cleaned.unlink()
    check_split(train.num_rows, rest.num_rows, per_user, config)
    if config.split == "none":
        held.unlink()
    statistics = cleaner.statistics(corpus.num_skipped)
    if held_out is not None:
        # By itself: what it holds depends on no text that is trained on.
        cleaner, *_ = _write_cleaned(held_out, held, config, " validation")
        statistics["validation_source"] = cleaner.statistics(held_out.num_skipped)
    return statistics


def _write_cleaned(
    corpus: Corpus, path: Path, config: PrepareConfig, part: str = ""
) -> tuple[Cleaner, dict[str, Any], Any]:
    """What is left of a corpus; returns who cleaned it, and the further columns and the users' as
    stored."""
    cleaner = Cleaner(deduplicate=config.deduplicate, scrub=config.scrub, names=config.names)
    types = AttributeTypes()
    # Read everything once, so that a bad row is reported before any long work.
    with task(f"Checking{part}", None) as bar:
        for batch in corpus.batches():
            types.add(batch)
            bar.advance(len(batch))
    check_owners(types.has_co_owners, config)
    with (
        TableWriter(path, types.by_column, users=types.users) as table,
        task(f"Cleaning{part}", types.num_documents) as bar,
    ):
        for batch in corpus.batches():
            table.write(cleaner.clean(batch))
            bar.advance(len(batch))
    if not cleaner.documents_per_user:
        raise UsageError(f"Nothing of {corpus.name} is left after cleaning.")
    return cleaner, table.stored_types, types.users


def _save_tokenizer(folder: Path, given: Any, config: PrepareConfig) -> Any:
    """The tokenizer as it will be read later, which is what the tokens must come from."""
    tokenizer = given or _built_tokenizer(open_corpus(folder / "train.parquet"), config)
    if config.chat_template is not None:  # the model will be asked in the way that it was taught
        tokenizer.chat_template = template_of(tokenizer, config)
    tokenizer.save_pretrained(folder / "tokenizer")
    return saved_tokenizer(str(folder / "tokenizer"))


def _built_tokenizer(corpus: Corpus, config: PrepareConfig) -> Any:
    size = config.vocabulary_size
    if (release := config.release()) is not None:
        return build_private_tokenizer(corpus, release, size=size)
    return build_tokenizer(corpus, kind=config.vocabulary, size=size, min_users=config.min_users)


def _write_tokens(folder: Path, tokenizer: Any, config: PrepareConfig) -> dict[str, Any]:
    splits: dict[str, Any] = {}
    warnings: list[str] = []
    for split in ("train", "validation"):
        if (folder / f"{split}.parquet").exists():
            if not (folder / split).exists():  # as those of chats do
                batches = open_corpus(folder / f"{split}.parquet").batches()
                what = f"Tokenising {split}"
                tokenize_documents(batches, tokenizer, folder / split, description=what)
            splits[split] = open_tokenized(folder / split).statistics(tokenizer.unk_token_id)
            warnings += _warnings(split, splits[split], tokenizer.unk_token, config)
    num_tokens = sum(split["tokens"] for split in splits.values())
    num_unknown = sum(split["unknown_tokens"] for split in splits.values())
    return {
        "warnings": warnings,
        **splits,
        "tokens": num_tokens,
        "unknown_share": num_unknown / max(num_tokens, 1),
    }


def _warnings(
    split: str, statistics: dict[str, Any], unknown: str, config: PrepareConfig
) -> list[str]:
    """Of tokens that the tokenizer does not know; none known in training is an error."""
    num_tokens, share = statistics["tokens"], statistics["unknown_share"]
    if not num_tokens:
        return [f"{split} holds no tokens: every document is empty."]
    if (noise := config.vocabulary_noise) is not None:
        advice = (
            f"too few users wrote the same words for vocabulary_noise={noise}. Give a public --tokenizer, or "
            "charge for another vocabulary with less noise"
        )
    elif config.tokenizer:
        advice = f"tokenizer={config.tokenizer!r} does not fit this text; choose the model's own or build one here"
    else:
        advice = "the vocabulary is too small for this text; raise --vocabulary-size or lower --min-users"
    # With noise never an error: whoever draws again until a draw pleases releases more than is charged.
    if split == "train" and noise is None and num_tokens == statistics["unknown_tokens"]:
        raise UsageError(f"All {num_tokens} tokens of {split} are {unknown}: {advice}.")
    return [f"{share:.0%} of {split}'s tokens are {unknown}: {advice}."] if share > 0.5 else []


@takes(PrepareConfig)
def prepare(corpus: Any, out: str | Path, **settings: Any) -> PreparedCorpus:
    """Read, check, clean, split and tokenise a corpus."""
    return prepare_corpus(corpus, Path(out), PrepareConfig(**settings))
