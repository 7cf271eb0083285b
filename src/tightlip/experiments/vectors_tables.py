"""The DPNR paper's tables 2 to 7 with our figures, theirs beside them.

A section of the experiment is one corpus; its rows are ways of training, each a mean over seeds.
What a row holds: `way` and its settings, `main` (accuracy), `privacy` (1 - X or 1 - F) by
attacker, `strongest` (how often each attacker was chosen by the development part), `attributes`
(what the paper's attacker reads) and `groups` (the main task by group).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from tightlip.core.figures import rounded_up
from tightlip.report.kit import table as kit
from tightlip.report.kit.table import Column, Table, plain_row
from tightlip.report.kit.words import NONE
from tightlip.report.vectors.words import adjacency_words

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
Way = dict[str, Any]
OverSeeds = dict[str, Any]  # `mean`, and `spread` where there are several seeds

# The tables of the DPNR paper (Lyu, He and Li 2020), 2 to 7, as printed there; all in per cent
# Table 2: accuracy of the main task by ε at μ = 0; Table 3: by μ at ε = 1.
BY_EPSILON = {
    "AG": {None: 78.75, 0.05: 80.87, 0.1: 80.78, 0.5: 79.71, 1.0: 79.36, 5.0: 79.59},
    "BLOG": {None: 97.07, 0.05: 96.69, 0.1: 96.39, 0.5: 96.84, 1.0: 96.39, 5.0: 96.66},
}
BY_DROPOUT = {
    "AG": {None: 78.75, 0.1: 80.71, 0.3: 79.18, 0.5: 77.42, 0.8: 69.57},
    "BLOG": {None: 97.07, 0.1: 96.05, 0.3: 93.76, 0.5: 90.98, 0.8: 82.94},
}
# Table 4: main task, and empirical privacy (1 - F on AG, 1 - X on BLOG). ADV and DPNR are printed
# there as differences from NON-PRIV; these are the sums.
MAIN_AND_PRIVACY = {
    "AG": {"majority": (57.79, 49.34), "none": (78.75, 23.24), "adversarial": (57.04, 49.67), "dpnr": (80.87, 54.37)},
    "BLOG": {"majority": (34.16, 46.96), "none": (97.07, 33.88), "adversarial": (94.63, 35.04), "dpnr": (96.69, 49.74)},
}  # fmt: skip
# Table 5: the attacker's accuracy where an entity is absent and where it is present.
ENTITY_ATTACK = {
    "entity_3": {"none": (96.71, 81.99), "adversarial": (98.57, 39.71), "dpnr": (90.86, 8.46)},
    "entity_4": {"none": (99.43, 47.20), "adversarial": (100.0, 0.0), "dpnr": (100.0, 0.0)},
    "entity_5": {"none": (96.93, 68.29), "adversarial": (99.87, 12.96), "dpnr": (100.0, 0.0)},
}
# Tables 6 (BLOG) and 7 (AG): accuracy of the main task in one group, and how much more it is in
# the other.
GROUPS = {
    ("BLOG", "gender"): {"pair": ("female", "male"), "none": (98.07, -2.18), "adversarial": (93.84, -7.54), "dpnr": (98.00, -2.34)},
    ("BLOG", "age"): {"pair": ("under 20", "30 and over"), "none": (97.05, -1.49), "adversarial": (91.91, -3.57), "dpnr": (97.09, -0.11)},
    ("AG", "entity_3"): {"pair": ("absent", "present"), "none": (82.67, -18.82), "adversarial": (48.92, 7.82), "dpnr": (83.60, -16.93)},
    ("AG", "entity_4"): {"pair": ("absent", "present"), "none": (80.86, -15.44), "adversarial": (49.64, 6.67), "dpnr": (81.79, -12.22)},
    ("AG", "entity_5"): {"pair": ("absent", "present"), "none": (80.22, -10.78), "adversarial": (49.43, 9.60), "dpnr": (81.04, -6.04)},
}  # fmt: skip


def tables(section: dict[str, Any]) -> list[Table]:
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


def name_of(row: Way) -> str:
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


def promise_of(row: Way) -> str:
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


def strongest_words(row: Way) -> str:
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


def _columns(names: Sequence[str]) -> list[Column]:
    return [Column(left=True), *map(Column, names)]


def _by_setting(
    section: dict[str, Any], number: str, name: str, paper: dict[str, dict[float | None, float]]
) -> Table:
    """Tables 2 and 3: the main task as one setting varies."""
    theirs = paper.get(section["paper"] or "", {})
    fixed = ("dropout", 0.0) if name == "epsilon" else ("epsilon", 1.0)
    rows = _all(section, "none")
    varied = [row for row in _all(section, "dpnr") if row[fixed[0]] == fixed[1]]
    rows += sorted((row for row in varied if row[name]), key=lambda row: float(row[name]))
    sign = "ε" if name == "epsilon" else "μ"
    at = "μ = 0" if name == "epsilon" else "ε = 1 a coordinate"
    lines = []
    for row in rows:
        is_bare = row["way"] == "none"
        shown = NONE if is_bare else f"{row[name]:g}"
        beside = _theirs(theirs.get(None if is_bare else row[name]))
        lines.append(plain_row(WAYS[row["way"]], shown, _mean(row["main"]), beside, *_whole(row)))
    columns = (sign, "ours", "theirs", "ε of the whole vector", "which holds for")
    return Table(
        number=number,
        title=f"Main task as {sign} varies",
        note=f"Accuracy in per cent; {at}.",
        columns=_columns(columns),
        rows=lines,
    )


def _main_and_privacy(section: dict[str, Any]) -> Table:
    """Table 4, with the strongest of our attackers beside the paper's."""
    theirs = MAIN_AND_PRIVACY.get(section["paper"] or "", {})
    rows = [("majority", section["majority"])]
    rows += [(row["way"], row) for row in _compared(section)]
    lines = []
    for way, row in rows:
        main, privacy = theirs.get(way, (None, None))
        strongest = row["privacy"].get("strongest")
        lines.append(
            plain_row(
                WAYS[way] if way == "majority" else name_of(row),
                _mean(row["main"]),
                _theirs(main),
                _mean(row["privacy"]["mlp"]),
                _theirs(privacy),
                _mean(strongest),
                NONE if strongest is None else strongest_words(row),
            )
        )
    what = (
        "1 - F, F1 over all entities"
        if section["kind"] == "entities"
        else "1 - X, X the mean accuracy"
    )
    return Table(
        number="4",
        title="Main task and empirical privacy",
        note=f"Empirical privacy is {what}, in per cent: higher is better. Theirs is for DPNR at ε = 0.05. The "
        "strongest is chosen for each attribute and seed by the development part; the figures are the test part's.",
        columns=_columns(
            ("main", "theirs", "privacy, MLP", "theirs", "against the strongest", "which was")
        ),
        rows=lines,
    )


def _entity_attack(section: dict[str, Any]) -> Table:
    """Table 5: how often the paper's attacker is right where an entity is absent, and present."""
    rows = []
    for row in _compared(section):
        cells = []
        for entity in section["private"]:
            theirs = ENTITY_ATTACK.get(entity, {}).get(row["way"], (None, None))
            ours = (row["attributes"][entity][side] for side in ("absent", "present"))
            cells += [_with_theirs(*both) for both in zip(ours, theirs, strict=True)]
        rows.append(plain_row(name_of(row), *cells))
    entities = [entity.removeprefix("entity_") for entity in section["private"]]
    return Table(
        number="5",
        title="What the attacker reads of each entity",
        note="The MLP's accuracy in per cent where the entity is absent (A) and present (P); theirs in brackets.",
        columns=_columns([f"{entity} {side}" for entity in entities for side in "AP"]),
        rows=rows,
    )


def _by_group(section: dict[str, Any]) -> Table:
    """Tables 6 and 7: the main task by group, and whether the gap may be chance."""
    rows = [
        plain_row(f"{attribute}: {name_of(row)}", *cells)
        for attribute in section["private"]
        for row in _compared(section)
        if (cells := _group_cells(section, row, attribute)) is not None
    ]
    return Table(
        number="7" if section["kind"] == "entities" else "6",
        title="Fairness: the main task by group",
        note="Accuracy in one group, and how much more it is in the other; p is the middle of the seeds' tests that "
        "the groups fare alike.",
        columns=_columns(("one group", "the other", "theirs", "p")),
        rows=rows,
    )


def _group_cells(section: dict[str, Any], row: Way, attribute: str) -> tuple[str, ...] | None:
    """One attribute of two groups; one of more, such as plays, has no place in the paper's table."""
    groups = row["groups"][attribute]
    accuracy, paper = groups["accuracy"], GROUPS.get((section["paper"] or "", attribute), {})
    one, other = paper.get("pair") or (*accuracy, "", "")[:2]
    if len(accuracy) != 2 or {one, other} != {*accuracy}:
        return None
    theirs = paper.get(row["way"])
    gap = accuracy[other]["mean"] - accuracy[one]["mean"]
    return (
        f"{one} {_mean(accuracy[one])}",
        f"{other} {100 * gap:+.2f}",
        NONE if theirs is None else f"{theirs[0]:.2f}, {theirs[1]:+.2f}",
        NONE if groups["p"] is None else f"{groups['p']:.2g}",
    )


def _compared(section: dict[str, Any]) -> Iterator[Way]:
    """The rows of Table 4: the baselines, DPNR at its smallest ε, and our calibrated mechanisms."""
    for way in ("none", "adversarial"):
        yield from _all(section, way)
    plain = [row for row in _all(section, "dpnr") if not row["dropout"]]
    if plain:
        yield min(plain, key=lambda row: float(row["epsilon"]))
    for way in ("laplace", "gaussian"):
        yield from _all(section, way)


def _all(section: dict[str, Any], way: str) -> list[Way]:
    return [row for row in section["rows"] if row["way"] == way]


def _whole(row: Way) -> tuple[str, str]:
    """ε of the whole vector, and the texts it holds for."""
    record = row.get("guarantee") or {}
    if record.get("epsilon") is None:
        return "none", NONE
    return rounded_up(record["epsilon"]), adjacency_words(record)


def _mean(figure: OverSeeds | None) -> str:
    """A mean over seeds in per cent, with its spread where there are several."""
    if figure is None or figure.get("mean") is None:
        return NONE
    spread = figure.get("spread")
    return f"{100 * figure['mean']:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def _theirs(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _with_theirs(ours: OverSeeds, theirs: float | None) -> str:
    shown = NONE if ours.get("mean") is None else f"{100 * ours['mean']:.1f}"
    return shown if theirs is None else f"{shown} ({theirs:.1f})"


def csv_text(sections: Sequence[dict[str, Any]]) -> str:
    """Every cell of every table, one a line."""
    return kit.csv_text(
        [
            {"corpus": section["name"], "table": table.number, "row": row.name, "column": column.name, "value": cell.value}
            for section in sections
            for table in tables(section)
            for row in table.rows
            for column, cell in zip(table.columns[1:], row.cells, strict=True)
        ]
    )  # fmt: skip
