"""Gaussian noise of which no bit tells what it hides.

Noise of floating-point numbers leaves holes in its values: whoever knows all of a sum but one text
sees which of two sums a noisy one came from (Mironov 2012). So what is released is the number of
a cell, K = round((S + scale·Z) / g), Z one real Gaussian and g a public grid: a function of the
exact S + scale·Z and nothing else, which therefore costs no ε (docs/inside-private-training.md).

Two words of 64 bits are the first digits of two endless uniforms, which Box and Muller (1958) make
two normal numbers. In nearly every case a float64 of them tells the cell, whatever digits follow;
where it does not, more digits are drawn until it does, by interval arithmetic.
"""

import math
import os
import secrets
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpmath.ctx_iv import MPIntervalContext
from mpmath.libmp import to_int
from numba import njit

from tightlip.core.errors import GuaranteeError
from tightlip.core.randomness import SECRET

# The layout of a stream, the same on a GPU: a program fills so many numbers of one tensor. Each of
# its lanes has a block of the cipher, four pairs of words, and a pair's two numbers lie a row of
# lanes apart.
LANES, PAIRS = 256, 4
PROGRAM = 2 * PAIRS * LANES
CELLS = 256  # of the grid in one deviation, at least; what rounding adds to the variance is 1e-6
DOUBLE_ROUNDS = 6  # ChaCha12, as in Rust's standard generator
LEAST_RADIUS_WORD = 1 << 24
MOST_OPEN = 4096  # pairs left open in one call; more can only be of sums that are no numbers
_MORE_BITS = 128  # of each uniform at first; doubled until the cell is told
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_MASK = 0xFFFFFFFF
_LEAST_SCALE = 1e-200
SCATTERED = "A sum does not lie in one piece of memory, so that noise would be put on a copy of it."


class NotFinite(GuaranteeError):
    """A sum that is no number, which no noise hides."""


def grid_of(scale: float) -> float:
    """The power of two at most scale / 256: public, since the scale is.

    >>> grid_of(1.0), grid_of(0.9), grid_of(3.0)
    (0.00390625, 0.001953125, 0.0078125)
    """
    if not _LEAST_SCALE <= scale < math.inf:
        raise GuaranteeError(
            f"Noise of scale {scale} has no grid to be released on. Use a noise multiplier and a clip norm such as 1.0."
        )
    return math.ldexp(0.5, math.frexp(scale / CELLS)[1])


class Release(NamedTuple):
    """What one call releases: share · grid · K, noise of `scale` on sums in units of `unit`, a
    power of two."""

    scale: float
    grid: float
    share: float
    unit: float = 1.0

    @classmethod
    def of(cls, scale: float, share: float, unit: float = 1.0) -> "Release":
        return cls(scale, grid_of(scale), share, unit)


class GridGaussian:
    """Adds noise to many arrays under one secret key, in place.

    Holds:
        cells: every entry becomes share · g · K, K the cell of sum + scale · Z, Z exactly normal,
            up to the cipher; no bit of the sum shows otherwise.
        threads: `num_threads` changes no value.
        fresh: no two calls, and no two of these without a seed, share noise.
        kept: pickling, copying and drawing in a forked process are refused.
    """

    def __init__(self, insecure_seed: int | None = None, *, num_threads: int | None = None) -> None:
        self.cipher = Cipher(insecure_seed)
        self._num_threads = num_threads or os.cpu_count() or 1

    def __getstate__(self) -> Any:
        raise GuaranteeError(SECRET)

    def add(
        self, sums: list[np.ndarray], *, scale: float, share: float = 1.0, unit: float = 1.0
    ) -> None:
        """Every entry, of contiguous float32 or float64 in units of `unit`, becomes share · g · K."""
        release, nonce = Release.of(scale, share, unit), self.cipher.next_nonce()
        if not all(each.flags.c_contiguous for each in sums):
            raise GuaranteeError(SCATTERED)  # noise would be put on a copy
        flat = [each.reshape(-1) for each in sums]
        parts = list(_parts(flat, self._num_threads))
        key = np.array(self.cipher.key, np.uint32)

        def fill(part: Part) -> list[tuple[int, int]]:
            number, values, program = part
            still_open = np.empty(MOST_OPEN, np.int64)
            found = _fill(values, program, key, np.uint32(nonce), *release, still_open)
            check_few(found)
            return [(number, int(pair)) for pair in still_open[:found]]

        if len(parts) == 1:
            opened = fill(parts[0])
        else:
            # Compiled loops let go of the interpreter's lock.
            with ThreadPoolExecutor(self._num_threads) as pool:
                opened = [each for found in pool.map(fill, parts) for each in found]
        programs = programs_before([each.size for each in flat])
        for number, pair in opened:
            values = flat[number]
            places = places_of(pair, programs[number], values.size)
            cells = self.cipher.settled(pair, nonce, [float(values[at]) for at in places], release)
            for at, cell in zip(places, cells, strict=True):
                values[at] = released(cell, release)


class Part(NamedTuple):
    """Some programs of one tensor: its number, its values there, and the first program."""

    tensor: int
    values: np.ndarray
    program: int


def _parts(tensors: list[np.ndarray], num_threads: int) -> Iterable[Part]:
    for number, (values, before) in enumerate(
        zip(tensors, programs_before([each.size for each in tensors]), strict=True)
    ):
        together = max(1, -(-values.size // PROGRAM) // num_threads)
        for program in range(0, -(-values.size // PROGRAM), together):
            part = values[program * PROGRAM : (program + together) * PROGRAM]
            yield Part(number, part, before + program)


def released(cell: int, release: Release) -> float:
    return float(cell) * (release.grid * release.share)


def programs_before(sizes: Iterable[int]) -> list[int]:
    """The number of each tensor's first program: none has numbers of two."""
    return list(accumulate((-(-size // PROGRAM) for size in sizes), initial=0))[:-1]


def places_of(pair: int, first_program: int, size: int) -> list[int]:
    """Where a pair's two numbers lie in its tensor, those that are within it."""
    block, which = divmod(pair, PAIRS)
    program, lane = divmod(block, LANES)
    first = (program - first_program) * PROGRAM + 2 * which * LANES + lane
    return [at for at in (first, first + LANES) if at < size]


def check_few(found: int) -> None:
    if found > MOST_OPEN:
        raise NotFinite(
            "Entries of the sum are no numbers that noise could hide. The step was charged and not applied; "
            "lower the learning rate, or look for weights that are not finite."
        )


class Cipher:
    """ChaCha (RFC 8439, 12 rounds) under 256 bits from the operating system.

    Written out because no library offers one to compiled loops and to Triton. torch's and numpy's
    generators are no ciphers, and entries that only noise touches show the raw output.
    """

    def __init__(self, insecure_seed: int | None = None) -> None:
        key = secrets.token_bytes(32)
        if insecure_seed is not None:
            key = (insecure_seed % 2**256).to_bytes(32, "little")
        self.key: tuple[int, ...] = struct.unpack("<8I", key)
        self._calls, self._process = 0, os.getpid()

    def next_nonce(self) -> int:
        """A number that no call had before; counted before anything is drawn."""
        if os.getpid() != self._process:
            raise GuaranteeError(
                "This noise source came through a fork, so parent and child would draw the same "
                "noise. Make a new one in each process."
            )
        self._calls += 1
        if self._calls > _MASK:
            raise GuaranteeError("2^32 calls were made under one key. Make a new noise source.")
        return self._calls

    def settled(self, pair: int, nonce: int, sums: list[float], release: Release) -> list[int]:
        """The cells of a pair whose first words left them open, from as many digits as it takes.

        Both come from the same digits: two cells of one Z each would not be independent of them.
        """
        if not all(map(math.isfinite, sums)):
            check_few(MOST_OPEN + 1)
        block, which = divmod(pair, PAIRS)
        words = chacha_block(self.key, block, (nonce, 0))[4 * which : 4 * which + 4]
        radius, angle = words[0] | words[1] << 32, words[2] | words[3] << 32
        bits, more = 64, iter(self._digits(pair, nonce))
        while True:
            for _ in range(max(1, (bits - 64) // _MORE_BITS)):
                further = next(more)
                radius = radius << _MORE_BITS | further & (1 << _MORE_BITS) - 1
                angle = angle << _MORE_BITS | further >> _MORE_BITS
                bits += _MORE_BITS
            if (cells := cells_between(radius, angle, bits, sums, release)) is not None:
                return cells

    def _digits(self, pair: int, nonce: int) -> Iterable[int]:
        """Endlessly more digits of a pair, 256 at a time, from blocks that nothing else uses."""
        for number in range(1, _MASK):
            words = chacha_block(self.key, pair, (nonce, number))
            yield sum(word << 32 * place for place, word in enumerate(words[:8]))

    def __getstate__(self) -> Any:
        raise GuaranteeError(SECRET)


def cells_between(
    radius: int, angle: int, bits: int, sums: list[float], release: Release
) -> list[int] | None:
    """The cells of normal numbers whose uniforms begin with these bits, one for each sum; None
    where some continuation of the bits would fall into another."""
    if radius == 0:
        return None
    # A context of its own: precision is a setting of mpmath's shared one.
    interval = MPIntervalContext()
    interval.prec = bits + 256
    least, most = (
        interval.mpf([interval.mpf(each), interval.mpf(each + 1)]) / interval.mpf(2) ** bits
        for each in (radius, angle)
    )
    length, turn = interval.sqrt(-2 * interval.log(least)), 2 * interval.pi * most
    cells = []
    for value, along in zip(sums, (interval.cos(turn), interval.sin(turn)), strict=False):
        total = interval.mpf(value) * interval.mpf(release.unit) + release.scale * length * along
        scaled = total / interval.mpf(release.grid) + interval.mpf(0.5)
        low, high = (to_int(end, "f") for end in scaled._mpi_)
        if low != high:
            return None
        cells.append(low)
    return cells


def chacha_block(
    key: Iterable[int], counter: int, nonce: tuple[int, int], double_rounds: int = DOUBLE_ROUNDS
) -> list[int]:
    """One block of sixteen words, with a counter and a nonce of 64 bits each."""
    state = [*_CONSTANTS, *key, counter & _MASK, counter >> 32, *nonce]
    x = list(state)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for to, by, other, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to] = (x[to] + x[by]) & _MASK
            mixed = x[other] ^ x[to]
            x[other] = (mixed << turn | mixed >> 32 - turn) & _MASK

    for _ in range(double_rounds):
        for column in range(4):
            quarter(column, 4 + column, 8 + column, 12 + column)
        for start in range(4):
            quarter(start, 4 + (start + 1) % 4, 8 + (start + 2) % 4, 12 + (start + 3) % 4)
    return [(a + b) & _MASK for a, b in zip(x, state, strict=True)]


@njit(cache=True, nogil=True)
def _fill(values, program, key, nonce, scale, grid, share, unit, still_open):  # type: ignore[no-untyped-def]
    """Cells of all entries of some programs, but those of pairs that its words leave open."""
    words = np.empty((16, LANES), np.uint32)
    found = 0
    for start in range(0, len(values), PROGRAM):
        first_block = (program + start // PROGRAM) * LANES
        _cipher_words(words, key, nonce, first_block)
        for pair in range(PAIRS):
            for lane in range(LANES):
                at = start + 2 * pair * LANES + lane
                if at >= len(values):
                    break
                radius, angle = _joined(words, 4 * pair, lane), _joined(words, 4 * pair + 2, lane)
                if _fill_pair(values, at, radius, angle, scale, grid, share, unit):
                    if found < len(still_open):
                        still_open[found] = (first_block + lane) * PAIRS + pair
                    found += 1
    words[:] = 0  # whoever reads this memory later must not find the noise
    return found


@njit(cache=True, nogil=True)
def _joined(words, row, lane):  # type: ignore[no-untyped-def]
    """A word of 64 bits, the lower half first."""
    return np.uint64(words[row, lane]) | np.uint64(words[row + 1, lane]) << np.uint64(32)


@njit(cache=True, nogil=True)
def _fill_pair(values, at, radius_word, angle_word, scale, grid, share, unit):  # type: ignore[no-untyped-def]
    """Whether a pair is open; where it is not, its cells take the sums' places.

    What follows the 64 bits of a uniform u moves the radius r by at most 2⁻⁶³/(u·r), and float64
    errs on a normal number by less than 2⁻⁴⁵ + 2⁻⁵²/r: logarithm, root, cosine and u itself are
    each good to a few last places, and near u = 1 the last place of u is that much of r.
    """
    if radius_word < np.uint64(LEAST_RADIUS_WORD):
        return True
    uniform = np.float64(radius_word) * 2.0**-64
    radius = math.sqrt(-2.0 * math.log(uniform))
    angle = np.float64(angle_word) * (2.0 * math.pi * 2.0**-64)
    near = scale * (2.0**-62 / uniform + 2.0**-51) / radius if radius > 0.0 else np.inf
    one = np.float64(values[at]) * unit
    has_two = at + LANES < len(values)
    two = np.float64(values[at + LANES]) * unit if has_two else 0.0
    t_one, t_two = (
        (one + scale * (radius * math.cos(angle))) / grid,
        (two + scale * (radius * math.sin(angle))) / grid,
    )
    cell_one, cell_two = np.rint(t_one), np.rint(t_two)
    # The margins first, so that a sum that is no number is open.
    fine_one = 0.5 - abs(t_one - cell_one) >= (2.0**-40 * (scale + abs(one)) + near) / grid
    fine_two = 0.5 - abs(t_two - cell_two) >= (2.0**-40 * (scale + abs(two)) + near) / grid
    if not (fine_one and (fine_two or not has_two)):
        return True
    # A zero has a sign of its own, which the edge of its cell does not decide.
    values[at] = cell_one * (grid * share) + 0.0
    if has_two:
        values[at + LANES] = cell_two * (grid * share) + 0.0
    return False


@njit(cache=True, nogil=True)
def _cipher_words(words, key, nonce, first_block):  # type: ignore[no-untyped-def]
    """The words of as many blocks as there are lanes; lanes innermost, so that they go together."""
    start = np.empty(16, np.uint32)
    for place in range(4):
        start[place] = _CONSTANTS[place]
    start[4:12] = key
    start[12:14] = 0
    start[14], start[15] = nonce, 0
    for place in range(16):
        words[place] = start[place]
    for lane in range(words.shape[1]):
        block = np.uint64(first_block + lane)
        words[12, lane] = np.uint32(block & np.uint64(_MASK))
        words[13, lane] = np.uint32(block >> np.uint64(32))
    for _ in range(DOUBLE_ROUNDS):
        _quarters(words, 0, 4, 8, 12)
        _quarters(words, 1, 5, 9, 13)
        _quarters(words, 2, 6, 10, 14)
        _quarters(words, 3, 7, 11, 15)
        _quarters(words, 0, 5, 10, 15)
        _quarters(words, 1, 6, 11, 12)
        _quarters(words, 2, 7, 8, 13)
        _quarters(words, 3, 4, 9, 14)
    for place in range(16):
        for lane in range(words.shape[1]):
            words[place, lane] += start[place]
    for lane in range(words.shape[1]):
        block = np.uint64(first_block + lane)
        words[12, lane] += np.uint32(block & np.uint64(_MASK))
        words[13, lane] += np.uint32(block >> np.uint64(32))


@njit(cache=True, nogil=True)
def _quarters(words, a, b, c, d):  # type: ignore[no-untyped-def]
    for lane in range(words.shape[1]):
        first = np.uint32(words[a, lane] + words[b, lane])
        fourth = _rotated(words[d, lane] ^ first, 16)
        third = np.uint32(words[c, lane] + fourth)
        second = _rotated(words[b, lane] ^ third, 12)
        first = np.uint32(first + second)
        fourth = _rotated(fourth ^ first, 8)
        third = np.uint32(third + fourth)
        words[a, lane], words[d, lane], words[c, lane] = first, fourth, third
        words[b, lane] = _rotated(second ^ third, 7)


@njit(cache=True, nogil=True)
def _rotated(word, by):  # type: ignore[no-untyped-def]
    word = np.uint32(word)
    return np.uint32((word << np.uint32(by)) | (word >> np.uint32(32 - by)))
