"""What every registered engine owes: the items' order, all of them, and errors that reach the caller."""

import random

import pytest

from audit.leakage.test_counting import (
    by_looking_everywhere,
    corpus_of,
    sequences_of,
    shards_of,
)
from tightlip.audit.leakage.counting import added_up, count_in_shard
from tightlip.core.registry import look_up, names_of

# Those of a cluster are examined beside it: tests/faults/test_ray.py
EACH = pytest.mark.parametrize("name", sorted({*names_of("engine")} - {"ray"}))


@EACH
def test_results_come_with_their_items_in_the_items_order(name):
    engine = look_up("engine", name)()
    assert engine.workers >= 1
    assert list(engine.map(lambda n: n * n, iter(range(50)))) == [(n, n * n) for n in range(50)]
    assert list(engine.map(len, [])) == []


@EACH
def test_an_error_reaches_the_caller(name):
    def broken(number):
        raise ValueError(f"item {number}")

    with pytest.raises(ValueError, match="item 0"):
        list(look_up("engine", name)().map(broken, range(5)))


@EACH
def test_counts_agree_with_looking_everywhere(name):
    draw = random.Random(0)
    documents = [(user % 7, [draw.randint(0, 5) for _ in range(12)]) for user in range(30)]
    needles = [ids[start : start + 3] for _, ids in documents for start in (0, 4, 9)]
    sequences = sequences_of(needles)
    shards = shards_of(corpus_of(documents), 1_000_000)
    counts = added_up(
        look_up("engine", name)().map(lambda shard: count_in_shard(shard, sequences), shards),
        len(needles),
    )
    counted = list(zip(counts.totals.tolist(), counts.users.tolist(), strict=True))
    assert counted == by_looking_everywhere(documents, needles)
