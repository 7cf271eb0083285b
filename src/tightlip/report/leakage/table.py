"""A leakage report's figures in the terminal, and its snapshots there and on the page."""

from typing import Any

from rich.table import Table as RichTable

from tightlip.core.figures import INSECURE, UNKNOWN, count, number
from tightlip.report.kit.table import Cell, Column, Row, Table, plain_row
from tightlip.report.leakage.words import epoch_name, is_best, longest_of, summary_lines

SNAPSHOT_COLUMNS = ("epoch", "train ppl", "validation ppl", "unique", "longest unique", "ε_l")


def terminal_table(summary: dict[str, Any]) -> RichTable:
    """The headline figures that are known, each with its sentence, and the notes."""
    shown = [
        Row(line.name, [Cell(line.value), Cell(line.sentence)], style=_style(line.sentence))
        for line in summary_lines(summary)
        if line.value != UNKNOWN or line.name == "Leakage epsilon"  # one hint at what is missing
    ]
    notes = [plain_row("Note", "", note) for note in summary.get("notes") or []]
    columns = [
        Column(left=True, wraps=False),
        Column(style="bold", widest=34),
        Column(left=True, style="dim"),
    ]
    return Table(columns=columns, rows=[*shown, *notes]).printed()


def _style(sentence: str) -> str:
    return "bold red" if sentence.startswith(INSECURE) else ""


def snapshots_table(snapshots: dict[str, Any]) -> RichTable:
    """One line per snapshot, the best validation perplexity marked."""
    table = snapshot_figures(snapshots)
    # A column nobody can fill (ε_l without a public model, validation without held-out text) goes.
    places = range(len(table.columns) - 1)
    known = [p for p in places if any(row.cells[p].value != UNKNOWN for row in table.rows)]
    marked = [
        row._replace(
            cells=[*row.cells, Cell("← best validation" if row.kind else "")],
            style="bold" if row.kind else "",
        )
        for row in table.only(known).rows
    ]
    columns = [*table.only(known).columns, Column(left=True, wraps=False)]
    return Table(columns=columns, rows=marked, heading_style="dim").printed()


def snapshot_figures(snapshots: dict[str, Any]) -> Table:
    """The figures of each snapshot; the row of the best validation perplexity is called so."""
    rows = [
        plain_row(
            epoch_name(snapshot),
            number(snapshot.get("train_perplexity")),
            number(snapshot.get("validation_perplexity")),
            count(snapshot["summary"].get("unique")),
            count(longest_of(snapshot.get("unique_lengths")) or 0),
            number(snapshot["summary"].get("leakage_epsilon")),
            kind="best" if is_best(snapshot, snapshots) else "",
        )
        for snapshot in snapshots["snapshots"]
    ]
    return Table(columns=[Column(name, wraps=False) for name in SNAPSHOT_COLUMNS], rows=rows)
