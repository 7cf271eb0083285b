"""What it takes to draw text out of a model, on one page."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
from markupsafe import Markup

from tightlip.core.checksums import checked
from tightlip.core.figures import UNKNOWN, counted, guarantee_words, percent
from tightlip.core.files import read_json
from tightlip.report.extraction.words import (
    TERMS,
    Figures,
    decoding_words,
    headline,
    length_table,
    sentences,
    tries_number,
)
from tightlip.report.kit.plots import Axis, Plot, draw_line, linear_axis, log_axis, short

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
            "facts": _facts(summary),
            "table": length_table(summary),
            "lines": list(_lines(summary, "users_within", "users")),
            "users_plot": _users_plot(summary),
            "windows_plot": _windows_plot(summary),
            "shown": _shown(self.folder, summary),
            "terms": TERMS,
        }


def _facts(summary: Figures) -> list[tuple[str, str, str]]:
    facts = {
        "model": (summary["model_fingerprint"] or UNKNOWN, 12),
        "corpus": (summary["corpus_fingerprint"] or UNKNOWN, 12),
        "reference": (summary["reference"] or "none", 60),
        "decoding": (decoding_words(summary), 60),
    }
    return [(name, str(value)[:most], str(value)[:300]) for name, (value, most) in facts.items()]


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
    most_tries = [most for line in shares.values() for most, _ in line]
    if not most_tries:
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
    found = []
    for length in summary["lengths"]:
        own = [row for row in rows if row["num_tokens"] == length][:NUM_SHOWN]
        found.append((counted(length, "token"), [_row(row) for row in own]))
    return [(name, own) for name, own in found if own]


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
