"""The comparison as a table: measures as rows and runs as columns, and as CSV."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tightlip.core.figures import UNKNOWN, count, counted, number

if TYPE_CHECKING:
    from rich.table import Table


Row = dict[str, Any]  # of comparison.json
MOST_REPETITIONS = 5  # of a long schedule, in the table; the page's plots and the CSV have all
NARROWEST = 12  # of a run's column in the terminal
SCORES = ("loss", "reference", "min_k", "zlib")


class Cell(NamedTuple):
    """A figure and, in small print, its interval or what it is out of."""

    value: str
    under: str = ""


class Line(NamedTuple):
    """One measure of all runs; lines of one section stand together."""

    section: str
    name: str
    cells: list[Cell]


def table_lines(rows: Sequence[Row]) -> list[Line]:
    """Every measure that the table shows, as printed."""
    every: list[tuple[str, str, Any]] = [
        ("Utility", "Model", lambda row: Cell(row["model"] or "none")),
        ("Utility", "Validation perplexity", lambda row: _interval(row["perplexity"])),
        ("Utility", "Matched utility", _matched),
        ("Leakage", "Unique sequences", _unique),
        ("Leakage", "Leakage ε_l", lambda row: Cell(number(row["leakage_epsilon"]))),
        *_exposure_columns(rows),
        *(
            ("Leakage", f"Tab, {kind}", lambda row, kind=kind: _tab(row, kind))
            for kind in ("planted", "real")
            if any(row["tab"][kind] for row in rows)
        ),
        *_membership_columns(rows),
        ("Who pays", "Gap, low-5 to top-5", _gap),
        ("Cost", "Seconds per epoch", _seconds),
        ("Promise", "Guarantee", _guarantee),
    ]
    return [Line(section, name, [of(row) for row in rows]) for section, name, of in every]


def _interval(found: dict[str, Any] | None, sign: str = "") -> Cell:
    """A value with its interval beneath."""
    if found is None:
        return Cell(UNKNOWN)
    value = f"+{number(found['value'])}" if sign and found["value"] > 0 else number(found["value"])
    if found.get("low") is None:
        return Cell(value)
    return Cell(value, f"{_limit(found['low'])} to {_limit(found['high'])}")


def _limit(value: float) -> str:
    """An interval's end: no finer than it deserves, and short enough for a narrow column."""
    return f"{value:,.0f}" if abs(value) >= 10 else number(value)


def _matched(row: Row) -> Cell:
    if row["is_baseline"]:
        return Cell("baseline")
    return Cell({True: "yes", False: "no", None: UNKNOWN}[row["comparable"]])


def _unique(row: Row) -> Cell:
    if row["unique"] is None:
        return Cell(UNKNOWN)
    owners = row["users_with_unique"]
    return Cell(count(row["unique"]), f"of {counted(owners, 'user')}" if owners else "")


def chosen_repetitions(rows: Sequence[Row]) -> list[int]:
    """The repetition counts that the table shows: all, or of many the ends and some between."""
    every = sorted({group["repetitions"] for row in rows for group in row["exposure"]})
    if len(every) <= MOST_REPETITIONS:
        return every
    step = (len(every) - 1) / (MOST_REPETITIONS - 1)
    return [every[round(place * step)] for place in range(MOST_REPETITIONS)]


def exposure_at(row: Row, repetitions: int) -> Row | None:
    """The row's canaries that were planted so often."""
    return next((group for group in row["exposure"] if group["repetitions"] == repetitions), None)


def _exposure_columns(rows: Sequence[Row]) -> Iterator[tuple[str, str, Any]]:
    chosen = chosen_repetitions(rows)
    if not chosen:
        yield "Leakage", "Exposure (bits)", lambda row: Cell(UNKNOWN)
        return
    for times in chosen:
        yield "Leakage", f"Exposure, {times:,}× (bits)", lambda row, times=times: _bits(row, times)
    above = next(row["exposed_above_bits"] for row in rows if row["exposure"])
    if above is not None:
        yield "Leakage", f"Exposed (> {above:.1f} bits)", _exposed


def _bits(row: Row, times: int) -> Cell:
    group = exposure_at(row, times)
    return Cell(UNKNOWN) if group is None else Cell(f"{group['mean_bits']:.1f}")


def _exposed(row: Row) -> Cell:
    if not row["exposure"]:
        return Cell(UNKNOWN)
    exposed = sum(group["num_exposed"] for group in row["exposure"])
    every = sum(group["num_canaries"] for group in row["exposure"])
    return Cell(f"{count(exposed)} of {count(every)}")


def _tab(row: Row, kind: str) -> Cell:
    found = row["tab"][kind]
    if found is None:
        return Cell(UNKNOWN)
    most = found["ceiling"]
    under = f"{count(most)} at most" if most < found["num_canaries"] else ""
    return Cell(f"{count(found['successes'])} of {count(found['num_canaries'])}", under)


def membership_score(rows: Sequence[Row]) -> str:
    """The score that the table shows: the reference model's where every run has it, else the loss."""
    levels = [row["membership"]["documents"] for row in rows if row["membership"]]
    has_all = levels and all(level and level["scores"].get("reference") for level in levels)
    return "reference" if has_all else "loss"


def _membership_columns(rows: Sequence[Row]) -> Iterator[tuple[str, str, Any]]:
    score = membership_score(rows)
    for level in ("documents", "users"):
        known = any((row["membership"] or {}).get(level) for row in rows)
        if known or level == "documents":
            yield (
                "Leakage",
                "Membership AUC" if level == "documents" else "Membership AUC, users",
                lambda row, level=level: _interval(area(row, level, score)),
            )


def area(row: Row, level: str, score: str) -> dict[str, Any] | None:
    """The AUC of one score on documents or users, with its interval."""
    found = (row["membership"] or {}).get(level)
    scored = found["scores"].get(score) if found else None
    return scored["auc"] if scored else None


def not_counted(row: Row) -> dict[str, int]:
    """How many documents and tokens membership could not count; empty where it is not known."""
    return (row["membership"] or {}).get("not_counted") or {}


def _gap(row: Row) -> Cell:
    if row["is_baseline"]:
        return Cell("–")
    return _interval(row["gap"]["perplexity"] if row["gap"] else None, sign="+")


def _seconds(row: Row) -> Cell:
    if row["seconds_per_epoch"] is None:
        return Cell(UNKNOWN)
    times = row["times_baseline"]
    under = "" if times is None or row["is_baseline"] else f"{times:.2f}×"
    return Cell(number(row["seconds_per_epoch"]), under)


def _guarantee(row: Row) -> Cell:
    found = row["guarantee"]
    return Cell(found["words"], "insecure seed" if found["insecure"] else "")


# In the terminal
def terminal_tables(rows: Sequence[Row], width: int) -> list["Table"]:
    """The table in as many parts as the width asks for, the baseline first in each.

    Holds:
        narrow: no part is wider than `width`.
        all: every run is in exactly one part, but for the baseline.
    """
    lines = table_lines(rows)
    label = max(len(line.name) for line in lines)
    num_fitting = max(2, (width - label) // (NARROWEST + 2))
    base = next(place for place, row in enumerate(rows) if row["is_baseline"])
    others = [place for place in range(len(rows)) if place != base]
    size = num_fitting - 1
    parts = [others[start : start + size] for start in range(0, len(others), size)] or [[]]
    return [_terminal_table(rows, lines, [base, *part], width) for part in parts]


def _terminal_table(
    rows: Sequence[Row], lines: list[Line], places: list[int], width: int
) -> "Table":
    from rich.table import Table
    from rich.text import Text

    label = max(len(line.name) for line in lines)
    widest = max(NARROWEST, min(26, (width - label) // len(places) - 2))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True, min_width=label)
    for place in places:
        table.add_column(Text(rows[place]["name"]), overflow="fold", max_width=widest)
    section = lines[0].section
    for line in lines:
        if line.section != section:
            table.add_row("")
            section = line.section
        table.add_row(Text(line.name), *(_printed(line.cells[place]) for place in places))
    return table


def _printed(cell: Cell) -> Any:
    from rich.text import Text

    text = Text(cell.value, style="dim" if cell.value == UNKNOWN else "")
    return text.append(f"\n{cell.under}", style="dim") if cell.under else text


# As CSV
def csv_text(rows: Sequence[Row]) -> str:
    """One line for each run; what is not known is empty.

    Holds:
        empty_is_unknown: a figure of 0 is written as 0, a figure that is not known as nothing.
    """
    flat = [dict(_flat(row)) for row in rows]
    # A run with fewer figures must not push the others' columns to the end.
    fullest_first = sorted(flat, key=len, reverse=True)
    names = list(dict.fromkeys(name for row in fullest_first for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _flat(row: Row) -> Iterator[tuple[str, Any]]:
    yield from ((name, row[name]) for name in ("name", "mitigation", "model"))
    yield "baseline", row["is_baseline"]
    yield "comparable", row["comparable"]
    yield "verdict", " ".join(row["verdicts"])
    yield from _limits("validation_perplexity", row["perplexity"])
    for name in ("unique", "users_with_unique", "num_users", "leakage_epsilon"):
        yield name, row[name]
    for group in row["exposure"]:
        yield f"exposure_bits_at_{group['repetitions']}", group["mean_bits"]
        yield f"exposed_at_{group['repetitions']}", group["num_exposed"]
        yield f"canaries_at_{group['repetitions']}", group["num_canaries"]
    yield "exposed_above_bits", row["exposed_above_bits"]
    for kind, found in row["tab"].items():
        for name in ("successes", "num_canaries", "ceiling"):
            yield f"tab_{kind}_{name}", found[name] if found else None
    for scale in ("perplexity", "log"):
        yield from _limits(f"gap_{scale}", row["gap"][scale] if row["gap"] else None)
    for level in ("documents", "users"):
        measured = ((row["membership"] or {}).get(level) or {}).get("scores", ())
        for score in dict.fromkeys((*SCORES, *measured)):
            yield from _limits(f"membership_{level}_{score}_auc", area(row, level, score))
    for name in ("num_documents", "num_tokens"):
        yield f"membership_{name}_not_counted", not_counted(row).get(name)
    yield "seconds_per_epoch", row["seconds_per_epoch"]
    yield "times_baseline", row["times_baseline"]
    found = row["guarantee"]
    yield from ((name, found[name]) for name in ("epsilon", "delta", "unit", "standing", "because"))
    yield "insecure_seed", None if found["epsilon"] is None else bool(found["insecure"])


def _limits(name: str, found: dict[str, Any] | None) -> Iterator[tuple[str, Any]]:
    found = found or {}
    yield name, found.get("value")
    yield f"{name}_low", found.get("low")
    yield f"{name}_high", found.get("high")
