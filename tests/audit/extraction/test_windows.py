"""Windows, whose they are and how likely they are drawn: against going through them one by one."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from standins import scanned
from tightlip.audit.extraction.windows import (
    WITHIN,
    Owned,
    check_memory,
    longest_elsewhere,
    queries_for,
    search_windows,
)
from tightlip.core.errors import UsageError
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan import store as store_module
from tightlip.scan.decoding import scorer_of
from tightlip.scan.options import Decoding
from tightlip.scan.store import ScanStore

MOST = 6


def corpus_of(documents, roles=None):
    """Documents as (owners, tokens), the writer first."""
    owners = [list(who) for who, _ in documents]
    bounds = np.cumsum([0, *(len(ids) for _, ids in documents)])
    chats = {} if roles is None else {
        "roles": np.array([role for row in roles for role in row], np.int8),
        "trained": np.ones(bounds[-1], np.int8),
        "role_names": ["template", "user", "assistant"],
    }  # fmt: skip
    return TokenizedCorpus(
        tokens=np.array([token for _, ids in documents for token in ids], np.int32),
        bounds=bounds,
        users=np.array([who[0] for who in owners], np.int32),
        owners=np.array([one for who in owners for one in who], np.int32),
        owner_bounds=np.cumsum([0, *(len(who) for who in owners)]),
        user_names=[f"user {n}" for n in range(1 + max((max(who) for who in owners), default=-1))],
        corpus_fingerprint="c",
        tokenizer_fingerprint="t",
        **chats,
    )


def shared_with_others(documents, number, place, owner, most):
    """Oracle: how far the text from a place on also stands where `owner` owns nothing."""
    text, longest = documents[number][1][place:], 0
    for owners, ids in documents:
        if owner in owners:
            continue
        for begin in range(len(ids)):
            size = 0
            while size < min(len(text), len(ids) - begin, most) and text[size] == ids[begin + size]:
                size += 1
            longest = max(longest, size)
    return longest


OWNERS = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
DOCUMENTS = st.lists(st.tuples(OWNERS, st.lists(st.integers(0, 2), max_size=12)), max_size=7)


@given(DOCUMENTS)
def test_what_others_share_is_found_as_by_comparing_every_place(documents):
    elsewhere = longest_elsewhere(corpus_of(documents), MOST)
    for number, (owners, ids) in enumerate(documents):
        for slot, owner in enumerate(owners):
            for place in range(len(ids)):
                found = elsewhere.at(*(np.array([n]) for n in (number, slot, place)))
                assert found.tolist() == [shared_with_others(documents, number, place, owner, MOST)]


@given(DOCUMENTS, DOCUMENTS)
def test_two_corpora_joined_are_of_different_people(one, other):
    both = longest_elsewhere(corpus_of(other), MOST, corpus_of(one))
    moved = one + [([who + 10 for who in owners], ids) for owners, ids in other]
    for number, (owners, ids) in enumerate(other):
        for slot, owner in enumerate(owners):
            for place in range(len(ids)):
                found = both.at(*(np.array([n]) for n in (number, slot, place)))
                want = shared_with_others(moved, len(one) + number, place, owner + 10, MOST)
                assert found.tolist() == [want]


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_tries_are_the_least_that_have_the_chance(share):
    probabilities = np.array([1.0, 0.9, 0.5, 0.31, 0.01, 1e-4])
    for probability, tries in zip(probabilities, queries_for(share, np.log(probabilities)), strict=True):  # fmt: skip
        assert 1 - (1 - probability) ** tries >= share - 1e-9
        assert tries == 1 or 1 - (1 - probability) ** (tries - 1) < share
    # Small ones by the closed form, which float64 has no 1 - P for.
    small = queries_for(share, np.array([-40.0, -300.0, -1000.0, -np.inf]))
    assert small[:2] == pytest.approx(-math.log1p(-share) * np.exp([40.0, 300.0]), rel=1e-11)
    assert small[2:].tolist() == [math.inf, math.inf]


# Log-probabilities that sum without rounding, some tokens never drawn, some not scored.
VALUES = [-0.25, -0.5, -1.0, -2.0, -8.0, 0.0, -math.inf]


def windows_by_hand(documents, roles, columns, textless, length):
    """Oracle: (user, role) to windows as (log-probability, reference's, place), and how many."""
    found, num_windows, begin = defaultdict(list), 0, 0
    every = [
        (tuple(ids[at : at + length]), set(owners))
        for owners, ids in documents
        for at in range(len(ids) - length + 1)
    ]
    for number, (owners, ids) in enumerate(documents):
        for at in range(len(ids) - length + 1):
            window, spoken = ids[at : at + length], roles[number][at : at + length]
            place = slice(begin + at, begin + at + length)
            mine, theirs = columns[0][place], columns[1][place]
            if set(window) & textless or len({*spoken}) > 1 or spoken[0] == 0 or np.isnan(mine).any():  # fmt: skip
                continue
            num_windows += 1
            alone = set.intersection(*(who for text, who in every if text == tuple(window)))
            for owner in alone & set(owners):
                found[owner, spoken[0]].append((math.fsum(mine) if np.isfinite(mine).all() else -math.inf, math.fsum(theirs) if np.isfinite(theirs).all() else -math.inf, begin + at))  # fmt: skip
        begin += len(ids)
    return found, num_windows


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("with_reference", [False, True])
def test_windows_are_found_as_one_by_one(seed, with_reference, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 25)
    draw = np.random.default_rng(seed)
    documents = [
        (draw.permutation(4)[: draw.integers(1, 4)].tolist(), draw.integers(0, 4, draw.integers(0, 15)).tolist())
        for _ in range(12)
    ]  # fmt: skip
    roles = [np.sort(draw.integers(0, 3, len(ids))).tolist() for _, ids in documents]
    corpus = corpus_of(documents, roles)
    columns = [draw.choice(VALUES, corpus.num_tokens).astype(np.float32) for _ in range(2)]
    for begin in corpus.bounds[:-1]:
        if begin < corpus.num_tokens and draw.random() < 0.4:
            columns[0][begin] = columns[1][begin] = np.nan

    def scan_of(column, name):
        scorer = scorer_of(Decoding(temperature=2.0))
        cut = lambda tokens, bounds: (column[bounds[0] : bounds[-1]],)  # noqa: E731
        return ScanStore(tmp_path / name).scan(corpus, key={}, open_scan=lambda: cut, description="", scorer=scorer)  # fmt: skip

    found = search_windows(
        scan_of(columns[0], "model"),
        scan_of(columns[1], "reference") if with_reference else None,
        Owned(by_tokens=longest_elsewhere(corpus, 5), by_words=None),
        lengths=(1, 2, 5),
        carries_text=np.array([True, True, True, False]),
    )
    for one in found:
        by_hand, num_windows = windows_by_hand(documents, roles, columns, {3}, one.length)
        assert one.num_windows == num_windows
        within = np.zeros(len(WITHIN))
        for user in range(corpus.num_users):
            for role in range(3):
                windows, key = by_hand[user, role], 3 * user + role
                counted = [w for w in windows if not with_reference or (w[0] > -math.inf and w[1] <= w[0] - math.log(10))]  # fmt: skip
                assert (one.searched[key], one.counted[key]) == (len(windows), len(counted))
                for among, chosen in ((one.every, windows), (one.likeliest, counted)):
                    best = max(chosen, key=lambda w: (w[0], -w[2]), default=(-math.inf, 0, -1))
                    assert (among.log_probs[key], among.starts[key]) == (best[0], best[2])
                    if with_reference and chosen:
                        assert among.references[key] == best[1]
                tries = queries_for(0.5, np.array([w[0] for w in counted]))
                within += (tries[:, None] <= np.array(WITHIN)).sum(0)
        assert one.windows_within.tolist() == within.tolist()


def test_sums_stay_exact_behind_many_tokens_that_are_never_drawn(tmp_path):
    """A prefix sum through minus infinity would make everything behind it NaN."""
    corpus = corpus_of([([0], list(range(2000)))])
    column = np.where(np.arange(2000) % 100 == 7, -np.inf, -0.125 * (np.arange(2000) % 3)).astype("f4")  # fmt: skip
    scan = scanned(lambda tokens, bounds: (np.zeros(2000, np.int32), column), corpus, tmp_path)
    owned = Owned(by_tokens=longest_elsewhere(corpus, 30), by_words=None)
    (one,) = search_windows(scan, None, owned, lengths=(30,), carries_text=np.ones(2000, bool))
    sums = [column[n : n + 30].astype(float).sum() for n in range(1971)]
    assert one.likeliest.log_probs.tolist() == [max(sums)]
    assert one.likeliest.starts.tolist() == [sums.index(max(sums))]
    assert one.searched.tolist() == [1971]


def test_a_corpus_that_does_not_fit_the_memory_is_refused_before_it_is_scanned():
    check_memory(100, 4000)
    with pytest.raises(UsageError, match="101 tokens belongs to takes 4,040 bytes"):  # fmt: skip
        check_memory(101, 4000)
