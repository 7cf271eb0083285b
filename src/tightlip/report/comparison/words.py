"""A comparison in words: its one sentence, its measures explained, and why a figure is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightlip.core.figures import counted, number
from tightlip.core.resampling import LEAST_CANARIES, ONE_TAIL
from tightlip.report.comparison.table import Row, not_counted

# What each measure means, in the table's order; the page and the documentation say the same.
MEANINGS = (
    (
        "Validation perplexity",
        "How surprised the model is by held-out text; lower is more useful. Beneath it, here and in other rows: the 95% interval.",
    ),
    (
        "Matched utility",
        "Whether that is as good as the baseline's. A model that learnt less gives away less, so leakage is compared only "
        "between runs that are equally useful.",
    ),
    (
        "Unique sequences",
        "Different pieces of training text that one person alone wrote and the model completes.",
    ),
    (
        "Leakage ε_l",
        "How many times less surprising the worst of them is to this model than to the reference model. A measurement, and "
        "not the ε of differential privacy.",
    ),
    (
        "Exposure",
        "By how many bits the model prefers a planted canary to what it might have read instead: the mean over canaries "
        "planted that often. A model that never saw them shows 1.4.",
    ),
    (
        "Exposed",
        "Canaries above the bits that chance passes for any of them in 5 of 100 models that never saw them.",
    ),
    (
        "Tab",
        "Canaries that somebody gets whole who types the first token and accepts each suggestion. Canaries that begin alike "
        "cannot all succeed: below it, how many can. Real canaries are people's own text.",
    ),
    (
        "Membership AUC",
        "How well a score tells text that was trained on from text that was not: 0.5 is guessing, 1 is certain.",
    ),
    (
        "Gap, low-5 to top-5",
        "By how much more perplexity rose, against the baseline, for the five users with the least text than for the five "
        "with the most. Above 0, those with little text pay more.",
    ),
    ("Seconds per epoch", "The median over whole epochs; below it, how many times the baseline's."),
    (
        "Guarantee",
        "An ε stands only beside its standing: “proved”, or “as published” where the proof does not cover what was run. "
        "“Measured only” means that nothing is promised.",
    ),
)


Change = dict[str, Any]
ONE_TRAINING = "Each run is one training, and the canaries of one training move together: another seed may turn this round."


@dataclass(frozen=True)
class Leak:
    """The one figure by which runs are ranked, and how it is said."""

    value: float
    words: str


def leak_of(row: Row, *, by_exposure: bool) -> Leak | None:
    """Exposure of the most repeated canaries, or the number of unique sequences."""
    if by_exposure:
        if not row["exposure"]:
            return None
        bits = row["exposure"][-1]["mean_bits"]
        return Leak(bits, f"{number(bits)} bits")
    if row["unique"] is None:
        return None
    return Leak(row["unique"], counted(row["unique"], "unique sequence"))


def headline(rows: Sequence[Row]) -> tuple[str, str]:
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
        (leak.value, place, leak, row)
        for place, row in enumerate(rows)
        if row["comparable"] and row is not base
        if (leak := leak_of(row, by_exposure=by_exposure)) is not None
    ]
    if theirs is None or not matched:
        return _nothing_matched(rows, base)
    ranked = [(leak, row) for _, _, leak, row in sorted(matched)]
    if by_exposure:
        sentence, more = _by_exposure(base, theirs, ranked)
    else:
        sentence, more = _by_counts(base, theirs, ranked)
    return sentence, f"{more} {_left_out(rows)}".strip()


Ranked = list[tuple[Leak, Row]]


def _by_counts(base: Row, theirs: Leak, ranked: Ranked) -> tuple[str, str]:
    listed = ", ".join(f"{leak.words} in {row['name']}" for leak, row in [(theirs, base), *ranked])
    return (
        "At matched utility, only counts are known, and they do not tell which run gives away less.",
        f"{_leak_words(base)}: {listed}. What chance does to such counts nobody knows: plant canaries and give their --key.",
    )


def _by_exposure(base: Row, theirs: Leak, ranked: Ranked) -> tuple[str, str]:
    mine, quiet = ranked[0]
    if mine.value >= theirs.value:
        return (
            f"At matched utility, no run gives away less than {base['name']}.",
            _bits_said(ranked[:1], theirs, base),
        )
    changes = {row["name"]: row["exposure_changes"].get(base["name"]) for _, row in ranked}
    clear = [(leak, row) for leak, row in ranked if row["name"] in clearly_less(changes)]
    if not clear:
        return (
            f"At matched utility, no run clearly gives away less than {base['name']}.",
            f"{_bits_said(ranked[:1], theirs, base)} {_why_unclear(quiet, base, len(ranked))}",
        )
    more = _bits_said(clear, theirs, base)
    others = [base, *(row for _, row in ranked[1:])]
    below = {row["name"]: quiet["exposure_changes"].get(row["name"]) for row in others}
    if len(ranked) > 1 and clearly_below_all(below, len(ranked) + 1):
        return f"At matched utility, {quiet['name']} gives away least.", f"{more} {ONE_TRAINING}"
    if len(ranked) > 1:
        more += f" Which of the {len(ranked)} matched runs gives away least is not clear."
    verb = "gives" if len(clear) == 1 else "give"
    names = _joined([row["name"] for _, row in clear])
    return (
        f"At matched utility, {names} {verb} away less than {base['name']}.",
        f"{more} {ONE_TRAINING}",
    )


def _bits_said(runs: Ranked, theirs: Leak, base: Row) -> str:
    listed = ", ".join(f"{leak.words} in {row['name']}" for leak, row in [*runs, (theirs, base)])
    return f"{_leak_words(base)}: {listed}."


def _why_unclear(row: Row, base: Row, num_matched: int) -> str:
    change = row["exposure_changes"].get(base["name"])
    num = 0 if change is None else change["num_canaries"]
    canaries = counted(num, "canary", "canaries")
    if num < LEAST_CANARIES:
        return f"{canaries} cannot tell that from chance; it takes {LEAST_CANARIES} or more."
    among = "" if num_matched == 1 else f" among {num_matched} matched runs"
    return f"{canaries} cannot tell that from chance{among}."


def _joined(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _leak_words(row: Row) -> str:
    if not row["exposure"]:
        return "Text that one person alone wrote and the model completes"
    times = row["exposure"][-1]["repetitions"]
    return f"Mean exposure of the canaries planted {counted(times, 'time')}"


def _nothing_matched(rows: Sequence[Row], base: Row) -> tuple[str, str]:
    known = [
        row["perplexity"]["value"] for row in rows if row["perplexity"] and row["same_held_out"]
    ]
    if len(known) < 2:
        return (
            "How useful these runs are cannot be compared, only what they give away.",
            "Perplexities on the same held-out text are known for fewer than two of them.",
        )
    if any(row["comparable"] and not row["is_baseline"] for row in rows):
        return (
            "What the equally useful runs give away is not known, so none can be called the quieter one.",
            "The table below says what was measured, and why the rest was not.",
        )
    span = f"Validation perplexities run from {number(min(known))} to {number(max(known))}"
    return (
        f"No run is comparable to {base['name']} at matched utility, so none can be called the quieter one.",
        f"{span}; a model that learnt less also gives away less.",
    )


def _left_out(rows: Sequence[Row]) -> str:
    others = [row["name"] for row in rows if not row["comparable"]]
    return f"Not comparable: {', '.join(others)}." if others else ""


def missing(rows: Sequence[Row]) -> list[str]:
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
        f"{' and '.join(measures).capitalize()}{whose}: not known. {reason}"
        for (whose, reason), measures in merged.items()
    ]


def uncounted(rows: Sequence[Row]) -> list[str]:
    """What membership figures do not see, a sentence for all runs with the same numbers."""
    by_numbers: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        found = not_counted(row)
        if found.get("num_tokens"):
            numbers = found["num_documents"], found["num_tokens"]
            by_numbers.setdefault(numbers, []).append(row["name"])
    return [
        f"Membership of {_joined(names)}: {counted(documents, 'document')}, {counted(tokens, 'token')} not counted, for the "
        "vocabulary was built on the training text. That is what its user alone wrote, the most private text. To count "
        "all, prepare with --tokenizer DIR, made of other text."
        for (documents, tokens), names in by_numbers.items()
    ]


def tolerance_words(tolerance: float) -> str:
    """When runs count as matched, for the foot of a table."""
    return f"Matched utility: validation perplexity within {100 * tolerance:g}% of the baseline's."


# Which runs expose their canaries less than others, beyond the canaries' own luck


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
        if p_value > ONE_TAIL / left:
            break
        found.add(name)
        left -= 1
    return found


def clearly_below_all(changes: Mapping[str, Change | None], num_runs: int) -> bool:
    """Whether the least exposed of `num_runs` runs is clearly below each of the others, though it
    was picked for being the least: as many pairs might have been looked at."""
    num_pairs = num_runs * (num_runs - 1) / 2
    return all(_p_value(change) <= ONE_TAIL / num_pairs for change in changes.values())


def _p_value(change: Change | None) -> float:
    known = None if change is None else change["p_value"]
    return 1.0 if known is None else known
