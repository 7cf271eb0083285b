"""What the server gets, a file of vectors, and what it makes of them: labels. It never sees a text.

vectors.parquet holds released vectors and the columns carried beside them. It says of itself what
it may promise, which pair of device and server it belongs to, and a digest of both, the vectors
and the columns, so that a damaged or foreign file is never classified.
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
import torch

from tightlip.core.errors import UsageError
from tightlip.core.files import csv_text, write_text
from tightlip.core.settings import takes
from tightlip.vectors.data import write_table
from tightlip.vectors.guarantees import VectorMechanism
from tightlip.vectors.halves import SERVER, Classifier, load_classifier, noise_print, read_half

FORMAT = 1
COLUMN = "vector"
_KEY = b"tightlip_vectors"
_AT_ONCE = 65_536  # vectors classified


@dataclass(frozen=True, kw_only=True)
class VectorFile:
    """Released vectors in float32, further columns, their guarantee record and their pair."""

    vectors: np.ndarray
    columns: dict[str, list[Any]]
    record: dict[str, Any]
    pair: str


def write_vectors(path: Path | str, file: VectorFile) -> None:
    """Write it, whole or not at all, for its owner only.

    Holds:
        whole: a process killed while writing leaves the old file, or none.
        textless: a column named text, or one that would hide the vectors, is refused.
    """
    for name in (COLUMN, "text"):
        if name in file.columns:
            raise UsageError(
                f"A column {name!r} cannot stand beside vectors. Leave it out or rename it."
            )
    vectors = np.ascontiguousarray(file.vectors, "<f4")
    values = pa.array(vectors.reshape(-1), pa.float32())
    beside_them = {name: _arrow(column) for name, column in file.columns.items()}
    table = {COLUMN: pa.FixedSizeListArray.from_arrays(values, vectors.shape[1]), **beside_them}
    about = {"format": FORMAT, "record": file.record, "pair": file.pair}
    kept = {name: column.to_pylist() for name, column in beside_them.items()}
    about["sha256"] = _digest(vectors, kept, about)
    metadata = {_KEY: json.dumps(about, ensure_ascii=False, allow_nan=False).encode()}
    with_promise = pa.table(table).replace_schema_metadata(metadata)
    write_table(Path(path), with_promise, alone=True, write_page_checksum=True)


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
    if (size := vectors.shape[1]) != about["record"].get("dimensions"):
        raise _damaged(path, f"its vectors have {size} dimensions, its record says other")
    if not np.isfinite(vectors).all():
        raise _damaged(path, "an entry is not a finite number")
    VectorMechanism.from_record(about["record"])  # refused if it was changed
    return VectorFile(vectors=vectors, columns=columns, record=about["record"], pair=about["pair"])


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
    if (raw := (table.schema.metadata or {}).get(_KEY)) is None:
        raise UsageError(
            f"{path} is not a file of vectors that tightlip wrote: it states no guarantee. "
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
    promise = json.dumps([about["record"], about["pair"]], sort_keys=True, ensure_ascii=False)
    # A date is written by its name; all else that a column holds JSON knows.
    beside = json.dumps(list(columns.items()), default=str)
    digest = sha256(f"{promise}\0{beside}\0{vectors.shape}\0".encode())
    digest.update(np.ascontiguousarray(vectors, "<f4").tobytes())
    return digest.hexdigest()


def _damaged(path: Path, because: str) -> UsageError:
    return UsageError(f"{path} is damaged: {because}. Encode the texts again.")


class Server:
    """A classifier of the vectors that one device makes.

    Holds:
        paired: vectors of another training are refused.
        honest: vectors whose record tells of other noise than this training had are refused.
        shares: the probabilities of a vector add up to 1.
        alone: it loads without the device's half.
    """

    def __init__(self, classifier: Classifier, *, pair: str) -> None:
        self.classifier, self.pair = classifier.eval(), pair

    @property
    def labels(self) -> list[str]:
        return list(self.classifier.labels)

    @torch.inference_mode()
    def classify(self, vectors: VectorFile | np.ndarray) -> tuple[list[str], np.ndarray]:
        """The likeliest label of each vector, and the probabilities of all labels."""
        given = self._checked(vectors)
        probabilities = np.empty((len(given), len(self.labels)), np.float32)
        for start in range(0, len(given), _AT_ONCE):
            part = torch.from_numpy(np.array(given[start : start + _AT_ONCE], np.float32))
            probabilities[start : start + _AT_ONCE] = self.classifier(part).softmax(dim=1).numpy()
        return [self.labels[number] for number in probabilities.argmax(axis=1)], probabilities

    def _checked(self, vectors: VectorFile | np.ndarray) -> np.ndarray:
        if isinstance(vectors, VectorFile):
            if vectors.pair != self.pair:
                raise UsageError(
                    f"The vectors belong to the pair {vectors.pair}, and this server to {self.pair}. "
                    "Encode the texts with the device that was trained with it."
                )
            VectorMechanism.from_record(vectors.record)
            if not self.pair.endswith(f"-{noise_print(vectors.record)}"):
                raise UsageError(
                    "The vectors' record tells of other noise than the device of this pair adds. "
                    "It was changed: encode the texts again, with the device that was trained with this server."
                )
            vectors = vectors.vectors
        if vectors.ndim != 2 or vectors.shape[1] != self.classifier.dimensions:
            raise UsageError(
                f"Vectors of shape {vectors.shape} cannot be classified: the server takes {self.classifier.dimensions} dimensions."
            )
        return vectors


def load_server(folder: Path | str) -> Server:
    """The server's half in `folder`."""
    return Server(load_classifier(folder), pair=read_half(Path(folder), SERVER)["pair"])


@takes()
def represent_classify(
    server: Path | str, vectors: Any, *, out: Path | str | None = None
) -> tuple[list[str], np.ndarray]:
    """Each vector's likeliest label and the probabilities of all, by a server's half.

    `vectors` is a file of `represent_encode`, or an array. `out` (.parquet or .csv) gets the
    carried columns, `predicted` and `probability`.
    """

    if out is not None and Path(out).suffix.lower() not in (".parquet", ".csv"):
        raise UsageError(f"{out} has no ending that names its format. Use .parquet or .csv.")
    half = load_server(server)
    given = read_vectors(vectors) if isinstance(vectors, str | Path) else vectors
    labels, probabilities = half.classify(given)
    if out is not None:
        _write_predictions(Path(out), getattr(given, "columns", {}), labels, probabilities)
    return labels, probabilities


def _write_predictions(
    path: Path, columns: dict[str, list[Any]], labels: list[str], probabilities: np.ndarray
) -> None:
    told = {"predicted": labels, "probability": probabilities.max(axis=1)}
    table = pa.table({name: value for name, value in columns.items() if name not in told} | told)
    if path.suffix.lower() == ".csv":
        write_text(path, csv_text(table.to_pylist()), alone=True)
    else:
        write_table(path, table, alone=True)
