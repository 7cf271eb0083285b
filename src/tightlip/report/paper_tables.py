"""The DPNR paper's tables 2 to 7 with our figures, theirs beside them.

A section of the experiment is one corpus; its rows are ways of training, each a mean over seeds.
What a row holds: `way` and its settings, `main` (accuracy), `privacy` (1 - X or 1 - F) by
attacker, `strongest` (how often each attacker was chosen by the development part), `attributes`
(what the paper's attacker reads) and `groups` (the main task by group).
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tightlip.core.figures import rounded_up
from tightlip.report.published_representation import (
    BY_DROPOUT,
    BY_EPSILON,
    ENTITY_ATTACK,
    GROUPS,
    MAIN_AND_PRIVACY,
)
from tightlip.report.representation import adjacency_words

WAYS = {
    "majority": "majority class",
    "none": "non-private",
    "adversarial": "adversarial",
    "dpnr": "DPNR",
    "laplace": "Laplace, calibrated",
    "gaussian": "Gaussian, calibrated",
}
ATTACKERS = {
    "mlp": "the paper's MLP",
    "logistic": "logistic regression",
    "averaged": "logistic on averaged copies",
    "trees": "boosted trees",
}
Row = dict[str, Any]
Cell = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One table: a name for each row, then cells in the order of the columns."""

    number: str
    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def tables(section: dict[str, Any]) -> list[PaperTable]:
    """All tables that one corpus has figures for, in the paper's order."""
    made = [
        _by_setting(section, "2", "epsilon", BY_EPSILON),
        _by_setting(section, "3", "dropout", BY_DROPOUT),
        _main_and_privacy(section),
    ]
    if section["kind"] == "entities":
        made.append(_entity_attack(section))
    made.append(_by_group(section))
    return [table for table in made if table.rows]


def name_of(row: Row) -> str:
    """A way of training in words.

    >>> name_of({"way": "dpnr", "epsilon": 0.05, "dropout": 0.0})
    'DPNR, ε 0.05 a coordinate'
    >>> name_of({"way": "gaussian", "epsilon": 8.0, "dropout": 0.1})
    'Gaussian, calibrated, ε 8, μ 0.1'
    """
    words = [WAYS[row["way"]]]
    if row.get("epsilon") is not None:
        words.append(f"ε {row['epsilon']:g}" + (" a coordinate" if row["way"] == "dpnr" else ""))
    if row.get("dropout"):
        words.append(f"μ {row['dropout']:g}")
    return ", ".join(words)


def promise_of(row: Row) -> str:
    """What a released vector of this way promises, with its standing, in one line."""
    record = row.get("guarantee")
    if not record or record.get("epsilon") is None:
        return "nothing (measured only)"
    standing = (record.get("standings") or {}).get("epsilon") or record["standing"]
    return (
        f"ε {rounded_up(record['epsilon'])} for the whole vector at δ {record['delta']:g} ({standing}); "
        f"{record['adjacency']}{_for_any_two(record)}"
    )


def _for_any_two(record: dict[str, Any]) -> str:
    if not record.get("dropout"):
        return ""
    return f": ε {rounded_up(record['any_two_texts']['epsilon'])}"


def strongest_words(row: Row) -> str:
    """Who was the strongest; how often each, where attributes or seeds had several.

    >>> strongest_words({"strongest": {"logistic": 2}})
    'logistic regression'
    >>> strongest_words({"strongest": {"logistic": 3, "mlp": 1}})
    "logistic regression 3, the paper's MLP 1"
    """
    chosen = row["strongest"]
    if len(chosen) == 1:
        return ATTACKERS[next(iter(chosen))]
    return ", ".join(f"{ATTACKERS[name]} {times}" for name, times in chosen.items())


def _by_setting(
    section: dict[str, Any], number: str, name: str, paper: dict[str, dict[float | None, float]]
) -> PaperTable:
    """Tables 2 and 3: the main task as one setting varies."""
    theirs = paper.get(section["paper"] or "", {})
    fixed = ("dropout", 0.0) if name == "epsilon" else ("epsilon", 1.0)
    rows = _all(section, "none")
    varied = [row for row in _all(section, "dpnr") if row[fixed[0]] == fixed[1]]
    rows += sorted((row for row in varied if row[name]), key=lambda row: float(row[name]))
    sign = "ε" if name == "epsilon" else "μ"
    return PaperTable(
        number=number,
        title=f"Main task as {sign} varies",
        note="Accuracy in per cent; μ = 0." if name == "epsilon" else "Accuracy in per cent; ε = 1 a coordinate.",
        columns=(sign, "ours", "theirs", "ε of the whole vector", "which holds for"),
        rows=tuple(
            (
                WAYS[row["way"]],
                (
                    "–" if row["way"] == "none" else f"{row[name]:g}",
                    _mean(row["main"]),
                    _theirs(theirs.get(None if row["way"] == "none" else row[name])),
                    *_whole(row),
                ),
            )
            for row in rows
        ),
    )  # fmt: skip


def _main_and_privacy(section: dict[str, Any]) -> PaperTable:
    """Table 4, with the strongest of our attackers beside the paper's."""
    theirs = MAIN_AND_PRIVACY.get(section["paper"] or "", {})
    rows = [("majority", section["majority"])]
    rows += [(row["way"], row) for row in _compared(section)]
    made = []
    for way, row in rows:
        main, privacy = theirs.get(way, (None, None))
        name = WAYS[way] if way == "majority" else name_of(row)
        strongest = row["privacy"].get("strongest")
        made.append(
            (
                name,
                (
                    _mean(row["main"]),
                    _theirs(main),
                    _mean(row["privacy"]["mlp"]),
                    _theirs(privacy),
                    "–" if strongest is None else _mean(strongest),
                    "–" if strongest is None else strongest_words(row),
                ),
            )
        )
    what = (
        "1 - F, F1 over all entities"
        if section["kind"] == "entities"
        else "1 - X, X the mean accuracy"
    )
    return PaperTable(
        number="4",
        title="Main task and empirical privacy",
        note=f"Empirical privacy is {what}, in per cent: higher is better. Theirs is for DPNR at ε = 0.05. The "
        "strongest is chosen for each attribute and seed by the development part; the figures are the test part's.",
        columns=("main", "theirs", "privacy, MLP", "theirs", "against the strongest", "which was"),
        rows=tuple(made),
    )  # fmt: skip


def _entity_attack(section: dict[str, Any]) -> PaperTable:
    """Table 5: how often the paper's attacker is right where an entity is absent, and present."""
    rows = []
    for row in _compared(section):
        cells = []
        for entity in section["private"]:
            ours = row["attributes"][entity]
            theirs = ENTITY_ATTACK.get(entity, {}).get(row["way"])
            cells += [
                _with_theirs(ours["absent"], theirs, 0),
                _with_theirs(ours["present"], theirs, 1),
            ]
        rows.append((name_of(row), tuple(cells)))
    return PaperTable(
        number="5",
        title="What the attacker reads of each entity",
        note="The MLP's accuracy in per cent where the entity is absent (A) and present (P); theirs in brackets.",
        columns=tuple(f"{entity.removeprefix('entity_')} {side}" for entity in section["private"] for side in "AP"),
        rows=tuple(rows),
    )  # fmt: skip


def _by_group(section: dict[str, Any]) -> PaperTable:
    """Tables 6 and 7: the main task by group, and whether the gap may be chance."""
    rows = [
        (f"{attribute}: {name_of(row)}", cells)
        for attribute in section["private"]
        for row in _compared(section)
        if (cells := _group_cells(section, row, attribute)) is not None
    ]
    return PaperTable(
        number="7" if section["kind"] == "entities" else "6",
        title="Fairness: the main task by group",
        note="Accuracy in one group, and how much more it is in the other; p is the middle of the seeds' tests that "
        "the groups fare alike.",
        columns=("one group", "the other", "theirs", "p"),
        rows=tuple(rows),
    )


def _group_cells(section: dict[str, Any], row: Row, attribute: str) -> tuple[str, ...] | None:
    """One attribute of two groups; one of more, such as plays, has no place in the paper's table."""
    found = row["groups"][attribute]
    accuracy, paper = found["accuracy"], GROUPS.get((section["paper"] or "", attribute), {})
    one, other = paper.get("pair") or (*accuracy, "", "")[:2]
    if len(accuracy) != 2 or {one, other} != {*accuracy}:
        return None
    theirs = paper.get(row["way"])
    gap = accuracy[other]["mean"] - accuracy[one]["mean"]
    return (
        f"{one} {_mean(accuracy[one])}",
        f"{other} {100 * gap:+.2f}",
        "–" if theirs is None else f"{theirs[0]:.2f}, {theirs[1]:+.2f}",
        "–" if found["p"] is None else f"{found['p']:.2g}",
    )


def _compared(section: dict[str, Any]) -> Iterator[Row]:
    """The rows of Table 4: the baselines, DPNR at its smallest ε, and our calibrated mechanisms."""
    for way in ("none", "adversarial"):
        yield from _all(section, way)
    plain = [row for row in _all(section, "dpnr") if not row["dropout"]]
    if plain:
        yield min(plain, key=lambda row: float(row["epsilon"]))
    for way in ("laplace", "gaussian"):
        yield from _all(section, way)


def _all(section: dict[str, Any], way: str) -> list[Row]:
    return [row for row in section["rows"] if row["way"] == way]


def _whole(row: Row) -> tuple[str, str]:
    """ε of the whole vector, and the texts it holds for."""
    record = row.get("guarantee") or {}
    if record.get("epsilon") is None:
        return "none", "–"
    return rounded_up(record["epsilon"]), adjacency_words(record)


def _mean(figure: Cell) -> str:
    """A mean over seeds in per cent, with its spread where there are several."""
    if figure.get("mean") is None:
        return "–"
    spread = figure.get("spread")
    return f"{100 * figure['mean']:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def _theirs(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _with_theirs(ours: Cell, theirs: Sequence[float] | None, place: int) -> str:
    shown = "–" if ours.get("mean") is None else f"{100 * ours['mean']:.1f}"
    return shown if theirs is None else f"{shown} ({theirs[place]:.1f})"


def csv_text(sections: Sequence[dict[str, Any]]) -> str:
    """Every cell of every table, one a line."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["corpus", "table", "row", "column", "value"])
    for section in sections:
        for table in tables(section):
            for name, cells in table.rows:
                for column, cell in zip(table.columns, cells, strict=True):
                    writer.writerow([section["name"], table.number, name, column, cell])
    return stream.getvalue()
