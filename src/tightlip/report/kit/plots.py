"""Small SVG plots drawn in Python: axes, bars, lines, and a tooltip on every mark.

Colours come from classes, so that the page's style sheet can turn them for a dark
screen; nothing here carries a style attribute, which the page's policy forbids.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

CHARACTER_WIDTH = 6.4


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Values to 0..1 along an axis, and the ticks to print."""

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]

    def at(self, value: float) -> float:
        """Where a value stands between the axis' ends, never outside them."""
        low, high, value = (
            math.log10(x) if self.log else x for x in (self.low, self.high, max(value, self.low))
        )
        return min(1.0, (value - low) / (high - low)) if high > low else 0.5


def linear_axis(high: float, *, low: float = 0.0, most_ticks: int = 5) -> Axis:
    """From `low` to a round number at or above `high`.

    >>> [label for _, label in linear_axis(230).ticks]
    ['0', '50', '100', '150', '200', '250']
    """
    step = _round_step((high - low) / most_ticks) if high > low else 1.0
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [place * step for place in range(first, max(last, first + 1) + 1)]
    return Axis(
        low=ticks[0], high=ticks[-1], log=False, ticks=[(tick, short(tick)) for tick in ticks]
    )


def count_axis(high: int) -> Axis:
    """A linear axis that ticks at whole numbers."""
    axis = linear_axis(max(high, 1))
    return Axis(
        low=axis.low, high=axis.high, log=False, ticks=[t for t in axis.ticks if t[0] == int(t[0])]
    )


def log_axis(low: float, high: float) -> Axis:
    """Ticks at powers of ten; at 2 and 5 as well where there is room."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    width = math.log10(high / low)
    steps: tuple[float, ...] = (1, 2, 5) if width < 2.4 else (1,)
    if width < 0.7:
        steps = (1, 1.5, 2, 3, 4, 5, 7) if width > 0.25 else tuple(1 + x / 10 for x in range(90))
    ticks = [
        step * 10.0**decade for decade in decades[:: max(1, math.ceil(width / 7))] for step in steps
    ]
    inside = [tick for tick in ticks if low * 0.9999 <= tick <= high * 1.0001]
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

    def y_axis(self, axis: Axis, label: str) -> None:
        for value, name in axis.ticks:
            height = self.y(axis.at(value))
            self.draw(
                "line",
                x1=self.left,
                x2=self.width - self.right,
                y1=height,
                y2=height,
                class_="grid",
            )
            self.draw("text", name, x=self.left - 7, y=height + 3.5, class_="tick end")
        middle = self.y(0.5)
        self.draw(
            "text",
            label,
            x=12,
            y=middle,
            transform=f"rotate(-90 12 {middle:.1f})",
            class_="label middle",
        )

    def x_axis(self, axis: Axis, label: str) -> None:
        self.x_labels([(axis.at(value), name) for value, name in axis.ticks], label)

    def x_labels(self, places: Sequence[tuple[float, str]], label: str) -> None:
        """Tick labels at 0..1, leaving out those that would run into the one before."""
        self.draw(
            "line",
            x1=self.left,
            x2=self.width - self.right,
            y1=self.y(0),
            y2=self.y(0),
            class_="axis",
        )
        free_from = 0.0
        for share, name in places:
            half = len(name) * CHARACTER_WIDTH / 2
            if self.x(share) - half >= free_from and self.x(share) + half <= self.width + 4:
                self.draw("text", name, x=self.x(share), y=self.y(0) + 16, class_="tick middle")
                free_from = self.x(share) + half + 5
        self.draw("text", label, x=self.x(0.5), y=self.height - 7, class_="label middle")

    def mark_x(self, share: float, words: str, *, to_left: bool = False) -> None:
        """A dashed upright line with a few words beside its top."""
        across = self.x(share)
        self.draw("line", x1=across, x2=across, y1=self.y(0), y2=self.y(1), class_="mark")
        self.draw(
            "text",
            words,
            x=across + (-5 if to_left else 5),
            y=self.y(1) + 9,
            class_="note end" if to_left else "note",
        )

    def svg(self, *, wide: bool = False) -> Markup:
        opening = Markup(
            '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="plot{}">'
        ).format(
            self.width, self.height, f"{self.title}. {self.description}", " wide" if wide else ""
        )
        return opening + Markup("").join(self.parts) + Markup("</svg>")


def _short(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


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
        for amount, kind in ((bar.count, "bar copied"), (bar.own, "bar")):
            if amount and not (kind == "bar copied" and bar.own == bar.count):
                _draw_bar(plot, bar, axis.at(amount), kind)


def _draw_bar(plot: Plot, bar: Bar, share: float, kind: str) -> None:
    left, right, top = plot.x(bar.left), plot.x(bar.right), plot.y(share)
    gap = min(1.5, (right - left) / 6)
    plot.draw(
        "rect",
        x=left + gap / 2,
        y=top,
        width=max(right - left - gap, 0.8),
        height=plot.y(0) - top,
        class_=kind,
        tip=bar.tip,
    )


def draw_line(plot: Plot, points: Sequence[tuple[float, float, str]], kind: str) -> None:
    """A line through (x, y, tooltip) with a dot on each."""
    if not points:
        return
    path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y, _ in points)
    plot.draw("polyline", points=path, class_=f"line {kind}")
    for x, y, tip in points:
        plot.draw("circle", cx=plot.x(x), cy=plot.y(y), r=3, class_=f"dot {kind}", tip=tip)


def draw_violin(
    plot: Plot, middle: float, widths: Sequence[tuple[float, float]], reach: float, tip: str
) -> None:
    """A shape as wide as `reach` times each (height, width), mirrored about `middle`."""
    edge: Callable[[float, float, int], str] = lambda height, width, side: (  # noqa: E731
        f"{plot.x(middle) + side * width * reach:.1f},{plot.y(height):.1f}"
    )
    right = [edge(height, width, 1) for height, width in widths]
    left = [edge(height, width, -1) for height, width in reversed(widths)]
    plot.draw("polygon", points=" ".join([*right, *left]), class_="violin", tip=tip)
