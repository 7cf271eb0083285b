import json
import math
import os
import stat
from datetime import date, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tightlip.core.errors import UsageError
from tightlip.vectors.guarantees import VectorMechanism
from tightlip.vectors.server import VectorFile, _digest, read_vectors, write_vectors

RECORD = VectorMechanism(mechanism="laplace-as-published", dimensions=6, epsilon=0.5).record()
KEY = b"tightlip_vectors"


def vectors(num=9):
    return np.random.default_rng(0).normal(size=(num, 6)).astype(np.float32)


def written(folder, num=9, **columns):
    path = folder / "vectors.parquet"
    file = VectorFile(vectors=vectors(num), columns=columns, record=RECORD, pair="ab12")
    write_vectors(path, file)
    return path


def rewritten(path, change):
    """The file with its table changed and what it says of itself kept."""
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)
    return path


def with_vectors(values, kind=pa.float32(), size=6):
    flat = pa.array(np.asarray(values).ravel(), kind)
    return lambda table: table.set_column(
        0, "vector", pa.FixedSizeListArray.from_arrays(flat, size)
    )


def test_what_was_written_is_read_bit_for_bit(tmp_path):
    odd = [1, None, 3, 4, 5, 6, 7, 8, 9]
    path = written(tmp_path, label=list("abcdefghi"), age=odd)
    there = read_vectors(path)
    assert there.vectors.tobytes() == vectors().tobytes()
    assert there.columns == {"label": list("abcdefghi"), "age": odd}
    assert (there.record, there.pair) == (RECORD, "ab12")
    assert VectorMechanism.from_record(there.record).noise_scale == 2.0
    assert pq.read_schema(path).field("vector").type == pa.list_(pa.float32(), 6)


def test_the_file_is_its_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        assert stat.S_IMODE(written(tmp_path).stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.parquet"]


@pytest.mark.parametrize("name", ["text", "vector"])
def test_neither_text_nor_a_second_vector_goes_along(tmp_path, name):
    with pytest.raises(UsageError, match="cannot stand beside vectors"):
        written(tmp_path, **{name: ["x"] * 9})
    assert not list(tmp_path.iterdir())


def test_values_of_mixed_kinds_are_carried_as_words(tmp_path):
    path = written(tmp_path, odd=[1, "a", None, 2.5, *"abcde"])
    assert read_vectors(path).columns["odd"][:4] == ["1", "a", None, "2.5"]


def changed_entry(values):
    values = values.copy()
    values[3, 2] = np.nextafter(values[3, 2], np.float32(9))
    return values


def not_finite(values):
    values = values.copy()
    values[3, 2] = np.inf
    return values


@pytest.mark.parametrize(
    "change",
    [
        with_vectors(changed_entry(vectors())),
        with_vectors(not_finite(vectors())),
        with_vectors(vectors().reshape(-1)[: 9 * 5], size=5),
        with_vectors(vectors(), pa.float64()),
        lambda table: table.slice(1),
        lambda table: table.take([1, 0, *range(2, 9)]),
        lambda table: table.drop_columns(["vector"]).append_column("x", pa.array([1] * 9)),
        lambda table: table.set_column(0, "vector", pa.array([1.0] * 9)),
        lambda table: table.set_column(
            0, "vector", pa.array([None, *vectors()[1:].tolist()], pa.list_(pa.float32(), 6))
        ),
    ],
)
def test_vectors_that_were_changed_are_refused(tmp_path, change):
    with pytest.raises(UsageError, match="damaged"):
        read_vectors(rewritten(written(tmp_path), change))


def test_a_non_finite_entry_is_refused_even_with_a_digest_that_fits(tmp_path):
    path = tmp_path / "vectors.parquet"
    file = VectorFile(vectors=not_finite(vectors()), columns={}, record=RECORD, pair="ab12")
    write_vectors(path, file)
    with pytest.raises(UsageError, match="not a finite number"):
        read_vectors(path)


@pytest.mark.parametrize("place", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_flipped_byte_anywhere_never_gives_other_vectors(tmp_path, place):
    path = written(tmp_path, 400, label=["x"] * 400)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0x55
    path.write_bytes(content)
    try:
        there = read_vectors(path)
    except UsageError:
        return
    assert there.vectors.tobytes() == vectors(400).tobytes()
    assert there.columns == {"label": ["x"] * 400}
    assert there.record == RECORD


def test_a_file_cut_off_is_refused(tmp_path):
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="cannot be read"):
        read_vectors(path)


def test_a_foreign_or_missing_file_is_refused(tmp_path):
    path = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"vector": [[1.0, 2.0]]}), path)
    with pytest.raises(UsageError, match="states no guarantee"):
        read_vectors(path)
    with pytest.raises(UsageError, match="does not exist"):
        read_vectors(tmp_path / "nothing.parquet")
    (tmp_path / "text.parquet").write_text("no parquet at all")
    with pytest.raises(UsageError, match="damaged"):
        read_vectors(tmp_path / "text.parquet")


def with_metadata(path, raw):
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({KEY: raw}), path)
    return path


def said(path):
    return json.loads(pq.read_schema(path).metadata[KEY])


def test_a_record_that_was_changed_in_the_file_is_refused(tmp_path):
    path = written(tmp_path)
    about = said(path)
    about["record"]["epsilon"] = 0.1
    with pytest.raises(UsageError, match="not those that were written"):
        read_vectors(with_metadata(path, json.dumps(about)))
    about = said(written(tmp_path)) | {"pair": "other"}
    with pytest.raises(UsageError, match="not those that were written"):
        read_vectors(with_metadata(path, json.dumps(about)))


@pytest.mark.parametrize(
    "raw", ["{", "[]", "{}", '{"format": 1, "record": 3, "pair": "", "sha256": ""}']
)
def test_what_cannot_be_understood_is_refused(tmp_path, raw):
    with pytest.raises(UsageError):
        read_vectors(with_metadata(written(tmp_path), raw))


def test_another_format_is_refused(tmp_path):
    path = written(tmp_path)
    about = said(path) | {"format": 2}
    with pytest.raises(UsageError, match="format this version does not know"):
        read_vectors(with_metadata(path, json.dumps(about)))


def test_a_record_that_promises_more_is_refused_even_with_a_digest_that_fits(tmp_path):
    path = written(tmp_path)
    about = said(path)
    about["record"] |= {"epsilon": 0.1}
    about["sha256"] = _digest(vectors(), {}, about)
    with pytest.raises(UsageError, match="claims epsilon"):
        read_vectors(with_metadata(path, json.dumps(about)))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.set_column(1, "label", pa.array(list("abcdefghx"))),
        lambda table: table.rename_columns(["vector", "lable"]),
        lambda table: table.drop_columns(["label"]),
        lambda table: table.append_column("more", pa.array([1] * 9)),
    ],
)
def test_carried_columns_that_were_changed_are_refused(tmp_path, change):
    path = written(tmp_path, label=list("abcdefghi"))
    with pytest.raises(UsageError, match="not those that were written"):
        read_vectors(rewritten(path, change))


def test_columns_of_every_kind_are_read_as_they_were_written(tmp_path):
    columns = {
        "day": [date(2020, 2, 3)] * 9,
        "time": [datetime(2020, 2, 3, 4, 5, 6, 789)] * 9,
        "share": [0.1, math.inf, -0.0, *[None] * 6],
        "tags": [["ä", None], [], *[None] * 7],
        "raw": [b"\xff"] * 9,
        "nothing": [None] * 9,
        "both": [{"a": 1, "b": "x"}] * 9,
    }
    assert read_vectors(written(tmp_path, **columns)).columns == columns
