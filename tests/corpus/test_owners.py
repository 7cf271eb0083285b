"""A user column that holds lists: a text with several owners, from file to tokens."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tightlip
from tightlip.core.errors import TightlipError, UsageError
from tightlip.corpus.canaries import CanaryConfig, plant_in
from tightlip.corpus.owners import Writer, owners_of
from tightlip.corpus.prepare import open_prepared
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tokens import open_tokenized, tokenize_documents
from tightlip.corpus.vocabulary import build_tokenizer

MAIL = [
    (["ann", "bob"], "see you at noon"),
    (["bob"], "note to myself"),
    (["cyd", "ann", "dan"], ""),
    (["bob", "ann"], "noon it is"),
]


def written(folder, kind, rows=MAIL):
    rows = [{"user": owners, "text": text} for owners, text in rows]
    if kind == "list":
        return rows
    path = folder / f"mail.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(source, **settings):
    batches = open_corpus(source, **settings).batches()
    return [pair for batch in batches for pair in zip(batch.users, batch.texts, strict=True)]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "list"])
def test_lists_of_owners_are_read_with_the_writer_first(tmp_path, kind):
    found = read(written(tmp_path, kind))
    assert [(list(owners_of(user)), text) for user, text in found] == MAIL
    assert [user for user, _ in found] == ["ann", "bob", "cyd", "bob"]


def test_a_saved_dataset_and_whole_numbers_are_read_alike(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"user": [[1, 2], [3]], "text": ["a", "b"]})
    rows.save_to_disk(tmp_path / "saved")
    for source in (rows, tmp_path / "saved"):
        assert [owners_of(user) for user, _ in read(source)] == [("1", "2"), ("3",)]


@pytest.mark.parametrize(
    ("owners", "because"),
    [
        ([], "has an empty list of owners in column 'user'"),
        (["ann", None], "has null or an empty name among the owners"),
        (["ann", ""], "has null or an empty name among the owners"),
        (["ann", "bob", "ann"], "names an owner twice"),
        (["ann", "\ud800"], "not UTF-8"),
    ],
)
def test_a_bad_list_is_an_error_that_names_the_row_or_is_counted(tmp_path, owners, because):
    path = written(tmp_path, "jsonl", [*MAIL, (owners, "x")])
    with pytest.raises(UsageError, match=rf"mail\.jsonl, row 5 .*{because}"):
        read(path)
    corpus = open_corpus(path, bad_rows="skip")
    assert sum(len(batch) for batch in corpus.batches()) == 4
    assert corpus.num_skipped == 1


def test_floats_and_lists_in_lists_are_refused_even_where_rows_are_skipped():
    for owners in ([1.5], [["ann"]], [True]):
        with pytest.raises(UsageError, match="user column"):
            read([(owners, "x")], bad_rows="skip")


def test_a_writer_is_a_name_that_keeps_its_others():
    ann = Writer(["ann", "bob"])
    assert (ann, {ann: 1}["ann"], f"{ann}") == ("ann", 1, "ann")
    assert owners_of(pickle.loads(pickle.dumps(ann))) == ("ann", "bob")
    assert type(str(ann)) is str


def tokens(folder, rows):
    corpus = open_corpus([(owners, text) for owners, text in rows])
    return tokenize_documents(corpus.batches(), build_tokenizer(corpus), folder)


def test_tokens_keep_all_owners_and_number_those_who_wrote_nothing(tmp_path):
    corpus = tokens(tmp_path / "t", MAIL)
    assert corpus.user_names == ["ann", "bob", "cyd", "dan"]
    assert corpus.users.tolist() == [0, 1, 2, 1]
    places, owners = corpus.owned()
    assert list(zip(places.tolist(), owners.tolist(), strict=True)) == [
        *((0, 0), (0, 1), (1, 1), (2, 2), (2, 0), (2, 3), (3, 1), (3, 0)),
    ]
    chosen = corpus.owned(np.array([3, 1, 3]))
    assert [part.tolist() for part in chosen] == [[0, 0, 1, 2, 2], [1, 0, 1, 1, 0]]
    assert corpus.statistics(None)["documents_per_user"]["max"] == 3


def test_one_owner_each_leaves_the_files_and_the_fingerprint_as_they_were(tmp_path):
    alone = [(owners[0], text) for owners, text in MAIL]
    plain, listed = (
        tokens(tmp_path / "a", alone),
        tokens(tmp_path / "b", [([u], t) for u, t in alone]),
    )
    assert plain.corpus_fingerprint == listed.corpus_fingerprint
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        path.name for path in (tmp_path / "a").iterdir()
    }
    assert plain.owners is None
    assert plain.corpus_fingerprint != tokens(tmp_path / "c", MAIL).corpus_fingerprint


@pytest.mark.parametrize("name", ["owners.npy", "owner_bounds.npy"])
def test_a_folder_that_lost_its_owners_is_not_opened_as_one_of_single_owners(tmp_path, name):
    tokens(tmp_path / "t", MAIL)
    (tmp_path / "t" / name).unlink()
    with pytest.raises((TightlipError, OSError)):
        open_tokenized(tmp_path / "t")


def test_owners_that_are_not_of_this_corpus_are_refused(tmp_path):
    tokens(tmp_path / "t", MAIL)
    for wrong in (np.array([1, 0, 1, 2, 0, 3, 1, 0]), np.array([0, 9, 1, 2, 0, 3, 1, 0])):
        np.save(tmp_path / "t" / "owners.npy", wrong.astype(np.int32))
        with pytest.raises(UsageError):
            open_tokenized(tmp_path / "t")


def test_a_prepared_corpus_keeps_owners_in_its_table_and_in_what_is_cut_from_it(tmp_path):
    made = tightlip.prepare(written(tmp_path, "jsonl"), tmp_path / "p", split="none")
    assert pq.read_table(tmp_path / "p" / "train.parquet")["user"].to_pylist() == [
        o for o, _ in MAIL
    ]
    again = tightlip.prepare(tmp_path / "p", tmp_path / "q", split="document", holdout=0.5)
    assert made.train.num_users == 4
    assert open_prepared(tmp_path / "q").train.owners is not None
    assert again.validation is not None


def test_whole_people_cannot_be_held_out_where_texts_have_several(tmp_path):
    with pytest.raises(UsageError, match="who may fall on both sides"):
        tightlip.prepare(written(tmp_path, "jsonl"), tmp_path / "p", split="user")


def test_a_planted_canary_is_its_users_alone_and_other_texts_keep_their_owners(tmp_path):
    corpus = open_corpus(written(tmp_path, "jsonl"))
    config = CanaryConfig(templates=("my pin is {digits:4}",), repetitions=(2,))
    plant_in(corpus, tmp_path / "planted", config)
    found = read(next((tmp_path / "planted").glob("*.parquet")))
    planted = [owners_of(user) for user, text in found if "pin" in text]
    assert [len(owners) for owners in planted] == [1, 1]
    assert sorted(owners_of(u) for u, t in found if "pin" not in t) == sorted(
        tuple(owners) for owners, _ in MAIL
    )
