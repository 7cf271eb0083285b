"""Can one tell what a model was trained on? By document, and by user.

A score is a row of `SCORES`: what makes a text look trained on. For each, the area under the ROC
curve and the share of members found at few false accusations, with intervals over users.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit.measures import Audited, written_to
from tightlip.audit.settings import ResamplingSettings
from tightlip.audit.sides import Side, Sides
from tightlip.audit.subjects import (
    Subject,
    made_from,
    measuring,
    nothing_held_out,
    subject_of,
)
from tightlip.core.errors import UsageError
from tightlip.core.gates import Entries, Known
from tightlip.core.resampling import FEW_USERS, interval, times_drawn
from tightlip.core.run_folder import RunRecord
from tightlip.core.settings import split_settings, takes
from tightlip.corpus.prepare_config import TextSettings
from tightlip.scan.models import Scans
from tightlip.scan.options import ModelSettings

# One non-member in so many may be accused.
RATES = {"tpr_at_1_percent_fpr": 100, "tpr_at_0_1_percent_fpr": 1000}
# With one accused, the bar is the highest non-member but one, and only 87 of 100 intervals held the
# truth; with two, 95 did.
LEAST_ACCUSED = 2
NOT_PRIVATE = "The run's ε does not cover these figures: they are computed from the text itself. Keep them as private as the text."

NO_STRANGERS = (
    "Everybody with held-out text was trained on too, so nothing is said about users. "
    "Hold out whole users for that: a run with --split user."
)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score of every unit of a side, high for "trained on"; None where it cannot be had."""

    title: str
    values: Callable[[Side], np.ndarray | None]


def _below_reference(side: Side) -> np.ndarray | None:
    if side.reference is None:
        return None
    return np.asarray((side.reference.loss_nats - side.model.loss_nats) / side.model.num_tokens)


# In the order in which they are shown. Another score is another line here, and nothing else.
SCORES = {
    "loss": Score(title="loss", values=lambda side: -side.model.loss_nats / side.model.num_tokens),
    "reference": Score(title="reference", values=_below_reference),
    "min_k": Score(
        title="min-k%", values=lambda side: -side.model.lowest_nats / side.model.num_lowest
    ),
    "zlib": Score(title="zlib", values=lambda side: -side.model.loss_nats / side.num_bytes),
}


# What a gate may ask for of documents; of users the same behind "user_".
_GATED = ("auc", "auc_low", *RATES)
FIGURES: Known = {
    **dict.fromkeys(("num_members", "num_nonmembers")),
    **{f"{of}{name}": Entries(names=SCORES) for of in ("", "user_") for name in _GATED},
}


def gated(record: dict[str, Any]) -> dict[str, Any]:
    """The figures of a record as gates name them."""
    levels = {"": record["documents"], "user_": record["users"]}
    figures = {
        f"{of}{name}": None if level is None else _by_score(level, name)
        for of, level in levels.items()
        for name in _GATED
    }
    return figures | {name: record["documents"][name] for name in ("num_members", "num_nonmembers")}


def _by_score(level: dict[str, Any], name: str) -> dict[str, float | None]:
    figure, end = ("auc", "low") if name == "auc_low" else (name, "value")
    known = {score: found for score, found in level["scores"].items() if found is not None}
    return {score: found[figure] and found[figure][end] for score, found in known.items()}


class Ranking:
    """Members and non-members in order of one score.

    Sorted once; what a resample changes is only how much each counts.
    """

    def __init__(self, members: np.ndarray, others: np.ndarray) -> None:
        self._members = np.argsort(-members, kind="stable")
        self._others = np.argsort(-others, kind="stable")
        ascending, line = members[self._members][::-1], others[self._others]
        self._num_above = len(members) - np.searchsorted(ascending, line, side="right")
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
    stay together. Those who stand on one side only are drawn by themselves, so that neither side
    runs empty. How far the interval goes into the tails follows from the side with fewer users.

    Holds:
        fair: of scores that know nothing, about 95 in 100 intervals hold 0.5, however alike a
            user's documents are.
    """
    users, units = np.unique(np.concatenate([members.users, others.users]), return_inverse=True)
    member_units, other_units = units[: len(members)], units[len(members) :]
    groups = _groups(member_units, other_units, len(users))
    rankings = _rankings(members, others)
    counted = [name for name, one_in in RATES.items() if len(others) >= LEAST_ACCUSED * one_in]
    ones = np.ones(len(members), np.int64), np.ones(len(others), np.int64)
    drawn = []
    for _ in range(num_bootstraps):
        times = times_drawn(rng, groups, len(users))
        drawn.append(_figures(rankings, counted, times[member_units], times[other_units]))
    num_users = min(len(np.unique(member_units)), len(np.unique(other_units)))
    scores = _with_intervals(_figures(rankings, counted, *ones), drawn, num_users)
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
        entry = scores.setdefault(
            name, {"title": SCORES[name].title, "auc": None} | dict.fromkeys(RATES)
        )
        again = [one[name, figure] for one in drawn]
        entry[figure] = interval(value, again, num_users=num_users)
    return scores


def missing_rates(level: dict[str, Any], what: str) -> Iterable[str]:
    """A sentence for each rate that too few non-members leave unknown."""
    for one_in in RATES.values():
        if level["num_nonmembers"] < LEAST_ACCUSED * one_in:
            yield (
                f"The share of {what} found at {100 / one_in:g}% false accusations takes at least {LEAST_ACCUSED * one_in:,} "
                f"held-out {what}; there are {level['num_nonmembers']:,}."
            )


@takes(ResamplingSettings, ModelSettings, TextSettings)
def measure_membership(
    model: Any,
    *,
    members: Any = None,
    non_members: Any = None,
    reference: Any = None,
    tokenizer: Any = None,
    without_texts: Collection[str] = frozenset(),
    out: str | Path | None = None,
    device: str = "auto",
    keep_scan: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """How well one can tell what a model was trained on, by document and by user.

    `model` is a folder, or a model in memory with `tokenizer`, or a pair of both; `members` is text
    that it was trained on and `non_members` is text that it was not, which a run knows itself.
    `reference` is a model or a run that never saw the members, 'base' for what an adapter was
    trained on, or a pair in memory. Documents that read as one of `without_texts`, planted canaries
    say, are on neither side. With `out`, a folder, the result is written to membership.json there,
    for its owner only. Scans are kept, in the run's `scan/` or in that of `out`, unless `keep_scan`
    is False or a model is in memory.
    """
    config, how, columns = split_settings(settings, ResamplingSettings, ModelSettings, TextSettings)
    subject = subject_of(model, members, non_members, tokenizer=tokenizer, **columns.tree())
    _check_sides(subject)
    keep = keep_scan and (reference is None or isinstance(reference, str | Path))
    with measuring(subject, out, device=device, keep=keep, **how.tree()) as (scans, work):
        result = membership_of(
            subject, scans, work, reference=reference, without_texts=without_texts, config=config
        )
    return written_to(None if out is None else Path(out) / "membership.json", result)


def membership_of(
    subject: Subject,
    scans: Scans,
    work: Path,
    *,
    reference: Any,
    without_texts: Collection[str],
    config: ResamplingSettings,
) -> dict[str, Any]:
    """The figures of a subject with both texts; its tokens are made in `work` where none stand."""
    _refuse_users_left_out(subject.run)
    notes: list[str] = []
    sides = Sides(subject=subject, scans=scans, work=work, notes=notes)
    sides.leave_out(without_texts)
    sides.choose_tokens()
    sides.score(reference)
    members, others = sides.chosen()
    rng = np.random.default_rng(config.seed)
    documents = measure_level(members, others, rng, config.num_bootstraps)
    notes += [*missing_rates(documents, "documents"), *_about_users(members, others)]
    notes += _about_certainty(documents)
    # Of people, a non-member is somebody of whom nothing was trained on.
    strangers = others.chosen(others.users >= sides.train.num_users)
    users = None
    if len(strangers):
        users = measure_level(members.by_user(), strangers.by_user(), rng, config.num_bootstraps)
    notes += [NO_STRANGERS] if users is None else missing_rates(users, "users")
    notes += _about_the_text(subject)
    return {
        "documents": documents,
        "users": users,
        "not_counted": sides.not_counted,
        "made_from": made_from(subject, scans, members=sides.train, held_out=sides.held)
        | {"reference": None if reference is None else str(getattr(reference, "name", reference))},
        "notes": notes,
    }


class MembershipAudit:
    """Membership inference by every score, for documents and for users."""

    finds_secrets = True

    def depends_on(self, audited: Audited) -> dict[str, Any]:
        reference = audited.measuring.reference_fingerprint
        return {"scores": [*SCORES], "reference": reference, **audited.sampling}

    def figures(self, audited: Audited) -> dict[str, Any]:
        _check_sides(audited.subject)
        return membership_of(
            audited.subject,
            audited.scans,
            audited.tokens,
            reference=audited.measuring.reference,
            without_texts=audited.measuring.planted_texts,
            config=audited.measuring.resampling,
        )

    def accuses(self, figures: dict[str, Any]) -> bool:
        areas = [score["auc"] for score in figures["documents"]["scores"].values() if score]
        return any(area["low"] is not None and area["low"] > 0.5 for area in areas)


def _check_sides(subject: Subject) -> None:
    if subject.members is not None and subject.held_out is not None:
        return
    if subject.run is not None:
        raise UsageError(nothing_held_out(subject.name))
    raise UsageError(
        f"{subject.name} does not tell what it was trained on and what not, as a run of tightlip does. Give both: "
        "--members FILE --non-members FILE"
    )


def _refuse_users_left_out(record: RunRecord | None) -> None:
    if record is not None and (number := record.config["corpus"].get("num_users_left_out")):
        raise UsageError(
            f"{record.folder} was trained without {number:,} users of its corpus and does not say which, so nobody "
            "knows who the members are. Measure the run it was retrained from."
        )


def _about_users(members: Side, others: Side) -> list[str]:
    fewest = min(len(np.unique(side.users)) for side in (members, others))
    if fewest >= FEW_USERS:
        return []
    if fewest == 1:
        return ["One user wrote all of one side, so there are no intervals: they need two or more."]
    return [f"Only {fewest} users wrote the documents of one side: take the intervals as rough."]


def _about_certainty(level: dict[str, Any]) -> list[str]:
    areas = [score["auc"] for score in level["scores"].values() if score is not None]
    if not any(area["low"] == area["high"] == 1 for area in areas):
        return []
    return [
        "An interval from 1 to 1 says that these documents show no exception, not that there is none: resampling "
        "cannot draw what was never seen."
    ]


def _about_the_text(subject: Subject) -> list[str]:
    lines, prepared, run = [], subject.prepared, subject.run
    if prepared is None or run is None or prepared.settings.get("validation"):
        lines.append(
            "The held-out text came as a file of its own. Where it differs from the training text in kind, in time or "
            "in who wrote it, that difference counts as membership here; a reference model takes most of it out."
        )
    if run is not None and run.guarantee.get("epsilon") is not None:
        lines.append(NOT_PRIVATE)
    return lines
