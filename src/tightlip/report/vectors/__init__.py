"""Attacks on private vectors as one HTML file: no network, no script, no text of anybody.

Its plots: curves over ε and μ, attackers side by side, and t-SNE pictures.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from markupsafe import Markup

from tightlip.core.figures import count, number
from tightlip.report.kit import table
from tightlip.report.kit.plots import Axis, Labels, Plot, along, draw_line, linear_axis, short
from tightlip.report.kit.table import NONE, Column, Figure, Table, plain_row
from tightlip.report.vectors import words
from tightlip.report.vectors.words import Result, RunColumn

MOST_GROUPS = 12
OPEN_RUNS = 2  # of more runs the details begin folded
# A colour each in page.css; further values share the last.
MOST_COLOURS = 6
SERIES = (
    ("main", "main-task accuracy", lambda r: r["main"]["all"]),
    ("strongest", "1 − X, strongest on one vector", lambda r: _privacy(r, "strongest")),
    ("averaged", "1 − X, averages of several", lambda r: _privacy(r, "averaged")),
    ("majority", "1 − X, guessing", lambda r: _privacy(r, "majority")),
)
# Intervals at one ε stand beside each other, not on each other.
ASIDE = {"main": -0.015, "averaged": 0.015}
OF_RUNS: dict[str, Any] = {"width": 430, "height": 290, "left": 56}  # a plot of several runs
Get = Callable[[Result], Figure | None]


def _privacy(result: Result, name: str) -> Figure | None:
    """1 - X, or 1 - F with a tuned threshold where names are all there is to hide."""
    if result["privacy"]:
        return (result["privacy"].get(name) or {}).get("all")
    if not (entities := result["entities"]):
        return None
    if name == "majority":
        bars: list[Figure] = [entities[one]["all"] for one in ("majority", "everywhere")]
        return min(bars, key=lambda figure: figure["value"])
    attacker = entities["attackers"].get(name)
    return None if attacker is None else attacker["all"]["one_minus_f_tuned"]


def curves(columns: Sequence[RunColumn]) -> list[tuple[str, str, Markup]]:
    """For each way of adding noise the curve over ε, and over μ, where there are two points."""
    noisy = [column for column in columns if column.first["guarantee"].get("epsilon") is not None]
    bare = [column for column in columns if column not in noisy]
    drawn = []
    for (mechanism, dropout), group in _grouped(noisy, "dropout", varies="epsilon"):
        masked = f"{100 * dropout:g}% of words masked" if dropout else "no word masked"
        curve = _curve(group, bare, "epsilon", "ε of the whole vector")
        drawn.append(("Over ε", f"{mechanism}, {masked}", curve))
    for (mechanism, epsilon), group in _grouped(noisy, "epsilon", varies="dropout"):
        per = "of one coordinate" if mechanism == "laplace-as-published" else "of the vector"
        curve = _curve(group, bare, "dropout", "share of words masked, μ")
        drawn.append(("Over μ", f"{mechanism} at ε {epsilon:g} {per}", curve))
    return drawn


def _grouped(
    columns: Sequence[RunColumn], fixed: str, *, varies: str
) -> Iterator[tuple[tuple[str, float], list[RunColumn]]]:
    """Runs of one mechanism and one `fixed` setting, where there are two points to draw."""
    groups: dict[tuple[str, float], list[RunColumn]] = {}
    for column in columns:
        groups.setdefault((column.first["mechanism"], column.first[fixed]), []).append(column)
    for key, group in groups.items():
        if len({column.first[varies] for column in group}) > 1:
            yield key, group


def _curve(group: list[RunColumn], bare: list[RunColumn], varies: str, label: str) -> Markup:
    """Utility and privacy along one parameter; runs without noise stand at the right."""
    plot = Plot(
        title=f"Main-task accuracy and empirical privacy over {label}",
        description="Higher is better for both. Bars are 95% intervals.",
        **OF_RUNS,
    )
    axis = _roomy([column.figure(get) for column in [*group, *bare] for _, _, get in SERIES])
    plot.y_axis(axis, "share of test rows")
    group = sorted(group, key=lambda column: _place(column, varies))
    values = [_place(column, varies) for column in group]
    use_log = varies == "epsilon" and min(values) > 0
    shares = [along(value, values, log=use_log, end=0.8 if bare else 0.94) for value in values]
    beyond = [0.8 + 0.16 * (n + 1) / len(bare) for n in range(len(bare))]
    for kind, name, get in SERIES:
        _series(plot, axis, list(zip(shares, group, strict=True)), kind, name, get)
        for share, column in zip(beyond, bare, strict=True):
            _series(plot, axis, [(share, column)], kind, name, get)
    ticks = [(share, short(float(f"{at:.3g}"))) for share, at in zip(shares, values, strict=True)]
    called = {"none": "no noise", "adversarial": "advers."}
    bare_names = [called.get(column.first["method"], "bare") for column in bare]
    plot.x_labels(ticks + list(zip(beyond, bare_names, strict=True)), label)
    return plot.svg()


def _place(column: RunColumn, varies: str) -> float:
    """The whole vector's ε, or the share of words masked."""
    stated = column.first["guarantee"] if varies == "epsilon" else column.first
    return float(stated[varies])


def _series(
    plot: Plot, axis: Axis, columns: list[tuple[float, RunColumn]], kind: str, name: str, get: Get
) -> None:
    aside = ASIDE.get(kind, 0.0)
    every = [(share + aside, column, column.figure(get)) for share, column in columns]
    known = [(share, column, figure) for share, column, figure in every if figure is not None]
    for share, _, figure in known:
        _whisker(plot, plot.x(share), axis, figure, kind)
    points = [
        (share, axis.at(figure["value"]), _tip(column.name, column.first, name, figure))
        for share, column, figure in known
    ]
    draw_line(plot, points, f"way-{kind}")


def _tip(run: str, result: Result, name: str, figure: Figure) -> str:
    ends = f" ({ends})" if (ends := table.range_words(figure)) else ""
    return f"{run} ({words.setting_words(result)}), {name}: {table.share_words(figure)}{ends}"


def _whisker(plot: Plot, x: float, axis: Axis, figure: Figure, kind: str) -> None:
    low, high = figure["low"], figure["high"]
    if figure.get("spread") is not None:
        low, high = (figure["value"] + side * figure["spread"] for side in (-1, 1))
    if low is not None:
        bottom, top = (plot.y(axis.at(end)) for end in (low, high))
        plot.draw("line", x1=x, x2=x, y1=bottom, y2=top, class_=f"whisker way-{kind}")


def tradeoff(columns: Sequence[RunColumn]) -> Markup | None:
    """Utility against privacy, a mark for each run: up and to the right is better."""
    points = [(one, one.figure(SERIES[0][2]), one.figure(SERIES[1][2])) for one in columns]
    known = [(c, main, privacy) for c, main, privacy in points if main and privacy]
    if len(known) < 2:
        return None
    plot = Plot(
        title="Utility against empirical privacy",
        description="Each run's main-task accuracy and 1 − X of the strongest attacker on one vector.",
        right=22,
        **OF_RUNS,
    )
    across = _roomy([main for _, main, _ in known], ("value",))
    up = _roomy([privacy for _, _, privacy in known], ("value",))
    plot.y_axis(up, "1 − X, strongest")
    plot.x_axis(across, "main-task accuracy")
    places = [
        (plot.x(across.at(main["value"])), plot.y(up.at(privacy["value"])))
        for _, main, privacy in known
    ]
    labels = Labels(plot, places)
    for (column, main, privacy), (x, y) in zip(known, places, strict=True):
        kind = "private" if column.first["guarantee"].get("epsilon") is not None else "open"
        setting = words.setting_words(column.first)
        tip = f"{column.name} ({setting}): main task {table.share_words(main)}, 1 − X {table.share_words(privacy)}"
        plot.draw("circle", cx=x, cy=y, r=5, class_=f"run {kind}", tip=tip)
        labels.draw(setting, x, y)
    return plot.svg()


def _roomy(
    figures: Sequence[Figure | None], ends: Sequence[str] = ("value", "low", "high")
) -> Axis:
    """An axis in per cent with room around the figures, or around their intervals."""
    every = [figure[end] for figure in figures if figure for end in ends]
    values = [value for value in every if value is not None]
    room = max(0.02, 0.15 * (max(values) - min(values)))
    axis = linear_axis(min(1.0, max(values) + room), low=max(0.0, min(values) - room))
    return replace(axis, ticks=[(value, f"{100 * value:g}%") for value, _ in axis.ticks])


def attacker_plot(name: str, attribute: dict[str, Any]) -> Markup:
    """Each attacker's accuracy with its interval, the majority's as a line."""
    measured = {*attribute["attackers"]} - {"strongest"}
    shown = [(who, label) for who, label in words.ATTACKER_NAMES.items() if who in measured]
    plot = Plot(
        title=f"Attackers on {name}",
        description="Accuracy of each attacker with its 95% interval; the dashed line is guessing the commonest value.",
        width=430,
        height=60 + 28 * len(shown),
        left=152,
        right=22,
    )
    figures = [attribute["attackers"][who]["all"]["accuracy"] for who, _ in shown]
    majority = attribute["majority"]["all"]
    axis = _roomy([*figures, majority])
    for value, _ in axis.ticks:
        plot.upright(axis.at(value), "grid")
    plot.x_axis(axis, "accuracy")
    guessing = f"guessing the commonest value: {table.share_words(majority)}"
    plot.upright(axis.at(majority["value"]), "mark", tip=guessing)
    for place, ((who, label), figure) in enumerate(zip(shown, figures, strict=True)):
        height = plot.y(1 - (place + 0.5) / len(shown))
        strong = " strong" if who == attribute["strongest"] else ""
        plot.write(label, plot.left - 9, height + 4, f"tick end{strong}")
        tip = f"{label}: {table.share_words(figure)} ({table.range_words(figure) or 'no interval'})"
        if figure["low"] is not None:
            x1, x2 = (plot.x(axis.at(figure[end])) for end in ("low", "high"))
            level: dict[str, Any] = {"x1": x1, "x2": x2, "y1": height, "y2": height}
            plot.draw("line", **level, class_=f"whisker who-{who}", tip=tip)
        x = plot.x(axis.at(figure["value"]))
        plot.draw("circle", cx=x, cy=height, r=5, class_=f"who who-{who}", tip=tip)
    return plot.svg()


def pictures(result: Result, name: str) -> list[tuple[str, Markup]]:
    """The test vectors in two dimensions before and after the noise, coloured by an attribute."""
    if (picture := result["picture"]) is None:
        return []
    codes, names = picture["codes"][name], words.value_names(result["attributes"][name])
    titles = {"before": "before the noise", "after": "after the noise"}
    if result["mechanism"] == "none":  # vectors that are released bare have one
        masked = {"after": "with words masked"} if result["dropout"] else {}
        titles = {"before": "without noise", **masked}
    return [
        (title, _scatter(f"{name}, {title}", picture[key], codes, names))
        for key, title in titles.items()
    ]


def legend(attribute: dict[str, Any]) -> list[tuple[int, str]]:
    """A colour's number and the value it stands for."""
    names = words.value_names(attribute)
    if len(names) > MOST_COLOURS:
        most = MOST_COLOURS - 1
        names = [*names[:most], f"{len(names) - most} others"]
    return list(enumerate(names))


def _scatter(title: str, places: list[list[float]], codes: list[int], names: list[str]) -> Markup:
    what = "t-SNE of the test vectors; colours are values of the attribute."
    margins: dict[str, Any] = dict.fromkeys(("left", "right", "top", "bottom"), 6)
    plot = Plot(title=title, description=what, width=300, height=300, **margins)
    circles: dict[int, list[str]] = {}
    for (across, up), code in zip(places, codes, strict=True):
        circle = f'<circle cx="{plot.x(across):.1f}" cy="{plot.y(up):.1f}" r="2.6"/>'
        circles.setdefault(code, []).append(circle)
    # One tooltip for a group keeps a page with many pictures small.
    for code, marks in sorted(circles.items()):
        colour = min(code, MOST_COLOURS - 1) if code >= 0 else "unknown"
        opening = Markup('<g class="point value-{}"><title>{}</title>').format(
            colour, names[code] if code >= 0 else "not known"
        )
        plot.parts.append(opening + Markup("".join(marks)) + Markup("</g>"))
    return plot.svg()


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
        columns = words.columns_of(self.results)
        return {
            "headline": words.headline(self.results),
            "version": self.version,
            "num_runs": len(self.results),
            "num_columns": len(columns),
            "lead": _lead(self.results),
            "remarks": words.notes_of(self.results),
            "curves": curves(columns),
            "tradeoff": tradeoff(columns),
            "table": words.attack_table(columns),
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
        "setting": words.setting_words(result),
        "findings": words.findings(result),
        "promise": _promise(result),
        "attributes": [_attribute(result, name) for name in result["attributes"]],
        "names": _names(result),
    }


def _promise(result: Result) -> str:
    record = result["guarantee"]
    figure, standing = words.promise_words(result)
    if record.get("epsilon") is None:
        return f"No guarantee ({standing}). {record.get('because') or ''}"
    several = ""
    if releases := result.get("releases"):
        several = f" {releases['num']} releases of one text cost {words.releases_words(result)} ({releases['how']})."
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
    names = dict(zip(map(str, attribute["values"]), words.value_names(attribute), strict=True))
    largest = sorted(groups.items(), key=lambda pair: -pair[1]["num_rows"])[:MOST_GROUPS]
    rows = []
    for value, one in largest:
        sizes = [count(one[name]) for name in ("num_rows", "num_users")]
        rows.append(plain_row(names[value], table.share_words(one), table.range_words(one), *sizes))
    headings = (f"Main task by {name}", "accuracy", "95%", "rows", "users")
    return Table(columns=[*map(Column, headings)], rows=rows)


def _gap(fairness: dict[str, Any]) -> str:
    gap, p, test = fairness["gap"], fairness["p"], fairness["test"]
    if gap is None:
        return "One group only, so there is no gap."
    ends = table.range_words(gap)
    if len(fairness["groups"]) > 2:
        ends = "no interval, since best and worst of several groups are picked by these very rows"
    chance = test if p is None else f"{table.p_words(p)}: {test}"
    return f"Gap {table.points_words(gap, sign='')} points{f' ({ends})' if ends else ''}; {chance}."


def _names(result: Result) -> Table | None:
    """Each name by its number: how frequent, and how well it is told."""
    if not (entities := result["entities"]):
        return None
    rows = []
    for place, share in enumerate(entities["shares"]):
        areas = [entities["each"][who][place]["auc"]["value"] for who in ("strongest", "bare")]
        shown = [NONE if area is None else number(area) for area in areas]
        rows.append(plain_row(f"name {place + 1}", table.share_words({"value": share}), *shown))
    headings = ("Name, most frequent first", "in test texts", "AUC, one vector", "AUC, bare")
    return Table(columns=[*map(Column, headings)], rows=rows)
