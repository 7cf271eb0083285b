"""The experiment of adaptive DP as one HTML file, and as tables in the terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from markupsafe import Markup
from rich.table import Table as RichTable

from tightlip.core.figures import counted, number
from tightlip.experiments import adaptive_tables as runs
from tightlip.report.kit.plots import Plot, draw_exposures, draw_line, linear_axis
from tightlip.report.kit.table import NAMES, NEVER_SAW_BITS, NONE, Cell, Column, Table, plain_row
from tightlip.report.kit.table import Row as TableRow

EXPOSED = "Exposure by insertions"
STOPPED = " †"  # the terminal's mark of a run that its budget ended early


@dataclass(frozen=True, kw_only=True)
class AdaptivePage:
    """The page of the experiment.

    Holds:
        standing: in the tables δ, unit and standing are beside every ε.
    """

    files: ClassVar[str] = "experiments/adaptive"
    result: dict[str, Any]

    def content(self) -> dict[str, Any]:
        result = self.result
        return {
            "headline": runs.headline(result),
            "version": result["version"],
            "result": result,
            "sections": [_section(section) for section in result["corpora"]],
            "legend_of_ways": [(f"way-{mode}", way) for mode, way in runs.WAYS.items()],
            "paper": _paper_table(result),
            "paper_notes": [runs.PAPER_NOTE, *map(_ratio_words, result["ratios"])],
        }


def _section(section: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": section["name"],
        "about": about(section),
        "findings": list(runs.findings(section)),
        "stopped": runs.stopped_early(section),
        "runs": _runs_table(section),
        "by_third": _thirds_table(section),
        "thirds": [
            f"{name} ρ {number(third['mean_rho'])}"
            for name, third in zip(runs.THIRDS, section["rows"][0]["thirds"], strict=True)
        ],
        "plots": _plots(section),
        "promises": [
            (runs.name_of(row), runs.promise_words(row), row["because"] or "")
            for row in section["rows"]
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


def _runs_table(section: dict[str, Any]) -> Table:
    """Utility and exposure of each run, for the page."""
    names = ("", "σ", "ε", "steps", "loss", "perplexity")
    bits = [Column(f"{times:,}×", "bits") for times in runs.repetitions(section)]
    rows = []
    for heading, _, row in _runs_of(section):
        cells = [Cell(_sigma(row)), _promise(row), _steps(row), *map(Cell, _utility(row))]
        rows.append(_page_row(heading, row, cells, _bits(row)))
    return Table(columns=[*map(Column, names), *bits], rows=rows)


def _thirds_table(section: dict[str, Any]) -> Table:
    """Who pays and who is protected, for the page."""
    whats = [Column(what, third) for what in ("costs", "keeps", "bits") for third in runs.THIRDS]
    known = _runs_of(section)
    rows = [_page_row(heading, row, [_promise(row)], *_by_thirds(row)) for heading, _, row in known]
    return Table(columns=[Column(), Column("ε"), *whats], rows=rows)


def _runs_of(section: dict[str, Any]) -> Iterator[tuple[str, str, runs.Row]]:
    """Each run under its heading, and under one that fits a terminal."""
    for heading, kind, rows in runs.groups(section):
        at = {"no noise": kind, "same noise": f"σ = {rows[0]['sigma'] or 0:g}"}
        short = at.get(kind, f"ε = {runs.epsilon_words(rows[0])}")
        yield from ((heading, short, row) for row in rows)


def _page_row(heading: str, row: runs.Row, cells: list[Cell], *parts: list[str]) -> TableRow:
    """A run's line; each further part of it begins with a rule."""
    for part in parts:
        kinds = ["first"] + [""] * len(part)
        cells = cells + [Cell(words, kind=kind) for words, kind in zip(part, kinds, strict=False)]
    return TableRow(runs.WAYS[row["mode"]], cells, heading, f"way-{row['mode']}")


def _sigma(row: runs.Row) -> str:
    noise = row["noise_multiplier"]
    return NONE if row["mode"] == "none" or noise is None else number(noise)


def _promise(row: runs.Row) -> Cell:
    kind = "unproved" if row["mode"] == "as-published" else ""
    return Cell(runs.epsilon_words(row), runs.promise_words(row), kind)


def _steps(row: runs.Row) -> Cell:
    marks = ("budget spent", "unproved") if runs.is_cut_short(row) else ()
    return Cell(runs.steps_words(row), *marks)


def _utility(row: runs.Row) -> list[str]:
    return [number(row["loss_nats"]), number(row["perplexity"])]


def _bits(row: runs.Row) -> list[str]:
    return [number(entry["bits"]) for entry in row["exposure"]]


def _by_thirds(row: runs.Row) -> list[list[str]]:
    """What each third costs, what is kept of it, and its bits of exposure."""
    costs, keeps = (
        [_signed(third[name]) for third in row["thirds"]] for name in ("cost_nats", "kept_nats")
    )
    return [costs, keeps, [number(third["mean_bits"]) for third in row["exposure_by_third"]]]


def _signed(value: float | None) -> str:
    # Without + 0.0 a small loss would read -0.00.
    return number(value) if value is None else f"{round(value, 2) + 0.0:+.2f}"


def _paper_table(result: dict[str, Any]) -> Table:
    names = ("WikiText-103", "test loss", "test perplexity", "σ")
    rows = []
    for row in result["paper"]:
        noise = [NONE if row[name] is None else f"{row[name]:g}" for name in ("sigma", "epsilon")]
        known = (f"{row['loss']:.2f}", f"{row['perplexity']:,.2f}")
        rows.append(plain_row(row["model"], *known, *noise))
    return Table(columns=[*map(Column, names), Column("ε", "as published")], rows=rows)


def _ratio_words(ratio: dict[str, Any]) -> str:
    ours = "; ".join(f"{name} {value:.2f}" for name, value in ratio["ours"].items())
    return f"Perplexity of the adaptive run over DP's at σ {ratio['sigma']:g}: theirs {ratio['paper']:.2f}; ours: {ours}."


def terminal_tables(result: dict[str, Any]) -> list[RichTable]:
    """Utility and exposure, then thirds, of each corpus; last the paper's own table."""
    tables = [make(one) for one in result["corpora"] for make in (_printed_runs, _printed_thirds)]
    title, names = "The paper's own table (WikiText-103)", ("model", "loss", "perplexity", "σ", "ε")
    return [*tables, _printed(title, names, _paper_table(result).rows)]


def _printed_runs(section: dict[str, Any]) -> RichTable:
    plain = next(row for row in section["rows"] if row["mode"] == "dp")
    title = f"{section['name']}: δ {plain['delta']:g}, per {section['unit']}"
    times = [f"{one:,}×\nbits" for one in runs.repetitions(section)]
    rows = []
    for _, heading, row in _runs_of(section):
        promised = (_sigma(row), runs.epsilon_words(row), row["standing"])
        rows.append(_short_row(heading, row, *promised, *_utility(row), *_bits(row)))
    return _printed(title, ("way", "σ", "ε", "standing", "loss", "perplexity", *times), rows)


def _printed_thirds(section: dict[str, Any]) -> RichTable:
    short = ("ord.", "mid.", "rare")
    columns = [f"{what}\n{third}" for what in ("costs", "keeps", "bits") for third in short]
    title = f"{section['name']}: who pays, who is protected, by thirds of ρ"
    rows = [
        _short_row(heading, row, *chain.from_iterable(_by_thirds(row)))
        for _, heading, row in _runs_of(section)
    ]
    return _printed(title, ("way", *columns), rows)


def _short_row(heading: str, row: runs.Row, *words: str) -> TableRow:
    way = runs.WAYS[row["mode"]] + (STOPPED if runs.is_cut_short(row) else "")
    return plain_row(way, *words, section=heading)


def _printed(title: str, names: Sequence[str], rows: Sequence[TableRow]) -> RichTable:
    """With headings that would not fit on one line, and names that do not break."""
    columns = [NAMES._replace(name=names[0])]
    columns += [Column(name, left=name == "standing") for name in names[1:]]
    return Table(title=f"\n{title}", columns=columns, rows=rows).printed()


def _plots(section: dict[str, Any]) -> list[tuple[str, str, Markup]]:
    if (sigma := next(iter(runs.noise_levels(section)), None)) is None:
        return []
    private = runs.private_runs(section["rows"], sigma, "equal epsilon")
    every = [section["rows"][0], *private]
    at = f"At the ε of DP at σ {sigma:g}"
    exposed = _exposures(every, runs.repetitions(section))
    costs = _by_third(private, "thirds", "cost_nats", "nats a token")
    bits = _by_third(every, "exposure_by_third", "mean_bits", "bits")
    return [
        (EXPOSED, f"{at}, and without noise. Dotted: a model that never saw them.", exposed),
        ("Who pays", f"{at}. Nats a token beyond no DP, on held-out text.", costs),
        ("Who is protected", f"{at}, and without noise. Canaries after public documents.", bits),
    ]


def _exposures(rows: Sequence[runs.Row], times: Sequence[int]) -> Markup:
    plot = _plot(EXPOSED, "Bits of the planted number, by how often it was planted.")
    lines = {
        f"way-{row['mode']}": [(e["repetitions"], e["bits"], _tip(row, e)) for e in row["exposure"]]
        for row in rows
    }
    highest = max(bits for points in lines.values() for _, bits, _ in points)
    draw_exposures(plot, lines, times, highest)
    return plot.svg()


def _tip(row: runs.Row, entry: dict[str, Any]) -> str:
    return f"{runs.name_of(row)}, planted {entry['repetitions']:,} times: {entry['bits']:.1f} bits"


def _by_third(rows: Sequence[runs.Row], part: str, name: str, label: str) -> Markup:
    title = f"{label} by thirds of the weight"
    plot = _plot(title, "Ordinary, middling and rare text, for each way.")
    values = [third[name] for row in rows for third in row[part] if third[name] is not None]
    axis = linear_axis(max([*values, 0.01]), low=min([*values, 0.0]))
    plot.y_axis(axis, label)
    if name == "mean_bits":
        plot.level(axis.at(NEVER_SAW_BITS), "chance")
    places = [0.1, 0.5, 0.9]
    for row in rows:
        way = runs.name_of(row)
        points = [
            (place, axis.at(third[name]), f"{way}, {third['third']}: {third[name]:.3g} {label}")
            for place, third in zip(places, row[part], strict=True)
            if third[name] is not None
        ]
        draw_line(plot, points, f"way-{row['mode']}")
    plot.x_labels(list(zip(places, runs.THIRDS, strict=True)), "thirds of ρ")
    return plot.svg()


def _plot(title: str, description: str) -> Plot:
    return Plot(title=title, description=description, width=340, height=240)
