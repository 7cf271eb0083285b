"""The comparison as one HTML file: no network, no script, no text and nobody's name.

Its one sentence, why figures are missing, and plots of utility against leakage and of exposure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from markupsafe import Markup

from tightlip.core.figures import counted, number
from tightlip.core.resampling import LEAST_CANARIES, ONE_TAIL
from tightlip.report.comparison import table
from tightlip.report.comparison.table import RunFigures
from tightlip.report.kit import plots
from tightlip.report.kit.table import NEVER_SAW_BITS, joined

Change = dict[str, Any]
Ranked = list[tuple["Leak", RunFigures]]  # the one that gives away least first
ONE_TRAINING = "Each run is one training, and the canaries of one training move together: another seed may turn this round."
Point = tuple[RunFigures, float, str]  # a run, what it leaks, and that in words


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
    leaks = [(leak_of(row, by_exposure=by_exposure), row) for row in rows if row["comparable"]]
    matched = [(leak, row) for leak, row in leaks if leak is not None and row is not base]
    if theirs is None or not matched:
        return _nothing_matched(rows, base)
    ranked = sorted(matched, key=lambda pair: pair[0].value)
    sentence, more = (_by_exposure if by_exposure else _by_counts)(base, theirs, ranked)
    others = [row["name"] for row in rows if not row["comparable"]]
    left_out = f"Not comparable: {', '.join(others)}." if others else ""
    return sentence, f"{more} {left_out}".strip()


def _by_counts(base: RunFigures, theirs: Leak, ranked: Ranked) -> tuple[str, str]:
    return (
        "At matched utility, only counts are known, and they do not tell which model gives away less.",
        f"{_listed(base, [(theirs, base), *ranked])} What chance does to such counts nobody knows: plant canaries and give their --key.",
    )


def _by_exposure(base: RunFigures, theirs: Leak, ranked: Ranked) -> tuple[str, str]:
    mine, quiet = ranked[0]
    quietest = _listed(base, [ranked[0], (theirs, base)])
    if mine.value >= theirs.value:
        return f"At matched utility, no model gives away less than {base['name']}.", quietest
    changes = {row["name"]: row["exposure_changes"].get(base["name"]) for _, row in ranked}
    clear = [(leak, row) for leak, row in ranked if row["name"] in clearly_less(changes)]
    if not clear:
        return (
            f"At matched utility, no model clearly gives away less than {base['name']}.",
            f"{quietest} {_why_unclear(quiet, base, len(ranked))}",
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
    sentence = f"At matched utility, {names} {verb} away less than {base['name']}."
    return sentence, f"{more} {ONE_TRAINING}"


def _listed(base: RunFigures, runs: Ranked) -> str:
    what = "Text that only one person wrote and the model completes"
    if base["exposure"]:
        times = counted(base["exposure"][-1]["repetitions"], "time")
        what = f"Mean exposure of the canaries planted {times}"
    listed = ", ".join(f"{leak.words} in {row['name']}" for leak, row in runs)
    return f"{what}: {listed}."


def _why_unclear(row: RunFigures, base: RunFigures, num_matched: int) -> str:
    change = row["exposure_changes"].get(base["name"])
    num = 0 if change is None else change["num_canaries"]
    canaries = counted(num, "canary", "canaries")
    if num < LEAST_CANARIES:
        return f"{canaries} cannot tell that from chance; it takes {LEAST_CANARIES} or more."
    among = "" if num_matched == 1 else f" among {num_matched} matched models"
    return f"{canaries} cannot tell that from chance{among}."


def _nothing_matched(rows: Sequence[RunFigures], base: RunFigures) -> tuple[str, str]:
    known = [row["perplexity"]["value"] for row in _on_one_scale(rows)]
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
        hidden = table.not_counted(row)
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
    return 1.0 if change is None or change["p_value"] is None else change["p_value"]


def kind_of(row: RunFigures) -> str:
    if row["is_baseline"]:
        return "base"
    return "matched" if row["comparable"] else "other"


def exposure_scatter(rows: Sequence[RunFigures], tolerance: float) -> Markup | None:
    """Perplexity against the mean exposure of the most repeated canaries."""
    known = [(row, row["exposure"][-1]) for row in _on_one_scale(rows) if row["exposure"]]
    points = [
        (row, most["mean_bits"], f"{most['mean_bits']:.1f} bits at {most['repetitions']:,}×")
        for row, most in known
    ]
    if not points:
        return None
    plot = _plot("Utility against exposure", "bits of exposure")
    axis = plots.linear_axis(max(3.0, *(bits for _, bits, _ in points)))
    plot.y_axis(axis, "mean exposure, bits")
    return _draw_points(plot, points, axis, rows, tolerance, _never_saw(plot, axis))


def leaks_scatter(rows: Sequence[RunFigures], tolerance: float) -> Markup | None:
    """Perplexity against the number of leaks."""
    known = [row for row in _on_one_scale(rows) if row["leaks"] is not None]
    points = [(row, row["leaks"], counted(row["leaks"], "leak")) for row in known]
    if not points:
        return None
    plot = _plot("Utility against leaks", "leaks")
    axis = plots.count_axis(max(leaks for _, leaks, _ in points))
    plot.y_axis(axis, "leaks")
    return _draw_points(plot, points, axis, rows, tolerance)


def _on_one_scale(rows: Sequence[RunFigures]) -> list[RunFigures]:
    """Runs whose perplexity was measured on the baseline's held-out text, in its tokens."""
    return [row for row in rows if row["perplexity"] and row["same_held_out"]]


def _plot(title: str, what: str) -> plots.Plot:
    return plots.Plot(
        title=title,
        description=f"One mark for each run: validation perplexity across, {what} up. Lower left is better.",
        width=430,
        height=310,
        right=14,
    )


def _draw_points(
    plot: plots.Plot,
    points: list[Point],
    y_axis: plots.Axis,
    rows: Sequence[RunFigures],
    tolerance: float,
    *taken: plots.Box,
) -> Markup:
    perplexities = [row["perplexity"]["value"] for row, _, _ in points]
    x_axis = _perplexity_axis(perplexities)
    base = next((row for row in rows if row["is_baseline"]), None)
    if base is not None and base["perplexity"]:
        # Where a run is as useful as the baseline.
        ends = (base["perplexity"]["value"] * side for side in (1 - tolerance, 1 + tolerance))
        left, right = (plot.x(x_axis.at(end)) for end in ends)
        tip = f"within {100 * tolerance:g}% of the baseline's perplexity"
        plot.bar(left, max(right - left, 1.0), 1, "band", tip=tip)
    scale = " (log scale)" if x_axis.log else ""
    plot.x_axis(x_axis, f"validation perplexity{scale}; further left is more useful")
    places = [
        (plot.x(x_axis.at(perplexity)), plot.y(y_axis.at(leak)))
        for perplexity, (_, leak, _) in zip(perplexities, points, strict=True)
    ]
    labels = plots.Labels(plot, places, *taken)
    for (row, _, _), (x, y) in zip(points, places, strict=True):
        labels.draw(row["name"], x, y)
    for point, (x, y) in zip(points, places, strict=True):
        _draw_mark(plot, point, x, y)
    return plot.svg()


def _perplexity_axis(values: list[float]) -> plots.Axis:
    low, high = min(values), max(values)
    if low > 0 and high > 4 * low:
        return plots.log_axis(low * 0.85, high * 1.15)
    room = 0.15 * max(high - low, 0.15 * high)
    return plots.linear_axis(high + room, low=max(0.0, low - room))


def _draw_mark(plot: plots.Plot, point: Point, x: float, y: float) -> None:
    row, _, leak = point
    tip = f"{row['name']}: validation perplexity {number(row['perplexity']['value'])}, {leak}"
    if (kind := kind_of(row)) == "base":
        left, top, size = x - plots.DOT, y - plots.DOT, 2 * plots.DOT
        plot.draw("rect", x=left, y=top, width=size, height=size, class_="run base", tip=tip)
    else:
        plot.draw("circle", cx=x, cy=y, r=plots.DOT, class_=f"run {kind}", tip=tip)


def _never_saw(plot: plots.Plot, axis: plots.Axis) -> plots.Box:
    """The exposure of a model that never saw a canary, and where the words above the line stand."""
    note = "never saw them: 1.4"
    height = plot.level(axis.at(NEVER_SAW_BITS), "chance")
    plot.write(note, plot.left + 4, height - 4, "note")
    return plot.left, plot.left + 4 + len(note) * plots.CHARACTER_WIDTH, height - 14, height


def repetition_plots(rows: Sequence[RunFigures]) -> list[tuple[RunFigures, Markup]]:
    """For each run with canaries its exposure by repetition, the baseline's behind it."""
    if not (known := [row for row in rows if row["exposure"]]):
        return []
    highest = max(group["mean_bits"] for row in known for group in row["exposure"])
    times = table.all_repetitions(known)
    base = next((row for row in known if row["is_baseline"]), None)
    return [(row, _repetition_plot(row, base, times, highest)) for row in known]


def _repetition_plot(
    row: RunFigures, base: RunFigures | None, times: list[int], highest: float
) -> Markup:
    plot = plots.Plot(
        title=f"Exposure by repetition: {row['name']}",
        description="Mean exposure in bits of canaries planted once, and more often; the baseline behind it.",
        width=270,
        height=190,
        left=44,
    )
    kinds = {} if base is None or base is row else {"behind": base}
    lines = {
        kind: [(one["repetitions"], one["mean_bits"], _tip(of, one)) for one in of["exposure"]]
        for kind, of in (kinds | {"own": row}).items()
    }
    plots.draw_exposures(plot, lines, times, highest)
    return plot.svg()


def _tip(row: RunFigures, group: RunFigures) -> str:
    times = counted(group["repetitions"], "time")
    return f"{row['name']}, planted {times}: {group['mean_bits']:.1f} bits, {table.exposed_words(group)}"


@dataclass(frozen=True, kw_only=True)
class ComparisonPage:
    """The page of a comparison.

    Holds:
        complete: every verdict on comparability and every reason for a missing figure is on it.
    """

    files: ClassVar[str] = "report/comparison/page"
    rows: Sequence[RunFigures]
    tolerance: float  # within which two runs count as equally useful
    at_perplexity: float | None = None
    notes: Sequence[str] = ()
    version: str | None = None

    def content(self) -> dict[str, Any]:
        rows = self.rows
        sentence, weighing = headline(rows)
        return {
            "headline": sentence,
            "version": self.version,
            "rows": rows,
            "kinds": [kind_of(row) for row in rows],
            "weighing": weighing,
            "remarks": self.notes,
            "table": table.comparison_table(rows),
            "tolerance": tolerance_words(self.tolerance),
            "at_perplexity": self.at_perplexity,
            "missing": missing(rows),
            "uncounted": uncounted(rows),
            "scores": table.score_table(rows),
            "score": table.membership_score(rows),
            "exposure_plot": exposure_scatter(rows, self.tolerance),
            "leaks_plot": leaks_scatter(rows, self.tolerance),
            # Runs that have no place on the axis of perplexity.
            "num_undrawn": len(rows) - len(_on_one_scale(rows)),
            "repetition_plots": repetition_plots(rows),
            "repetitions": table.repetition_table(rows),
        }
