"""Small SVG plots drawn in Python: axes, bars, lines, and a tooltip on every mark.

Colours come from classes, so that the page's style sheet can turn them for a dark
screen; nothing here carries a style attribute, which the page's policy forbids.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from markupsafe import Markup, escape

from tightlip.report.kit.table import NEVER_SAW_BITS, cut_name

CHARACTER_WIDTH = 6.4
LABEL_HEIGHT = 13
LOG_STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(1 + x / 10 for x in range(90)))
DOT = 5.5  # half a run's mark, and more than half a dot
Box = tuple[float, float, float, float]  # left, right, top, bottom
Points = Sequence[tuple[float, float, str]]  # across, up, and a tooltip


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Values to 0..1 along an axis, and the ticks to print."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value stands between the axis' ends, never outside them."""
        places = (self.low, self.high, max(value, self.low))
        low, high, value = map(math.log10, places) if self.log else places
        return min(1.0, (value - low) / (high - low)) if high > low else 0.5


def linear_axis(high: float, *, low: float = 0.0, most_ticks: int = 5) -> Axis:
    """From `low` to a round number at or above `high`.

    >>> [label for _, label in linear_axis(230).ticks]
    ['0', '50', '100', '150', '200', '250']
    """
    step = _round_step((high - low) / most_ticks) if high > low else 1.0
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [place * step for place in range(first, max(last, first + 1) + 1)]
    return Axis(low=ticks[0], high=ticks[-1], ticks=[(tick, short(tick)) for tick in ticks])


def count_axis(high: int) -> Axis:
    """A linear axis that ticks at whole numbers."""
    axis = linear_axis(max(high, 1))
    return replace(axis, ticks=[tick for tick in axis.ticks if tick[0] == int(tick[0])])


def log_axis(low: float, high: float) -> Axis:
    """Ticks at powers of ten, and between them where there would be three or fewer."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    apart = max(1, math.ceil(math.log10(high / low) / 7))
    inside: list[float] = []
    for steps in LOG_STEPS:
        ticks = [step * 10.0**decade for decade in decades[::apart] for step in steps]
        inside = [tick for tick in ticks if low * 0.9999 <= tick <= high * 1.0001]
        if len(inside) > 3:
            break
    return Axis(low=low, high=high, log=True, ticks=[(tick, short(tick)) for tick in inside])


def _round_step(step: float) -> float:
    size = 10.0 ** math.floor(math.log10(step))
    return next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= step * 0.999)


def short(value: float) -> str:
    """A tick's label: 1,500 as 1.5k.

    >>> short(1500), short(2_000_000), short(0.05), short(1e12)
    ('1.5k', '2M', '0.05', '1e12')
    """
    if abs(value) >= 1e12:
        return f"{value:.0e}".replace("e+", "e")
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.4g}"


@dataclass(kw_only=True)
class Plot:
    """A frame to draw in; `x` and `y` take 0..1 and give SVG coordinates."""

    title: str
    description: str
    width: int = 380
    height: int = 256
    left: int = 48
    bottom: int = 44
    top: int = 14
    right: int = 10
    parts: list[Markup] = field(default_factory=list)

    @property
    def x_span(self) -> int:
        return self.width - self.left - self.right

    def x(self, share: float) -> float:
        return self.left + share * self.x_span

    def y(self, share: float) -> float:
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)

    def draw(self, tag: str, text: str = "", *, tip: str = "", **attributes: object) -> None:
        """Add one element; a name that is a Python word gets a trailing underscore."""
        written = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
            for name, value in attributes.items()
        )
        inside = (f"<title>{escape(tip)}</title>" if tip else "") + str(escape(text))
        self.parts.append(Markup(f"<{tag}{written}>{inside}</{tag}>"))

    def write(self, words: str, x: float, y: float, kind: str, **attributes: Any) -> None:
        self.draw("text", words, x=x, y=y, class_=kind, **attributes)

    def level(self, share: float, kind: str) -> float:
        """A line from end to end at a height of 0..1; where that is."""
        y = self.y(share)
        self.draw("line", x1=self.left, x2=self.width - self.right, y1=y, y2=y, class_=kind)
        return y

    def upright(self, share: float, kind: str, *, tip: str = "") -> float:
        """A line from bottom to top at 0..1 across; where that is."""
        x = self.x(share)
        self.draw("line", x1=x, x2=x, y1=self.y(0), y2=self.y(1), class_=kind, tip=tip)
        return x

    def bar(self, x: float, width: float, share: float, kind: str, **others: Any) -> None:
        """A bar that stands on the axis and reaches to 0..1."""
        top, foot = self.y(share), self.y(0)
        self.draw("rect", x=x, y=top, width=width, height=foot - top, class_=kind, **others)

    def y_axis(self, axis: Axis, label: str) -> None:
        for value, name in axis.ticks:
            height = self.level(axis.at(value), "grid")
            self.write(name, self.left - 7, height + 3.5, "tick end")
        middle = self.y(0.5)
        self.write(label, 12, middle, "label middle", transform=f"rotate(-90 12 {middle:.1f})")

    def x_axis(self, axis: Axis, label: str) -> None:
        self.x_labels([(axis.at(value), name) for value, name in axis.ticks], label)

    def x_labels(self, places: Sequence[tuple[float, str]], label: str) -> None:
        """Tick labels at 0..1, leaving out those that would run into the one before."""
        self.level(0, "axis")
        free_from = 0.0
        for share, name in places:
            half = len(name) * CHARACTER_WIDTH / 2
            if self.x(share) - half >= free_from and self.x(share) + half <= self.width + 4:
                self.write(name, self.x(share), self.y(0) + 16, "tick middle")
                free_from = self.x(share) + half + 5
        self.write(label, self.x(0.5), self.height - 7, "label middle")

    def mark_x(self, share: float, words: str) -> None:
        """A dashed upright line with a few words beside its top, on the side with more room."""
        across = self.upright(share, "mark")
        beside, kind = (across - 5, "note end") if share > 0.6 else (across + 5, "note")
        self.write(words, beside, self.y(1) + 9, kind)

    def svg(self, *, wide: bool = False) -> Markup:
        label, kind = f"{self.title}. {self.description}", "plot wide" if wide else "plot"
        opening = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="{}">').format(
            self.width, self.height, label, kind
        )
        return opening + Markup("").join(self.parts) + Markup("</svg>")


def _short(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def along(value: float, values: Sequence[float], *, log: bool = True, end: float = 0.94) -> float:
    """Where a value stands across a plot, clear of the ends, where a tick's label has no room."""
    turn: Callable[[float], float] = math.log if log else float
    low, high = turn(min(values)), turn(max(values))
    return 0.06 + (end - 0.06) * (turn(value) - low) / (high - low) if high > low else 0.5


class Labels:
    """Names beside marks: each on the first side and height where it covers nothing."""

    def __init__(self, plot: Plot, marks: Sequence[tuple[float, float]], *taken: Box) -> None:
        self.plot = plot
        self.taken = [(x - DOT, x + DOT, y - DOT, y + DOT) for x, y in marks] + list(taken)

    def draw(self, name: str, x: float, y: float) -> None:
        name = cut_name(name)
        width = len(name) * CHARACTER_WIDTH
        boxes = [
            (left, left + width, y + step * LABEL_HEIGHT - 6, y + step * LABEL_HEIGHT + 6)
            for step in (0, -1, 1, -2, 2, -3, 3)
            for left in (x + DOT + 4, x - DOT - 4 - width)
        ]
        inside = [box for box in boxes if self._is_inside(box)] or boxes
        free = [box for box in inside if not any(_overlap(box, other) for other in self.taken)]
        left, right, _, bottom = box = (free or inside)[0]
        self.taken.append(box)
        place, kind = (right, "run-name end") if left < x else (left, "run-name")
        self.plot.write(name, place, bottom - 2, kind)

    def _is_inside(self, box: Box) -> bool:
        left, right, top, bottom = box
        across = self.plot.left <= left and right <= self.plot.width
        return across and self.plot.y(1) - 8 <= top and bottom <= self.plot.y(0)


def _overlap(first: Box, second: Box) -> bool:
    across = first[0] < second[1] and second[0] < first[1]
    return across and first[2] < second[3] and second[2] < first[3]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar from `left` to `right` (0..1): all of `count` pale, `own` of it dark in front."""

    left: float
    right: float
    count: int
    own: int
    tip: str


def height_axis(counts: Sequence[int]) -> tuple[Axis, str]:
    """An axis for counts: logarithmic where the small ones, which matter, would vanish."""
    least, most = min((n for n in counts if n), default=1), max(counts, default=1)
    if most < 100 * least:
        return count_axis(most), ""
    top = 10.0 ** math.ceil(math.log10(most * 1.05))
    decades = [(10.0**place, short(10.0**place)) for place in range(round(math.log10(top)) + 1)]
    return Axis(low=0.6, high=top, log=True, ticks=decades), " (log scale)"


def draw_bars(plot: Plot, bars: Sequence[Bar], y_label: str) -> None:
    """Bars with their y axis; every bar has a tooltip, empty ones are not drawn."""
    axis, scale = height_axis([bar.count for bar in bars])
    plot.y_axis(axis, y_label + scale)
    for bar in bars:
        left, right = plot.x(bar.left), plot.x(bar.right)
        gap = min(1.5, (right - left) / 6)
        width = max(right - left - gap, 0.8)
        for amount, kind in ((bar.count, "bar copied"), (bar.own, "bar")):
            if amount and not (kind == "bar copied" and bar.own == bar.count):
                plot.bar(left + gap / 2, width, axis.at(amount), kind, tip=bar.tip)


def draw_line(plot: Plot, points: Points, kind: str) -> None:
    """A line through (x, y, tooltip) with a dot on each."""
    if points:
        path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y, _ in points)
        plot.draw("polyline", points=path, class_=f"line {kind}")
    for x, y, tip in points:
        plot.draw("circle", cx=plot.x(x), cy=plot.y(y), r=3, class_=f"dot {kind}", tip=tip)


def draw_exposures(
    plot: Plot, lines: Mapping[str, Points], times: Sequence[int], highest: float
) -> None:
    """For each kind of line the bits of exposure by how often a canary was planted: (times, bits, tooltip)."""
    axis = linear_axis(max(highest, 3.0))
    plot.y_axis(axis, "bits")
    plot.level(axis.at(NEVER_SAW_BITS), "chance")
    for kind, known in lines.items():
        points = [(along(num, times), axis.at(bits), tip) for num, bits, tip in known]
        draw_line(plot, points, kind)
    plot.x_labels([(along(one, times), f"{one:,}") for one in times], "times planted")


def draw_violin(
    plot: Plot, middle: float, widths: Sequence[tuple[float, float]], reach: float, tip: str
) -> None:
    """A shape as wide as `reach` times each (height, width), mirrored about `middle`."""
    right = [(width, height) for height, width in widths]
    left = [(-width, height) for height, width in reversed(widths)]
    points = [f"{plot.x(middle) + reach * w:.1f},{plot.y(h):.1f}" for w, h in [*right, *left]]
    plot.draw("polygon", points=" ".join(points), class_="violin", tip=tip)
