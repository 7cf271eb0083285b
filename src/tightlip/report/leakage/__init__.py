"""The report as one HTML file that asks nothing of the network and stays small."""

import math
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tightlip.core.errors import UsageError
from tightlip.core.figures import count, counted, guarantee_words, percent
from tightlip.core.files import read_json, written_whole
from tightlip.report.kit import asset, policy, template
from tightlip.report.leakage import plots
from tightlip.report.leakage.rows import Embedded, Users, cut_end, embed, read_users
from tightlip.report.leakage.tallies import Tally, tally_and_choose
from tightlip.report.leakage.terminal import (
    NO_PUBLIC_MODEL,
    SNAPSHOT_COLUMNS,
    snapshot_rows,
    summary_lines,
    verdict,
)

MOST_BYTES = 3_000_000
NUM_HEADLINES = 4
NUM_SNAPSHOT_ROWS = 200
NUM_NOTES, NOTE_CHARACTERS = 40, 1000


def write_page(folder: Path) -> Path:
    """Write `report.html` into a report's folder, readable by its owner only."""
    page = render_page(folder)
    path = Path(folder) / "report.html"
    with written_whole(path) as beside:
        beside.write_bytes(page.encode("utf-8", "replace"))
    return path


def render_page(folder: Path) -> str:
    """The page of a report folder, as text.

    Holds:
        small: under `MOST_BYTES`, whatever the corpus.
        alone: it names no other file and no address.
        silent: redacted, it holds none of the corpus' text.
    """
    folder = Path(folder)
    summary = _read_summary(folder)
    users = read_users(folder)
    tally, chosen = tally_and_choose(folder, [user["user"] for user in users.worst])
    rows = embed(folder, chosen, users.worst, redacted=bool(summary.get("redacted")))
    style, script = asset("report/kit/page.css"), asset("report/leakage/page.js")
    page = template("report/leakage/page.html.jinja").render(
        summary=summary,
        style=Markup(style),
        script=Markup(script),
        policy=policy(style, script),
        data=Markup(rows.as_json()),
        **_opening(summary, tally),
        **_plots(tally),
        **_tables(summary, tally, users, rows),
        **_snapshots(folder),
    )
    assert len(page.encode("utf-8", "replace")) < MOST_BYTES, "the page outgrew its budget"
    return page


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.exists():
        raise UsageError(
            f"{folder} has no summary.json, so it is not a leakage report. Make one with: tightlip audit MODEL CORPUS --out {folder}"
        )
    # What an older report does not say is not known.
    return {"redacted": False, "version": None, **read_json(path)}


def _opening(summary: dict[str, Any], tally: Tally) -> dict[str, Any]:
    """The top of the page: verdict, badges, headline figures, notes, guarantee."""
    sentence, weighing = verdict(summary, num_copied=tally.num_copied)
    lines = summary_lines(summary)
    notes = [
        cut_end(str(note), NOTE_CHARACTERS)[0] for note in (summary.get("notes") or [])[:NUM_NOTES]
    ]
    return {
        "verdict": sentence,
        "weighing": weighing,
        "headlines": lines[:NUM_HEADLINES],
        "lines": lines[NUM_HEADLINES:],
        "notes": notes,
        "guarantee": guarantee_words(summary.get("guarantee")),
        "facts": _facts(summary),
        "guesses": "first guess"
        if summary.get("top_k") == 1
        else f"first {count(summary.get('top_k'))} guesses",
    }


def _facts(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, short value, whole value) of what identifies the audit."""
    facts = [
        ("model", str(summary.get("model_fingerprint") or "not known")),
        ("corpus", str(summary.get("corpus_fingerprint") or "not known")),
        ("public model", str(summary.get("public_model") or "none")),
        ("top-k", str(summary.get("top_k"))),
        ("tightlip", str(summary.get("version") or "not known")),
    ]
    return [
        (
            name,
            cut_end(value, 12)[0] if name in ("model", "corpus") else cut_end(value, 60)[0],
            cut_end(value, 300)[0],
        )
        for name, value in facts
    ]


def _plots(tally: Tally) -> dict[str, Any]:
    drawn = tally.num_unique > 0
    has_ratios = tally.ratios.span() is not None
    return {
        "length_plot": plots.length_plot(tally) if drawn else None,
        "perplexity_plot": plots.perplexity_plot(tally)
        if drawn and tally.perplexities.span()
        else None,
        "ratio_plot": plots.ratio_plot(tally) if drawn and has_ratios else None,
        "undrawn_perplexities": _undrawn(tally.perplexities.not_finite, "perplexity"),
        "undrawn_ratios": _undrawn(tally.ratios.not_finite, "ratio"),
        "any_copied": tally.num_copied > 0,
    }


def _undrawn(number_of: int, what: str) -> str:
    return (
        f" {counted(number_of, 'sequence')} with an infinite or undefined {what} cannot be drawn."
        if number_of
        else ""
    )


def _tables(summary: dict[str, Any], tally: Tally, users: Users, rows: Embedded) -> dict[str, Any]:
    shown, every = len(rows.sequences), tally.num_rows
    picked = "the worst by ratio, the longest" if tally.num_with_ratio else "the longest"
    if shown == every:
        extent = f"All {counted(every, 'sequence')} are on this page."
    else:
        extent = (
            f"Showing {count(shown)} of {count(every)}; all are in sequences.parquet. "
            f"These are {picked}, some of every person listed below, and a few that several people wrote."
        )
    return {
        "num_rows": every,
        "num_unique": tally.num_unique,
        "has_ratios": tally.num_with_ratio > 0,
        "no_public_model": NO_PUBLIC_MODEL
        if summary.get("public_model") is None
        else "No sequence here has a ratio.",
        "extent": extent,
        "users": users,
        "users_extent": _users_extent(users),
        "has_user_ratios": any(_known(user["max_ratio"]) for user in users.worst),
    }


def _users_extent(users: Users) -> str:
    parts = []
    share = users.share_of_first(10)
    if share is not None and users.num_with_unique > 10:
        parts.append(f"The ten people who leak most own {percent(share)} of the unique sequences.")
    if users.num_with_unique > len(users.worst):
        parts.append(
            f"Showing {count(len(users.worst))} of the {count(users.num_with_unique)} with any; all are in users.parquet."
        )
    quiet = users.num_users - users.num_with_unique
    if quiet:
        parts.append(f"{counted(quiet, 'person has', 'people have')} none.")
    return " ".join(parts)


def _known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _snapshots(folder: Path) -> dict[str, Any]:
    """Figure 5 and its table, where the audit looked at snapshots."""
    path = folder / "snapshots.json"
    found = read_json(path) if path.exists() else {}
    if not found.get("snapshots"):
        return {"snapshots": None}
    num_all, num_drawn = len(found["snapshots"]), len(plots.thinned(found))
    in_table = {**found, "snapshots": plots.thinned(found, NUM_SNAPSHOT_ROWS)}
    return {
        "snapshots": {
            # The page writes epsilon in full: the letter alone is a guarantee's.
            "columns": [*SNAPSHOT_COLUMNS[:-1], "leakage epsilon"],
            "rows": snapshot_rows(in_table),
            "perplexity": plots.perplexities_by_epoch(found),
            "lengths": plots.lengths_plot(found),
            "violins": plots.violins_plot(found),
            "has_validation": any(
                _known(one.get("validation_perplexity")) for one in found["snapshots"]
            ),
            "thinned": f"{count(num_drawn)} of {count(num_all)} snapshots are drawn."
            if num_drawn < num_all
            else "",
            "story": plots.story(found),
        }
    }
