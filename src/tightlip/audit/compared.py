"""Runs side by side: what each is good for, what it gives away, and which may be compared.

A row holds counts and means only: no text, and nobody's name.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tightlip.audit.canaries.tab_attack import tab_ceiling
from tightlip.audit.settings import Matching
from tightlip.core.figures import STANDINGS_WITH_EPSILON, arithmetic_words, guarantee_words, number
from tightlip.core.gates import Known
from tightlip.core.resampling import LEAST_CANARIES, ONE_TAIL

Row = dict[str, Any]
NOT_KNOWN = "not known"  # how a model from elsewhere was trained


# What a gate may ask for of each row.
_NUMBERS = ("leaks", "people_affected", "unique", "users_with_unique", "leakage_epsilon")
_COSTS = ("seconds_per_epoch", "times_baseline")
FIGURES: Known = dict.fromkeys(
    (*_NUMBERS, "perplexity", "gap", "auc", "user_auc", "epsilon", *_COSTS)
)


def gated(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The figures of each row, by its name, as gates name them; areas are those of the best score."""
    return {
        row["name"]: {
            **{name: row.get(name) for name in (*_NUMBERS, *_COSTS)},
            "perplexity": row["perplexity"] and row["perplexity"]["value"],
            "gap": row["gap"] and row["gap"]["perplexity"]["value"],
            "auc": _highest_area(row, "documents"),
            "user_auc": _highest_area(row, "users"),
            "epsilon": row["guarantee"]["epsilon"],  # null where there is none, which fails
        }
        for row in rows
    }


def _highest_area(row: Row, level: str) -> float | None:
    scores = ((row["membership"] or {}).get(level) or {"scores": {}})["scores"]
    return max((score["auc"]["value"] for score in scores.values() if score), default=None)


@dataclass(frozen=True, kw_only=True)
class RunMeasures:
    """What was measured of one run's model; the reason for what is None stands in `not_known`."""

    name: str
    mitigation: str
    is_mitigated: bool
    is_private: bool
    model: str | None  # "final", a snapshot's name, or None where no snapshot would do
    train_text: str | None  # fingerprints, as the next two; a redacted report has none
    held_out_text: str | None
    tokenizer: str
    guarantee: dict[str, Any] | None
    best_perplexity: float | None = None  # the lowest there is, where no snapshot would do
    seconds_per_epoch: float | None = None
    leakage: dict[str, Any] | None = None
    exposures: list[dict[str, Any]] | None = None
    exposed_above_bits: float | None = None
    canary_note: str | None = None  # where the canaries are not those that it was trained on
    groups: dict[str, Any] | None = None
    membership: dict[str, Any] | None = None
    not_known: dict[str, str] = field(default_factory=dict)

    @property
    def perplexity(self) -> dict[str, Any] | None:
        """On held-out text, with its interval where that was measured."""
        if self.groups is not None and self.groups.get("perplexity") is not None:
            return self.groups["perplexity"]
        value = (self.leakage or {}).get("validation_perplexity")
        return None if value is None else {"value": value, "low": None, "high": None}

    @property
    def planted(self) -> list[dict[str, Any]]:
        """The planted canaries whose exposure is known."""
        return [one for one in self._of_kind("planted") if one.get("exposure_bits") is not None]

    def tab(self, kind: str) -> dict[str, int] | None:
        """How many canaries of a kind TAB completes, and how many it could at most."""
        if not (chosen := self._of_kind(kind)):
            return None
        return {
            "successes": sum(bool(one["tab"]) for one in chosen),
            "num_canaries": len(chosen),
            "ceiling": tab_ceiling(chosen),
        }

    def _of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.exposures or () if one.get("kind", "planted") == kind]


def baseline_place(are_mitigated: Sequence[bool]) -> int:
    """Which run the others are held against: the first without a mitigation, else the first.

    >>> baseline_place([True, False, False]), baseline_place([True, True])
    (1, 0)
    """
    return list(are_mitigated).index(False) if False in are_mitigated else 0


def compared(runs: Sequence[RunMeasures], matching: Matching) -> list[Row]:
    """One row for each run, in the order given.

    Holds:
        unknown_is_none: what was not measured is None, never 0, and its reason is in `not_known`.
        standing: ε is there only where the standing is proved or as published.
        silent: no text of a canary and no user's name is in a row.
    """
    base = runs[baseline_place([run.is_mitigated for run in runs])]
    return [_row(run, base, runs, matching) for run in runs]


def _row(
    run: RunMeasures, base: RunMeasures, runs: Sequence[RunMeasures], matching: Matching
) -> Row:
    comparable, verdicts = judged(run, base, matching)
    verdicts += [] if run.canary_note is None else [run.canary_note]
    return {
        "name": run.name,
        "mitigation": run.mitigation,
        "model": run.model,
        "is_baseline": run is base,
        "comparable": comparable,
        "verdicts": verdicts,
        # Whether the two perplexities are on one scale.
        "same_held_out": (run.held_out_text, run.tokenizer) == (base.held_out_text, base.tokenizer),
        "perplexity": run.perplexity,
        **_leakage(run),
        "exposure": exposure_by_repetition(run),
        "exposed_above_bits": run.exposed_above_bits if run.planted else None,
        # How much more or less the canaries are exposed than in each other run.
        "exposure_changes": {
            one.name: change_of(run.planted, one.planted) for one in runs if one is not run
        },
        "tab": {kind: run.tab(kind) for kind in ("planted", "real")},
        "gap": (run.groups or {}).get("gap"),
        "membership": _membership(run),
        "seconds_per_epoch": run.seconds_per_epoch,
        "times_baseline": _ratio(run.seconds_per_epoch, base.seconds_per_epoch),
        "guarantee": _guarantee(run),
        "not_known": dict(run.not_known),
    }


def _leakage(run: RunMeasures) -> Row:
    """By text, then as published, by tokens; a report of 0.1 has the latter only."""
    by_text, by_tokens = ("leaks", "people_affected"), ("unique", "users_with_unique")
    names = (*by_text, *by_tokens, "num_users", "leakage_epsilon")
    return {name: (run.leakage or {}).get(name) for name in names}


def exposure_by_repetition(run: RunMeasures) -> list[Row]:
    """Mean exposure of the planted canaries by how often each was planted, rarest first; how many are
    exposed is None where not even canaries known by heart would be."""
    from tightlip.audit.canaries.exposure import can_be_shown  # with torch

    groups = defaultdict(list)
    above = math.inf if run.exposed_above_bits is None else run.exposed_above_bits
    for one in run.planted:
        groups[one["repetitions"]].append(one)
    return [
        {
            "repetitions": times,
            "num_canaries": len(group),
            "mean_bits": statistics.fmean(one["exposure_bits"] for one in group),
            "num_exposed": sum(one["low"] > above for one in group)
            if any(can_be_shown(one, above) for one in group)
            else None,
        }
        for times, group in sorted(groups.items())
    ]


def _membership(run: RunMeasures) -> Row | None:
    if run.membership is None:
        return None
    return {name: run.membership.get(name) for name in ("documents", "users", "not_counted")}


def _ratio(value: float | None, to: float | None) -> float | None:
    return value / to if value is not None and to else None


def _guarantee(run: RunMeasures) -> Row:
    words, record = guarantee_words(run.guarantee), run.guarantee or {}
    has_epsilon = record.get("standing") in STANDINGS_WITH_EPSILON
    standing = str(record.get("standing") or "measured only")
    return {
        "standing": standing,
        "epsilon": record.get("epsilon") if has_epsilon else None,
        "delta": record.get("delta") if has_epsilon else None,
        "unit": record.get("unit") if has_epsilon else None,
        "words": words.value if has_epsilon else f"none ({standing})",
        "sentence": words.sentence,
        "insecure": words.insecure,
        "because": None if standing == "proved" else record.get("because"),
        "arithmetic": arithmetic_words(record) if has_epsilon else None,
        "people": record.get("people") if has_epsilon else None,
    }


def judged(
    run: RunMeasures, base: RunMeasures, matching: Matching
) -> tuple[bool | None, list[str]]:
    """Whether a run is as useful as the baseline and learnt from the same text, and why not.

    None where that cannot be said for want of a perplexity.

    Holds:
        said: whatever makes it not comparable is a sentence.
    """
    if run.model is None:
        return False, [_never_reached(run, matching)]
    if run is base:
        return (True if run.perplexity else None), _without_utility(run)
    if run.train_text is None or base.train_text is None:
        return None, [
            "A redacted report does not tell on which text it was made, so nothing can be matched with it."
        ]
    comparable, sentences = _utility(run, base, matching)
    if run.train_text != base.train_text:
        comparable = False
        sentences.append(
            f"Trained on other text or other canaries than {base.name}, so what it gives away is not the same text."
        )
    return comparable, sentences


def _utility(
    run: RunMeasures, base: RunMeasures, matching: Matching
) -> tuple[bool | None, list[str]]:
    if run.held_out_text is not None and base.held_out_text is not None:
        for differs, what in (
            (run.tokenizer != base.tokenizer, "It cuts text into other tokens than"),
            (run.held_out_text != base.held_out_text, "Its held-out text is not that of"),
        ):
            if differs:
                return False, [
                    f"{what} {base.name}, so their perplexities say nothing about each other; only leakage can be compared."
                ]
    elif run.perplexity is not None and base.perplexity is not None:
        return None, [
            "A report of an earlier version does not tell on which held-out text it was made, so utility cannot be matched."
        ]
    if run.perplexity is None or base.perplexity is None:
        return None, _without_utility(run) or [
            f"The perplexity of {base.name} is not known, so utility cannot be matched; only leakage can be compared."
        ]
    mine, theirs = run.perplexity["value"], base.perplexity["value"]
    against = f"{number(mine)} against {number(theirs)}"
    if abs(mine - theirs) <= matching.tolerance * theirs:
        return True, [f"Comparable at matched utility: perplexity {against}."]
    advice = "Snapshots are too far apart: train with --snapshot-steps N for more of them."
    if matching.at_perplexity is None:
        advice = _advice(run, base, mine, theirs)
    return False, [f"Not comparable at matched utility: {against}. {advice}"]


def _without_utility(run: RunMeasures) -> list[str]:
    if run.perplexity is not None:
        return []
    return [f"Its utility is not known. {run.not_known.get('perplexity', '')}".strip()]


def _advice(run: RunMeasures, base: RunMeasures, mine: float, theirs: float) -> str:
    """What to do about perplexities too far apart: the better run has to stop earlier."""
    better, reach = (run, theirs) if mine < theirs else (base, mine)
    if better.mitigation == NOT_KNOWN:
        return f"{better.name} was not trained by tightlip, so no snapshot of it can be matched."
    # Rounded up, or the worse of the two would just miss it.
    digits = 2 - math.floor(math.log10(reach))
    target = f"{math.ceil(reach * 10**digits) / 10**digits:g}"
    advice = f"Compare with --at-perplexity {target}"
    if better.is_private:  # such a run may not stop by looking at private text
        return f"{advice}."
    return f"{advice}, or train {better.name} with --until-perplexity {target}."


def _never_reached(run: RunMeasures, matching: Matching) -> str:
    target = matching.at_perplexity
    best = run.best_perplexity
    if run.perplexity is None and best is None:
        return _without_utility(run)[0]
    reached = "" if best is None else f"; its lowest is {number(best)}"
    aim = "the perplexity asked for" if target is None else f"a validation perplexity of {target:g}"
    return f"No snapshot reached {aim}{reached}, so there is nothing to compare."


def change_of(mine: Sequence[Row], theirs: Sequence[Row]) -> Row | None:
    """By how many bits the most repeated canaries are more exposed than the same ones elsewhere.

    The interval is Student's, 95%, and there is none for a single canary. `p_value` is how often
    chance alone would have them so much less exposed; None where the canaries cannot tell, being
    fewer than three or all changed by the same.
    """
    if not mine or not theirs:
        return None
    most = max(one["repetitions"] for one in mine)
    before = {one["text"]: one["exposure_bits"] for one in theirs}
    same = [one for one in mine if one["repetitions"] == most and one["text"] in before]
    changes = [one["exposure_bits"] - before[one["text"]] for one in same]
    return _mean_with_interval(changes) | {"repetitions": most} if changes else None


def _mean_with_interval(values: list[float]) -> Row:
    num = len(values)
    mean = statistics.fmean(values)
    change: Row = {"value": mean, "low": None, "high": None, "num_canaries": num, "p_value": None}
    if num < 2:
        return change
    from scipy.special import stdtr, stdtrit

    spread = statistics.stdev(values)
    error = spread / math.sqrt(num)
    reach = float(stdtrit(num - 1, 1 - ONE_TAIL)) * error
    change |= {"low": mean - reach, "high": mean + reach}
    # The same change in every canary says that something repeats, not how surely.
    if num >= LEAST_CANARIES and spread > 1e-9 * max(1.0, abs(mean)):
        change["p_value"] = float(stdtr(num - 1, mean / error))
    return change
