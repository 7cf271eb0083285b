"""The CPU's compiled search for the nuclei of a decoding."""

import math

import numpy as np
from numba import njit

from tightlip.scan.scoring_cpu import _exp


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
