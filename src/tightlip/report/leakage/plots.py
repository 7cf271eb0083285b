"""Plots of the leakage report: its unique sequences, and what a model gives away while it is trained.

The latter are Figure 5 of the report's paper, over the snapshots: perplexity on train and
validation (a), lengths of the unique sequences (b), their perplexities (c).
"""

import math
from typing import Any

import numpy as np
from markupsafe import Markup

from tightlip.core.figures import count, counted, number
from tightlip.report.kit import plots
from tightlip.report.leakage import tallies
from tightlip.report.leakage.words import epoch_name, is_best

MOST_BARS = 34
# One bar or shape per snapshot; past this many they would be thinner than a pixel.
MOST_DRAWN = 40
MOST_POINTS = 200
VIOLIN_BINS = 28
# Lengths this rare beside the commonest share one last group, so that the others get room.
RARE = 0.05


def length_plot(tally: tallies.Tally) -> Markup:
    """Unique sequences by number of tokens."""
    plot = plots.Plot(
        title="Unique sequences by length",
        description="Bars count unique sequences of each number of tokens.",
    )
    bars = tally.lengths.bars()
    own = [n for _, n in tally.own_lengths.bars()] + [0] * len(bars)
    step = 1 / max(len(bars), 8)
    drawn = []
    for i, (label, n) in enumerate(bars):
        tip = _bar_tip(f"{label} tokens", n, own[i])
        drawn.append(plots.Bar(left=i * step, right=(i + 1) * step, count=n, own=own[i], tip=tip))
    plots.draw_bars(plot, drawn, "unique sequences")
    ticks = [((i + 0.5) * step, bar[0]) for i, bar in enumerate(bars) if _is_labelled(i, bars)]
    plot.x_labels(ticks, "length in tokens")
    return plot.svg()


def _is_labelled(place: int, bars: list[tuple[str, int]]) -> bool:
    """With few bars every length; with many 1, 5, 10, 15 and the ranges."""
    return len(bars) <= 14 or place in (0, 4, 9, 14) or place >= 20


def perplexity_plot(tally: tallies.Tally) -> Markup:
    """Unique sequences by the lowest perplexity each was completed with."""
    plot = plots.Plot(
        title="Unique sequences by perplexity",
        description="Bars count unique sequences; the further left, the surer the model.",
    )
    axis = _draw_log_bars(plot, tally.perplexities, tally.own_perplexities, "perplexity")
    plot.x_axis(axis, "perplexity (the further left, the surer)")
    return plot.svg()


def ratio_plot(tally: tallies.Tally) -> Markup:
    """Unique sequences by how much less surprising they are to this model than to the public one."""
    plot = plots.Plot(
        title="Unique sequences by ratio",
        description="Bars count unique sequences; right of 1 the model knows more than the public one.",
    )
    axis = _draw_log_bars(plot, tally.ratios, tally.own_ratios, "ratio")
    if axis.low < 1 < axis.high:
        plot.mark_x(axis.at(1), "1: no difference")
    plot.x_axis(axis, "ratio (the further right, the worse)")
    return plot.svg()


def _draw_log_bars(
    plot: plots.Plot, every: tallies.LogHistogram, own: tallies.LogHistogram, what: str
) -> plots.Axis:
    """Bars over a logarithmic axis, which is returned; `every` is not empty."""
    bars = every.bars(MOST_BARS)
    axis = plots.log_axis(bars[0][0], max(bars[-1][1], bars[0][0] * 2))
    drawn = []
    for (low, high, n), (_, _, n_own) in zip(bars, own.bars(MOST_BARS, every.span()), strict=True):
        tip = _bar_tip(f"{what} {number(low)} to {number(high)}", n, n_own)
        drawn.append(plots.Bar(left=axis.at(low), right=axis.at(high), count=n, own=n_own, tip=tip))
    plots.draw_bars(plot, drawn, "unique sequences")
    return axis


def _bar_tip(what: str, n: int, own: int) -> str:
    copied = f", {count(n - own)} of them copied" if n > own else ""
    return f"{what}: {counted(n, 'unique sequence')}{copied}"


def thinned(snapshots: dict[str, Any], most: int = MOST_DRAWN) -> list[dict[str, Any]]:
    """At most `most` snapshots: evenly spread, always the first, the last and the best.

    Holds:
        ends_stay: the first and the last are always there, and so is the best.
    """
    every = snapshots["snapshots"]
    if len(every) <= most:
        return list(every)
    best = {place for place, one in enumerate(every) if is_best(one, snapshots)}
    evenly = np.linspace(0, len(every) - 1, most - len(best)).round().astype(int).tolist()
    return [every[place] for place in sorted({*evenly, *best})]


def perplexities_by_epoch(snapshots: dict[str, Any]) -> Markup:
    """Figure 5a: perplexity on train and validation at each snapshot."""
    plot = plots.Plot(
        title="Perplexity per epoch",
        description="Two lines: the training corpus and the validation corpus.",
        width=460,
        height=290,
    )
    shown = thinned(snapshots, MOST_POINTS)
    lines = {word: _points(shown, f"{word}_perplexity") for word in ("train", "validation")}
    if heights := [value for points in lines.values() for _, value in points]:
        axis = _height_axis(min(heights), max(heights))
        plot.y_axis(axis, "perplexity" + (" (log scale)" if axis.log else ""))
        for word, points in lines.items():
            dots = []
            for place, value in points:
                tip = f"epoch {epoch_name(shown[place])}: {word} perplexity {number(value)}"
                dots.append(((place + 0.5) / len(shown), axis.at(value), tip))
            plots.draw_line(plot, dots, word)
    for place, one in enumerate(shown):
        if is_best(one, snapshots):
            plot.mark_x((place + 0.5) / len(shown), "best validation")
    plot.x_labels(_epoch_labels(plot, shown), "epoch")
    return plot.svg()


def _points(shown: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(place, one[key]) for place, one in enumerate(shown) if _is_finite(one.get(key))]


def _height_axis(low: float, high: float) -> plots.Axis:
    if low > 0 and high > 8 * low:
        return plots.log_axis(low * 0.9, high * 1.1)
    return plots.linear_axis(high, low=max(0.0, low - 0.1 * (high - low)) if high > low else 0.0)


def lengths_plot(snapshots: dict[str, Any]) -> Markup:
    """Figure 5b: lengths of unique sequences, one bar per snapshot, later ones darker."""
    plot = _wide_plot(
        "Lengths of unique sequences per epoch",
        "For each length one bar per snapshot; the later the epoch, the stronger the colour.",
    )
    shown = thinned(snapshots)
    labels, counts = grouped_lengths(shown)
    axis = plots.count_axis(int(counts.max(initial=1)))
    plot.y_axis(axis, "unique sequences")
    group = 1 / max(len(labels), 4)
    bar = 0.84 * group / len(shown)
    width = max(0.95 * bar * plot.x_span, 0.6)
    for place, one in enumerate(shown):
        strength = f"{0.15 + 0.85 * (place + 1) / len(shown):.2f}"
        for column in np.flatnonzero(counts[place]).tolist():
            num = int(counts[place, column])
            tip = f"epoch {epoch_name(one)}, {labels[column]} tokens: {counted(num, 'unique sequence')}"
            left = plot.x((column + 0.08) * group + place * bar)
            plot.bar(left, width, axis.at(num), "bar", tip=tip, fill_opacity=strength)
    ticks = [((column + 0.5) * group, label) for column, label in enumerate(labels)]
    plot.x_labels(ticks, "length in tokens")
    return plot.svg(wide=True)


def _wide_plot(title: str, description: str) -> plots.Plot:
    return plots.Plot(title=title, description=description, width=580, height=310, left=52)


def grouped_lengths(shown: list[dict[str, Any]]) -> tuple[list[str], np.ndarray]:
    """Labels of the length groups, and unique sequences in each: one row per snapshot.

    Holds:
        nothing_lost: a row sums to that snapshot's unique sequences.
    """
    counts = np.stack([_lengths(one).counts for one in shown])
    common = np.flatnonzero(counts.max(axis=0) > RARE * counts.max(initial=1))
    last = int(common[-1]) + 1 if len(common) else 1
    rest = counts[:, last:].sum(axis=1, keepdims=True)
    labels = [tallies.length_label(place) for place in range(last)]
    if rest.any():
        labels.append(f"{tallies.LENGTH_STARTS[last]}+")
        return labels, np.hstack([counts[:, :last], rest])
    return labels, counts[:, :last]


def _lengths(snapshot: dict[str, Any]) -> tallies.LengthHistogram:
    histogram = tallies.LengthHistogram()
    num_by_length = snapshot.get("unique_lengths") or {}
    lengths = np.array([int(length) for length in num_by_length], dtype=np.int64)
    histogram.add(lengths, np.array([*num_by_length.values()], dtype=np.int64))
    return histogram


def violins_plot(snapshots: dict[str, Any]) -> Markup:
    """Figure 5c: perplexities of unique sequences, as wide as there are many of them."""
    plot = _wide_plot(
        "Perplexities of unique sequences per epoch",
        "One shape per snapshot, as wide at each perplexity as there are unique sequences there.",
    )
    shown = thinned(snapshots)
    samples = [_sample(one) for one in shown]
    highest = max((float(sample.max(initial=1.0)) for sample in samples), default=1.0)
    axis = plots.log_axis(1.0, max(1.05 * highest, 2.0))
    plot.y_axis(axis, "perplexity (log scale)")
    edges = np.geomspace(axis.low, axis.high, VIOLIN_BINS + 1)
    bins = [_estimated(sample, one, edges) for sample, one in zip(samples, shown, strict=True)]
    most = max(float(counts.max()) for counts in bins)
    for place, (one, sample) in enumerate(zip(shown, samples, strict=True)):
        if len(sample):
            widths = _outline(axis, edges, bins[place] / most)
            middle, reach = (place + 0.5) / len(shown), 0.47 * plot.x_span / len(shown)
            plots.draw_violin(plot, middle, widths, reach, _violin_tip(one, sample))
    plot.x_labels(_epoch_labels(plot, shown), "epoch")
    return plot.svg(wide=True)


def _sample(snapshot: dict[str, Any]) -> np.ndarray:
    finite = [value for value in snapshot.get("unique_perplexities") or [] if _is_finite(value)]
    # 1e12: past any meaning, and far from overflow.
    return np.clip(np.array(finite, dtype=float), 1.0, 1e12)


def _estimated(sample: np.ndarray, snapshot: dict[str, Any], edges: np.ndarray) -> np.ndarray:
    """Unique sequences per bin: the sample, scaled up to what was found."""
    unique = snapshot["summary"].get("unique") or len(sample)
    return np.histogram(sample, edges)[0] * (unique / max(len(sample), 1))


def _violin_tip(snapshot: dict[str, Any], sample: np.ndarray) -> str:
    unique = counted(snapshot["summary"].get("unique") or len(sample), "unique sequence")
    below = count(round(100 * float((sample < 3).mean())))
    return f"epoch {epoch_name(snapshot)}: {unique}, median perplexity {number(np.median(sample))}, {below}% below 3"


def _outline(axis: plots.Axis, edges: np.ndarray, widths: np.ndarray) -> list[tuple[float, float]]:
    """(height, width) from the first occupied bin to the last; a hair where one is empty."""
    occupied = np.flatnonzero(widths)
    first, last = int(occupied[0]), int(occupied[-1])
    middles = np.sqrt(edges[:-1] * edges[1:])
    inside = [(float(middles[place]), float(widths[place])) for place in range(first, last + 1)]
    ends = [(float(edges[first]), inside[0][1]), *inside, (float(edges[last + 1]), inside[-1][1])]
    return [(axis.at(height), max(width, 0.03)) for height, width in ends]


def _epoch_labels(plot: plots.Plot, shown: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Every epoch where there is room, else every second, third, …"""
    widest = max(len(epoch_name(one)) for one in shown) * plots.CHARACTER_WIDTH + 6
    places = range(0, len(shown), math.ceil(widest * len(shown) / plot.x_span))
    return [((place + 0.5) / len(shown), epoch_name(shown[place])) for place in places]


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)
