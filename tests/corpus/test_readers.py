"""Reading: every format gives the same documents, every damage one clear line."""

import csv
import gzip
import json

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightlip.core.errors import UsageError
from tightlip.corpus.readers import open_corpus

ROWS = [
    {"user": "ann", "text": "Hello,\nworld.", "year": 1999},
    {"user": "bob", "text": "", "year": 2000},
    {"user": "ann", "text": 'He said "no" 👩‍👩‍👧, e\u0301', "year": None},
]


def everything(corpus):
    batches = list(corpus.batches())
    users = [user for batch in batches for user in batch.users]
    texts = [text for batch in batches for text in batch.texts]
    return list(zip(users, texts, strict=True))


def expected(rows=ROWS):
    return [(row["user"], row["text"]) for row in rows]


def as_json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(folder, kind, rows=ROWS):
    """Write the rows with the library that owns the format."""
    path = folder / f"corpus{kind}"
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == ".csv":
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, ["user", "text", "year"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress(as_json_lines(rows)))
    elif kind == ".jsonl.zst":
        path.write_bytes(pa.Codec("zstd").compress(as_json_lines(rows), asbytes=True))
    else:
        path.write_bytes(as_json_lines(rows))
    return path


KINDS = [".parquet", ".csv", ".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_documents_twice(tmp_path, kind):
    corpus = open_corpus(write(tmp_path, kind))
    assert everything(corpus) == expected()
    assert everything(corpus) == expected()


@pytest.mark.parametrize(
    "source",
    [
        ROWS,
        [(row["user"], row["text"]) for row in ROWS],
        pa.Table.from_pylist(ROWS),
        pandas.DataFrame(ROWS),
        pa.table(
            {
                "user": pa.array(["ann", "bob", "ann"]).dictionary_encode(),
                "text": pa.array([row["text"] for row in ROWS], pa.large_string()),
            }
        ),
    ],
    ids=["dicts", "pairs", "table", "frame", "dictionary"],
)
def test_sources_in_memory_give_the_same_documents(source):
    assert everything(open_corpus(source)) == expected()


def test_a_directory_saved_by_datasets_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "dict")
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "two")
    assert everything(open_corpus(tmp_path / "one")) == expected()
    assert everything(open_corpus(tmp_path / "dict")) == expected()
    assert everything(open_corpus(tmp_path / "two" / "test")) == expected()
    with pytest.raises(UsageError, match="several splits: train, test"):
        open_corpus(tmp_path / "two")


def test_part_files_of_a_directory_are_read_in_order(tmp_path):
    for number, row in enumerate(ROWS):
        (tmp_path / f"part-{number}.jsonl").write_bytes(as_json_lines([row]))
    (tmp_path / "_SUCCESS").touch()
    assert everything(open_corpus(tmp_path)) == expected()
    write(tmp_path, ".csv")
    with pytest.raises(UsageError, match="mixes files of different kinds"):
        open_corpus(tmp_path)


def test_attributes_come_along_and_may_be_missing(tmp_path):
    rows = [{"user": "a", "text": "x", "age": 3}, {"user": "b", "text": "y", "city": "Rom"}]
    (batch,) = open_corpus(write(tmp_path, ".jsonl", rows)).batches()
    assert batch.attributes == {"age": [3, None], "city": [None, "Rom"]}


def test_batches_are_bounded_by_rows_and_by_size():
    rows = [("a", "x")] * 2_500 + [
        ("b", "y" * 9_000_000),
        ("c", "z" * 5_000_000),
        ("c", "z" * 5_000_000),
    ]
    sizes = [len(batch) for batch in open_corpus(rows).batches()]
    assert sizes == [1_000, 1_000, 500, 1, 1, 1]


def test_a_line_of_many_megabytes_is_one_document(tmp_path):
    path = write(tmp_path, ".jsonl", [{"user": "a", "text": "word " * 2_000_000}, ROWS[0]])
    assert [len(text) for _, text in everything(open_corpus(path))] == [10_000_000, 13]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(texts.filter(bool), texts), min_size=1, max_size=5))
@pytest.mark.parametrize("kind", [".parquet", ".csv", ".jsonl"])
def test_any_unicode_survives_every_format(tmp_path_factory, kind, rows):
    rows = [{"user": user, "text": text, "year": 1} for user, text in rows]
    assert everything(open_corpus(write(tmp_path_factory.mktemp("any"), kind, rows))) == expected(
        rows
    )


def test_integer_users_become_decimal_strings(tmp_path):
    rows = [{"user": 7, "text": "x"}, {"user": 2**60, "text": "y"}]
    for kind in (".parquet", ".jsonl"):
        assert [user for user, _ in everything(open_corpus(write(tmp_path, kind, rows)))] == [
            "7",
            str(2**60),
        ]


@pytest.mark.parametrize("kind", [".parquet", ".jsonl"])
def test_a_user_column_of_floats_is_refused_with_advice(tmp_path, kind):
    path = write(tmp_path, kind, [{"user": 7.0, "text": "x"}])
    with pytest.raises(UsageError, match=r"pandas turns an integer column with gaps into floats"):
        everything(open_corpus(path))


@pytest.mark.parametrize(("user", "text"), [(True, "x"), ([{}], "x"), ("a", 3)])
def test_other_types_are_refused(user, text):
    with pytest.raises(UsageError, match=r"row 1 has a (bool|dict|int)"):
        everything(open_corpus([(user, text)]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_column_lists_those_there_and_the_closest(tmp_path, kind):
    path = write(tmp_path, kind)
    listed = (
        "its first line must name them" if kind == ".csv" else "user, text, year.*Closest: text"
    )
    with pytest.raises(UsageError, match=f"'txet'.*{listed}"):
        everything(open_corpus(path, text_column="txet"))


def test_columns_may_have_any_name(tmp_path):
    path = write(tmp_path, ".jsonl", [{"who": "a", "body": "x"}])
    assert everything(open_corpus(path, user_column="who", text_column="body")) == [("a", "x")]


BAD_JSON = [
    b'{"user": null, "text": "x"}',
    b'{"user": "a", "text": null}',
    b'{"user": "a", "text": "\xff"}',
    b'{"user": "a", "text": "\\ud800"}',
    b'{"user": "a", "text": "x", "more": {"deep": "\\udc00"}}',
    b'{"user": "a", "text": ',
    b'["a", "x"]',
]


@pytest.mark.parametrize("line", BAD_JSON)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, line):
    path = tmp_path / "c.jsonl"
    path.write_bytes(as_json_lines(ROWS[:1]) + b"\n" + line + b"\n" + as_json_lines(ROWS[1:]))
    with pytest.raises(UsageError, match=r"c\.jsonl, row 3 .*bad_rows='skip'"):
        everything(open_corpus(path))
    corpus = open_corpus(path, bad_rows="skip")
    assert everything(corpus) == expected()
    assert corpus.num_skipped == 1
    assert everything(corpus) == expected()
    assert corpus.num_skipped == 1


@pytest.mark.parametrize("line", [b"\xff,x,1", b"a,\xe9t\xe9,1", b",no user,1", b"a,b", b"a,b,c,d"])
def test_a_bad_csv_record_is_named_or_skipped_and_counted(tmp_path, line):
    path = tmp_path / "c.csv"
    path.write_bytes(b'user,text,year\r\nann,"two\nlines",1\r\n' + line + b"\r\nbob,,2\r\n")
    with pytest.raises(UsageError, match=r"c\.csv, row 2 "):
        everything(open_corpus(path))
    corpus = open_corpus(path, bad_rows="skip")
    assert everything(corpus) == [("ann", "two\nlines"), ("bob", "")]
    assert corpus.num_skipped == 1


def test_parquet_nulls_and_bytes_that_are_not_utf8_are_named(tmp_path):
    raw = [b"fine"] * 1_500 + [b"\xff\xfe", None]
    text = pa.array(raw, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"user": ["a"] * len(raw), "text": text}), tmp_path / "c.parquet")
    with pytest.raises(UsageError, match=r"c\.parquet, row 1501 holds bytes that are not UTF-8"):
        everything(open_corpus(tmp_path / "c.parquet"))
    corpus = open_corpus(tmp_path / "c.parquet", bad_rows="skip")
    assert everything(corpus) == [("a", "fine")] * 1_500
    assert corpus.num_skipped == 2


def test_a_byte_order_mark_at_the_start_is_no_text(tmp_path):
    for kind in (".jsonl", ".csv"):
        path = write(tmp_path, kind)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert everything(open_corpus(path)) == expected()


@pytest.mark.parametrize("kind", [".parquet", ".jsonl.gz", ".jsonl.zst"])
def test_a_file_cut_off_is_named(tmp_path, kind):
    rows = [{"user": str(n), "text": str(n**5)} for n in range(3_000)]
    path = write(tmp_path, kind, rows)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UsageError, match=rf"corpus{kind} cannot be read to its end"):
        everything(open_corpus(path))


def test_damaged_pages_inside_a_parquet_file_are_an_error(tmp_path):
    path = write(tmp_path, ".parquet", [{"user": "a", "text": str(n)} for n in range(5_000)])
    content = bytearray(path.read_bytes())
    content[100:400] = bytes(300)
    path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read to its end"):
        everything(open_corpus(path))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_file_holds_no_documents(tmp_path, kind):
    path = tmp_path / f"empty{kind}"
    path.touch()
    with pytest.raises(UsageError, match="holds no documents"):
        everything(open_corpus(path))


def test_a_table_without_rows_holds_no_documents(tmp_path):
    pq.write_table(
        pa.table({"user": pa.array([], "str"), "text": pa.array([], "str")}), tmp_path / "c.parquet"
    )
    for source in (
        tmp_path / "c.parquet",
        [],
        pandas.DataFrame({"user": ["a"], "text": ["x"]})[:0],
    ):
        with pytest.raises(UsageError, match="holds no documents"):
            everything(open_corpus(source))


def test_skipping_everything_says_why(tmp_path):
    path = write(tmp_path, ".jsonl", [{"user": "a", "body": "x"}] * 3)
    with pytest.raises(UsageError, match=r"all 3 rows were skipped.*no column 'text'"):
        everything(open_corpus(path, bad_rows="skip"))


def test_an_open_quote_in_csv_swallows_nothing(tmp_path):
    path = tmp_path / "c.csv"
    path.write_text('user,text\na,fine\nb,"open\nc,lost\n')
    with pytest.raises(UsageError, match="row 2 is not CSV"):
        everything(open_corpus(path))


@pytest.mark.parametrize("source", ["nowhere.parquet", 3, {"user": "a"}])
def test_what_is_no_corpus_is_refused(source):
    with pytest.raises(UsageError, match=r"does not exist|cannot be read from"):
        open_corpus(source)


def test_an_unknown_ending_lists_the_known_ones(tmp_path):
    (tmp_path / "c.txt").write_text("hello")
    with pytest.raises(UsageError, match=r"Readable: \.parquet, \.jsonl"):
        open_corpus(tmp_path / "c.txt")


def test_the_fingerprint_follows_the_content(tmp_path):
    path = write(tmp_path, ".jsonl")
    before = open_corpus(path).fingerprint()
    assert open_corpus(path).fingerprint() == before
    write(tmp_path, ".jsonl", ROWS[:2])
    assert open_corpus(path).fingerprint() != before
    assert open_corpus(ROWS).fingerprint() != open_corpus(ROWS[:2]).fingerprint()


def test_rows_read_together_keep_their_order_beside_those_read_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tightlip.corpus.formats.MAX_BATCH_ROWS", 2)
    rows = [{"user": f"u{n}", "text": None if n in (4, 5, 9) else f"text {n}"} for n in range(11)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    corpus = open_corpus(tmp_path / "c.parquet", bad_rows="skip")
    assert everything(corpus) == expected([row for row in rows if row["text"] is not None])
    assert corpus.num_skipped == 3
    with pytest.raises(UsageError, match=r"c\.parquet, row 5 has null"):
        everything(open_corpus(tmp_path / "c.parquet"))
