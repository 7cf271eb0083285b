"""Utility against leakage, and exposure by repetition, drawn as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from tightlip.core.figures import count, counted, number
from tightlip.report.comparison.table import Row, exposure_at
from tightlip.report.kit.plots import (
    CHARACTER_WIDTH,
    Axis,
    Plot,
    count_axis,
    draw_line,
    linear_axis,
    log_axis,
    short,
)

NEVER_SAW_BITS = 1.44  # the mean exposure under a model that never saw the canary
LABEL_CHARACTERS = 24
LABEL_HEIGHT = 13
DOT = 5.5
Box = tuple[float, float, float, float]  # left, right, top, bottom


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run in a plot of utility against leakage; `kind` is base, matched or other."""

    x: float
    y: float
    name: str
    kind: str
    tip: str


def kind_of(row: Row) -> str:
    if row["is_baseline"]:
        return "base"
    return "matched" if row["comparable"] else "other"


def exposure_scatter(rows: Sequence[Row], tolerance: float) -> Markup | None:
    """Perplexity against the mean exposure of the most repeated canaries."""
    points = []
    for row in _on_one_scale(rows):
        if row["exposure"]:
            most = row["exposure"][-1]
            said = f"{most['mean_bits']:.1f} bits at {most['repetitions']:,}×"
            points.append(_point(row, most["mean_bits"], said))
    if not points:
        return None
    plot = _plot("Utility against exposure", "bits of exposure")
    axis = linear_axis(max(max(point.y for point in points), 3.0))
    plot.y_axis(axis, "mean exposure, bits")
    words = _across(plot, axis.at(NEVER_SAW_BITS), "never saw them: 1.4")
    _draw_points(plot, points, axis, rows, tolerance, taken=words)
    return plot.svg()


def unique_scatter(rows: Sequence[Row], tolerance: float) -> Markup | None:
    """Perplexity against the number of unique sequences."""
    known = [row for row in _on_one_scale(rows) if row["unique"] is not None]
    if not known:
        return None
    points = [
        _point(row, row["unique"], counted(row["unique"], "unique sequence")) for row in known
    ]
    plot = _plot("Utility against unique sequences", "unique sequences")
    axis = count_axis(max(row["unique"] for row in known))
    plot.y_axis(axis, "unique sequences")
    _draw_points(plot, points, axis, rows, tolerance)
    return plot.svg()


def _on_one_scale(rows: Sequence[Row]) -> list[Row]:
    """Runs whose perplexity was measured on the baseline's held-out text, in its tokens."""
    return [row for row in rows if row["perplexity"] and row["same_held_out"]]


def num_undrawn(rows: Sequence[Row]) -> int:
    """Runs that have no place on the axis of perplexity."""
    return len(rows) - len(_on_one_scale(rows))


def _point(row: Row, y: float, said: str) -> Point:
    perplexity = row["perplexity"]["value"]
    tip = f"{row['name']}: validation perplexity {number(perplexity)}, {said}"
    return Point(x=perplexity, y=y, name=row["name"], kind=kind_of(row), tip=tip)


def _plot(title: str, what: str) -> Plot:
    return Plot(
        title=title,
        description=f"One mark for each run: validation perplexity across, {what} up. Lower left is better.",
        width=430,
        height=310,
        right=14,
    )


def _draw_points(
    plot: Plot,
    points: list[Point],
    y_axis: Axis,
    rows: Sequence[Row],
    tolerance: float,
    *,
    taken: Box | None = None,
) -> None:
    x_axis = _perplexity_axis([point.x for point in points])
    base = next((row for row in rows if row["is_baseline"]), None)
    if base is not None and base["perplexity"]:
        _draw_band(plot, x_axis, base["perplexity"]["value"], tolerance)
    scale = " (log scale)" if x_axis.log else ""
    plot.x_axis(x_axis, f"validation perplexity{scale}; further left is more useful")
    places = [(plot.x(x_axis.at(point.x)), plot.y(y_axis.at(point.y))) for point in points]
    boxes = [(x - DOT, x + DOT, y - DOT, y + DOT) for x, y in places] + ([taken] if taken else [])
    for point, (x, y) in zip(points, places, strict=True):
        _draw_label(plot, point, x, y, boxes)
    for point, (x, y) in zip(points, places, strict=True):
        _draw_mark(plot, point, x, y)


def _perplexity_axis(values: list[float]) -> Axis:
    low, high = min(values), max(values)
    if low > 0 and high > 4 * low:
        axis = log_axis(low * 0.85, high * 1.15)
        return axis if len(axis.ticks) > 3 else replace(axis, ticks=_finer(axis))
    room = 0.15 * max(high - low, 0.15 * high)
    return linear_axis(high + room, low=max(0.0, low - room))


def _finer(axis: Axis) -> list[tuple[float, str]]:
    """More ticks for an axis of about a decade, which otherwise has two or three."""
    decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)))
    ticks = [step * 10.0**decade for decade in decades for step in (1, 1.5, 2, 3, 4, 5, 7)]
    return [(tick, short(tick)) for tick in ticks if axis.low <= tick <= axis.high]


def _draw_band(plot: Plot, axis: Axis, perplexity: float, tolerance: float) -> None:
    """Where a run is as useful as the baseline."""
    left, right = (plot.x(axis.at(perplexity * side)) for side in (1 - tolerance, 1 + tolerance))
    plot.draw(
        "rect",
        x=left,
        y=plot.y(1),
        width=max(right - left, 1.0),
        height=plot.y(0) - plot.y(1),
        class_="band",
        tip=f"within {100 * tolerance:g}% of the baseline's perplexity",
    )


def _draw_mark(plot: Plot, point: Point, x: float, y: float) -> None:
    if point.kind == "base":
        plot.draw(
            "rect", x=x - DOT, y=y - DOT, width=2 * DOT, height=2 * DOT, class_="run base",
            tip=point.tip,
        )  # fmt: skip
    else:
        plot.draw("circle", cx=x, cy=y, r=DOT, class_=f"run {point.kind}", tip=point.tip)


def _draw_label(plot: Plot, point: Point, x: float, y: float, taken: list[Box]) -> None:
    """The run's name beside its mark, on the first side and height that is free."""
    name = cut_name(point.name)
    width = len(name) * CHARACTER_WIDTH
    boxes = [
        (left, left + width, y + step * LABEL_HEIGHT - 6, y + step * LABEL_HEIGHT + 6)
        for step in (0, -1, 1, -2, 2, -3, 3)
        for left in (x + DOT + 4, x - DOT - 4 - width)
    ]
    inside = [box for box in boxes if _is_inside(plot, box)] or boxes
    free = [box for box in inside if not any(_overlap(box, other) for other in taken)]
    box = (free or inside)[0]
    taken.append(box)
    to_left = box[0] < x
    plot.draw(
        "text",
        name,
        x=box[1] if to_left else box[0],
        y=box[3] - 2,
        class_="run-name end" if to_left else "run-name",
    )


def _is_inside(plot: Plot, box: Box) -> bool:
    left, right, top, bottom = box
    across = plot.left <= left and right <= plot.width
    return across and plot.y(1) - 8 <= top and bottom <= plot.y(0)


def _overlap(first: Box, second: Box) -> bool:
    return (
        first[0] < second[1]
        and second[0] < first[1]
        and first[2] < second[3]
        and second[2] < first[3]
    )


def cut_name(name: str, most: int = LABEL_CHARACTERS) -> str:
    """A run's name that fits a plot; of a path the end tells more than the beginning."""
    return name if len(name) <= most else "…" + name[-most + 1 :]


def _across(plot: Plot, share: float, words: str) -> Box:
    """A dashed level line with a few words above its left end, and where these stand."""
    height = plot.y(share)
    plot.draw(
        "line", x1=plot.left, x2=plot.width - plot.right, y1=height, y2=height, class_="chance"
    )
    plot.draw("text", words, x=plot.left + 4, y=height - 4, class_="note")
    return plot.left, plot.left + 4 + len(words) * CHARACTER_WIDTH, height - 14, height


# Exposure by repetition, a small plot for each run
def repetition_plots(rows: Sequence[Row]) -> list[tuple[Row, Markup]]:
    """For each run with canaries its exposure by repetition, the baseline's behind it."""
    known = [row for row in rows if row["exposure"]]
    if not known:
        return []
    highest = max(group["mean_bits"] for row in known for group in row["exposure"])
    times = sorted({group["repetitions"] for row in known for group in row["exposure"]})
    base = next((row for row in known if row["is_baseline"]), None)
    return [(row, _repetition_plot(row, base, times, highest)) for row in known]


def _repetition_plot(row: Row, base: Row | None, times: list[int], highest: float) -> Markup:
    plot = Plot(
        title=f"Exposure by repetition: {row['name']}",
        description="Mean exposure in bits of canaries planted once, and more often; the baseline behind it.",
        width=270,
        height=190,
        left=44,
    )
    axis = linear_axis(max(highest, 3.0))
    plot.y_axis(axis, "bits")
    _across(plot, axis.at(NEVER_SAW_BITS), "")
    if base is not None and base is not row:
        draw_line(plot, _line(base, times, axis), "behind")
    draw_line(plot, _line(row, times, axis), "own")
    plot.x_labels([(_along(one, times), f"{one:,}") for one in times], "times planted")
    return plot.svg()


def _line(row: Row, times: list[int], axis: Axis) -> list[tuple[float, float, str]]:
    found = [exposure_at(row, one) for one in times]
    return [
        (_along(group["repetitions"], times), axis.at(group["mean_bits"]), _tip(row, group))
        for group in found
        if group is not None
    ]


def _tip(row: Row, group: Row) -> str:
    exposed = f"{count(group['num_exposed'])} of {count(group['num_canaries'])} exposed"
    return f"{row['name']}, planted {counted(group['repetitions'], 'time')}: {group['mean_bits']:.1f} bits, {exposed}"


def _along(repetitions: int, times: list[int]) -> float:
    """Where a repetition count stands across the plot, by its logarithm."""
    low, high = math.log(times[0]), math.log(times[-1])
    share = (math.log(repetitions) - low) / (high - low) if high > low else 0.5
    return 0.06 + 0.88 * share
