"""Labelled texts: which rows count, what is a class, and who ends up in which part."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tightlip.core.errors import UsageError
from tightlip.core.settings import toml_text
from tightlip.vectors.categories import categories
from tightlip.vectors.data import load_examples, open_source, read_examples, write_split
from tightlip.vectors.settings import RepresentSettings
from vectors.toy_corpora import toy_corpus

SETTINGS = {"label": "topic", "private": ("age",), "extractor": "bag", "method": "none"}


def examples_of(rows, **changed):
    return read_examples(open_source(rows), RepresentSettings(**(SETTINGS | changed)))


def shares(examples):
    counts = Counter(examples.parts.tolist())
    return [counts[part] for part in ("train", "dev", "test")]


@pytest.mark.parametrize(
    ("num_texts", "wanted"), [(400, [320, 40, 40]), (10, [8, 1, 1]), (97, [78, 10, 9])]
)
def test_eight_of_ten_train_one_is_dev_and_one_is_test(num_texts, wanted):
    assert shares(examples_of(toy_corpus(num_texts))) == wanted


def test_the_split_depends_on_its_seed_and_not_on_the_trainings():
    rows = toy_corpus(60)
    first = examples_of(rows).parts.tolist()
    assert examples_of(rows, seed=5).parts.tolist() == first
    assert examples_of(rows, split_seed=5).parts.tolist() != first


def test_texts_that_read_the_same_are_in_one_part():
    rows = [row for row in toy_corpus(60) for _ in range(3)]
    examples = examples_of(rows)
    parts = {}
    for text, part in zip(examples.texts, examples.parts, strict=True):
        parts.setdefault(text, set()).add(part)
    assert all(len(found) == 1 for found in parts.values())
    assert abs(shares(examples)[0] - 144) <= 3


def test_texts_that_differ_in_spaces_or_case_are_in_one_part():
    rows = toy_corpus(60)
    spellings = (str, str.upper, str.title, lambda text: f" {text.replace(' ', '  ')}\n")
    examples = examples_of(
        [row | {"text": spell(row["text"])} for spell in spellings for row in rows]
    )
    parts = {}
    for text, part in zip(examples.texts, examples.parts, strict=True):
        parts.setdefault(tuple(text.lower().split()), set()).add(part)
    assert len(parts) == 60
    assert all(len(found) == 1 for found in parts.values())


def test_all_texts_of_a_user_are_in_one_part():
    examples = examples_of(toy_corpus(400), split="user")
    parts = {}
    for user, part in zip(examples.users, examples.parts, strict=True):
        parts.setdefault(user, set()).add(part)
    assert all(len(found) == 1 for found in parts.values())
    assert shares(examples) == [320, 40, 40]


def test_a_column_may_say_which_part_a_text_is_in():
    rows = toy_corpus(30)
    for number, row in enumerate(rows):
        row["split"] = ("train", "dev", "test")[number % 3]
    assert examples_of(rows, split="column").parts.tolist() == [row["split"] for row in rows]
    rows[3]["split"] = "valid"
    with pytest.raises(UsageError, match="says 'valid'"):
        examples_of(rows, split="column")


def test_rows_without_a_class_are_left_out_and_counted():
    rows = toy_corpus(50)
    rows[4]["topic"] = rows[7]["age"] = None
    examples = examples_of(rows)
    assert examples.num_dropped == 2
    assert examples.rows.tolist() == [row for row in range(50) if row not in (4, 7)]
    assert [examples.label.names[number] for number in examples.label.ids] == [
        row["topic"] for number, row in enumerate(rows) if number not in (4, 7)
    ]


@pytest.mark.parametrize("nothing", ["", "  ", None, float("nan"), np.float32("nan")])
@pytest.mark.parametrize("cut", [None, "20,30"])
def test_an_empty_cell_is_no_class(nothing, cut):
    found = categories(["18", nothing, "35", "18"], "age", cut)
    assert found.ids.tolist() in ([0, -1, 1, 0], [0, -1, 2, 0])
    assert not {"", "nan"} & {*found.names}


def test_empty_cells_of_a_csv_are_left_out_and_counted(tmp_path):
    rows = toy_corpus(50)
    rows[4]["topic"] = rows[7]["age"] = ""
    rows[9]["topic"] = " "
    path = tmp_path / "texts.csv"
    pa.Table.from_pylist(rows).to_pandas().to_csv(path, index=False)
    examples = examples_of(path)
    assert examples.num_dropped == 3
    assert examples.label.names == ["money", "sport"]
    assert examples.private["age"].names == ["old", "young"]


@pytest.mark.parametrize("cut", ["..10,90..", "0..10,90..99", "..10"])
def test_bins_that_keep_no_row_are_named_and_not_the_label(cut):
    rows = [row | {"age": 18 + number % 40} for number, row in enumerate(toy_corpus(50))]
    with pytest.raises(UsageError, match=r"bins=age=.* keeps none of the 50 rows.* from 18 to 57"):
        examples_of(rows, bins=(f"age={cut}",))


def test_columns_that_are_empty_alone_or_together_are_named():
    rows = toy_corpus(40)
    with pytest.raises(UsageError, match="'age' is empty in all 40 rows"):
        examples_of([row | {"age": ""} for row in rows])
    for number, row in enumerate(rows):
        row["topic" if number % 2 else "age"] = None
    with pytest.raises(UsageError, match="None of the 40 rows has all of topic, age"):
        examples_of(rows)


@pytest.mark.parametrize(
    ("cut", "names", "wanted"),
    [
        ("20,30", ["below 20", "from 20 below 30", "from 30"], [0, 0, 1, 1, 2, 2]),
        ("..19,30..", ["..19", "30.."], [0, 0, -1, -1, 1, 1]),
        ("..18,19..29", ["..18", "19..29"], [0, 1, 1, 1, -1, -1]),
    ],
)
@pytest.mark.parametrize("kind", [int, str])
def test_numbers_are_cut_at_points_or_into_ranges(cut, names, wanted, kind):
    found = categories([kind(age) for age in (18, 19, 20, 29, 30, 41)], "age", cut)
    assert found.names == names
    assert found.ids.tolist() == wanted


def test_classes_stand_in_their_order_and_few_numbers_are_classes():
    assert categories(["b", "a", None], "x").names == ["a", "b"]
    assert categories(["10", "9", "9"], "x").names == ["9", "10"]
    assert categories([2, 10, 2], "x").ids.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("values", "cut", "because"),
    [
        (list(range(15, 60)), None, "by bins: age=20,30"),
        ([f"name {number}" for number in range(60)], None, "nothing to learn"),
        (["20", "old"], "20,30", "no number"),
        (["20"], "twenty", "not understood"),
        (["20"], "20,nan", "not understood"),
        (["20"], "20,30..", "not understood"),
        (["20"], "", "not understood"),
        (["20"], "..20,15..", r"\.\.20 and 15\.\. overlap"),
        (["20"], "..20,20..", "overlap"),
        (["20"], "20,20", "names 20 twice"),
        (["20"], "20,30,20.0", "names 20 twice"),
        (["20"], "30..20", r"30\.\.20 holds no number"),
    ],
)
def test_what_is_no_class_is_refused(values, cut, because):
    with pytest.raises(UsageError, match=because):
        categories(values, "age", cut)


def test_a_column_of_one_value_and_a_missing_column_are_refused():
    rows = [row | {"topic": "sport"} for row in toy_corpus(20)]
    with pytest.raises(UsageError, match="'topic' has one value"):
        examples_of(rows)
    with pytest.raises(UsageError, match="no column 'gender'"):
        examples_of(toy_corpus(20), private=("gender",))
    with pytest.raises(UsageError, match="left none to"):
        examples_of(toy_corpus(4))


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_a_corpus_without_users_is_read(ending, tmp_path):
    rows = [{name: row[name] for name in ("text", "topic", "age")} for row in toy_corpus(30)]
    path = tmp_path / f"texts.{ending}"
    table = pa.Table.from_pylist(rows)
    if ending == "parquet":
        pq.write_table(table, path)
    elif ending == "jsonl":
        table.to_pandas().to_json(path, orient="records", lines=True)
    else:
        table.to_pandas().to_csv(path, index=False)
    examples = examples_of(path)
    assert examples.users is None
    assert examples.texts == [row["text"] for row in rows]
    with pytest.raises(UsageError, match="has no users"):
        examples_of(path, split="user")


def test_rows_and_data_frames_without_users_are_read_too():
    rows = [{name: row[name] for name in ("text", "topic", "age")} for row in toy_corpus(30)]
    for given in (rows, pa.Table.from_pylist(rows), pa.Table.from_pylist(rows).to_pandas()):
        examples = examples_of(given)
        assert examples.users is None
        assert examples.texts == [row["text"] for row in rows]


def test_who_wrote_it_may_be_what_is_hidden():
    assert len(examples_of(toy_corpus(400), private=("user",)).private["user"].names) == 40


def test_the_plays_come_along_with_play_genre_and_gender():
    examples = examples_of("bundled", label="genre", private=("play", "gender"))
    assert len(examples) == 7097 - examples.num_dropped == 7004
    assert examples.label.names == ["comedy", "history", "tragedy"]
    of = dict(zip(examples.users, examples.private["gender"].ids, strict=True))
    names = examples.private["gender"].names
    assert [names[of[user]] for user in ("JULIET", "ROMEO")] == ["female", "male"]
    plays = examples.private["play"]
    spoken = {
        plays.names[number]
        for user, number in zip(examples.users, plays.ids, strict=True)
        if user == "ROMEO"
    }
    assert spoken == {"Romeo and Juliet"}


def test_a_runs_texts_are_read_again_and_a_changed_corpus_is_refused(tmp_path):
    path, run = tmp_path / "texts.parquet", tmp_path / "run"
    pq.write_table(pa.Table.from_pylist(toy_corpus(40)), path)
    run.mkdir()
    source, settings = open_source(path), RepresentSettings(**SETTINGS)
    (run / "config.toml").write_text(
        toml_text({"represent": settings.tree(), "corpus": source.tree})
    )
    again, wanted = load_examples(run), read_examples(source, settings)
    assert again.texts == wanted.texts
    assert np.array_equal(again.parts, wanted.parts)
    pq.write_table(pa.Table.from_pylist(toy_corpus(41)), path)
    with pytest.raises(UsageError, match="changed since"):
        load_examples(run)
    with pytest.raises(UsageError, match="is not a tightlip run"):
        load_examples(tmp_path)


def test_a_finished_run_keeps_the_split_it_was_trained_with(tmp_path):
    path, run = tmp_path / "texts.parquet", tmp_path / "run"
    pq.write_table(pa.Table.from_pylist(toy_corpus(40)), path)
    run.mkdir()
    source, settings = open_source(path), RepresentSettings(**SETTINGS)
    (run / "config.toml").write_text(
        toml_text({"represent": settings.tree(), "corpus": source.tree})
    )
    wanted = read_examples(source, settings)
    turned = replace(wanted, parts=wanted.parts[::-1])
    write_split(run / "split.parquet", turned)
    assert load_examples(run).parts.tolist() == turned.parts.tolist()
    write_split(run / "split.parquet", wanted.chosen(np.arange(39)))
    with pytest.raises(UsageError, match="other rows"):
        load_examples(run)
