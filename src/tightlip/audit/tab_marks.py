"""Whose words stand in a line: the unique sequences of a leakage report, found by token ids."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tightlip.audit.leakage import decoder_of
from tightlip.audit.report import LeakageReport
from tightlip.core.errors import UsageError

_ROWS_COMPARED = 64
# A beginning that so many unique texts share says little about any of them.
TOO_MANY = 256


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One user's unique text in a line, at least one token of it the model's.

    `num_present` of its `num_tokens` stand in the line: all of them, or the first ones, at the
    line's end, of a text under way. `start` and `end` are characters of the line, `sequence` what
    stands there; `times` is how often the whole was in the training text.
    """

    owner: str
    sequence: str
    times: int
    num_tokens: int
    num_present: int
    num_completed: int
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        return self.num_present == self.num_tokens

    def sentence(self) -> str:
        """Whose it is and how much of it the model wrote, in words."""
        times = ("once" if self.times == 1 else f"{self.times:,} times") + " in the training text"
        if self.is_whole:
            what, them = f"“{self.sequence}” ({times})", f"its {self.num_tokens} tokens"
        else:
            so_far = f"{self.num_present} of {self.num_tokens} tokens so far"
            what, them = f"what begins “{self.sequence}” ({times}; {so_far})", "them"
        if self.num_completed < self.num_present:
            who = f"the model completed {self.num_completed} of {them} after you typed the rest"
        else:
            who = f"the model wrote all {self.num_present} tokens"
        return f"Only {self.owner} wrote {what}: {who}."


class UniqueTexts:
    """The sequences of a report that one user alone wrote, ready to be found in a line.

    A dictionary from a sequence's ids, as bytes, to its row; for each first id the lengths that
    begin with it, so that a line is looked up a handful of times a token; and all of them in
    order, for those that a line's end begins.

    Holds:
        all: every occurrence of every sequence is found, overlapping and nested ones included.
        begun: a line that ends in the first half or more of one is found, if nobody else's
            unique text begins so.
    """

    def __init__(
        self, ids: list[list[int]], owners: list[str], texts: list[str], times: list[int]
    ) -> None:
        self._owners, self._texts, self._times = owners, texts, times
        self._sizes = [len(row) for row in ids]
        keys = [as_bytes(row) for row in ids]
        self._row_of = {key: row for row, key in enumerate(keys)}
        self._order = sorted(self._row_of)
        lengths: dict[int, set[int]] = {}
        for row in ids:
            lengths.setdefault(row[0], set()).add(len(row))
        self._lengths = {first: sorted(sizes) for first, sizes in lengths.items()}

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def num_users(self) -> int:
        return len(set(self._owners))

    def found_in(self, ids: Sequence[int]) -> list[tuple[int, int, int]]:
        """(first token, last plus one, row) of every occurrence, in the line's order."""
        line, found = as_bytes(ids), []
        for start, first in enumerate(ids):
            for size in self._lengths.get(first, ()):
                if start + size > len(ids):
                    break
                row = self._row_of.get(line[4 * start : 4 * (start + size)])
                if row is not None:
                    found.append((start, start + size, row))
        return found

    def begun_in(self, ids: Sequence[int]) -> list[tuple[int, int, int]]:
        """The same of the longest text that the line's end begins, if there is one.

        Of those that begin alike the shortest; a beginning that two users share is nobody's.
        """
        line, longest = as_bytes(ids), max(self._sizes, default=0)
        for start in range(max(0, len(ids) - longest), len(ids) - 1):
            begun = line[4 * start :]
            first = bisect_left(self._order, begun)
            last = bisect_left(self._order, begun + b"\xff" * 4)
            rows = [self._row_of[key] for key in self._order[first : min(last, first + TOO_MANY)]]
            if not rows or last - first >= TOO_MANY or len({self._owners[r] for r in rows}) > 1:
                continue
            row = min(rows, key=lambda row: self._sizes[row])
            if len(ids) - start < self._sizes[row] <= 2 * (len(ids) - start):
                return [(start, len(ids), row)]
        return []

    def marks(
        self, text: str, ids: np.ndarray, spans: np.ndarray, accepted: Sequence[bool]
    ) -> list[Mark]:
        """The longest unique texts of a line that the model wrote a part of, and one under way.

        `accepted` says of each character whether it came from the model; a token counts as the
        model's when any character of it did.
        """
        line = ids.tolist()
        by_model = [any(accepted[first:last]) for first, last in spans.tolist()]
        found = [
            one
            for one in [*self.found_in(line), *self.begun_in(line)]
            if any(by_model[one[0] : one[1]])
        ]
        return [
            self._mark(text, row, spans[start:end], by_model[start:end])
            for start, end, row in not_inside_another(found)
        ]

    def _mark(self, text: str, row: int, spans: np.ndarray, by_model: list[bool]) -> Mark:
        start, end = int(spans[0, 0]), int(spans[-1, 1])
        is_whole = len(spans) == self._sizes[row]
        return Mark(
            owner=self._owners[row],
            sequence=self._texts[row].strip() if is_whole else text[start:end],
            times=self._times[row],
            num_tokens=self._sizes[row],
            num_present=len(spans),
            num_completed=sum(by_model),
            start=start,
            end=end,
        )


def as_bytes(ids: Sequence[int]) -> bytes:
    """Ids as bytes that sort as the ids do."""
    return np.asarray(ids, ">i4").tobytes()


def not_inside_another(found: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Those that no other covers, in the line's order."""
    kept: list[tuple[int, int, int]] = []
    for one in sorted(found, key=lambda one: (one[0], -one[1])):
        if not kept or one[1] > kept[-1][1]:
            kept.append(one)
    return kept


def unique_texts(report: LeakageReport, tokenizer: Any) -> UniqueTexts:
    """The report's unique sequences; a redacted report or one in other tokens is refused."""
    if report.summary.get("redacted"):
        raise UsageError(
            f"{report.folder} is redacted: it holds no text, so nothing can be recognised. "
            "Give --report the one that was not."
        )
    columns = ["sequence", "token_ids", "total_in_d", "users_in_d"]
    table = report.sequences.select(columns).append_column("owner", report.owners["owner"])
    table = table.filter(pc.equal(table["users_in_d"], 1))
    _check_same_tokens(report, table, tokenizer)
    return UniqueTexts(
        table["token_ids"].to_pylist(),
        table["owner"].to_pylist(),
        table["sequence"].to_pylist(),
        table["total_in_d"].to_pylist(),
    )


def _check_same_tokens(report: LeakageReport, table: pa.Table, tokenizer: Any) -> None:
    """Ids mean words only to the tokenizer that gave them."""
    rows = table.slice(0, _ROWS_COMPARED)
    ids = rows["token_ids"].to_pylist()
    known = max((max(row) for row in ids), default=0) < len(tokenizer)
    if not known or decoder_of(tokenizer)(ids) != rows["sequence"].to_pylist():
        raise UsageError(
            f"{report.folder} was made with another tokenizer: its token ids spell other words here. "
            "Audit this model first, or give the model that the report is about."
        )
