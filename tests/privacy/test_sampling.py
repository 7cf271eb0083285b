import math
from collections import Counter

import numpy as np
import pytest

from tightlip.core.errors import UsageError
from tightlip.core.randomness import keyed_generator
from tightlip.privacy.sampling import PoissonSampler, UnitRows, choose_rows


def fits(observed, expected):
    """Whether counts agree with their expectation: chi-square, p > 1e-4 (Wilson and Hilferty)."""
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    assert expected.min() > 5
    free = len(observed) - 1
    square = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * free)
    return ((square / free) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 3.7


def binomial_law(num_units, rate):
    return [
        math.comb(num_units, k) * rate**k * (1 - rate) ** (num_units - k)
        for k in range(num_units + 1)
    ]


def test_every_unit_is_drawn_as_often_as_the_rate_says():
    sampler = PoissonSampler(40, 6, keyed_generator(1))
    counts = np.zeros(40)
    for _ in range(4000):
        counts[sampler.draw()] += 1
    # Each count is binomial with variance n·q·(1 − q), so squares are scaled by 1 − q.
    expected = 4000 * sampler.sampling_rate
    scaled = expected + (counts - expected) / math.sqrt(1 - sampler.sampling_rate)
    assert fits(np.append(scaled, expected), np.full(41, expected))
    assert not fits(np.append(1.1 * scaled, expected), np.full(41, expected))


def test_the_size_of_a_draw_is_binomial_and_may_be_nothing():
    sampler = PoissonSampler(12, 3, keyed_generator(2))
    sizes = Counter(len(sampler.draw()) for _ in range(8000))
    law = 8000 * np.array(binomial_law(12, 0.25))
    pooled = [sizes[k] for k in range(7)] + [sum(sizes[k] for k in range(7, 13))]
    assert sizes[0] > 0
    assert fits(pooled, [*law[:7], law[7:].sum()])
    fixed = [0, 0, 0, 8000, 0, 0, 0, 0]  # shuffled batches of three are another law
    assert not fits(fixed, [*law[:7], law[7:].sum()])


def test_pairs_of_units_are_drawn_independently():
    sampler = PoissonSampler(6, 3, keyed_generator(3))
    pairs = Counter()
    for _ in range(6000):
        drawn = set(sampler.draw().tolist())
        pairs[(0 in drawn, 5 in drawn)] += 1
    assert fits(list(pairs.values()), np.full(4, 1500))


def test_a_draw_is_sorted_and_without_repeats():
    sampler = PoissonSampler(500, 100, keyed_generator(4))
    for _ in range(20):
        drawn = sampler.draw()
        assert np.array_equal(drawn, np.unique(drawn))
        assert drawn.min() >= 0
        assert drawn.max() < 500


def test_ten_million_units_are_drawn_without_a_coin_for_each():
    class Counting(np.random.Generator):
        asked = 0

        def choice(self, a, size, **others):
            self.asked += int(size)
            return super().choice(a, size, **others)

    generator = Counting(np.random.Philox(5))
    drawn = PoissonSampler(10_000_000, 1000, generator).draw()
    assert len(drawn) == generator.asked
    assert abs(len(drawn) - 1000) < 6 * math.sqrt(1000)


def test_everybody_is_drawn_when_the_expected_batch_is_everybody():
    assert np.array_equal(PoissonSampler(9, 9, keyed_generator()).draw(), np.arange(9))


@pytest.mark.parametrize("batch", [0, -1, 11, math.nan])
def test_a_batch_that_cannot_be_expected_is_refused_with_what_can(batch):
    with pytest.raises(UsageError, match="between 1 and 10"):
        PoissonSampler(10, batch, keyed_generator())


def test_a_corpus_without_units_is_refused():
    with pytest.raises(UsageError, match="no unit"):
        PoissonSampler(0, 1, keyed_generator())


def test_rows_are_grouped_by_unit_and_none_is_lost():
    unit_of_row = np.array([7, 3, 7, 7, 100, 3])
    units = UnitRows(unit_of_row)
    assert units.num_units == 3
    assert units.ids.tolist() == [3, 7, 100]
    rows = [units.rows(unit, 10, keyed_generator()).tolist() for unit in range(3)]
    assert rows == [[1, 5], [0, 2, 3], [4]]


def test_no_rows_are_no_units():
    assert UnitRows(np.array([], np.int64)).num_units == 0


def test_at_most_so_many_rows_speak_for_a_unit_each_equally_often():
    rows, generator = np.array([10, 20, 30, 40, 50]), keyed_generator(6)
    sets = Counter(tuple(choose_rows(rows, 2, generator).tolist()) for _ in range(3000))
    assert len(sets) == math.comb(5, 2)
    assert all(a < b for a, b in sets)
    assert fits(list(sets.values()), np.full(10, 300))
