"""Every window of a length that one user alone has, how likely it is drawn, and the likeliest of each user.

A window's log-probability is the sum of its tokens', each after all that stands before it in its
document: the context of training. Another context would be another column of log-probabilities.
Its words are told however it was cut into tokens; from its probability follow the tries that it
takes.

Whose a window is, is told by how far the text at every place also stands in text that its owner does
not own: it is its owner's alone if it is longer than that, and one figure for each place answers for
windows of all lengths. In a suffix array the neighbours of a place share most with it, and of those
that are somebody else's the nearest share most; two walks over the array find them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import njit

from tightlip.audit.leakage.by_text import numbered, tokenised
from tightlip.audit.leakage.counting import Shard, edges_of, indexed
from tightlip.audit.leakage.words import TokenWords, inside_or_touched
from tightlip.core.engines import Engine
from tightlip.core.errors import UsageError
from tightlip.corpus.shared_text import Documents
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.store import ScannedCorpus, ScanShard

EVEN, NEARLY = 0.5, 0.9  # the chances that tries are counted for
# Windows and people are counted that come out within so many tries.
WITHIN = tuple(10**place for place in range(10))
# Of windows that the reference draws too, those count that it draws so much more seldom.
TIMES_DEARER = 10
# What is held of a token at most: text, symbols, both suffix arrays, and what is shared.
_BYTES_PER_TOKEN = 40
_MOST_TOKENS = 2**31 // 3  # that the suffix sorter's symbols of three bytes may be


def queries_for(share: float, log_probs: np.ndarray | float) -> np.ndarray:
    """Tries after which a text of each probability has come out with the chance `share`.

    Infinite where the probability is 0, or so small that float64 cannot count them.

    Holds:
        closed_form: the least n with 1 - (1 - P)^n at least `share`.

    >>> queries_for(0.5, np.log([1.0, 0.5, 0.005])).tolist()
    [1.0, 1.0, 139.0]
    """
    log_probs = np.minimum(np.asarray(log_probs, np.float64), 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        # Of a small P, log1p(-P) is -P, which float64 no longer holds below e^-745.
        misses = np.log1p(-np.exp(log_probs))
        left = math.log1p(-share)
        tries = np.where(log_probs > -30, left / misses, -left * np.exp(-log_probs))
    # A hair less: of e^log(0.5) the quotient is a hair above 1, and 2 would be too many.
    return np.asarray(np.maximum(np.ceil(tries * (1 - 1e-12)), 1.0))


@dataclass(frozen=True, kw_only=True)
class WordPlaces:
    """The documents as numbers of words, and which words each token bounds.

    A row of `edges` is a token: the first word that begins in or behind it and one past the last
    that ends in or before it; then the same of words that it touches. Counted in its document.
    """

    corpus: TokenizedCorpus
    edges: np.ndarray

    def most_in(self, num_tokens: int) -> int:
        """No window of so many tokens has more words."""
        return num_tokens * int((self.edges[:, 3] - self.edges[:, 2]).max(initial=1))

    def within(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First word and number of words of each stretch of tokens: those wholly inside it, or
        where there is none those it touches."""
        low, high = self.edges[starts], self.edges[ends - 1]
        first, last = inside_or_touched(low[:, 0], high[:, 1], low[:, 2], high[:, 3])
        return first, last - first


def read_words(
    corpus: TokenizedCorpus,
    documents: Documents,
    tokenizer: Any,
    numbers: dict[str, int],
    engine: Engine,
) -> WordPlaces:
    """Read the corpus' text once more; new words join `numbers`."""
    of_words, edges = [np.zeros(0, np.int32)], [np.zeros((0, 4), np.int32)]
    num_words = [np.zeros(0, np.int64)]
    batches = (
        tokenised(first, batch, corpus, np.arange(first, first + len(batch)))
        for first, batch in numbered(documents, corpus)
    )
    read = TokenWords(tokenizer).of_tokens
    for _, (distinct, places, sizes, own_edges) in engine.map_python(read, batches):
        given = [numbers.setdefault(word, len(numbers)) for word in distinct]
        of_words.append(np.array(given, np.int32)[places])
        num_words.append(sizes)
        edges.append(own_edges)
    as_words = replace(
        corpus,
        tokens=np.concatenate(of_words),
        bounds=edges_of(np.concatenate(num_words)),
        spans=None,
        roles=None,
        trained=None,
    )
    return WordPlaces(corpus=as_words, edges=np.concatenate(edges))


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """`shared` has, for each document and each of its owners, a figure for
    every token and one more; `begins` is where those of a document's first owner begin.

    Documents are asked for by their number behind the first `num_before`."""

    shared: np.ndarray
    begins: np.ndarray
    num_owners: np.ndarray  # of each document
    num_before: int = 0

    def at(self, documents: np.ndarray, owners: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Of places counted from their document's beginning; `owners` counts a document's own."""
        documents = documents + self.num_before
        first = self.begins[documents]
        sizes = (self.begins[documents + 1] - first) // self.num_owners[documents]
        return self.shared[first + owners * sizes + places]


def check_memory(num_tokens: int, memory_bytes: int) -> None:
    """Refuse a corpus whose places cannot be sorted within the memory given."""
    needed = num_tokens * _BYTES_PER_TOKEN
    if needed > memory_bytes or num_tokens > _MOST_TOKENS:
        raise UsageError(
            f"To find whom each window of {num_tokens:,} tokens belongs to takes {needed:,} bytes, and --memory leaves "
            f"{memory_bytes:,}; {_MOST_TOKENS:,} tokens can be sorted at most. Raise --memory, or give a part of the corpus with whole users."
        )


def longest_elsewhere(
    corpus: TokenizedCorpus, most: int, before: TokenizedCorpus | None = None
) -> Elsewhere:
    """For every place and owner, the most tokens from there on that others have too; to them belongs
    everybody of the corpus `before`.

    Holds:
        brute_force: the same as comparing every place with every place of others.
        several_owners: somebody who owns a document is no other to it.
    """
    corpora = [corpus] if before is None else [before, corpus]
    tokens = np.concatenate([one.tokens for one in corpora])
    lengths = np.concatenate([np.diff(one.bounds) for one in corpora])
    documents, owners = map(np.asarray, corpora[0].owned())
    num_before = 0
    if before is not None:  # nobody of one is somebody of the other, whatever their names
        num_before, (own, theirs) = before.num_documents, corpus.owned()
        documents = np.append(documents, own + num_before)
        owners = np.append(owners, theirs + before.num_users)
    num_owners = np.bincount(documents, minlength=len(lengths))
    sizes, bounds, nobody = lengths + 1, edges_of(lengths), np.zeros(len(lengths), np.int32)
    text, ranks = indexed(Shard(tokens=tokens, bounds=bounds, users=nobody, starts=bounds))
    begins = edges_of(sizes * num_owners)
    shared = np.zeros(begins[-1], dtype=np.uint16)
    common = _common(text, ranks, most)
    document_of = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    about = (edges_of(sizes), edges_of(num_owners), owners.astype(np.int32), begins)
    for is_back in (False, True):
        _walk(ranks, common, document_of, *about, int(num_owners.max(initial=1)), is_back, shared)
    return Elsewhere(shared=shared, begins=begins, num_owners=num_owners, num_before=num_before)


@njit(cache=True, nogil=True)
def _common(text, ranks, most):  # type: ignore[no-untyped-def]
    """How much the text at each rank shares with that before it, within documents."""
    common = np.zeros(len(ranks) + 1, dtype=np.uint16)
    for rank in range(1, len(ranks)):
        one, other = ranks[rank - 1], ranks[rank]
        room = min(most, len(text) - max(one, other))
        size = 0
        while size < room and text[one + size] == text[other + size] and text[one + size] != 0:
            size += 1
        common[rank] = size
    return common


@njit(cache=True, nogil=True)
def _walk(ranks, common, document_of, edges, owner_edges, owners, begins, most_owners, is_back, shared):  # type: ignore[no-untyped-def]  # fmt: skip
    """What a place shares with the nearest that is not its owner's is either what it shares with
    the one before it, or where that is the owner's too, no more than that one shares with others."""
    last, here = np.zeros(most_owners, np.uint16), np.zeros(most_owners, np.uint16)
    before = -1
    for step in range(len(ranks)):
        rank = len(ranks) - 1 - step if is_back else step
        link = common[rank + 1] if is_back else common[rank]
        document = document_of[ranks[rank]]
        size = edges[document + 1] - edges[document]
        place = begins[document] + ranks[rank] - edges[document]
        first, end = owner_edges[document], owner_edges[document + 1]
        for slot in range(end - first):
            value = link if before >= 0 else np.uint16(0)
            if before >= 0:
                for other in range(owner_edges[before], owner_edges[before + 1]):
                    if owners[other] == owners[first + slot]:
                        value = min(value, last[other - owner_edges[before]])
            here[slot] = value
            shared[place + slot * size] = max(shared[place + slot * size], value)
        last, here = here, last
        before = document


NOWHERE = -1


@dataclass(frozen=True, kw_only=True)
class Owned:
    """Whose each stretch of a corpus is: by its tokens and, where they are known, by its words."""

    by_tokens: Elsewhere
    by_words: tuple[WordPlaces, Elsewhere] | None

    def alone(
        self,
        documents: np.ndarray,
        owners: np.ndarray,
        starts: np.ndarray,
        length: int,
        begin: np.ndarray,
    ) -> np.ndarray:
        """Whether nobody but this owner has the window; without a word it is nobody's own."""
        is_own = self.by_tokens.at(documents, owners, starts - begin) < length
        if self.by_words is not None:
            places, elsewhere = self.by_words
            first, size = places.within(starts, starts + length)
            is_own &= (size > 0) & (elsewhere.at(documents, owners, first) < size)
        return is_own


class Likeliest:
    """The likeliest window of each user and role: where it starts, and its log-probabilities."""

    def __init__(self, size: int) -> None:
        self.log_probs, self.references = np.full((2, size), -np.inf)
        self.starts = np.full(size, NOWHERE)

    def look_at(
        self, keys: np.ndarray, log_probs: np.ndarray, references: np.ndarray, starts: np.ndarray
    ) -> None:
        """Take in windows that stand behind all that were looked at; of equals the first stays."""
        order = np.lexsort((starts, -log_probs, keys))
        keys, first = np.unique(keys[order], return_index=True)
        chosen = order[first]
        better = (self.starts[keys] == NOWHERE) | (log_probs[chosen] > self.log_probs[keys])
        keys, chosen = keys[better], chosen[better]
        self.log_probs[keys] = log_probs[chosen]
        self.references[keys] = references[chosen]
        self.starts[keys] = starts[chosen]


class Searched:
    """What was found among the windows of one length; arrays go by user and role, and what several
    own counts for each.

    `counted` are those that the reference draws at least ten times as seldom, or without one all.
    """

    def __init__(self, length: int, size: int) -> None:
        self.length = length
        self.num_windows = 0  # whoever has them
        self.has_window = np.zeros(size, bool)  # also one that others have
        self.searched, self.counted = np.zeros((2, size), np.int64)
        self.every, self.likeliest = Likeliest(size), Likeliest(size)  # of all, of the counted
        self.windows_within = np.zeros(len(WITHIN), np.int64)


def search_windows(
    model: ScannedCorpus,
    reference: ScannedCorpus | None,
    owned: Owned,
    *,
    lengths: Sequence[int],
    carries_text: np.ndarray,
) -> list[Searched]:
    """Every window of these lengths that is one user's alone.

    A window lies in one document and one role, every token of it carries text and was scored.

    Holds:
        brute_force: the same as summing and comparing window by window.
        impossible: a window with a token that is never drawn has log-probability minus infinity.
        streamed: of the scans one shard is held at a time.
    """
    corpus = model.corpus
    size = corpus.num_users * num_roles(corpus)
    found = [Searched(length, size) for length in lengths]
    others: Iterator[ScanShard | None] = iter(reference.shards()) if reference else iter(())
    for shard in model.shards():
        columns = _Columns(corpus, shard, next(others, None), carries_text)
        for one in found:
            _search(one, columns, owned)
    return found


def num_roles(corpus: TokenizedCorpus) -> int:
    return len(corpus.role_names or [""])


class _Sums:
    """Log-probabilities added up from a shard's first token on, and the tokens never drawn."""

    def __init__(self, log_probs: np.ndarray) -> None:
        is_cut = np.isneginf(log_probs)
        finite = np.where(is_cut | np.isnan(log_probs), 0, log_probs).astype(np.float64)
        self.sums, self.num_cut = np.append(0.0, np.cumsum(finite)), edges_of(is_cut)

    def over(self, starts: np.ndarray, length: int) -> np.ndarray:
        ends = starts + length
        is_cut = self.num_cut[ends] > self.num_cut[starts]
        # Rounding may leave a sum of zeros a hair above zero.
        return np.where(is_cut, -np.inf, np.minimum(self.sums[ends] - self.sums[starts], 0.0))


class _Columns:
    """A shard's documents, once for each owner: whose each place is, and what was scored there."""

    def __init__(
        self,
        corpus: TokenizedCorpus,
        shard: ScanShard,
        other: ScanShard | None,
        carries_text: np.ndarray,
    ) -> None:
        bounds = corpus.bounds[shard.first : shard.end + 1]
        inside = slice(int(bounds[0]), int(bounds[-1]))
        roles = np.ones(len(shard.log_probs)) if corpus.roles is None else corpus.roles[inside]
        barred = np.isnan(shard.log_probs) | ~carries_text[corpus.tokens[inside]] | (roles == 0)
        of_pair, owners = corpus.owned(np.arange(shard.first, shard.end))
        slots = np.arange(len(of_pair)) - np.searchsorted(of_pair, of_pair)
        lengths = np.diff(bounds)[of_pair]
        within = np.arange(lengths.sum()) - np.repeat(edges_of(lengths)[:-1], lengths)
        self.corpus, self.model = corpus, _Sums(shard.log_probs)
        self.reference = None if other is None else _Sums(other.log_probs)
        self.num_barred = edges_of(barred)
        self.num_changes = np.append(0, edges_of(np.diff(roles) != 0))
        self.first = inside.start  # the corpus' place of the shard's first token
        self.documents = np.repeat(of_pair, lengths) + shard.first
        # By number, and counted in the document.
        self.owners, self.slots = np.repeat(owners, lengths), np.repeat(slots, lengths)
        self.places = np.repeat(bounds[:-1][of_pair], lengths) + within

    def starts(self, length: int) -> np.ndarray:
        """Which places begin a window: it ends in its document, speaks in one role, and is scored."""
        ends = self.places + length
        fits = np.flatnonzero(ends <= self.corpus.bounds[self.documents + 1])
        low, high = self.places[fits] - self.first, ends[fits] - self.first
        is_whole = self.num_barred[low] == self.num_barred[high]
        is_whole &= self.num_changes[low + 1] == self.num_changes[high]
        return np.asarray(fits[is_whole])


def _search(into: Searched, columns: _Columns, owned: Owned) -> None:
    chosen, length, corpus = columns.starts(into.length), into.length, columns.corpus
    into.num_windows += int((columns.slots[chosen] == 0).sum())
    documents, starts = columns.documents[chosen], columns.places[chosen]
    begin = corpus.bounds[documents]
    keys = columns.owners[chosen] * num_roles(corpus)
    if corpus.roles is not None:
        keys = keys + corpus.roles[starts]
    into.has_window[keys] = True
    alone = owned.alone(documents, columns.slots[chosen], starts, length, begin)
    starts, keys = starts[alone], keys[alone]
    log_probs = columns.model.over(starts - columns.first, length)
    references, is_counted = np.full(len(starts), np.nan), np.ones(len(starts), bool)
    if columns.reference is not None:
        references = columns.reference.over(starts - columns.first, length)
        is_counted = np.isfinite(log_probs) & (references <= log_probs - np.log(TIMES_DEARER))
    into.searched += np.bincount(keys, minlength=len(into.searched))
    into.counted += np.bincount(keys[is_counted], minlength=len(into.counted))
    into.every.look_at(keys, log_probs, references, starts)
    own = np.flatnonzero(is_counted)
    into.likeliest.look_at(keys[own], log_probs[own], references[own], starts[own])
    tries = queries_for(EVEN, log_probs[own])
    into.windows_within += (tries[:, None] <= np.array(WITHIN)).sum(0)
