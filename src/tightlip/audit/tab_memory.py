"""What a model remembers of a line while it is typed, so that a long one stays fast.

The memory is whatever the model returns as `past_key_values`: a RecurrentState of ours, or a
transformers Cache. A cache changes as it is read from, so that every use gets a copy of its own.
"""

import inspect
from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightlip.audit.scan import checked_window, evaluating, full_precision
from tightlip.core.errors import UsageError

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
