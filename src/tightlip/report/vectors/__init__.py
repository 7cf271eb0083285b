"""Attacks on private vectors as one HTML file: no network, no script, no text of anybody."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tightlip.core.figures import count, number
from tightlip.report.kit.table import Column, Table, plain_row
from tightlip.report.kit.words import NONE, p_words, points_words, range_words, share_words
from tightlip.report.vectors.plots import attacker_plot, curves, legend, pictures, tradeoff
from tightlip.report.vectors.table import attack_table
from tightlip.report.vectors.words import (
    Result,
    RunColumn,
    columns_of,
    findings,
    headline,
    notes_of,
    promise_words,
    releases_words,
    setting_words,
    value_names,
)

MOST_GROUPS = 12
OPEN_RUNS = 2  # of more runs the details begin folded


@dataclass(frozen=True, kw_only=True)
class VectorsPage:
    """The page of one or several attacked runs.

    Holds:
        nobody: no text, no name of a person and no value that is one stands in it.
        costs: what the averaged releases cost stands beside what they find.
    """

    files: ClassVar[str] = "report/vectors/page"
    results: Sequence[Result]
    version: str | None = None

    def content(self) -> dict[str, Any]:
        columns = columns_of(self.results)
        return {
            "headline": headline(self.results),
            "version": self.version,
            "num_runs": len(self.results),
            "num_columns": len(columns),
            "lead": _lead(self.results),
            "remarks": notes_of(self.results),
            "curves": curves(columns),
            "tradeoff": tradeoff(columns),
            "table": attack_table(columns),
            "details": [_details(column) for column in columns],
            "folded": len(columns) > OPEN_RUNS,
        }


def _lead(results: Sequence[Result]) -> str:
    first = results[0]
    private = list(first["attributes"]) + (["people's names"] if first["entities"] else [])
    return (
        f"Attackers were trained on the training part's vectors to read {', '.join(private) or 'nothing'}, chose their "
        f"settings on the development part, and are judged on {count(first['num_test'])} test texts of "
        f"{count(first['num_test_users'])} {'users' if first['has_users'] else 'independent rows'}."
    )


def _details(column: RunColumn) -> dict[str, Any]:
    result, num = column.first, len(column.runs)
    return {
        "name": column.name + (f", first of {num} seeds" if num > 1 else ""),
        "setting": setting_words(result),
        "findings": findings(result),
        "promise": _promise(result),
        "attributes": [_attribute(result, name) for name in result["attributes"]],
        "names": _names(result),
    }


def _promise(result: Result) -> str:
    record = result["guarantee"]
    figure, standing = promise_words(result)
    if record.get("epsilon") is None:
        return f"No guarantee ({standing}). {record.get('because') or ''}"
    several = ""
    if releases := result.get("releases"):
        several = f" {releases['num']} releases of one text cost {releases_words(result)} ({releases['how']})."
    return f"{figure} at {standing}. That is: {record['adjacency']}. {record['because']}{several}"


def _attribute(result: Result, name: str) -> dict[str, Any]:
    attribute, fairness = result["attributes"][name], result["fairness"][name]
    num_more = len(fairness["groups"]) - MOST_GROUPS
    more = f" {num_more} smaller groups are in attack.json." if num_more > 0 else ""
    return {
        "name": name,
        "plot": attacker_plot(name, attribute),
        "pictures": pictures(result, name),
        "legend": [(f"value-{place}", value) for place, value in legend(attribute)],
        "groups": _groups(name, attribute, fairness["groups"]),
        "gap": _gap(fairness) + more,
    }


def _groups(name: str, attribute: dict[str, Any], groups: dict[str, Any]) -> Table:
    """The main task by group, the largest groups first."""
    names = dict(zip(map(str, attribute["values"]), value_names(attribute), strict=True))
    largest = sorted(groups.items(), key=lambda pair: -pair[1]["num_rows"])[:MOST_GROUPS]
    rows = []
    for value, one in largest:
        sizes = [count(one[name]) for name in ("num_rows", "num_users")]
        rows.append(plain_row(names[value], share_words(one), range_words(one), *sizes))
    headings = (f"Main task by {name}", "accuracy", "95%", "rows", "users")
    return Table(columns=[*map(Column, headings)], rows=rows)


def _gap(fairness: dict[str, Any]) -> str:
    gap, p, test = fairness["gap"], fairness["p"], fairness["test"]
    if gap is None:
        return "One group only, so there is no gap."
    ends = range_words(gap)
    if len(fairness["groups"]) > 2:
        ends = "no interval, since best and worst of several groups are picked by these very rows"
    chance = test if p is None else f"{p_words(p)}: {test}"
    return f"Gap {points_words(gap, sign='')} points{f' ({ends})' if ends else ''}; {chance}."


def _names(result: Result) -> Table | None:
    """Each name by its number: how frequent, and how well it is told."""
    entities = result["entities"]
    if not entities:
        return None
    rows = []
    for place, share in enumerate(entities["shares"]):
        areas = [entities["each"][who][place]["auc"]["value"] for who in ("strongest", "bare")]
        words = [NONE if area is None else number(area) for area in areas]
        rows.append(plain_row(f"name {place + 1}", share_words({"value": share}), *words))
    headings = ("Name, most frequent first", "in test texts", "AUC, one vector", "AUC, bare")
    return Table(columns=[*map(Column, headings)], rows=rows)
