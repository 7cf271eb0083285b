"""What attackers' guesses come to: accuracy against the majority, AUC, F1, empirical privacy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tightlip.representation.attackers import Parts, Reading
from tightlip.representation.intervals import UserDraws

Figure = dict[str, float | None]
THRESHOLDS = np.linspace(0.02, 0.98, 49)


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


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The test rows on which figures are taken, and their users' draws."""

    rows: np.ndarray  # which rows of the test part
    draws: UserDraws


def judged(
    users: Sequence[str], rows: np.ndarray, *, seed: int = 0, num_draws: int = 1000
) -> Judged:
    """Figures on some rows of the test part; `rows` is a mask."""
    places = np.flatnonzero(rows)
    draws = UserDraws([users[int(place)] for place in places], seed=seed, num_draws=num_draws)
    return Judged(rows=places, draws=draws)


# One attribute


def attribute_figures(target: Target, reading: Reading, on: Judged) -> dict[str, Any]:
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


def by_value(target: Target, guess: np.ndarray, on: Judged) -> dict[str, dict[str, int]]:
    """Of each value: how many test rows have it, how many were said to, and how many rightly."""
    truth = target.codes.test[on.rows]
    known = truth >= 0
    return {
        value: {
            "num": int((truth == code).sum()),
            "said": int(((guess == code) & known).sum()),
            "right": int(((guess == code) & (truth == code)).sum()),
        }
        for code, value in enumerate(target.values)
    }


def majority_figure(target: Target, on: Judged) -> Figure:
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
    present = [code for code in range(scores.shape[1]) if (truth[known] == code).sum() > 0]
    present = [code for code in present if (truth[known] == code).sum() < len(known)]
    if not present:
        return {"value": float("nan"), "low": None, "high": None}
    if scores.shape[1] == 2:
        present = present[-1:]
    every = np.ones((1, len(truth)))
    values = [_auc(truth, scores[:, code], code, known)(every)[0] for code in present]
    drawn = [draws.over_rows(_auc(truth, scores[:, code], code, known)) for code in present]
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


def empirical_privacy(targets: Sequence[Target], readings: Sequence[Reading], on: Judged) -> Figure:
    """1 - X: one minus the mean accuracy over the attributes."""
    guesses = [reading.test[on.rows].argmax(axis=1) for reading in readings]
    return _one_minus_mean(targets, guesses, on)


def majority_privacy(targets: Sequence[Target], on: Judged) -> Figure:
    """1 - X of one who guesses without a vector: no attack should leave less than noise does."""
    guesses = [np.full(len(on.rows), target.majority) for target in targets]
    return _one_minus_mean(targets, guesses, on)


def _one_minus_mean(targets: Sequence[Target], guesses: Sequence[np.ndarray], on: Judged) -> Figure:
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
    counts = np.stack(
        [(truth & guess).sum(axis=1), truth.sum(axis=1) + guess.sum(axis=1)], axis=1
    ).astype(float)
    sums = draws.sums(counts)
    total = counts.sum(axis=0)
    value = float(2 * total[0] / total[1]) if total[1] else 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = np.nan_to_num(2 * sums[:, 0] / sums[:, 1])
    return draws.interval(value, drawn)


def entity_figures(
    targets: Sequence[Target], readings: Sequence[Reading], on: Judged
) -> dict[str, Any]:
    """1 - F as published (present where likelier than not) and with a threshold chosen on dev.

    A rare name is hardly ever likelier than not, and 1 - F is then near 1 however well the
    attacker ranks the texts; one who wants a good F1 moves the threshold.
    """
    dev, test = (
        np.stack([getattr(r, part)[:, 1] for r in readings], axis=1) for part in ("dev", "test")
    )
    truth = Parts(
        **{
            p: np.stack([getattr(t.codes, p) for t in targets], axis=1) == 1
            for p in ("train", "dev", "test")
        }
    )
    threshold = best_threshold(truth.dev, dev)
    here = truth.test[on.rows]
    return {
        "one_minus_f": one_minus(entity_f1(here, test[on.rows] > 0.5, on.draws)),
        "one_minus_f_tuned": one_minus(entity_f1(here, test[on.rows] >= threshold, on.draws)),
        "threshold": threshold,
    }


def majority_f1_privacy(targets: Sequence[Target], on: Judged) -> Figure:
    """1 - F of one who says of each name what holds of most training texts."""
    truth = np.stack([target.codes.test[on.rows] for target in targets], axis=1) == 1
    guess = np.tile([target.majority == 1 for target in targets], (len(on.rows), 1))
    return one_minus(entity_f1(truth, guess, on.draws))


def everywhere_f1_privacy(targets: Sequence[Target], on: Judged) -> Figure:
    """1 - F of one who says that every name is everywhere: the bar for a tuned threshold."""
    truth = np.stack([target.codes.test[on.rows] for target in targets], axis=1) == 1
    return one_minus(entity_f1(truth, np.ones_like(truth), on.draws))


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
    value, low, high = figure["value"], figure["low"], figure["high"]
    assert value is not None
    return {
        "value": 1 - value,
        "low": None if high is None else 1 - high,
        "high": None if low is None else 1 - low,
    }
