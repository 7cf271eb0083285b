"""Whether each value of a template is a token of its own, whatever stands beside it.

Only then are candidates the leaves of a tree. A tokenizer may join what stands in neighbouring
places ("20" and "24"), so that it is asked about every value, every pair of neighbours and the
secrets, and its entries that could reach over the edge of a place are looked for.

Shapes: N texts, P places.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from tightlip.corpus.canary_templates import Slot, Template
from tightlip.models.states import RecurrentState
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


# Whether each value of a template is a token of its own, whatever stands beside it


TEXTS_COMPARED = 2_000
MOST_PAIRS = 10_000
_MARKS = "▁Ġ#"  # put before an entry that begins, or goes on with, a word


class Filled(Protocol):
    """All ways to fill a template (audit/candidates.py)."""

    @property
    def template(self) -> Template: ...
    @property
    def pools(self) -> tuple[tuple[str, ...], ...]: ...
    def texts(self, places: np.ndarray) -> list[str]: ...
    def drawn(self, num: int, draw: np.random.Generator) -> np.ndarray: ...


def single_tokens(
    candidates: Filled,
    ids_of: Callable[[list[str]], list[np.ndarray]],
    entries: Iterable[str],
    secrets_NP: np.ndarray,
) -> list[np.ndarray] | None:
    """The tokens possible at each position; None where values are not tokens of their own."""
    steps = _tokens_alone(candidates, ids_of)
    if steps is None:
        return None
    for places_NP in _compared(candidates, secrets_NP):
        rows = np.stack(list(_expected(steps, places_NP)), axis=1)
        read = ids_of(candidates.texts(places_NP))
        if not all(np.array_equal(one, other) for one, other in zip(read, rows, strict=True)):
            return None
    options = _options(candidates)
    if any(spelt_across(options, entry.casefold()) for entry in entries):
        return None
    return [token for _, tokens in steps for token in tokens]


def joining_entries(tokenizer: Any) -> list[str]:
    """What a tokenizer may read as one where our texts have several values: entries that were
    added to its vocabulary, and numbers of two digits or more."""
    added = [str(token.content) for token in tokenizer.added_tokens_decoder.values()]
    bare = (entry.lstrip(_MARKS) for entry in tokenizer.get_vocab())
    return [*added, *(entry for entry in bare if len(entry) > 1 and entry.isdecimal())]


def spelt_across(options: Sequence[Sequence[str]], entry: str) -> bool:
    """Whether `entry` can stand over an edge between parts, given what each part may read.

    >>> spelt_across([["id "], ["2", "4"], ["0", "1"]], "41")
    True
    >>> spelt_across([["id "], ["2", "4"], ["0", "1"]], "14")
    False
    """
    return any(
        entry.startswith(text[start:])
        and len(entry) > len(text) - start
        and _goes_on(options[number + 1 :], entry[len(text) - start :])
        for number, texts in enumerate(options)
        for text in texts
        for start in range(len(text))
    )


def _goes_on(options: Sequence[Sequence[str]], rest: str) -> bool:
    return bool(options) and any(
        text.startswith(rest)
        or (rest.startswith(text) and _goes_on(options[1:], rest[len(text) :]))
        for text in options[0]
    )


def _options(candidates: Filled) -> list[list[str]]:
    left = iter(candidates.pools)
    read = [next(left) if isinstance(p, Slot) else [p] for p in candidates.template.parts]
    return [[text.casefold() for text in texts] for texts in read]


# Of each part: whether it is a place, and the tokens possible at each of its positions.
_Steps = list[tuple[bool, list[np.ndarray]]]


def _tokens_alone(
    candidates: Filled, ids_of: Callable[[list[str]], list[np.ndarray]]
) -> _Steps | None:
    """Each part encoded by itself; None where some value has not exactly one token."""
    steps: _Steps = []
    left = iter(candidates.pools)
    for part in candidates.template.parts:
        if not isinstance(part, Slot):
            steps.append((False, [token[None] for token in ids_of([part])[0]]))
            continue
        ids = ids_of(list(next(left)))
        if any(len(row) != 1 for row in ids):
            return None
        steps.append((True, [np.concatenate(ids)]))
    return steps


def _expected(steps: _Steps, places_NP: np.ndarray) -> Iterator[np.ndarray]:
    """The token at each position of the texts with these places, value by value."""
    place = 0
    for is_place, tokens in steps:
        for token in tokens:
            yield token[places_NP[:, place]] if is_place else np.repeat(token, len(places_NP))
        place += is_place


def _compared(candidates: Filled, secrets_NP: np.ndarray) -> Iterator[np.ndarray]:
    """The texts to ask the tokenizer about: the secrets, some at random, every value in every
    place, and all pairs of neighbours where they are few."""
    draw = np.random.default_rng(0)
    sizes = [len(pool) for pool in candidates.pools]
    if len(secrets_NP):
        yield secrets_NP
    yield candidates.drawn(TEXTS_COMPARED, draw)
    for place, size in enumerate(sizes):
        places_NP = candidates.drawn(size, draw)
        places_NP[:, place] = np.arange(size)
        yield places_NP
    for place, (size, after) in enumerate(pairwise(sizes)):
        if size * after <= MOST_PAIRS:
            places_NP = candidates.drawn(size * after, draw)
            places_NP[:, place], places_NP[:, place + 1] = np.divmod(np.arange(size * after), after)
            yield places_NP
