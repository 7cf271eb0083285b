"""Stretches of a text that stand in people's documents, word for word or with a few changes.

Word for word: a suffix array of each shard gives the stretches that can be made no longer on
either side. Every stretch that one person alone wrote lies in such a one, and its owner owns that
too, so counting these counts all.

With changes: what has at most e changes has e + 1 unbroken pieces at most, one of them so long as
`core_words` says. From each core that one person alone wrote, the edit distance is followed to both
sides.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import njit

from tightlip.audit.leakage import counting
from tightlip.audit.leakage.counting import Shard, first_not_below, indexed, over_shards
from tightlip.audit.leakage.leaks import count_in_corpus
from tightlip.audit.leakage.runs import Runs, distinct_sequences
from tightlip.core.engines import Engine
from tightlip.core.progress import task
from tightlip.corpus.tokens import TokenizedCorpus

MOST_CHANGES = 8  # to either side of a core
# At either end of a stretch with changes so many words agree: fewer agree by chance.
END_WORDS = 3
MOST_PLACES = 1000  # of one core in its owner's documents; more are not tried, which is said
_FAR = 2 * MOST_CHANGES + 2  # more changes than any that are followed


def core_words(min_words: int, near: float) -> int:
    """Words that stand together somewhere in every stretch with a share of at most `near` changed.

    Of L words with e of them changed at least L - e are left, in at most e + 1 pieces.

    >>> core_words(8, 0.1), core_words(8, 0.0), core_words(20, 0.1)
    (5, 8, 6)
    """
    longest = min_words + (math.ceil(2 / near) if near else 0)  # beyond, pieces only grow
    return min(
        math.ceil((words - changes) / (changes + 1))
        for words in range(min_words, longest + 1)
        for changes in [most_changes(words, near)]
    )


def most_changes(words: int, near: float) -> int:
    """
    >>> most_changes(9, 0.1), most_changes(10, 0.1), most_changes(30, 0.1)
    (0, 1, 3)
    """
    return math.floor(near * words + 1e-9)  # 0.1 times 30 is a hair below 3


# Words `starts` up to `ends` of the synthetic text stand, with so many changed, in the owner's
# documents: `num_written` words from `places` on. `others` are the people of the other corpus who
# wrote it too; of one with changes, its core.
STRETCH = np.dtype([(name, np.int64) for name in ("starts", "ends", "changes", "places", "num_written", "owners", "others")])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What a text has of a corpus: `own` are one person's, by owner, then place; of `num_distinct`
    word for word, whoever wrote them.

    Holds:
        maximal: of what is one person's, none with changes lies inside another.
        alone: of each the owner owns all documents that it, or its core, stands in.
    """

    own: np.ndarray
    num_distinct: int
    num_untried: int  # cores at more places than are tried


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is looked for, and with how much memory."""

    synthetic: TokenizedCorpus
    min_words: int
    near: float
    engine: Engine
    memory_bytes: int

    @property
    def core(self) -> int:
        return core_words(self.min_words, self.near)

    def overlap_with(self, corpus: TokenizedCorpus, other: TokenizedCorpus | None) -> Overlap:
        """The stretches of each person of `corpus`, and how many of `other` wrote them too.

        Holds:
            sharded: it is the same however the corpus is cut.
        """
        starts, ends = self._longest(corpus)
        cores = _inside(starts, ends - self.core + 1) if self.near else np.zeros(0, np.int64)
        exact = ends - starts >= self.min_words
        starts, ends = starts[exact], ends[exact]
        # Exact stretches first, then cores, all counted in one go.
        begins = np.append(starts, cores)
        lengths = np.append(ends, cores + self.core) - begins
        runs = Runs(starts=begins, lengths=lengths, documents=begins)
        distinct = distinct_sequences(np.asarray(self.synthetic.tokens), runs)
        number, first = np.split(distinct.number_of_run, [len(starts)]), distinct.first_run
        sequences = counting.end_to_end(self.synthetic.tokens, begins[first], lengths[first])
        counts = count_in_corpus(corpus, sequences, self.engine, self.memory_bytes)
        others, owned = np.zeros(len(distinct), np.int64), counts.owned
        assert owned is not None
        if other is not None:
            others = count_in_corpus(other, sequences, self.engine, self.memory_bytes).users
        whole = np.stack([starts, ends, 0 * ends, counts.first[number[0]], ends - starts])
        own, num_untried = _of_owners(whole, number[0], owned, others), 0
        whose = np.zeros(self.synthetic.num_tokens, np.int64)
        whose[cores] = _sets_of(owned, len(distinct), corpus.num_users)[number[1]]
        if whose.any():
            found, num_untried = self._changed(corpus, whose, owned[1])
            at_core = number[1][np.searchsorted(cores, found[5])]
            own = np.append(own, _of_owners(found[:5], at_core, owned, others))
        num_distinct = len(np.unique(number[0]))
        return Overlap(own=_maximal(own), num_distinct=num_distinct, num_untried=num_untried)

    def _longest(self, corpus: TokenizedCorpus) -> tuple[np.ndarray, np.ndarray]:
        """Where stretches of at least a core's words start and end that stand in the corpus and can
        be made no longer."""
        lengths = np.zeros(self.synthetic.num_tokens, np.int32)
        look = partial(longest_in_shard, synthetic=self.synthetic, least=self.core)
        for found in self._mapped(look, corpus, None, "Looking for stretches"):
            np.maximum(lengths, found, out=lengths)
        starts = np.flatnonzero(lengths)
        ends = starts + lengths[starts]
        # In the order of starts, one that ends no later than another before it lies inside that.
        kept = ends > np.maximum.accumulate(np.append(0, ends))[:-1]
        return starts[kept], ends[kept]

    def _changed(
        self, corpus: TokenizedCorpus, whose: np.ndarray, owners: np.ndarray
    ) -> tuple[np.ndarray, int]:
        """Stretches with changes around cores, and how many cores stand at too many places."""
        # Others may have written what somebody owns.
        wanted = np.full(corpus.num_users, corpus.owners is not None)
        wanted[owners] = True
        look = partial(changed_in_shard, search=self, whose=whose)
        parts = [*self._mapped(look, corpus, wanted, "Looking for changes")]
        return np.concatenate([found for found, _ in parts], axis=1), sum(n for _, n in parts)

    def _mapped(self, look: Any, corpus: TokenizedCorpus, wanted: Any, what: str) -> Iterator[Any]:
        with task(what, corpus.num_tokens) as bar:
            for part, found in over_shards(self.engine, look, corpus, self.memory_bytes, wanted):
                yield found
                bar.advance(part.num_tokens)


def _inside(first: np.ndarray, past: np.ndarray) -> np.ndarray:
    """All numbers that lie in some of these ranges."""
    size = int(past.max(initial=0)) + 1
    depth = np.bincount(first, minlength=size) - np.bincount(past, minlength=size)
    return np.flatnonzero(np.cumsum(depth))


def _of_owners(
    found: np.ndarray, number: np.ndarray, owned: np.ndarray, others: np.ndarray
) -> np.ndarray:
    """As stretches those that have an owner, once for every owner; `number` is that of the sequence
    by which each is owned."""
    low, high = np.searchsorted(owned[0], np.stack([number, number + 1]))
    at = np.repeat(np.arange(len(number)), high - low)
    owners = owned[1][np.arange(len(at)) + np.repeat(high - np.cumsum(high - low), high - low)]
    columns = [*found[:, at], owners, others[number[at]]]
    return np.rec.fromarrays(columns, dtype=STRETCH).view(np.ndarray)


def _sets_of(owned: np.ndarray, num_sequences: int, num_users: int) -> np.ndarray:
    """A number for the owners of each sequence, the same for the same people; 0 for nobody."""
    marks = np.random.default_rng(0).integers(1, 2**63, num_users)  # whose sums differ
    sets = np.zeros(num_sequences, np.int64)
    np.add.at(sets, owned[0], marks[owned[1]])
    return sets


def _maximal(own: np.ndarray) -> np.ndarray:
    """In order, without those with changes that lie inside another of the same person."""
    order = np.lexsort((own["places"], own["changes"], -own["ends"], own["starts"], own["owners"]))
    own = own[order]
    reach = own["owners"] * (int(own["ends"].max(initial=0)) + 1) + own["ends"]
    before = np.maximum.accumulate(np.append(-1, reach))[:-1]
    return own[(own["changes"] == 0) | (reach > before)]


def longest_in_shard(shard: Shard, *, synthetic: TokenizedCorpus, least: int) -> np.ndarray:
    """Of each word of the synthetic text how long a stretch begins there that stands in the shard,
    can be made no longer and has `least` words; 0 where there is none."""
    text, places = indexed(shard)
    return _longest(text, places, np.asarray(synthetic.tokens), np.asarray(synthetic.bounds), least)


def changed_in_shard(shard: Shard, *, search: Search, whose: np.ndarray) -> tuple[np.ndarray, int]:
    """Columns (start, end, changes, place, words written, core), and cores at too many places; `whose`
    is the number of each core's owners."""
    text, places = indexed(shard)
    synthetic = search.synthetic
    words, bounds = np.asarray(synthetic.tokens), np.asarray(synthetic.bounds)
    sizes = (search.core, search.min_words, search.near)
    found, num_untried = _changed(text, places, words, bounds, whose, *sizes)
    found[3] = counting.in_the_corpus(shard, found[3])
    return found, int(num_untried)


@njit(cache=True, nogil=True)
def _stands(text, places, query):  # type: ignore[no-untyped-def]
    rank = first_not_below(text, places, query, 0, False)
    return rank < len(places) and _in_common(text, places[rank], query) == len(query)


@njit(cache=True, nogil=True)
def _in_common(text, place, query):  # type: ignore[no-untyped-def]
    length = 0
    while length < len(query) and place + length < len(text):
        if text[place + length] != query[length] + 1:
            break
        length += 1
    return length


@njit(cache=True, nogil=True)
def _longest(text, places, words, bounds, least):  # type: ignore[no-untyped-def]
    lengths = np.zeros(len(words), dtype=np.int32)
    for document in range(len(bounds) - 1):
        start, end = bounds[document], bounds[document + 1]
        while start + least <= end:
            rank = first_not_below(text, places, words[start : start + least], 0, False)
            query = words[start:end]
            if rank == len(places) or _in_common(text, places[rank], query) < least:
                start += 1
                continue
            # Of all places the two beside where the whole rest would stand have most in common.
            rank = first_not_below(text, places, query, rank, False)
            length = 0 if rank == len(places) else _in_common(text, places[rank], query)
            if rank > 0:
                length = max(length, _in_common(text, places[rank - 1], query))
            lengths[start] = length
            past = start + length + 1
            if past > end:
                break
            # The next begins where what reaches one word further first stands in the corpus: that
            # is found by halves, since a part of what stands there stands there too.
            low, high = start + 1, past - least + 1
            while low < high:
                middle = (low + high) >> 1
                if _stands(text, places, words[middle:past]):
                    high = middle
                else:
                    low = middle + 1
            start = low
    return lengths


@njit(cache=True, nogil=True)
def _changed(text, places, words, bounds, whose, core, least, near):  # type: ignore[no-untyped-def]
    found = np.empty((6, 1024), dtype=np.int64)
    num, num_untried = 0, 0
    left = np.zeros((2, MOST_CHANGES + 1), dtype=np.int64)
    right = np.zeros((2, MOST_CHANGES + 1), dtype=np.int64)
    for document in range(len(bounds) - 1):
        begin, end = bounds[document], bounds[document + 1]
        for start in range(begin, end - core + 1):
            if whose[start] == 0:
                continue
            query, first = words[start : start + core], num
            low = first_not_below(text, places, query, 0, False)
            high = first_not_below(text, places, query, low, True)
            num_untried += high - low > MOST_PLACES
            for place in places[low : min(high, low + MOST_PLACES)]:
                # Of the same people's cores that stand together in both the first sees all.
                is_first = start == begin or whose[start - 1] != whose[start] or place == 0
                if not is_first and text[place - 1] == words[start - 1] + 1:
                    continue
                _reach(words, start + core, end, 1, text, place + core, right)
                _reach(words, start - 1, begin - 1, -1, text, place - 1, left)
                furthest = -1
                for after in range(MOST_CHANGES, -1, -1):
                    if after > 0 and right[0, after] == right[0, after - 1]:
                        continue
                    before = _most_before(left[0], core + right[0, after], after, near)
                    if before < 0 or left[0, before] <= furthest:
                        continue
                    furthest = left[0, before]
                    length = furthest + core + right[0, after]
                    if before + after == 0 or length < least:
                        continue
                    begins, ends = start - furthest, start + core + right[0, after]
                    # What somebody writes often looks the same from place to place.
                    if num > first and found[0, num - 1] <= begins and ends <= found[1, num - 1]:
                        continue
                    if num == found.shape[1]:
                        found = np.concatenate((found, np.empty_like(found)), axis=1)
                    place_length = left[1, before] + core + right[1, after]
                    found[:3, num] = begins, ends, before + after
                    found[3:, num] = place - left[1, before], place_length, start
                    num += 1
    return found[:, :num].copy(), num_untried


@njit(cache=True, nogil=True)
def _most_before(reached, others, changes, near):  # type: ignore[no-untyped-def]
    """The most changes before a core that the share allows, with so many words and changes beside."""
    for before in range(MOST_CHANGES, -1, -1):
        if before > 0 and reached[before] == reached[before - 1]:
            continue
        if before + changes <= near * (reached[before] + others) + 1e-9:
            return before
    return -1


@njit(cache=True, nogil=True)
def _reach(words, at, stop, step, text, place, reached):  # type: ignore[no-untyped-def]
    """For each number of changes how many words on, in the one text and in the other, the last words
    are that both have in common: the edit distance, row by row, in a band as wide as its limit."""
    reached[:] = 0
    width = 2 * MOST_CHANGES + 1
    previous = np.full(width, _FAR)
    current = np.full(width, _FAR)
    agreeing = np.zeros(width, dtype=np.int64)  # words before here that agree one by one
    agreeing[MOST_CHANGES] = END_WORDS  # those of the core
    available, most = 0, abs(stop - at) + MOST_CHANGES
    while available < most and _is_word(text, place + step * available):
        available += 1
    for ahead in range(min(available, MOST_CHANGES) + 1):
        previous[MOST_CHANGES + ahead] = ahead
    for row in range(1, abs(stop - at) + 1):
        word = words[at + step * (row - 1)] + 1
        least = _FAR
        for band in range(width):
            other = row + band - MOST_CHANGES  # words of the other text that are used up
            current[band] = _FAR
            if other < 0 or other > available:
                continue
            value = previous[band + 1] + 1 if band + 1 < width else _FAR
            if band > 0:
                value = min(value, current[band - 1] + 1)
            if other > 0:
                is_same = text[place + step * (other - 1)] == word
                value = min(value, previous[band] + (not is_same))
                agreeing[band] = agreeing[band] + 1 if is_same else 0
                if agreeing[band] >= END_WORDS:
                    for changes in range(value, MOST_CHANGES + 1):
                        if row > reached[0, changes]:
                            reached[0, changes], reached[1, changes] = row, other
            current[band] = value
            least = min(least, value)
        if least > MOST_CHANGES:
            return
        previous, current = current, previous


@njit(cache=True, nogil=True)
def _is_word(text, place):  # type: ignore[no-untyped-def]
    return 0 <= place < len(text) and text[place] != 0
