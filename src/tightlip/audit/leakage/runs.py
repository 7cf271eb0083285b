"""The multiset S: maximal runs of consecutive correct predictions, and which of them are equal.

METHODS: Algorithm 1 of the leakage-report paper, with the run that reaches the end of its
document flushed (their printed pseudo-code drops it).
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numba import njit

from tightlip.audit.leakage.counting import edges_of
from tightlip.audit.leakage.spill import Gathered, Room


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Entries of S in corpus order: where each starts, how long it is, in which document."""

    starts: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def part(self, which: slice | np.ndarray) -> "Runs":
        return Runs(
            starts=self.starts[which], lengths=self.lengths[which], documents=self.documents[which]
        )


@dataclass(frozen=True, kw_only=True)
class DistinctSequences:
    """Runs with equal token ids share a number; numbers ascend with the token ids.

    Equal ones are in one of `buckets`, each in corpus order.
    """

    number_of_run: np.ndarray
    first_run: np.ndarray
    buckets: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.first_run)


def collect_runs(
    tokens: np.ndarray, bounds: np.ndarray, ranks: np.ndarray, carries_text: np.ndarray, top_k: int
) -> Runs:
    """Maximal runs of tokens that stand among the top k and carry text.

    `bounds` may start anywhere: `ranks[0]` belongs to token `bounds[0]`, and documents are
    numbered from 0.
    """
    hits = (ranks >= 0) & (ranks < top_k) & carries_text[tokens[bounds[0] : bounds[-1]]]
    begins_document = np.zeros(len(hits) + 1, dtype=bool)
    begins_document[bounds - bounds[0]] = True
    around = np.concatenate([[False], hits, [False]])
    starts = np.flatnonzero(hits & (begins_document[:-1] | ~around[:-2])) + bounds[0]
    ends = np.flatnonzero(hits & (begins_document[1:] | ~around[2:])) + bounds[0] + 1
    documents = np.searchsorted(bounds, starts, side="right") - 1
    return Runs(starts=starts, lengths=ends - starts, documents=documents)


def sums_over_runs(values: np.ndarray, runs: Runs, base: int) -> np.ndarray:
    """The sum of a per-token value over each run, in float64; `values[0]` belongs to `base`."""
    return _sums(values, runs.starts - base, runs.lengths)


@njit(cache=True, nogil=True)
def _sums(values, starts, lengths):  # type: ignore[no-untyped-def]
    # Not a difference of cumulative sums: over a long corpus that loses the digits of short runs.
    sums = np.zeros(len(starts), dtype=np.float64)
    for run in range(len(starts)):
        for place in range(starts[run], starts[run] + lengths[run]):
            sums[run] += values[place]
    return sums


def distinct_sequences(
    tokens: np.ndarray, runs: Runs, num_symbols: int | None = None
) -> DistinctSequences:
    """Number the runs by content, exactly and in the order of their token ids.

    All runs start in one group; each round splits every group by its next token, an ended run
    before the others. A group of one, or of ended runs, is settled. A rank is the number of runs
    in groups before it, so settled ranks stay valid while the rest is still being split.
    """
    rank = np.zeros(len(runs), dtype=np.int64)
    unsettled = np.arange(len(runs))
    num_symbols = num_symbols or int(tokens.max(initial=0)) + 2
    depth = 0
    while len(unsettled):
        place = np.minimum(runs.starts[unsettled] + depth, len(tokens) - 1)
        ended = runs.lengths[unsettled] == depth
        symbol = np.where(ended, 0, tokens[place].astype(np.int64) + 1)
        key = rank[unsettled] * num_symbols + symbol
        order = np.argsort(key, kind="stable")
        unsettled, ended, key = unsettled[order], ended[order], key[order]
        starts_group = _changes(key)
        starts_old_group = _changes(rank[unsettled])
        rank[unsettled] += _first_of_group(starts_group) - _first_of_group(starts_old_group)
        alone = starts_group & np.r_[starts_group[1:], True]
        unsettled = unsettled[~(alone | ended)]
        depth += 1
    _, first_run, number_of_run = np.unique(rank, return_index=True, return_inverse=True)
    everything = [np.arange(len(runs))]
    return DistinctSequences(number_of_run=number_of_run, first_run=first_run, buckets=everything)


def distinct_in(room: Room, tokens: np.ndarray, runs: Runs) -> DistinctSequences:
    """The same, also of more runs than fit memory: a hash puts them into buckets, and those of one are
    numbered at a time. Then all sequences are put in order, a range of them at a time.

    Of a bucket the runs are taken in parts, a run of each sequence of every part is kept, and these are
    numbered: however often a sequence is said, it takes little. A hash draws a bucket's sequences at
    random from all, so that those of one cut the others into ranges of like size.
    """
    if room.folder is None:
        return distinct_sequences(tokens, runs)
    num_symbols, num_buckets = int(tokens.max(initial=0)) + 2, -(-len(runs) // room.at_once)
    number = room.full(len(runs), 0, np.int64)  # of its bucket, for now
    _hash(tokens, runs.starts, runs.lengths, num_buckets, number)
    order, edges = grouped(number, num_buckets, room)
    buckets = [order[start:end] for start, end in pairwise(edges)]
    gathered = Gathered([np.int64], room.folder, room.at_once)
    ends = [0]
    for bucket in buckets:
        firsts = np.zeros(0, np.int64)
        for part in room.parts(len(bucket)):
            inside = distinct_sequences(tokens, runs.part(bucket[part]), num_symbols)
            number[bucket[part]] = inside.number_of_run + len(firsts)
            firsts = np.append(firsts, bucket[part][inside.first_run])
        inside = distinct_sequences(tokens, runs.part(firsts), num_symbols)
        for part in room.parts(len(bucket)):
            number[bucket[part]] = inside.number_of_run[number[bucket[part]]] + ends[-1]
        gathered.add(firsts[inside.first_run])
        ends.append(ends[-1] + len(inside))
    (found,) = gathered.columns()

    def ids(place: int) -> list[int]:
        start, length = runs.starts[found[place]], runs.lengths[found[place]]
        return [*tokens[start : start + length].tolist()]

    between = range(ends[1])[:: max(1, -(-ends[1] // num_buckets))][1:]
    cuts = [
        [bisect_left(range(end), ids(splitter), start, key=ids) for start, end in pairwise(ends)]
        for splitter in between
    ]
    rank, done = room.full(len(found), 0, np.int64), 0
    for low, high in pairwise([ends[:-1], *cuts, ends[1:]]):
        chosen = np.concatenate([np.arange(*each) for each in zip(low, high, strict=True)])
        inside = distinct_sequences(tokens, runs.part(found[chosen]), num_symbols)
        rank[chosen] = inside.number_of_run + done
        done += len(chosen)
    first_run = room.full(len(found), 0, np.int64)
    first_run[rank] = found
    for part in room.parts(len(number)):
        number[part] = rank[number[part]]
    return DistinctSequences(number_of_run=number, first_run=first_run, buckets=buckets)


def grouped(keys: np.ndarray, num_keys: int, room: Room) -> tuple[np.ndarray, np.ndarray]:
    """All places, those of one key side by side and ascending; and where those of each key begin."""
    edges = edges_of(np.bincount(keys, minlength=num_keys))
    order = room.full(len(keys), 0, np.int64)
    _group(keys, edges[:-1].copy(), order)
    return order, room.kept(edges)


@njit(cache=True, nogil=True)
def _group(keys, cursors, order):  # type: ignore[no-untyped-def]
    for place in range(len(keys)):
        order[cursors[keys[place]]] = place
        cursors[keys[place]] += 1


@njit(cache=True, nogil=True)
def _hash(tokens, starts, lengths, num_buckets, buckets):  # type: ignore[no-untyped-def]
    base = np.uint64(0x9E3779B97F4A7C15)
    for run in range(len(starts)):
        # The product spreads short runs, whose hash is small, over all bits.
        spread = _window_hash(tokens, starts[run], lengths[run], base) * base
        buckets[run] = np.int64(spread >> np.uint64(33)) % num_buckets


def _changes(values: np.ndarray) -> np.ndarray:
    return np.r_[True, values[1:] != values[:-1]]


def _first_of_group(starts_group: np.ndarray) -> np.ndarray:
    return np.flatnonzero(starts_group)[np.cumsum(starts_group) - 1]


def copied_runs(tokens: np.ndarray, bounds: np.ndarray, runs: Runs) -> np.ndarray:
    """Which runs already stand, whole, in their own document before they start."""
    order = np.lexsort((runs.starts, runs.lengths, runs.documents))
    copied = np.zeros(len(runs), dtype=np.bool_)
    _mark_copied(tokens, bounds, runs.starts, runs.lengths, runs.documents, order, copied)
    return copied


@njit(cache=True, nogil=True)
def _mark_copied(tokens, bounds, starts, lengths, documents, order, copied):  # type: ignore[no-untyped-def]
    group_start = 0
    while group_start < len(order):
        first = order[group_start]
        group_end = group_start + 1
        while (
            group_end < len(order)
            and documents[order[group_end]] == documents[first]
            and lengths[order[group_end]] == lengths[first]
        ):
            group_end += 1
        group = order[group_start:group_end]
        begin = bounds[documents[first]]
        # A copy must end before its run starts, and the last run of the group starts latest.
        if starts[group[-1]] - begin >= lengths[first]:
            _mark_group(tokens, begin, starts, lengths[first], group, copied)
        group_start = group_end


@njit(cache=True, nogil=True)
def _mark_group(tokens, begin, starts, length, group, copied):  # type: ignore[no-untyped-def]
    """Runs of one length in one document: slide a window over it, look its hash up among theirs.

    Naive search is quadratic in a document with many runs; a hash only proposes, tokens decide.
    """
    base = np.uint64(0x9E3779B97F4A7C15)
    table_size = 2
    while table_size < 2 * len(group):
        table_size *= 2
    slot_run = np.full(table_size, -1, dtype=np.int64)
    slot_hash = np.zeros(table_size, dtype=np.uint64)
    first_place = np.full(table_size, -1, dtype=np.int64)
    slot_of = np.empty(len(group), dtype=np.int64)
    not_found = 0
    for member in range(len(group)):
        start = starts[group[member]]
        window_hash = _window_hash(tokens, start, length, base)
        slot = _find_slot(tokens, starts, length, slot_run, slot_hash, window_hash, start)
        not_found += slot_run[slot] < 0
        slot_run[slot] = group[member]
        slot_hash[slot] = window_hash
        slot_of[member] = slot
    leading = np.uint64(1)
    for _ in range(length - 1):
        leading *= base
    window_hash = _window_hash(tokens, begin, length, base)
    for place in range(begin, starts[group[-1]] - length + 1):
        slot = _find_slot(tokens, starts, length, slot_run, slot_hash, window_hash, place)
        if slot_run[slot] >= 0 and first_place[slot] < 0:
            first_place[slot] = place
            not_found -= 1
            if not_found == 0:  # in "na na na na" every place is a match, compared to its end
                break
        window_hash -= (np.uint64(tokens[place]) + np.uint64(1)) * leading
        window_hash = window_hash * base + np.uint64(tokens[place + length]) + np.uint64(1)
    for member in range(len(group)):
        place = first_place[slot_of[member]]
        copied[group[member]] = place >= 0 and place + length <= starts[group[member]]


@njit(cache=True, nogil=True)
def _window_hash(tokens, start, length, base):  # type: ignore[no-untyped-def]
    value = np.uint64(0)
    for place in range(start, start + length):
        value = value * base + np.uint64(tokens[place]) + np.uint64(1)
    return value


@njit(cache=True, nogil=True)
def _find_slot(tokens, starts, length, slot_run, slot_hash, window_hash, place):  # type: ignore[no-untyped-def]
    """The slot that holds these tokens, or the free one where they would go."""
    mask = len(slot_run) - 1
    slot = np.int64(window_hash >> np.uint64(33)) & mask
    while slot_run[slot] >= 0:
        if slot_hash[slot] == window_hash:
            equal = True
            for i in range(length):
                if tokens[starts[slot_run[slot]] + i] != tokens[place + i]:
                    equal = False
                    break
            if equal:
                return slot
        slot = (slot + 1) & mask
    return slot
