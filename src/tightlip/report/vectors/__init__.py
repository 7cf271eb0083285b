"""Attacks on private vectors as one HTML file: no network, no script, no text of anybody."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from tightlip.core.figures import count, number
from tightlip.report.comparison import with_flags
from tightlip.report.kit import asset, policy, template
from tightlip.report.vectors.plots import attacker_plot, curves, legend, pictures, tradeoff
from tightlip.report.vectors.table import table_lines
from tightlip.report.vectors.words import (
    Column,
    Result,
    columns_of,
    findings,
    headline,
    notes_of,
    p_words,
    points_words,
    promise_words,
    range_words,
    releases_words,
    setting_words,
    share_words,
    value_names,
)

MOST_GROUPS = 12
OPEN_RUNS = 2  # of more runs the details begin folded
MEANINGS = (
    ("Empirical privacy, 1 − X", "One minus the mean accuracy of an attacker over the private attributes. More is more private, and guessing is the most there is to reach: what lies above it by chance is no gain. It tells of these attackers only; ε bounds all of them."),
    ("1 − F", "The same for names in the text: one minus F1 over the presence of all of them. As published a name is called present where that is likelier than not; with a tuned threshold, where the development part says that it pays."),
    ("Guessing", "Always saying the commonest value of the training part."),
    ("The strongest", "Of the attackers that hear one vector of each text, the one that was best on the development part; its figures are from the test part."),
    ("MLP", "The paper's: two hidden layers of 512 with ReLU, on one vector of each text; learning rate and epoch chosen on the development part."),
    ("Logistic regression", "On one vector of each text. It may learn from averages of its own texts' releases, since every device carries the extractor."),
    ("Averages", "Logistic regression on means of several releases of each text: possible where a device encodes the same text again. The cost of so many releases stands beside it."),
    ("Bare vectors", "Logistic regression on the vectors before noise and without masked words. Nobody is sent these; it shows how much there is to hide."),
    ("AUC", "How often the attacker ranks a row with a value above one without: 0.5 is blind. It shows what accuracy cannot where a value is rare."),
    ("Intervals", "95%, from 1,000 draws of whole users with all their test rows, since what one person writes is alike; with few users widened as Student's t does. They cover the choice of test users, not that of training texts or noise: for these use several seeds."),
    ("Gap, p", "The main task's accuracy in its best group less that in its worst. It has an interval between two groups only: of more, best and worst are picked by the same rows, so that a gap shows where all fare alike. p is how often users who swap groups at random are as far apart, in units of the spread between users; where users have rows in several groups, Wald's F test with a covariance over users."),
    ("ε of a vector", "What bounds every attacker, whatever it learns, for one release of one text. Where words are masked it holds for texts of as many words that differ in one of them; the figure for any two texts stands beside. The published ε is that of one coordinate."),
)  # fmt: skip


def render_attacks(results: Sequence[Result], *, version: str | None = None) -> str:
    """The page of one or several attacked runs, as text.

    Holds:
        alone: it names no other file and no address, and runs no script.
        nobody: no text, no name of a person and no value that is one stands in it.
        costs: what the averaged releases cost stands beside what they find.
    """
    columns = columns_of(results)
    style = (
        asset("report/kit/page.css")
        + asset("report/kit/tables.css")
        + asset("report/vectors/page.css")
    )
    return str(
        template("report/vectors/page.html.jinja").render(
            style=Markup(style),
            policy=policy(style),
            columns=columns,
            num_runs=len(results),
            headline=headline(results),
            lead=_lead(results),
            notes=[with_flags(note) for note in notes_of(results)],
            curves=curves(columns),
            tradeoff=tradeoff(columns),
            lines=table_lines(columns),
            settings=[setting_words(column.first) for column in columns],
            details=[_details(column) for column in columns],
            folded=len(columns) > OPEN_RUNS,
            meanings=MEANINGS,
            version=version,
        )
    )


def _lead(results: Sequence[Result]) -> str:
    first = results[0]
    private = list(first["attributes"]) + (["people's names"] if first["entities"] else [])
    return (
        f"Attackers were trained on the training part's vectors to read {', '.join(private) or 'nothing'}, chose their "
        f"settings on the development part, and are judged on {count(first['num_test'])} test texts of "
        f"{count(first['num_test_users'])} {'users' if first['has_users'] else 'independent rows'}."
    )


def _details(column: Column) -> dict[str, Any]:
    result = column.first
    return {
        "name": column.name if len(column.runs) == 1 else f"{column.name}, first of {len(column.runs)} seeds",
        "setting": setting_words(result),
        "findings": findings(result),
        "promise": _promise(result),
        "attributes": [_attribute(result, name) for name in result["attributes"]],
        "names": _names(result),
    }  # fmt: skip


def _promise(result: Result) -> str:
    record = result["guarantee"]
    figure, standing = promise_words(result)
    if record.get("epsilon") is None:
        return f"No guarantee ({standing}). {record.get('because') or ''}"
    releases = result.get("releases")
    several = (
        f" {releases['num']} releases of one text cost {releases_words(result)} ({releases['how']})."
        if releases
        else ""
    )
    return f"{figure} at {standing}. That is: {record['adjacency']}. {record['because']}{several}"


def _attribute(result: Result, name: str) -> dict[str, Any]:
    attribute = result["attributes"][name]
    found = result["fairness"][name]
    names = dict(zip(map(str, attribute["values"]), value_names(attribute), strict=True))
    groups = sorted(found["groups"].items(), key=lambda pair: -pair[1]["num_rows"])
    return {
        "name": name,
        "plot": attacker_plot(name, attribute),
        "pictures": pictures(result, name),
        "legend": legend(attribute),
        "groups": [
            (names[value], share_words(g), range_words(g), count(g["num_rows"]), count(g["num_users"]))
            for value, g in groups[:MOST_GROUPS]
        ],
        "num_more": max(0, len(groups) - MOST_GROUPS),
        "gap": _gap(found),
    }  # fmt: skip


def _gap(found: dict[str, Any]) -> str:
    if found["gap"] is None:
        return "One group only, so there is no gap."
    test = found["test"] if found["p"] is None else f"{p_words(found['p'])}: {found['test']}"
    ends = range_words(found["gap"])
    if len(found["groups"]) > 2:
        ends = "no interval, since best and worst of several groups are picked by these very rows"
    return (
        f"Gap {points_words(found['gap'], sign='')} points{f' ({ends})' if ends else ''}; {test}."
    )


def _names(result: Result) -> list[tuple[str, ...]] | None:
    """Each name by its number: how frequent, and how well it is told."""
    found = result["entities"]
    if not found:
        return None
    rows = []
    for place, share in enumerate(found["shares"]):
        strongest, bare = (found["each"][who][place] for who in ("strongest", "bare"))
        aucs = [_number(figures["auc"]["value"]) for figures in (strongest, bare)]
        rows.append((f"name {place + 1}", share_words({"value": share}), *aucs))
    return rows


def _number(value: float | None) -> str:
    return "–" if value is None else number(value)
