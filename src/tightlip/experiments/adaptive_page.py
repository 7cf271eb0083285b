"""The experiment of adaptive DP as one HTML file, and as tables in the terminal."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from tightlip.core.figures import counted, number
from tightlip.experiments.adaptive_tables import (
    NEVER_SAW_BITS,
    PAPER_NOTE,
    THIRDS,
    WAYS,
    Row,
    epsilon_words,
    find,
    findings,
    groups,
    headline,
    is_cut_short,
    name_of,
    promise_words,
    repetitions,
    steps_words,
    stopped_early,
)
from tightlip.report.comparison import with_flags
from tightlip.report.kit import asset, policy, template
from tightlip.report.kit.plots import Axis, Plot, draw_line, linear_axis

if TYPE_CHECKING:
    from rich.table import Table


STOPPED = " †"  # the terminal's mark of a run that its budget ended early
MEANINGS = (
    ("σ", "The noise multiplier as set. What as published and scale really add is σ times a weight of at most 1."),
    ("ε, δ", "What the ledger says after the run, and for whom. Without the word proved it is no guarantee."),
    ("Steps", "Updates of the model. 6 of 40: the privacy budget was spent after 6, and the run ended there rather than pass its ε."),
    ("Loss, perplexity", "Nats a token on held-out text, and e to that power."),
    ("Exposure", "Bits by which the model prefers the planted number to any other: of six digits 19.9 at most. A model that never saw it has 1.44 on average and more than b with probability 2^-b."),
    ("Thirds", "Documents by their weight ρ: the least surprising to the public model are ordinary, the most surprising rare."),
    ("Costs", "Loss on held-out text of that third beyond the run without noise: who pays."),
    ("Keeps", "Loss on held-out text less that on text trained on, of the same third: what the model keeps of its training text."),
    ("Bits by third", "Mean exposure of canaries of their own: two common words planted after ordinary, middling and rare public documents, in thirds by ρ. Who is protected; 10 at most."),
)  # fmt: skip


def render_adaptive(result: dict[str, Any]) -> str:
    """The page of the experiment, as text.

    Holds:
        alone: it names no other file and no address, and runs no script.
        standing: in the tables δ, unit and standing are beside every ε.
    """
    style = (
        asset("report/kit/page.css")
        + asset("report/kit/tables.css")
        + asset("experiments/adaptive.css")
    )
    return str(
        template("experiments/adaptive.html.jinja").render(
            style=Markup(style),
            policy=policy(style),
            result=result,
            headline=headline(result),
            sections=[_section(section) for section in result["corpora"]],
            ways=WAYS,
            paper=[_paper_cells(row) for row in result["paper"]],
            paper_note=PAPER_NOTE,
            ratios=[_ratio_words(ratio) for ratio in result["ratios"]],
            meanings=MEANINGS,
        )
    )


def _section(section: dict[str, Any]) -> dict[str, Any]:
    parts = [(heading, [cells(row) for row in rows]) for heading, _, rows in groups(section)]
    return {
        "name": section["name"],
        "about": about(section),
        "findings": [with_flags(sentence) for sentence in findings(section)],
        "stopped": stopped_early(section),
        "repetitions": [f"{one:,}×" for one in repetitions(section)],
        "groups": parts,
        "thirds": [
            (name, f"ρ {number(third['mean_rho'])}")
            for name, third in zip(THIRDS, section["rows"][0]["thirds"], strict=True)
        ],
        "plots": _plots(section),
        "promises": [
            (name_of(row), promise_words(row), row["because"] or "") for row in section["rows"]
        ],
    }


def about(section: dict[str, Any]) -> str:
    """Whose text, who is protected, and what the weights are like."""
    users = "" if section["num_users"] is None else f" of {counted(section['num_users'], 'user')}"
    few = ""
    if section["num_users"] is not None and section["unit"] == "example":
        few = " There are too few users to hide a whole one, so the private runs hide single documents."
    return (
        f"{counted(section['num_documents'], 'document')}{users}, canaries among them; the unit of privacy is one "
        f"{section['unit']}.{few} The mean weight is {number(section['mean_weight'])}, from constants of the public "
        f"text in all modes. Stretched over the corpus itself, as in the paper, it would be "
        f"{number(section['mean_minmax_weight'])}."
    )


def cells(row: Row) -> dict[str, Any]:
    """One run's figures as printed, in the order of the tables' columns."""
    noise = row["noise_multiplier"]
    return {
        "mode": row["mode"],
        "way": WAYS[row["mode"]],
        "sigma": "–" if row["mode"] == "none" or noise is None else number(noise),
        "epsilon": epsilon_words(row),
        "promise": promise_words(row),
        "steps": steps_words(row),
        "cut_short": is_cut_short(row),
        "loss": number(row["loss_nats"]),
        "perplexity": number(row["perplexity"]),
        "exposure": [number(entry["bits"]) for entry in row["exposure"]],
        "costs": [_signed(third["cost_nats"]) for third in row["thirds"]],
        "keeps": [_signed(third["kept_nats"]) for third in row["thirds"]],
        "bits": [number(third["mean_bits"]) for third in row["exposure_by_third"]],
    }


def _signed(value: float | None) -> str:
    # Without + 0.0 a small loss would read -0.00.
    return number(value) if value is None else f"{round(value, 2) + 0.0:+.2f}"


def _paper_cells(row: Row) -> list[str]:
    known = [f"{row['loss']:.2f}", f"{row['perplexity']:,.2f}"]
    noise = ["–" if row[name] is None else f"{row[name]:g}" for name in ("sigma", "epsilon")]
    return [row["model"], *known, *noise]


def _ratio_words(ratio: dict[str, Any]) -> str:
    ours = "; ".join(f"{name} {value:.2f}" for name, value in ratio["ours"].items())
    return f"Perplexity of the adaptive run over DP's at σ {ratio['sigma']:g}: theirs {ratio['paper']:.2f}; ours: {ours}."


# Plots
def _plots(section: dict[str, Any]) -> list[tuple[str, str, Markup]]:
    sigmas = sorted({row["sigma"] for row in section["rows"] if row["sigma"] is not None})
    drawn = []
    for sigma in sigmas[:1]:
        found = [find(section["rows"], mode, sigma, "equal epsilon") for mode in list(WAYS)[1:]]
        rows = [row for row in found if row is not None]
        at = f"At the ε of DP at σ {sigma:g}"
        plain = section["rows"][0]
        drawn += [
            ("Exposure by insertions", f"{at}, and without noise. Dotted: a model that never saw them.", _exposures([plain, *rows], repetitions(section))),
            ("Who pays", f"{at}. Nats a token beyond no DP, on held-out text.", _by_third(rows, "thirds", "cost_nats", "nats a token")),
            ("Who is protected", f"{at}, and without noise. Canaries after public documents.", _by_third([plain, *rows], "exposure_by_third", "mean_bits", "bits")),
        ]  # fmt: skip
    return drawn


def _exposures(rows: Sequence[Row], times: Sequence[int]) -> Markup:
    plot = _plot(
        "Exposure by insertions", "Bits of the planted number, by how often it was planted."
    )
    axis = linear_axis(max(3.0, *(entry["bits"] for row in rows for entry in row["exposure"])))
    plot.y_axis(axis, "bits")
    _never_saw(plot, axis)
    along = {one: _share(math.log(one), [math.log(each) for each in times]) for one in times}
    for row in rows:
        points = [
            (along[e["repetitions"]], axis.at(e["bits"]), f"{name_of(row)}, planted {e['repetitions']:,} times: {e['bits']:.1f} bits")
            for e in row["exposure"]
        ]  # fmt: skip
        draw_line(plot, points, f"way-{row['mode']}")
    plot.x_labels([(along[one], f"{one:,}") for one in times], "times planted")
    return plot.svg()


def _by_third(rows: Sequence[Row], part: str, name: str, label: str) -> Markup:
    plot = _plot(
        f"{label} by thirds of the weight", "Ordinary, middling and rare text, for each way."
    )
    values = [third[name] for row in rows for third in row[part] if third[name] is not None]
    axis = linear_axis(max([*values, 0.01]), low=min([*values, 0.0]))
    plot.y_axis(axis, label)
    if name == "mean_bits":
        _never_saw(plot, axis)
    places = [0.1, 0.5, 0.9]
    for row in rows:
        points = [
            (place, axis.at(third[name]), f"{name_of(row)}, {third['third']}: {third[name]:.3g} {label}")
            for place, third in zip(places, row[part], strict=True)
            if third[name] is not None
        ]  # fmt: skip
        draw_line(plot, points, f"way-{row['mode']}")
    plot.x_labels(list(zip(places, THIRDS, strict=True)), "thirds of ρ")
    return plot.svg()


def _plot(title: str, description: str) -> Plot:
    return Plot(title=title, description=description, width=340, height=240)


def _never_saw(plot: Plot, axis: Axis) -> None:
    height = plot.y(axis.at(NEVER_SAW_BITS))
    plot.draw(
        "line", x1=plot.left, x2=plot.width - plot.right, y1=height, y2=height, class_="chance"
    )


def _share(value: float, along: Sequence[float]) -> float:
    low, high = min(along), max(along)
    # Not to the very ends, where a tick's label has no room.
    return 0.06 + 0.88 * (value - low) / (high - low) if high > low else 0.5


# The terminal
def terminal_tables(result: dict[str, Any]) -> list["Table"]:
    """Utility and exposure, then thirds, of each corpus; last the paper's own table."""
    tables = []
    for section in result["corpora"]:
        tables += [_main_table(section), _thirds_table(section)]
    paper = _table("The paper's own table (WikiText-103)", "model", "loss", "perplexity", "σ", "ε")
    for row in result["paper"]:
        paper.add_row(*_paper_cells(row))
    return [*tables, paper]


def _main_table(section: dict[str, Any]) -> "Table":
    times = [f"{one:,}×\nbits" for one in repetitions(section)]
    promised = next(row for row in section["rows"] if row["mode"] == "dp")
    title = f"{section['name']}: δ {promised['delta']:g}, per {section['unit']}"
    table = _table(title, "way", "σ", "ε", "standing", "loss", "perplexity", *times)
    for heading, rows in _short_groups(section):
        table.add_row(f"[bold]{heading}[/]")
        for each, row in ((each, cells(each)) for each in rows):
            way = f"  {row['way']}" + (STOPPED if row["cut_short"] else "")
            table.add_row(
                *(way, row["sigma"], row["epsilon"], each["standing"]),
                *(row["loss"], row["perplexity"], *row["exposure"]),
            )
    return table


def _thirds_table(section: dict[str, Any]) -> "Table":
    thirds = ("ord.", "mid.", "rare")
    columns = [f"{what}\n{third}" for what in ("costs", "keeps", "bits") for third in thirds]
    title = f"{section['name']}: who pays, who is protected, by thirds of ρ"
    table = _table(title, "way", *columns)
    for heading, rows in _short_groups(section):
        table.add_row(f"[bold]{heading}[/]")
        for row in map(cells, rows):
            way = f"  {row['way']}" + (STOPPED if row["cut_short"] else "")
            table.add_row(way, *row["costs"], *row["keeps"], *row["bits"])
    return table


def _short_groups(section: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """The groups with headings that fit a terminal."""
    short = []
    for _, kind, rows in groups(section):
        first = rows[0]
        at = {"no noise": "no noise", "same noise": f"σ = {first['sigma'] or 0:g}"}
        short.append((at.get(kind, f"ε = {epsilon_words(first)}"), rows))
    return short


def _table(title: str, *columns: str) -> "Table":
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        left = place == 0 or column == "standing"
        table.add_column(column, justify="left" if left else "right", no_wrap=place == 0)
    return table
