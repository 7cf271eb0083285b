"""Whether the main task works as well for one group of people as for another.

Rows of one person are alike, so the number of rows says little about what chance can do; the
spread between people does. The statistic is Wald's for equal accuracies, with a covariance
summed over users (Liang and Zeger 1986). Where each user belongs to one group it is compared
with the same statistic after users have swapped groups at random: exact where groups are alike
in all, and right for many users where only their accuracies are equal (Chung and Romano 2013).
Where users have rows in several groups it is compared with an F distribution.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tightlip.representation.intervals import UserDraws

NUM_SWAPS = 1999
FEWEST_USERS = 5  # in the smallest group; below that no test is worth its name


def fairness(
    correct: np.ndarray,
    groups: Sequence[str | None],
    draws: UserDraws,
    *,
    seed: int = 0,
    num_swaps: int = NUM_SWAPS,
) -> dict[str, Any]:
    """Accuracy by group, the gap between the best and the worst, and whether it may be chance.

    A row whose group is None is left out. The p-value is null with fewer than two groups, or
    with fewer than five users in one. The gap has an interval between two groups only: of more,
    best and worst are picked by the same rows, and the gap is wide where all fare alike.

    Holds:
        covered: between two groups the interval holds the difference nineteen times in twenty.
        level: with equal accuracies p is below 0.05 about one time in twenty, however rows cluster.
        sees: a wide gap over many users gets a small p.
    """
    names = sorted({str(one) for one in groups if one is not None})
    place = {name: number for number, name in enumerate(names)}
    codes = np.asarray([-1 if one is None else place[str(one)] for one in groups])
    shares = {
        name: draws.share(correct, codes == number)
        | {"num_rows": int((codes == number).sum()), "num_users": _num_users(codes, number, draws)}
        for name, number in place.items()
    }
    return {
        "groups": shares,
        "gap": _gap(correct, codes, len(names), draws),
        **_test(correct, codes, len(names), draws, seed, num_swaps),
    }


def _num_users(codes: np.ndarray, number: int, draws: UserDraws) -> int:
    return len(np.unique(draws.user_of_row[codes == number]))


def _gap(
    correct: np.ndarray, codes: np.ndarray, num_groups: int, draws: UserDraws
) -> dict[str, Any] | None:
    """Best minus worst; between two groups with the interval of their signed difference."""
    if num_groups < 2:
        return None
    values = [float(correct[codes == number].mean()) for number in range(num_groups)]
    best, worst = int(np.argmax(values)), int(np.argmin(values))
    if num_groups > 2:
        return {"value": values[best] - values[worst], "low": None, "high": None}
    drawn = [draws.share_draws(correct, codes == number) for number in (best, worst)]
    return draws.interval(values[best] - values[worst], drawn[0] - drawn[1])


def _test(
    correct: np.ndarray,
    codes: np.ndarray,
    num_groups: int,
    draws: UserDraws,
    seed: int,
    num_swaps: int,
) -> dict[str, Any]:
    fewest = min((_num_users(codes, n, draws) for n in range(num_groups)), default=0)
    if num_groups < 2 or fewest < FEWEST_USERS:
        because = f"a group has fewer than {FEWEST_USERS} users in the test part"
        return {"p": None, "test": because if num_groups > 1 else "there is one group only"}
    hits, rows = by_user(correct, codes, num_groups, draws)
    if ((rows > 0).sum(axis=1) <= 1).all():
        p = _swapped_p(hits, rows, np.random.default_rng(seed), num_swaps)
        return {"p": p, "test": "users swap groups at random; covariance over users"}
    return {"p": _f_p(hits, rows), "test": "Wald's F with a covariance over users"}


def by_user(
    correct: np.ndarray, codes: np.ndarray, num_groups: int, draws: UserDraws
) -> tuple[np.ndarray, np.ndarray]:
    """Right answers and rows of each user in each group, [users, groups]; users with none left out."""
    known = codes >= 0
    at = (draws.user_of_row[known], codes[known])
    hits, rows = np.zeros((2, draws.num_users, num_groups))
    np.add.at(hits, at, correct[known].astype(float))
    np.add.at(rows, at, 1.0)
    there = rows.sum(axis=1) > 0
    return hits[there], rows[there]


def wald(hits: np.ndarray, rows: np.ndarray) -> float:
    """How far the groups' accuracies are apart, in units of what users' spread explains."""
    totals = rows.sum(axis=0)
    accuracies = hits.sum(axis=0) / totals
    influence = (hits - rows * accuracies) / totals
    covariance = len(hits) / (len(hits) - 1) * influence.T @ influence
    contrast = np.eye(len(totals))[1:] - np.eye(len(totals))[0]
    difference = contrast @ accuracies
    spread = contrast @ covariance @ contrast.T
    if not difference.any():
        return 0.0
    # A group that is always right has no spread; a hair of it keeps the matrix invertible.
    spread += np.eye(len(spread)) * 1e-12
    return float(difference @ np.linalg.solve(spread, difference))


def _swapped_p(
    hits: np.ndarray, rows: np.ndarray, rng: np.random.Generator, num_swaps: int
) -> float:
    """How often users who swapped groups at random are as far apart; never below 1 / swaps."""
    group = rows.argmax(axis=1)
    right, num_rows = hits.sum(axis=1), rows.sum(axis=1)
    seen = wald(hits, rows)
    as_far = 0
    for _ in range(num_swaps):
        membership = np.eye(rows.shape[1])[rng.permutation(group)]
        swapped = wald(membership * right[:, None], membership * num_rows[:, None])
        as_far += swapped >= seen * (1 - 1e-9)
    return (1 + as_far) / (1 + num_swaps)


def _f_p(hits: np.ndarray, rows: np.ndarray) -> float:
    from scipy.stats import f

    num_users, contrasts = len(hits), rows.shape[1] - 1
    freedom = max(num_users - contrasts, 1)
    scaled = wald(hits, rows) * freedom / (contrasts * max(num_users - 1, 1))
    return float(f.sf(scaled, contrasts, freedom))
