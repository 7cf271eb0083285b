"""A corpus as a stream of documents with their users, whatever file it lies in.

Parquet, JSON Lines (plain, .gz, .zst), CSV, directories that `datasets` saved,
directories of such files, files that a pattern names, any of these on an object store, or a
table already in memory. Of one file only one batch is held as Python objects at a time; several
are read ahead, a few batches of each.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

import pyarrow as pa

from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import digest_of_files, store_address
from tightlip.core.stores import AT_ONCE, place_of
from tightlip.corpus import formats, owners
from tightlip.corpus.conversations import Document, columns_read, documents_of, format_of
from tightlip.corpus.formats import MAX_BATCH_BYTES, MAX_BATCH_ROWS, Columns, Fault, Row
from tightlip.corpus.history import history_of
from tightlip.corpus.prepare_config import ColumnSettings, TextSettings
from tightlip.corpus.tables import DocumentBatch, row_size

History = Sequence[dict[str, Any]]
_KINDS = ".parquet, .jsonl, .jsonl.gz, .jsonl.zst, .csv or a directory saved by datasets"


@dataclass(frozen=True)
class Part:
    """One file (or table) of a corpus: its name in errors, and its rows, one or several at a time."""

    name: str
    chunks: Callable[[], Iterator[tuple[int, Row | Columns]]]
    file: formats.File | None = None
    empty_is_null: bool = False  # CSV cannot write a null; nobody's name is empty

    def rows(self) -> Iterator[tuple[int, Row]]:
        return formats.one_by_one(self.chunks())

    def row(self, number: int) -> str:
        """What a row is called in errors."""
        return f"{self.name}, row {number}"


@dataclass(frozen=True)
class RawDocument:
    """A document before it is a text, with who wrote it and where it stands."""

    user: str
    where: str
    document: Document
    beside: dict[str, Any]  # the row's further columns


class Corpus:
    """Documents that can be streamed as often as wanted.

    Holds:
        same_again: every pass gives the same documents in the same order.
        named: an unusable row is an error with its file and row number.
        counted: with `bad_rows="skip"` such rows are counted in `num_skipped`.
    """

    def __init__(
        self, name: str, parts: list[Part], columns: ColumnSettings, *, history: History = ()
    ) -> None:
        self._user_column, self._text_column = columns.user_column, columns.text_column
        self._bad_rows = columns.bad_rows
        told = getattr(columns, "format", "text")
        self._format = None if told == "auto" else told  # as its first row tells
        if self._user_column == self._text_column:
            raise UsageError(
                f"The user column and the text column are both {self._user_column!r}. They must differ."
            )
        self.name = name
        self.history = list(history)  # what the documents came through before: see history.py
        self.num_skipped = 0
        self._first_fault = ""
        self._parts = parts

    @property
    def format(self) -> str:
        """What its rows are; see `conversations.py`."""
        if self._format is None:
            first = next(self.rows(), {})
            self._format = format_of(first, self._text_column) or "text"
            others = {name: None for name in first if name != self._text_column}
            if self._format == "text" and (other := format_of(others, self._text_column)):
                raise UsageError(
                    f"{self.name} has a column {self._text_column!r} and the columns of {other} too, and only one of them was "
                    f"trained on. Say which: --format text, or --format {other}"
                )
        return self._format

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows that can be read, as they are."""
        rows = (row for part in self._parts for _, row in part.rows())
        return (row for row in rows if isinstance(row, dict))

    def raw_documents(self) -> Iterator[RawDocument]:
        """All documents as their rows have them."""
        return self._usable(self._documents_of)

    def _usable(
        self,
        read: Callable[[Part, int, Any], list[Any] | Fault],
        read_whole: Callable[[Columns], Any] = lambda columns: None,
    ) -> Iterator[Any]:
        """What `read` makes of each row; those of which it makes nothing are refused or counted. Rows of
        which `read_whole` makes something together are not looked at one by one."""
        self.num_skipped, self._first_fault, num_read = 0, "", 0
        for part, first, chunk in _in_order(self._parts):
            whole = read_whole(chunk) if isinstance(chunk, Columns) else None
            if whole is not None:
                num_read += len(whole)
                yield whole
                continue
            for number, row in formats.one_by_one([(first, chunk)]):
                found = row if isinstance(row, Fault) else read(part, number, row)
                if isinstance(found, Fault):
                    self._refuse_or_count(part, number, found)
                else:
                    num_read += len(found)
                    yield from found
        if not num_read:
            raise UsageError(self._nothing_here())

    def _documents_of(
        self, part: Part, number: int, row: dict[str, Any]
    ) -> list[RawDocument] | Fault:
        where, column = part.row(number), self._user_column
        if fault := owners.user_fault(row, column, where, is_csv=part.empty_is_null):
            return fault
        found = documents_of(row, self.format, self._text_column)
        if isinstance(found, Fault):
            return found
        own = {column, *columns_read(self.format, self._text_column)}
        beside = {name: value for name, value in row.items() if name not in own}
        return [RawDocument(row[column], where, document, beside) for document in found]

    def columns_beside(self) -> Iterator[dict[str, Any]]:
        """Of each document the columns that are neither its user nor its text."""
        if self.format != "text":
            yield from (document.beside for document in self.raw_documents())
            return
        for batch in self.batches():
            for place in range(len(batch)):
                yield {name: values[place] for name, values in batch.attributes.items()}

    def batches(self) -> Iterator[DocumentBatch]:
        """All documents, at most 1,000 and about 8 MB at a time; a longer one comes alone."""
        if self.format != "text":
            raise UsageError(
                f"{self.name} holds {self.format}, and this reads plain text. Only measures of a model make a text of chats, "
                "by the model's own template."
            )
        pending: list[dict[str, Any]] = []
        num_bytes, columns = 0, set[str]()
        for row in self._usable(self._checked, self._plain):
            is_batch = isinstance(row, DocumentBatch)
            size = 0 if is_batch else row_size(row)
            is_full = num_bytes + size > MAX_BATCH_BYTES or len(pending) == MAX_BATCH_ROWS
            if pending and (is_batch or is_full):
                yield self._batch(pending)
                pending, num_bytes = [], 0
            if is_batch:
                yield row
                continue
            columns.update(row)
            if len(columns) > formats.MAX_COLUMNS:
                raise UsageError(
                    f"{self.name} {formats.too_many_columns(len(columns))}: its rows have keys of their own. "
                    "Put what differs into one column, or leave it out."
                )
            pending.append(row)
            num_bytes += size
        if pending:
            yield self._batch(pending)

    def fingerprint(self) -> str:
        """SHA-256 of the files, or of the rows of a source in memory."""
        if files := [part.file for part in self._parts if part.file is not None]:
            return digest_of_files(files)
        digest = sha256()
        for part in self._parts:
            for _, row in part.rows():
                digest.update(repr(row).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def _refuse_or_count(self, part: Part, number: int, fault: Fault) -> None:
        line = f"{part.row(number)} {fault.because}."
        if self._bad_rows == "error":
            raise UsageError(f"{line} Fix it, or skip and count such rows: --bad-rows skip")
        self._first_fault = self._first_fault or line
        self.num_skipped += 1

    def _checked(
        self, part: Part, number: int, row: dict[str, Any]
    ) -> list[dict[str, Any]] | Fault:
        """The row, its user and text plain strings, or what is wrong with it."""
        where, is_csv = part.row(number), part.empty_is_null
        fault = owners.user_fault(row, self._user_column, where, is_csv=is_csv)
        return fault or owners.text_fault(row, self._text_column, where, is_csv=is_csv) or [row]

    def _plain(self, columns: Columns) -> DocumentBatch | None:
        """Rows of which every user and text is a string, and whatever else can be read."""
        by_name = dict(zip(columns.names, columns.values, strict=True))
        users, texts = (by_name.pop(n, [None]) for n in (self._user_column, self._text_column))
        kinds = {*map(type, users), *map(type, texts)}
        is_plain = kinds == {str} and len(by_name) < formats.MAX_COLUMNS
        if not is_plain or any(Fault in {*map(type, each)} for each in by_name.values()):
            return None
        return DocumentBatch(users=users, texts=texts, attributes=by_name)

    def _batch(self, rows: list[dict[str, Any]]) -> DocumentBatch:
        users = [row.pop(self._user_column) for row in rows]
        return DocumentBatch.of(users, [row.pop(self._text_column) for row in rows], rows)

    def _nothing_here(self) -> str:
        if not self.num_skipped:
            return f"{self.name} holds no documents. Give a file with at least one row."
        return (
            f"{self.name} holds no documents: all {self.num_skipped} rows were skipped. "
            f"The first: {self._first_fault}"
        )


def open_corpus(source: Any, **settings: Any) -> Corpus:
    """The corpus in a file, a directory, a table, a data frame or a list of rows.

    `settings` are those of ColumnSettings.
    """
    columns = TextSettings(**{"format": "text", **settings})
    history = history_of(source)
    if isinstance(source, str | Path):
        files = _files_read(source)
        for file in files:
            there = checked(file) if isinstance(file, Path) else file
            schema = formats.columns_of(there) if file.stat().st_size else None
            if schema is not None:
                owners.check_columns(str(file), schema, columns)
        name, parts = store_address(source) or str(source), [_file_part(file) for file in files]
    else:
        name, parts = _in_memory(source, columns)
    return Corpus(name, parts, columns, history=history)


def _file_part(file: formats.File) -> Part:
    chunks = lambda: formats.chunks_of(file) if file.stat().st_size else iter(())  # noqa: E731
    return Part(str(file), chunks, file, empty_is_null=formats.kind_of(file) == "csv")


def _files_read(source: str | Path) -> list[formats.File]:
    """Which of the files at a path or an address are the corpus, in their order."""
    place, path = place_of(source), Path(source)
    if place is None and path.is_dir():
        saved = formats.saved_dataset_files(path)
        there = [file for file in path.iterdir() if file.is_file()]
        return _files_in(path, [*there]) if saved is None else [*saved]
    if not (files := formats.files_of(source)):
        raise UsageError(f"{place or path} does not exist. Give a corpus: {_KINDS}.")
    if place is not None and str(files[0].parent) == str(place):
        return _files_in(place, [file for file in files if str(file.parent) == str(place)])
    if odd := [file for file in files if formats.kind_of(file) in (None, "arrow")]:
        raise UsageError(f"{odd[0]} has no ending that names its format. Readable: {_KINDS}.")
    return _of_one_kind(place or path, files)


def _files_in(folder: Any, there: list[formats.File]) -> list[formats.File]:
    names = {file.name for file in there}
    if "prepared.json" in names:
        return [file for file in there if file.name == "train.parquet"]
    if {"state.json", "dataset_info.json"} <= names:
        raise UsageError(
            f"{folder} was saved by datasets, which is read from a local disk only. Copy it there, or write Parquet: to_parquet."
        )
    visible = [file for file in there if file.name[0] not in "._"]
    files = sorted(file for file in visible if formats.kind_of(file) not in (None, "arrow"))
    if not files:
        raise UsageError(f"{folder} holds no corpus file. Readable: {_KINDS}.")
    return _of_one_kind(folder, files)


def _of_one_kind(source: Any, files: list[formats.File]) -> list[formats.File]:
    kinds = sorted({str(formats.kind_of(file)) for file in files})
    if len(kinds) > 1:
        raise UsageError(
            f"{source} mixes files of different kinds ({', '.join(kinds)}). Name one file, or keep one kind."
        )
    return files


def _in_order(parts: Sequence[Part]) -> Iterator[tuple[Part, int, Row | Columns]]:
    """Every row of every part, alone or with others, one part after the other; the next ones are read meanwhile."""
    if not parts[1:]:
        yield from ((part, *each) for part in parts for each in part.chunks())
        return
    waiting, over, left = deque[tuple[Part, Queue]](), Event(), iter(parts)
    try:
        while True:
            for part in islice(left, AT_ONCE - len(waiting)):
                waiting.append((part, Queue(2)))
                Thread(target=_read_ahead, args=(*waiting[-1], over), daemon=True).start()
            if not waiting:
                return
            part, queue = waiting.popleft()
            while isinstance(rows := queue.get(), list):
                yield from ((part, number, row) for number, row in rows)
            if rows is not None:
                raise rows
    finally:
        over.set()


def _read_ahead(part: Part, queue: Queue, over: Event) -> None:
    """Put a part's rows into the queue, a list of them at a time, then None or what went wrong."""

    def put(what: Any) -> None:
        while not over.is_set():
            with suppress(Full):
                queue.put(what, timeout=0.1)
                return

    try:
        rows, size = list[tuple[int, Row | Columns]](), 0
        for number, row in part.chunks():
            rows.append((number, row))
            size += row_size(row) if isinstance(row, dict) else 1
            if size > MAX_BATCH_BYTES or len(rows) == MAX_BATCH_ROWS or isinstance(row, Columns):
                put(rows)
                rows, size = [], 0
            if over.is_set():
                return
        put(rows)
        put(None)
    except BaseException as error:
        put(error)


def _in_memory(source: Any, columns: TextSettings) -> tuple[str, list[Part]]:
    if isinstance(source, list | tuple):
        name = "the list given"
        rows = lambda: _listed_rows(source, columns.user_column, columns.text_column)  # noqa: E731
        return name, [Part(name, rows)]
    name = "the table given"
    if type(source).__name__ == "DataFrame" and hasattr(source, "to_parquet"):
        name, source = "the data frame given", _from_pandas(source)
    if isinstance(source, dict) and source and all(map(_is_dataset, source.values())):
        only, *others = source.values()
        if not others:
            return _in_memory(only, columns)
        raise UsageError(
            f"The dataset given holds {len(source)} splits: {', '.join(map(str, source))}. Give one: dataset[{next(iter(source))!r}]"
        )
    if _is_dataset(source):
        batches = source.with_format("arrow").iter
        name = "the dataset given"
        owners.check_columns(name, source.features.arrow_schema, columns)
        tables = lambda: (b for t in batches(MAX_BATCH_ROWS) for b in t.to_batches())  # noqa: E731
        return name, [Part(name, lambda: formats.table_chunks(tables()))]
    if not isinstance(source, pa.Table):
        raise UsageError(
            f"A corpus cannot be read from a {type(source).__name__}. Give a path, a pyarrow Table, "
            "a pandas DataFrame, a datasets.Dataset, or a list of dicts or (user, text) pairs."
        )
    owners.check_columns(name, source.schema, columns)
    return name, [Part(name, lambda: formats.table_chunks(iter(source.to_batches())))]


def _is_dataset(source: Any) -> bool:
    """Whether it is a `datasets.Dataset`, by its look: the library need not be there."""
    return all(hasattr(source, name) for name in ("with_format", "features", "iter"))


def _from_pandas(frame: Any) -> pa.Table:
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except pa.ArrowException as error:
        raise UsageError(
            f"The data frame given has a column of mixed types ({error}). "
            "Give it one type: frame[column].astype(str)"
        ) from error


def _listed_rows(rows: Iterable[Any], user: str, text: str) -> Iterator[tuple[int, Row]]:
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            yield number, dict(row)
        elif isinstance(row, list | tuple) and len(row) == 2:
            yield number, {user: row[0], text: row[1]}
        else:
            yield number, Fault("is neither a dict nor a (user, text) pair")
