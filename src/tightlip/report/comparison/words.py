"""A comparison in words: its one sentence, who clearly gives away less, and why a figure is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightlip.core.figures import counted, number
from tightlip.core.resampling import LEAST_CANARIES, ONE_TAIL
from tightlip.report.comparison.table import RunFigures, not_counted
from tightlip.report.kit.table import joined

Change = dict[str, Any]
ONE_TRAINING = "Each run is one training, and the canaries of one training move together: another seed may turn this round."


@dataclass(frozen=True)
class Leak:
    """The one figure by which runs are ranked, and how it is said."""

    value: float
    words: str


def leak_of(row: RunFigures, *, by_exposure: bool) -> Leak | None:
    """Exposure of the most repeated canaries, or the number of leaks."""
    if by_exposure and row["exposure"]:
        bits = row["exposure"][-1]["mean_bits"]
        return Leak(bits, f"{number(bits)} bits")
    if by_exposure or row["leaks"] is None:
        return None
    people = counted(row["people_affected"] or 0, "person", "people")
    return Leak(row["leaks"], f"{counted(row['leaks'], 'leak')} of {people}")


def headline(rows: Sequence[RunFigures]) -> tuple[str, str]:
    """The comparison in one sentence, and in some more what somebody must know to weigh it.

    Holds:
        one_scale: bits are never held against counts.
        matched: only runs as useful as the baseline are ranked.
        not_by_luck: a run is said to give away less only if its canaries cannot be that by chance,
            however many runs there are.
        least: only if it is clearly below every other matched run.
        counted_only: without canaries nobody is said to give away less.
    """
    base = next(row for row in rows if row["is_baseline"])
    by_exposure = bool(base["exposure"])
    theirs = leak_of(base, by_exposure=by_exposure)
    matched = [
        (leak, row)
        for row in rows
        if row["comparable"] and row is not base
        if (leak := leak_of(row, by_exposure=by_exposure)) is not None
    ]
    if theirs is None or not matched:
        return _nothing_matched(rows, base)
    ranked = sorted(matched, key=lambda pair: pair[0].value)
    sentence, more = (_by_exposure if by_exposure else _by_counts)(base, theirs, ranked)
    others = [row["name"] for row in rows if not row["comparable"]]
    left_out = f"Not comparable: {', '.join(others)}." if others else ""
    return sentence, f"{more} {left_out}".strip()


Ranked = list[tuple[Leak, RunFigures]]


def _by_counts(base: RunFigures, theirs: Leak, ranked: Ranked) -> tuple[str, str]:
    return (
        "At matched utility, only counts are known, and they do not tell which model gives away less.",
        f"{_listed(base, [(theirs, base), *ranked])} What chance does to such counts nobody knows: plant canaries and give their --key.",
    )


def _by_exposure(base: RunFigures, theirs: Leak, ranked: Ranked) -> tuple[str, str]:
    mine, quiet = ranked[0]
    if mine.value >= theirs.value:
        return (
            f"At matched utility, no model gives away less than {base['name']}.",
            _listed(base, [ranked[0], (theirs, base)]),
        )
    changes = {row["name"]: row["exposure_changes"].get(base["name"]) for _, row in ranked}
    clear = [(leak, row) for leak, row in ranked if row["name"] in clearly_less(changes)]
    if not clear:
        return (
            f"At matched utility, no model clearly gives away less than {base['name']}.",
            f"{_listed(base, [ranked[0], (theirs, base)])} {_why_unclear(quiet, base, len(ranked))}",
        )
    more = _listed(base, [*clear, (theirs, base)])
    others = [base, *(row for _, row in ranked[1:])]
    below = {row["name"]: quiet["exposure_changes"].get(row["name"]) for row in others}
    if len(ranked) > 1 and clearly_below_all(below, len(ranked) + 1):
        return f"At matched utility, {quiet['name']} gives away least.", f"{more} {ONE_TRAINING}"
    if len(ranked) > 1:
        more += f" Which of the {len(ranked)} matched models gives away least is not clear."
    verb = "gives" if len(clear) == 1 else "give"
    names = joined([row["name"] for _, row in clear])
    return (
        f"At matched utility, {names} {verb} away less than {base['name']}.",
        f"{more} {ONE_TRAINING}",
    )


def _listed(base: RunFigures, runs: Ranked) -> str:
    listed = ", ".join(f"{leak.words} in {row['name']}" for leak, row in runs)
    return f"{_leak_words(base)}: {listed}."


def _why_unclear(row: RunFigures, base: RunFigures, num_matched: int) -> str:
    change = row["exposure_changes"].get(base["name"])
    num = 0 if change is None else change["num_canaries"]
    canaries = counted(num, "canary", "canaries")
    if num < LEAST_CANARIES:
        return f"{canaries} cannot tell that from chance; it takes {LEAST_CANARIES} or more."
    among = "" if num_matched == 1 else f" among {num_matched} matched models"
    return f"{canaries} cannot tell that from chance{among}."


def _leak_words(row: RunFigures) -> str:
    if not row["exposure"]:
        return "Text that only one person wrote and the model completes"
    times = row["exposure"][-1]["repetitions"]
    return f"Mean exposure of the canaries planted {counted(times, 'time')}"


def _nothing_matched(rows: Sequence[RunFigures], base: RunFigures) -> tuple[str, str]:
    known = [
        row["perplexity"]["value"] for row in rows if row["perplexity"] and row["same_held_out"]
    ]
    if len(known) < 2:
        return (
            "How useful these models are cannot be compared, only what they give away.",
            "Perplexities on the same held-out text are known for fewer than two of them.",
        )
    if any(row["comparable"] and not row["is_baseline"] for row in rows):
        return (
            "What the equally useful models give away is not known, so none can be called the quieter one.",
            "The table below says what was measured, and why the rest was not.",
        )
    span = f"Validation perplexities run from {number(min(known))} to {number(max(known))}"
    return (
        f"No model is comparable to {base['name']} at matched utility, so none can be called the quieter one.",
        f"{span}; a model that learnt less also gives away less.",
    )


def missing(rows: Sequence[RunFigures]) -> list[str]:
    """Why figures are missing, a sentence for each reason, with the runs it is about."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for measure, reason in row["not_known"].items():
            by_reason.setdefault((measure, reason), []).append(row["name"])
    merged: dict[tuple[str, str], list[str]] = {}
    for (measure, reason), names in by_reason.items():
        whose = "" if len(names) == len(rows) else f" of {', '.join(names)}"
        merged.setdefault((whose, reason), []).append(measure)
    return [
        f"{words[0].upper()}{words[1:]}{whose}: not known. {reason}"
        for (whose, reason), measures in merged.items()
        for words in [joined(measures)]
    ]


def uncounted(rows: Sequence[RunFigures]) -> list[str]:
    """What membership figures do not see, a sentence for all runs with the same numbers."""
    by_numbers: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        hidden = not_counted(row)
        if hidden.get("num_tokens"):
            numbers = hidden["num_documents"], hidden["num_tokens"]
            by_numbers.setdefault(numbers, []).append(row["name"])
    return [
        f"Membership of {joined(names)}: {counted(documents, 'document')}, {counted(tokens, 'token')} not counted, for the "
        "vocabulary was built on the training text. That is what its user alone wrote, the most private text. To count "
        "all, prepare with --tokenizer DIR, made of other text."
        for (documents, tokens), names in by_numbers.items()
    ]


def tolerance_words(tolerance: float) -> str:
    """When runs count as matched, for the foot of a table."""
    return f"Matched utility: validation perplexity within {100 * tolerance:g}% of the baseline's."


def clearly_less(changes: Mapping[str, Change | None]) -> set[str]:
    """The names whose change is below 0 by more than luck, however many were looked at (Holm 1979).

    Holds:
        any_number: of runs that do not differ, one is named in at most 2.5 of 100 comparisons, however
            many runs are in it.

    >>> sorted(clearly_less({"a": {"p_value": 0.001}, "b": {"p_value": 0.02}, "c": {"p_value": 0.9}}))
    ['a']
    """
    names = sorted(changes, key=lambda name: _p_value(changes[name]))
    for place, name in enumerate(names):
        if _p_value(changes[name]) > ONE_TAIL / (len(names) - place):
            return set(names[:place])
    return set(names)


def clearly_below_all(changes: Mapping[str, Change | None], num_runs: int) -> bool:
    """Whether the least exposed of `num_runs` runs is clearly below each of the others, though it
    was picked for being the least: as many pairs might have been looked at."""
    num_pairs = num_runs * (num_runs - 1) / 2
    return all(_p_value(change) <= ONE_TAIL / num_pairs for change in changes.values())


def _p_value(change: Change | None) -> float:
    known = None if change is None else change["p_value"]
    return 1.0 if known is None else known
