"""Discrete noise against its own law, by chi-square; each test also shown to notice a wrong one."""

import copy
import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from tightlip.core.errors import GuaranteeError
from tightlip.vectors import grid_noise
from tightlip.vectors.grid_noise import GridNoise
from vectors.discrete_laws import gaussian_law, laplace_law

LAWS = {"laplace": laplace_law, "gaussian": gaussian_law}
# A right law fails once in 10,000 runs of a test; a wrong one all but always.
UNLIKELY = 1e-4


def seeded(seed=0):
    """Random bytes that are the same every time, so that a test cannot fail by chance later."""
    draw = np.random.default_rng(seed)
    return GridNoise(draw.bytes)


def chance_of(values: np.ndarray, law: np.ndarray) -> float:
    """The p-value of a chi-square test; values seen seldom are taken together."""
    reach = len(law) // 2
    counts = np.bincount(np.clip(values, -reach, reach) + reach, minlength=len(law))
    expected = law * len(values)
    often = expected >= 8
    seen = [*counts[often], counts[~often].sum()]
    wanted = [*expected[often], expected[~often].sum()]
    return float(stats.chisquare(seen, np.array(wanted) * sum(seen) / sum(wanted)).pvalue)


@pytest.mark.parametrize("units", [1, 2, 3, 5, 8, 21])
@pytest.mark.parametrize("name", ["laplace", "gaussian"])
def test_values_have_the_law_of_their_scale_and_not_that_of_another(name, units):
    values = getattr(seeded(units), name)(units, (200_000,))
    assert chance_of(values, LAWS[name](units, 60 * units)) > UNLIKELY
    assert chance_of(values, LAWS[name](1.5 * units, 60 * units)) < UNLIKELY
    assert chance_of(values, LAWS[name](1.03 * units, 60 * units)) < UNLIKELY


@pytest.mark.parametrize("units", [1_310_720, 3 << 30, (1 << 40) - 1])
def test_a_wide_scale_has_the_continuous_law(units):
    laplace = seeded().laplace(units, (50_000,)) / units
    gaussian = seeded().gaussian(units, (50_000,)) / units
    assert stats.kstest(laplace, stats.laplace.cdf).pvalue > UNLIKELY
    assert stats.kstest(gaussian, stats.norm.cdf).pvalue > UNLIKELY
    assert stats.kstest(laplace / 1.5, stats.laplace.cdf).pvalue < UNLIKELY
    assert stats.kstest(gaussian / 1.5, stats.norm.cdf).pvalue < UNLIKELY


@pytest.mark.parametrize("name", ["laplace", "gaussian"])
def test_the_last_bits_of_a_wide_scale_are_even(name):
    values = getattr(seeded(), name)(1_310_720, (64_000,))
    assert stats.chisquare(np.bincount(values % 16)).pvalue > UNLIKELY


def dependence(values_NK: np.ndarray) -> float:
    """The largest correlation of neighbours, in values and in sizes, in standard errors."""
    flat = values_NK.astype(float).ravel()
    worst = 0.0
    for series in (flat, np.abs(flat), np.sign(flat)):
        for lag in (1, 2, values_NK.shape[1]):
            found = np.corrcoef(series[:-lag], series[lag:])[0, 1]
            worst = max(worst, abs(found) * math.sqrt(len(series)))
    return worst


@pytest.mark.parametrize("name", ["laplace", "gaussian"])
def test_entries_are_independent_of_one_another_and_a_shared_draw_would_show(name):
    values = getattr(seeded(), name)(1000, (2000, 48))
    assert dependence(values) < 5
    shared = np.repeat(values[:, :1], 48, axis=1)
    assert dependence(shared) > 50
    echo = values + np.roll(values, 1, axis=0) // 10
    assert dependence(echo) > 5


def test_two_draws_share_nothing():
    noise = GridNoise()
    first, second = noise.laplace(1_000_000, (64, 64)), noise.laplace(1_000_000, (64, 64))
    assert np.mean(first == second) < 0.01
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1
    assert np.mean(GridNoise().laplace(1_000_000, (64, 64)) == first) < 0.01


def test_several_threads_draw_the_same_law():
    values = GridNoise().laplace(4, (10, 40_000))
    assert chance_of(values.ravel(), laplace_law(4, 240)) > 1e-7
    assert values.shape == (10, 40_000)
    assert values.dtype == np.int64


@pytest.mark.parametrize(("bits", "units"), [(4, 3), (4, 7), (6, 5)])
def test_a_close_comparison_is_settled_by_further_digits(bits, units):
    """Every word is close here. Further digits all 0 or all 1 put it at either end of its place."""
    words = np.arange(1 << bits, dtype=np.uint64)
    for value in range(2 * units):
        chance = mpmath.exp(mpmath.mpf(-value) / units) * 2**bits
        values = np.full(len(words), value)
        low = GridNoise(lambda count: b"\0" * count)._happens(words, bits, values, units)
        high = GridNoise(lambda count: b"\xff" * count)._happens(words, bits, values, units)
        assert low.tolist() == [bool(word < chance) for word in range(len(words))]
        assert high.tolist() == [bool(word + 1 <= chance) for word in range(len(words))]


@pytest.mark.parametrize("squared", [False, True])
def test_words_far_from_the_bound_are_settled_by_it_alone(squared):
    """No further digit is asked for, and the answer is that of many decimals."""
    draw = np.random.default_rng(0)
    words = draw.integers(0, 1 << 52, 2000, dtype=np.uint64)
    values = draw.integers(0, 4000, 2000)

    def never(count):
        raise AssertionError("nothing was close")

    found = GridNoise(never)._happens(words, 52, values, 1000, squared=squared)
    for word, value, happens in zip(words.tolist(), values.tolist(), found.tolist(), strict=True):
        exponent = mpmath.mpf(value * value) / 2_000_000 if squared else mpmath.mpf(value) / 1000
        assert happens == (word < mpmath.exp(-exponent) * 2**52)


@pytest.mark.parametrize("units", [1, 2, 3, 1000, 1_310_720])
def test_the_high_part_is_told_by_the_table_as_by_its_chances(units):
    split = grid_noise._split(units)
    chances = [mpmath.exp(-mpmath.mpf(j << split.bits) / units) * 2**31 for j in range(1, 129)]
    near = [max(0, int(chance) + off) for chance in chances for off in (-2, -1, 1, 2)]
    words = np.array([*near, 1, 5, (1 << 31) - 1, *range(0, 1 << 31, 1 << 20)], np.uint32)
    # Those at a chance, or beyond the last, take further digits.
    words = words[(words > int(chances[-1])) & ~np.isin(words, split.thresholds)]
    found = GridNoise(lambda count: b"\x55" * count)._high(split, units, words)
    told = [sum(int(word) < chance for chance in chances) for word in words.tolist()]
    assert found.tolist() == told


@pytest.mark.parametrize("units", [1, 2, 3, 4, 7, 8, 15, 39, 1000, 1_310_720])
def test_the_table_leaves_every_place_open_that_holds_a_chance(units):
    split = grid_noise._split(units)
    for chance in split.thresholds:
        assert split.by_cell[chance >> 17] == 128
    cells = np.arange(1 << 14) << 17
    sure = split.by_cell < 128
    told = [sum(int(word) < chance for chance in split.thresholds) for word in cells[sure][::97]]
    assert split.by_cell[sure][::97].tolist() == told
    assert np.mean(~sure) < 0.01


def test_the_tail_goes_on_beyond_what_one_word_tells():
    """All zeros are the smallest number of all: stride after stride, as far as digits go."""
    drawn = iter([b"\0" * 32, b"\0" * 32, b"\xff" * 32])
    noise = GridNoise(lambda count: next(drawn))
    split = grid_noise._split(8)
    assert noise._high(split, 8, np.zeros(1, np.uint32)).tolist() == [256]


@pytest.mark.parametrize("units", [1, 2, 3, 7, 1000, 151_725, 1_310_720, (1 << 40) - 1])
def test_the_compiled_loops_draw_what_more_digits_would_from_the_same_words(units):
    """Word for word, over a million of them; where a loop gives up, the digits settle it."""
    draw, split, num_told = np.random.default_rng(units), grid_noise._split(units), 0
    for _ in range(25):
        candidates = draw.integers(0, 1 << 64, 20_000, np.uint64)
        words = draw.integers(0, 1 << 32, 20_000, np.uint32)
        laplace, gaussian = np.empty(20_000, np.int64), np.empty(20_000, np.int64)
        wanted = seeded()._slow_laplace(candidates, words, units)
        told = grid_noise._fast_laplace(candidates, words, units, *split, laplace)
        if told >= 0:
            assert laplace[:told].tolist() == wanted.tolist()
        num_told += told >= 0
        words = words[: len(wanted)]
        kept = grid_noise._fast_gaussian(wanted, words, units, gaussian)
        if kept >= 0:
            wanted = seeded()._slow_gaussian(wanted, words, units)
            assert gaussian[:kept].tolist() == wanted.tolist()
    assert num_told >= 20


@pytest.mark.parametrize("word", [0, 1])
def test_a_block_with_a_word_too_close_is_settled_by_digits(word):
    """All zeros are beyond every stride; the loop must not make something up."""
    split, out = grid_noise._split(8), np.empty(1, np.int64)
    candidates, words = np.zeros(1, np.uint64), np.array([word], np.uint32)
    assert grid_noise._fast_laplace(candidates, words, 8, *split, out) == -1
    exact = int(mpmath.exp(mpmath.mpf(-1) / 8) * 2**52)
    candidates = np.array([(exact << 12) | 1], np.uint64)
    words = np.array([1 << 31], np.uint32)
    assert grid_noise._fast_laplace(candidates, words, 8, *split, out) == -1
    near = np.array([int(mpmath.exp(-0.5) * 2**32)], np.uint32)
    assert grid_noise._fast_gaussian(np.zeros(1, np.int64), near, 8, out) == -1
    both = [seeded(number).laplace(8, (3,)).tolist() for number in (1, 1)]
    assert both[0] == both[1]


def test_a_draw_that_meets_a_close_word_still_fills_its_values(monkeypatch):
    """Every block is given up here; the law and the shape are the same."""
    monkeypatch.setattr(grid_noise, "_fast_laplace", lambda *given: -1)
    monkeypatch.setattr(grid_noise, "_fast_gaussian", lambda *given: -1)
    for name in ("laplace", "gaussian"):
        values = getattr(seeded(), name)(5, (100_000,))
        assert chance_of(values, LAWS[name](5, 300)) > UNLIKELY
        assert chance_of(values, LAWS[name](5.25, 300)) < UNLIKELY


@pytest.mark.parametrize("over", [0, 1, 7, 99, 1234])
def test_scaled_exponentials_are_right_to_the_last_bit(over):
    with mpmath.workdps(150):
        exact = mpmath.floor(mpmath.exp(mpmath.mpf(-over) / 13) * mpmath.mpf(2) ** 308)
        assert grid_noise._scaled_exponential(over, 13, 308) == int(exact)


def test_a_source_is_never_copied():
    with pytest.raises(GuaranteeError, match="not copied"):
        copy.copy(GridNoise())
