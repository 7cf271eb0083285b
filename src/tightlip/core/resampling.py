"""Intervals for what is measured on test rows of which some share a person.

What one person writes is alike, so rows are not independent pieces and users are: whole users
are drawn with replacement, each with all their rows (the cluster bootstrap; Davison and Hinkley
1997, section 3.8). Of few users the percentiles are too narrow, having the spread of n where
n - 1 is right and a normal curve's tails where Student's are; both are mended by going further
into the tails (Hesterberg 2015, "expanded percentiles"). All figures of one test part use the
same draws, so that a difference of two is paired.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError

LEFT_OUT = 0.05  # what lies outside a 95% interval
ONE_TAIL = LEFT_OUT / 2
LEAST_CANARIES = 3  # fewer cannot tell a difference from chance


def tail_share(num_users: int, num_groups: int = 1) -> float:
    """The share beyond each end; `num_groups` of users are drawn separately.

    Percentiles of few users' draws are too narrow; these go further out (Hesterberg 2015).

    >>> [round(tail_share(n), 4) for n in (5, 20, 100, 10_000)]
    [0.001, 0.0159, 0.0231, 0.025]
    """
    from scipy.special import ndtr, stdtrit

    freedom = num_users - num_groups
    student = stdtrit(freedom, 1 - LEFT_OUT / 2)
    return float(ndtr(-math.sqrt(num_users / freedom) * student))


# Intervals for figures of which people, not documents, are the independent pieces


FEW_USERS = 20  # with 12 users of unequal size, 90 to 94 of 100 intervals held the truth


def check_num_bootstraps(num_bootstraps: int) -> None:
    if num_bootstraps < 100:
        raise UsageError(
            f"num_bootstraps={num_bootstraps} is too few to find the ends of a 95% interval. Use 1000."
        )


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


def times_drawn(rng: np.random.Generator, groups: Sequence[np.ndarray], size: int) -> np.ndarray:
    """How often each of `size` users comes up when every group is drawn again from itself."""
    times = np.zeros(size, dtype=np.int64)
    for members in groups:
        picks = rng.integers(0, len(members), len(members))
        times[members] = np.bincount(picks, minlength=len(members))
    return times


# Intervals for what is measured on test rows of which some share a person


NUM_DRAWS = 1000
_DRAWS_AT_ONCE = 64
HOW = (
    "95% intervals from 1,000 draws of whole users, each with all their test rows; "
    "with few users widened as Student's t does"
)


class UserDraws:
    """The users of some rows, drawn again and again.

    Holds:
        whole: a drawn user brings all their rows, and every draw has as many users.
        same_again: one seed gives one set of draws.
    """

    def __init__(self, users: Sequence[Any], *, seed: int = 0, num_draws: int = NUM_DRAWS) -> None:
        names, self.user_of_row = np.unique(np.asarray(users, dtype=str), return_inverse=True)
        self.num_users, self.num_rows = len(names), len(self.user_of_row)
        rng = np.random.default_rng(seed)
        self._times = np.empty((num_draws, self.num_users), dtype=np.uint16)
        for draw in self._times:
            picks = rng.integers(0, self.num_users, self.num_users)
            draw[:] = np.bincount(picks, minlength=self.num_users)

    def sums(self, amounts: np.ndarray) -> np.ndarray:
        """For each draw the sum of `amounts` [rows, m] over its rows: [draws, m]."""
        by_user = np.zeros((self.num_users, amounts.shape[1]))
        np.add.at(by_user, self.user_of_row, amounts)
        return np.concatenate([times @ by_user for times in self._chunks()])

    def over_rows(self, figure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """For each draw `figure` of how often each row came up ([some draws, rows])."""
        parts = [figure(times[:, self.user_of_row]) for times in self._chunks()]
        return np.concatenate(parts)

    def _chunks(self) -> list[np.ndarray]:
        starts = range(0, len(self._times), _DRAWS_AT_ONCE)
        return [self._times[start : start + _DRAWS_AT_ONCE].astype(np.float64) for start in starts]

    def interval(self, value: float, drawn: np.ndarray) -> dict[str, float | None]:
        """A figure and its 95% interval from the same figure over the draws.

        The ends are null where there is one user only, who says nothing about how users differ.
        """
        drawn = drawn[np.isfinite(drawn)]
        if self.num_users < 2 or not len(drawn) or not math.isfinite(value):
            return {"value": float(value), "low": None, "high": None}
        tail = tail_share(self.num_users)
        low, high = np.quantile(drawn, [tail, 1 - tail])
        return {"value": float(value), "low": float(low), "high": float(high)}

    def share(self, hits: np.ndarray, among: np.ndarray | None = None) -> dict[str, float | None]:
        """The share of `among` rows that are hits, with its interval.

        Where every row is a hit, or none, every draw is the same and would claim certainty;
        the other end is then Clopper and Pearson's for as many independent users.
        """
        among = np.ones(self.num_rows, dtype=bool) if among is None else among
        value = _ratio(float((hits & among).sum()), float(among.sum()))
        figure = self.interval(value, self.share_draws(hits, among))
        if value in (0.0, 1.0) and figure["low"] is not None:
            num_users = len(np.unique(self.user_of_row[among]))
            miss = 1 - (LEFT_OUT / 2) ** (1 / num_users)
            figure["low"], figure["high"] = (0.0, miss) if value == 0 else (1 - miss, 1.0)
        return figure

    def share_draws(self, hits: np.ndarray, among: np.ndarray) -> np.ndarray:
        """The share of `among` rows that are hits, in each draw."""
        sums = self.sums(np.stack([hits & among, among], axis=1).astype(np.float64))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(sums[:, 0] / sums[:, 1])


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan
