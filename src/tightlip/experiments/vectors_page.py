"""The experiment of private representations: the DPNR paper's tables 2 to 7 with our figures, theirs
beside them, and the HTML file that shows them.

A section of the experiment is one corpus; its rows are ways of training, each a mean over seeds.
What a row holds: `way` and its settings, `main` (accuracy), `privacy` (1 - X or 1 - F) by
attacker, `strongest` (how often each attacker was chosen by the development part), `attributes`
(what the paper's attacker reads) and `groups` (the main task by group).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tightlip.core import files
from tightlip.core.figures import counted, rounded_up
from tightlip.report.kit.table import NONE, Column, Table, plain_row, share_words
from tightlip.report.vectors.words import ATTACKER_NAMES, adjacency_words

WAYS = {
    "majority": "majority class",
    "none": "non-private",
    "adversarial": "adversarial",
    "dpnr": "DPNR",
    "laplace": "Laplace, calibrated",
    "gaussian": "Gaussian, calibrated",
}
ATTACKERS = ATTACKER_NAMES | {"averaged": "logistic on averaged copies"}
CALIBRATED = ("laplace", "gaussian")
# Empirical privacy, by the kind of what is private.
_PRIVACY = {"entities": "1 - F, F1 over all entities", "attributes": "1 - X, X the mean accuracy"}
Way = dict[str, Any]
OverSeeds = dict[str, Any]  # `mean`, and `spread` where there are several seeds
PAPER_NOTE = (
    "Theirs: BERT base, fine-tuned, five runs (Lyu, He and Li 2020). Their blogs are not ours: topics come from an LDA of "
    "each, so only orders and distances can be compared there."
)


def _by_way(*figures: tuple[float, float]) -> dict[str, tuple[float, float]]:
    return dict(zip(("none", "adversarial", "dpnr"), figures, strict=True))


def _of_groups(one: str, other: str, *figures: tuple[float, float]) -> dict[str, Any]:
    return {"pair": (one, other), **_by_way(*figures)}


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
    "AG": {"majority": (57.79, 49.34), **_by_way((78.75, 23.24), (57.04, 49.67), (80.87, 54.37))},
    "BLOG": {"majority": (34.16, 46.96), **_by_way((97.07, 33.88), (94.63, 35.04), (96.69, 49.74))},
}
# Table 5: the attacker's accuracy where an entity is absent and where it is present.
ENTITY_ATTACK = {
    "entity_3": _by_way((96.71, 81.99), (98.57, 39.71), (90.86, 8.46)),
    "entity_4": _by_way((99.43, 47.20), (100.0, 0.0), (100.0, 0.0)),
    "entity_5": _by_way((96.93, 68.29), (99.87, 12.96), (100.0, 0.0)),
}
# Tables 6 (BLOG) and 7 (AG): accuracy of the main task in one group, and how much more it is in
# the other.
_ENTITY = ("absent", "present")
GROUPS = {
    ("BLOG", "gender"): _of_groups(
        "female", "male", (98.07, -2.18), (93.84, -7.54), (98.00, -2.34)
    ),
    ("BLOG", "age"): _of_groups(
        "under 20", "30 and over", (97.05, -1.49), (91.91, -3.57), (97.09, -0.11)
    ),
    ("AG", "entity_3"): _of_groups(*_ENTITY, (82.67, -18.82), (48.92, 7.82), (83.60, -16.93)),
    ("AG", "entity_4"): _of_groups(*_ENTITY, (80.86, -15.44), (49.64, 6.67), (81.79, -12.22)),
    ("AG", "entity_5"): _of_groups(*_ENTITY, (80.22, -10.78), (49.43, 9.60), (81.04, -6.04)),
}


@dataclass(frozen=True, kw_only=True)
class VectorsPaperPage:
    """The page of the experiment.

    Holds:
        standing: every way's promise stands with its standing.
    """

    files: ClassVar[str] = "experiments/vectors"
    result: dict[str, Any]

    def content(self) -> dict[str, Any]:
        result = self.result
        return {
            "headline": headline(result),
            "version": result["version"],
            "result": result,
            "certainty": certainty(result),
            "sections": [
                {
                    "name": section["name"],
                    "about": about(section),
                    "findings": list(findings(section)),
                    "tables": tables(section),
                    "promises": [(name_of(row), promise_of(row)) for row in section["rows"]],
                }
                for section in result["corpora"]
            ],
            "paper_note": PAPER_NOTE,
        }


def headline(result: dict[str, Any]) -> str:
    """What the experiment says in one sentence, from its first corpus."""
    section = result["corpora"][0]
    plain, private = _all(section, "none")[0], _smallest(section)[0]
    whole = rounded_up(private["guarantee"]["epsilon"])
    seeds = "one seed" if result["num_seeds"] == 1 else f"means over {result['num_seeds']} seeds"
    return (
        f"Noise of ε {private['epsilon']:g} a coordinate, which is {whole} for the whole vector and any two texts, brings the "
        f"main task from {_percent(plain['main'])} to {_percent(private['main'])} (majority class "
        f"{_percent(section['majority']['main'])}; {seeds})."
    )


def certainty(result: dict[str, Any]) -> str:
    """How far chance is told of in the tables: which figures have a spread, and which do not."""
    if result["num_seeds"] == 1:
        return (
            "Every figure of ours, here and in the tables, is of one seed and has no interval: differences of some points "
            "may be chance."
        )
    return (
        f"Ours are means over {result['num_seeds']} seeds; ± is the standard deviation between them and does not cover the "
        "choice of test texts. Table 5 and the gaps of tables 6 and 7 have neither spread nor interval."
    )


def findings(section: dict[str, Any]) -> Iterator[str]:
    """What one corpus shows, in sentences."""
    plain, private = _all(section, "none")[0], _smallest(section)[0]
    least = section["majority"]["privacy"]["mlp"]["mean"]
    for row in (plain, private):
        left = row["privacy"]["strongest"]
        yield (
            f"{name_of(row)}: the strongest attacker ({strongest_words(row)}) leaves {_percent(left)} empirical privacy; "
            f"guessing leaves {100 * least:.1f}%."
        )
    for row in _all(section, *CALIBRATED):
        yield f"{name_of(row)} of the whole vector, any two texts: main task {_percent(row['main'])}."
    if section["num_seen_in_train"]:
        yield (
            f"{section['num_seen_in_train']:,} of {section['num_test']:,} test texts also stand in train. Without them: "
            f"non-private {_percent(plain['main_unseen'])}, {name_of(private)} {_percent(private['main_unseen'])}."
        )


def about(section: dict[str, Any]) -> str:
    users = section["num_test_users"]
    by = "" if users is None else f" by {counted(users, 'writer')}"
    return (
        f"{section['about']} {counted(section['num_train'], 'text')} to train on, {section['num_test']:,} to test{by}; vectors "
        f"of {section['dimensions']} coordinates. Label: {section['label']}. Private: {', '.join(section['private'])}."
    )


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
    if not (record := row.get("guarantee")) or record.get("epsilon") is None:
        return "nothing (measured only)"
    standing = (record.get("standings") or {}).get("epsilon") or record["standing"]
    masked = record.get("dropout")
    any_two = f": ε {rounded_up(record['any_two_texts']['epsilon'])}" if masked else ""
    return (
        f"ε {rounded_up(record['epsilon'])} for the whole vector at δ {record['delta']:g} ({standing}); "
        f"{record['adjacency']}{any_two}"
    )


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


# Of a setting that varies: the other one, where it stands, and what is printed of both.
_VARIED: dict[str, tuple[str, float, str, str]] = {
    "epsilon": ("dropout", 0.0, "ε", "μ = 0"),
    "dropout": ("epsilon", 1.0, "μ", "ε = 1 a coordinate"),
}


def _by_setting(
    section: dict[str, Any], number: str, name: str, paper: dict[str, dict[float | None, float]]
) -> Table:
    """Tables 2 and 3: the main task as one setting varies."""
    theirs = paper.get(section["paper"] or "", {})
    other, fixed, sign, at = _VARIED[name]
    varied = [row for row in _all(section, "dpnr") if row[other] == fixed and row[name]]
    lines = []
    for row in (*_all(section, "none"), *sorted(varied, key=lambda row: float(row[name]))):
        is_bare = row["way"] == "none"
        shown = NONE if is_bare else f"{row[name]:g}"
        beside = _theirs(theirs.get(None if is_bare else row[name]))
        lines.append(plain_row(WAYS[row["way"]], shown, _mean(row["main"]), beside, *_whole(row)))
    return Table(
        number=number,
        title=f"Main task as {sign} varies",
        note=f"Accuracy in per cent; {at}.",
        columns=_columns((sign, "ours", "theirs", "ε of the whole vector", "which holds for")),
        rows=lines,
    )


def _main_and_privacy(section: dict[str, Any]) -> Table:
    """Table 4, with the strongest of our attackers beside the paper's."""
    theirs = MAIN_AND_PRIVACY.get(section["paper"] or "", {})
    lines = []
    for row in ({"way": "majority", **section["majority"]}, *_compared(section)):
        main, privacy = theirs.get(row["way"], (None, None))
        strongest = row["privacy"].get("strongest")
        cells = [_mean(row["main"]), _theirs(main), _mean(row["privacy"]["mlp"]), _theirs(privacy)]
        which = NONE if strongest is None else strongest_words(row)
        lines.append(plain_row(name_of(row), *cells, _mean(strongest), which))
    what = _PRIVACY[section["kind"]]
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
    return Table(
        number="7" if section["kind"] == "entities" else "6",
        title="Fairness: the main task by group",
        note="Accuracy in one group, and how much more it is in the other; p is the middle of the seeds' tests that "
        "the groups fare alike.",
        columns=_columns(("one group", "the other", "theirs", "p")),
        rows=[
            plain_row(f"{attribute}: {name_of(row)}", *cells)
            for attribute in section["private"]
            for row in _compared(section)
            if (cells := _group_cells(section, row, attribute)) is not None
        ],
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


def _compared(section: dict[str, Any]) -> list[Way]:
    """The rows of Table 4: the baselines, DPNR at its smallest ε, and our calibrated mechanisms."""
    return [*_all(section, "none", "adversarial"), *_smallest(section), *_all(section, *CALIBRATED)]


def _all(section: dict[str, Any], *ways: str) -> list[Way]:
    return [row for way in ways for row in section["rows"] if row["way"] == way]


def _smallest(section: dict[str, Any]) -> list[Way]:
    """The DPNR row of the smallest ε without masked words, where there is any."""
    rows = [row for row in _all(section, "dpnr") if not row["dropout"]]
    return sorted(rows, key=lambda row: float(row["epsilon"]))[:1]


def _percent(figure: OverSeeds) -> str:
    return share_words({"value": figure["mean"]})


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
    return files.csv_text([line for section in sections for line in _csv_lines(section)])


def _csv_lines(section: dict[str, Any]) -> Iterator[dict[str, str]]:
    for table in tables(section):
        for row in table.rows:
            of = {"corpus": section["name"], "table": table.number, "row": row.name}
            for column, cell in zip(table.columns[1:], row.cells, strict=True):
                yield {**of, "column": column.name, "value": cell.value}
