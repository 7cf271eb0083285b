"""Which runs expose their canaries less than others, beyond the canaries' own luck.

Differences are taken canary by canary, so that one canary's luck is in both runs. What no interval
here holds is the luck of a training: canaries of one model move together, and another seed may
move them all. Of 14 trainings that differed in their seed alone 12 pairs in 100 were told apart
where 2.5 in 100 should be; the words of a comparison say so.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

LEAST_CANARIES = 3
LEFT_OUT = 0.025  # of one tail: what lies above a 95% interval

Change = dict[str, Any]


def change_of(mine: Sequence[Change], theirs: Sequence[Change]) -> Change | None:
    """By how many bits the most repeated canaries are more exposed than the same ones elsewhere.

    The interval is Student's, 95%, and there is none for a single canary. `p_value` is how often
    chance alone would have them so much less exposed; None where the canaries cannot tell, being
    fewer than three or all changed by the same.
    """
    if not mine or not theirs:
        return None
    most = max(one["repetitions"] for one in mine)
    before = {one["text"]: one["exposure_bits"] for one in theirs}
    changes = [
        one["exposure_bits"] - before[one["text"]]
        for one in mine
        if one["repetitions"] == most and one["text"] in before
    ]
    return _mean_with_interval(changes) | {"repetitions": most} if changes else None


def _mean_with_interval(values: list[float]) -> Change:
    num = len(values)
    mean = math.fsum(values) / num
    found: Change = {"value": mean, "low": None, "high": None, "num_canaries": num, "p_value": None}
    if num < 2:
        return found
    from scipy.special import stdtr, stdtrit

    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (num - 1))
    error = spread / math.sqrt(num)
    reach = float(stdtrit(num - 1, 1 - LEFT_OUT)) * error
    found |= {"low": mean - reach, "high": mean + reach}
    # The same change in every canary says that something repeats, not how surely.
    if num >= LEAST_CANARIES and spread > 1e-9 * max(1.0, abs(mean)):
        found["p_value"] = float(stdtr(num - 1, mean / error))
    return found


def clearly_less(changes: Mapping[str, Change | None]) -> set[str]:
    """The names whose change is below 0 by more than luck, however many were looked at (Holm 1979).

    Holds:
        any_number: of runs that do not differ, one is named in at most 2.5 of 100 comparisons, however
            many runs are in it.

    >>> sorted(clearly_less({"a": {"p_value": 0.001}, "b": {"p_value": 0.02}, "c": {"p_value": 0.9}}))
    ['a']
    """
    found: set[str] = set()
    left = len(changes)
    for name, p_value in sorted(
        ((name, _p_value(change)) for name, change in changes.items()), key=lambda pair: pair[1]
    ):
        if p_value > LEFT_OUT / left:
            break
        found.add(name)
        left -= 1
    return found


def clearly_below_all(changes: Mapping[str, Change | None], num_runs: int) -> bool:
    """Whether the least exposed of `num_runs` runs is clearly below each of the others, though it
    was picked for being the least: as many pairs might have been looked at."""
    num_pairs = num_runs * (num_runs - 1) / 2
    return all(_p_value(change) <= LEFT_OUT / num_pairs for change in changes.values())


def _p_value(change: Change | None) -> float:
    known = None if change is None else change["p_value"]
    return 1.0 if known is None else known
