"""vectors.parquet: released vectors, the columns carried beside them, and their guarantee.

The file says of itself what it may promise, which pair of device and server it belongs to, and a
digest of both, the vectors and the columns, so that a damaged or foreign file is never classified.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.core.errors import UsageError
from tightlip.core.files import written_whole
from tightlip.representation.guarantees import VectorMechanism

FORMAT = 1
COLUMN = "vector"
_KEY = b"tightlip_vectors"


@dataclass(frozen=True, kw_only=True)
class VectorFile:
    """Released vectors in float32, further columns, their guarantee record and their pair."""

    vectors: np.ndarray
    columns: dict[str, list[Any]]
    record: dict[str, Any]
    pair: str

    @property
    def mechanism(self) -> VectorMechanism:
        return VectorMechanism.from_record(self.record)


def write_vectors(
    path: Path | str,
    vectors: np.ndarray,
    columns: dict[str, list[Any]],
    record: dict[str, Any],
    *,
    pair: str,
) -> None:
    """Write the file, whole or not at all, for its owner only.

    Holds:
        whole: a process killed while writing leaves the old file, or none.
        textless: a column named text, or one that would hide the vectors, is refused.
    """
    for name in (COLUMN, "text"):
        if name in columns:
            raise UsageError(
                f"A column {name!r} cannot stand beside vectors. Leave it out or rename it."
            )
    vectors = np.ascontiguousarray(vectors, "<f4")
    values = pa.array(vectors.reshape(-1), pa.float32())
    beside_them = {name: _arrow(column) for name, column in columns.items()}
    table = {COLUMN: pa.FixedSizeListArray.from_arrays(values, vectors.shape[1]), **beside_them}
    about = {"format": FORMAT, "record": record, "pair": pair}
    kept = {name: column.to_pylist() for name, column in beside_them.items()}
    about["sha256"] = _digest(vectors, kept, about)
    metadata = {_KEY: json.dumps(about, ensure_ascii=False, allow_nan=False).encode()}
    with written_whole(Path(path)) as beside:
        pq.write_table(
            pa.table(table).replace_schema_metadata(metadata),
            beside,
            compression="zstd",
            write_page_checksum=True,
        )


def read_vectors(path: Path | str) -> VectorFile:
    """The vectors of a file, refused if it is damaged or was not written by `represent encode`.

    Holds:
        same: what was written is read, bit for bit.
        sound: another length, a non-finite entry, a changed value, column or record is refused.
        honest: so is a record that promises more than its noise gives.
    """
    path = Path(path)
    table = _table(path)
    about = _about(path, table)
    vectors = _vectors(path, table)
    columns = {name: table[name].to_pylist() for name in table.column_names if name != COLUMN}
    if about["sha256"] != _digest(vectors, columns, about):
        raise _damaged(path, "its vectors, columns or record are not those that were written")
    if vectors.shape[1] != about["record"].get("dimensions"):
        raise _damaged(
            path, f"its vectors have {vectors.shape[1]} dimensions, its record says other"
        )
    if not np.isfinite(vectors).all():
        raise _damaged(path, "an entry is not a finite number")
    there = VectorFile(vectors=vectors, columns=columns, record=about["record"], pair=about["pair"])
    _ = there.mechanism  # checks the record
    return there


def _table(path: Path) -> pa.Table:
    if not path.exists():
        raise UsageError(
            f"{path} does not exist. Write it: tightlip represent encode RUN/device TEXTS --out {path}"
        )
    try:
        return pq.read_table(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, f"it cannot be read ({str(error).splitlines()[0]})") from error


def _about(path: Path, table: pa.Table) -> dict[str, Any]:
    """What the file says of itself."""
    raw = (table.schema.metadata or {}).get(_KEY)
    if raw is None:
        raise UsageError(
            f"{path} is no file of vectors that tightlip wrote: it states no guarantee. "
            "Write it with: tightlip represent encode"
        )
    try:
        about = json.loads(raw)
        known = about["format"] == FORMAT and isinstance(about["record"], dict)
        known = known and isinstance(about["pair"], str) and isinstance(about["sha256"], str)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "what it says of itself cannot be read") from error
    if not known:
        raise UsageError(
            f"{path} has a format this version does not know. Use the version that wrote it."
        )
    return dict(about)


def _vectors(path: Path, table: pa.Table) -> np.ndarray:
    if COLUMN not in table.column_names:
        raise _damaged(path, f"it has no column {COLUMN!r}")
    column = table[COLUMN].combine_chunks()
    kind = column.type
    if not pa.types.is_fixed_size_list(kind) or kind.value_type != pa.float32():
        raise _damaged(path, f"its column {COLUMN!r} is {kind}, not vectors of float32")
    flat = column.flatten()
    if column.null_count or flat.null_count or len(flat) != len(column) * kind.list_size:
        raise _damaged(path, "a vector is missing")
    return flat.to_numpy(zero_copy_only=False).reshape(len(column), kind.list_size)


def _arrow(column: Sequence[Any]) -> pa.Array:
    try:
        return pa.array(column)
    except pa.ArrowException:
        return pa.array([None if value is None else str(value) for value in column])


def _digest(vectors: np.ndarray, columns: dict[str, list[Any]], about: dict[str, Any]) -> str:
    said = json.dumps([about["record"], about["pair"]], sort_keys=True, ensure_ascii=False)
    # A date is written by its name; all else that a column holds JSON knows.
    beside = json.dumps(list(columns.items()), default=str)
    digest = sha256(b"\0".join([said.encode(), beside.encode(), str(vectors.shape).encode(), b""]))
    digest.update(np.ascontiguousarray(vectors, "<f4").tobytes())
    return digest.hexdigest()


def _damaged(path: Path, because: str) -> UsageError:
    return UsageError(f"{path} is damaged: {because}. Encode the texts again.")
