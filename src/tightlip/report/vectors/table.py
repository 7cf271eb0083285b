"""The runs' figures side by side: one list of lines for the page and for the terminal."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightlip.core.figures import count, rounded_up
from tightlip.report.vectors.words import (
    ATTACKER_NAMES,
    METHOD_NAMES,
    Column,
    Figure,
    Result,
    adjacency_words,
    p_words,
    points_words,
    promise_words,
    range_words,
    releases_adjacency,
    releases_words,
    share_words,
)

if TYPE_CHECKING:
    from rich.table import Table


ATTACKER_ORDER = ("strongest", "mlp", "logistic", "trees", "averaged", "bare")
GUESSING = "guessing (majority)"
NOT_IN_TRAIN = "rows not in train"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A figure and, smaller, what stands under it."""

    value: str
    under: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measure of every run."""

    section: str
    name: str
    cells: list[Cell]


def table_lines(columns: Sequence[Column]) -> list[Line]:
    """Promise, main task, empirical privacy, each attribute, names, fairness, test rows."""
    lines = [*_promise(columns), *_main(columns), *_privacy(columns), *_attributes(columns)]
    lines += [*_names(columns), *_fairness(columns), *_rows(columns)]
    return [line for line in lines if any(cell.value != "–" for cell in line.cells)]


def at(*path: str) -> Callable[[Result], Any]:
    """What a result has under these names, null where one is missing.

    >>> at("a", "b")({"a": {"b": 1}}), at("a", "b")({"a": None})
    (1, None)
    """

    def found(result: Result) -> Any:
        tree: Any = result
        for name in path:
            tree = None if tree is None else tree.get(name)
        return tree

    return found


def _firsts(
    section: str, name: str, columns: Sequence[Column], cell: Callable[[Result], Cell]
) -> Line:
    return Line(section=section, name=name, cells=[cell(column.first) for column in columns])


def _shares(section: str, name: str, columns: Sequence[Column], *path: str) -> Line:
    figures = [column.figure(at(*path)) for column in columns]
    cells = [Cell(value=share_words(one), under=range_words(one)) for one in figures]
    return Line(section=section, name=name, cells=cells)


def _promise(columns: Sequence[Column]) -> Iterator[Line]:
    section = "What is released"
    yield _firsts(section, "Method", columns, _method)
    yield _firsts(section, "Guarantee of a vector", columns, _guarantee)
    yield _firsts(section, "ε of one coordinate", columns, _coordinate)
    yield _firsts(section, "Masked words μ", columns, lambda r: Cell(value=f"{r['dropout']:g}"))


def _method(result: Result) -> Cell:
    method = str(result["method"])
    known = METHOD_NAMES.get(method, method)
    return Cell(value=str(result["mechanism"]) if method == "dpnr" else known)


def _guarantee(result: Result) -> Cell:
    value, under = promise_words(result)
    return Cell(value=value, under=under)


def _coordinate(result: Result) -> Cell:
    record = result["guarantee"]
    figure = record.get("per_coordinate")
    if figure is None:
        return Cell(value="–")
    standing = (record.get("standings") or {}).get("per_coordinate")
    adjacency = adjacency_words(record, "per_coordinate")
    return Cell(
        value=rounded_up(figure), under=f"{standing}; {adjacency}" if standing else adjacency
    )


def _main(columns: Sequence[Column]) -> Iterator[Line]:
    section = "Main task"
    yield _shares(section, "Accuracy", columns, "main", "all")
    yield _shares(section, "Commonest label", columns, "main_majority", "all")
    yield _shares(section, f"Accuracy, {NOT_IN_TRAIN}", columns, "main", "unseen")


def _privacy(columns: Sequence[Column]) -> Iterator[Line]:
    section = "Empirical privacy, 1 − X"
    yield _shares(section, GUESSING, columns, "privacy", "majority", "all")
    for who in ATTACKER_ORDER:
        yield _shares(section, ATTACKER_NAMES[who], columns, "privacy", who, "all")
        if who == "averaged":
            yield _firsts(section, "what these averages cost", columns, _cost)
    yield _shares(section, f"strongest, {NOT_IN_TRAIN}", columns, "privacy", "strongest", "unseen")


def _cost(result: Result) -> Cell:
    """What averaging hears costs many times one vector; that stands beside its success."""
    releases = result.get("releases")
    if not releases:
        return Cell(value="–")
    under = f"{releases['num']} releases"
    if releases["epsilon"] is not None:
        under += f", δ {releases['delta']:g}; {releases_adjacency(result)}"
    return Cell(value=releases_words(result), under=under)


def _attributes(columns: Sequence[Column]) -> Iterator[Line]:
    for name in _all_names(columns, "attributes"):
        section, path = f"Attackers on {name}", ("attributes", name)
        yield _shares(section, GUESSING, columns, *path, "majority", "all")
        for who in ATTACKER_ORDER:
            label = ATTACKER_NAMES[who]
            yield _shares(section, label, columns, *path, "attackers", who, "all", "accuracy")
        strongest = (*path, "attackers", "strongest", "all")
        above = [column.figure(at(*strongest, "above_majority")) for column in columns]
        cells = [Cell(value=points_words(f), under=range_words(f, signed=True)) for f in above]
        yield Line(section=section, name="strongest above guessing, points", cells=cells)
        areas = [_auc(column.figure(at(*strongest, "auc"))) for column in columns]
        yield Line(section=section, name="AUC of the strongest", cells=areas)


def _auc(figure: Figure | None) -> Cell:
    if figure is None:
        return Cell(value="–")
    low, high, spread = figure["low"], figure["high"], figure.get("spread")
    under = "" if low is None else f"{low:.2f} to {high:.2f}"
    if spread is not None:
        under = f"± {spread:.2f} over seeds"
    return Cell(value=f"{figure['value']:.2f}", under=under)


def _names(columns: Sequence[Column]) -> Iterator[Line]:
    section = "Names in the text, 1 − F"
    yield _shares(section, GUESSING, columns, "entities", "majority", "all")
    yield _shares(section, "every name everywhere", columns, "entities", "everywhere", "all")
    found = ("entities", "attackers")
    published = (*found, "mlp", "all", "one_minus_f")
    yield _shares(section, f"{ATTACKER_NAMES['mlp']}, as published", columns, *published)
    for who in ATTACKER_ORDER:
        label = f"{ATTACKER_NAMES[who]}, tuned"
        yield _shares(section, label, columns, *found, who, "all", "one_minus_f_tuned")
    unseen = (*found, "strongest", "unseen", "one_minus_f_tuned")
    yield _shares(section, f"strongest, tuned, {NOT_IN_TRAIN}", columns, *unseen)


def _fairness(columns: Sequence[Column]) -> Iterator[Line]:
    section = "Fairness of the main task"
    for name in _all_names(columns, "fairness"):
        gaps = [_gap(column, name) for column in columns]
        yield Line(section=section, name=f"gap by {name}, points", cells=gaps)
        chances = [_chance(column, name) for column in columns]
        yield Line(section=section, name=f"chance of it by {name}", cells=chances)


def _gap(column: Column, name: str) -> Cell:
    """Best group less worst; of several groups they are picked by these rows, so no interval holds."""
    figure = column.figure(at("fairness", name, "gap"))
    groups = at("fairness", name, "groups")(column.first) or {}
    chosen = len(column.runs) == 1 and len(groups) > 2
    under = f"no interval, best and worst of {len(groups)}" if chosen else range_words(figure)
    return Cell(value=points_words(figure, sign=""), under=under)


def _chance(column: Column, name: str) -> Cell:
    """One run's p; over seeds each run has its own, and they make no common one."""
    if len(column.runs) > 1:
        return Cell(value="–")
    return Cell(value=p_words(at("fairness", name, "p")(column.first)))


def _rows(columns: Sequence[Column]) -> Iterator[Line]:
    for key, label in (
        ("num_test", "test rows"),
        ("num_test_users", "test users"),
        ("num_seen_in_train", "test rows that also stand in train"),
    ):
        cells = [Cell(value=count(column.first[key])) for column in columns]
        yield Line(section="Test part", name=label, cells=cells)


def _all_names(columns: Sequence[Column], part: str) -> list[str]:
    return list(dict.fromkeys(name for c in columns for r in c.runs for name in r[part]))


# The terminal
def terminal_tables(columns: Sequence[Column], width: int) -> list["Table"]:
    """The same lines as tables as wide as the terminal allows, some columns in each."""
    from rich.table import Table

    fitting = max(1, (width - 34) // 24)
    tables = []
    for start in range(0, len(columns), fitting):
        some = columns[start : start + fitting]
        table = Table(box=None, pad_edge=False)
        table.add_column("", no_wrap=True)
        for column in some:
            table.add_column(column.name, justify="right", overflow="fold")
        section = None
        for line in table_lines(some):
            if line.section != section:
                section = line.section
                table.add_row(f"[bold]{section}[/]")
            cells = [f"{c.value} [dim]{c.under}[/]" if c.under else c.value for c in line.cells]
            table.add_row(f"  {line.name}", *cells)
        tables.append(table)
    return tables
