"""The report as one HTML file that asks nothing of the network and stays small."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from markupsafe import Markup

from tightlip.core.figures import UNKNOWN, count, counted, guarantee_words, percent
from tightlip.core.files import read_json
from tightlip.core.progress import harmless
from tightlip.report.kit.table import Column
from tightlip.report.leakage import plots, words
from tightlip.report.leakage.rows import (
    UNIQUE,
    Embedded,
    Users,
    cut_end,
    embed,
    read_users,
    safe_json,
)
from tightlip.report.leakage.tallies import Tally, file_of_report, tally_and_choose

NUM_HEADLINES = 4
NUM_SNAPSHOT_ROWS = 200
EPSILON_CHARACTERS = 60
NUM_NOTES, NOTE_CHARACTERS = 40, 1000


@dataclass(frozen=True, kw_only=True)
class LeakagePage:
    """The page of a report's folder.

    Holds:
        small: under 3 MB, whatever the corpus.
        silent: redacted, it holds none of the corpus' text.
    """

    files: ClassVar[str] = "report/leakage/page"
    folder: Path

    def content(self) -> dict[str, Any]:
        summary = _read_summary(self.folder)
        users = read_users(self.folder)
        tally, chosen = tally_and_choose(self.folder, [user["user"] for user in users.worst])
        worst = summary.get("leakage_epsilon_sequence")
        if worst is not None and 0 <= worst < tally.num_rows:
            chosen = list(dict.fromkeys([worst, *chosen]))
        rows = embed(self.folder, chosen, users.worst, redacted=bool(summary.get("redacted")))
        return {
            "summary": summary,
            "version": summary["version"],
            "data": Markup(safe_json(vars(rows))),
            **_opening(summary, tally, rows),
            **_plots(tally),
            **_tables(summary, tally, users, rows),
            "snapshots": _snapshots(self.folder),
            "contexts": words.contexts_table(summary),
        }


def _read_summary(folder: Path) -> dict[str, Any]:
    told = read_json(file_of_report(folder, "summary.json"))
    # What an older report does not say is not known.
    return {"redacted": False, "version": None, "top_k": None, **told}


def _opening(summary: dict[str, Any], tally: Tally, rows: Embedded) -> dict[str, Any]:
    """The top of the page: verdict, badges, headline figures, notes, guarantee."""
    longest = tally.longest or None
    sentence, weighing = words.verdict(
        summary, num_copied=tally.num_copied, num_untrained=tally.num_untrained, longest=longest
    )
    lines = [_with_its_text(line, summary, rows) for line in words.summary_lines(summary)]
    notes = (summary.get("notes") or [])[:NUM_NOTES]
    return {
        "headline": sentence,
        "weighing": weighing,
        "headlines": lines[:NUM_HEADLINES],
        "lines": lines[NUM_HEADLINES:],
        "remarks": [cut_end(str(note), NOTE_CHARACTERS)[0] for note in notes],
        "guarantee": guarantee_words(summary.get("guarantee")),
        "facts": _facts(summary),
    }


def _with_its_text(line: words.Line, summary: dict[str, Any], rows: Embedded) -> words.Line:
    """Leakage epsilon with the sequence it comes from: its text, or redacted its length."""
    place = summary.get("leakage_epsilon_sequence")
    row = next((row for row in rows.sequences if row[0] == place), None)
    if line.name != "Leakage epsilon" or row is None:
        return line
    length = counted(row[3], "token")
    cut = "…" if len(row[1] or "") > EPSILON_CHARACTERS else ""
    text = harmless(cut_end((row[1] or "").strip(), EPSILON_CHARACTERS)[0]) + cut
    about = length if row[UNIQUE] else f"{length}, unique by tokens but not by text"
    named = about if row[1] is None else f"“{text}” ({about})"
    return line._replace(sentence=line.sentence.replace("that of row", f"that of {named}, row"))


def _facts(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, short value, whole value) of what identifies the audit."""
    facts = [
        ("model", summary.get("model_fingerprint") or UNKNOWN, 12),
        ("corpus", summary.get("corpus_fingerprint") or UNKNOWN, 12),
        ("public model", summary.get("public_model") or "none", 60),
        ("top-k", summary.get("top_k"), 60),
        ("tightlip", summary.get("version") or UNKNOWN, 60),
    ]
    return [
        (name, cut_end(str(value), most)[0], cut_end(str(value), 300)[0])
        for name, value, most in facts
    ]


def _plots(tally: Tally) -> dict[str, Any]:
    has_perplexities = tally.num_unique and tally.perplexities.span()
    has_ratios = tally.num_unique and tally.ratios.span()
    return {
        "length_plot": plots.length_plot(tally) if tally.num_unique else None,
        "perplexity_plot": plots.perplexity_plot(tally) if has_perplexities else None,
        "ratio_plot": plots.ratio_plot(tally) if has_ratios else None,
    }


def _tables(summary: dict[str, Any], tally: Tally, users: Users, rows: Embedded) -> dict[str, Any]:
    shown, every = len(rows.sequences), tally.num_rows
    extent = f"All {counted(every, 'sequence')} are on this page."
    if shown < every:
        picked = "the worst by ratio, the longest" if tally.num_with_ratio else "the longest"
        every_role = " and of every role" if words.by_role(summary) else ""
        extent = (
            f"Showing {count(shown)} of {count(every)}; all are in sequences.parquet. "
            f"These are {picked}, some of every person listed below{every_role}, and a few that several people wrote."
        )
    return {
        "tally": tally,
        "no_public_model": words.NO_PUBLIC_MODEL if summary.get("public_model") is None else None,
        "extent": extent,
        "users": users,
        "users_extent": _users_extent(users, tally.num_unique),
        "has_roles": summary.get("unique_by_role") is not None,
        "is_by_text": summary.get("leaks") is not None,
        "has_user_ratios": any(_known(user["max_ratio"]) for user in users.worst),
    }


def _users_extent(users: Users, num_unique: int) -> str:
    parts = []
    share = users.share_of_first(10)
    # What several own would count for each of them.
    if share is not None and users.num_with_unique > 10 and users.num_unique == num_unique:
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


def _snapshots(folder: Path) -> dict[str, Any] | None:
    """Figure 5 and its table, where the audit looked at snapshots."""
    path = folder / "snapshots.json"
    measured = read_json(path) if path.exists() else {}
    if not measured.get("snapshots"):
        return None
    every = measured["snapshots"]
    table = words.snapshot_figures(
        {**measured, "snapshots": plots.thinned(measured, NUM_SNAPSHOT_ROWS)}
    )
    # The page writes epsilon in full: the letter alone is a guarantee's.
    columns = [*table.columns[:-1], Column("leakage epsilon")]
    return {
        "table": replace(table, columns=columns),
        "perplexity": plots.perplexities_by_epoch(measured),
        "lengths": plots.lengths_plot(measured),
        "violins": plots.violins_plot(measured),
        "has_validation": any(_known(one.get("validation_perplexity")) for one in every),
        "num_drawn": len(plots.thinned(measured)),
        "num_all": len(every),
        "story": words.story(measured),
    }
