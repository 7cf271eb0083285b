"""How often, and by how many people, each sequence was written anywhere in the corpus.

A suffix array lists every place of the corpus in the order of the text that
follows it, so all occurrences of a sequence stand side by side: two binary
searches give the total, one walk over the block gives the distinct users.

The work is a pure function of a shard whose users are in no other shard, and
the results add up; the corpus is therefore counted in pieces that fit a memory
bound, here or on a cluster, and the result is the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numba import njit

from tightlip.audit.leakage.spill import IN_MEMORY, Room
from tightlip.core.engines import Engine, Result
from tightlip.core.errors import UsageError
from tightlip.core.files import written_whole
from tightlip.corpus.tokens import GrowingArray, Mapped, TokenizedCorpus, mapped

# Peak bytes held per token while a shard of w-byte symbols is indexed: text and users (8), the
# symbols (w), their suffix array (4w) and the token suffix array filtered from it (4).
_MAX_SYMBOL_BYTES = 3
_BYTES_PER_TOKEN = 8 + 5 * _MAX_SYMBOL_BYTES + 4
# Beyond this a larger shard no longer saves searches worth its cache misses (docs/benchmarks.md),
# and its symbols still fit the 32-bit suffix sorter.
_LARGEST_SHARD_TOKENS = 24_000_000
_SMALLEST_SHARD_TOKENS = 1_000_000  # below which workers would rather search in fewer
NOWHERE = np.iinfo(np.int64).max  # what no corpus reaches


@dataclass(frozen=True, kw_only=True)
class Sequences(Mapped):
    """Token sequences end to end: number i is tokens[offsets[i]:offsets[i + 1]]. Some are looked for
    at a time, unless `room` has all of them in memory."""

    tokens: np.ndarray
    offsets: np.ndarray
    room: Room = IN_MEMORY

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def parts(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Which they are, and the tokens and offsets of these alone."""
        for part in self.room.parts(len(self)) if len(self) else [slice(0, 0)]:
            offsets = self.offsets[part.start : part.stop + 1]
            own = self.tokens[offsets[0] : offsets[-1]]
            yield part, np.ascontiguousarray(own, dtype=np.int32), offsets - offsets[0]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some documents. `sole_user` marks a piece of one user too large for a single shard.

    `starts` is where each document begins in the corpus, of which those of one user keep the order.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    users: np.ndarray
    starts: np.ndarray
    sole_user: int | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which documents of a corpus are in a shard, and whose each is there: all that a worker is sent.
    It reads the tokens itself."""

    documents: np.ndarray
    users: np.ndarray
    num_tokens: int
    sole_user: int | None = None

    def read(self, corpus: TokenizedCorpus) -> Shard:
        starts = corpus.bounds[self.documents]
        own = end_to_end(corpus.tokens, starts, corpus.bounds[self.documents + 1] - starts)
        return Shard(
            tokens=own.tokens,
            bounds=own.offsets,
            users=self.users,
            starts=starts,
            sole_user=self.sole_user,
        )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Occurrences and distinct users of each sequence; of what one user wrote, where it first stands.

    `owned` has a column (sequence, user) for everybody who owns all documents that a sequence stands
    in, in order; None where that is not known yet. `numbers` are those of the sequences, where only
    what was found is told of.
    """

    totals: np.ndarray
    users: np.ndarray
    first: np.ndarray
    owned: np.ndarray | None = None
    numbers: np.ndarray | None = None


def edges_of(lengths: np.ndarray) -> np.ndarray:
    """Where stretches of these lengths begin and end when they lie end to end."""
    return np.append(0, np.cumsum(lengths, dtype=np.int64))


def count_in_shard(shard: Shard, sequences: Sequences) -> Counts:
    """Occurrences inside documents, overlapping ones included, and distinct users, in one shard."""
    where, names = _with_users(shard)
    found = []
    for part, *asked in sequences.parts():
        totals, users, first = _count(*where, *asked, len(names))
        if sequences.room.folder is None:
            return Counts(totals=totals, users=users, first=in_the_corpus(shard, first))
        here = np.flatnonzero(totals)
        found.append(np.stack([here + part.start, totals[here], users[here], first[here]]))
    numbers, totals, users, first = np.concatenate(found, axis=1)
    first = in_the_corpus(shard, first)
    return Counts(totals=totals, users=users, first=first, numbers=numbers)


def owners_in_shard(
    shard: Shard, sequences: Sequences, totals: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of a shard that has each document once for every owner: numbers of what was found, occurrences
    and distinct owners; and who owns as many occurrences as there are, `totals`, so that no document
    has others."""
    where, names = _with_users(shard)
    several = []
    for part, *asked in sequences.parts():
        found, users, owned = _owners(*where, *asked, len(names), totals[part])
        here = np.flatnonzero(found)
        owned = np.stack([owned[0] + part.start, names[owned[1]]])
        several.append((np.stack([here + part.start, found[here], users[here]]), owned))
    counted, all_owned = (np.concatenate(each, axis=1) for each in zip(*several, strict=True))
    return counted, all_owned


def _with_users(shard: Shard) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """A shard's text and suffix array with the user at each rank; and who these users are."""
    text, places = indexed(shard)
    names, local_users = np.unique(shard.users, return_inverse=True)
    # Each document takes its length plus its separator.
    user_of_place = np.repeat(local_users.astype(np.int32), np.diff(shard.bounds) + 1)
    return (text, places, user_of_place[places]), names


def in_the_corpus(shard: Shard, places: np.ndarray) -> np.ndarray:
    """Places of a shard's text as places of the corpus; what lies behind its end is nowhere."""
    begins = shard.bounds + np.arange(len(shard.bounds))
    there = np.full(len(places), NOWHERE)
    found = places < begins[-1]
    document = np.searchsorted(begins, places[found], side="right") - 1
    there[found] = places[found] - begins[document] + shard.starts[document]
    return there


def indexed(shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """A shard's tokens as `first_not_below` reads them, and their suffix array."""
    # Token ids plus one, with a 0 after each document so that no match crosses into the next.
    text = np.insert(np.asarray(shard.tokens, np.int32) + 1, shard.bounds[1:], 0)
    return text, _suffix_array(text, int(text.max(initial=0)) + 1)


def added_up(
    results: Iterator[tuple[Shard | Part | None, Counts]],
    num_sequences: int,
    room: Room = IN_MEMORY,
) -> Counts:
    """The counts of the whole corpus. Pieces of one large user count that user once."""
    totals, users = (room.full(num_sequences, 0, np.int64) for _ in range(2))
    first = room.full(num_sequences, NOWHERE, np.int64)
    seen, seen_of = room.full(num_sequences, 0, bool), None
    for shard, counts in results:
        here = slice(None) if counts.numbers is None else counts.numbers
        totals[here] += counts.totals
        first[here] = np.minimum(first[here], counts.first)
        if shard is None or shard.sole_user is None:
            users[here] += counts.users
            continue
        if shard.sole_user != seen_of:  # the pieces of one follow each other
            seen[:], seen_of = False, shard.sole_user
        users[here] += (counts.users > 0) & ~seen[here]
        seen[here] |= counts.users > 0
    return Counts(totals=totals, users=users, first=first)


def least_memory(corpus: TokenizedCorpus) -> int:
    """Bytes that counting the longest document takes; it is followed by a separator."""
    return int((np.diff(corpus.bounds) + 1).max(initial=0)) * _BYTES_PER_TOKEN


def check_memory(corpus: TokenizedCorpus, memory_bytes: int) -> None:
    """Refuse a document that does not fit `memory_bytes` while it is counted."""
    needed = least_memory(corpus)
    if needed > memory_bytes:
        lengths = np.diff(corpus.bounds)
        raise UsageError(
            f"Document {int(lengths.argmax())} has {int(lengths.max()):,} tokens; counting it takes "
            f"{needed:,} bytes and --memory leaves {memory_bytes:,} to each worker. "
            f"Raise --memory, or cut the document into shorter ones."
        )


def over_shards(
    engine: Engine,
    look: Callable[[Shard], Result],
    corpus: TokenizedCorpus,
    memory_bytes: int,
    only: np.ndarray | None = None,
    *,
    room: Room = IN_MEMORY,
    by_owner: bool = False,
) -> Iterator[tuple[Part, Result]]:
    """What `look` says of each user-disjoint shard; workers of one machine share `memory_bytes`, half of
    which is for the sequences that are looked for where these are in files of `room`."""
    if room.folder is not None:
        memory_bytes = max(memory_bytes // 2, engine.workers * least_memory(corpus))
    # As many as there are workers on all machines, or some would have nothing to do.
    share = (corpus.num_tokens + corpus.num_documents) // engine.num_workers + 1
    worth = max(share, _SMALLEST_SHARD_TOKENS) * _BYTES_PER_TOKEN
    fitting = min(memory_bytes // engine.workers, max(worth, least_memory(corpus)))
    parts = user_disjoint_parts(corpus, fitting, only, by_owner=by_owner)
    return engine.map(partial(_looked_at, look=look, corpus=corpus), parts)


def _looked_at(part: Part, look: Callable[[Shard], Result], corpus: TokenizedCorpus) -> Result:
    return look(part.read(corpus))


def user_disjoint_parts(
    corpus: TokenizedCorpus,
    memory_bytes: int,
    only: np.ndarray | None = None,
    *,
    by_owner: bool = False,
) -> Iterator[Part]:
    """The corpus in shards that each fit `memory_bytes` while they are counted.

    `only` says of each user whether the documents that they wrote are wanted. `by_owner` a document
    comes once for each of its owners, in place of once for who wrote it.
    """
    check_memory(corpus, memory_bytes)
    most_tokens = min(memory_bytes // _BYTES_PER_TOKEN, _LARGEST_SHARD_TOKENS)
    lengths = np.diff(corpus.bounds) + 1
    of_pair, users = np.arange(corpus.num_documents), np.asarray(corpus.users)
    if by_owner:
        of_pair, users = corpus.owned()
    by_user = np.argsort(users, kind="stable")
    by_user = by_user if only is None else by_user[only[users[by_user]]]
    for pairs, sole_user in _packed(by_user, users, lengths[of_pair], most_tokens):
        documents = of_pair[pairs]
        size = int((lengths[documents] - 1).sum())
        yield Part(documents=documents, users=users[pairs], num_tokens=size, sole_user=sole_user)


def _packed(
    by_user: np.ndarray, users: np.ndarray, lengths: np.ndarray, most_tokens: int
) -> Iterator[tuple[np.ndarray, int | None]]:
    """Documents for each shard: whole users while they fit, a larger user in pieces of its own."""
    waiting: list[np.ndarray] = []
    waiting_tokens = 0
    for documents in np.split(by_user, np.flatnonzero(np.diff(users[by_user])) + 1):
        size = int(lengths[documents].sum())
        if waiting and waiting_tokens + size > most_tokens:
            yield np.concatenate(waiting), None
            waiting, waiting_tokens = [], 0
        if size > most_tokens:
            for piece in np.split(documents, _cuts(lengths[documents], most_tokens)):
                yield piece, int(users[documents[0]])
        else:
            waiting.append(documents)
            waiting_tokens += size
    if waiting:
        yield np.concatenate(waiting), None


def _cuts(lengths: np.ndarray, most_tokens: int) -> list[int]:
    """Where to cut a user's documents so that no piece of two or more exceeds the bound."""
    cuts, size = [], 0
    for index, length in enumerate(lengths):
        if size and size + length > most_tokens:
            cuts.append(index)
            size = 0
        size += int(length)
    return cuts


def sequences_in(
    room: Room, tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> Sequences:
    """Stretches of a corpus end to end, in files that other machines see too where `room` has a folder."""
    if room.folder is None:
        return end_to_end(tokens, starts, lengths)
    paths = [room.folder / f"sequences-{name}.npy" for name in ("tokens", "offsets")]
    with written_whole(paths[0]) as beside:
        together = GrowingArray(beside, np.dtype(np.int32))
        for part in room.parts(len(starts)):
            together.extend(end_to_end(tokens, starts[part], lengths[part]).tokens)
        together.close()
    with written_whole(paths[1]) as beside, beside.open("wb") as stream:
        np.save(stream, edges_of(lengths))
    return Sequences(tokens=mapped(paths[0]), offsets=mapped(paths[1]), room=room)


def end_to_end(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Sequences:
    """Stretches of a corpus, given by where they start and how long they are."""
    offsets = edges_of(lengths)
    together = np.empty(offsets[-1], dtype=np.int32)
    _copy_stretches(tokens, starts, together, offsets)
    return Sequences(tokens=together, offsets=offsets)


@njit(cache=True, nogil=True)
def _copy_stretches(source, starts, target, edges):  # type: ignore[no-untyped-def]
    for i in range(len(starts)):
        for j in range(edges[i + 1] - edges[i]):
            target[edges[i] + j] = source[starts[i] + j]


def _suffix_array(text: np.ndarray, num_symbols: int) -> np.ndarray:
    """All places of `text`, ordered by what follows.

    divsufsort sorts bytes. Written big-endian in the fewest bytes, symbols compare as their bytes
    do, and the places that start a symbol are kept. (pydivsufsort rounds three bytes up to four
    and filters through 64-bit temporaries: a third more time and twice the memory.)
    """
    from pydivsufsort import divsufsort  # not on a bare GPU image, where only scanning runs

    width = max(1, (int(num_symbols - 1).bit_length() + 7) // 8)
    # Token ids fit three bytes. Only words may be more, and then their shards take a fifth more.
    assert width <= 4
    symbols = np.empty((len(text), width), dtype=np.uint8)
    for byte in range(width):
        symbols[:, byte] = (text >> (8 * (width - 1 - byte))) & 0xFF
    if len(text) == 0:
        return np.zeros(0, dtype=np.int32)
    byte_places = divsufsort(symbols.reshape(-1))
    return _every_symbol_start(byte_places, width, len(text)) if width > 1 else byte_places


@njit(cache=True, nogil=True)
def _every_symbol_start(byte_places, width, length):  # type: ignore[no-untyped-def]
    places = np.empty(length, dtype=np.int32)
    num_kept = 0
    for place in byte_places:
        if place % width == 0:
            places[num_kept] = place // width
            num_kept += 1
    return places


@njit(cache=True, nogil=True)
def _count(text, places, users_in_order, tokens, offsets, num_users):  # type: ignore[no-untyped-def]
    num_sequences = len(offsets) - 1
    totals = np.zeros(num_sequences, dtype=np.int64)
    users = np.zeros(num_sequences, dtype=np.int64)
    first = np.zeros(num_sequences, dtype=np.int64)
    last_seen = np.full(num_users, -1, dtype=np.int64)
    for sequence in range(num_sequences):
        query = tokens[offsets[sequence] : offsets[sequence + 1]]
        low = first_not_below(text, places, query, 0, False)
        high = first_not_below(text, places, query, low, True)
        totals[sequence] = high - low
        distinct = 0
        earliest = len(text)
        for rank in range(low, high):
            earliest = min(earliest, places[rank])
            user = users_in_order[rank]
            if last_seen[user] != sequence:
                last_seen[user] = sequence
                distinct += 1
                if distinct == num_users > 1:  # of one user, the earliest may be still to come
                    break
        users[sequence] = distinct
        first[sequence] = earliest
    return totals, users, first


@njit(cache=True, nogil=True)
def _owners(text, places, users_in_order, tokens, offsets, num_users, totals):  # type: ignore[no-untyped-def]
    lows = np.zeros(len(totals), dtype=np.int64)
    found = np.zeros(len(totals), dtype=np.int64)
    for sequence in range(len(totals)):
        query = tokens[offsets[sequence] : offsets[sequence + 1]]
        lows[sequence] = first_not_below(text, places, query, 0, False)
        high = first_not_below(text, places, query, lows[sequence], True)
        found[sequence] = high - lows[sequence]
    users = np.zeros(len(totals), dtype=np.int64)
    # Whoever owns all of a sequence's documents has `totals` of what is found here.
    owned = np.zeros((2, (found // np.maximum(totals, 1)).sum()), dtype=np.int64)
    num_owned = 0
    times = np.zeros(num_users, dtype=np.int64)
    for sequence in range(len(totals)):
        own = users_in_order[lows[sequence] : lows[sequence] + found[sequence]]
        for user in own:
            users[sequence] += times[user] == 0
            times[user] += 1
            if times[user] == totals[sequence]:
                owned[0, num_owned], owned[1, num_owned] = sequence, user
                num_owned += 1
        for user in own:
            times[user] = 0
    return found, users, owned[:, :num_owned]


@njit(cache=True, nogil=True)
def first_not_below(text, places, query, low, past):  # type: ignore[no-untyped-def]
    """First rank whose suffix is not below `query`; with `past`, not below all that begin with it."""
    high = len(places)
    while low < high:
        middle = (low + high) >> 1
        place = places[middle]
        order = 0  # suffix against query: -1 below, 0 begins with it, 1 above
        for i in range(len(query)):
            if place + i >= len(text):
                order = -1
                break
            difference = text[place + i] - (query[i] + 1)
            if difference != 0:
                order = -1 if difference < 0 else 1
                break
        if order < 0 or (past and order == 0):
            low = middle + 1
        else:
            high = middle
    return low
