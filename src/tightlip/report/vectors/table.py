"""The runs' figures side by side: one list of lines for the page and for the terminal."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table as RichTable

from tightlip.core.figures import count, rounded_up
from tightlip.report.kit.table import NAMES, Cell, Column, Row, Table
from tightlip.report.kit.words import NONE, Figure, p_words, points_words, range_words, share_words
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

ATTACKER_ORDER = ("strongest", "mlp", "logistic", "trees", "averaged", "bare")
Measure = tuple[str, list[Cell]]  # its name, and a figure of every column
GUESSING = "guessing (majority)"
NOT_IN_TRAIN = "rows not in train"


def attack_table(columns: Sequence[RunColumn]) -> Table:
    """Promise, main task, empirical privacy, each attribute, names, fairness, test rows."""
    parts: dict[str, Iterator[Measure]] = {
        "What is released": _promise(columns),
        "Main task": _main(columns),
        "Empirical privacy, 1 − X": _privacy(columns),
        **{f"Attackers on {one}": _attribute(columns, one) for one in _all(columns, "attributes")},
        "Names in the text, 1 − F": _names(columns),
        "Fairness of the main task": _fairness(columns),
        "Test part": _rows(columns),
    }
    lines = [Row(name, cells, part) for part, lines in parts.items() for name, cells in lines]
    return Table(
        columns=[NAMES, *(Column(one.name, setting_words(one.first)) for one in columns)],
        rows=[line for line in lines if any(cell.value != NONE for cell in line.cells)],
        beside=True,
    )


def terminal_tables(columns: Sequence[RunColumn], width: int) -> list[RichTable]:
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


def _firsts(columns: Sequence[RunColumn], cell: Callable[[Result], Cell]) -> list[Cell]:
    return [cell(column.first) for column in columns]


def _shares(columns: Sequence[RunColumn], *path: str) -> list[Cell]:
    figures = [column.figure(at(*path)) for column in columns]
    return [Cell(share_words(one), range_words(one)) for one in figures]


def _promise(columns: Sequence[RunColumn]) -> Iterator[Measure]:
    yield "Method", _firsts(columns, _method)
    yield "Guarantee of a vector", _firsts(columns, lambda r: Cell(*promise_words(r)))
    yield "ε of one coordinate", _firsts(columns, _coordinate)
    yield "Masked words μ", _firsts(columns, lambda r: Cell(f"{r['dropout']:g}"))


def _method(result: Result) -> Cell:
    method = str(result["method"])
    known = METHOD_NAMES.get(method, method)
    return Cell(str(result["mechanism"]) if method == "dpnr" else known)


def _coordinate(result: Result) -> Cell:
    record = result["guarantee"]
    figure = record.get("per_coordinate")
    if figure is None:
        return Cell(NONE)
    standing = (record.get("standings") or {}).get("per_coordinate")
    adjacency = adjacency_words(record, "per_coordinate")
    return Cell(rounded_up(figure), f"{standing}; {adjacency}" if standing else adjacency)


def _main(columns: Sequence[RunColumn]) -> Iterator[Measure]:
    yield "Accuracy", _shares(columns, "main", "all")
    yield "Commonest label", _shares(columns, "main_majority", "all")
    yield f"Accuracy, {NOT_IN_TRAIN}", _shares(columns, "main", "unseen")


def _privacy(columns: Sequence[RunColumn]) -> Iterator[Measure]:
    yield GUESSING, _shares(columns, "privacy", "majority", "all")
    for who in ATTACKER_ORDER:
        yield ATTACKER_NAMES[who], _shares(columns, "privacy", who, "all")
        if who == "averaged":
            yield "what these averages cost", _firsts(columns, _cost)
    yield f"strongest, {NOT_IN_TRAIN}", _shares(columns, "privacy", "strongest", "unseen")


def _cost(result: Result) -> Cell:
    """What averaging hears costs many times one vector; that stands beside its success."""
    releases = result.get("releases")
    if not releases:
        return Cell(NONE)
    under = f"{releases['num']} releases"
    if releases["epsilon"] is not None:
        under += f", δ {releases['delta']:g}; {releases_adjacency(result)}"
    return Cell(releases_words(result), under)


def _attribute(columns: Sequence[RunColumn], name: str) -> Iterator[Measure]:
    path = ("attributes", name)
    yield GUESSING, _shares(columns, *path, "majority", "all")
    for who in ATTACKER_ORDER:
        label = ATTACKER_NAMES[who]
        yield label, _shares(columns, *path, "attackers", who, "all", "accuracy")
    strongest = (*path, "attackers", "strongest", "all")
    above = [column.figure(at(*strongest, "above_majority")) for column in columns]
    points = [Cell(points_words(one), range_words(one, sign="+")) for one in above]
    yield "strongest above guessing, points", points
    areas = [_auc(column.figure(at(*strongest, "auc"))) for column in columns]
    yield "AUC of the strongest", areas


def _auc(figure: Figure | None) -> Cell:
    if figure is None:
        return Cell(NONE)
    return Cell(f"{figure['value']:.2f}", range_words(figure, scale=1, digits=2))


def _names(columns: Sequence[RunColumn]) -> Iterator[Measure]:
    yield GUESSING, _shares(columns, "entities", "majority", "all")
    yield "every name everywhere", _shares(columns, "entities", "everywhere", "all")
    read = ("entities", "attackers")
    published = (*read, "mlp", "all", "one_minus_f")
    yield f"{ATTACKER_NAMES['mlp']}, as published", _shares(columns, *published)
    for who in ATTACKER_ORDER:
        label = f"{ATTACKER_NAMES[who]}, tuned"
        yield label, _shares(columns, *read, who, "all", "one_minus_f_tuned")
    unseen = (*read, "strongest", "unseen", "one_minus_f_tuned")
    yield f"strongest, tuned, {NOT_IN_TRAIN}", _shares(columns, *unseen)


def _fairness(columns: Sequence[RunColumn]) -> Iterator[Measure]:
    for name in _all(columns, "fairness"):
        yield f"gap by {name}, points", [_gap(column, name) for column in columns]
        yield f"chance of it by {name}", [_chance(column, name) for column in columns]


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


def _rows(columns: Sequence[RunColumn]) -> Iterator[Measure]:
    for key, label in (
        ("num_test", "test rows"),
        ("num_test_users", "test users"),
        ("num_seen_in_train", "test rows that also stand in train"),
    ):
        yield label, [Cell(count(column.first[key])) for column in columns]


def _all(columns: Sequence[RunColumn], part: str) -> list[str]:
    """The names that any run has there, in their order."""
    return list(dict.fromkeys(name for c in columns for r in c.runs for name in r[part]))
