"""Chats, prompts and rows that are cut off as a prepared corpus: rendered, split, tokenised.

As an audit reads them: by the same template, with the same begin token, and of each token whether
it is trained on. The tables hold the rendered texts and, beside each, what was spoken in it.
"""

from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from itertools import compress, islice
from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.progress import task
from tightlip.corpus.cleaning import Cleaner
from tightlip.corpus.formats import File, parquet_files, rows_of
from tightlip.corpus.prepare_config import PrepareConfig, check_owners, check_split, splitter_for
from tightlip.corpus.readers import Corpus
from tightlip.corpus.rendered import SPOKEN, RolesReader, RoleTokens, template_of
from tightlip.corpus.tables import AttributeTypes, DocumentBatch, Metadata, TableWriter
from tightlip.corpus.tokens import write_role_tokens

_AT_ONCE = 500
_RENDERED = {"text", SPOKEN}
_REFUSED = {
    "tokens": "whose text nobody knows, and runs on one text are told apart by it. Give the text or the messages",
    "preference": "of which one answer is not to be learnt. Give what is to be learnt as messages or as prompt and completion",
}


def is_of_chats(corpus: Corpus, given: Any, config: PrepareConfig) -> bool:
    """Whether a row is more, or less, than its text: the way that `tightlip audit` decides it. What
    cannot be prepared is refused; `given` is the tokenizer, if there is one."""
    if corpus.format == "text":
        check_plain(corpus, config.trained_on)
    if corpus.format == "text" and config.max_length is None:
        return False
    _check_chats(corpus, given, config)
    return True


def check_plain(corpus: Corpus, trained_on: str | None) -> None:
    """Refuse what only rows of chats, prompts or tokens can answer."""
    if trained_on not in (None, "auto", "all"):
        raise UsageError(
            f"trained_on={trained_on!r} is about rows of chats, prompts or tokens, and {corpus.name} is plain text, all of "
            "which is trained on. Leave it out, or say what the rows are: --format"
        )


def template_fingerprint(corpus: Corpus, given: Any, config: PrepareConfig) -> str | None:
    """SHA-256 of the template that rows are rendered by; None where there is none."""
    if corpus.format == "text" or given is None:
        return None
    own = getattr(given, "chat_template", None)
    template = own if config.chat_template is None else template_of(given, config)
    return sha256(str(template).encode("utf-8", "replace")).hexdigest()


def refuse_rendered(source: Any) -> None:
    """Refuse the table of a corpus prepared from chats: a template's marks are text in it."""
    files = parquet_files(source) if isinstance(source, str | Path) else {}
    if any(_is_rendered(file) for file, schema in files.items() if {*schema.names} >= _RENDERED):
        raise UsageError(
            f"{source} was prepared from chats: its table holds the marks of their template too, and does not tell what of them is "
            "trained on. Give the prepared folder, of what is held out its folder validation; or the chats themselves."
        )


def _is_rendered(file: File) -> bool:
    """Whether texts have what is spoken in them beside them, character by character."""
    _, row = next(rows_of(file), (0, None))
    return isinstance(row, dict) and len({len(str(row[name])) for name in _RENDERED}) == 1


def _check_chats(corpus: Corpus, given: Any, config: PrepareConfig) -> None:
    """Refuse what cannot be done to rows that a template makes a text of."""
    if corpus.format in _REFUSED:
        raise UsageError(f"{corpus.name} holds {corpus.format}, {_REFUSED[corpus.format]}.")
    if given is None:
        raise UsageError(
            f"{corpus.name} holds {corpus.format}, and how that becomes tokens a model's tokenizer says. Give --model DIR or "
            "--tokenizer DIR."
        )
    if config.deduplicate != "none" or config.scrub:
        name = "scrub" if config.scrub else "deduplicate"
        raise UsageError(
            f"{name}={getattr(config, name)} works on plain text, and would take words out of the template's place in "
            f"{corpus.format}. Clean the rows before, and leave it out."
        )


def write_chats(
    corpus: Corpus,
    held_out: Corpus | None,
    tokenizer: Any,
    folder: Path,
    config: PrepareConfig,
    metadata: Metadata,
) -> dict[str, Any]:
    """Tables and tokens of training and of validation, if any; returns what was read."""
    rows = _Rows(corpus, tokenizer, config)
    num_kept = rows.write(folder / "train", metadata, held_out=False)
    statistics = rows.statistics()
    num_held = 0
    if config.split != "none":
        num_held = rows.write(folder / "validation", metadata, held_out=True)
    check_split(num_kept, num_held, rows.per_user, config)
    if held_out is not None:
        # By itself: what it holds depends on no text that is trained on.
        rows = _Rows(held_out, tokenizer, config)
        rows.write(folder / "validation", None, held_out=False)
        statistics["validation_source"] = rows.statistics()
    return statistics


class _Rows:
    """A corpus of chats on its way into tables and tokens; a bad row is reported before any long work."""

    def __init__(self, corpus: Corpus, tokenizer: Any, config: PrepareConfig) -> None:
        self.corpus, self.tokenizer, self.config = corpus, tokenizer, config
        self.per_user, self._types = Counter[str](), AttributeTypes()
        documents = corpus.raw_documents()
        with task("Checking", None) as bar:
            while some := list(islice(documents, _AT_ONCE)):
                users = [row.user for row in some]
                self.per_user.update(users)
                beside = [row.beside | {SPOKEN: ""} for row in some]
                self._types.add(DocumentBatch.of(users, [""] * len(some), beside))
                bar.advance(len(some))
        check_owners(self._types.has_co_owners, config)

    def write(self, where: Path, metadata: Metadata, *, held_out: bool) -> int:
        """The tokens of all documents that are held out, or that are not, into the folder `where`,
        and beside it their table; returns how many."""
        # One that cleans nothing: it counts what was read.
        self._cleaner = Cleaner(deduplicate="none", scrub=False, names=False)
        reader = RolesReader(self.tokenizer, self.config)
        types, path = self._types, where.with_suffix(".parquet")
        with TableWriter(path, types.by_column, metadata, users=types.users) as table:
            documents = self._noted(reader.documents(self.corpus), table, held_out)
            write_role_tokens(documents, reader, self.tokenizer, where)
        return table.num_rows

    def _noted(
        self, documents: Iterator[RoleTokens], table: TableWriter, held_out: bool
    ) -> Iterator[RoleTokens]:
        splitter = splitter_for(self.per_user, self.config)
        while some := list(islice(documents, _AT_ONCE)):
            users, texts = [one.user for one in some], [one.content.decode() for one in some]
            beside = [one.beside | {SPOKEN: one.spoken} for one in some]
            batch = DocumentBatch.of(users, texts, beside)
            self._cleaner.clean(batch)
            kept = [out == held_out for out in map(splitter.is_held_out, users, texts)]
            table.write(batch, kept)
            yield from compress(some, kept)

    def statistics(self) -> dict[str, Any]:
        return self._cleaner.statistics(self.corpus.num_skipped)
