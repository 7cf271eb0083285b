"""Preparing: what the folder holds follows from source, settings and seed."""

import json
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tightlip.core.errors import UsageError
from tightlip.corpus.encoding import tokenizer_fingerprint
from tightlip.corpus.prepare import is_prepared, open_prepared
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.corpus.readers import open_corpus

ROWS = [
    {
        "user": f"u{number % 3}",
        "text": f"This is note {number} of mine. Write to me{number}@b.org!",
        "when": number,
    }
    for number in range(30)
]
CONFIG = PrepareConfig()


def rows_of(path):
    return pq.read_table(path).to_pylist()


def digests(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_splits_are_the_rows_and_hold_the_right_number(tmp_path):
    prepare(ROWS, tmp_path / "p", CONFIG)
    train, held = rows_of(tmp_path / "p/train.parquet"), rows_of(tmp_path / "p/validation.parquet")
    assert sorted(train + held, key=lambda row: row["when"]) == ROWS
    assert train == sorted(train, key=lambda row: row["when"])
    assert Counter(row["user"] for row in held) == {"u0": 2, "u1": 2, "u2": 2}


def test_tokens_are_those_of_the_saved_tokenizer(tmp_path):
    prepared = prepare(ROWS, tmp_path / "p", CONFIG)
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    assert prepared.train.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    for split, corpus in (("train", prepared.train), ("validation", prepared.validation)):
        rows = rows_of(tmp_path / f"p/{split}.parquet")
        assert corpus.num_documents == len(rows)
        for index, row in enumerate(rows):
            assert (
                corpus.document(index).tolist()
                == tokenizer(row["text"], add_special_tokens=False)["input_ids"]
            )
            assert corpus.user_names[corpus.users[index]] == row["user"]


def test_the_vocabulary_comes_from_training_documents_alone(tmp_path):
    rows = [("a", f"w{chr(97 + number)}x") for number in range(20)]
    prepared = prepare(rows, tmp_path / "p", CONFIG)
    vocabulary = AutoTokenizer.from_pretrained(prepared.tokenizer_folder).get_vocab()
    held = [row["text"] for row in rows_of(tmp_path / "p/validation.parquet")]
    assert held
    assert not set(held) & set(vocabulary)


def test_the_same_settings_give_the_same_files(tmp_path):
    for name in ("one", "two"):
        prepare(ROWS, tmp_path / name, replace(CONFIG, deduplicate="sentences", scrub=True))
    one, two = (digests(tmp_path / name) for name in ("one", "two"))
    own = {"id.json", ".tightlip.sha256"}  # a random id, and the checksum of it
    assert {name for name in one if one[name] != two[name]} == own
    assert one.keys() == two.keys()


def test_another_seed_holds_out_other_documents(tmp_path):
    for seed in (0, 1):
        prepare(ROWS, tmp_path / str(seed), replace(CONFIG, seed=seed))
    assert rows_of(tmp_path / "0/validation.parquet") != rows_of(tmp_path / "1/validation.parquet")


def test_the_same_command_again_touches_nothing(tmp_path):
    source = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), source)
    prepare(source, tmp_path / "p", CONFIG)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "p").rglob("*")}
    again = prepare(source, tmp_path / "p", CONFIG)
    assert again.train.num_documents == 24
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "p").rglob("*")} == times


def test_other_settings_or_another_source_never_overwrite(tmp_path):
    prepare(ROWS, tmp_path / "p", CONFIG)
    before = digests(tmp_path / "p")
    with pytest.raises(
        UsageError, match=r"exists with other settings \(seed\). Choose another out"
    ):
        prepare(ROWS, tmp_path / "p", replace(CONFIG, seed=3))
    with pytest.raises(UsageError, match="exists with another source"):
        prepare(ROWS[:-1], tmp_path / "p", CONFIG)
    (tmp_path / "else").mkdir()
    (tmp_path / "else/notes.txt").touch()
    with pytest.raises(UsageError, match="exists and is no prepared corpus"):
        prepare(ROWS, tmp_path / "else", CONFIG)
    assert digests(tmp_path / "p") == before


def test_a_prepared_folder_opens_and_is_a_corpus(tmp_path):
    prepared = prepare(ROWS, tmp_path / "p", CONFIG)
    assert is_prepared(tmp_path / "p")
    assert not is_prepared(tmp_path)
    assert open_prepared(tmp_path / "p").statistics == prepared.statistics
    texts = [text for batch in open_corpus(tmp_path / "p").batches() for text in batch.texts]
    assert texts == [row["text"] for row in rows_of(tmp_path / "p/train.parquet")]
    with pytest.raises(UsageError, match="is no prepared corpus"):
        open_prepared(tmp_path)


def test_the_statistics_agree_with_counting_by_hand(tmp_path):
    rows = [*ROWS, {"user": "u0", "text": ROWS[0]["text"]}, {"user": "u9", "text": None}]
    config = replace(CONFIG, bad_rows="skip", split="none", scrub=True, deduplicate="none")
    prepared = prepare(rows, tmp_path / "p", config)
    statistics = prepared.statistics
    assert (statistics["documents_read"], statistics["skipped_rows"]) == (31, 1)
    assert (statistics["documents"], statistics["users"]) == (31, 3)
    assert statistics["documents_per_user"] == {"min": 10, "median": 10.0, "max": 11}
    assert statistics["duplicate_documents"] == 1
    # "Write to <EMAIL>!" stands 31 times, the first document's other sentence twice.
    assert statistics["duplicate_sentences"] == 31
    assert statistics["scrubbed"] == {"EMAIL": 31}
    assert statistics["removed"] == {"documents": 0, "sentences": 0, "emptied_documents": 0}
    assert statistics["train"]["tokens"] == statistics["tokens"] == prepared.train.num_tokens
    assert statistics["warnings"] == []
    assert prepared.validation is None
    assert not (tmp_path / "p/validation.parquet").exists()


def test_duplicates_are_removed_where_asked(tmp_path):
    rows = [
        ("a", "One two three. Four five six."),
        ("b", "one two three."),
        ("b", "Four five six. New words here."),
        ("c", ""),
    ]
    config = replace(CONFIG, split="none")
    by_sentence = prepare(rows, tmp_path / "s", replace(config, deduplicate="sentences"))
    assert [row["text"] for row in rows_of(tmp_path / "s/train.parquet")] == [
        rows[0][1],
        "New words here.",
        "",
    ]
    assert by_sentence.statistics["removed"] == {
        "documents": 1,
        "sentences": 2,
        "emptied_documents": 1,
    }
    by_document = prepare(
        [*rows, rows[0]], tmp_path / "d", replace(config, deduplicate="documents")
    )
    assert len(rows_of(tmp_path / "d/train.parquet")) == 4
    assert by_document.statistics["removed"] == {
        "documents": 1,
        "sentences": 0,
        "emptied_documents": 0,
    }


def test_by_user_validation_has_users_of_its_own(tmp_path):
    prepared = prepare(ROWS, tmp_path / "p", replace(CONFIG, split="user", holdout=0.4))
    assert prepared.validation.num_users == 1
    assert not set(prepared.validation.user_names) & set(prepared.train.user_names)


def test_attributes_without_one_type_are_kept_as_json(tmp_path):
    rows = [
        {
            "user": "a",
            "text": "x",
            "mixed": 1,
            "deep": {},
            "n": 2**60,
            "text_": "kept",
            "author": "me",
        },
        {"user": "a", "text": "y", "mixed": "one", "deep": {"k": [1]}, "n": 0.5, "late": True},
    ]
    prepare(
        rows, tmp_path / "p", replace(CONFIG, split="none", user_column="author", bad_rows="skip")
    )
    (row,) = rows_of(tmp_path / "p/train.parquet")
    assert (row["user"], row["user_"], row["text_"]) == ("me", "a", "kept")
    prepare(rows, tmp_path / "q", replace(CONFIG, split="none"))
    first, second = rows_of(tmp_path / "q/train.parquet")
    assert [json.loads(row["mixed"]) for row in (first, second)] == [1, "one"]
    assert json.loads(second["deep"]) == {"k": [1]}
    assert [json.loads(row["n"]) for row in (first, second)] == [2**60, 0.5]
    assert (first["late"], second["late"]) == (None, True)


def foreign_tokenizer(folder, words):
    backend = Tokenizer(
        models.WordLevel(
            {"[UNK]": 0, **{word: 1 + at for at, word in enumerate(words)}}, unk_token="[UNK]"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


def test_a_models_own_tokenizer_is_used_as_it_is(tmp_path):
    folder = foreign_tokenizer(tmp_path / "t", ["This", "is", "note", "of", "mine.", "Write", "to"])
    prepared = prepare(ROWS, tmp_path / "p", replace(CONFIG, tokenizer=folder))
    assert prepared.train.document(0)[:3].tolist() == [1, 2, 3]
    assert prepared.train.tokenizer_fingerprint == tokenizer_fingerprint(
        AutoTokenizer.from_pretrained(folder)
    )


def test_a_tokenizer_that_knows_little_is_warned_about(tmp_path):
    folder = foreign_tokenizer(tmp_path / "t", ["This"])
    prepared = prepare(ROWS, tmp_path / "p", replace(CONFIG, tokenizer=folder))
    assert "of train's tokens are [UNK]" in prepared.statistics["warnings"][0]


def test_a_tokenizer_that_knows_nothing_is_refused(tmp_path):
    folder = foreign_tokenizer(tmp_path / "t", ["漢字"])
    with pytest.raises(
        UsageError, match=r"All \d+ tokens of train are \[UNK\].*does not fit this text"
    ):
        prepare(ROWS, tmp_path / "p", replace(CONFIG, tokenizer=folder))
    assert not (tmp_path / "p").exists()


def test_a_vocabulary_nobody_shares_is_refused(tmp_path):
    with pytest.raises(UsageError, match="lower min_users"):
        prepare(
            [("a", "x y"), ("b", "z w")], tmp_path / "p", replace(CONFIG, min_users=2, split="none")
        )


def test_documents_of_no_tokens_are_kept_and_noted(tmp_path):
    prepared = prepare([("a", ""), ("b", " ")], tmp_path / "p", replace(CONFIG, split="none"))
    assert (prepared.train.num_documents, prepared.train.num_tokens) == (2, 0)
    assert prepared.statistics["warnings"] == ["train holds no tokens: every document is empty."]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"split": "documents"}, "Closest: document"),
        ({"holdout": 0.0}, "holdout=0.0 is not a share"),
        ({"holdout": 1.5}, "split='none'"),
        ({"names": True}, "Add scrub=True"),
        ({"tokenizer": "t", "min_users": 2}, "Leave one of them out"),
        ({"vocabulary": "word"}, "Closest: words"),
        ({"vocabulary": "bpe", "min_users": 3}, "vocabulary='words'"),
        ({"deduplicate": "yes"}, "Available: none, sentences, documents"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings, says):
    with pytest.raises(UsageError, match=says):
        PrepareConfig(**settings)


@pytest.mark.parametrize("split", ["document", "user"])
def test_a_split_that_holds_out_nothing_is_refused(tmp_path, split):
    with pytest.raises(UsageError, match="holds out nothing"):
        prepare([("a", "x y z")], tmp_path / "p", replace(CONFIG, split=split))
    assert not (tmp_path / "p").exists()


def test_a_tokenizer_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        prepare(ROWS, tmp_path / "p", replace(CONFIG, tokenizer=str(tmp_path / "no")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="cannot be loaded"):
        prepare(ROWS, tmp_path / "p", replace(CONFIG, tokenizer=str(tmp_path / "empty")))
