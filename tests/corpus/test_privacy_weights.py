"""Privacy weights: from log-perplexities to ρ, and the folder they stand in."""

import json
import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from by_hand import unlisted
from tightlip.core.checksums import LIST
from tightlip.core.errors import UsageError
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.corpus.privacy_weights import (
    GRID_NATS,
    INFO_KEYS,
    NORMALISATIONS,
    SOUND,
    PrivacyWeights,
    WeightsConfig,
    minmax_weights,
    near_an_edge,
    on_grid,
    public_constants,
    public_rank_weights,
    public_weights,
    rank_weights,
    read_weights,
    weights_of,
    write_weights,
)
from tightlip.corpus.public_text import WordFrequencies, open_public, words_of

LEAST = 0.05
NATS = st.floats(0, 40) | st.just(math.nan)


def by_counting(value, others):
    """Oracle: the share of others that are no greater."""
    share = sum(other <= value for other in others) / len(others)
    return min(1.0, max(LEAST, share))


def by_hand(value, a, b):
    return min(1.0, max(LEAST, (value - a) / (b - a)))


@given(st.lists(NATS, min_size=1, max_size=12), st.lists(st.floats(0, 40), min_size=1, max_size=12))
def test_ranks_agree_with_counting(nats, public):
    found = public_rank_weights(np.array(nats), np.array(public), LEAST)
    for value, rho in zip(nats, found, strict=True):
        assert rho == (1.0 if math.isnan(value) else by_counting(value, public))


@given(st.lists(NATS, min_size=1, max_size=12), st.floats(0, 10), st.floats(0.1, 10))
def test_public_weights_agree_with_the_formula(nats, a, width):
    found = public_weights(np.array(nats), a, a + width, LEAST)
    for value, rho in zip(nats, found, strict=True):
        assert rho == (1.0 if math.isnan(value) else by_hand(value, a, a + width))


@given(st.lists(st.floats(0, 12), min_size=2, max_size=12))
def test_minmax_stretches_perplexities_and_not_their_logarithms(nats):
    perplexities = np.exp(nats)
    if np.ptp(perplexities) < 1e-6:
        return
    low, high = perplexities.min(), perplexities.max()
    expected = [by_hand(each, low, high) for each in perplexities]
    assert minmax_weights(np.array(nats), LEAST) == pytest.approx(expected, abs=1e-6)


def test_minmax_survives_a_perplexity_no_float_can_hold():
    assert minmax_weights(np.array([2.0, 3.0, 5000.0]), LEAST).tolist() == [LEAST, LEAST, 1.0]


@pytest.mark.parametrize("weights", [minmax_weights, rank_weights])
def test_a_corpus_all_alike_or_unscored_is_protected_in_full(weights):
    for nats in ([2.0, 2.0], [math.nan, math.nan], [3.0]):
        assert weights(np.array(nats), LEAST).tolist() == [1.0] * len(nats)


def test_the_constants_are_the_public_quantiles():
    public = np.append(np.arange(101.0), math.nan)
    assert public_constants(public) == (5.0, 95.0)


def test_public_text_that_cannot_say_what_is_rare_is_refused():
    with pytest.raises(UsageError, match="same perplexity"):
        public_constants(np.array([2.0, 2.0, 2.0]))
    with pytest.raises(UsageError, match="could be scored"):
        public_constants(np.array([math.nan]))


def the_weights(normalisation, nats, public):
    config = WeightsConfig(
        weights=normalisation, public_model="/", public_corpus="/", least_weight=LEAST
    )
    return weights_of(config, np.array(nats), np.array(public))[0]


@pytest.mark.parametrize("normalisation", SOUND)
@given(data=st.data())
@settings(max_examples=50)
def test_one_document_moves_no_other_weight(normalisation, data):
    nats = data.draw(st.lists(NATS, min_size=2, max_size=10))
    public = data.draw(st.lists(st.floats(0, 40), min_size=2, max_size=10, unique=True))
    place, other = data.draw(st.integers(0, len(nats) - 1)), data.draw(NATS)
    before = the_weights(normalisation, nats, public)
    after = the_weights(normalisation, [*nats[:place], other, *nats[place + 1 :]], public)
    assert np.delete(before, place).tolist() == np.delete(after, place).tolist()
    assert np.delete(before, place).tolist() == (
        the_weights(normalisation, nats[:place] + nats[place + 1 :], public).tolist()
    )


@pytest.mark.parametrize("normalisation", ["minmax", "rank"])
def test_over_the_corpus_itself_one_document_moves_the_others(normalisation):
    before = the_weights(normalisation, [1.0, 2.0, 3.0, 4.0], [])
    after = the_weights(normalisation, [1.0, 2.0, 3.0, 1.5], [])
    assert (before[:3] != after[:3]).any()


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@given(nats=st.lists(NATS, min_size=1, max_size=10))
@settings(max_examples=50)
def test_every_weight_is_above_nothing_and_at_most_one(normalisation, nats):
    rho = the_weights(normalisation, nats, [1.0, 2.0, 5.0])
    assert ((rho >= LEAST) & (rho <= 1)).all()


@given(st.floats(0, 50), st.floats(-1e-4, 1e-4))
def test_far_from_an_edge_a_small_change_changes_nothing(nats, change):
    here = np.array([nats])
    if not near_an_edge(here, 1.1e-4)[0]:
        assert on_grid(here) == on_grid(here + change)
    assert abs(on_grid(here)[0] - nats) <= GRID_NATS / 2 + 1e-9


# Settings


def test_settings_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(UsageError, match="Closest: minmax"):
        WeightsConfig(weights="minimax", public_corpus=tmp_path)
    for least in (0.0, 1.0, -1, math.nan):
        with pytest.raises(UsageError, match=r"not between 0 and 1|a finite number"):
            WeightsConfig(least_weight=least, public_corpus=tmp_path)
    with pytest.raises(UsageError, match="neither is given"):
        WeightsConfig(weights="rank")
    with pytest.raises(UsageError, match="public_corpus=FILE"):
        WeightsConfig(public_model=tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        WeightsConfig(public_model=tmp_path / "no", public_corpus=tmp_path)
    WeightsConfig(weights="minmax", public_model=tmp_path)


# The folder


def prepared(folder, num_documents=6):
    rows = [("u", f"note {number} of mine") for number in range(num_documents)]
    return prepare(rows, folder, PrepareConfig(split="none"))


def some_weights(corpus, *, text=None):
    info = dict.fromkeys(INFO_KEYS) | {
        "text_fingerprint": text or corpus.train.corpus_fingerprint,
        "least_weight": LEAST,
    }
    num = corpus.train.num_documents
    nats = np.append(np.linspace(1, 2, num - 1), math.nan)
    return PrivacyWeights(rho=np.linspace(0.1, 1, num), log_perplexities=nats, info=info)


def test_weights_are_read_as_written_and_only_their_owner_can(tmp_path):
    corpus = prepared(tmp_path / "p")
    weights = some_weights(corpus)
    for page in ("one", "two"):  # the second replaces the first whole
        write_weights(corpus.folder, weights, np.ones(3) if page == "one" else None, page)
    found = read_weights(corpus.folder)
    assert found.rho.tolist() == weights.rho.tolist()
    np.testing.assert_array_equal(found.log_perplexities, weights.log_perplexities)
    assert found.info == weights.info
    place = corpus.folder / "weights"
    assert (place / "weights.html").read_text() == "two"
    assert not (place / "public_log_perplexities.npy").exists()
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}
    assert place.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in corpus.folder.glob(".*")] == [LIST]


def test_missing_weights_name_the_command(tmp_path):
    corpus = prepared(tmp_path / "p")
    with pytest.raises(UsageError, match=r"no privacy weights\. Run: tightlip prepare CORPUS"):
        read_weights(corpus.folder)


def damage_bytes(place):
    (place / "rho.npy").write_bytes(b"\x93NUMPY")


def damage_info(place):
    (place / "info.json").write_text("{")


def drop_a_key(place):
    info = json.loads((place / "info.json").read_text())
    del info["is_sound"]
    (place / "info.json").write_text(json.dumps(info))


def make_a_weight_nothing(place):
    np.save(place / "rho.npy", np.zeros(6))


def lose_a_weight(place):
    np.save(place / "rho.npy", np.ones(5))


@pytest.mark.parametrize(
    "damage", [damage_bytes, damage_info, drop_a_key, make_a_weight_nothing, lose_a_weight]
)
def test_damaged_weights_are_refused(tmp_path, damage):
    corpus = prepared(tmp_path / "p")
    write_weights(corpus.folder, some_weights(corpus), None, "")
    damage(corpus.folder / "weights")
    with pytest.raises(UsageError, match=r"damaged.*Run: tightlip prepare"):
        read_weights(corpus.folder)
    unlisted(corpus.folder / "weights/info.json")
    with pytest.raises(UsageError, match=r"damaged.*Run: tightlip prepare"):
        read_weights(corpus.folder)


def test_weights_of_other_text_are_refused(tmp_path):
    corpus = prepared(tmp_path / "p")
    write_weights(corpus.folder, some_weights(corpus, text="0" * 64), None, "")
    with pytest.raises(UsageError, match="other text"):
        read_weights(corpus.folder)


# The frequency estimate

PUBLIC = ["the cat sat", "the cat ran", "a dog sat on the cat", "a bird"]


def by_definition(text, public):
    """Oracle: the mixture written out over the list of all pairs."""
    pairs = [
        pair for each in public for pair in zip(["", *words_of(each)], words_of(each), strict=False)
    ]
    words = Counter(word for _, word in pairs)
    total = 0.0
    own = words_of(text)
    for first, word in zip(["", *own], own, strict=False):
        follow = [second for left, second in pairs if left == first]
        alone = words[word] / len(pairs)
        after = follow.count(word) / len(follow) if follow else alone
        total -= math.log(0.6 * after + 0.35 * alone + 0.05 / (len(words) + 1))
    return total / len(own)


@pytest.mark.parametrize("text", ["the cat sat", "The bird, sat.", "zebra", "on on on the cat"])
def test_the_estimate_is_the_mixture_it_says(text):
    assert WordFrequencies(PUBLIC).log_perplexity(text) == pytest.approx(
        by_definition(text, PUBLIC)
    )


@pytest.mark.parametrize("place", range(len(PUBLIC)))
def test_a_public_text_is_scored_as_if_it_were_not_there(place):
    others = PUBLIC[:place] + PUBLIC[place + 1 :]
    found = WordFrequencies(PUBLIC).log_perplexity(PUBLIC[place], without_itself=True)
    assert found == pytest.approx(by_definition(PUBLIC[place], others))
    assert found == pytest.approx(WordFrequencies(others).log_perplexity(PUBLIC[place]))


@pytest.mark.parametrize("first", ["", "the", "cat", "zebra"])
def test_the_estimate_sums_to_one(first):
    counts = WordFrequencies(PUBLIC)
    nothing = WordFrequencies([])
    total = sum(
        counts._probability(first, word, nothing, counts.num_known)
        for word in [*counts.words, "never seen"]
    )
    assert total == pytest.approx(1)


def test_a_text_without_words_is_not_scored():
    assert math.isnan(WordFrequencies(PUBLIC).log_perplexity(" \n"))


def test_one_public_text_alone_still_gives_a_figure():
    assert math.isfinite(WordFrequencies(["a b"]).log_perplexity("a b", without_itself=True))


# Public text


def test_public_text_needs_no_users(tmp_path):
    columns = {"user_column": "user", "text_column": "text", "bad_rows": "error"}
    texts = [f"line {number}" for number in range(2500)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"user": ["u"] * 2500, "text": texts}), tmp_path / "b.parquet")
    for name in ("a", "b"):
        public = open_public(tmp_path / f"{name}.parquet", **columns)
        assert [text for batch in public.batches() for text in batch.texts] == texts
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n{"text": null}\n')
    with pytest.raises(UsageError, match="row 2 has no text"):
        list(open_public(tmp_path / "c.jsonl", **columns).batches())
    skipping = open_public(tmp_path / "c.jsonl", **(columns | {"bad_rows": "skip"}))
    assert [batch.texts for batch in skipping.batches()] == [["x"]]
    assert skipping.num_skipped == 1
    other = columns | {"text_column": "words"}
    assert open_public(tmp_path / "a.parquet", **other).fingerprint()
    (tmp_path / "d.jsonl").write_text('{"line": "x"}\n')
    with pytest.raises(UsageError, match="no column 'words' and none named text"):
        open_public(tmp_path / "d.jsonl", **other)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt-completion"),
    ],
)
def test_public_chats_need_no_users(tmp_path, row, told):
    columns = {"user_column": "user", "text_column": "text", "bad_rows": "error"}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([row] * 3), path)
    same = tmp_path / "b.parquet"
    pq.write_table(pa.Table.from_pylist([{"user": "u", **row}] * 3), same)
    public, with_users = (open_public(each, **columns) for each in (path, same))
    assert public.format == with_users.format == told
    documents = [[one.document for one in each.raw_documents()] for each in (public, with_users)]
    assert documents[0] == documents[1]
    assert len(documents[0]) == 3
