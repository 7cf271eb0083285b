"""The rows of each file format, one at a time, numbered from 1.

A row is its values by column, or a `Fault` that says why it cannot be read. What
breaks the file as a whole (truncated, not what its name says) raises `UsageError`.
Row n is the nth line of JSON Lines, the nth record after a CSV's header, the nth
row of anything else.
"""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json

MAX_BATCH_ROWS = 1_000
MAX_BATCH_BYTES = 8_000_000
_TEXT_KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv"}
_KINDS = _TEXT_KINDS | {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # a pair is a character, half a pair is nothing


@dataclass(frozen=True)
class Fault:
    """Why one row, or one value of it, cannot be used."""

    because: str


Row = dict[str, Any] | Fault
NOT_UTF8 = Fault("holds bytes that are not UTF-8")


def kind_of(path: Path) -> str | None:
    """'parquet', 'json', 'csv' or 'arrow' by the file's name, None for anything else."""
    *before, last = "", *(suffix.lower() for suffix in path.suffixes)
    return _TEXT_KINDS.get(before[-1]) if last in (".gz", ".zst") else _KINDS.get(last)


def columns_of(path: Path) -> pa.Schema | None:
    """Column names and types where the file states them."""
    if kind_of(path) == "parquet":
        with _reporting(path), pa.parquet.ParquetFile(path) as parquet:
            return parquet.schema_arrow
    if kind_of(path) == "arrow":
        with _reporting(path), pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).schema
    return None


def rows_of(path: Path) -> Iterator[tuple[int, Row]]:
    """Every row of one file with its number."""
    readers: dict[str | None, Callable[[Path], Iterator[tuple[int, Row]]]] = {
        "parquet": _parquet_rows,
        "json": _json_rows,
        "csv": _csv_rows,
        "arrow": _arrow_rows,
    }
    with _reporting(path):
        yield from readers[kind_of(path)](path)


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Turn what the libraries say about a damaged file into one line about that file."""
    try:
        yield
    except PermissionError as error:
        raise UsageError(f"{path} may not be read: {error.strerror}.") from error
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"{path} cannot be read to its end ({_one_line(error)}). It is damaged, cut off or "
            "not what its name says: fetch or write it again."
        ) from error


def _one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if len(words) <= 160 else words[:157] + "..."


# Parquet, Arrow and tables


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with pa.parquet.ParquetFile(path) as parquet:
        start = 1
        for group in range(parquet.num_row_groups):
            about = parquet.metadata.row_group(group)
            num_bytes_per_row = about.total_byte_size / max(about.num_rows, 1)
            size = int(min(MAX_BATCH_ROWS, max(1, MAX_BATCH_BYTES // max(num_bytes_per_row, 1))))
            for batch in parquet.iter_batches(size, row_groups=[group]):
                yield from enumerate(_batch_rows(batch), start)
                start += len(batch)


def _arrow_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with pa.memory_map(str(path)) as source:
        yield from table_rows(pa.ipc.open_stream(source))


def table_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Row]]:
    """Rows of Arrow batches of any size, few of them as Python objects at a time."""
    start = 1
    for batch in batches:
        for first in range(0, len(batch), MAX_BATCH_ROWS):
            yield from enumerate(_batch_rows(batch.slice(first, MAX_BATCH_ROWS)), start + first)
        start += len(batch)


def _batch_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    for values in zip(*(_column_values(column) for column in batch.columns), strict=True):
        yield dict(zip(names, values, strict=True))


def _column_values(column: pa.Array) -> list[Any]:
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


def _opened(path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if suffix == ".zst":
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))  # type: ignore[arg-type]
    return path.open("rb")


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with _opened(path) as stream:
        blank_so_far = True
        for number, line in enumerate(stream, 1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if not line or line.isspace():
                continue
            if blank_so_far and line.lstrip().startswith(b"["):
                raise UsageError(
                    f"{path} holds one JSON array; JSON Lines is needed, one object per line. "
                    f"Convert it: jq -c '.[]' {path.name} > {path.stem}.jsonl"
                )
            blank_so_far = False
            yield number, _json_row(line)


def _json_row(line: bytes) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
        if _SURROGATE.search(line):
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        return NOT_UTF8
    except (ValueError, RecursionError) as error:
        return Fault(f"is not JSON ({_one_line(error)}); JSON Lines has one object per line")
    if not isinstance(row, dict):
        return Fault(f"is JSON but no object of columns and values ({type(row).__name__})")
    return row


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as stream:
        # A byte that is not UTF-8 becomes a lone surrogate, so that its row can be named.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        records = csv.reader(text, strict=True)
        number = 0
        try:
            header = next(records, [])
            _check_header(path, header)
            for record in records:
                if record:
                    number += 1
                    yield number, _csv_row(header, record)
        except csv.Error as error:
            raise UsageError(
                f"{path}, row {number + 1} is not CSV ({error}): a quote is open or misplaced. "
                "Double the quotes inside quoted fields."
            ) from error


def _check_header(path: Path, header: list[str]) -> None:
    twice = {name for name in header if header.count(name) > 1}
    if twice:
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
