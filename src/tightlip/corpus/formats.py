"""The rows of each file format, one at a time, numbered from 1.

A row is its values by column, or a `Fault` that says why it cannot be read. What
breaks the file as a whole (truncated, not what its name says) raises `UsageError`.
Row n is the nth line of JSON Lines, the nth record after a CSV's header, the nth
row of anything else.

A small file can unpack to more than the machine has, so sizes are looked at before
anything is held: of a row, of its columns, and of a file against what it unpacks to.
"""

import csv
import glob
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from tightlip.core.errors import UsageError, in_words, short
from tightlip.core.files import read_json
from tightlip.core.stores import AT_ONCE, StoreFile, files_at, place_of

MAX_BATCH_ROWS = 1_000
MAX_BATCH_BYTES = 8_000_000
MAX_ROW_BYTES = 32_000_000  # a library of books; tokenising it may take 80 times as much
MAX_COLUMNS = 10_000
# Text packs 3:1 to 20:1, and the same few lines over and over 100:1.
MAX_RATIO = 1_000
ALWAYS_UNPACKED_BYTES = 100_000_000
_TEXT_KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv"}
_KINDS = _TEXT_KINDS | {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SEPARATORS, _DECODER, _READ_AT_ONCE = re.compile(r"[\s,]*"), json.JSONDecoder(), 1 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # a pair is a character, half a pair is nothing


@dataclass(frozen=True)
class Fault:
    """Why one row, or one value of it, cannot be used."""

    because: str


@dataclass(frozen=True)
class Columns:
    """Some rows that follow each other, by column: of plain text a thousand times as many are read."""

    names: list[str]
    values: list[list[Any]]

    def __len__(self) -> int:
        return len(self.values[0]) if self.values else 0


File = Path | StoreFile
Row = dict[str, Any] | Fault
NOT_UTF8 = Fault("holds bytes that are not UTF-8")


def files_of(source: str | Path) -> list[File]:
    """The file itself, all files of a folder, or those that a pattern names, here or on a store,
    sorted; none where none are."""
    if (place := place_of(source)) is not None:
        return [*files_at(place)]
    path = Path(source)
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    # A name may itself hold brackets.
    found = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
    return sorted(file for file in found if file.is_file())


def kind_of(path: File) -> str | None:
    """'parquet', 'json', 'csv' or 'arrow' by the file's name, None for anything else."""
    *before, last = "", *(suffix.lower() for suffix in Path(path.name).suffixes)
    return _TEXT_KINDS.get(before[-1]) if last in (".gz", ".zst") else _KINDS.get(last)


def parquet_files(source: str | Path) -> dict[File, pa.Schema]:
    """The Parquet files among `files_of` a source with their columns, but for those that turn out to
    be none: whoever reads their rows says so."""

    def known(file: File) -> pa.Schema | None:
        with suppress(UsageError):
            return columns_of(file)
        return None

    files = [file for file in files_of(source) if kind_of(file) == "parquet"]
    with ThreadPoolExecutor(AT_ONCE) as pool:  # a store takes its time for each
        pairs = zip(files, pool.map(known, files), strict=True)
        return {file: schema for file, schema in pairs if schema is not None}


def columns_of(path: File) -> pa.Schema | None:
    """Column names and types where the file states them."""
    return _columns_there(path) if isinstance(path, StoreFile) else _columns_in(path)


def _columns_in(path: File) -> pa.Schema | None:
    if kind_of(path) == "parquet":
        with _reporting(path), _parquet(path) as parquet:
            check_unpacked(path, _unpacked_bytes(parquet.metadata))
            return parquet.schema_arrow
    if kind_of(path) == "arrow":
        with _reporting(path), pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).schema
    return None


_columns_there = lru_cache(4096)(_columns_in)


def rows_of(path: File) -> Iterator[tuple[int, Row]]:
    """Every row of one file with its number."""
    return one_by_one(chunks_of(path))


def one_by_one(chunks: Iterable[tuple[int, Row | Columns]]) -> Iterator[tuple[int, Row]]:
    """Every row of what a file was read as."""
    for number, chunk in chunks:
        if isinstance(chunk, Columns):
            rows = zip(*chunk.values, strict=True)
            yield from enumerate((dict(zip(chunk.names, row, strict=True)) for row in rows), number)
        else:
            yield number, chunk


def chunks_of(path: File) -> Iterator[tuple[int, Row | Columns]]:
    """The rows of one file, one or several at a time, with the number of the first."""
    readers: dict[str | None, Callable[[File], Iterator[tuple[int, Any]]]] = {
        "parquet": _parquet_chunks,
        "json": _json_rows,
        "csv": _csv_rows,
        "arrow": _arrow_chunks,
    }
    with _reporting(path):
        yield from readers[kind_of(path)](path)


@contextmanager
def _reporting(path: File) -> Iterator[None]:
    """Turn what the libraries say about a damaged file into one line about that file."""
    try:
        yield
    except PermissionError as error:
        raise UsageError(f"{path} may not be read: {error.strerror}.") from error
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        if isinstance(path, StoreFile) and type(error) is OSError:
            raise in_words(path, error) from error
        raise UsageError(
            f"{path} cannot be read to its end ({short(error)}). It is damaged, cut off or "
            "not what its name says: fetch or write it again."
        ) from error


def check_unpacked(path: File, num_bytes: int) -> None:
    """Refuse a file that unpacks to far more than text ever does."""
    if num_bytes <= ALWAYS_UNPACKED_BYTES:
        return
    if num_bytes > MAX_RATIO * (packed := path.stat().st_size):
        raise UsageError(
            f"{path} has {packed:,} bytes and unpacks to {num_bytes:,} or more, over {MAX_RATIO:,} times as much: text "
            "does not pack so well, and such a file may fill any machine. If you trust it, unpack it yourself to .jsonl."
        )


def _too_long(name: str) -> UsageError:
    return UsageError(
        f"{name} has a row of more than {MAX_ROW_BYTES:,} bytes, which is more than a document may have. "
        "Write one row per line, cut long documents into shorter ones, and close every quote of a CSV."
    )


def too_many_columns(num_columns: int) -> str:
    return f"has {num_columns:,} columns, and {MAX_COLUMNS:,} is the most"


# Parquet, Arrow and tables


def _parquet(path: File, **how: Any) -> pa.parquet.ParquetFile:
    return pa.parquet.ParquetFile(path if isinstance(path, Path) else path.open(), **how)


def _parquet_chunks(path: File) -> Iterator[tuple[int, Columns]]:
    with _parquet(path) as parquet:
        check_unpacked(path, _unpacked_bytes(parquet.metadata))
        leaves = [parquet.schema.column(n) for n in range(len(parquet.schema))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    # Each text of a dictionary once, however many rows say it.
    with _parquet(path, read_dictionary=texts) as parquet:
        yield from table_chunks(_believable(path, _parquet_batches(parquet)), str(path))


def _parquet_batches(parquet: pa.parquet.ParquetFile) -> Iterator[pa.RecordBatch]:
    for group in range(parquet.num_row_groups):
        about = parquet.metadata.row_group(group)
        num_bytes_per_row = about.total_byte_size / max(about.num_rows, 1)
        size = int(min(MAX_BATCH_ROWS, max(1, MAX_BATCH_BYTES // max(num_bytes_per_row, 1))))
        yield from parquet.iter_batches(size, row_groups=[group])


def _unpacked_bytes(metadata: Any) -> int:
    """What the file says of itself: of repeated values only how many there are, each some bytes."""
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    chunks = [group.column(n) for group in groups for n in range(group.num_columns)]
    return sum(max(chunk.total_uncompressed_size, 4 * chunk.num_values) for chunk in chunks)


def _arrow_chunks(path: File) -> Iterator[tuple[int, Columns]]:
    with pa.memory_map(str(path)) as source:
        yield from table_chunks(_believable(path, pa.ipc.open_stream(source)), str(path))


def _believable(path: File, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    num_bytes = 0.0
    for batch in batches:
        num_bytes += sum(_row_bytes(column).sum() for column in batch.columns)
        check_unpacked(path, int(num_bytes))
        yield batch


def table_chunks(
    batches: Iterator[pa.RecordBatch], name: str = "the table given"
) -> Iterator[tuple[int, Columns]]:
    """Rows of Arrow batches of any size, few of them as Python objects at a time."""
    start = 1
    for batch in batches:
        for first in range(0, len(batch), MAX_BATCH_ROWS):
            for rows in _few_at_a_time(batch.slice(first, MAX_BATCH_ROWS), name):
                yield start, Columns(rows.schema.names, [*map(_column_values, rows.columns)])
                start += len(rows)


def _few_at_a_time(batch: pa.RecordBatch, name: str) -> Iterator[pa.RecordBatch]:
    """The batch in slices of some MAX_BATCH_BYTES when written out; a longer row comes alone."""
    sizes = sum((_row_bytes(column) for column in batch.columns), np.zeros(len(batch)))
    if sizes.max(initial=0) > MAX_ROW_BYTES:
        raise _too_long(name)
    ends = np.cumsum(sizes)
    start = 0
    while start < len(batch):
        most = MAX_BATCH_BYTES + (ends[start - 1] if start else 0)
        end = max(start + 1, int(np.searchsorted(ends, most, "right")))
        yield batch.slice(start, end - start)
        start = end


def _row_bytes(column: pa.Array) -> np.ndarray:
    """Bytes of each value when written out; of numbers on average."""
    if pa.types.is_dictionary(column.type):
        # Those in use only: a dictionary may serve a thousand batches.
        used = pc.dictionary_encode(column.indices, null_encoding="encode")
        return _row_bytes(column.dictionary.take(used.dictionary))[_numbers(used.indices)]
    if hasattr(column, "total_values_length"):
        sizes = pc.binary_length(column)
        return _numbers(sizes.fill_null(0) if sizes.null_count else sizes)
    if pa.types.is_struct(column.type):
        return sum((_row_bytes(part) for part in column.flatten()), np.zeros(len(column)))
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if isinstance(column, pa.ListArray | pa.LargeListArray):  # a map is a list too
        return _list_bytes(column)
    return np.full(len(column), column.nbytes / max(len(column), 1))


def _numbers(column: pa.Array) -> np.ndarray:
    """Whole numbers without nulls. For to_numpy pyarrow imports pandas, 0.4 s of a command's start."""
    return np.from_dlpack(column)


def _list_bytes(column: pa.Array) -> np.ndarray:
    offsets = column.offsets.to_numpy()
    parts = (column.keys, column.items) if pa.types.is_map(column.type) else (column.values,)
    own = [_row_bytes(part.slice(offsets[0], offsets[-1] - offsets[0])) for part in parts]
    return np.diff(np.append(0, np.cumsum(sum(own)))[offsets - offsets[0]])


def _column_values(column: pa.Array) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return NOT_UTF8


# JSON Lines and CSV


class _Unpacked(io.RawIOBase):
    """What a packed file unpacks to, as long as that is believable."""

    def __init__(self, path: File, stream: Any) -> None:
        self._path, self._stream, self._num_bytes = path, stream, 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        size: int = self._stream.readinto(into)
        self._num_bytes += size
        check_unpacked(self._path, self._num_bytes)
        return size

    def close(self) -> None:
        self._stream.close()
        super().close()


def _opened(path: File) -> BinaryIO:
    stream: Any = path.open("rb")
    if path.suffix.lower() == ".gz":
        stream = _Unpacked(path, gzip.GzipFile(fileobj=stream))
    elif path.suffix.lower() == ".zst":
        stream = _Unpacked(path, pa.CompressedInputStream(stream, "zstd"))
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)


class _Lines:
    """The lines of a stream; `held` counts what the row under way takes, and is set back by whoever
    has it whole, so that an endless row is refused and not held."""

    def __init__(self, path: File, stream: Any) -> None:
        self._path, self._stream, self.held = path, stream, 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> Any:
        line = self._stream.readline(MAX_ROW_BYTES + 1 - self.held)
        self.held += len(line)
        if self.held > MAX_ROW_BYTES:
            raise _too_long(str(self._path))
        if not line:
            raise StopIteration
        return line


def _json_rows(path: File) -> Iterator[tuple[int, Row]]:
    with _opened(path) as stream:
        first = stream.peek(4096).removeprefix(_BYTE_ORDER_MARK).lstrip()  # type: ignore[attr-defined]
        if first.startswith(b"["):
            yield from enumerate(_array_rows(path, stream), 1)
            return
        lines = _Lines(path, stream)
        for number, line in enumerate(lines, 1):
            lines.held = 0
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line and not line.isspace():
                yield number, _json_row(line)


def _array_rows(path: File, stream: BinaryIO) -> Iterator[Row]:
    """The elements of one JSON array, of which one is held at a time, and what was read with it."""
    # A byte that is not UTF-8 becomes a lone surrogate, so that its row can be named.
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")
    text, place = reader.read(_READ_AT_ONCE).lstrip(), 1  # behind the bracket
    while True:
        place = _SEPARATORS.match(text, place).end()  # type: ignore[union-attr]
        if text.startswith("]", place):
            return
        try:
            row, place = _DECODER.raw_decode(text, place)
        except RecursionError:
            raise UsageError(
                f"{path} is nested too deeply to be rows. Write one object per line."
            ) from None
        except ValueError as error:
            if not (more := reader.read(_READ_AT_ONCE)):
                raise UsageError(
                    f"{path} is no whole JSON array ({short(error)}): it is cut off, or has a comma or a quote too few."
                ) from error
            text, place = text[place:] + more, 0
            if len(text) > MAX_ROW_BYTES:
                raise _too_long(str(path)) from error
        else:
            yield _checked_row(row)


def _json_row(line: bytes) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
        if _SURROGATE.search(line):
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        return NOT_UTF8
    except (ValueError, RecursionError) as error:
        return Fault(f"is not JSON ({short(error)}); JSON Lines has one object per line")
    return _checked_row(row)


def _checked_row(row: Any) -> Row:
    if not isinstance(row, dict):
        return Fault(f"is JSON but no object of columns and values ({type(row).__name__})")
    return Fault(too_many_columns(len(row))) if len(row) > MAX_COLUMNS else row


def _csv_rows(path: File) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as stream:
        # A byte that is not UTF-8 becomes a lone surrogate, so that its row can be named.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        lines = _Lines(path, text)
        records = csv.reader(lines, strict=True)
        number = 0
        try:
            header = next(records, [])
            _check_header(path, header)
            lines.held = 0
            for record in records:
                lines.held = 0
                if record:
                    number += 1
                    yield number, _csv_row(header, record)
        except csv.Error as error:
            raise UsageError(
                f"{path}, row {number + 1} is not CSV ({error}): a quote is open or misplaced. "
                "Double the quotes inside quoted fields."
            ) from error


def _check_header(path: File, header: list[str]) -> None:
    if len(header) > MAX_COLUMNS:
        raise UsageError(f"{path} {too_many_columns(len(header))}. Write those that you need.")
    if twice := {name for name in header if header.count(name) > 1}:
        raise UsageError(f"{path} names the column {min(twice)!r} twice. Rename one of them.")


def _csv_row(header: list[str], record: list[str]) -> Row:
    if len(record) != len(header):
        return Fault(f"has {len(record)} fields where the header has {len(header)}")
    return dict(zip(header, record, strict=True))


# Directories written by `datasets`


def saved_dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a directory that `datasets` saved; None if it did not save this one."""
    splits = folder / "dataset_dict.json"
    if splits.exists():
        names = read_json(splits)["splits"]
        if len(names) != 1:
            raise UsageError(
                f"{folder} holds several splits: {', '.join(names)}. Name one: {folder / names[0]}"
            )
        return saved_dataset_files(folder / names[0])
    state = folder / "state.json"
    if not (state.exists() and (folder / "dataset_info.json").exists()):
        return None
    return [folder / data["filename"] for data in read_json(state)["_data_files"]]
