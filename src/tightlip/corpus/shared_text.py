"""How much of two corpora stands in both, also where it was cut up or slightly changed.

Whole documents are compared as they are, case and white space aside. Documents of eight words
or more are compared by their runs of five words as well, so that lines cut out of a document, or
a full stop put behind it, hide nothing. A paraphrase or a translation is not found, nor is text
that is written without spaces, but for whole documents.
"""

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from tightlip.corpus.readers import Corpus, open_corpus
from tightlip.corpus.tables import DocumentBatch

RUN = 5  # words that stand together
FEWEST_RUNS = 4  # of a document whose runs are looked at: eight words
COPIED = 0.5  # of a document's runs that stand in the other corpus
MOST_LOOKED_AT = 50_000  # documents of a corpus; more are sampled by their text
MOST_RUNS = 64  # of one document

# Short common texts stand in any two corpora; of longer ones a few letters, notices or songs do.
MOST_WHOLE, MOST_COPIED, A_FEW = 0.5, 0.01, 3

_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Documents(Protocol):
    """Anything with documents to read, as often as wanted."""

    def batches(self) -> Iterator[DocumentBatch]: ...


class Several:
    """Corpora read one after the other, without the documents that read as one of some texts."""

    def __init__(self, *parts: Documents, without: Set[str] = frozenset()) -> None:
        self.parts, self.without = parts, without

    def batches(self) -> Iterator[DocumentBatch]:
        for batch in chain.from_iterable(part.batches() for part in self.parts):
            yield batch.where([text not in self.without for text in batch.texts])


@dataclass(frozen=True, kw_only=True)
class Side:
    """One corpus against another: how many of its documents stand there too.

    `whole` of `documents` stand there word for word. `copied` of the `long` ones that were looked
    at have at least half of their runs of words there.
    """

    whole: int
    documents: int
    copied: int
    long: int

    @property
    def shared(self) -> int:
        return max(self.whole, self.copied)

    def is_too_much(self) -> bool:
        many = self.copied > max(A_FEW, MOST_COPIED * self.long)
        return many or self.whole > MOST_WHOLE * self.documents


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What two corpora have in common, seen from either of them."""

    here: Side
    there: Side

    def any(self) -> bool:
        return bool(self.here.shared or self.there.shared)

    def is_too_much(self) -> bool:
        """More than two corpora that nobody copied from each other have in common."""
        return self.here.is_too_much() or self.there.is_too_much()

    def words(self, name: str) -> str:
        """The side that has more in common, in words."""
        sides = (
            (self.there, f"documents in {name}", "this corpus"),
            (self.here, "documents of this corpus", name),
        )
        sentences = []
        for side, whose, other in sides:
            changed = (side.copied, side.long, ", whole, cut up or slightly changed")
            for part, whole, how in ((side.whole, side.documents, ""), changed):
                words = f"{part:,} of the {whole:,} {whose} stand in {other} too{how}"
                sentences.append((part / max(1, whole), words))
        return max(sentences)[1]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Held-out documents that were trained on, of so many: in all, and by the same user."""

    num_documents: int
    num_same_user: int
    of: int


def shared_text(here: Documents, there: Documents) -> Shared:
    """What two corpora have in common; both are read twice.

    Holds:
        both_sides: a corpus that is a small part of the other is found as well as a large one.
        cut: documents cut into lines, put together or with a sign more are found.
        strangers: different text has nothing in common.
        bounded: kept are 8 bytes a document, and the runs of 50,000 documents of either.
    """
    first, second = _Sketch(here), _Sketch(there)
    second.look_in(here)
    first.look_in(there)
    return Shared(here=first.side(second), there=second.side(first))


def standing_in_training(held: Path, train: Path) -> Overlap:
    """Which documents of `held` stand in `train` as they are.

    Holds:
        bounded: what is kept in memory is 16 bytes for each document of `held`, not of `train`.
    """
    digests = list(_digests_by_user(open_corpus(held)))
    trained = chain.from_iterable(_digests_by_user(open_corpus(train)))
    seen = {*chain.from_iterable(digests)}.intersection(trained)
    return Overlap(
        num_documents=sum(bool(each) and each[0] in seen for each in digests),
        num_same_user=sum(bool(each) and each[1] in seen for each in digests),
        of=len(digests),
    )


def warnings_of_held_out(folder: Path, held_out: Corpus) -> list[str]:
    """What a file of held-out text has wrong, of which `folder` holds what was prepared."""
    num, name = held_out.num_skipped, held_out.name
    warnings = [f"{num:,} unusable rows of {name} were skipped."] if num else []
    overlap = standing_in_training(folder / "validation.parquet", folder / "train.parquet")
    if overlap.num_documents:
        warnings.append(
            f"{overlap.num_documents:,} of the {overlap.of:,} documents in {name} stand in the training text too "
            f"({overlap.num_same_user:,} by the same user), so validation looks better than it is. Take them out of one of the "
            "two."
        )
    return warnings


class _Sketch:
    """A corpus' documents as digests, and the runs of words of some or all of them."""

    def __init__(self, corpus: Documents) -> None:
        digests: list[int] = []
        kept: dict[int, tuple[int, np.ndarray]] = {}  # a document's place: its digest and runs
        every = 1
        for batch in corpus.batches():
            for digest, runs in zip(_digests(batch.texts), _runs_by_text(batch.texts), strict=True):
                if digest is not None:
                    digests.append(digest)
                    if len(runs) >= FEWEST_RUNS and digest % every == 0:
                        kept[len(digests)] = (digest, spread_out(runs, MOST_RUNS))
            while len(kept) > MOST_LOOKED_AT:
                every *= 2
                kept = {place: each for place, each in kept.items() if each[0] % every == 0}
        self.digests = np.array(digests, np.uint64)
        self.lengths = np.array([len(runs) for _, runs in kept.values()], np.int64)
        runs = np.concatenate([np.empty(0, np.uint64), *(runs for _, runs in kept.values())])
        self.known, self._place = np.unique(runs, return_inverse=True)
        self._is_there = np.zeros(len(self.known), bool)

    def look_in(self, other: Documents) -> None:
        """Mark the runs that stand in another corpus."""
        for batch in other.batches() if len(self.known) else ():
            runs, _ = _runs(batch.texts)
            places = np.minimum(np.searchsorted(self.known, runs), len(self.known) - 1)
            self._is_there[places[self.known[places] == runs]] = True

    def side(self, other: "_Sketch") -> Side:
        owners = np.repeat(np.arange(len(self.lengths)), self.lengths)
        num_there = np.bincount(owners, self._is_there[self._place], len(self.lengths))
        return Side(
            whole=int(np.isin(self.digests, other.digests).sum()),
            documents=len(self.digests),
            copied=int((num_there >= COPIED * self.lengths).sum()),
            long=len(self.lengths),
        )


def _digests(texts: Iterable[str]) -> Iterator[int | None]:
    """None of a text without words."""
    for words in map(_plain, texts):
        yield int.from_bytes(_digest(words, 8), "little") if words else None


def _digests_by_user(corpus: Documents) -> Iterator[tuple[bytes, ...]]:
    """Of each document its text, and its text with its user; nothing of one without words."""
    for batch in corpus.batches():
        for user, words in zip(batch.users, map(_plain, batch.texts), strict=True):
            yield (_digest(words, 16), _digest(f"{words}\0{user}", 16)) if words else ()


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8"), digest_size=size).digest()


def _runs_by_text(texts: list[str]) -> list[np.ndarray]:
    runs, sizes = _runs(texts)
    return np.split(runs, np.cumsum(sizes)[:-1])


def _runs(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Every run of words of each text as a number, and how many each text has.

    The numbers mean something in this process only: Python's hashes differ between two.
    """
    words = [_WORD.findall(text.casefold()) for text in texts]
    counts = np.array([len(each) for each in words], np.int64)
    flat = np.fromiter(map(hash, chain.from_iterable(words)), np.int64, counts.sum())
    sizes = np.maximum(counts - RUN + 1, 0)
    if len(flat) < RUN:
        return np.empty(0, np.uint64), sizes
    total = np.zeros(len(flat) - RUN + 1, np.uint64)
    for shift in range(RUN):
        total = total * _FACTOR + flat[shift : len(flat) - RUN + 1 + shift].view(np.uint64)
    owners = np.repeat(np.arange(len(words)), counts)
    inside = owners[: len(total)] == owners[RUN - 1 :]  # of one text from first to last word
    return total[inside], sizes


def spread_out(values: np.ndarray, most: int) -> np.ndarray:
    """At most so many of the values, from the first to the last."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).round().astype(int)]
