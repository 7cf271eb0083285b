"""Words taken out of a text before a model reads it: those the user marks, and some at random.

A word is what white space separates. Whole words are masked, before tokenising, so that no piece
of one is left; texts that differ in white space only become the same. Where it is in doubt
whether a word is a marked one it is masked: a word too many is lost, a word too few is told.
"""

import math
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from tightlip.core.errors import UsageError

# A name and the number behind it (Anna2, Anna²) are two pieces.
_PIECES = re.compile(r"[0-9]+|[^0-9\s]+")
_BETWEEN_MARKS = re.compile(r"[\s,;|]+")
# Accents of Latin, Greek and Cyrillic letters: Jose is taken for José.
_ACCENTS = re.compile("[\u0300-\u036f]")
# Letters by their category that are written as apostrophes and other signs.
_SIGNS = range(0x2B9, 0x2E0)
# Marks that are seen by nobody, beside the format characters: variation selectors, fillers.
_UNSEEN = re.compile(
    "[\u115f\u1160\u3164\uffa0\u17b4\u17b5\u180b-\u180d\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)
# Thai, Lao, Tibetan, Burmese, Khmer, kana, Han, Yi, and Hangul, whose names carry their particles.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u3005-\u30ff\u3100-\u31ff"
    "\u3400-\u9fff\ua000-\ua4cf\ua960-\ua97f\uaa60-\uaadf\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff]"
)
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
    any case and with or without accents, whatever signs stand around or within it ("O’Brien"),
    where it is a part of a compound ("Anna's", "Anna_Maria"), and in a script without spaces
    wherever it stands. ⌈dropout · n⌉ of the n words not marked are masked, so that the share is never
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
            f"dropout={dropout} is not a share of words. Use one from 0 up to, not including, 1."
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


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How many words were masked because they are marked, in how many texts; and what was missed.

    `num_nowhere` counts the marks of all texts that stand in none, and those of one text that do
    not stand in it.
    """

    num_words: int
    num_texts: int
    num_nowhere: int


def masking_of(texts: Sequence[str], marked: Marked) -> Masking:
    """What the marks find in these texts.

    Holds:
        told: a mark that finds nothing is counted.
    """
    marks = marks_of(marked, len(texts))
    kinds = set(marks)
    common = frozenset.intersection(*kinds) if kinds else frozenset()
    met: set[str] = set()
    num_words = num_texts = num_nowhere = 0
    for text, each in zip(texts, marks, strict=True):
        hits = [set(_hits(word, each)) for word in text.split()] if each else []
        here = set().union(*hits)
        met |= here
        num_words += sum(map(bool, hits))
        num_texts += bool(here)
        num_nowhere += len(each - common - here)
    num_nowhere += len(common - met)
    return Masking(num_words=num_words, num_texts=num_texts, num_nowhere=num_nowhere)


def holds_marked(text: str, marks: frozenset[str]) -> bool:
    """Whether one of `marks`, as they are compared, stands in `text`."""
    return bool(_marked_places(text.split(), marks))


def as_read(text: str) -> str:
    """The text as it is read: white space told apart by nothing."""
    return " ".join(text.split())


@lru_cache(maxsize=4096)
def _comparable(words: frozenset[str]) -> frozenset[str]:
    """Marked words as they are compared; of a phrase, each word."""
    split = ([w for w in _BETWEEN_MARKS.split(each) if w] or each.split() for each in words)
    return frozenset(_mark(word) for phrase in split for word in phrase)


def _mark(word: str) -> str:
    """A marked word's letters and digits; of one that has none, its signs."""
    if not (mark := "".join(_pieces(_folded(word))) or _folded(word)):
        raise UsageError(
            f"The marked word {word!r} has no character that can be seen, so it would mask nothing. "
            "Mark a word as it is written in the texts."
        )
    return mark


@lru_cache(maxsize=1 << 16)
def _folded(word: str, instead: str = "") -> str:
    """A word without case, accents and the ways to encode them; `instead` of what nobody sees."""
    word = "".join(
        instead if unicodedata.category(sign) in ("Cf", "Cc") else sign
        for sign in _UNSEEN.sub(instead, word)
    )
    for _ in range(2):  # lower case can be written in several ways again
        word = unicodedata.normalize("NFKD", word).casefold()
    # A dotless i is that of İstanbul in capitals.
    return unicodedata.normalize("NFKC", _ACCENTS.sub("", word).replace("ı", "i"))


def _pieces(folded: str) -> list[str]:
    """Runs of letters with their vowel signs, and runs of digits."""
    return _PIECES.findall("".join(sign if _is_letter(sign) else " " for sign in folded))


@lru_cache(maxsize=1 << 16)
def _is_letter(sign: str) -> bool:
    return unicodedata.category(sign)[0] in "LMN" and ord(sign) not in _SIGNS


@lru_cache(maxsize=1 << 16)
def _read_as(word: str) -> tuple[tuple[str, ...], ...]:
    """The pieces of a word, as often as there are ways to read it.

    What nobody sees may stand within a name (a soft hyphen) or between two (a space of no width).
    """
    return tuple(sorted({tuple(_pieces(_folded(word, instead))) for instead in ("", " ")}))


def _marked_places(words: list[str], marks: frozenset[str]) -> list[int]:
    if not marks:
        return []
    return [place for place, word in enumerate(words) if _is_marked(word, marks)]


@lru_cache(maxsize=1 << 16)
def _is_marked(word: str, marks: frozenset[str]) -> bool:
    return next(_hits(word, marks), None) is not None


def _hits(word: str, marks: frozenset[str]) -> Iterator[str]:
    """The marks that a word holds: as a run of its pieces, or anywhere in it."""
    longest, anywhere, signs = _ways_to_search(marks)
    for pieces in _read_as(word):
        for start in range(len(pieces)):
            run = ""
            for place in range(start, len(pieces)):
                run += pieces[place]
                if len(run) > longest:
                    break
                if run in marks:
                    yield run
        if anywhere:
            whole = "".join(pieces)
            yield from (mark for mark in anywhere if mark in whole)
    if signs:
        folded = _folded(word)
        yield from (mark for mark in signs if mark in folded)


@lru_cache(maxsize=4096)
def _ways_to_search(marks: frozenset[str]) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """The longest mark, those of scripts without spaces, and those of signs alone."""
    anywhere = tuple(mark for mark in marks if _UNSPACED.search(mark))
    signs = tuple(mark for mark in marks if not any(map(_is_letter, mark)))
    return max(map(len, marks), default=0), anywhere, signs


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
    every, taken = range(num_words), set(places)
    return [place for place in every if place not in taken] if taken else every


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
