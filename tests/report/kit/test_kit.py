"""Tables, plots and words that pages share, by themselves."""

import csv
import doctest
import io

import pytest
from rich.console import Console

from tightlip.core import figures
from tightlip.core.files import csv_text
from tightlip.report.kit import plots, table
from tightlip.report.kit.table import NAMES, Cell, Column, Row, Table, plain_row
from tightlip.report.vectors import words as vectors_words


@pytest.mark.parametrize("module", [figures, plots, table, vectors_words])
def test_the_examples_in_docstrings_are_true(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted
    assert not outcome.failed


def printed(table, width=60):
    console = Console(file=io.StringIO(), width=width)
    console.print(table.printed())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


ROWS = [
    Row("loss", [Cell("1.5", "1 to 2"), Cell("not known")], "Utility"),
    Row("bits", [Cell("12"), Cell("[bold]3[/]")], "Leakage"),
]
COLUMNS = [NAMES, Column("first"), Column("second")]


def test_sections_are_named_and_their_rows_indented():
    assert printed(Table(columns=COLUMNS, rows=ROWS, beside=True)) == [
        "              first      second",
        "Utility",
        "  loss   1.5 1 to 2   not known",
        "Leakage",
        "  bits           12  [bold]3[/]",
    ]


def test_small_print_stands_below_and_sections_apart_where_that_is_asked_for():
    assert printed(Table(columns=COLUMNS, rows=ROWS, names_sections=False)) == [
        "       first      second",
        "loss     1.5   not known",
        "      1 to 2",
        "",
        "bits      12  [bold]3[/]",
    ]


def test_some_columns_are_a_table_of_their_own():
    part = Table(columns=COLUMNS, rows=ROWS).only([1], left=True)
    assert [column.name for column in part.columns] == ["", "second"]
    assert [[cell.value for cell in row.cells] for row in part.rows] == [["not known"], ["[bold]3[/]"]]  # fmt: skip
    assert part.columns[1].left


def test_a_papers_table_has_its_number_and_a_note():
    table = Table(columns=[Column("way"), Column("ε")], rows=[plain_row("none", "–")], number="2", title="Main", note="In per cent.")  # fmt: skip
    words = " ".join(" ".join(printed(table)).split())
    assert words == "Table 2. Main way ε none – In per cent."


def test_a_line_with_fewer_figures_pushes_no_column_to_the_end():
    text = csv_text([{"name": "a", "last": 1}, {"name": "b", "middle": 0, "last": None}])
    assert text.splitlines()[0] == "name,middle,last"
    assert list(csv.reader(io.StringIO(text)))[1:] == [["a", "", "1"], ["b", "0", ""]]


def test_labels_cover_neither_marks_nor_each_other():
    plot = plots.Plot(title="t", description="d")
    labels = plots.Labels(plot, [(100.0, 100.0)] * 3)
    for name in ("one", "two", "three"):
        labels.draw(name, 100.0, 100.0)
    marks, names = labels.taken[:3], labels.taken[3:]
    for place, one in enumerate(names):
        for other in [*marks, *names[:place]]:
            assert one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]  # fmt: skip
