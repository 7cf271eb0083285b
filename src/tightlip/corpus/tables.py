"""Documents in batches, and as Parquet: user, text, then the further columns under one type each."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet

from tightlip.core.checksums import checked
from tightlip.corpus.owners import has_co_owners, owners_of

Metadata = dict[bytes, bytes] | None  # of a Parquet file
_ROW_GROUP_BYTES = 32_000_000


@dataclass(frozen=True, kw_only=True)
class DocumentBatch:
    """Some documents in order: who wrote each, its text, and its further columns."""

    users: list[str]
    texts: list[str]
    attributes: dict[str, list] = field(default_factory=dict)

    @classmethod
    def of(cls, users: list[str], texts: list[str], beside: list[dict[str, Any]]) -> Self:
        """Documents with what else their rows hold, null where one does not have it."""
        names = dict.fromkeys(name for row in beside for name in row)
        attributes = {name: [row.get(name) for row in beside] for name in names}
        return cls(users=users, texts=texts, attributes=attributes)

    def __len__(self) -> int:
        return len(self.users)

    def where(self, keep: Sequence[bool]) -> "DocumentBatch":
        """Those of the documents where `keep` is true."""
        return DocumentBatch(
            users=list(compress(self.users, keep)),
            texts=list(compress(self.texts, keep)),
            attributes={n: list(compress(v, keep)) for n, v in self.attributes.items()},
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


def stored_column(path: Path, name: str) -> list[Any]:
    """One column of a Parquet file of ours."""
    return pa.parquet.read_table(checked(path), columns=[name])[name].to_pylist()


class AttributeTypes:
    """The type of each further column, over all batches of a corpus.

    JSON Lines has no schema: a column may be missing here and an integer there. What
    no single type holds is stored as JSON text.
    """

    def __init__(self) -> None:
        self.num_documents = 0
        self.by_column: dict[str, pa.DataType | None] = {}  # None stands for JSON text
        self.users = pa.string()  # lists where a document has several owners

    @property
    def has_co_owners(self) -> bool:
        return bool(self.users != pa.string())

    def add(self, batch: DocumentBatch) -> None:
        self.num_documents += len(batch)
        if has_co_owners(batch.users):
            self.users = pa.list_(pa.string())
        for name, values in batch.attributes.items():
            self.by_column[name] = _both(self.by_column.get(name, pa.null()), _type_of(values))


def _type_of(values: list) -> pa.DataType | None:
    try:
        kind = pa.array(values).type
        # Parquet has no struct without fields, and JSON's objects often have none.
        return None if "struct<" in str(kind) else kind
    except (pa.ArrowException, TypeError, OverflowError):
        return None


def _both(one: pa.DataType | None, other: pa.DataType | None) -> pa.DataType | None:
    if one is None or other is None:
        return None
    try:
        schemas = [pa.schema({"x": one}), pa.schema({"x": other})]
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return None


class TableWriter:
    """Writes batches to one Parquet file in row groups of some 32 MB.

    `stored_types` has the further columns as the file has them, for a writer of its rows.
    """

    def __init__(
        self,
        path: Path,
        types: Mapping[str, pa.DataType | None],
        metadata: Metadata = None,
        *,
        users: pa.DataType = pa.string(),
    ) -> None:
        self.num_rows = 0
        self._types = types
        columns: dict[str, pa.DataType] = {"user": users, "text": pa.string()}
        for name, kind in types.items():
            columns[_free_name(name, columns, types)] = kind or pa.string()
        self._schema = pa.schema(columns, metadata=metadata)
        self.stored_types = {name: columns[name] for name in list(columns)[2:]}
        self._writer = pa.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._pending: list[pa.RecordBatch] = []
        self._num_bytes = 0

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        if error is None:
            self._flush()
        self._writer.close()

    def write(self, batch: DocumentBatch, keep: list[bool] | None = None) -> None:
        """Add a batch, or those of its documents where `keep` is true."""
        batch = batch if keep is None else batch.where(keep)
        kind = self._schema.field("user").type
        is_plain = kind == pa.string()
        assert not (is_plain and has_co_owners(batch.users)), "other owners would be lost"
        users: list[Any] = batch.users if is_plain else [*map(owners_of, batch.users)]
        columns = [pa.array(users, kind), pa.array(batch.texts, pa.string())]
        for name, kind in self._types.items():
            columns.append(_column(batch.attributes.get(name, [None] * len(batch)), kind))
        self._pending.append(pa.record_batch(columns, schema=self._schema))
        self.num_rows += len(batch)
        self._num_bytes += self._pending[-1].nbytes
        if self._num_bytes > _ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(pa.Table.from_batches(self._pending, self._schema))
            self._pending, self._num_bytes = [], 0


def _free_name(name: str, taken: Iterable[str], others: Iterable[str]) -> str:
    """`name`, with a line below where it would take the place of `user` or `text`."""
    free = name
    while free in taken or (free != name and free in others):
        free += "_"
    return free


def _column(values: list, kind: pa.DataType | None) -> pa.Array:
    if kind is not None:
        try:
            return pa.array(values, kind)
        except pa.ArrowInvalid:  # an integer beyond 2^53 in a column that elsewhere has fractions
            return pa.array(values).cast(kind, safe=False)
    json_text = partial(json.dumps, ensure_ascii=False, default=str)
    return pa.array([None if one is None else json_text(one) for one in values], pa.string())
