"""A corpus as a stream of documents with their users, whatever file it lies in.

Parquet, JSON Lines (plain, .gz, .zst), CSV, directories that `datasets` saved,
directories of such files, files that a pattern names, any of these on an object store, or a
table already in memory. Of one file only one batch is held as Python objects at a time; several
are read ahead, a few batches of each.
"""

import difflib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import compress, islice
from numbers import Integral
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

import pyarrow as pa

from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import digest_of_files, store_address
from tightlip.core.stores import AT_ONCE, place_of
from tightlip.corpus.conversations import Document, columns_read, documents_of, format_of
from tightlip.corpus.formats import (
    MAX_BATCH_BYTES,
    MAX_BATCH_ROWS,
    MAX_COLUMNS,
    NOT_UTF8,
    Columns,
    Fault,
    File,
    Row,
    chunks_of,
    columns_of,
    files_of,
    kind_of,
    one_by_one,
    saved_dataset_files,
    table_chunks,
    too_many_columns,
)
from tightlip.corpus.history import history_of
from tightlip.corpus.owners import Writer
from tightlip.corpus.prepare_config import ColumnSettings, TextSettings

_KINDS = ".parquet, .jsonl, .jsonl.gz, .jsonl.zst, .csv or a directory saved by datasets"


@dataclass(frozen=True, kw_only=True)
class DocumentBatch:
    """Some documents in order: who wrote each, its text, and its further columns."""

    users: list[str]
    texts: list[str]
    attributes: dict[str, list] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.users)

    def where(self, keep: Sequence[bool]) -> "DocumentBatch":
        """Those of the documents where `keep` is true."""
        return DocumentBatch(
            users=list(compress(self.users, keep)),
            texts=list(compress(self.texts, keep)),
            attributes={n: list(compress(v, keep)) for n, v in self.attributes.items()},
        )


@dataclass(frozen=True)
class Part:
    """One file (or table) of a corpus: its name in errors, and its rows, one or several at a time."""

    name: str
    chunks: Callable[[], Iterator[tuple[int, Row | Columns]]]
    file: File | None = None
    empty_is_null: bool = False  # CSV cannot write a null; nobody's name is empty

    def rows(self) -> Iterator[tuple[int, Row]]:
        return one_by_one(self.chunks())


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
        self,
        name: str,
        parts: list[Part],
        columns: ColumnSettings,
        *,
        history: Sequence[dict[str, Any]] = (),
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
            for number, row in one_by_one([(first, chunk)]):
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
        if fault := self._user_fault(part, number, row):
            return fault
        found = documents_of(row, self.format, self._text_column)
        if isinstance(found, Fault):
            return found
        user, where = row[self._user_column], f"{part.name}, row {number}"
        own = {self._user_column, *columns_read(self.format, self._text_column)}
        beside = {name: value for name, value in row.items() if name not in own}
        return [RawDocument(user, where, document, beside) for document in found]

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
            if isinstance(row, DocumentBatch):
                if pending:
                    yield self._batch(pending)
                    pending, num_bytes = [], 0
                yield row
                continue
            size = row_size(row)
            columns.update(row)
            if len(columns) > MAX_COLUMNS:
                raise UsageError(
                    f"{self.name} {too_many_columns(len(columns))}: its rows have keys of their own. "
                    "Put what differs into one column, or leave it out."
                )
            if pending and (num_bytes + size > MAX_BATCH_BYTES or len(pending) == MAX_BATCH_ROWS):
                yield self._batch(pending)
                pending, num_bytes = [], 0
            pending.append(row)
            num_bytes += size
        if pending:
            yield self._batch(pending)

    def fingerprint(self) -> str:
        """SHA-256 of the files, or of the rows of a source in memory."""
        files = [part.file for part in self._parts if part.file is not None]
        if files:
            return digest_of_files(files)
        digest = sha256()
        for part in self._parts:
            for _, row in part.rows():
                digest.update(repr(row).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def _refuse_or_count(self, part: Part, number: int, fault: Fault) -> None:
        line = f"{part.name}, row {number} {fault.because}."
        if self._bad_rows == "error":
            raise UsageError(f"{line} Fix it, or skip and count such rows: --bad-rows skip")
        self._first_fault = self._first_fault or line
        self.num_skipped += 1

    def _checked(
        self, part: Part, number: int, row: dict[str, Any]
    ) -> list[dict[str, Any]] | Fault:
        """The row, its user and text plain strings, or what is wrong with it."""
        if fault := self._user_fault(part, number, row):
            return fault
        name = self._text_column
        if row.get(name) is None:
            return _missing(name, row, part)
        if not isinstance(row[name], str | Fault):
            row[name] = _text(row[name], name, f"{part.name}, row {number}")
        return _not_utf8(row) or [row]

    def _plain(self, columns: Columns) -> DocumentBatch | None:
        """Rows of which every user and text is a string, and whatever else can be read."""
        by_name = dict(zip(columns.names, columns.values, strict=True))
        users, texts = (by_name.pop(n, [None]) for n in (self._user_column, self._text_column))
        is_plain = {*map(type, users), *map(type, texts)} == {str} and len(by_name) < MAX_COLUMNS
        if not is_plain or any(Fault in {*map(type, each)} for each in by_name.values()):
            return None
        return DocumentBatch(users=users, texts=texts, attributes=by_name)

    def _user_fault(self, part: Part, number: int, row: dict[str, Any]) -> Fault | None:
        """What is wrong with a row's user, which becomes a plain string."""
        where, name = f"{part.name}, row {number}", self._user_column
        if row.get(name) is None:
            return _missing(name, row, part)
        if isinstance(row[name], list | tuple):
            row[name] = _owners(row[name], name, where)
        if not isinstance(row[name], str | Fault):
            row[name] = _user(row[name], name, where)
        if isinstance(row[name], Fault):
            return row[name]
        if part.empty_is_null and not row[self._user_column]:
            return Fault(f"has nothing in column {self._user_column!r}")
        if part.empty_is_null and re.fullmatch(r"-?\d+\.0", row[self._user_column]):
            raise _float_users(where, self._user_column)  # CSV is all text
        return _not_utf8(row)

    def _batch(self, rows: list[dict[str, Any]]) -> DocumentBatch:
        users = [row.pop(self._user_column) for row in rows]
        texts = [row.pop(self._text_column) for row in rows]
        names = dict.fromkeys(name for row in rows for name in row)
        attributes = {name: [row.get(name) for row in rows] for name in names}
        return DocumentBatch(users=users, texts=texts, attributes=attributes)

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
            schema = columns_of(there) if file.stat().st_size else None
            if schema is not None:
                _check_columns(str(file), schema, columns)
        name, parts = store_address(source) or str(source), [_file_part(file) for file in files]
    else:
        name, parts = _in_memory(source, columns)
    return Corpus(name, parts, columns, history=history)


def _file_part(file: File) -> Part:
    chunks = lambda: chunks_of(file) if file.stat().st_size else iter(())  # noqa: E731
    return Part(str(file), chunks, file, empty_is_null=kind_of(file) == "csv")


def _files_read(source: str | Path) -> list[File]:
    """Which of the files at a path or an address are the corpus, in their order."""
    place, path = place_of(source), Path(source)
    if place is None and path.is_dir():
        saved = saved_dataset_files(path)
        there = [file for file in path.iterdir() if file.is_file()]
        return _files_in(path, [*there]) if saved is None else [*saved]
    files = files_of(source)
    if not files:
        raise UsageError(f"{place or path} does not exist. Give a corpus: {_KINDS}.")
    if place is not None and str(files[0].parent) == str(place):
        return _files_in(place, [file for file in files if str(file.parent) == str(place)])
    if odd := [file for file in files if kind_of(file) in (None, "arrow")]:
        raise UsageError(f"{odd[0]} has no ending that names its format. Readable: {_KINDS}.")
    return _of_one_kind(place or path, files)


def _files_in(folder: Any, there: list[File]) -> list[File]:
    names = {file.name for file in there}
    if "prepared.json" in names:
        return [file for file in there if file.name == "train.parquet"]
    if {"state.json", "dataset_info.json"} <= names:
        raise UsageError(
            f"{folder} was saved by datasets, which is read from a local disk only. Copy it there, or write Parquet: to_parquet."
        )
    visible = [file for file in there if file.name[0] not in "._"]
    files = sorted(file for file in visible if kind_of(file) not in (None, "arrow"))
    if not files:
        raise UsageError(f"{folder} holds no corpus file. Readable: {_KINDS}.")
    return _of_one_kind(folder, files)


def _of_one_kind(source: Any, files: list[File]) -> list[File]:
    kinds = sorted({str(kind_of(file)) for file in files})
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
            is_full = size > MAX_BATCH_BYTES or len(rows) == MAX_BATCH_ROWS
            if is_full or isinstance(row, Columns):
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
        _check_columns(name, source.features.arrow_schema, columns)
        chunks = lambda: table_chunks(b for t in batches(MAX_BATCH_ROWS) for b in t.to_batches())  # noqa: E731
        return name, [Part(name, chunks)]
    if not isinstance(source, pa.Table):
        raise UsageError(
            f"A corpus cannot be read from a {type(source).__name__}. Give a path, a pyarrow Table, "
            "a pandas DataFrame, a datasets.Dataset, or a list of dicts or (user, text) pairs."
        )
    _check_columns(name, source.schema, columns)
    table = source
    return name, [Part(name, lambda: table_chunks(iter(table.to_batches())))]


def _is_dataset(source: Any) -> bool:
    """Whether it is a `datasets.Dataset`, by its look: the library need not be there."""
    return (
        hasattr(source, "with_format") and hasattr(source, "features") and hasattr(source, "iter")
    )


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


def _check_columns(where: str, schema: pa.Schema, columns: TextSettings) -> None:
    user_column, text_column = columns.user_column, columns.text_column
    of_chats = columns.format not in ("auto", "text")
    of_chats |= columns.format == "auto" and format_of(schema.names, text_column) is not None
    needed = [("user", user_column), *([] if of_chats else [("text", text_column)])]
    for role, name in needed:
        if name not in schema.names:
            raise UsageError(
                f"{where} has no column {name!r}. {columns_there(schema.names, name)} "
                f"Name it with --{role}-column."
            )
        if schema.names.count(name) > 1:
            raise UsageError(f"{where} has two columns {name!r}. Rename one of them.")
    kind = schema.field(user_column).type
    if pa.types.is_floating(kind):
        raise _float_users(where, user_column)


def _float_users(where: str, column: str) -> UsageError:
    return UsageError(
        f"{where} has floating-point numbers in its user column {column!r}, and 12.0 or 1e16 name nobody safely. pandas "
        "turns an integer column with gaps into floats: use astype('Int64') or astype(str) before saving."
    )


def columns_there(names: Iterable[str], wanted: str = "", *, is_csv: bool = False) -> str:
    """Which columns there are, for whoever gave another name.

    Of CSV only how many: without a header the first line is somebody's text. Nor are names told
    that are none a column usually has: keys of JSON may be anything.
    """
    available = [str(there) for there in names]
    if is_csv:
        return f"It has {len(available)} columns, and its first line must name them."
    usual = [name for name in available if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}", name)]
    others = len(available) - len(usual)
    told = [*usual, *([f"{others} with names that may be text"] if others else [])]
    close = difflib.get_close_matches(wanted, usual, n=1)
    closest = f" Closest: {close[0]}." if close else ""
    return f"Columns there: {', '.join(told) or 'none'}.{closest}"


def _not_utf8(row: dict[str, Any]) -> Fault | None:
    bad = (
        value is NOT_UTF8 or (isinstance(value, str) and not _encodes(value))
        for value in row.values()
    )
    return NOT_UTF8 if any(bad) else None


def _missing(name: str, row: dict[str, Any], part: Part) -> Fault:
    if name in row:
        return Fault(f"has null in column {name!r}")
    there = columns_there(row, name, is_csv=part.empty_is_null)
    return Fault(f"has no column {name!r} ({there[:-1]})")


def _owners(values: Sequence[Any], column: str, where: str) -> str | Fault:
    """The writer of a text with its other owners, or what is wrong with the list of them."""
    if not values:
        return Fault(f"has an empty list of owners in column {column!r}")
    if any(value is None or value == "" for value in values):
        return Fault(f"has null or an empty name among the owners in column {column!r}")
    names = [each if isinstance(each, str) else _user(each, column, where) for each in values]
    if not all(map(_encodes, names)):
        return NOT_UTF8
    if len({*names}) < len(names):
        return Fault(f"names an owner twice in column {column!r}")
    return Writer(names) if names[1:] else names[0]


def _user(value: Any, column: str, where: str) -> str:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        raise _float_users(where, column)
    raise UsageError(
        f"{where} has a {type(value).__name__} in its user column {column!r}. Users are strings or integers, or lists of them."
    )


def _text(value: Any, column: str, where: str) -> str | Fault:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return NOT_UTF8
    raise UsageError(
        f"{where} has a {type(value).__name__} in its text column {column!r}. Texts are strings; "
        "is it another column? --text-column"
    )


def row_size(row: dict[str, Any]) -> int:
    """Characters in all strings of a row, however deep, and one for everything else."""
    size, waiting = 0, list(row.values())
    while waiting:
        value = waiting.pop()
        size += len(value) if isinstance(value, str) else 1
        if isinstance(value, list | dict):
            waiting += value.values() if isinstance(value, dict) else value
    return size


def _encodes(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False
