import os
import stat

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from tightlip.core.errors import UsageError
from tightlip.corpus.canaries import read_check_key
from tightlip.corpus.vocabulary import word_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.training.batches import Rows, gather
from tightlip.training.config import TrainConfig
from tightlip.training.recipe import drawn_tokens, plant, uniform

BOS, PAD, SPECIAL, VOCABULARY = 1, 0, {0, 1, 2}, 30


def some_rows(bos=BOS):
    """Two rows of one document of user 3, and one of another document of user 0."""
    return Rows(
        tokens=np.arange(10, 22, dtype=np.int32),
        starts=np.array([0, 4, 8]),
        lengths=np.array([5, 4, 4], np.int32),
        begins=np.array([True, False, True]) & (bos is not None),
        users=np.array([3, 3, 0], np.int32),
        documents=np.array([0, 0, 5]),
        bos=bos,
        pad=PAD,
    )


def planted(path, num_canaries=40, rows=None, **changed):
    given = {"vocabulary_size": VOCABULARY, "length": 6} | changed
    size = given.pop("vocabulary_size")
    draw = uniform(np.setdiff1d(np.arange(size), list(SPECIAL)), size)
    key_file = path / "dp_check.json"
    return plant(rows or some_rows(), num_canaries, key_file=key_file, draw=draw, **given)


def ids_of(rows, row):
    return gather(rows, np.array([row])).input_ids_BT[0].tolist()


@pytest.mark.parametrize("bos", [BOS, None])
def test_included_canaries_stand_behind_the_rows_that_were_there(tmp_path, bos):
    before = some_rows(bos)
    rows = planted(tmp_path, rows=before)
    key = read_check_key(tmp_path / "dp_check.json")
    assert [ids_of(rows, row) for row in range(3)] == [ids_of(before, row) for row in range(3)]
    begin = [] if bos is None else [bos]
    expected = [begin + tokens for tokens in key.tokens_ML[key.included_M].tolist()]
    assert [ids_of(rows, row) for row in range(3, len(rows))] == expected
    assert (rows.num_targets[3:] == 6 - (bos is None)).all()


def test_every_canary_is_a_user_and_a_document_of_its_own(tmp_path):
    rows = planted(tmp_path)
    included = np.flatnonzero(read_check_key(tmp_path / "dp_check.json").included_M)
    assert rows.users[3:].tolist() == (4 + included).tolist()
    assert rows.documents[3:].tolist() == (6 + included).tolist()
    assert rows.users[:3].tolist() == [3, 3, 0]
    for name in ("tokens", "starts", "lengths", "begins", "users", "documents"):
        assert getattr(rows, name).dtype == getattr(some_rows(), name).dtype, name


def test_canaries_use_every_word_but_special_ones(tmp_path):
    planted(tmp_path, 200)
    words = set(read_check_key(tmp_path / "dp_check.json").tokens_ML.ravel().tolist())
    assert words == set(range(VOCABULARY)) - SPECIAL


def test_coins_are_fair_and_no_two_runs_share_them(tmp_path):
    planted(tmp_path / "one", 2000)
    planted(tmp_path / "two", 2000)
    one, two = (read_check_key(tmp_path / name / "dp_check.json") for name in ("one", "two"))
    assert binomtest(int(one.included_M.sum()), 2000).pvalue > 1e-6
    assert binomtest(int((one.included_M == two.included_M).sum()), 2000).pvalue > 1e-6
    assert (one.tokens_ML != two.tokens_ML).any()


def test_a_resumed_run_has_the_very_same_rows(tmp_path):
    first, again = planted(tmp_path), planted(tmp_path)
    assert first.fingerprint() == again.fingerprint()
    for name in ("tokens", "users", "documents"):
        assert (getattr(first, name) == getattr(again, name)).all()


@pytest.mark.parametrize("changed", [{"num_canaries": 41}, {"length": 7}])
def test_a_key_of_another_size_is_refused(tmp_path, changed):
    planted(tmp_path)
    with pytest.raises(UsageError, match=r"40 canaries of 6 tokens, .* another out"):
        planted(tmp_path, **changed)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"tokens": ["1 2", "1"], "included": [true]}'])
def test_a_damaged_key_is_refused(tmp_path, text):
    (tmp_path / "dp_check.json").write_text(text)
    with pytest.raises(UsageError, match="damaged"):
        planted(tmp_path)


def test_a_key_with_fewer_coins_than_canaries_is_refused(tmp_path):
    planted(tmp_path, 3)
    key = tmp_path / "dp_check.json"
    key.write_text(key.read_text().replace('"num_canaries": 3', '"num_canaries": 2'))
    with pytest.raises(UsageError, match="damaged"):
        planted(tmp_path, 3)


@pytest.mark.parametrize("wrong", [{"num_canaries": 0}, {"length": 1}, {"vocabulary_size": 4}])
def test_canaries_that_could_tell_nothing_are_refused(tmp_path, wrong):
    with pytest.raises(UsageError):
        planted(tmp_path, **wrong)
    assert not (tmp_path / "dp_check.json").exists()


def test_only_the_owner_can_read_the_key(tmp_path):
    before = os.umask(0)
    try:
        planted(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "dp_check.json").stat().st_mode) == 0o600


def drawn(kind, tokenizer, model="lstm"):
    tokens = drawn_tokens(kind, TrainConfig.of(model=str(model)), tokenizer)
    return tokens((40, 6), np.random.default_rng(0))


@pytest.fixture
def start(tmp_path):
    """A folder to start from: a model with three rows more than its tokenizer has words, which
    would hardly ever write another word than its favourite."""
    tokenizer = word_tokenizer([f"w{number}" for number in range(600)])
    model = LSTMForCausalLM(LSTMConfig(len(tokenizer) + 3, 4, 4, 1))
    with torch.no_grad():
        model.get_output_embeddings().bias[7] = 25.0
    model.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    return tmp_path / "start", tokenizer


def test_rare_texts_are_of_the_vocabularys_last_tenth(start):
    _, tokenizer = start
    assert drawn("rare", tokenizer).min() == len(tokenizer) - 60
    assert drawn("random", tokenizer).min() < len(tokenizer) / 2


def test_new_texts_are_of_entries_that_no_text_is_cut_into(start):
    folder, tokenizer = start
    assert set(drawn("new", tokenizer, folder).ravel()) == {len(tokenizer) + n for n in range(3)}
    with pytest.raises(UsageError, match="cut into, and lstm has 0"):
        drawn("new", tokenizer)


def test_sampled_texts_are_what_the_model_to_start_from_writes(start):
    folder, tokenizer = start
    tokens = drawn("sampled", tokenizer, folder)
    assert tokens.shape == (40, 6)
    assert (tokens == 7).mean() > 0.9  # e^12.5 against 600 others, at temperature 2
    with pytest.raises(UsageError, match="a new lstm knows nothing yet"):
        drawn("sampled", tokenizer)
