"""The report as one HTML file that asks nothing of the network and stays small.

Whatever a corpus holds, the page must stay small and must not run any of it: of the rows that it
carries with it texts are cut, the least telling are left out, and what could end a script element
or an attribute is written as an escape.
"""

import heapq
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from markupsafe import Markup

from tightlip.core.errors import UsageError
from tightlip.core.figures import UNKNOWN, count, counted, guarantee_words, percent
from tightlip.core.files import damage_in_words, read_json
from tightlip.core.progress import harmless
from tightlip.report.kit.table import Column, facts_of
from tightlip.report.leakage import plots, tallies, words

NUM_HEADLINES = 4
NUM_SNAPSHOT_ROWS = 200
EPSILON_CHARACTERS = 60
NUM_NOTES, NOTE_CHARACTERS = 40, 1000
SEQUENCE_CHARACTERS = 600
CONTEXT_CHARACTERS = 280
NAME_CHARACTERS = 60
NUM_OCCURRENCES = 8
NUM_USERS = 300
SEQUENCES_BYTES = 1_900_000
# A row may hold eight contexts of 100 kB: few rows at a time keep the memory flat.
_TEXT_BATCH_ROWS = 128

_COUNTS = ("num_tokens", "total_in_s", "users_in_s", "total_in_d", "users_in_d")
_LISTS = ("context_tokens", "perplexities", "public_perplexities")
_FIGURES = (*_COUNTS, *_LISTS, "ratio", "copied")
_TEXTS = ("sequence", "contexts")
OWNERS, UNIQUE = 11, 14  # their places in a row; page.js has the same list
_USER_FIGURES = ("num_documents", "num_tokens", "unique", "unique_tokens", "longest", "max_ratio")
_USER_BY_TEXT = ("unique_by_text", "leaks")


def safe_json(value: Any) -> str:
    """JSON that may stand inside a script element of a page, whatever it holds.

    Holds:
        inert: the result has no <, >, & and no line separator.
        faithful: `json.loads` gives the value back.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def num_bytes(value: Any) -> int:
    return len(safe_json(value).encode("utf-8", "replace"))


def plain_number(value: float | None) -> float | str | None:
    """A float JSON can carry: six figures, and words for what JSON has no number for."""
    if value is None:
        return None
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.6g}")


def cut_end(text: str, most: int) -> tuple[str, int]:
    """The beginning of a text, and how many characters were cut."""
    return (text, 0) if len(text) <= most else (text[:most], len(text) - most)


def cut_start(text: str, most: int) -> tuple[str, int]:
    """The end of a text, and how many characters were cut."""
    return (text, 0) if len(text) <= most else (text[-most:], len(text) - most)


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """What the page's script reads."""

    sequences: list[list[Any]]
    owners: list[list[Any]]
    users: list[list[Any]]


def embed(
    folder: Path, chosen: list[int], users: list[dict[str, Any]], *, redacted: bool
) -> Embedded:
    """Rows for the page, the most telling first served, in the file's order.

    A redacted page never reads the columns that hold text.

    Holds:
        within_budget: the sequences take at most `SEQUENCES_BYTES` of JSON.
        silent: a redacted page has none of the text, even where the file still has it.
    """
    owners: dict[str, int] = {}
    user_rows = []
    for user in users:
        told = [_owner_place(owners, user["user"]), *(user[name] for name in _USER_FIGURES[:-1])]
        user_rows.append([*told, plain_number(user["max_ratio"]), user.get("leaks")])
    names: list[list[Any]] = [[*cut_end(name, NAME_CHARACTERS)] for name in owners]
    owners_of_row = tallies.read_owners(folder)
    chosen_rows = _read_rows(folder, chosen, redacted=redacted)
    read = {n: _row(n, row, owners_of_row[n].as_py() or []) for n, row in chosen_rows}
    left = SEQUENCES_BYTES
    kept = []
    for place in chosen:
        row, whose = read[place]
        new_names = [[*cut_end(name, NAME_CHARACTERS)] for name in whose if name not in owners]
        needed = num_bytes(row) + 1 + sum(num_bytes(name) + 1 for name in new_names)
        if needed > left:
            break
        left -= needed
        names += new_names
        row[OWNERS] = [_owner_place(owners, name) for name in whose]
        kept.append(place)
    rows = [read[place][0] for place in sorted(kept)]
    return Embedded(sequences=rows, owners=names, users=user_rows)


def _row(place: int, row: dict[str, Any], owners: list[str]) -> tuple[list[Any], list[str]]:
    """One sequence as the page's script reads it, its owners' numbers still to come, and its owners."""
    sequence = row.get("sequence")
    text, cut = (None, 0) if sequence is None else cut_end(sequence, SEQUENCE_CHARACTERS)
    lowest = plain_number((row["perplexities"] or [None])[0])
    figures = [lowest, plain_number(row["ratio"]), int(bool(row["copied"]))]
    counts = [row[name] for name in _COUNTS]
    unique = row.get("unique_by_text", row["users_in_d"] == 1)
    by_text = [row.get("users_by_text"), int(bool(unique)), row.get("leak")]
    later = [row.get("role"), row.get("trained_on"), row.get("beyond_prior")]
    whose = owners if unique else []
    whole = [place, text, cut, *counts, *figures, [10**7] * len(whose), list(_occurrences(row))]
    return [*whole, *by_text, *later], whose


def _occurrences(row: dict[str, Any]) -> Iterator[list[Any]]:
    """[context, characters cut, tokens of context, perplexity, public perplexity], lowest perplexity first."""
    num = len((row["perplexities"] or [])[:NUM_OCCURRENCES])
    every = [[*(row.get(name) or []), *[None] * num][:num] for name in ("contexts", *_LISTS)]
    for text, length, perplexity, public in zip(*every, strict=True):
        context, cut = (None, 0) if text is None else cut_start(text, CONTEXT_CHARACTERS)
        yield [context, cut, length, plain_number(perplexity), plain_number(public)]


def _read_rows(
    folder: Path, chosen: list[int], *, redacted: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The chosen rows, read from the row groups that hold them and no further than the last."""
    with tallies.open_sequences(folder) as file:
        asked = tallies.SINCE_0_2 if redacted else (*tallies.SINCE_0_2, *_TEXTS)
        columns = [*_FIGURES, *(name for name in asked if name in file.schema_arrow.names)]
        start = 0
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            waiting = sorted(place for place in chosen if start <= place < end)
            group_rows = tallies.batches(file, columns, _TEXT_BATCH_ROWS, row_groups=[group])
            while waiting:
                first, batch = next(group_rows)
                while waiting and waiting[0] < start + first + batch.num_rows:
                    place = waiting.pop(0)
                    yield place, batch.slice(place - start - first, 1).to_pylist()[0]
            start = end


def _owner_place(owners: dict[str, int], name: str) -> int:
    return owners.setdefault(name, len(owners))


@dataclass(frozen=True, kw_only=True)
class Users:
    """The users who leak most, and what all of them come to."""

    worst: list[dict[str, Any]]
    num_users: int
    num_with_unique: int
    num_unique: int

    def share_of_first(self, many: int) -> float | None:
        """Share of all unique sequences that the first `many` users own."""
        if not self.num_unique:
            return None
        return sum(user["unique"] or 0 for user in self.worst[:many]) / self.num_unique


def read_users(folder: Path) -> Users:
    """The `NUM_USERS` users with most leaks, then unique sequences, then leaked tokens, then the longest."""
    path = folder / "users.parquet"
    if not path.exists():
        raise UsageError(
            f"{folder} has no users.parquet. An older tightlip may have made it; run tightlip audit again."
        )
    worst: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    num_with_unique = num_unique = 0
    with damage_in_words(path), tallies.open_table(path) as file:
        by_text = [name for name in _USER_BY_TEXT if name in file.schema_arrow.names]
        for start, batch in tallies.batches(file, ("user", *_USER_FIGURES, *by_text)):
            rows = batch.to_pylist()
            for row in rows:  # what one wrote alone as tokens, others may have written as text
                row["unique"] = row.get("unique_by_text", row["unique"])
            keyed = [(_leak_key(row, n), row) for n, row in enumerate(rows, start) if row["unique"]]
            worst = heapq.nlargest(NUM_USERS, [*worst, *keyed], key=lambda pair: pair[0])
            num_with_unique += len(keyed)
            num_unique += sum(row["unique"] for _, row in keyed)
        return Users(
            worst=[row for _, row in worst],
            num_users=file.metadata.num_rows,
            num_with_unique=num_with_unique,
            num_unique=num_unique,
        )


def _leak_key(row: dict[str, Any], place: int) -> tuple[int, ...]:
    names = ("leaks", "unique", "unique_tokens", "longest")
    return (*(row.get(name) or 0 for name in names), -place)


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
        told = read_json(tallies.file_of_report(self.folder, "summary.json"))
        # What an older report does not say is not known.
        summary = {"redacted": False, "version": None, "top_k": None, **told}
        users = read_users(self.folder)
        names = [user["user"] for user in users.worst]
        tally, chosen = tallies.tally_and_choose(self.folder, names)
        worst = summary.get("leakage_epsilon_sequence")
        if worst is not None and 0 <= worst < tally.num_rows:
            chosen = list(dict.fromkeys([worst, *chosen]))
        rows = embed(self.folder, chosen, users.worst, redacted=bool(summary.get("redacted")))
        return {
            "summary": summary,
            "version": summary["version"],
            "data": Markup(safe_json(vars(rows))),
            **_opening(summary, tally, rows),
            "length_plot": plots.length_plot(tally) if tally.num_unique else None,
            "perplexity_plot": plots.perplexity_plot(tally) if tally.perplexities.span() else None,
            "ratio_plot": plots.ratio_plot(tally) if tally.ratios.span() else None,
            **_tables(summary, tally, users, rows),
            "snapshots": _snapshots(self.folder),
            "contexts": words.contexts_table(summary),
        }


def _opening(summary: dict[str, Any], tally: tallies.Tally, rows: Embedded) -> dict[str, Any]:
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
        "facts": facts_of(
            ("model", summary.get("model_fingerprint") or UNKNOWN, 12),
            ("corpus", summary.get("corpus_fingerprint") or UNKNOWN, 12),
            ("public model", summary.get("public_model") or "none", 60),
            ("top-k", summary.get("top_k"), 60),
            ("tightlip", summary.get("version") or UNKNOWN, 60),
        ),
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


def _tables(
    summary: dict[str, Any], tally: tallies.Tally, users: Users, rows: Embedded
) -> dict[str, Any]:
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
    if quiet := users.num_users - users.num_with_unique:
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
    shown = plots.thinned(measured, NUM_SNAPSHOT_ROWS)
    table = words.snapshot_figures(measured | {"snapshots": shown})
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
