"""Words that pages share, and one description of a table, which prints to the terminal and to a page.

On a page the macros `compared` and `plain` of report/kit/parts.html.jinja draw it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from markupsafe import Markup, escape
from rich.table import Table as RichTable
from rich.text import Text

from tightlip.core.figures import UNKNOWN
from tightlip.core.progress import harmless

Figure = Mapping[str, Any]  # `value`, and either `low` and `high` or `spread` over seeds
NONE = "–"
NEVER_SAW_BITS = 1.44  # the mean exposure under a model that never saw the canary
FLAG = re.compile(r"--[a-z][a-z-]*(?: (?:[0-9][0-9.]*[0-9]|[0-9]|[A-Z]+\b))?")


def with_flags(sentence: str) -> Markup:
    """The sentence with its flags set as code, so that no line breaks inside one.

    >>> with_flags("a < b, see --key FILE")
    Markup('a &lt; b, see <code class="flag">--key FILE</code>')
    """
    return Markup(FLAG.sub(r'<code class="flag">\g<0></code>', str(escape(sentence))))


def joined(names: Sequence[str]) -> str:
    """
    >>> joined(["a"]), joined(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def at(*path: str) -> Callable[[Any], Any]:
    """What a record has under these names, null where one is missing.

    >>> at("a", "b")({"a": {"b": 1}}), at("a", "b")({"a": None})
    (1, None)
    """

    def get(record: Any) -> Any:
        for name in path:
            record = None if record is None else record.get(name)
        return record

    return get


def cut_name(name: str, most: int = 24) -> str:
    """A run's name that fits a plot; of a path the end tells more than the beginning."""
    return name if len(name) <= most else "…" + name[-most + 1 :]


def share_words(figure: Figure | None) -> str:
    """A share as a percentage with one decimal.

    >>> share_words({"value": 0.7134}), share_words(None)
    ('71.3%', '–')
    """
    return NONE if figure is None or figure["value"] is None else f"{100 * figure['value']:.1f}%"


def range_words(
    figure: Figure | None, *, scale: float = 100, digits: int = 1, sign: str = ""
) -> str:
    """The interval, or the spread over seeds.

    >>> range_words({"value": 0.7, "low": 0.654, "high": 0.75})
    '65.4 to 75.0'
    >>> range_words({"value": 0.7, "low": None, "high": None, "spread": 0.021})
    '± 2.1 over seeds'
    """
    if figure is None:
        return ""
    if figure.get("spread") is not None:
        return f"± {scale * figure['spread']:.{digits}f} over seeds"
    if figure["low"] is None:
        return ""
    low, high = (f"{scale * figure[end]:{sign}.{digits}f}" for end in ("low", "high"))
    return f"{low} to {high}"


def points_words(figure: Figure | None, *, sign: str = "+") -> str:
    """A difference of two shares in points.

    >>> points_words({"value": 0.034}), points_words({"value": -0.0001})
    ('+3.4', '+0.0')
    """
    if figure is None or figure["value"] is None:
        return NONE
    return f"{round(100 * figure['value'], 1) + 0.0:{sign}.1f}"


def p_words(p: float | None) -> str:
    """A p-value.

    >>> p_words(0.0005), p_words(0.0321), p_words(None)
    ('p < 0.001', 'p = 0.032', 'no test')
    """
    if p is None:
        return "no test"
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.1 else f"p = {p:.2f}"


def facts_of(*facts: tuple[str, Any, int]) -> list[tuple[str, str, str]]:
    """(name, short value, whole value) of what identifies a measurement; beside each value stands
    how many characters the short one may have."""
    return [(name, str(value)[:most], str(value)[:300]) for name, value, most in facts]


class Cell(NamedTuple):
    """A figure and, in small print, its interval or what it is out of; `kind` is the page's."""

    value: str
    under: str = ""
    kind: str = ""

    @property
    def is_unknown(self) -> bool:
        return self.value == UNKNOWN


class Column(NamedTuple):
    """A column's heading, with small print on the page, and how the terminal sets it."""

    name: str = ""
    under: str = ""
    left: bool = False
    wraps: bool = True
    widest: int | None = None
    style: str = ""


class Row(NamedTuple):
    """One line of a table; those of one section stand together."""

    name: str
    cells: Sequence[Cell]
    section: str = ""
    kind: str = ""  # the page's mark beside the name
    style: str = ""  # the terminal's


NAMES = Column(left=True, wraps=False)  # the rows' names, which the terminal never breaks


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns, the first of them the rows' names, rows in sections, and a note beneath."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    number: str = ""  # where a paper has the same table
    title: str = ""
    note: str = ""
    # How the terminal prints it:
    heading_style: str = "bold"
    names_sections: bool = True  # else a blank line stands between them
    beside: bool = False  # small print on the figure's own line, else below

    @property
    def heading(self) -> str:
        return f"Table {self.number}. {self.title}" if self.number else self.title

    @property
    def sections(self) -> list[tuple[str, list[Row]]]:
        return [(name, list(rows)) for name, rows in groupby(self.rows, lambda row: row.section)]

    def only(self, places: Sequence[int], **columns: Any) -> "Table":
        """The same rows with some columns, counted without the names', which are set anew."""
        chosen = [self.columns[place + 1]._replace(**columns) for place in places]
        rows = [row._replace(cells=[row.cells[place] for place in places]) for row in self.rows]
        return replace(self, columns=[self.columns[0], *chosen], rows=rows)

    def printed(self) -> RichTable:
        """The table for the terminal. What it holds is text: a bracket in it is no markup."""
        look: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
        look |= {"title_justify": "left", "caption_justify": "left"}
        table = RichTable(title=self.heading or None, caption=self.note or None, **look)
        table.header_style = self.heading_style
        table.show_header = any(column.name for column in self.columns)
        for column in self.columns:
            table.add_column(
                Text(harmless(column.name)),
                justify="left" if column.left else "right",
                overflow="fold" if column.wraps else "ellipsis",
                no_wrap=not column.wraps,
                max_width=column.widest,
                style=column.style,
            )
        for place, (section, rows) in enumerate(self.sections):
            is_named = bool(section) and self.names_sections
            if place or is_named:
                table.add_row(Text(harmless(section) if is_named else "", style="bold"))
            for row in rows:
                style = f"bold {row.style}" if row.style else ""
                name = Text("  " * is_named + harmless(row.name), style=style)
                table.add_row(name, *(self._text(cell, row.style) for cell in row.cells))
        return table

    def _text(self, cell: Cell, style: str) -> Text:
        text = Text(harmless(cell.value), style="dim" if cell.is_unknown else style)
        between = " " if self.beside else "\n"
        return text.append(between + harmless(cell.under), style="dim") if cell.under else text


def plain_row(name: str, *values: str, **others: str) -> Row:
    """A row of figures without small print."""
    return Row(name, [Cell(value) for value in values], **others)


def printed_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1, title: str = ""
) -> RichTable:
    """A table of words and figures for the terminal; the first `num_left` columns are words."""
    columns = [Column(name, left=place < num_left) for place, name in enumerate(headings)]
    return Table(columns=columns, rows=[plain_row(*row) for row in rows], title=title).printed()


def printed_lines(lines: Iterable[tuple[str, str]]) -> RichTable:
    """What something is called, in bold, and what it is."""
    columns = [NAMES._replace(style="bold"), Column(left=True)]
    return Table(columns=columns, rows=[plain_row(*line) for line in lines]).printed()
