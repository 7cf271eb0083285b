"""What guesses come to: accuracy against the majority, AUC, F1, empirical privacy, and whether the
main task works as well for one group of people as for another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tightlip.core.resampling import UserDraws
from tightlip.vectors.attackers import Parts, Reading

Figure = dict[str, float | None]
THRESHOLDS = np.linspace(0.02, 0.98, 49)
NUM_SWAPS = 1999
FEWEST_USERS = 5  # in the smallest group; below that no test is worth its name


@dataclass(frozen=True, kw_only=True)
class Target:
    """One private attribute: its values, and each row's as a code, -1 where it is not known."""

    name: str
    values: tuple[str, ...]
    codes: Parts[np.ndarray]

    @property
    def majority(self) -> int:
        """The commonest value of the training part: what one guesses without a vector."""
        known = self.codes.train[self.codes.train >= 0]
        return int(np.bincount(known, minlength=len(self.values)).argmax())


Targets = Sequence[Target]


@dataclass(frozen=True, kw_only=True)
class JudgedRows:
    """The test rows on which figures are taken, and their users' draws."""

    rows: np.ndarray  # which rows of the test part
    draws: UserDraws


def judged_rows(users: Sequence[str], rows: np.ndarray, *, seed: int, num_draws: int) -> JudgedRows:
    """Figures on some rows of the test part; `rows` is a mask."""
    places = np.flatnonzero(rows)
    draws = UserDraws([users[int(place)] for place in places], seed=seed, num_draws=num_draws)
    return JudgedRows(rows=places, draws=draws)


# One attribute
def attribute_figures(target: Target, reading: Reading, on: JudgedRows) -> dict[str, Any]:
    """Accuracy, how far above the majority's, and AUC, each with its interval."""
    truth, scores = target.codes.test[on.rows], reading.test[on.rows]
    known = truth >= 0
    right = scores.argmax(axis=1) == truth
    plain = truth == target.majority
    above = on.draws.share_draws(right, known) - on.draws.share_draws(plain, known)
    value = float(right[known].mean() - plain[known].mean()) if known.any() else float("nan")
    return {
        "accuracy": on.draws.share(right, known),
        "above_majority": on.draws.interval(value, above),
        "auc": auc(truth, scores, on.draws),
        "by_value": by_value(target, scores.argmax(axis=1), on),
        "chosen": reading.chosen,
    }


def by_value(target: Target, guess: np.ndarray, on: JudgedRows) -> dict[str, dict[str, int]]:
    """Of each value: how many test rows have it, how many were said to, and how many rightly."""
    truth = target.codes.test[on.rows]
    return {
        value: {
            "num": int((truth == code).sum()),
            "said": int(((guess == code) & (truth >= 0)).sum()),
            "right": int(((guess == code) & (truth == code)).sum()),
        }
        for code, value in enumerate(target.values)
    }


def majority_figure(target: Target, on: JudgedRows) -> Figure:
    """How often the training part's commonest value is right on the test part."""
    truth = target.codes.test[on.rows]
    return on.draws.share(truth == target.majority, truth >= 0)


def auc(truth: np.ndarray, scores: np.ndarray, draws: UserDraws) -> Figure:
    """How often a row of a value outranks one that is not: 0.5 is blind, 1 knows all.

    Accuracy says nothing of a rare value that the attacker suspects rightly and never names;
    this does. With several values it is the mean over those that both stand and lack in the
    test part.
    """
    known = np.flatnonzero(truth >= 0)
    counts = [int((truth[known] == code).sum()) for code in range(scores.shape[1])]
    present = [code for code, count in enumerate(counts) if 0 < count < len(known)]
    if not present:
        return {"value": float("nan"), "low": None, "high": None}
    if scores.shape[1] == 2:
        present = present[-1:]
    figures = [_auc(truth, scores[:, code], code, known) for code in present]
    values = [figure(np.ones((1, len(truth))))[0] for figure in figures]
    drawn = [draws.over_rows(figure) for figure in figures]
    return draws.interval(float(np.mean(values)), np.mean(drawn, axis=0))


def _auc(truth: np.ndarray, scores: np.ndarray, code: int, known: np.ndarray) -> Any:
    """The AUC as a function of how often each row counts; equal scores count half."""
    order = known[np.argsort(scores[known], kind="stable")]
    positive = (truth[order] == code).astype(float)
    starts = np.flatnonzero(np.diff(scores[order], prepend=np.nan) != 0)

    def figure(times: np.ndarray) -> np.ndarray:
        times = times[:, order]
        ups = np.add.reduceat(times * positive, starts, axis=1)
        downs = np.add.reduceat(times * (1 - positive), starts, axis=1)
        below = np.cumsum(downs, axis=1) - downs / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((ups * below).sum(axis=1) / (ups.sum(axis=1) * downs.sum(axis=1)))

    return figure


# All attributes
def empirical_privacy(targets: Targets, readings: Sequence[Reading], on: JudgedRows) -> Figure:
    """1 - X: one minus the mean accuracy over the attributes."""
    guesses = [reading.test[on.rows].argmax(axis=1) for reading in readings]
    return _one_minus_mean(targets, guesses, on)


def majority_privacy(targets: Targets, on: JudgedRows) -> Figure:
    """1 - X of one who guesses without a vector: no attack should leave less than noise does."""
    guesses = [np.full(len(on.rows), target.majority) for target in targets]
    return _one_minus_mean(targets, guesses, on)


def _one_minus_mean(targets: Targets, guesses: Sequence[np.ndarray], on: JudgedRows) -> Figure:
    values, drawn = [], []
    for target, guess in zip(targets, guesses, strict=True):
        truth = target.codes.test[on.rows]
        known = truth >= 0
        values.append(float((guess == truth)[known].mean()) if known.any() else float("nan"))
        drawn.append(on.draws.share_draws(guess == truth, known))
    return on.draws.interval(1 - float(np.mean(values)), 1 - np.mean(drawn, axis=0))


# Named entities
def entity_f1(truth: np.ndarray, guess: np.ndarray, draws: UserDraws) -> Figure:
    """F1 over the presence of all entities together ([rows, entities], true where present)."""
    both, either = (truth & guess).sum(axis=1), truth.sum(axis=1) + guess.sum(axis=1)
    sums = draws.sums(np.stack([both, either], axis=1).astype(float))
    value = float(2 * both.sum() / either.sum()) if either.any() else 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = np.nan_to_num(2 * sums[:, 0] / sums[:, 1])
    return draws.interval(value, drawn)


def entity_figures(targets: Targets, readings: Sequence[Reading], on: JudgedRows) -> dict[str, Any]:
    """1 - F as published (present where likelier than not) and with a threshold chosen on dev.

    A rare name is hardly ever likelier than not, and 1 - F is then near 1 however well the
    attacker ranks the texts; one who wants a good F1 moves the threshold.
    """
    dev = np.stack([reading.dev[:, 1] for reading in readings], axis=1)
    threshold = best_threshold(_present([target.codes.dev for target in targets]), dev)
    likely = np.stack([reading.test[on.rows, 1] for reading in readings], axis=1)
    return {
        "one_minus_f": _one_minus_f1(targets, likely > 0.5, on),
        "one_minus_f_tuned": _one_minus_f1(targets, likely >= threshold, on),
        "threshold": threshold,
    }


def majority_f1_privacy(targets: Targets, on: JudgedRows) -> Figure:
    """1 - F of one who says of each name what holds of most training texts."""
    guess = np.tile([target.majority == 1 for target in targets], (len(on.rows), 1))
    return _one_minus_f1(targets, guess, on)


def everywhere_f1_privacy(targets: Targets, on: JudgedRows) -> Figure:
    """1 - F of one who says that every name is everywhere: the bar for a tuned threshold."""
    return _one_minus_f1(targets, np.ones((len(on.rows), len(targets)), dtype=bool), on)


def _one_minus_f1(targets: Targets, guess: np.ndarray, on: JudgedRows) -> Figure:
    truth = _present([target.codes.test[on.rows] for target in targets])
    return one_minus(entity_f1(truth, guess, on.draws))


def _present(codes: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(np.stack(codes, axis=1) == 1)


def best_threshold(truth: np.ndarray, scores: np.ndarray) -> float:
    """The threshold whose F1 over all entities is highest on the development part."""
    both = [((truth & (scores >= t)).sum(), truth.sum() + (scores >= t).sum()) for t in THRESHOLDS]
    f1 = [2 * hit / total if total else 0.0 for hit, total in both]
    return float(THRESHOLDS[int(np.argmax(f1))])


def one_minus(figure: Figure) -> Figure:
    """The same figure seen from the other side.

    >>> one_minus({"value": 0.75, "low": 0.5, "high": 1.0})
    {'value': 0.25, 'low': 0.0, 'high': 0.5}
    """
    assert figure["value"] is not None
    low, high = (None if end is None else 1 - end for end in (figure["high"], figure["low"]))
    return {"value": 1 - figure["value"], "low": low, "high": high}


# Groups of people
def fairness(
    correct: np.ndarray,
    groups: Sequence[str | None],
    draws: UserDraws,
    *,
    seed: int,
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
    codes = np.asarray([-1 if one is None else names.index(str(one)) for one in groups])
    hits, rows = by_user(correct, codes, len(names), draws)
    num_rows, num_users = rows.sum(axis=0), (rows > 0).sum(axis=0)
    shares = {
        name: draws.share(correct, codes == number)
        | {"num_rows": int(num_rows[number]), "num_users": int(num_users[number])}
        for number, name in enumerate(names)
    }
    return {
        "groups": shares,
        "gap": _gap(correct, codes, [share["value"] for share in shares.values()], draws),
        **_test(hits, rows, np.random.default_rng(seed), num_swaps),
    }


def _gap(
    correct: np.ndarray, codes: np.ndarray, values: list[float], draws: UserDraws
) -> Figure | None:
    """Best minus worst; between two groups with the interval of their signed difference."""
    if len(values) < 2:
        return None
    best, worst = int(np.argmax(values)), int(np.argmin(values))
    if len(values) > 2:
        return {"value": values[best] - values[worst], "low": None, "high": None}
    drawn = [draws.share_draws(correct, codes == number) for number in (best, worst)]
    return draws.interval(values[best] - values[worst], drawn[0] - drawn[1])


def _test(
    hits: np.ndarray, rows: np.ndarray, rng: np.random.Generator, num_swaps: int
) -> dict[str, Any]:
    if rows.shape[1] < 2:
        return {"p": None, "test": "there is one group only"}
    there = rows > 0
    if there.sum(axis=0).min() < FEWEST_USERS:
        return {"p": None, "test": f"a group has fewer than {FEWEST_USERS} users in the test part"}
    if (there.sum(axis=1) <= 1).all():
        p = _swapped_p(hits, rows, rng, num_swaps)
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
