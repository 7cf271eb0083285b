"""Whose words stand in a line: the unique sequences of a leakage report, found by token ids."""

import inspect
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from tightlip.audit.leakage.findings import decoder_of
from tightlip.audit.leakage.summary import LeakageReport
from tightlip.core.errors import UsageError
from tightlip.scan.scanner import checked_window, evaluating, full_precision

# The line as it was a few words ago, for whoever goes back and types on.
LINES_KEPT = 4


@dataclass(frozen=True)
class _Read:
    """A model that has read some tokens: its state, and its logits for the next."""

    state: Any
    logits_V: Tensor


class Memory:
    """Next-token logits behind any line of ids, reading only what is new.

    A line that does not fit the model's window is read from a later start, half a window on at a
    time, so that the start stays put while somebody types.

    Holds:
        as_recomputed: the logits are those of reading the line, or its window, from nothing.
    """

    def __init__(self, model: Any, *, bos_id: int | None, room: int) -> None:
        self._model, self._bos_id, self._room = model, bos_id, room
        self._device = next(model.parameters()).device
        carries_state = bool(getattr(model.config, "is_recurrent", False))
        self._window = None if carries_state else checked_window(None, model.config)
        takes_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if takes_last else {}
        self._lines: OrderedDict[tuple[int, ...], _Read] = OrderedDict()

    def begin(self, ids: list[int]) -> "Reading | None":
        """A reading that stands behind `ids`; None where there is nothing to predict from."""
        inputs = self._inputs(ids)
        if not inputs:
            return None
        read = self._read_line(tuple(inputs))
        return Reading(self, inputs, _Read(deepcopy(read.state), read.logits_V))

    def _inputs(self, ids: list[int]) -> list[int]:
        inputs = ids if self._bos_id is None else [self._bos_id, *ids]
        if self._window is None or len(inputs) + self._room <= self._window:
            return list(inputs)
        half = max(1, self._window // 2)
        over = len(inputs) + self._room - self._window
        start = -(-over // half) * half
        return inputs[min(start, len(inputs) - 1) :]

    def _read_line(self, line: tuple[int, ...]) -> _Read:
        if line in self._lines:
            self._lines.move_to_end(line)
            return self._lines[line]
        known = max((k for k in self._lines if line[: len(k)] == k), key=len, default=())
        state = deepcopy(self._lines[known].state) if known else None
        self._lines[line] = self.read(list(line), len(known), state)
        if len(self._lines) > LINES_KEPT:
            self._lines.popitem(last=False)
        return self._lines[line]

    def read(self, inputs: list[int], num_known: int, state: Any) -> _Read:
        """Read on behind `num_known` tokens; a model without a state reads everything again."""
        fresh = inputs if state is None else inputs[num_known:]
        ids_1T = torch.tensor([fresh], device=self._device)
        with torch.inference_mode(), full_precision(), evaluating(self._model):
            output = self._model(
                input_ids=ids_1T, past_key_values=state, use_cache=True, **self._last_only
            )
        logits_V = output.logits[0, -1].float()
        if torch.isnan(logits_V).any():
            raise UsageError(
                "The model's predictions are NaN, so there is nothing to show. Take an earlier "
                "snapshot, or train again with a lower rate."
            )
        return _Read(getattr(output, "past_key_values", None), logits_V)

    def is_full(self, num_inputs: int) -> bool:
        return self._window is not None and num_inputs >= self._window


class Reading:
    """A line being written: the logits for its next token, None once the window is full."""

    def __init__(self, memory: Memory, inputs: list[int], read: _Read) -> None:
        self._memory, self._inputs, self._read = memory, inputs, read
        self.logits_V: Tensor | None = read.logits_V

    def go_on(self, token: int) -> None:
        """Write `token`."""
        if self._memory.is_full(len(self._inputs)):
            self.logits_V = None
            return
        self._inputs.append(token)
        self._read = self._memory.read(self._inputs, len(self._inputs) - 1, self._read.state)
        self.logits_V = self._read.logits_V


# Whose words stand in a line: the unique sequences of a leakage report, found by token ids


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
