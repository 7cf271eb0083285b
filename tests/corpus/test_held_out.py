"""Held-out text as a file of its own: what becomes of it, and what it never touches."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import tightlip
from tightlip.core.errors import UsageError
from tightlip.corpus.canaries import CanaryConfig
from tightlip.corpus.canaries import plant_in as plant_canaries
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.shared_text import standing_in_training

TRAIN = [(f"u{number % 3}", f"Note {number} of mine is here.") for number in range(12)]
HELD = [("u0", "Note 12 of mine is not here."), ("v", "Here is note 7 of unheard.")]


def written(path, rows):
    columns = {"user": [row[0] for row in rows], "text": [row[1] for row in rows]}
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.fixture
def held(tmp_path):
    return written(tmp_path / "held.parquet", HELD)


def texts_of(path):
    return [(row["user"], row["text"]) for row in pq.read_table(path).to_pylist()]


def test_all_of_the_corpus_is_trained_on_and_the_file_is_held_out(tmp_path, held):
    prepared = prepare(TRAIN, tmp_path / "p", PrepareConfig(validation=held))
    assert texts_of(tmp_path / "p/train.parquet") == TRAIN
    assert texts_of(tmp_path / "p/validation.parquet") == HELD
    assert prepared.settings["split"] == "none"
    assert prepared.statistics["warnings"] == []
    assert prepared.statistics["documents"] == 12
    assert prepared.statistics["validation_source"]["documents"] == 2
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    for index, (user, text) in enumerate(HELD):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert prepared.validation.document(index).tolist() == ids
        assert prepared.validation.user_names[prepared.validation.users[index]] == user


def test_the_vocabulary_knows_no_word_of_the_file(tmp_path, held):
    with_file = prepare(TRAIN, tmp_path / "p", PrepareConfig(validation=held))
    without = prepare(TRAIN, tmp_path / "q", PrepareConfig(split="none"))
    one, other = (
        AutoTokenizer.from_pretrained(each.tokenizer_folder).get_vocab()
        for each in (with_file, without)
    )
    assert one == other
    assert "unheard" not in one


def test_canaries_planted_in_the_training_part_keep_all_their_copies(tmp_path, held):
    config = CanaryConfig(templates=["PIN is {digits:4}"], repetitions=[3, 17])
    planted = plant_canaries(open_corpus(TRAIN), tmp_path / "planted", config)
    prepare(tmp_path / "planted/corpus.parquet", tmp_path / "p", PrepareConfig(validation=held))
    there = Counter(text for _, text in texts_of(tmp_path / "p/train.parquet"))
    assert [there[one.text] for one in planted.canaries] == [3, 17]


def test_the_file_is_cleaned_like_the_corpus_but_by_itself(tmp_path):
    rows = [
        ("a", TRAIN[0][1]),
        ("a", "Note me@b.org is mine."),
        ("b", "note  you@c.org is mine."),
    ]
    held = written(tmp_path / "held.parquet", rows)
    config = PrepareConfig(validation=held, scrub=True, deduplicate="documents")
    for name, train in (("p", TRAIN), ("q", TRAIN[6:])):
        found = prepare(train, tmp_path / name, config)
        assert texts_of(tmp_path / name / "validation.parquet") == [
            rows[0],
            ("a", "Note <EMAIL> is mine."),
        ]
        removed = found.statistics["validation_source"]["removed"]
        assert removed == {"documents": 1, "sentences": 0, "emptied_documents": 0}


def test_a_held_out_document_that_was_trained_on_is_warned_about(tmp_path):
    rows = [TRAIN[0], TRAIN[0], ("u1", TRAIN[3][1].upper() + " "), ("u0", ""), HELD[0]]
    held = written(tmp_path / "held.parquet", rows)
    (warning,) = prepare(
        [*TRAIN, ("u0", "")], tmp_path / "p", PrepareConfig(validation=held)
    ).statistics["warnings"]
    # Number 0 is u0's twice over; number 3 is u0's too, and here u1 says it in capitals.
    assert "3 of the 5 documents in" in warning
    assert "(2 by the same user)" in warning


@pytest.mark.parametrize("seed", range(5))
def test_the_overlap_agrees_with_comparing_every_pair(tmp_path, seed):
    import random

    draw = random.Random(seed)

    def rows(num):
        return [(draw.choice("ab"), draw.choice(["x y", "X  y", "z", "", "w"])) for _ in range(num)]

    train, held = rows(4), rows(9)
    overlap = standing_in_training(
        tmp_path / written(tmp_path / "h.parquet", held), tmp_path / written(tmp_path / "t.parquet", train)
    )  # fmt: skip
    alike = [
        {other for other, words in train if text.split() and words.lower().split() == text.lower().split()}
        for _, text in held
    ]  # fmt: skip
    assert overlap.num_documents == sum(map(bool, alike))
    assert overlap.num_same_user == sum(
        user in users for (user, _), users in zip(held, alike, strict=True)
    )


def test_the_same_text_is_kept_wherever_it_lies_and_other_text_is_noticed(tmp_path, held):
    config = PrepareConfig(validation=held)
    prepare(TRAIN, tmp_path / "p", config)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "p").rglob("*")}
    (tmp_path / "moved").mkdir()
    moved = written(tmp_path / "moved/held.parquet", HELD)
    for same in (config, PrepareConfig(validation=moved)):
        prepare(TRAIN, tmp_path / "p", same)
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "p").rglob("*")} == times
    written(tmp_path / "held.parquet", HELD[:1])
    with pytest.raises(UsageError, match=r"exists with other text in .*held.parquet"):
        prepare(TRAIN, tmp_path / "p", config)
    with pytest.raises(UsageError, match=r"other settings \(split, validation\)"):
        prepare(TRAIN, tmp_path / "p", PrepareConfig())


def test_a_prepared_corpus_own_held_out_part_can_be_given(tmp_path):
    prepare(TRAIN, tmp_path / "p", PrepareConfig(holdout=0.5))
    for number, given in enumerate((tmp_path / "p/validation", tmp_path / "p/validation.parquet")):
        found = prepare(
            tmp_path / "p/train.parquet", tmp_path / str(number), PrepareConfig(validation=given)
        )
        assert found.validation.num_documents == 6
        assert found.statistics["warnings"] == []


def test_the_same_columns_are_read_and_skipped_rows_are_counted(tmp_path):
    held = tmp_path / "held.jsonl"
    lines = [{"who": "x", "said": "Note is here."}, {"who": None, "said": "Nobody."}]
    held.write_text("\n".join(map(json.dumps, lines)))
    rows = [{"who": user, "said": text} for user, text in TRAIN]
    config = PrepareConfig(user_column="who", text_column="said", validation=str(held))
    with pytest.raises(UsageError, match=r"held.jsonl, row 2 has null in column 'who'"):
        prepare(rows, tmp_path / "p", config)
    config = PrepareConfig(
        user_column="who", text_column="said", validation=str(held), bad_rows="skip"
    )
    found = prepare(rows, tmp_path / "p", config)
    assert texts_of(tmp_path / "p/validation.parquet") == [("x", "Note is here.")]
    assert "1 unusable rows of" in found.statistics["warnings"][0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"split": "document"}, "nothing is split off the corpus and split='document'"),
        ({"split": "user"}, "split='user' would do nothing"),
        ({"holdout": 0.3}, "holdout=0.3 would do nothing"),
        ({"validation": HELD}, "cannot be a list. Write the held-out text to a file"),
    ],
)
def test_a_split_beside_a_file_is_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        PrepareConfig(**{"validation": "held.parquet", **settings})
    assert PrepareConfig(validation="held.parquet", split="none").split == "none"
    assert PrepareConfig().split == "document"


SMALL = {"embedding_size": 4, "hidden_size": 4, "num_layers": 1, "steps": 1}


def test_runs_on_different_text_are_judged_on_the_same(tmp_path, held, caplog):
    for name, rows in (("one", TRAIN), ("two", [*TRAIN[:4], HELD[1]])):
        run = tightlip.train(rows, tmp_path / name, prepare={"validation": held}, **SMALL)
        assert texts_of(run.corpus_folder / "validation.parquet") == HELD
        assert run.metrics[-1]["validation_perplexity"] > 1
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "1 of the 2 documents in" in said


def test_a_prepared_corpus_takes_the_file_it_was_prepared_with_and_no_other(tmp_path, held):
    prepared = tightlip.prepare(TRAIN, tmp_path / "p", validation=held)
    tightlip.train(prepared.folder, tmp_path / "a", prepare={"validation": held}, **SMALL)
    written(tmp_path / "held.parquet", HELD[:1])
    with pytest.raises(UsageError, match="so validation would do nothing"):
        tightlip.train(prepared.folder, tmp_path / "b", prepare={"validation": held}, **SMALL)
