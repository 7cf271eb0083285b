"""The unique sequences drawn: by length, by perplexity and by ratio."""

from markupsafe import Markup

from tightlip.report.plots import Axis, Bar, Plot, draw_bars, log_axis
from tightlip.report.tallies import LogHistogram, Tally
from tightlip.report.words import count, counted, number

MOST_BARS = 34


def length_plot(tally: Tally) -> Markup:
    """Unique sequences by number of tokens."""
    plot = Plot(
        title="Unique sequences by length",
        description="Bars count unique sequences of each number of tokens.",
    )
    bars = tally.lengths.bars()
    own = [n for _, n in tally.own_lengths.bars()] + [0] * len(bars)
    step = 1 / max(len(bars), 8)
    draw_bars(
        plot,
        [
            Bar(
                left=i * step,
                right=(i + 1) * step,
                count=n,
                own=own[i],
                tip=_bar_tip(f"{label} tokens", n, own[i]),
            )
            for i, (label, n) in enumerate(bars)
        ],
        "unique sequences",
    )
    plot.x_labels(
        [((i + 0.5) * step, label) for i, (label, _) in enumerate(bars) if _is_labelled(i, bars)],
        "length in tokens",
    )
    return plot.svg()


def _is_labelled(place: int, bars: list[tuple[str, int]]) -> bool:
    """With few bars every length; with many 1, 5, 10, 15 and the ranges."""
    return len(bars) <= 14 or place in (0, 4, 9, 14) or place >= 20


def perplexity_plot(tally: Tally) -> Markup:
    """Unique sequences by the lowest perplexity each was completed with."""
    plot = Plot(
        title="Unique sequences by perplexity",
        description="Bars count unique sequences; the further left, the surer the model.",
    )
    axis = _draw_log_bars(
        plot, tally.perplexities, tally.own_perplexities, "perplexity", lowest=1.0
    )
    if axis is not None:
        plot.x_axis(axis, "perplexity (the further left, the surer)")
    return plot.svg()


def ratio_plot(tally: Tally) -> Markup:
    """Unique sequences by how much less surprising they are to this model than to the public one."""
    plot = Plot(
        title="Unique sequences by ratio",
        description="Bars count unique sequences; right of 1 the model knows more than the public one.",
    )
    axis = _draw_log_bars(plot, tally.ratios, tally.own_ratios, "ratio")
    if axis is not None:
        if axis.low < 1 < axis.high:
            plot.mark_x(axis.at(1), "1: no difference", to_left=axis.at(1) > 0.6)
        plot.x_axis(axis, "ratio (the further right, the worse)")
    return plot.svg()


def _draw_log_bars(
    plot: Plot, every: LogHistogram, own: LogHistogram, what: str, *, lowest: float = 0.0
) -> Axis | None:
    """Bars over a logarithmic axis, which is returned; None when there is nothing to draw."""
    bars = every.bars(MOST_BARS)
    if not bars:
        return None
    axis = log_axis(max(bars[0][0], lowest), max(bars[-1][1], bars[0][0] * 2))
    drawn = []
    for (low, high, n), (_, _, n_own) in zip(bars, own.bars(MOST_BARS, every.span()), strict=True):
        tip = _bar_tip(f"{what} {number(low)} to {number(high)}", n, n_own)
        drawn.append(Bar(left=axis.at(low), right=axis.at(high), count=n, own=n_own, tip=tip))
    draw_bars(plot, drawn, "unique sequences")
    return axis


def _bar_tip(what: str, n: int, own: int) -> str:
    copied = f", {count(n - own)} of them copied" if n > own else ""
    return f"{what}: {counted(n, 'unique sequence')}{copied}"
