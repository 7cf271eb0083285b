"""The runs' figures side by side: one list of lines for the page and for the terminal."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tightlip.core.figures import count, rounded_up
from tightlip.report.kit.table import NAMES, Cell, Column, Row, Table
from tightlip.report.kit.words import (
    NONE,
    Figure,
    p_words,
    points_words,
    range_words,
    share_words,
)
from tightlip.report.vectors.words import (
    ATTACKER_NAMES,
    METHOD_NAMES,
    Result,
    RunColumn,
    adjacency_words,
    promise_words,
    releases_adjacency,
    releases_words,
    setting_words,
)

if TYPE_CHECKING:
    from rich.table import Table as RichTable

ATTACKER_ORDER = ("strongest", "mlp", "logistic", "trees", "averaged", "bare")
GUESSING = "guessing (majority)"
NOT_IN_TRAIN = "rows not in train"


def attack_table(columns: Sequence[RunColumn]) -> Table:
    """Promise, main task, empirical privacy, each attribute, names, fairness, test rows."""
    parts = (_promise, _main, _privacy, _attributes, _names, _fairness, _rows)
    lines = [line for part in parts for line in part(columns)]
    return Table(
        columns=[NAMES, *(Column(one.name, setting_words(one.first)) for one in columns)],
        rows=[line for line in lines if any(cell.value != NONE for cell in line.cells)],
        beside=True,
    )


def terminal_tables(columns: Sequence[RunColumn], width: int) -> list["RichTable"]:
    """The same as tables that fit the terminal, some columns in each."""
    size = max(1, (width - 34) // 24)
    starts = range(0, len(columns), size)
    return [attack_table(columns[start : start + size]).printed() for start in starts]


def at(*path: str) -> Callable[[Result], Any]:
    """What a result has under these names, null where one is missing.

    >>> at("a", "b")({"a": {"b": 1}}), at("a", "b")({"a": None})
    (1, None)
    """

    def get(result: Result) -> Any:
        tree: Any = result
        for name in path:
            tree = None if tree is None else tree.get(name)
        return tree

    return get


def _firsts(
    section: str, name: str, columns: Sequence[RunColumn], cell: Callable[[Result], Cell]
) -> Row:
    return Row(name, [cell(column.first) for column in columns], section)


def _shares(section: str, name: str, columns: Sequence[RunColumn], *path: str) -> Row:
    figures = [column.figure(at(*path)) for column in columns]
    return Row(name, [Cell(share_words(one), range_words(one)) for one in figures], section)


def _promise(columns: Sequence[RunColumn]) -> Iterator[Row]:
    section = "What is released"
    yield _firsts(section, "Method", columns, _method)
    yield _firsts(section, "Guarantee of a vector", columns, _guarantee)
    yield _firsts(section, "ε of one coordinate", columns, _coordinate)
    yield _firsts(section, "Masked words μ", columns, lambda r: Cell(f"{r['dropout']:g}"))


def _method(result: Result) -> Cell:
    method = str(result["method"])
    known = METHOD_NAMES.get(method, method)
    return Cell(str(result["mechanism"]) if method == "dpnr" else known)


def _guarantee(result: Result) -> Cell:
    return Cell(*promise_words(result))


def _coordinate(result: Result) -> Cell:
    record = result["guarantee"]
    figure = record.get("per_coordinate")
    if figure is None:
        return Cell(NONE)
    standing = (record.get("standings") or {}).get("per_coordinate")
    adjacency = adjacency_words(record, "per_coordinate")
    return Cell(rounded_up(figure), f"{standing}; {adjacency}" if standing else adjacency)


def _main(columns: Sequence[RunColumn]) -> Iterator[Row]:
    section = "Main task"
    yield _shares(section, "Accuracy", columns, "main", "all")
    yield _shares(section, "Commonest label", columns, "main_majority", "all")
    yield _shares(section, f"Accuracy, {NOT_IN_TRAIN}", columns, "main", "unseen")


def _privacy(columns: Sequence[RunColumn]) -> Iterator[Row]:
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
        return Cell(NONE)
    under = f"{releases['num']} releases"
    if releases["epsilon"] is not None:
        under += f", δ {releases['delta']:g}; {releases_adjacency(result)}"
    return Cell(releases_words(result), under)


def _attributes(columns: Sequence[RunColumn]) -> Iterator[Row]:
    for name in _all_names(columns, "attributes"):
        section, path = f"Attackers on {name}", ("attributes", name)
        yield _shares(section, GUESSING, columns, *path, "majority", "all")
        for who in ATTACKER_ORDER:
            label = ATTACKER_NAMES[who]
            yield _shares(section, label, columns, *path, "attackers", who, "all", "accuracy")
        strongest = (*path, "attackers", "strongest", "all")
        above = [column.figure(at(*strongest, "above_majority")) for column in columns]
        cells = [Cell(points_words(one), range_words(one, sign="+")) for one in above]
        yield Row("strongest above guessing, points", cells, section)
        areas = [_auc(column.figure(at(*strongest, "auc"))) for column in columns]
        yield Row("AUC of the strongest", areas, section)


def _auc(figure: Figure | None) -> Cell:
    if figure is None:
        return Cell(NONE)
    return Cell(f"{figure['value']:.2f}", range_words(figure, scale=1, digits=2))


def _names(columns: Sequence[RunColumn]) -> Iterator[Row]:
    section = "Names in the text, 1 − F"
    yield _shares(section, GUESSING, columns, "entities", "majority", "all")
    yield _shares(section, "every name everywhere", columns, "entities", "everywhere", "all")
    read = ("entities", "attackers")
    published = (*read, "mlp", "all", "one_minus_f")
    yield _shares(section, f"{ATTACKER_NAMES['mlp']}, as published", columns, *published)
    for who in ATTACKER_ORDER:
        label = f"{ATTACKER_NAMES[who]}, tuned"
        yield _shares(section, label, columns, *read, who, "all", "one_minus_f_tuned")
    unseen = (*read, "strongest", "unseen", "one_minus_f_tuned")
    yield _shares(section, f"strongest, tuned, {NOT_IN_TRAIN}", columns, *unseen)


def _fairness(columns: Sequence[RunColumn]) -> Iterator[Row]:
    section = "Fairness of the main task"
    for name in _all_names(columns, "fairness"):
        gaps = [_gap(column, name) for column in columns]
        yield Row(f"gap by {name}, points", gaps, section)
        chances = [_chance(column, name) for column in columns]
        yield Row(f"chance of it by {name}", chances, section)


def _gap(column: RunColumn, name: str) -> Cell:
    """Best group less worst; of several groups they are picked by these rows, so no interval holds."""
    figure = column.figure(at("fairness", name, "gap"))
    groups = at("fairness", name, "groups")(column.first) or {}
    chosen = len(column.runs) == 1 and len(groups) > 2
    under = f"no interval, best and worst of {len(groups)}" if chosen else range_words(figure)
    return Cell(points_words(figure, sign=""), under)


def _chance(column: RunColumn, name: str) -> Cell:
    """One run's p; over seeds each run has its own, and they make no common one."""
    if len(column.runs) > 1:
        return Cell(NONE)
    return Cell(p_words(at("fairness", name, "p")(column.first)))


def _rows(columns: Sequence[RunColumn]) -> Iterator[Row]:
    for key, label in (
        ("num_test", "test rows"),
        ("num_test_users", "test users"),
        ("num_seen_in_train", "test rows that also stand in train"),
    ):
        cells = [Cell(count(column.first[key])) for column in columns]
        yield Row(label, cells, "Test part")


def _all_names(columns: Sequence[RunColumn], part: str) -> list[str]:
    return list(dict.fromkeys(name for c in columns for r in c.runs for name in r[part]))
