"""Discrete Laplace and Gaussian noise, exact, from the operating system's generator.

Noise of floating-point numbers leaves holes in its values through which the secret shows (Mironov
2012). Here noise is whole numbers of grid steps, drawn by comparing random words with
probabilities e^-x. Where a word is so close to the probability that a float cannot decide, more
random digits and as many decimals decide. So nothing is rounded: the law is the stated one to
2^-200 in every comparison, in the tails too, which pure differential privacy needs.

Compiled loops draw whole blocks beside the interpreter's lock, so that a model may be run
meanwhile. A block in which any word is too close is settled from the same words, digit by digit.
"""

import math
import operator
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tightlip.core.errors import GuaranteeError

# Random digits that decide a close comparison, and decimals enough to tell them apart.
_MORE_BITS = 256
_DECIMALS = Context(prec=120)
# Words are compared by their first 52 bits at most: a float of 53 then tells all but a few of them.
_MOST_BITS = 52
# How close, in units of the last bit compared, a float's exponential is not trusted. Its error is
# below 4 units: the exponent's rounding, x·e^-x·2^-53, and the exponential's own few last places.
_CLOSE = 16.0
_STRIDES = 128  # of a geometric variable told by one word; fewer than e^-16 are beyond them
_CELL_BITS = 14  # of a word that mostly tell it by themselves
_AT_ONCE = 1 << 15  # values drawn at a time: the arrays stay in the cache
_FEW = 4  # blocks for which starting threads is not worth it
_TOO_CLOSE = -1  # a compiled loop's word for: settle this block by more digits
_SQUARED_BITS = 32  # compared where Gaussian values are kept: one block in 4,000 takes more


class _Split(NamedTuple):
    """A geometric variable of ratio e^(-1/units) as low + 2^bits · high, both independent."""

    bits: int
    thresholds: np.ndarray  # P(high >= j) · 2^31 rounded down, j = 1, 2, ...
    by_cell: np.ndarray  # high by the first bits of a word; _STRIDES where they leave it open


class GridNoise:
    """Whole numbers of discrete Laplace or Gaussian law, fresh at every draw.

    `entropy` is for tests: random bytes from elsewhere than the operating system.

    Holds:
        exact: the law is the discrete one of the scale given, at every value.
        fresh: no two draws share randomness.
        kept: what was drawn is nowhere but in the result.
    """

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._entropy = entropy

    def laplace(self, units: int, shape: tuple[int, ...]) -> np.ndarray:
        """Values x with probability proportional to e^(-|x| / units)."""
        return self._filled(shape, lambda part: self._laplace(units, part))

    def gaussian(self, units: int, shape: tuple[int, ...]) -> np.ndarray:
        """Values x with probability proportional to e^(-x² / (2 units²))."""
        return self._filled(shape, lambda part: self._gaussian(units, part))

    def _filled(self, shape: tuple[int, ...], fill: Callable[[np.ndarray], int]) -> np.ndarray:
        """So many values by `fill`, on as many threads as there are cores."""
        values = np.empty(int(np.prod(shape)), np.int64)
        parts = [values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE)]
        # The loops and the system's generator let go of the interpreter's lock meanwhile.
        on_all_cores(lambda part: _fill(part, fill), parts, few=_FEW)
        return values.reshape(shape)

    def _laplace(self, units: int, out: np.ndarray) -> int:
        """Fill the front of `out`; how far. A sign and a geometric variable; minus zero is drawn
        again, or zero would come twice."""
        # At least 0.88 of the candidates are taken; more are drawn so that few calls draw again.
        candidates = self._words(int(1.15 * len(out)) + 64, np.uint64)
        words = self._words(int(1.01 * len(out)) + 64, np.uint32)
        filled = _fast_laplace(candidates, words, units, *_split(units), out)
        if filled == _TOO_CLOSE:
            filled = _put(self._slow_laplace(candidates, words, units), out)
        return filled

    def _slow_laplace(self, candidates: np.ndarray, words: np.ndarray, units: int) -> np.ndarray:
        """What the compiled loop makes of these words, and what more digits say where it cannot."""
        split = _split(units)
        low = (candidates & np.uint64((1 << split.bits) - 1)).astype(np.int64)
        kept = min(64 - split.bits, _MOST_BITS)
        low = low[self._happens(candidates >> np.uint64(64 - kept), kept, low, units)]
        words, low = words[: len(low)], low[: len(words)]
        negative = (words & 1).astype(bool)
        values = low + (self._high(split, units, words >> 1) << split.bits)
        np.negative(values, out=values, where=negative)
        return values[~negative | (values != 0)]

    def _high(self, split: _Split, units: int, words: np.ndarray) -> np.ndarray:
        """The geometric variable above the low bits, told by 31 random bits or, far out, more."""
        high = split.by_cell[words >> (31 - _CELL_BITS)]
        for place in np.flatnonzero(high == _STRIDES):
            high[place] = self._high_one_by_one(split, units, int(words[place]))
        return high

    def _high_one_by_one(self, split: _Split, units: int, word: int) -> int:
        """The same with as many bits as it takes; a variable beyond the last stride starts anew."""
        thresholds = split.thresholds.tolist()
        strides = bisect_left(thresholds, -word, key=operator.neg)
        if strides < _STRIDES and word != thresholds[strides]:
            return strides
        digits, bits = word << _MORE_BITS | self._more(), 31 + _MORE_BITS
        total = 0
        while True:
            for strides in range(_STRIDES):
                if digits >= _scaled_exponential((strides + 1) << split.bits, units, bits):
                    return total + strides
            total += _STRIDES
            digits, bits = self._more(), _MORE_BITS

    def _gaussian(self, units: int, out: np.ndarray) -> int:
        """Laplace values x, kept with probability e^(-(|x| - units)² / (2 units²))."""
        # 0.76 of them are (Canonne, Kamath and Steinke 2020, Algorithm 3, with τ = σ).
        values = np.empty(int(1.33 * len(out)) + 16, np.int64)
        values = values[: self._laplace(units, values)]
        words = self._words(len(values), np.uint32)
        filled = _fast_gaussian(values, words, units, out)
        if filled == _TOO_CLOSE:
            filled = _put(self._slow_gaussian(values, words, units), out)
        return filled

    def _slow_gaussian(self, values: np.ndarray, words: np.ndarray, units: int) -> np.ndarray:
        off = np.abs(values) - units
        return values[self._happens(words, _SQUARED_BITS, off, units, squared=True)]

    def _happens(
        self, words: np.ndarray, bits: int, values: np.ndarray, units: int, *, squared: bool = False
    ) -> np.ndarray:
        """Whether a number of `bits` random bits is below e^-(x/units), or e^-(x²/(2 units²))."""
        ratio = values / units
        exponent = ratio * ratio / 2 if squared else ratio
        bounds = np.exp(-exponent) * 2.0**bits
        uniform = words.astype(np.float64)
        happens = uniform + 1 <= bounds
        for place in np.flatnonzero(np.abs(uniform + 0.5 - bounds) < _CLOSE):
            digits = int(words[place]) << _MORE_BITS | self._more()
            value = int(values[place])
            over, under = (value * value, 2 * units * units) if squared else (value, units)
            happens[place] = digits < _scaled_exponential(over, under, bits + _MORE_BITS)
        return happens

    def _words(self, count: int, kind: type) -> np.ndarray:
        return np.frombuffer(self._entropy(count * np.dtype(kind).itemsize), kind)

    def _more(self) -> int:
        return int.from_bytes(self._entropy(_MORE_BITS // 8), "little")

    def __getstate__(self) -> None:
        raise GuaranteeError("A noise source is not copied: make a new one where noise is drawn.")


@lru_cache(maxsize=16)
def _split(units: int) -> _Split:
    """Low bits up to a quarter of the scale, so that nearly all candidates for them are taken."""
    bits = max(0, units.bit_length() - 3)
    chances = np.array([_scaled_exponential(j << bits, units, 31) for j in range(1, _STRIDES + 1)])
    starts = np.arange(1 << _CELL_BITS, dtype=np.int64) << (31 - _CELL_BITS)
    ends = starts + (1 << (31 - _CELL_BITS)) - 1
    told = np.sum(ends[:, None] < chances, axis=1)
    held = (starts[:, None] <= chances) & (chances <= ends[:, None])
    return _Split(bits, chances, np.where(held.any(axis=1), _STRIDES, told))


@njit(cache=True, nogil=True)
def _verdict(word: float, scale: float, exponent: float) -> int:
    """Whether a word is below scale · e^-exponent, or too close to it for a float."""
    bound = math.exp(-exponent) * scale
    if abs(word + 0.5 - bound) < _CLOSE:
        return _TOO_CLOSE
    return 1 if word + 1 <= bound else 0


@njit(cache=True, nogil=True)
def _fast_high(word: int, by_cell: np.ndarray, thresholds: np.ndarray) -> int:
    strides = by_cell[word >> (31 - _CELL_BITS)]
    if strides < _STRIDES:
        return strides
    strides = 0
    while strides < _STRIDES and thresholds[strides] > word:
        strides += 1
    return _TOO_CLOSE if strides == _STRIDES or thresholds[strides] == word else strides


@njit(cache=True, nogil=True)
def _fast_laplace(
    candidates: np.ndarray,
    words: np.ndarray,
    units: int,
    bits: int,
    thresholds: np.ndarray,
    by_cell: np.ndarray,
    out: np.ndarray,
) -> int:
    """Fill the front of `out`; how far, or that a word was too close to tell."""
    kept = min(64 - bits, _MOST_BITS)
    low_bits = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    shift, scale = np.uint64(64 - kept), 2.0**kept
    filled = used = 0
    for candidate in candidates:
        if filled == len(out) or used == len(words):
            break
        low = np.int64(candidate & low_bits)
        taken = _verdict(np.float64(candidate >> shift), scale, low / units)
        if taken == 0:
            continue
        word = np.int64(words[used])
        used += 1
        high = _fast_high(word >> 1, by_cell, thresholds)
        if taken == _TOO_CLOSE or high == _TOO_CLOSE:
            return _TOO_CLOSE
        value = low + (high << bits)
        if word & 1:
            if value == 0:
                continue
            value = -value
        out[filled] = value
        filled += 1
    return filled


@njit(cache=True, nogil=True)
def _fast_gaussian(values: np.ndarray, words: np.ndarray, units: int, out: np.ndarray) -> int:
    """The values kept, at the front of `out`; how many, or that a word was too close to tell."""
    filled = 0
    for place in range(len(values)):
        if filled == len(out):
            break
        ratio = (abs(values[place]) - units) / units
        kept = _verdict(np.float64(words[place]), 2.0**_SQUARED_BITS, ratio * ratio / 2)
        if kept == _TOO_CLOSE:
            return _TOO_CLOSE
        if kept == 1:
            out[filled] = values[place]
            filled += 1
    return filled


def on_all_cores(action: Callable[[Any], None], items: Sequence[Any], *, few: int) -> None:
    """Do it with every item: on a thread for each core, or one after the other where they are few."""
    if len(items) <= few:
        for item in items:
            action(item)
        return
    with ThreadPoolExecutor(min(len(items), os.cpu_count() or 1)) as pool:
        list(pool.map(action, items))


def _put(values: np.ndarray, out: np.ndarray) -> int:
    count = min(len(values), len(out))
    out[:count] = values[:count]
    return count


def _fill(part: np.ndarray, fill: Callable[[np.ndarray], int]) -> None:
    """Fill `part` by draws that each give about as many values as asked for.

    Those accepted are taken in the order drawn, so which are left over at the end says nothing.
    """
    done = 0
    while done < len(part):
        done += fill(part[done:])


def _scaled_exponential(over: int, under: int, bits: int) -> int:
    """e^(-over/under) · 2^bits, rounded down."""
    exponent = _DECIMALS.divide(Decimal(-over), Decimal(under))
    return int(_DECIMALS.multiply(_DECIMALS.exp(exponent), Decimal(1 << bits)))
