"""Who wrote a sequence however it was cut into tokens, and which sequences are one leak.

Byte pairs cut the same word differently in different places, so that what one person alone wrote
as tokens may be what many wrote as text. The words of each unique sequence are therefore counted
once more, by the same suffix array over numbers of words.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from tightlip.audit.leakage import counting
from tightlip.audit.leakage.counting import first_not_below
from tightlip.audit.leakage.leaks import Leaks, count_in_corpus, has_owner
from tightlip.audit.leakage.spill import Gathered, Room
from tightlip.audit.leakage.words import KnownWords, Tokenised, TokenWords, changed_meanwhile
from tightlip.core.engines import Engine
from tightlip.core.files import written_whole
from tightlip.core.progress import task
from tightlip.corpus.rendered import SPOKEN
from tightlip.corpus.shared_text import Documents
from tightlip.corpus.tables import DocumentBatch
from tightlip.corpus.tokens import GrowingArray, TokenizedCorpus, mapped

_NO_QUERYS_WORD = 0  # the number of every word that no unique sequence has


@dataclass(frozen=True, kw_only=True)
class ByText:
    """Of each distinct sequence: who wrote its words, and which leak it belongs to.

    `users` is 0 where it was not counted: several wrote its tokens, it has no word, or the
    tokenizer cannot say which characters a token covers; in the last case `unique` is by tokens.
    Sequences of one leak have the same number in `leaks`; -1 is no leak.

    Holds:
        fewer: whoever is unique by text is unique by tokens.
        somebody: what was counted has its owner among its users.
    """

    users: np.ndarray
    unique: np.ndarray
    leaks: np.ndarray
    owned: np.ndarray  # a column (sequence, user) for each owner of a unique one

    def extent(self, chosen: np.ndarray) -> dict[str, int]:
        """How much some of the unique sequences come to: themselves, their leaks, their owners."""
        return {
            "sequences": int(chosen.sum()),
            "leaks": len(np.unique(self.leaks[chosen])),
            "people": len(np.unique(self.owned[1][chosen[self.owned[0]]])),
        }


def read_by_text(
    leaks: Leaks,
    documents: Documents | None,
    tokenizer: Any,
    *,
    engine: Engine,
    memory_bytes: int,
    work: Path,
) -> ByText:
    """Read the corpus' text twice: for the words of what is unique, and for who wrote them.

    Without `documents`, of which only tokens are known, unique is by tokens.
    """
    room, unique, owned = leaks.room, leaks.unique, leaks.owned
    users = room.full(len(unique), 0, np.int64)
    if unique.any() and tokenizer.is_fast and documents is not None:
        wanted = np.flatnonzero(unique)
        wanted = room.kept(wanted[np.argsort(leaks.first_in_d[wanted], kind="stable")])
        numbers: dict[str, int] = {}
        counted, asked = _words_of_sequences(leaks, wanted, documents, tokenizer, numbers, engine)
        corpus = _corpus_of_words(leaks.corpus, documents, numbers, work, engine)
        enough = max(memory_bytes, engine.workers * counting.least_memory(corpus))
        counts = count_in_corpus(corpus, asked, engine, enough, "Counting words")
        assert counts.owned is not None
        users[counted] = np.maximum(counts.users, 1)  # its owner wrote it
        owned = _owned_by_text(owned, counted, counts, room)
        unique = has_owner(owned, len(users))
    joined = _leaks_of(leaks, unique, owned, engine, memory_bytes)
    return ByText(users=users, unique=unique, leaks=joined, owned=owned)


def _owned_by_text(
    owned: np.ndarray, counted: np.ndarray, counts: counting.Counts, room: Room
) -> np.ndarray:
    """Whoever owns all documents with its tokens must own all with its words, if these were found."""
    assert counts.owned is not None
    # One number for each sequence and user.
    keys = room.kept((owned[0] << 32) + owned[1])
    pairs = (counted[counts.owned[0]] << 32) + counts.owned[1]
    place = np.minimum(np.searchsorted(keys, pairs), len(keys) - 1)
    is_kept = np.isin(owned[0], counted[counts.users == 0])
    is_kept[place[keys[place] == pairs]] = True
    return room.stacked([each[is_kept] for each in owned])


def numbered(documents: Documents, corpus: TokenizedCorpus) -> Iterator[tuple[int, DocumentBatch]]:
    """The documents again, each batch with the number of its first."""
    done = 0
    with task("Reading words", corpus.num_documents) as bar:
        for batch in documents.batches():
            if done + len(batch) > corpus.num_documents:
                raise changed_meanwhile()
            yield done, batch
            done += len(batch)
            bar.advance(len(batch))
    if done != corpus.num_documents:
        raise changed_meanwhile()


def spoken(batch: DocumentBatch) -> list[str]:
    """Without what a template wrote, which in everybody's chats would make a user's own word
    everybody's, and beside a word another word of it."""
    return batch.attributes.get(SPOKEN, batch.texts)


def _words_of_sequences(
    leaks: Leaks,
    wanted: np.ndarray,
    documents: Documents,
    tokenizer: Any,
    numbers: dict[str, int],
    engine: Engine,
) -> tuple[np.ndarray, counting.Sequences]:
    """Which sequences have words where they first stand, and numbers of these; new words join
    `numbers`."""
    corpus, room = leaks.corpus, leaks.room
    starts, lengths = room.kept(leaks.first_in_d[wanted]), room.kept(leaks.lengths[wanted])
    tokens, sizes = (Gathered([kind], room.folder, room.at_once) for kind in (np.int32, np.int64))

    def stretches() -> Iterator[tuple[Tokenised, np.ndarray, np.ndarray]]:
        for first, batch in numbered(documents, corpus):
            ends = corpus.bounds[[first, min(first + len(batch), corpus.num_documents)]]
            part = slice(*np.searchsorted(starts, ends))
            if part.start == part.stop:
                continue
            own = np.searchsorted(corpus.bounds, starts[part], side="right") - 1
            places, document = np.unique(own, return_inverse=True)
            some = tokenised(first, batch, corpus, places)
            yield some, starts[part] - corpus.bounds[own] + some.starts[document], lengths[part]

    read = TokenWords(tokenizer).of_stretches
    for _, (distinct, places, num_words) in engine.map_python(read, stretches()):
        given = [numbers.setdefault(word, len(numbers) + 1) for word in distinct]
        tokens.add(np.array(given, np.int32)[places])
        sizes.add(num_words)
    (ids,), (num_words,) = tokens.columns(), sizes.columns()
    # A sequence without words is no query: it would be found everywhere.
    has_word = num_words > 0
    num_words = num_words[has_word]
    begins = counting.edges_of(num_words)[:-1]
    return wanted[has_word], counting.sequences_in(room, ids, begins, num_words)


def tokenised(
    first: int, batch: DocumentBatch, corpus: TokenizedCorpus, documents: np.ndarray
) -> Tokenised:
    """Some documents of a batch that begins with number `first`."""
    own, places = spoken(batch), (documents - first).tolist()
    return Tokenised(
        texts=[batch.texts[place] for place in places],
        num_tokens=corpus.bounds[documents + 1] - corpus.bounds[documents],
        spoken=[own[place] for place in places],
    )


def _corpus_of_words(
    corpus: TokenizedCorpus,
    documents: Documents,
    numbers: dict[str, int],
    work: Path,
    engine: Engine,
) -> TokenizedCorpus:
    """The documents as numbers of words, in a file of `work` that every worker can read.

    Of words that no query has one is kept where several stand together: nothing matches there.
    """
    edges = [np.zeros(1, dtype=np.int64)]
    path, known_words = work / "words.npy", KnownWords(numbers, _NO_QUERYS_WORD)
    with written_whole(path) as beside:
        file = GrowingArray(beside, np.dtype(np.int32))
        texts = (spoken(batch) for _, batch in numbered(documents, corpus))
        for _, (found, ends) in engine.map_python(known_words, texts):
            known = found != _NO_QUERYS_WORD
            kept = known | np.r_[True, known[:-1]][: len(known)]
            edges.append(edges[-1][-1] + counting.edges_of(kept)[ends])
            file.extend(found[kept])
        file.close()
    return replace(corpus, tokens=mapped(path), bounds=np.concatenate(edges), spans=None)


def _leaks_of(
    leaks: Leaks, unique: np.ndarray, owned: np.ndarray, engine: Engine, memory_bytes: int
) -> np.ndarray:
    """Unique sequences that share a place of the corpus, directly or through others, are one leak."""
    corpus, room = leaks.corpus, leaks.room
    # Those of one document share an owner, unless it has several.
    worth = np.bincount(owned[1], minlength=corpus.num_users) > 1
    if corpus.owners is not None:
        worth[:] = True
    may_share = room.kept(np.unique(owned[0][worth[owned[1]]]))
    group = room.kept(np.where(unique, np.arange(len(unique)), -1))
    if not len(may_share):
        return group
    starts, lengths = leaks.first_in_d[may_share], leaks.lengths[may_share]
    sequences = counting.sequences_in(room, corpus.tokens, starts, lengths)
    look = partial(links_in_shard, sequences=sequences)
    parents = room.kept(np.arange(len(may_share)))
    with task("Joining leaks", int(np.diff(corpus.bounds)[worth[corpus.users]].sum())) as bar:
        shards = counting.over_shards(engine, look, corpus, memory_bytes, worth, room=room)
        for part, links in shards:
            _join_all(parents, links)
            bar.advance(part.num_tokens)
    group[may_share] = may_share[parents]
    return group


def links_in_shard(shard: counting.Shard, sequences: counting.Sequences) -> np.ndarray:
    """For each sequence of this shard one that it shares a place with, directly or not; or itself."""
    numbers = np.arange(len(sequences))
    if sequences.room.folder is not None:
        numbers = np.asarray(counting.count_in_shard(shard, sequences).numbers)
    starts = sequences.offsets[numbers]
    here = counting.end_to_end(sequences.tokens, starts, sequences.offsets[numbers + 1] - starts)
    return np.stack([numbers, numbers[_links(*counting.indexed(shard), here.tokens, here.offsets)]])


@njit(cache=True, nogil=True)
def _links(text, places, tokens, offsets):  # type: ignore[no-untyped-def]
    parents = np.arange(len(offsets) - 1)
    longest = np.full(len(text), -1, dtype=np.int32)  # of those that start at a place
    for sequence in range(len(parents)):
        query = tokens[offsets[sequence] : offsets[sequence + 1]]
        low = first_not_below(text, places, query, 0, False)
        high = first_not_below(text, places, query, low, True)
        for place in places[low:high]:
            other = longest[place]
            if other >= 0:
                _join(parents, sequence, other)
            if other < 0 or len(query) > offsets[other + 1] - offsets[other]:
                longest[place] = sequence
    # Of all that began before a place, only the one that reaches furthest can miss no neighbour.
    furthest, end = -1, 0
    for place in range(len(text)):
        other = longest[place]
        if other >= 0:
            if place < end:
                _join(parents, other, furthest)
            if place + offsets[other + 1] - offsets[other] > end:
                furthest, end = other, place + offsets[other + 1] - offsets[other]
    for sequence in range(len(parents)):
        parents[sequence] = _root(parents, sequence)
    return parents


@njit(cache=True, nogil=True)
def _join_all(parents, links):  # type: ignore[no-untyped-def]
    for place in range(links.shape[1]):
        _join(parents, links[0, place], links[1, place])
    for sequence in range(len(parents)):
        parents[sequence] = _root(parents, sequence)


@njit(cache=True, nogil=True)
def _join(parents, one, other):  # type: ignore[no-untyped-def]
    one, other = _root(parents, one), _root(parents, other)
    parents[max(one, other)] = min(one, other)


@njit(cache=True, nogil=True)
def _root(parents, sequence):  # type: ignore[no-untyped-def]
    while parents[sequence] != sequence:
        parents[sequence] = parents[parents[sequence]]
        sequence = parents[sequence]
    return sequence
