"""The CPU's compiled passes over logits: what is above each row's target, weights, moments, nuclei."""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def _float_from_bits(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(fastmath=True, inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """exp for x <= 0 within 2e-7: a degree-6 polynomial for 2^f, the exponent set by its bits.

    Written out because numba vectorises no libm call without Intel's SVML: 4× faster here.
    """
    y = max(x * np.float32(1.4426950408889634), np.float32(-126.0))
    k = np.floor(y + np.float32(0.5))
    f = y - k
    p = np.float32(1.5403530393381609e-4)
    p = p * f + np.float32(1.3333558146428443e-3)
    p = p * f + np.float32(9.618129107628477e-3)
    p = p * f + np.float32(5.550410866482158e-2)
    p = p * f + np.float32(2.402265069591007e-1)
    p = p * f + np.float32(6.931471805599453e-1)
    p = p * f + np.float32(1.0)
    return p * _float_from_bits((np.int32(k) + np.int32(127)) << np.int32(23))


@njit(fastmath=True, inline="always")
def _compared(row, target):  # type: ignore[no-untyped-def]
    """The highest logit, and how many are above the target's."""
    highest, above = row[0], np.int32(0)
    for j in range(len(row)):
        highest = max(highest, row[j])
        above += np.int32(1) if row[j] > target else np.int32(0)
    return highest, above


@njit(fastmath=True, nogil=True, cache=True)
def read_rows(rate, logits, targets, num_above, highest, total, above):  # type: ignore[no-untyped-def]
    """`above` may be None, and is compiled away then."""
    for i in range(len(targets)):
        row = logits[i]
        target = row[targets[i]]
        highest[i], num_above[i] = top, _ = _compared(row, target)
        every, higher = np.float32(0), np.float32(0)
        for j in range(len(row)):
            weight = _exp((row[j] - top) * rate)
            every += weight
            if above is not None:
                higher += weight if row[j] > target else np.float32(0)
        total[i] = every
        if above is not None:
            above[i] = higher


@njit(fastmath=True, nogil=True, cache=True)
def read_moments(logits, targets, num_above, highest, total, means, deviations):  # type: ignore[no-untyped-def]
    for i in range(len(targets)):
        row = logits[i]
        highest[i], num_above[i] = top, _ = _compared(row, row[targets[i]])
        sums = np.zeros(3)
        for start in range(0, len(row), 2048):
            # In float32 no further than this: tens of thousands of like terms add their rounding up.
            every = first = second = np.float32(0)
            for j in range(start, min(start + 2048, len(row))):
                below = max(row[j] - top, np.float32(-87.0))  # 0 times minus infinity is NaN
                share = _exp(below)
                every += share
                first += share * below
                second += share * below * below
            sums[0] += every
            sums[1] += first
            sums[2] += second
        mean = sums[1] / sums[0]
        total[i] = sums[0]
        means[i] = mean - math.log(sums[0])
        deviations[i] = math.sqrt(max(sums[2] / sums[0] - mean * mean, 0.0))


@njit(nogil=True, cache=True)
def nuclei_of_rows(rate, logits, targets, wanted, highest, above, goals, masses):  # type: ignore[no-untyped-def]
    below = np.empty(logits.shape[1], np.float32)
    for i in range(len(targets)):
        if wanted[i]:
            row = logits[i]
            size = 0
            for value in row:  # what is above the target is in the nucleus
                if value <= row[targets[i]]:
                    below[size] = value
                    size += 1
            masses[i] = _nucleus(below, size, highest[i], rate, above[i], goals[i])


@njit(nogil=True, cache=True)
def _nucleus(values, size, top, rate, mass, goal):  # type: ignore[no-untyped-def]
    """`mass` and the weights of the highest of these values, until together they reach the goal.

    Quickselect: values are parted about one of them into higher, equal and lower ones, and only
    the part in which the goal is reached is looked at again.
    """
    begin, end = 0, size
    while begin < end:
        pivot = values[(begin + end) // 2]
        higher, place, lower = begin, begin, end
        weight = np.float32(0)
        while place < lower:
            value = values[place]
            if value > pivot:
                weight += _exp((value - top) * rate)
                values[place], values[higher] = values[higher], value
                higher += 1
                place += 1
            elif value < pivot:
                lower -= 1
                values[place], values[lower] = values[lower], value
            else:
                place += 1
        each = _exp((pivot - top) * rate)
        missing = goal - mass - weight
        if missing <= 0 and higher > begin:
            end = higher
        elif missing <= each * (lower - higher):
            return mass + weight + each * max(math.ceil(missing / each), 1)
        else:
            mass += weight + each * (lower - higher)
            begin = lower
    return mass
