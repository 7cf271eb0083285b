"""Reading many texts that begin alike: every beginning once, remembered as the model allows.

Shapes: B rows, T positions, V vocabulary.
"""

import inspect
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from tightlip.models.recurrent import RecurrentState
from tightlip.scan.scanner import BATCH_TOKENS, Scanner

LOGITS_AT_ONCE = {"cpu": 1 << 23, "cuda": 1 << 28}
CACHE_BYTES = {"cpu": 1 << 30, "cuda": 1 << 33}  # keys and values of all levels together
_NEAR = 1e-4  # of the largest logit; what float32 sums differ by in another order


class PrefixReader:
    """Reads on behind remembered beginnings, a bounded number of rows at a time.

    Holds:
        as_reread: the logits are those of reading each row from its beginning.
        untouched: selecting rows of a memory, and reading on from them, leaves it as it was.
    """

    def __init__(self, scanner: Scanner) -> None:
        self.model, self.device = scanner.model, scanner.device
        self.carries_state = scanner.carries_state
        accepted = inspect.signature(self.model.forward).parameters
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.takes_cache = {"use_cache", "past_key_values"} <= accepted.keys()
        self.caches = False

    def choose_way(self, tokens_T: Tensor) -> None:
        """Use keys and values if, on these tokens, they give what reading all of them gives."""
        self.caches = not self.carries_state and self.takes_cache and self._cache_agrees(tokens_T)

    def read(self, memory: Any, tokens_B: Tensor) -> tuple[Tensor, Any]:
        """Logits behind one more token, and what to go on from; `memory` is used up."""
        if self.carries_state or self.caches:
            extra = self.last_only if self.caches else {}
            out = self.model(
                input_ids=tokens_B[:, None], past_key_values=memory, use_cache=True, **extra
            )
            return out.logits[:, -1].float(), out.past_key_values
        ids_BT = tokens_B[:, None] if memory is None else torch.cat([memory, tokens_B[:, None]], 1)
        return self._reread(ids_BT), ids_BT

    def select(self, memory: Any, rows: Tensor) -> Any:
        """The memory of these rows, some of them perhaps several times, as one of its own."""
        if self.carries_state:
            chosen = RecurrentState(memory.parts_LBH, memory.num_positions)
            chosen.batch_select_indices(rows)
            return chosen
        return _selected(memory, rows) if self.caches else memory[rows]

    def rows_at_once(self, memory: Any, width: int, position: int, num_levels: int) -> int:
        """How many rows to read together behind `position` tokens, with logits of `width`."""
        kind = self.device.type
        positions = 1 if self.carries_state or self.caches else position + 1
        limits = [
            LOGITS_AT_ONCE.get(kind, 1 << 24) // (width * (1 if self.last_only else positions)),
            BATCH_TOKENS.get(kind, 16_384) // positions,
        ]
        if self.caches:
            # One token more each, and twice: the old ones stay until the new ones are there.
            row_bytes = 2 * _bytes_a_row(memory) * (position + 1) // position
            limits.append(CACHE_BYTES.get(kind, 1 << 30) // num_levels // row_bytes)
        return max(1, min(limits))

    def _reread(self, ids_BT: Tensor) -> Tensor:
        extra = {"use_cache": False} if self.takes_cache else {}
        out = self.model(input_ids=ids_BT, **self.last_only, **extra)
        return out.logits[:, -1].float()

    def _cache_agrees(self, tokens_T: Tensor) -> bool:
        """Two rows that part at the last token, read through a cache and without one."""
        memory: Any = None
        for token in tokens_T:
            out = self.model(input_ids=token[None, None], past_key_values=memory, use_cache=True)
            memory = getattr(out, "past_key_values", None)
            if not _is_plain(memory):
                return False
        ends_B = torch.stack([tokens_T[0], tokens_T[-1]])
        again = _selected(memory, torch.zeros(2, dtype=torch.long, device=self.device))
        out = self.model(input_ids=ends_B[:, None], past_key_values=again, use_cache=True)
        whole_BV = self._reread(torch.cat([tokens_T.expand(2, -1), ends_B[:, None]], 1))
        off = (out.logits[:, -1].float() - whole_BV).abs().max()
        return bool(off <= _NEAR * whole_BV.abs().max().clamp(min=1.0))


def _is_plain(memory: Any) -> bool:
    """Whether it is keys and values and nothing else, so that rows can be picked from it."""
    return type(memory) is DynamicCache and all(
        type(layer) is DynamicLayer for layer in memory.layers
    )


def _selected(memory: DynamicCache, rows: Tensor) -> DynamicCache:
    """Picking rows and reading on both make new tensors: a copy of the frame is enough."""
    chosen = copy(memory)
    chosen.layers = [copy(layer) for layer in memory.layers]
    chosen.batch_select_indices(rows)
    return chosen


def _bytes_a_row(memory: DynamicCache) -> int:
    parts = [part for layer in memory.layers for part in (layer.keys, layer.values)]
    return sum(part.nbytes for part in parts) // len(parts[0])
