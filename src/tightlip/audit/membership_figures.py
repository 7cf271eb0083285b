"""How well scores tell members from non-members, with intervals over users.

A score is a row of `SCORES`: what makes a text look trained on. For each, the area under the ROC
curve and the share of members found at few false accusations.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from tightlip.audit.sides import Side
from tightlip.core.errors import UsageError
from tightlip.core.resampling import interval, times_drawn
from tightlip.scan.document_scores import BesideReferences

# One non-member in so many may be accused.
RATES = {"tpr_at_1_percent_fpr": 100, "tpr_at_0_1_percent_fpr": 1000}
# With one accused, the bar is the highest non-member but one, and only 87 of 100 intervals held the
# truth; with two, 95 did.
LEAST_ACCUSED = 2


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score of every unit of a side, high for "trained on"; None where it cannot be had."""

    title: str
    values: Callable[[Side], np.ndarray | None]


def beside(score: Callable[[Side, BesideReferences], np.ndarray | None]) -> Any:
    """A score that takes a reference."""
    return lambda side: None if side.reference is None else score(side, side.reference)


def _above_references(side: Side, reference: BesideReferences) -> np.ndarray | None:
    """RMIA (Zarifzadeh et al. 2024) of a text's probability per token, over the references' mean.

    Their share of other texts whose ratio is lower ranks as the ratio itself, which is taken; with
    one reference that is the score above.
    """
    if reference.loss_nats.shape[1] < 2:
        return None
    per_token = -reference.loss_nats / side.model.num_tokens[:, None]
    mean = np.logaddexp.reduce(per_token, axis=1) - np.log(per_token.shape[1])
    return -side.model.loss_nats / side.model.num_tokens - mean


def _below_references(side: Side, reference: BesideReferences) -> np.ndarray:
    gained = reference.loss_nats.mean(axis=1) - side.model.loss_nats
    return np.asarray(gained / side.model.num_tokens)


def _least_likely(side: Side) -> np.ndarray | None:
    lowest = side.model.lowest_deviations
    return None if lowest is None else lowest / side.model.num_lowest


# In the order in which they are shown. Another score is another line here, and nothing else.
SCORES = {
    # One nat on either side: without it a text with no loss at all, or nothing gained, has no ratio.
    "ez": Score(
        title="EZ",
        values=beside(lambda _, r: (r.gained_nats + 1) / (r.gained_nats + r.lost_nats + 2)),
    ),
    "wbc": Score(title="WBC", values=beside(lambda _, r: np.mean(r.votes / r.num_windows, axis=1))),
    "reference": Score(title="reference", values=beside(_below_references)),
    "rmia": Score(title="RMIA", values=beside(_above_references)),
    "min_k": Score(
        title="min-k%", values=lambda side: -side.model.lowest_nats / side.model.num_lowest
    ),
    "min_k_plus": Score(title="min-k%++", values=_least_likely),
    "loss": Score(title="loss", values=lambda side: -side.model.loss_nats / side.model.num_tokens),
    "zlib": Score(title="zlib", values=lambda side: -side.model.loss_nats / side.num_bytes),
}


def leading_score(*, has_reference: bool) -> str:
    """The score that stands for all, named before anything is measured: of several the highest
    would be too high by chance."""
    return "ez" if has_reference else "min_k"


class Ranking:
    """Members and non-members in order of one score.

    Sorted once; what a resample changes is only how much each counts.
    """

    def __init__(self, members: np.ndarray, others: np.ndarray) -> None:
        self._members = np.argsort(-members, kind="stable")
        self._others = np.argsort(-others, kind="stable")
        ascending, line = members[self._members][::-1], others[self._others]
        self._num_above = len(members) - np.searchsorted(ascending, line, side="right")
        self.num_above_all = int(self._num_above[0])
        self._num_not_below = len(members) - np.searchsorted(ascending, line, side="left")

    def weighed(self, members: np.ndarray, others: np.ndarray) -> "Weighed":
        """The same order where each member and each non-member counts so often."""
        return Weighed(
            highest=np.concatenate([[0], np.cumsum(members[self._members])]),
            others=others[self._others],
            num_above=self._num_above,
            num_not_below=self._num_not_below,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighed:
    """Non-members from the highest score down, and how many members are above each.

    `highest` is the weight of the n highest members, n from 0 on.
    """

    highest: np.ndarray
    others: np.ndarray
    num_above: np.ndarray
    num_not_below: np.ndarray

    def auc(self) -> float:
        """How often a member is above a non-member, a tie counted half.

        Holds:
            pairwise: the same as comparing every pair.
        """
        twice_won = self.others @ (self.highest[self.num_above] + self.highest[self.num_not_below])
        return float(twice_won / (2 * self.highest[-1] * self.others.sum()))

    def true_positive_rate(self, one_in: int) -> float:
        """The share of members above the lowest bar that at most one non-member in `one_in` passes.

        Holds:
            at_most: no more than 1/`one_in` of the non-members are above the bar, ties included.
        """
        accused = np.cumsum(self.others)
        # In whole numbers: 0.01 · 2,900 is a hair below 29. The bar is a non-member's own score.
        bar = int(np.searchsorted(accused * one_in, accused[-1], side="right"))
        return float(self.highest[self.num_above[bar]] / self.highest[-1])


def measure_level(
    members: Side, others: Side, rng: np.random.Generator, num_bootstraps: int
) -> dict[str, Any]:
    """How well each score tells `members` from `others`, with 95% intervals over users.

    Users are drawn again with all that is theirs, on both sides: a user's member and non-member
    stay together. All are drawn from one pool, for one user drawn alone would never vary; a draw in
    which a side is empty is drawn again. How far the interval goes into the tails follows from the
    side with fewer users.

    Holds:
        fair: of scores that know nothing, about 95 in 100 intervals hold 0.5, however alike a
            user's documents are.
    """
    users, units = np.unique(np.concatenate([members.users, others.users]), return_inverse=True)
    member_units, other_units = units[: len(members)], units[len(members) :]
    rankings, everybody = _rankings(members, others), [np.arange(len(users))]
    counted = [name for name, one_in in RATES.items() if len(others) >= LEAST_ACCUSED * one_in]
    ones = np.ones(len(members), np.int64), np.ones(len(others), np.int64)
    drawn: list[dict[tuple[str, str], float]] = []
    while len(drawn) < num_bootstraps:
        times = times_drawn(rng, everybody, len(users))
        sides = times[member_units], times[other_units]
        if all(side.any() for side in sides):
            drawn.append(_figures(rankings, counted, *sides))
    num_users = min(len(np.unique(member_units)), len(np.unique(other_units)))
    scores = _with_intervals(_figures(rankings, counted, *ones), drawn, num_users)
    for name, ranking in rankings.items():
        scores[name]["num_above_all_nonmembers"] = ranking.num_above_all
    return {
        "num_members": len(members),
        "num_nonmembers": len(others),
        "scores": {name: scores.get(name) for name in SCORES},
    }


def _rankings(members: Side, others: Side) -> dict[str, Ranking]:
    rankings = {}
    for name, score in SCORES.items():
        ours, theirs = score.values(members), score.values(others)
        if ours is not None and theirs is not None:
            rankings[name] = Ranking(ours, theirs)
    return rankings


def _groups(member_units: np.ndarray, other_units: np.ndarray, size: int) -> list[np.ndarray]:
    """Users with members only, with others only, with both; those there are."""
    has_members, has_others = np.zeros(size, bool), np.zeros(size, bool)
    has_members[member_units], has_others[other_units] = True, True
    kinds = (has_members & ~has_others, ~has_members & has_others, has_members & has_others)
    return [np.flatnonzero(kind) for kind in kinds if kind.any()]


def _figures(
    rankings: dict[str, Ranking], counted: list[str], members: np.ndarray, others: np.ndarray
) -> dict[tuple[str, str], float]:
    """Every figure of every score, for members and others that count so much."""
    figures = {}
    for name, ranking in rankings.items():
        weighed = ranking.weighed(members, others)
        figures[name, "auc"] = weighed.auc()
        for rate in counted:
            figures[name, rate] = weighed.true_positive_rate(RATES[rate])
    return figures


def _with_intervals(
    values: dict[tuple[str, str], float], drawn: list[dict[tuple[str, str], float]], num_users: int
) -> dict[str, dict[str, Any]]:
    scores: dict[str, dict[str, Any]] = {}
    for (name, figure), value in values.items():
        unknown = {"title": SCORES[name].title, "auc": None} | dict.fromkeys(RATES)
        entry = scores.setdefault(name, unknown)
        entry[figure] = interval(value, [one[name, figure] for one in drawn], num_users=num_users)
    return scores


def best_score(members: Side, others: Side) -> str:
    """The score with the highest AUC."""
    ones = np.ones(len(members), np.int64), np.ones(len(others), np.int64)
    areas = {n: each.weighed(*ones).auc() for n, each in _rankings(members, others).items()}
    return max(areas, key=lambda name: areas[name])


def halves(
    members: Side, others: Side, rng: np.random.Generator
) -> tuple[tuple[Side, Side], tuple[Side, Side]]:
    """Members and others of one half of the users, and of the other half; users who stand on one
    side or on both are halved by themselves."""
    users, units = np.unique(np.concatenate([members.users, others.users]), return_inverse=True)
    first = np.zeros(len(users), bool)
    for group in _groups(units[: len(members)], units[len(members) :], len(users)):
        first[rng.permutation(group)[: len(group) // 2]] = True
    of_members, of_others = first[units[: len(members)]], first[units[len(members) :]]
    one = members.chosen(of_members), others.chosen(of_others)
    other = members.chosen(~of_members), others.chosen(~of_others)
    fewest = min(len(np.unique(side.users)) for side in (*one, *other))
    if fewest < 2:
        raise UsageError(
            f"To choose a score on half of the users it takes two or more in each half with text on each side; there would be "
            f"{fewest}. Leave out --choose: the leading score is then the one named beforehand."
        )
    return one, other


def by_length(
    members: Side, others: Side, rng: np.random.Generator, num_bootstraps: int
) -> list[dict[str, Any]]:
    """The same within quartiles of the number of counted tokens, so that sides of other lengths are
    not told by their length; quartiles in which a side has nothing are left out."""
    lengths = [side.model.num_tokens for side in (members, others)]
    edges = np.quantile(np.concatenate(lengths), [0.25, 0.5, 0.75])
    numbers = [np.searchsorted(edges, one) for one in lengths]
    found = []
    for quartile in range(len(edges) + 1):
        inside = [number == quartile for number in numbers]
        if all(one.any() for one in inside):
            chosen = [side.chosen(one) for side, one in zip((members, others), inside, strict=True)]
            within = np.concatenate([one.model.num_tokens for one in chosen])
            ends = {"shortest": int(within.min()), "longest": int(within.max())}
            found.append(ends | measure_level(chosen[0], chosen[1], rng, num_bootstraps))
    return found


def missing_rates(level: dict[str, Any], what: str) -> Iterable[str]:
    """A sentence for each rate that too few non-members leave unknown."""
    for one_in in RATES.values():
        if level["num_nonmembers"] < LEAST_ACCUSED * one_in:
            yield (
                f"The share of {what} found at {100 / one_in:g}% false accusations takes at least {LEAST_ACCUSED * one_in:,} "
                f"held-out {what}; there are {level['num_nonmembers']:,}."
            )


def about_references(
    members: Side, others: Side, names: Iterable[str], rng: np.random.Generator, num_bootstraps: int
) -> Iterable[str]:
    """A sentence for each reference whose loss alone tells `members` from `others`: it should not."""
    for number, name in enumerate(names):
        losses = [side.reference.loss_nats[:, number] for side in (members, others)]  # type: ignore[union-attr]
        area = _area_by(losses, members, others, rng, num_bootstraps)
        if area["low"] is None or area["low"] <= 0.5 <= area["high"]:
            continue
        known = "members" if area["low"] > 0.5 else "non-members"
        effect = "hides them" if area["low"] > 0.5 else "makes a model look guilty"
        yield (
            f"The reference {name} finds the {known} easier by itself (AUC of its loss {area['value']:.3f}, {area['low']:.3f} to "
            f"{area['high']:.3f}). It may have learnt them, which {effect}; or the two sides differ in kind."
        )


def about_amounts(
    members: Side, others: Side, rng: np.random.Generator, num_bootstraps: int
) -> Iterable[str]:
    """A sentence where the users of one side have more text: by users nothing else allows for it."""
    amounts = [-(side.model.num_tokens**2) for side in (members, others)]
    area = _area_by(amounts, members, others, rng, num_bootstraps)
    if members.reference is None or area["low"] is None or area["low"] <= 0.5 <= area["high"]:
        return
    yield (
        f"Users that were trained on have {'more' if area['value'] > 0.5 else 'less'} text here than the others (AUC of their number of "
        f"tokens {area['value']:.3f}, {area['low']:.3f} to {area['high']:.3f}). The more text, the further EZ and WBC lie from the middle, "
        "so they tell such users apart, or hide them, whatever the model learnt. Give both sides alike, or go by the reference score."
    )


def _area_by(
    losses: list[np.ndarray], members: Side, others: Side, rng: np.random.Generator, num_draws: int
) -> dict[str, Any]:
    """The AUC of other losses per token than the model's, with its interval."""
    one, other = (
        replace(side, reference=None, model=replace(side.model, loss_nats=own))
        for side, own in zip((members, others), losses, strict=True)
    )
    return dict(measure_level(one, other, rng, num_draws)["scores"]["loss"]["auc"])


def unlike_the_leading(level: dict[str, Any], leading: str, what: str) -> Iterable[str]:
    """Sentences where the leading score is below chance, or not above it and another one is."""
    title, area = (level["scores"][leading][name] for name in ("title", "auc"))
    if area["low"] is None or area["low"] > 0.5:
        return
    why = "the two sides may differ in more than in having been trained on."
    if level["scores"]["reference"] is not None:
        why = f"the reference may itself know the members, which hides them from {title}, or {why}"
    areas = {each["title"]: each["auc"] for each in level["scores"].values() if each is not None}
    # Of several scores one strays by chance more often than one alone: their ends go further out.
    further = NormalDist().inv_cdf(0.025 / len(areas)) / NormalDist().inv_cdf(0.025)
    lows = {
        name: own["value"] - further * (own["value"] - own["low"]) for name, own in areas.items()
    }
    best = max(lows, key=lows.__getitem__)
    if lows[best] > 0.5:
        yield f"The {best} score tells {what} where {title} does not. Do not call them safe: {why}"
    if area["high"] < 0.5:
        yield f"The {title} score of {what} is below chance: {why}"
