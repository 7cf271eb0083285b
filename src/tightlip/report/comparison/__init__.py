"""The comparison as one HTML file: no network, no script, no text and nobody's name.

Utility against leakage, and exposure by repetition, are drawn as SVG.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from markupsafe import Markup

from tightlip.core.figures import counted, number
from tightlip.report.comparison import table, words
from tightlip.report.comparison.table import RunFigures
from tightlip.report.kit import plots
from tightlip.report.kit.table import NEVER_SAW_BITS

Point = tuple[RunFigures, float, str]  # a run, what it leaks, and that in words


def kind_of(row: RunFigures) -> str:
    if row["is_baseline"]:
        return "base"
    return "matched" if row["comparable"] else "other"


def exposure_scatter(rows: Sequence[RunFigures], tolerance: float) -> Markup | None:
    """Perplexity against the mean exposure of the most repeated canaries."""
    points = []
    for row in _on_one_scale(rows):
        if row["exposure"]:
            most = row["exposure"][-1]
            bits = f"{most['mean_bits']:.1f} bits at {most['repetitions']:,}×"
            points.append((row, most["mean_bits"], bits))
    if not points:
        return None
    plot = _plot("Utility against exposure", "bits of exposure")
    axis = plots.linear_axis(max(3.0, *(bits for _, bits, _ in points)))
    plot.y_axis(axis, "mean exposure, bits")
    _draw_points(plot, points, axis, rows, tolerance, _never_saw(plot, axis))
    return plot.svg()


def leaks_scatter(rows: Sequence[RunFigures], tolerance: float) -> Markup | None:
    """Perplexity against the number of leaks."""
    points = [
        (row, row["leaks"], counted(row["leaks"], "leak"))
        for row in _on_one_scale(rows)
        if row["leaks"] is not None
    ]
    if not points:
        return None
    plot = _plot("Utility against leaks", "leaks")
    axis = plots.count_axis(max(leaks for _, leaks, _ in points))
    plot.y_axis(axis, "leaks")
    _draw_points(plot, points, axis, rows, tolerance)
    return plot.svg()


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
) -> None:
    perplexities = [row["perplexity"]["value"] for row, _, _ in points]
    x_axis = _perplexity_axis(perplexities)
    base = next((row for row in rows if row["is_baseline"]), None)
    if base is not None and base["perplexity"]:
        _draw_band(plot, x_axis, base["perplexity"]["value"], tolerance)
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


def _perplexity_axis(values: list[float]) -> plots.Axis:
    low, high = min(values), max(values)
    if low > 0 and high > 4 * low:
        return plots.log_axis(low * 0.85, high * 1.15)
    room = 0.15 * max(high - low, 0.15 * high)
    return plots.linear_axis(high + room, low=max(0.0, low - room))


def _draw_band(plot: plots.Plot, axis: plots.Axis, perplexity: float, tolerance: float) -> None:
    """Where a run is as useful as the baseline."""
    left, right = (plot.x(axis.at(perplexity * side)) for side in (1 - tolerance, 1 + tolerance))
    tip = f"within {100 * tolerance:g}% of the baseline's perplexity"
    plot.bar(left, max(right - left, 1.0), 1, "band", tip=tip)


def _draw_mark(plot: plots.Plot, point: Point, x: float, y: float) -> None:
    row, _, leak = point
    perplexity = number(row["perplexity"]["value"])
    tip = f"{row['name']}: validation perplexity {perplexity}, {leak}"
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
    known = [row for row in rows if row["exposure"]]
    if not known:
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
        sentence, weighing = words.headline(rows)
        return {
            "headline": sentence,
            "version": self.version,
            "rows": rows,
            "kinds": [kind_of(row) for row in rows],
            "weighing": weighing,
            "remarks": self.notes,
            "table": table.comparison_table(rows),
            "tolerance": words.tolerance_words(self.tolerance),
            "at_perplexity": self.at_perplexity,
            "missing": words.missing(rows),
            "uncounted": words.uncounted(rows),
            "scores": table.score_table(rows),
            "score": table.membership_score(rows),
            "exposure_plot": exposure_scatter(rows, self.tolerance),
            "leaks_plot": leaks_scatter(rows, self.tolerance),
            # Runs that have no place on the axis of perplexity.
            "num_undrawn": len(rows) - len(_on_one_scale(rows)),
            "repetition_plots": repetition_plots(rows),
            "repetitions": table.repetition_table(rows),
        }
