"""Attacks on private vectors in words and figures: columns, headline, findings; and the runs side by
side, one list of lines for the page and for the terminal.

A column is a run, or several of one setting that differ in their seed. Its figures are then
means over the seeds, with their spread in place of an interval.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable

from tightlip.core.figures import count, number, rounded_up
from tightlip.report.kit import table
from tightlip.report.kit.table import NAMES, NONE, Cell, Column, Figure, Row, Table

Result = dict[str, Any]
ATTACKER_NAMES = {
    "strongest": "strongest on one vector",
    "mlp": "the paper's MLP",
    "logistic": "logistic regression",
    "trees": "boosted trees",
    "averaged": "averages",
    "bare": "bare vectors",
}
ANY_TWO, ONE_WORD = "any two texts", "one word differs"
GUESSING = "guessing (majority)"
NOT_IN_TRAIN = "rows not in train"
Measure = tuple[str, list[Cell]]  # its name, and a figure of every column
METHOD_NAMES = {"dpnr": "noise", "none": "no noise", "adversarial": "adversarial, no noise"}


@dataclass(frozen=True, kw_only=True)
class RunColumn:
    """A run, or the runs of one setting over several seeds."""

    name: str
    runs: list[Result]

    @property
    def first(self) -> Result:
        return self.runs[0]

    def figure(self, get: Callable[[Result], Figure | None]) -> Figure | None:
        """One run's figure, or the mean over seeds with `spread`; null where one has none."""
        figures = [get(run) for run in self.runs]
        known = [one for one in figures if one is not None and one["value"] is not None]
        if not known or len(known) < len(figures):
            return None
        if len(known) == 1:
            return known[0]
        values = [one["value"] for one in known]
        spread = statistics.stdev(values)
        return {"value": statistics.fmean(values), "low": None, "high": None, "spread": spread}


def columns_of(results: Sequence[Result]) -> list[RunColumn]:
    """Runs in the order given, those of one group of seeds together."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.get("group") or result["run"], []).append(result)
    return [RunColumn(name=name, runs=runs) for name, runs in groups.items()]


def epsilon_words(result: Result) -> str:
    """The whole vector's ε, which is the one that may be compared."""
    epsilon = result["guarantee"].get("epsilon")
    return "no ε" if epsilon is None else f"ε {rounded_up(epsilon)}"


def setting_words(result: Result) -> str:
    """What was done to the vectors, in a few words.

    >>> setting_words({"method": "dpnr", "mechanism": "laplace", "dropout": 0.5, "epsilon": 4.0})
    'laplace, ε 4, μ 0.5'
    """
    masked = f", μ {result['dropout']:g}" if result["dropout"] else ""
    if result["method"] != "dpnr":
        method = str(result["method"])
        return METHOD_NAMES.get(method, method) + masked
    # A calibrated mechanism spends its target or a hair less; the published ε is of a coordinate.
    published = result["mechanism"] == "laplace-as-published"
    epsilon = epsilon_words(result) if published else f"ε {result['epsilon']:g}"
    return f"{result['mechanism']}, {epsilon}{masked}"


def promise_words(result: Result) -> tuple[str, str]:
    """ε, and its δ with its standing and the texts it holds for."""
    record = result["guarantee"]
    if record.get("epsilon") is None:
        return "none", str(record.get("standing") or "measured only")
    standing = (record.get("standings") or {}).get("epsilon") or record["standing"]
    return epsilon_words(result), f"δ {record['delta']:g}, {standing}; {adjacency_words(record)}"


def adjacency_words(record: dict[str, Any], line: str = "epsilon") -> str:
    """The texts that one figure of a record holds for, and beside it the one for any two texts.

    >>> adjacency_words({"dropout": 0.5, "any_two_texts": {"epsilon": 8.961}})
    'one word differs (any two texts: 8.97)'
    >>> adjacency_words({"dropout": 0.0})
    'any two texts'
    """
    if not record.get("dropout"):
        return ANY_TWO
    other = (record.get("any_two_texts") or {}).get(line)
    return ONE_WORD if other is None else f"{ONE_WORD} ({ANY_TWO}: {rounded_up(other)})"


def releases_words(result: Result) -> str:
    """What the releases that `averaged` hears cost together."""
    if not (releases := result.get("releases")) or releases.get("epsilon") is None:
        return "no bound"
    epsilon = releases["epsilon"]
    return f"ε {rounded_up(epsilon) if epsilon < 1000 else number(epsilon)}"


def releases_adjacency(result: Result) -> str:
    """The texts that the cost of several releases holds for: fewer where masks were counted on."""
    releases = result["releases"]
    if not result["dropout"] or ANY_TWO in releases["how"]:
        return ANY_TWO
    return adjacency_words(
        {"dropout": result["dropout"], "any_two_texts": {"epsilon": releases.get("any_two_texts")}}
    )


def value_names(attribute: dict[str, Any]) -> list[str]:
    """An attribute's values as the page may show them: never somebody's name."""
    values = attribute["values"]
    if attribute["names_people"]:
        return [f"person {place}" for place in range(1, len(values) + 1)]
    return [str(value) for value in values]


def reads(result: Result, attacker: str = "strongest") -> list[str]:
    """The attributes that an attacker tells better than the majority, beyond the interval."""
    return [
        name
        for name, attribute in result["attributes"].items()
        if (table.at("attackers", attacker, "all", "above_majority", "low")(attribute) or 0) > 0
    ]


def headline(results: Sequence[Result]) -> str:
    """The page in one sentence."""
    if len(results) > 1:
        hit = sum(bool(reads(result)) or bool(names_read(result)) for result in results)
        if not hit:
            return f"In none of {len(results)} runs does one vector tell an attacker more than guessing does."
        return f"In {hit} of {len(results)} runs, one vector tells an attacker more than guessing does."
    (result,) = results
    read = reads(result) + (["who is named"] if names_read(result) else [])
    if not read:
        return "From one vector, no attacker here reads what is private better than by guessing."
    return f"From one vector, an attacker reads {table.joined(read)} better than by guessing."


def names_read(result: Result) -> bool:
    """Whether the strongest attacker finds names better than one who says the likeliest of all."""
    if not (entities := result["entities"]):
        return False
    strongest = entities["attackers"]["strongest"]["all"]["one_minus_f_tuned"]
    bar = min(entities[name]["all"]["value"] for name in ("majority", "everywhere"))
    return strongest["high"] is not None and strongest["high"] < bar


def findings(result: Result) -> list[str]:
    """What one run's figures say, in sentences."""
    sentences = [_about_attribute(name, a) for name, a in result["attributes"].items()]
    only_bare = [name for name in reads(result, "bare") if name not in reads(result)]
    if only_bare and result["method"] == "dpnr":
        sentences.append(f"Without the noise, {table.joined(only_bare)} could be read.")
    more = [name for name in reads(result, "averaged") if name not in reads(result)]
    releases = result["releases"]
    if more and releases:
        sentences.append(
            f"Averaging {releases['num']} releases of each text, an attacker reads {table.joined(more)} too; together these "
            f"releases cost {releases_words(result)}."
        )
    for name, fairness in result["fairness"].items():
        if fairness["p"] is not None and fairness["p"] < 0.05:
            sentences.append(
                f"The main task is not equally right for all groups of {name}: {table.points_words(fairness['gap'], sign='')} "
                f"points between the best and the worst ({table.p_words(fairness['p'])})."
            )
    return sentences


def _about_attribute(name: str, attribute: dict[str, Any]) -> str:
    figures = attribute["attackers"]["strongest"]["all"]
    majority = attribute["majority"]["all"]
    by = ATTACKER_NAMES[attribute["strongest"]]
    above = figures["above_majority"]
    verdict = "no better than guessing the commonest value"
    if above["low"] is None:
        verdict = "one test user only, so nothing is certain"
    elif above["low"] > 0:
        verdict = f"{table.points_words(above)} points above guessing ({table.range_words(above, sign='+')})"
    elif (figures["auc"]["low"] or 0) > 0.5:
        verdict = f"it names the value no better than guessing, but ranks people rightly (AUC {figures['auc']['value']:.2f})"
    return f"{name}: {table.share_words(figures['accuracy'])} right by {by}, {table.share_words(majority)} by guessing; {verdict}."


def notes_of(results: Sequence[Result]) -> list[str]:
    """What to keep in mind; a note that several runs share is said once."""
    return list(dict.fromkeys(note for result in results for note in result["notes"]))


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


def _firsts(columns: Sequence[RunColumn], cell: Callable[[Result], Cell]) -> list[Cell]:
    return [cell(column.first) for column in columns]


def _shares(columns: Sequence[RunColumn], *path: str) -> list[Cell]:
    figures = [column.figure(table.at(*path)) for column in columns]
    return [Cell(table.share_words(one), table.range_words(one)) for one in figures]


def _promise(columns: Sequence[RunColumn]) -> Iterator[Measure]:
    yield "Method", _firsts(columns, _method)
    yield "Guarantee of a vector", _firsts(columns, lambda r: Cell(*promise_words(r)))
    yield "ε of one coordinate", _firsts(columns, _coordinate)
    yield "Masked words μ", _firsts(columns, lambda r: Cell(f"{r['dropout']:g}"))


def _method(result: Result) -> Cell:
    method = str(result["method"])
    return Cell(str(result["mechanism"]) if method == "dpnr" else METHOD_NAMES.get(method, method))


def _coordinate(result: Result) -> Cell:
    record = result["guarantee"]
    if (figure := record.get("per_coordinate")) is None:
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
    for who, label in ATTACKER_NAMES.items():
        yield label, _shares(columns, "privacy", who, "all")
        if who == "averaged":
            yield "what these averages cost", _firsts(columns, _cost)
    yield f"strongest, {NOT_IN_TRAIN}", _shares(columns, "privacy", "strongest", "unseen")


def _cost(result: Result) -> Cell:
    """What averaging hears costs many times one vector; that stands beside its success."""
    if not (releases := result.get("releases")):
        return Cell(NONE)
    under = f"{releases['num']} releases"
    if releases["epsilon"] is not None:
        under += f", δ {releases['delta']:g}; {releases_adjacency(result)}"
    return Cell(releases_words(result), under)


def _attribute(columns: Sequence[RunColumn], name: str) -> Iterator[Measure]:
    path = ("attributes", name)
    yield GUESSING, _shares(columns, *path, "majority", "all")
    for who, label in ATTACKER_NAMES.items():
        yield label, _shares(columns, *path, "attackers", who, "all", "accuracy")
    strongest = (*path, "attackers", "strongest", "all")
    above = [column.figure(table.at(*strongest, "above_majority")) for column in columns]
    points = [Cell(table.points_words(one), table.range_words(one, sign="+")) for one in above]
    yield "strongest above guessing, points", points
    areas = [_auc(column.figure(table.at(*strongest, "auc"))) for column in columns]
    yield "AUC of the strongest", areas


def _auc(figure: Figure | None) -> Cell:
    if figure is None:
        return Cell(NONE)
    return Cell(f"{figure['value']:.2f}", table.range_words(figure, scale=1, digits=2))


def _names(columns: Sequence[RunColumn]) -> Iterator[Measure]:
    yield GUESSING, _shares(columns, "entities", "majority", "all")
    yield "every name everywhere", _shares(columns, "entities", "everywhere", "all")
    read = ("entities", "attackers")
    published = (*read, "mlp", "all", "one_minus_f")
    yield f"{ATTACKER_NAMES['mlp']}, as published", _shares(columns, *published)
    for who, label in ATTACKER_NAMES.items():
        yield f"{label}, tuned", _shares(columns, *read, who, "all", "one_minus_f_tuned")
    unseen = (*read, "strongest", "unseen", "one_minus_f_tuned")
    yield f"strongest, tuned, {NOT_IN_TRAIN}", _shares(columns, *unseen)


def _fairness(columns: Sequence[RunColumn]) -> Iterator[Measure]:
    for name in _all(columns, "fairness"):
        yield f"gap by {name}, points", [_gap(column, name) for column in columns]
        yield f"chance of it by {name}", [_chance(column, name) for column in columns]


def _gap(column: RunColumn, name: str) -> Cell:
    """Best group less worst; of several groups they are picked by these rows, so no interval holds."""
    figure = column.figure(table.at("fairness", name, "gap"))
    groups = table.at("fairness", name, "groups")(column.first) or {}
    chosen = len(column.runs) == 1 and len(groups) > 2
    under = f"no interval, best and worst of {len(groups)}" if chosen else table.range_words(figure)
    return Cell(table.points_words(figure, sign=""), under)


def _chance(column: RunColumn, name: str) -> Cell:
    """One run's p; over seeds each run has its own, and they make no common one."""
    if len(column.runs) > 1:
        return Cell(NONE)
    return Cell(table.p_words(table.at("fairness", name, "p")(column.first)))


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
