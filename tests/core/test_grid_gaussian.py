import math
import os
import secrets

import mpmath
import numpy as np
import pytest
from scipy import stats

from tightlip.core import grid_gaussian
from tightlip.core.errors import GuaranteeError
from tightlip.core.grid_gaussian import (
    LANES,
    MOST_OPEN,
    PAIRS,
    PROGRAM,
    Cipher,
    GridGaussian,
    Release,
    cells_between,
    chacha_block,
    grid_of,
    places_of,
    released,
)

MANY = 5 * PROGRAM + 17


def noise(source, size=MANY, *, scale=1.0, share=1.0, kind=np.float32, value=0.0):
    out = np.full(size, value, kind)
    source.add([out], scale=scale, share=share)
    return out


def cell_by_hand(key, nonce, block, pair, side, value, scale, grid):
    """One cell from the first 64 bits of each uniform, in 60 decimals; None where they leave it
    open."""
    words = chacha_block(key, block, (nonce, 0))[4 * pair : 4 * pair + 4]
    with mpmath.workdps(60):
        cells = set()
        for radius in (0, 1):
            for angle in (0, 1):
                first = mpmath.mpf((words[0] | words[1] << 32) + radius) / 2**64
                second = mpmath.mpf((words[2] | words[3] << 32) + angle) / 2**64
                turn = mpmath.cos if side == 0 else mpmath.sin
                normal = mpmath.sqrt(-2 * mpmath.log(first)) * turn(2 * mpmath.pi * second)
                cells.add(int(mpmath.floor((value + scale * normal) / grid + 0.5)))
    return cells.pop() if len(cells) == 1 else None


def test_the_cipher_is_that_of_the_rfc():
    """RFC 8439, 2.3.2: twenty rounds; its nonce of 96 bits begins in the counter's upper half."""
    key = np.frombuffer(bytes(range(32)), "<u4").tolist()
    words = chacha_block(key, 1 | 0x09000000 << 32, (0x4A000000, 0), double_rounds=10)
    assert words[:4] == [0xE4E7F110, 0x15593BD1, 0x1FDD0F50, 0xC47120A3]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize(("scale", "share"), [(1.0, 1.0), (0.37, 1 / 32), (4e-4, 3.0)])
def test_every_cell_is_that_of_the_exact_sum(kind, scale, share):
    sums = np.random.default_rng(0).normal(size=MANY).astype(kind)
    source, got = GridGaussian(insecure_seed=8), sums.copy()
    source.add([got], scale=scale, share=share)
    grid, told = grid_of(scale), 0
    for at in [*range(0, MANY, 97), MANY - 1]:
        program, within = divmod(at, PROGRAM)
        row, lane = divmod(within, LANES)
        cell = cell_by_hand(
            source.cipher.key,
            1,
            program * LANES + lane,
            row // 2,
            row % 2,
            float(sums[at]),
            scale,
            grid,
        )
        if cell is not None:
            told += 1
            assert got[at] == kind(cell * (grid * share))
    assert told > 90


def test_the_grid_is_the_power_of_two_below_a_256th():
    for scale in (1.0, 0.999, 255.9, 256.0, 1e-30, 3e20):
        grid = grid_of(scale)
        assert math.frexp(grid)[0] == 0.5
        assert grid <= scale / 256 < 2 * grid
    for nothing in (0.0, math.inf, math.nan, 1e-323):
        with pytest.raises(GuaranteeError, match="no grid"):
            grid_of(nothing)


def test_noise_is_normal_with_its_tails():
    sample = noise(GridGaussian(insecure_seed=2), 400_000, kind=np.float64)
    # A grid of 256 cells in a deviation is far finer than what so many samples tell.
    assert stats.kstest(sample, "norm").pvalue > 0.001
    assert stats.kstest(sample[np.abs(sample) > 2.5], _beyond(2.5)).pvalue > 0.001


def _beyond(cut):
    below, beyond = stats.norm.cdf(-cut), 2 * stats.norm.cdf(-cut)
    return lambda x: (
        np.where(
            x < 0,
            np.minimum(stats.norm.cdf(x), below),
            below + np.maximum(stats.norm.cdf(x) - (1 - below), 0),
        )
        / beyond
    )


@pytest.mark.parametrize(("scale", "right"), [(0.8, False), (1.0, True), (1.25, False)])
def test_noise_of_the_right_scale_passes_and_of_any_other_fails(scale, right):
    sample = noise(GridGaussian(insecure_seed=1), 200_000, scale=scale, kind=np.float64)
    off = abs(np.square(sample).mean() - 1) * math.sqrt(sample.size / 2)
    assert (off < 5) == right


def test_what_is_added_to_moves_the_release_by_as_much():
    """A sum that is a whole number of cells away is released as many cells away, and no bit more."""
    grid = grid_of(0.7)
    apart = np.arange(MANY) % 11 - 5
    plain = noise(GridGaussian(insecure_seed=3), kind=np.float64, scale=0.7)
    moved = apart * grid
    GridGaussian(insecure_seed=3).add([moved], scale=0.7)
    assert np.array_equal(moved - plain, apart * grid)


def test_every_release_is_a_whole_number_of_cells_whatever_the_sum():
    sums = np.random.default_rng(1).normal(size=MANY) * 1e3
    GridGaussian().add([sums], scale=2.5)
    assert np.array_equal(sums / grid_of(2.5), np.rint(sums / grid_of(2.5)))


def test_whole_numbers_of_a_unit_are_the_sums_they_stand_for():
    whole = np.random.default_rng(4).integers(-(2**20), 2**20, MANY).astype(np.float64)
    same = whole * 2.0**-24
    GridGaussian(insecure_seed=5).add([same], scale=0.6, share=0.1)
    GridGaussian(insecure_seed=5).add([whole], scale=0.6, share=0.1, unit=2.0**-24)
    assert np.array_equal(whole, same)


def test_the_number_of_threads_and_other_tensors_change_no_value():
    one = noise(GridGaussian(insecure_seed=3, num_threads=1))
    many = noise(GridGaussian(insecure_seed=3, num_threads=5))
    assert np.array_equal(one, many)
    first, second = np.zeros((3, 700), np.float32), np.zeros(0, np.float32)
    GridGaussian(insecure_seed=3).add([first, second], scale=1.0)
    assert np.array_equal(first.ravel(), noise(GridGaussian(insecure_seed=3), 2100))


def test_a_seed_repeats_a_source_but_no_call_of_it_repeats_another():
    first, second = GridGaussian(insecure_seed=4), GridGaussian(insecure_seed=4)
    one, two = noise(first), noise(first)
    assert np.array_equal(one, noise(second))
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / math.sqrt(MANY)
    assert abs(np.corrcoef(noise(GridGaussian()), noise(GridGaussian()))[0, 1]) < 5 / math.sqrt(
        MANY
    )


@pytest.mark.parametrize("far", [1, 2**32, 2**64, 2**255])
def test_all_bits_of_a_seed_count(far):
    near = noise(GridGaussian(insecure_seed=1), 100)
    assert not np.array_equal(near, noise(GridGaussian(insecure_seed=1 + far), 100))


def test_the_key_is_256_bits_from_the_operating_system(monkeypatch):
    asked, real = [], secrets.token_bytes
    monkeypatch.setattr(
        grid_gaussian.secrets, "token_bytes", lambda size: asked.append(size) or real(size)
    )
    assert len(GridGaussian().cipher.key) == 8
    assert asked == [32]


def test_open_pairs_are_settled_from_more_digits_and_land_beside_what_the_first_told(monkeypatch):
    """With every pair called open, all cells come from the slow way: the same ones."""
    sums = np.random.default_rng(2).normal(size=600).astype(np.float32)
    fast, slow = sums.copy(), sums.copy()
    GridGaussian(insecure_seed=9).add([fast], scale=0.9, share=0.5)
    release, source = Release.of(0.9, 0.5), GridGaussian(insecure_seed=9)
    for pair in range(LANES * PAIRS):
        places = places_of(pair, 0, len(sums))
        if places:
            cells = source.cipher.settled(pair, 1, [float(sums[at]) for at in places], release)
            for at, cell in zip(places, cells, strict=True):
                slow[at] = released(cell, release)
    assert np.array_equal(fast, slow)


def test_bits_that_leave_a_cell_open_are_not_decided():
    release = Release.of(1.0, 1.0)
    # u = 1/2 and a turn of 0: z = sqrt(2 ln 2); a sum that puts it on an edge, to 16 digits.
    with mpmath.workdps(60):
        edge = 0.5 * release.grid - mpmath.sqrt(2 * mpmath.log(2))
        assert cells_between(1 << 39, 0, 40, [float(edge)], release) is None
    assert cells_between(1 << 63, 0, 64, [0.001], release) is not None
    assert cells_between(0, 0, 64, [0.0], release) is None


def test_a_radius_word_of_few_digits_is_left_open(monkeypatch):
    """The tail beyond 2^-40 is drawn from more digits: 64 of them would be a grid of radii."""
    values = np.zeros(2 * LANES, np.float64)
    assert grid_gaussian._fill_pair.py_func(
        values, 0, np.uint64(2**24 - 1), np.uint64(5), 1.0, 2.0**-8, 1.0, 1.0
    )
    assert not values.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sum_that_is_no_number_is_refused(bad):
    with pytest.raises(GuaranteeError, match="no numbers"):
        noise(GridGaussian(), 3000, value=bad)
    one = np.zeros(10)
    one[3] = bad
    with pytest.raises(GuaranteeError, match="no numbers"):
        GridGaussian().add([one], scale=1.0)


def test_a_forked_process_cannot_draw_its_parents_noise():
    source = GridGaussian()
    noise(source)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            noise(source)
        except GuaranteeError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    noise(source)


def test_one_call_may_leave_only_so_many_open():
    assert Cipher().next_nonce() == 1
    assert MOST_OPEN < PROGRAM * PAIRS
