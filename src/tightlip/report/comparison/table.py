"""The comparison as a table: measures as rows and runs as columns, and as CSV."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table as RichTable

from tightlip.core import files
from tightlip.core.figures import UNKNOWN, count, counted, number
from tightlip.report.kit.table import NAMES, NONE, Cell, Column, Row, Table

RunFigures = dict[str, Any]  # a run of comparison.json
MOST_REPETITIONS = 5  # of a long schedule, in the table; the page's plots and the CSV have all
NARROWEST = 12  # of a run's column in the terminal
LEVELS = ("documents", "users")
CANNOT_SHOW = "cannot show"  # exposed or not: the space is too small
# A record of an earlier version may lack the first of them.
LEADING = ("ez", "reference", "min_k", "loss")
FOUND = "tpr_at_1_percent_fpr"


def comparison_table(rows: Sequence[RunFigures]) -> Table:
    """Every measure of every run, as printed."""
    unique = [_owned(row, "unique", "users_with_unique") for row in rows]
    lines = [
        Row("Model", [Cell(row["model"] or "none") for row in rows], "Utility"),
        Row("Validation perplexity", [_interval(row["perplexity"]) for row in rows], "Utility"),
        Row("Matched utility", [_matched(row) for row in rows], "Utility"),
        Row("Leaks", [_owned(row, "leaks", "people_affected") for row in rows], "Leakage"),
        Row("Unique by tokens", unique, "Leakage"),
        Row("Leakage ε_l", [Cell(number(row["leakage_epsilon"])) for row in rows], "Leakage"),
        *_exposures(rows),
        *(
            Row(f"Tab, {kind}", [_tab(row, kind) for row in rows], "Leakage")
            for kind in ("planted", "real")
            if any(row["tab"][kind] for row in rows)
        ),
        *_memberships(rows),
        Row("Gap, low-5 to top-5", [_gap(row) for row in rows], "Who pays"),
        Row("Seconds per epoch", [_seconds(row) for row in rows], "Cost"),
        Row("Guarantee", [_guarantee(row) for row in rows], "Promise"),
    ]
    runs = [Column(row["name"], _mitigation(row), left=True) for row in rows]
    return Table(columns=[NAMES, *runs], rows=lines, names_sections=False)


def _mitigation(row: RunFigures) -> str:
    alone = {"none": "no mitigation", UNKNOWN: f"mitigation {UNKNOWN}"}
    return alone.get(row["mitigation"], str(row["mitigation"]))


def _interval(figure: dict[str, Any] | None, sign: str = "") -> Cell:
    """A value with its interval beneath."""
    if figure is None:
        return Cell(UNKNOWN)
    value = number(figure["value"])
    value = f"{sign}{value}" if figure["value"] > 0 else value
    if figure.get("low") is None:
        return Cell(value)
    return Cell(value, f"{_limit(figure['low'])} to {_limit(figure['high'])}")


def _limit(value: float) -> str:
    """An interval's end: no finer than it deserves, and short enough for a narrow column."""
    return f"{value:,.0f}" if abs(value) >= 10 else number(value)


def _matched(row: RunFigures) -> Cell:
    if row["is_baseline"]:
        return Cell("baseline")
    return Cell({True: "yes", False: "no", None: UNKNOWN}[row["comparable"]])


def _owned(row: RunFigures, name: str, owners: str) -> Cell:
    """A count, with the number of people whose text that is beneath."""
    whose = f"of {counted(row[owners], 'person', 'people')}" if row[owners] else ""
    return Cell(count(row[name]), whose)


def chosen_repetitions(rows: Sequence[RunFigures]) -> list[int]:
    """The repetition counts that the table shows: all, or of many the ends and some between."""
    every = all_repetitions(rows)
    if len(every) <= MOST_REPETITIONS:
        return every
    step = (len(every) - 1) / (MOST_REPETITIONS - 1)
    return [every[round(place * step)] for place in range(MOST_REPETITIONS)]


def all_repetitions(rows: Sequence[RunFigures]) -> list[int]:
    return sorted({group["repetitions"] for row in rows for group in row["exposure"]})


def exposure_at(row: RunFigures, repetitions: int) -> RunFigures | None:
    """The row's canaries that were planted so often."""
    return next((group for group in row["exposure"] if group["repetitions"] == repetitions), None)


def _exposures(rows: Sequence[RunFigures]) -> Iterator[Row]:
    if not (chosen := chosen_repetitions(rows)):
        yield Row("Exposure (bits)", [Cell(UNKNOWN)] * len(rows), "Leakage")
        return
    for times in chosen:
        groups = [exposure_at(row, times) for row in rows]
        bits = [Cell(f"{group['mean_bits']:.1f}" if group else UNKNOWN) for group in groups]
        yield Row(f"Exposure, {times:,}× (bits)", bits, "Leakage")
    above = next(row["exposed_above_bits"] for row in rows if row["exposure"])
    if above is not None:
        yield Row(f"Exposed (> {above:.1f} bits)", [_exposed(row) for row in rows], "Leakage")


def _exposed(row: RunFigures) -> Cell:
    if not row["exposure"]:
        return Cell(UNKNOWN)
    able = [group for group in row["exposure"] if group["num_exposed"] is not None]
    if not able:
        return Cell(CANNOT_SHOW)
    exposed, every = (sum(one[name] for one in able) for name in ("num_exposed", "num_canaries"))
    return Cell(f"{count(exposed)} of {count(every)}")


def _tab(row: RunFigures, kind: str) -> Cell:
    if (tab := row["tab"][kind]) is None:
        return Cell(UNKNOWN)
    most = tab["ceiling"]
    under = f"{count(most)} at most" if most < tab["num_canaries"] else ""
    return Cell(f"{count(tab['successes'])} of {count(tab['num_canaries'])}", under)


def membership_score(rows: Sequence[RunFigures]) -> str:
    """The score that the table shows: the first of those that lead which every run has."""
    levels = [row["membership"]["documents"] for row in rows if row["membership"]]
    for score in LEADING:
        if levels and all(level and level["scores"].get(score) for level in levels):
            return score
    return LEADING[-1]


def _memberships(rows: Sequence[RunFigures]) -> Iterator[Row]:
    score = membership_score(rows)
    by = f" ({title})" if (title := _scores(rows, "documents").get(score)) else ""
    for level, of in (("documents", ""), ("users", ", users")):
        if level == "documents" or any((row["membership"] or {}).get(level) for row in rows):
            areas = [_interval(area(row, level, score)) for row in rows]
            yield Row(f"Membership AUC{by}{of}", areas, "Leakage")
        rates = [area(row, level, score, FOUND) for row in rows]
        if any(rates):
            yield Row(f"Found at 1%{of}", [_percent(rate) for rate in rates], "Leakage")


def score_table(rows: Sequence[RunFigures]) -> Table:
    """The AUC by every score that some run has, on documents and on users."""
    lines = [
        Row(f"{title}, {level}", [_interval(area(row, level, score)) for row in rows])
        for level in LEVELS
        for score, title in _scores(rows, level).items()
    ]
    return Table(columns=[Column("Score"), *(Column(row["name"]) for row in rows)], rows=lines)


def _scores(rows: Sequence[RunFigures], level: str) -> dict[str, str]:
    """The scores that some run has on this level, and what they are called."""
    measured = [(row["membership"] or {}).get(level) or {} for row in rows]
    return {
        name: score.get("title", name)
        for each in measured
        for name, score in each.get("scores", {}).items()
        if score
    }


def area(row: RunFigures, level: str, score: str, figure: str = "auc") -> dict[str, Any] | None:
    """The AUC of one score on documents or users, with its interval, or another figure of it."""
    measured = (row["membership"] or {}).get(level)
    scored = measured["scores"].get(score) if measured else None
    return scored[figure] if scored else None


def _percent(figure: dict[str, Any] | None) -> Cell:
    if figure is None:
        return Cell(UNKNOWN)
    ends = (figure[end] for end in ("value", "low", "high"))
    value, low, high = (None if end is None else f"{100 * end:.3g}" for end in ends)
    return Cell(f"{value}%") if low is None else Cell(f"{value}%", f"{low} to {high}%")


def not_counted(row: RunFigures) -> dict[str, int]:
    """How many documents and tokens membership could not count; empty where it is not known."""
    return (row["membership"] or {}).get("not_counted") or {}


def _gap(row: RunFigures) -> Cell:
    if row["is_baseline"]:
        return Cell("–")
    return _interval(row["gap"]["perplexity"] if row["gap"] else None, sign="+")


def _seconds(row: RunFigures) -> Cell:
    if row["seconds_per_epoch"] is None:
        return Cell(UNKNOWN)
    times = row["times_baseline"]
    under = "" if times is None or row["is_baseline"] else f"{times:.2f}×"
    return Cell(number(row["seconds_per_epoch"]), under)


def _guarantee(row: RunFigures) -> Cell:
    promise = row["guarantee"]
    return Cell(promise["words"], "insecure seed" if promise["insecure"] else "", "long")


def repetition_table(rows: Sequence[RunFigures]) -> Table:
    """Mean exposure of every run that has canaries, a line for each repetition count."""
    known = [row for row in rows if row["exposure"]]
    lines = [
        Row(f"{times:,}×", [_repeated(exposure_at(row, times)) for row in known])
        for times in all_repetitions(rows)
    ]
    return Table(columns=[Column("Bits"), *(Column(row["name"]) for row in known)], rows=lines)


def _repeated(group: RunFigures | None) -> Cell:
    return Cell(NONE) if group is None else Cell(number(group["mean_bits"]), exposed_words(group))


def exposed_words(group: RunFigures) -> str:
    if group["num_exposed"] is None:
        return CANNOT_SHOW
    return f"{count(group['num_exposed'])} of {count(group['num_canaries'])} exposed"


def terminal_tables(rows: Sequence[RunFigures], width: int) -> list[RichTable]:
    """The table in as many parts as the width asks for, the baseline first in each.

    Holds:
        narrow: no part is wider than `width`.
        all: every run is in exactly one part, but for the baseline.
    """
    table = comparison_table(rows)
    left = width - max(len(row.name) for row in table.rows)
    base = next(place for place, row in enumerate(rows) if row["is_baseline"])
    others = [place for place in range(len(rows)) if place != base]
    size = max(1, left // (NARROWEST + 2) - 1)
    parts = [[base, *others[start : start + size]] for start in range(0, max(len(others), 1), size)]
    widths = [max(NARROWEST, min(26, left // len(part) - 2)) for part in parts]
    sized = zip(parts, widths, strict=True)
    return [table.only(part, widest=widest).printed() for part, widest in sized]


def csv_text(rows: Sequence[RunFigures]) -> str:
    """One line for each run; what is not known is empty.

    Holds:
        empty_is_unknown: a figure of 0 is written as 0, a figure that is not known as nothing.
    """
    return files.csv_text([dict(_flat(row)) for row in rows])


def _flat(row: RunFigures) -> Iterator[tuple[str, Any]]:
    yield from ((name, row[name]) for name in ("name", "mitigation", "model"))
    yield "baseline", row["is_baseline"]
    yield "comparable", row["comparable"]
    yield "verdict", " ".join(row["verdicts"])
    yield from _limits("validation_perplexity", row["perplexity"])
    by_text = ("leaks", "people_affected")
    for name in (*by_text, "unique", "users_with_unique", "num_users", "leakage_epsilon"):
        yield name, row[name]
    for group in row["exposure"]:
        yield f"exposure_bits_at_{group['repetitions']}", group["mean_bits"]
        yield f"exposed_at_{group['repetitions']}", group["num_exposed"]
        yield f"canaries_at_{group['repetitions']}", group["num_canaries"]
    yield "exposed_above_bits", row["exposed_above_bits"]
    for kind, tab in row["tab"].items():
        for name in ("successes", "num_canaries", "ceiling"):
            yield f"tab_{kind}_{name}", tab[name] if tab else None
    for scale in ("perplexity", "log"):
        yield from _limits(f"gap_{scale}", row["gap"][scale] if row["gap"] else None)
    for level in LEVELS:
        for score in ((row["membership"] or {}).get(level) or {}).get("scores", ()):
            yield from _limits(f"membership_{level}_{score}_auc", area(row, level, score))
            found = area(row, level, score, FOUND)
            yield from _limits(f"membership_{level}_{score}_{FOUND}", found)
    for name in ("num_documents", "num_tokens"):
        yield f"membership_{name}_not_counted", not_counted(row).get(name)
    yield from ((name, row[name]) for name in ("seconds_per_epoch", "times_baseline"))
    promise = row["guarantee"]
    people = promise.get("people") or {}
    yield from ((f"people_{name}", people.get(name)) for name in ("epsilon", "delta", "runs"))
    for name in ("epsilon", "delta", "unit", "standing", "arithmetic", "because"):
        yield name, promise.get(name)
    yield "insecure_seed", None if promise["epsilon"] is None else bool(promise["insecure"])


def _limits(name: str, figure: dict[str, Any] | None) -> Iterator[tuple[str, Any]]:
    for end, ending in (("value", ""), ("low", "_low"), ("high", "_high")):
        yield f"{name}{ending}", (figure or {}).get(end)
