"""Candidates as a tree of tokens, every shared beginning read once.

Where each value is one token the tree is known without asking the tokenizer about every text. Byte
pairs join digits ("20", "24"), so there every candidate is cut into tokens first; a text is cut at
spaces where that provably changes nothing, and what all candidates share is encoded once.

Shapes: B rows, K ways to fill a piece, L tokens, N candidates, V vocabulary.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from tightlip.corpus.canary_templates import Slot, Template
from tightlip.corpus.encoding import safe_cuts
from tightlip.models.recurrent import RecurrentState
from tightlip.scan.scanner import BATCH_TOKENS, Scanner
from tightlip.scan.scoring import score_logits

LOGITS_AT_ONCE = {"cpu": 1 << 23, "cuda": 1 << 28}
CACHE_BYTES = 1 << 30  # keys and values of all levels together, unless a GPU has them
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
        ids_B1 = tokens_B[:, None]
        if self.carries_state or self.caches:
            extra = self.last_only if self.caches else {}
            out = self.model(input_ids=ids_B1, past_key_values=memory, use_cache=True, **extra)
            return out.logits[:, -1].float(), out.past_key_values
        ids_BT = ids_B1 if memory is None else torch.cat([memory, ids_B1], 1)
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
            limits.append(_cache_bytes(self.device) // num_levels // row_bytes)
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
    return type(memory) is DynamicCache and {*map(type, memory.layers)} <= {DynamicLayer}


def _selected(memory: DynamicCache, rows: Tensor) -> DynamicCache:
    """Picking rows and reading on both make new tensors: a copy of the frame is enough."""
    chosen = copy(memory)
    chosen.layers = [copy(layer) for layer in memory.layers]
    chosen.batch_select_indices(rows)
    return chosen


def _cache_bytes(device: torch.device) -> int:
    """A quarter of a GPU, whatever else is on it: the same GPU reads in the same parts each time."""
    if device.type != "cuda":
        return CACHE_BYTES
    return torch.cuda.get_device_properties(device).total_memory // 4


def _bytes_a_row(memory: DynamicCache) -> int:
    parts = [part for layer in memory.layers for part in (layer.keys, layer.values)]
    return sum(part.nbytes for part in parts) // len(parts[0])


IdsOf = Callable[[list[str]], list[np.ndarray]]
_SLOT = "\ue000"  # stands for a value while a template is cut
_MARKS = "|;#~^*"
_JOINED = 500  # pieces that are encoded as one text
_ENDED = -1  # behind the last token of a row


@dataclass(frozen=True, eq=False)
class Trie:
    """Nodes level by level, each with its parent's number in the level before and its token, children
    of one parent side by side; `ends` are the candidates' last nodes, numbered through all levels."""

    parents: list[Tensor]
    tokens: list[Tensor]
    ends: Tensor

    @classmethod
    def of_steps(cls, steps: Sequence[Tensor]) -> "Trie":
        """Every combination of one token of each step, in order."""
        parents, tokens, num = [], [], 1
        for step in steps:
            parents.append(torch.arange(num, device=step.device).repeat_interleave(len(step)))
            tokens.append(step.repeat(num))
            num *= len(step)
        before = sum(map(len, tokens[:-1]))
        return cls(parents, tokens, torch.arange(num, device=steps[0].device) + before)

    @classmethod
    def of_rows(cls, rows_NL: Tensor) -> "Trie":
        """The rows, each up to its first _ENDED."""
        size = int(rows_NL.max()) + 1
        node_N = torch.zeros(len(rows_NL), dtype=torch.int64, device=rows_NL.device)
        parents, tokens, ends, before = [], [], node_N.clone(), 0
        for token_N in rows_NL.unbind(1):
            live = token_N != _ENDED
            keys, node = torch.unique(node_N[live] * size + token_N[live], return_inverse=True)
            node_N[live], ends[live] = node, node + before
            parents.append(keys // size)
            tokens.append(keys % size)
            before += len(keys)
        return cls(parents, tokens, ends)

    def children(self, level: int) -> Tensor:
        """Where the children of each node of a level begin in the next; one more for the last's end."""
        num = len(self.tokens[level])
        if level + 1 == len(self.tokens):
            return torch.zeros(num + 1, dtype=torch.int64, device=self.ends.device)
        numbers = torch.arange(num + 1, device=self.ends.device)
        return torch.searchsorted(self.parents[level + 1], numbers)


class TrieReader:
    """Reads every node of a trie once, a bounded number of rows at a time."""

    def __init__(self, scanner: Scanner, trie: Trie) -> None:
        self.reader, self.device, self.bos = PrefixReader(scanner), scanner.device, scanner.bos_id
        self.trie, root = trie, torch.tensor([0, len(trie.tokens[0])], device=self.device)
        self._begins = [root, *(trie.children(n) for n in range(len(trie.tokens)))]
        self._before = np.cumsum([0, *map(len, trie.tokens)])
        self._nats = torch.zeros(int(self._before[-1]), dtype=torch.float64, device=self.device)

    def read(self) -> Iterator[int]:
        """Work through the trie, telling how many candidates more are done, about."""
        levels = self.trie.tokens
        first = levels[0] if self.bos is None else torch.tensor([self.bos], device=self.device)
        if len(levels) > 1:  # else nothing is read twice
            self.reader.choose_way(torch.stack([first[0], levels[-1][0]]))
        if self.bos is None:  # the first token is given, not predicted
            yield from self._go_on(None, torch.arange(len(first), device=self.device), 0)
        else:
            every = torch.zeros(1, dtype=torch.int64, device=self.device)
            yield from self._grow(None, first, self._nats.new_zeros(1), every, 0)

    def scores(self) -> np.ndarray:
        """Log-probability of every candidate, once all is read."""
        return self._nats[self.trie.ends].cpu().numpy()

    def _go_on(self, memory: Any, nodes: Tensor, level: int, rows: Tensor | None = None) -> Any:
        """Read on from those of these nodes that have children; `rows` are theirs in `memory`."""
        begins = self._begins[level + 1]
        inner = begins[nodes + 1] > begins[nodes]
        yield int((~inner).sum())
        nodes = nodes[inner]
        rows = None if rows is None else rows[inner]
        at_once = len(nodes)
        if memory is not None and len(nodes):
            position = level + (self.bos is not None)
            at_once = self.reader.rows_at_once(memory, self._width, position, len(self.trie.tokens))
        for start in range(0, len(nodes), max(at_once, 1)):
            part = nodes[start : start + at_once]
            chosen = None
            if memory is not None and rows is not None:
                chosen = self.reader.select(memory, rows[start : start + at_once])
            tokens, nats = self.trie.tokens[level], self._nats[self._before[level] :]
            yield from self._grow(chosen, tokens[part], nats[part], part, level + 1)

    def _grow(
        self, memory: Any, tokens_B: Tensor, nats_B: Tensor, nodes_B: Tensor, to: int
    ) -> Iterator[int]:
        """Score the children, in level `to`, of nodes with these tokens."""
        begins = self._begins[to]
        logits_BV, memory = self.reader.read(memory, tokens_B)
        self._width = logits_BV.shape[1]
        sizes_B = begins[nodes_B + 1] - begins[nodes_B]
        # Nodes left out between these have no children: theirs stand side by side.
        first, end = int(begins[nodes_B[0]]), int(begins[nodes_B[-1] + 1])
        children = torch.arange(first, end, device=self.device)
        rows = torch.arange(len(nodes_B), device=self.device).repeat_interleave(sizes_B)
        known = _log_probs(logits_BV, rows, self.trie.tokens[to][children], sizes_B)
        del logits_BV
        self._nats[self._before[to] + children] = nats_B[rows] + known
        yield from self._go_on(memory, children, to, rows)


def _log_probs(logits_BV: Tensor, rows: Tensor, tokens: Tensor, sizes_B: Tensor) -> Tensor:
    """Log-probabilities of tokens in rows, `sizes_B` of them in each.

    One token's comes from the scan's own pass, three times as fast as torch's logsumexp on a
    CPU; the others differ from it by their logits.
    """
    firsts_B = tokens[sizes_B.cumsum(0) - sizes_B]
    _, first_B = score_logits(logits_BV, firsts_B.contiguous())
    base_B = first_B.double() - logits_BV.gather(1, firsts_B[:, None])[:, 0].double()
    return logits_BV[rows, tokens].double() + base_B[rows]


def token_rows(
    template: Template, pools: Sequence[Sequence[str]], ids_of: IdsOf, *, may_cut: bool
) -> np.ndarray:
    """The tokens of every candidate, by number, each row filled up with _ENDED.

    Holds:
        same: they are those of the candidate's text encoded by itself.
    """
    parts = list(_pieces(template, pools, may_cut))
    shape = [math.prod(len(pool) for pool in own) for _, own in parts]
    columns, has_gaps = [], False
    for number, (pattern, own) in enumerate(parts):
        rows_KL = _encoded(pattern, own, ids_of, may_cut)
        has_gaps |= number + 1 < len(parts) and bool((rows_KL == _ENDED).any())
        repeated = np.repeat(rows_KL, math.prod(shape[number + 1 :]), axis=0)
        columns.append(np.tile(repeated, (math.prod(shape[:number]), 1)))
    rows_NL = np.concatenate(columns, axis=1)
    if has_gaps:
        order = np.argsort(rows_NL == _ENDED, axis=1, kind="stable")
        rows_NL = np.take_along_axis(rows_NL, order, axis=1)
    return rows_NL


def _pieces(
    template: Template, pools: Sequence[Sequence[str]], may_cut: bool
) -> Iterator[tuple[str, list[Sequence[str]]]]:
    """The template in pieces that are encoded apart, a mark for each value, with the values' lists."""
    whole = "".join(_SLOT if isinstance(part, Slot) else part for part in template.parts)
    visible = all(value and not (value[0] + value[-1]).isspace() and value[0].strip() and value[-1].strip() for pool in pools for value in pool)  # fmt: skip
    cuts = safe_cuts(whole) if may_cut and visible else []
    left = iter(pools)
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        yield whole[start:end], [next(left) for _ in range(whole.count(_SLOT, start, end))]


def _encoded(pattern: str, pools: list[Sequence[str]], ids_of: IdsOf, may_cut: bool) -> np.ndarray:
    """The tokens of every way to fill a piece, in order."""
    first, *others = pattern.split(_SLOT)
    texts = [first]
    for pool, literal in zip(pools, others, strict=True):
        texts = [text + value + literal for text in texts for value in pool]
    used = {*pattern, *(letter for pool in pools for value in pool for letter in value)}
    mark = next((mark for mark in _MARKS if mark not in used), None)
    joins = may_cut and mark is not None and pattern[0] == " " and pattern[-1].strip() != ""
    if joins and len(texts) > _JOINED:
        return _encoded_joined(texts, f" {mark}", ids_of)
    rows = ids_of(texts)
    lengths = np.array([len(row) for row in rows])
    return _padded(np.concatenate(rows), lengths)


def _encoded_joined(texts: list[str], mark: str, ids_of: IdsOf) -> np.ndarray:
    """The same from a few long texts, a mark behind each piece: asking the library about a million
    texts takes most of its time around them.

    Pieces are cut off at spaces, so a mark always has the same tokens. Its last one holds a letter
    that no piece has, and stands nowhere else.
    """
    own = ids_of([mark])[0]
    groups = [texts[start : start + _JOINED] for start in range(0, len(texts), _JOINED)]
    ids = np.concatenate(ids_of([mark.join([*group, ""]) for group in groups]))
    marks = np.flatnonzero(ids == own[-1])
    assert len(marks) == len(texts), "a mark is read as part of a piece"
    kept = np.ones(len(ids), bool)
    for back in range(len(own)):
        kept[marks - back] = False
    return _padded(ids[kept], np.diff(marks, prepend=-1) - len(own))


def _padded(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    padded = np.full((len(lengths), int(lengths.max())), _ENDED, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = ids
    return padded
