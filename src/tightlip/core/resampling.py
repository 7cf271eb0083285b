"""Intervals for figures of which people, not rows, are the independent pieces.

What one person writes is alike, so rows are not independent pieces and users are: whole users
are drawn with replacement, each with all their rows (the cluster bootstrap; Davison and Hinkley
1997, section 3.8). Of few users the percentiles are too narrow, having the spread of n where
n - 1 is right and a normal curve's tails where Student's are; both are mended by going further
into the tails (Hesterberg 2015, "expanded percentiles"). All figures of one test part use the
same draws, so that a difference of two is paired.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.settings import Settings, setting

LEFT_OUT = 0.05  # what lies outside a 95% interval
ONE_TAIL = LEFT_OUT / 2
FEW_USERS = 20  # with 12 users of unequal size, 90 to 94 of 100 intervals held the truth
LEAST_CANARIES = 3  # fewer cannot tell a difference from chance
HOW = (
    "95% intervals from draws of whole users, each with all their test rows; "
    "with few users widened as Student's t does"
)
_DRAWS_AT_ONCE = 64


def check_num_bootstraps(num_bootstraps: int) -> None:
    if num_bootstraps < 100:
        raise UsageError(
            f"num_bootstraps={num_bootstraps} is too few to find the ends of a 95% interval. Use 1000."
        )


@dataclass(frozen=True, kw_only=True)
class ResamplingSettings(Settings):
    """What decides the intervals of a measure."""

    seed: int = setting(0, "Decides what is resampled.")
    num_bootstraps: int = setting(1000, "Resamples behind each interval.", at_most=1_000_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_bootstraps(self.num_bootstraps)


def times_drawn(rng: np.random.Generator, groups: Sequence[np.ndarray], size: int) -> np.ndarray:
    """How often each of `size` users comes up when every group is drawn again from itself."""
    times = np.zeros(size, dtype=np.int64)
    for members in groups:
        picks = rng.integers(0, len(members), len(members))
        times[members] = np.bincount(picks, minlength=len(members))
    return times


def interval(
    value: float, drawn: Sequence[float] | np.ndarray, *, num_users: int, num_groups: int = 1
) -> dict[str, Any]:
    """A figure with its 95% interval from the same figure over resampled users.

    The ends are null where there is one user only, who says nothing about how users differ.

    >>> interval(2.0, [1.0, 2.0, 3.0], num_users=1)
    {'value': 2.0, 'low': None, 'high': None}
    """
    if num_users <= num_groups:
        return {"value": float(value), "low": None, "high": None}
    tail = tail_share(num_users, num_groups)
    low, high = np.quantile(np.asarray(drawn, dtype=np.float64), [tail, 1 - tail])
    return {"value": float(value), "low": float(low), "high": float(high)}


def tail_share(num_users: int, num_groups: int = 1) -> float:
    """The share beyond each end; `num_groups` of users are drawn separately.

    >>> [round(tail_share(n), 4) for n in (5, 20, 100, 10_000)]
    [0.001, 0.0159, 0.0231, 0.025]
    """
    from scipy.special import ndtr, stdtrit

    freedom = num_users - num_groups
    student = stdtrit(freedom, 1 - ONE_TAIL)
    return float(ndtr(-math.sqrt(num_users / freedom) * student))


class UserDraws:
    """The users of some rows, drawn again and again.

    Holds:
        whole: a drawn user brings all their rows, and every draw has as many users.
        same_again: one seed gives one set of draws.
    """

    def __init__(self, users: Sequence[Any], *, seed: int, num_draws: int) -> None:
        names, self.user_of_row = np.unique(np.asarray(users, dtype=str), return_inverse=True)
        self.num_users, self.num_rows = len(names), len(self.user_of_row)
        rng, everybody = np.random.default_rng(seed), [np.arange(self.num_users)]
        self._times = np.empty((num_draws, self.num_users), dtype=np.uint16)
        for draw in self._times:
            draw[:] = times_drawn(rng, everybody, self.num_users)

    def sums(self, amounts: np.ndarray) -> np.ndarray:
        """For each draw the sum of `amounts` [rows, m] over its rows: [draws, m]."""
        by_user = np.zeros((self.num_users, amounts.shape[1]))
        np.add.at(by_user, self.user_of_row, amounts)
        return np.concatenate([times @ by_user for times in self._chunks()])

    def over_rows(self, figure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """For each draw `figure` of how often each row came up ([some draws, rows])."""
        return np.concatenate([figure(times[:, self.user_of_row]) for times in self._chunks()])

    def _chunks(self) -> Iterator[np.ndarray]:
        starts = range(0, len(self._times), _DRAWS_AT_ONCE)
        return (self._times[start : start + _DRAWS_AT_ONCE].astype(np.float64) for start in starts)

    def interval(self, value: float, drawn: np.ndarray) -> dict[str, Any]:
        """`interval` over these draws, of which those without the figure are passed over."""
        drawn = drawn[np.isfinite(drawn)]
        known = len(drawn) and math.isfinite(value)
        return interval(value, drawn, num_users=self.num_users if known else 0)

    def share(self, hits: np.ndarray, among: np.ndarray | None = None) -> dict[str, Any]:
        """The share of `among` rows that are hits, with its interval.

        Where every row is a hit, or none, every draw is the same and would claim certainty;
        the other end is then Clopper and Pearson's for as many independent users.
        """
        among = np.ones(self.num_rows, dtype=bool) if among is None else among
        value = float((hits & among).sum()) / float(among.sum()) if among.any() else math.nan
        figure = self.interval(value, self.share_draws(hits, among))
        if value in (0.0, 1.0) and figure["low"] is not None:
            num_users = len(np.unique(self.user_of_row[among]))
            miss = 1 - ONE_TAIL ** (1 / num_users)
            figure["low"], figure["high"] = (0.0, miss) if value == 0 else (1 - miss, 1.0)
        return figure

    def share_draws(self, hits: np.ndarray, among: np.ndarray) -> np.ndarray:
        """The share of `among` rows that are hits, in each draw."""
        sums = self.sums(np.stack([hits & among, among], axis=1).astype(np.float64))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(sums[:, 0] / sums[:, 1])
