"""Words taken out of a text before a model reads it: those the user marks, and some at random.

A word is what white space separates. Whole words are masked, before tokenising, so that no piece
of one is left; texts that differ in white space only become the same.
"""

import math
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from tightlip.core.errors import UsageError

_PIECES = re.compile(r"\w+")
_OUTER = re.compile(r"^[\W_]+|[\W_]+$")
_POSSESSIVE = re.compile(r"['’]s$")
# Random keys drawn at a time: 0.5 MB of them.
_MOST_KEYS = 1 << 16
Marked = Sequence[Collection[str]] | Collection[str]


def masked_texts(
    texts: Sequence[str],
    *,
    mask_word: str,
    dropout: float,
    marked: Marked = (),
    generator: np.random.Generator,
) -> list[str]:
    """The texts with the marked words and, of the others, the share `dropout` at random masked.

    `marked` is one collection of words for all texts, or one for each. A word counts as marked in
    any case, with any punctuation around it, and where it is a part of a compound ("Anna's",
    "Anna-Maria"). ⌈dropout · n⌉ of the n words not marked are masked, so that the share is never
    below `dropout`.

    Holds:
        share: every word that is not marked is masked with probability `dropout` at least, and
            exactly ⌈dropout · n⌉ / n.
        marks: a marked word never stays.
        blind: which places are masked depends on how many words there are and which are marked,
            on nothing else.
    """
    if not 0 <= dropout < 1:
        raise UsageError(
            f"dropout={dropout} is no share of words. Use one from 0 up to, not including, 1."
        )
    split = [text.split() for text in texts]
    marks = marks_of(marked, len(texts))
    masked = [_marked_places(words, each) for words, each in zip(split, marks, strict=True)]
    if dropout:
        _mask_at_random(split, masked, dropout, generator)
    for words, places in zip(split, masked, strict=True):
        for place in places:
            words[place] = mask_word
    return [" ".join(words) for words in split]


def marks_of(marked: Marked, num_texts: int) -> list[frozenset[str]]:
    """The words marked in each text, as they are compared."""
    if isinstance(marked, str):
        raise UsageError(f"Marked words are a list of words, not the one text {marked!r}.")
    if all(isinstance(word, str) for word in marked):
        # One set for all of them, however many there are.
        return [_comparable(frozenset(marked))] * num_texts  # type: ignore[arg-type]
    if len(marked) != num_texts:
        raise UsageError(
            f"Marked words are given for {len(marked)} texts, and there are {num_texts}. Give one collection for each."
        )
    return [_comparable(frozenset(each)) for each in marked]


@lru_cache(maxsize=4096)
def _comparable(words: frozenset[str]) -> frozenset[str]:
    """Marked words as they are compared; of a phrase, each word."""
    plain = {_plain(word) for phrase in words for word in phrase.split()}
    return frozenset(plain - {""})


def _plain(word: str) -> str:
    """A word without case, outer punctuation, or the way its accents are encoded."""
    return _OUTER.sub("", unicodedata.normalize("NFKC", word).casefold())


def _marked_places(words: list[str], marks: frozenset[str]) -> list[int]:
    if not marks:
        return []
    return [place for place, word in enumerate(words) if _is_marked(word, marks)]


def _is_marked(word: str, marks: frozenset[str]) -> bool:
    plain = _plain(word)
    if plain in marks or _POSSESSIVE.sub("", plain) in marks:
        return True
    return any(piece in marks for piece in _PIECES.findall(plain))


def _mask_at_random(
    split: list[list[str]], masked: list[list[int]], dropout: float, generator: np.random.Generator
) -> None:
    """Add to each text's masked places the random ones, of as many as are not masked yet."""
    free = [_others(len(words), places) for words, places in zip(split, masked, strict=True)]
    for texts in _of_like_length([len(places) for places in free]):
        counts = [len(free[text]) for text in texts]
        wanted = [_num_masked(dropout, count) for count in counts]
        rows, columns = _random_places(np.array(counts), np.array(wanted), generator)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            text = texts[row]
            masked[text].append(free[text][column])


def _others(num_words: int, places: list[int]) -> Sequence[int]:
    taken = set(places)
    return (
        [place for place in range(num_words) if place not in taken] if taken else range(num_words)
    )


def _of_like_length(lengths: list[int]) -> Iterator[list[int]]:
    """Numbers of texts, some at a time, so that the longest of them times their number is bounded."""
    pending: list[int] = []
    for text in sorted(range(len(lengths)), key=lengths.__getitem__):
        if pending and (len(pending) + 1) * lengths[text] > _MOST_KEYS:
            yield pending
            pending = []
        if lengths[text]:
            pending.append(text)
    if pending:
        yield pending


def _random_places(
    counts_N: np.ndarray, wanted_N: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of so many places among the first `counts` of each row, drawn uniformly.

    Each place draws a key; the smallest are taken. Which they are is even, except where two keys
    are the same just there. Then all are drawn again, once in a lifetime.
    """
    there_NT = np.arange(counts_N.max()) < counts_N[:, None]
    while True:
        keys_NT = generator.integers(2**64 - 1, size=there_NT.shape, dtype=np.uint64)
        keys_NT[~there_NT] = 2**64 - 1
        last_N = np.take_along_axis(np.sort(keys_NT, axis=1), wanted_N[:, None] - 1, axis=1)
        taken_NT = keys_NT <= last_N
        if np.array_equal(taken_NT.sum(axis=1), wanted_N):
            rows, columns = np.nonzero(taken_NT)
            return rows, columns


@lru_cache(maxsize=65536)
def _num_masked(dropout: float, num_words: int) -> int:
    """⌈dropout · num_words⌉ of the rate as it was written: 0.1 of 30 words is 3."""
    return math.ceil(Fraction(str(dropout)) * num_words)
