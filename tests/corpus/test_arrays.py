"""One JSON array, and datasets in memory: read like JSON Lines."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightlip.core.errors import UsageError
from tightlip.corpus import formats
from tightlip.corpus.formats import Fault, rows_of
from tightlip.corpus.readers import open_corpus

ROWS = [{"user": f"u{n}", "text": f"text, {n} [of] {{mine}} \u2028 ä"} for n in range(50)]


def texts_of(source, **settings):
    return [text for batch in open_corpus(source, **settings).batches() for text in batch.texts]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("at_once", [7, 1 << 20])
def test_an_array_reads_like_lines(tmp_path, monkeypatch, indent, at_once):
    monkeypatch.setattr(formats, "_READ_AT_ONCE", at_once)
    path = tmp_path / "c.json"
    path.write_text("\ufeff \n" + json.dumps(ROWS, indent=indent, ensure_ascii=False))
    assert list(rows_of(path)) == list(enumerate(ROWS, 1))
    packed = tmp_path / "c.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert list(rows_of(packed)) == list(enumerate(ROWS, 1))


@given(
    rows=st.lists(
        st.dictionaries(
            st.text(), st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=8)
        ),
        max_size=5,
    )
)
def test_whatever_json_holds_comes_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("a") / "c.json"
    path.write_text(json.dumps(rows))
    assert [row for _, row in rows_of(path)] == json.loads(json.dumps(rows))


@pytest.mark.parametrize("text", ["[", "[{", '[{"a": 1}', '[{"a": 1} {"b"', "[1e5}"])
def test_an_array_that_is_cut_off_is_refused(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UsageError, match="no whole JSON array"):
        list(rows_of(tmp_path / "c.json"))


def test_elements_that_are_no_rows_are_named(tmp_path):
    (tmp_path / "c.json").write_text('[{"user": "a", "text": "x"}, 3, ["x"]]')
    first, second, third = (row for _, row in rows_of(tmp_path / "c.json"))
    assert first == {"user": "a", "text": "x"}
    assert isinstance(second, Fault)
    assert isinstance(third, Fault)


def test_bytes_that_are_not_utf8_are_named_by_their_row(tmp_path):
    (tmp_path / "c.json").write_bytes(
        b'[{"user": "a", "text": "x"}, {"user": "b", "text": "\xff"}]'
    )
    with pytest.raises(UsageError, match="row 2 holds bytes that are not UTF-8"):
        texts_of(tmp_path / "c.json")


def test_nesting_without_end_and_rows_without_end_are_refused(tmp_path, monkeypatch):
    (tmp_path / "c.json").write_text("[" * 200_000)
    with pytest.raises(UsageError, match="nested too deeply"):
        list(rows_of(tmp_path / "c.json"))
    monkeypatch.setattr(formats, "MAX_ROW_BYTES", 1_000)
    monkeypatch.setattr(formats, "_READ_AT_ONCE", 100)
    (tmp_path / "c.json").write_text('[{"user": "a", "text": "' + "x" * 5_000)
    with pytest.raises(UsageError, match="has a row of more than"):
        list(rows_of(tmp_path / "c.json"))


def test_a_dataset_reads_like_its_rows_and_of_several_splits_one_is_asked_for():
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    assert texts_of(made) == [row["text"] for row in ROWS]
    assert texts_of(made.select(range(3))) == [row["text"] for row in ROWS[:3]]
    with pytest.raises(UsageError, match="no column 'text'"):
        open_corpus(made.remove_columns("text"))
    both = datasets.DatasetDict({"train": made, "test": made})
    with pytest.raises(UsageError, match=r"dataset\['train'\]"):
        open_corpus(both)


def test_a_dataset_of_chats_is_one_of_chats():
    datasets = pytest.importorskip("datasets")
    chats = [{"user": "a", "messages": [{"role": "user", "content": "hi"}]}]
    corpus = open_corpus(datasets.Dataset.from_list(chats), format="auto")
    (row,) = corpus.raw_documents()
    assert row.document.messages == chats[0]["messages"]
