"""What it takes to draw text out of a model: in words, as a table, and on one page."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
from markupsafe import Markup

from tightlip.core.checksums import checked
from tightlip.core.figures import UNKNOWN, count, counted, guarantee_words, percent
from tightlip.core.files import read_json
from tightlip.report.kit.plots import Axis, Plot, draw_line, linear_axis, log_axis, short
from tightlip.report.kit.table import Column, Table, facts_of, plain_row

Figures = dict[str, Any]
NEVER = "never"
MOST = 1e308  # tries, where float64 counts them no more
TABLE_TITLE = "Tries for the cheapest window: 50% and 90% chance"
SOON = "1000"  # tries that anybody has


def tries_words(tries: float | None) -> str:
    """
    >>> [tries_words(n) for n in (1, 7, 139, 1234, 23_456_789, 123_456_789, 1e30, None)]
    ['1 try', '7 tries', 'about 140 tries', 'about 1,200 tries', 'about 23 million tries', 'about 120 million tries', 'about 1e30 tries', 'never']
    """
    if tries is None:
        return NEVER
    number = tries_number(tries)
    return "1 try" if tries == 1 else f"{'about ' if tries >= 20 else ''}{number} tries"


def tries_number(tries: float | None) -> str:
    """Two figures of it, which is all that it deserves."""
    if tries is None:
        return NEVER
    if tries < 20:
        return f"{tries:.0f}"
    rounded = float(f"{tries:.1e}")
    for size, name in ((1e12, ""), (1e9, " billion"), (1e6, " million")):
        if rounded >= size:
            return f"{rounded / size:.3g}{name}" if name else f"{rounded:.0e}".replace("e+", "e")
    return f"{rounded:,.0f}"


def decoding_words(summary: Figures) -> str:
    """
    >>> decoding_words({"temperature": 0.8, "top_k": 40, "top_p": None})
    'temperature 0.8, top-k 40'
    """
    cuts = {"top-k": summary["top_k"], "top-p": summary["top_p"]}
    told = [f"{name} {value:g}" for name, value in cuts.items() if value is not None]
    return ", ".join([f"temperature {summary['temperature']:g}", *told])


def first_length(summary: Figures) -> tuple[str, Figures]:
    """The shortest length of which something comes out that counts, else anything, else of which
    windows were searched, else the shortest."""

    def found(each: tuple[str, Figures]) -> tuple[bool, ...]:
        one = each[1]
        return bool(one["cheapest"]), bool(one["cheapest_of_all"]), one["searched"] > 0

    return max(summary["by_length"].items(), key=found)  # of equals the first


def _is_uncounted(one: Figures) -> bool:
    """Whether windows come out, and none of them counts, as the reference draws them too."""
    return one["cheapest"] is None and one["cheapest_of_all"] is not None


def headline(summary: Figures) -> str:
    length, one = first_length(summary)
    tokens = counted(int(length), "token")
    own = f"{tokens} of somebody's own text"
    if not one["searched"]:
        return "There is no window of one person's own text to look for"
    if _is_uncounted(one):
        tries = tries_words(one["cheapest_of_all"]["queries_50"] or MOST)
        return f"No window of {tokens} is drawn ten times as often as by the reference; the cheapest of all takes {tries}"
    if one["cheapest"] is None:
        return f"No number of tries draws {own} out of this model"
    tries = tries_words(one["cheapest"]["queries_50"] or MOST)
    return f"{tries[0].upper()}{tries[1:]} for an even chance to draw {own}"


def sentences(summary: Figures) -> Iterator[str]:
    """What the figures mean, a sentence each, without anybody's name or text."""
    length, one = first_length(summary)
    if not one["searched"]:
        return
    if one["cheapest"] is not None:
        nearly = tries_words(one["cheapest"]["queries_90"] or MOST)
        yield (
            f"For a chance of 90%: {nearly}. That is for somebody who types what stood before it and lets the model go on, "
            f"with {decoding_words(summary)}."
        )
    soon, users = one["users_within"][SOON], one["users"]
    if _is_uncounted(one):
        yield "Either it is what anybody would say, or the reference saw the text too; gates on what counts fail."
    else:
        yield (
            f"Within {count(int(SOON))} tries {length} tokens come out of {count(soon)} of {counted(users, 'person', 'people')} "
            f"with such text ({percent(soon / users)}); {counted(one['searched'], 'window')} were searched."
        )
    if summary["reference"] is not None:
        yield _about_reference(summary, one)
    if summary["held_out"] is not None:
        yield _about_held_out(length, summary["held_out"])
    yield from _about_roles(summary, length)


def _about_reference(summary: Figures, one: Figures) -> str:
    line = (
        f"Counted are the {counted(one['counted'], 'window')} that the reference, {summary['reference']}, draws at least "
        "ten times as seldom."
    )
    if (every := one["cheapest_of_all"]) is None or every == one["cheapest"]:
        return line
    asked = tries_words(every["reference_queries_50"])
    return f"{line} The cheapest of all takes {tries_words(every['queries_50'] or MOST)}, and under the reference {asked}."


def _about_held_out(length: str, held_out: Figures) -> str:
    one = held_out["by_length"][length]
    if not one["searched"]:
        return "Of the people whose text was held out nobody has a window of their own to compare with."
    whose = f"Of {counted(one['users'], 'person', 'people')} whose text was held out"
    if one["cheapest"] is None:
        finding = "counts" if _is_uncounted(one) else "ever comes out"
        return f"{whose} no window {finding} ({count(one['searched'])} were searched)."
    tries = tries_words(one["cheapest"]["queries_50"])
    return f"{whose} the cheapest takes {tries} ({counted(one['searched'], 'window')} searched)."


def _about_roles(summary: Figures, length: str) -> Iterator[str]:
    told = [
        f"{role} {tries_words((of[length]['cheapest'] or {}).get('queries_50'))}"
        for role, of in (summary["by_role"] or {}).items()
        if of[length]["searched"] and not _is_uncounted(of[length])
    ]
    if told:
        yield f"By role, the cheapest {length} tokens: {'; '.join(told)}."


def length_table(summary: Figures) -> Table:
    """A row for each length."""
    has_reference, held_out = summary["reference"] is not None, summary["held_out"]
    columns = [Column("tokens", left=True), Column("searched"), Column("people")]
    columns += [Column("counted")] * has_reference
    columns += [Column("50%"), Column("90%")]
    columns += [Column("reference")] * has_reference
    columns += [Column("held out"), Column("searched")] * (held_out is not None)
    rows = []
    for length, one in summary["by_length"].items():
        cells = [count(one["searched"]), count(one["users"])]
        cells += [count(one["counted"])] * has_reference
        cells += [_cell(one, "queries_50"), _cell(one, "queries_90")]
        cells += [_cell(one, "reference_queries_50") if one["counted"] else "–"] * has_reference
        if held_out is not None:
            theirs = held_out["by_length"][length]
            cells += [_cell(theirs, "queries_50"), count(theirs["searched"])]
        rows.append(plain_row(length, *cells))
    return Table(columns=columns, rows=rows, title=TABLE_TITLE)


def _cell(one: Figures, name: str) -> str:
    is_known = one["searched"] and not _is_uncounted(one)
    return tries_number((one["cheapest"] or {}).get(name)) if is_known else "–"


def terminal_lines(summary: Figures) -> list[Any]:
    """The verdict, the table, and what its figures mean in plain sentences."""
    notes = [f"Note: {note}" for note in summary["notes"]]
    return [f"{headline(summary)}.", length_table(summary).printed(), *sentences(summary), *notes]


NUM_SHOWN = 20  # windows of each length
TEXT_CHARACTERS, PREFIX_CHARACTERS, NAME_CHARACTERS = 600, 120, 60
NUM_NOTES = 40
# Of each line of a plot, by its looks and its name: tries, and the share that is out by then.
Lines = dict[tuple[str, str], list[tuple[float, float]]]
LINES = ("train", "validation", "behind")  # the plot's looks, for the first three lengths


@dataclass(frozen=True, kw_only=True)
class ExtractionPage:
    """The page of an extraction report's folder.

    Holds:
        small: whatever the corpus, at most `NUM_SHOWN` windows of a length are shown.
        silent: redacted, it holds none of the corpus' text and no name.
    """

    files: ClassVar[str] = "report/extraction/page"
    folder: Path

    def content(self) -> dict[str, Any]:
        summary = read_json(self.folder / "summary.json")
        return {
            "summary": summary,
            "version": summary["version"],
            "headline": headline(summary),
            "sentences": list(sentences(summary)),
            "decoding": decoding_words(summary),
            "remarks": summary["notes"][:NUM_NOTES],
            "guarantee": guarantee_words(summary["guarantee"]),
            "facts": facts_of(
                ("model", summary["model_fingerprint"] or UNKNOWN, 12),
                ("corpus", summary["corpus_fingerprint"] or UNKNOWN, 12),
                ("reference", summary["reference"] or "none", 60),
                ("decoding", decoding_words(summary), 60),
            ),
            "table": length_table(summary),
            "lines": list(_lines(summary, "users_within", "users")),
            "users_plot": _users_plot(summary),
            "windows_plot": _windows_plot(summary),
            "shown": _shown(self.folder, summary),
        }


def _users_plot(summary: Figures) -> Markup | None:
    """The share of people of whom a window comes out within so many tries."""
    shares = _lines(summary, "users_within", "users")
    if summary["held_out"] is not None:
        first, one = next(iter(summary["held_out"]["by_length"].items()))
        shares["mark", f"{first}, held out"] = _shares(one, "users_within", "users")
    return _plot("People", shares, linear_axis(1.0), "of the people with such text")


def _windows_plot(summary: Figures) -> Markup | None:
    """The share of windows that come out within so many tries; most never do, hence the scale."""
    shares = _lines(summary, "windows_within", "counted")
    least = min((s for one in shares.values() for _, s in one if s > 0), default=0.1)
    low = 10.0 ** math.floor(math.log10(least))
    return _plot("Windows", shares, log_axis(min(low, 0.1), 1.0), "of the windows")


def _lines(summary: Figures, within: str, out_of: str) -> Lines:
    found = {name: one for name, one in summary["by_length"].items() if one["counted"]}
    drawn = zip(LINES, found.items(), strict=False)
    return {(kind, name): _shares(one, within, out_of) for kind, (name, one) in drawn}


def _shares(one: Figures, within: str, out_of: str) -> list[tuple[float, float]]:
    every = one[out_of]
    return [(float(most), number / every) for most, number in one[within].items() if every]


def _plot(title: str, shares: Lines, up: Axis, of_what: str) -> Markup | None:
    if not (most_tries := [most for line in shares.values() for most, _ in line]):
        return None
    plot = Plot(
        title=f"{title} within so many tries",
        description="A line for each length: the share that has come out with an even chance.",
        width=520,
        left=64,
    )
    across = log_axis(1.0, max(most_tries))
    labels = [(value, f"{100 * value:g}%") for value, _ in up.ticks]
    plot.y_axis(replace(up, ticks=labels), f"share {of_what}")
    for (kind, name), line in shares.items():
        drawn = [
            (across.at(most), up.at(share), f"{name} tokens, within {short(most)} tries: {percent(share)}")
            for most, share in line
            if share > 0 or not up.log
        ]  # fmt: skip
        draw_line(plot, drawn, kind)
    plot.x_axis(across, "tries (log scale)")
    return plot.svg()


def _shown(folder: Path, summary: Figures) -> list[tuple[str, list[Figures]]]:
    """The cheapest windows of each length, that count; of each person one."""
    table = pq.read_table(checked(folder / "windows.parquet"))
    rows = table.filter(table["counted"]).to_pylist()
    found = {n: [row for row in rows if row["num_tokens"] == n] for n in summary["lengths"]}
    return [(counted(n, "token"), [*map(_row, own[:NUM_SHOWN])]) for n, own in found.items() if own]


def _row(row: Figures) -> Figures:
    window = row["window"]
    return row | {
        "user": row["user"][:NAME_CHARACTERS],
        "prefix": (row["prefix"] or "")[-PREFIX_CHARACTERS:],
        "window": None if window is None else window[:TEXT_CHARACTERS],
        "tries": tries_number(row["queries_50"]),
        "nearly": tries_number(row["queries_90"]),
        "reference": tries_number(row["reference_queries_50"]),
    }
