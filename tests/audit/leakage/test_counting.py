"""Counts in the corpus against looking at every place of every document."""

import random
import threading
import time
import weakref
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from tightlip.audit.leakage import counting
from tightlip.audit.leakage.counting import (
    Sequences,
    added_up,
    count_in_shard,
    over_shards,
    user_disjoint_parts,
)
from tightlip.core.errors import UsageError
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.engines.local import LocalEngine

PLENTY = 1_000_000_000
# Ids around the places where a symbol needs one more byte, up to the largest three bytes hold.
IDS = [0, 1, 2, 253, 254, 255, 256, 65_533, 65_534, 65_535, 65_536, 2**24 - 3, 2**24 - 2]


def corpus_of(documents):
    bounds = np.zeros(len(documents) + 1, dtype=np.int64)
    np.cumsum([len(ids) for _, ids in documents], out=bounds[1:])
    users = np.array([user for user, _ in documents], dtype=np.int32)
    return TokenizedCorpus(
        tokens=np.array([token for _, ids in documents for token in ids], dtype=np.int32),
        bounds=bounds,
        users=users,
        user_names=[str(number) for number in range(int(users.max(initial=-1)) + 1)],
        corpus_fingerprint="c",
        tokenizer_fingerprint="t",
    )


def sequences_of(needles):
    offsets = np.zeros(len(needles) + 1, dtype=np.int64)
    np.cumsum([len(needle) for needle in needles], out=offsets[1:])
    tokens = np.array([token for needle in needles for token in needle], dtype=np.int32)
    return Sequences(tokens=tokens, offsets=offsets)


def shards_of(corpus, memory):
    return (part.read(corpus) for part in user_disjoint_parts(corpus, memory))


def counted(documents, needles, *, memory=PLENTY, workers=1):
    """Totals and users as the audit gets them: cut, counted shard by shard, added up."""
    sequences = sequences_of(needles)
    shards = shards_of(corpus_of(documents), memory)
    engine = LocalEngine(workers)
    counts = added_up(
        engine.map(lambda shard: count_in_shard(shard, sequences), shards), len(needles)
    )
    return list(zip(counts.totals.tolist(), counts.users.tolist(), strict=True))


def by_looking_everywhere(documents, needles):
    """Oracle: compare each needle with every slice of every document."""
    found = []
    for needle in needles:
        counts = [(user, oracle.occurrences(needle, ids)) for user, ids in documents]
        found.append((sum(n for _, n in counts), len({user for user, n in counts if n})))
    return found


def needles_for(documents, draw, ids):
    """Slices of documents, what stands across two documents' border, and things made up."""
    chosen = []
    for _, text in documents:
        if text:
            begin = draw.randrange(len(text))
            chosen.append(text[begin : begin + draw.randint(1, 5)])
            chosen.append(text)
    for (_, left), (_, right) in pairwise(documents):
        if left and right:
            chosen.append(left[-1:] + right[:1])
    chosen += [[draw.choice(ids) for _ in range(draw.randint(1, 4))] for _ in range(5)]
    return chosen


@st.composite
def corpora(draw_from):
    draw = draw_from(st.randoms(use_true_random=False))
    ids = draw.sample(IDS, draw.randint(1, 4))
    users = range(draw.randint(1, 5))
    documents = [
        (draw.choice(users), [draw.choice(ids) for _ in range(draw.choice([0, 1, 3, 9, 30]))])
        for _ in range(draw.randint(1, 9))
    ]
    documents += draw.choices(documents, k=draw.randint(0, 3))  # the same document again
    return documents, needles_for(documents, draw, IDS), draw.randint(31, 200)


@given(corpora())
@settings(max_examples=100, deadline=None)
def test_counts_agree_with_looking_everywhere(drawn):
    documents, needles, _ = drawn
    assert counted(documents, needles) == by_looking_everywhere(documents, needles)


@given(corpora())
@settings(max_examples=60, deadline=None)
def test_counts_do_not_depend_on_the_memory_bound(drawn):
    documents, needles, tokens_allowed = drawn
    bound = tokens_allowed * counting._BYTES_PER_TOKEN
    assert counted(documents, needles, memory=bound) == by_looking_everywhere(documents, needles)


@pytest.mark.parametrize("largest", [31, 40, 77, 200])
def test_counts_do_not_depend_on_the_largest_shard(monkeypatch, largest):
    monkeypatch.setattr(counting, "_LARGEST_SHARD_TOKENS", largest)
    draw = random.Random(largest)
    for _ in range(10):
        documents = [
            (draw.randrange(6), [draw.choice(IDS[:4]) for _ in range(draw.choice([0, 5, 30]))])
            for _ in range(25)
        ]
        needles = needles_for(documents, draw, IDS[:4])
        want = by_looking_everywhere(documents, needles)
        assert counted(documents, needles) == want
        assert counted(documents, needles, workers=3) == want


def test_the_largest_vocabulary_is_counted():
    ids = [0, 2**24 - 2, 2**24 - 3, 2**24 - 2, 0]
    documents = [(0, ids), (1, ids[1:3])]
    needles = [[2**24 - 2], [2**24 - 2, 2**24 - 3], [0], [0, 2**24 - 2], [1]]
    assert counted(documents, needles) == [(3, 2), (2, 2), (2, 1), (1, 1), (0, 0)]


def test_overlapping_occurrences_all_count():
    assert counted([(0, [7] * 5)], [[7] * n for n in range(1, 7)]) == [
        (5, 1), (4, 1), (3, 1), (2, 1), (1, 1), (0, 0),
    ]  # fmt: skip


def test_one_symbol_vocabularies_count_as_the_closed_form_says():
    lengths = [0, 1, 4, 4, 9]
    documents = [(n, [0] * n) for n in lengths]
    needles = [[0] * n for n in range(1, 11)]
    want = [
        (sum(max(0, length - n + 1) for length in lengths), len({x for x in lengths if x >= n}))
        for n in range(1, 11)
    ]
    assert counted(documents, needles) == want


def test_a_thousand_copies_of_one_document_count_a_thousand_times():
    documents = [(number % 7, [3, 1, 4, 1, 5]) for number in range(1000)]
    assert counted(documents, [[3, 1, 4, 1, 5], [1], [1, 5, 3]]) == [(1000, 7), (2000, 7), (0, 0)]


def test_nothing_is_found_across_documents_of_one_user():
    assert counted([(0, [1, 2]), (0, [3, 4])], [[2, 3], [1, 2], [3, 4]]) == [
        (0, 0), (1, 1), (1, 1),
    ]  # fmt: skip


def test_a_corpus_of_empty_documents_has_nothing_in_it():
    assert counted([(0, []), (1, []), (1, [])], [[0], [1, 2]]) == [(0, 0), (0, 0)]


def test_a_corpus_without_documents_has_nothing_in_it():
    assert counted([], [[0]]) == [(0, 0)]


def test_no_sequences_give_no_counts():
    assert counted([(0, [1, 2, 3])], []) == []


def test_a_user_larger_than_a_shard_counts_once():
    documents = [(0, [1, 2, 3, 4])] * 50 + [(1, [1, 2])] + [(2, [9])] * 40
    bound = 60 * counting._BYTES_PER_TOKEN
    shards = list(shards_of(corpus_of(documents), bound))
    assert [shard.sole_user for shard in shards].count(0) >= 4
    assert counted(documents, [[1, 2], [3, 4], [9], [4, 1]], memory=bound) == [
        (51, 2), (50, 1), (40, 1), (0, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("tokens_allowed", [11, 25, 60, 1000])
def test_shards_cover_every_document_once_and_share_no_user(tokens_allowed):
    draw = random.Random(tokens_allowed)
    documents = [(draw.randrange(8), [number] * draw.choice([0, 1, 5, 10])) for number in range(60)]
    shards = list(shards_of(corpus_of(documents), tokens_allowed * counting._BYTES_PER_TOKEN))
    stored = [
        (int(user), shard.tokens[begin:end].tolist())
        for shard in shards
        for user, begin, end in zip(shard.users, shard.bounds[:-1], shard.bounds[1:], strict=True)
    ]
    assert sorted(stored) == sorted(documents)
    for shard in shards:
        assert len(shard.tokens) + len(shard.users) <= tokens_allowed
    homes = {}
    for number, shard in enumerate(shards):
        for user in set(shard.users.tolist()):
            home = ("pieces", user) if shard.sole_user == user else number
            assert homes.setdefault(user, home) == home


def test_a_document_that_does_not_fit_is_refused_by_its_number():
    documents = [(0, [1] * 10), (1, [1] * 5000), (1, [1])]
    with pytest.raises(UsageError, match=r"Document 1 has 5,000 tokens.*Raise memory"):
        list(shards_of(corpus_of(documents), 4000 * counting._BYTES_PER_TOKEN))
    assert counted(documents, [[1]], memory=5001 * counting._BYTES_PER_TOKEN) == [(5011, 2)]


def test_a_document_beyond_the_largest_shard_stands_alone_where_memory_allows(monkeypatch):
    monkeypatch.setattr(counting, "_LARGEST_SHARD_TOKENS", 20)
    documents = [(0, [1, 2] * 50), (0, [1]), (1, [2, 1])]
    assert counted(documents, [[1, 2], [2, 1], [1]]) == [(50, 1), (50, 2), (52, 2)]


def test_the_local_engine_answers_in_the_order_of_the_items():
    def late_for_early_ones(number):
        time.sleep(0.02 if number % 3 == 0 else 0)
        return number * number

    got = list(LocalEngine(4).map(late_for_early_ones, range(20)))
    assert got == [(number, number * number) for number in range(20)]


def test_the_local_engine_works_on_several_items_at_once():
    together = threading.Barrier(3, timeout=20)
    assert len(list(LocalEngine(3).map(lambda _: together.wait(), range(6)))) == 6


class _Item:
    """Something whose being held can be seen."""


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_local_engine_holds_no_more_items_than_workers(workers):
    alive = weakref.WeakSet()
    most = 0

    def items():
        nonlocal most
        for _ in range(30):
            item = _Item()
            alive.add(item)
            most = max(most, len(alive))
            yield item
            del item

    for pair in LocalEngine(workers).map(lambda item: None, items()):
        del pair
    assert most <= workers + 1  # the one more is on its way in


def test_each_worker_of_a_cluster_has_a_shard_to_count(monkeypatch):
    """Two machines with a worker each, of which `workers` tells of one machine."""
    monkeypatch.setattr(counting, "_SMALLEST_SHARD_TOKENS", 10)
    documents = [(user, [user % 3, 1, 2]) for user in range(40)]
    needles = [[1, 2], [2], [0, 1]]
    look = partial(count_in_shard, sequences=sequences_of(needles))
    totals, num_shards = [], []
    for num_machines in (1, 2):
        cluster = LocalEngine(1)
        cluster.num_workers = num_machines
        found = list(over_shards(cluster, look, corpus_of(documents), PLENTY))
        num_shards.append(len(found))
        counts = added_up(iter(found), len(needles))
        totals.append((counts.totals.tolist(), counts.users.tolist()))
    assert num_shards == [1, 2]
    assert [*zip(*totals[0], strict=True)] == by_looking_everywhere(documents, needles)
    assert totals[0] == totals[1]


def test_an_error_while_counting_reaches_the_caller():
    def broken(number):
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        list(LocalEngine(2).map(broken, range(5)))


def test_counting_is_a_function_of_its_shard_alone():
    documents = [(0, [1, 2, 1]), (4, [2, 1])]
    (shard,) = shards_of(corpus_of(documents), PLENTY)
    count = partial(count_in_shard, sequences=sequences_of([[1], [2, 1]]))
    before = (shard.tokens.copy(), shard.users.copy())
    first, second = count(shard), count(shard)
    assert first.totals.tolist() == second.totals.tolist() == [3, 2]
    assert first.users.tolist() == second.users.tolist() == [2, 2]
    assert np.array_equal(shard.tokens, before[0])
    assert np.array_equal(shard.users, before[1])
