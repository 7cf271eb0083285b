"""The words of a text, however it was cut into tokens, and where in the text they stand.

A word is a longest run of letters and digits once the text is in NFKC and its case is folded, with
nothing in between but what nobody sees: soft hyphens, spaces without width, marks of direction.
Scripts that put no space between words have no such runs: there each character is a word.
"""

import re
import unicodedata
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.corpus.encoding import Encoder

# Letters, marks and digits of Thai, Lao, Myanmar, Khmer, kana and Han, as ranges of a regex.
_ALONE = (
    r"\u0e01-\u0e3a\u0e40-\u0e4e\u0e50-\u0e59\u0e80-\u0eff"
    r"\u1000-\u1049\u1050-\u109d\ua9e0-\ua9fe\uaa60-\uaa76\uaa7a-\uaa7f"
    r"\u1780-\u17d3\u17d7\u17dc\u17dd\u17e0-\u17e9\u17f0-\u17f9"
    r"\u3041-\u3096\u3099\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    r"\U0001aff0-\U0001b16f"
    r"\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303c\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    r"\U00020000-\U0003ffff"
)
_IS_ALONE = re.compile(f"[{_ALONE}]")
_UNSEEN = r"\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff"
_IS_UNSEEN = re.compile(f"[{_UNSEEN}]+")
_RUNS = re.compile(r"[^\W_]+")
_RUNS_BROKEN = re.compile(rf"[^\W_]+(?:[{_UNSEEN}]+[^\W_]+)*")
_RUNS_OR_ALONE = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+(?:[{_UNSEEN}]+[^\W_{_ALONE}]+)*")
# Text that normalising may change, and the ASCII character that a mark may stand on.
_BEYOND_ASCII = re.compile(r"[\x00-\x7f]?[^\x00-\x7f]+")
# Normalising joins a vowel or a final consonant of Hangul to what stands before it.
_HANGUL_TAILS = range(0x1160, 0x1200)
_MOST_MARKS = 32  # on one letter; more of them are not taken apart


def words_of(text: str) -> list[str]:
    """The words of a text, in order.

    >>> words_of("The ﬁrst STRAẞE_33, so\u00adft, 漢字")
    ['the', 'first', 'strasse', '33', 'soft', '漢', '字']
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    folded = folded if folded.isascii() else _IS_UNSEEN.sub("", folded)
    return _pattern_of(folded).findall(folded)


@dataclass(frozen=True, kw_only=True)
class PlacedWords:
    """Words, and the characters of the text from which each comes: starts[i] up to ends[i].

    Holds:
        ascending: neither starts nor ends ever fall.
    """

    words: list[str]
    starts: np.ndarray
    ends: np.ndarray

    def within(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first word and one past the last of each stretch of characters.

        They are those wholly inside it; if there is none, those it touches.
        """
        return inside_or_touched(*self.bounded(begins, ends))

    def bounded(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, ...]:
        """The first word that begins in or behind each stretch and one past the last that ends in or
        before it; then the same of words that it touches."""
        return (
            np.searchsorted(self.starts, begins, side="left"),
            np.searchsorted(self.ends, ends, side="right"),
            np.searchsorted(self.ends, begins, side="right"),
            np.searchsorted(self.starts, ends, side="left"),
        )


def inside_or_touched(
    first: np.ndarray, last: np.ndarray, touched_first: np.ndarray, touched_last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The words wholly inside; if there is none, those that are touched."""
    is_whole = last > first
    first = np.where(is_whole, first, touched_first)
    return first, np.maximum(first, np.where(is_whole, last, touched_last))


def placed_words(text: str) -> PlacedWords:
    """`words_of(text)`, each with its place in the text."""
    folded, origins = _folded(text)
    words, edges = [], array("q")
    for match in _pattern_of(folded).finditer(folded):
        word = match[0]
        words.append(word if word.isascii() else _IS_UNSEEN.sub("", word))
        edges.extend(match.span())
    places = np.frombuffer(edges, np.int64).reshape(-1, 2)
    starts, ends = places[:, 0], places[:, 1]
    if origins is not None:
        starts, ends = origins[0][starts], origins[1][ends - 1]
    return PlacedWords(words=words, starts=starts, ends=ends)


def _pattern_of(folded: str) -> re.Pattern[str]:
    if folded.isascii():
        return _RUNS
    # Looking through the ranges at every character takes ten times as long.
    return _RUNS_OR_ALONE if _IS_ALONE.search(folded) else _RUNS_BROKEN


def _folded(text: str) -> tuple[str, tuple[np.ndarray, np.ndarray] | None]:
    """The text in NFKC with its case folded; of each character the first of the original's
    characters that it comes from and one past the last, or None where all stayed in place."""
    if _stays_in_place(text):
        return text.casefold(), None
    parts, starts, ends = [], array("q"), array("q")
    done = 0
    for start, end in _changing_pieces(text):
        folded = unicodedata.normalize("NFKC", text[start:end]).casefold()
        parts += [text[done:start].casefold(), folded]
        starts.extend([*range(done, start), *[start] * len(folded)])
        ends.extend([*range(done + 1, start + 1), *[end] * len(folded)])
        done = end
    parts.append(text[done:].casefold())
    starts.extend(range(done, len(text)))
    ends.extend(range(done + 1, len(text) + 1))
    return "".join(parts), (np.frombuffer(starts, np.int64), np.frombuffer(ends, np.int64))


def _stays_in_place(text: str) -> bool:
    """Whether each character becomes one; folding a character never gives less than one."""
    if text.isascii():
        return True
    return unicodedata.is_normalized("NFKC", text) and len(text.casefold()) == len(text)


def _changing_pieces(text: str) -> Iterator[tuple[int, int]]:
    """The smallest pieces that are normalised on their own, of which not every character stays."""
    for stretch in _BEYOND_ASCII.finditer(text):
        if _stays_in_place(stretch[0]):
            continue
        start = stretch.start()
        for place in range(start + 1, stretch.end() + 1):
            if place == stretch.end() or not _leans_back(text[place]):
                if not _stays_in_place(text[start:place]):
                    yield from _taken_apart(text, start, place)
                start = place


def _leans_back(character: str) -> bool:
    """Whether normalising may join this to what stands before it, or move it there."""
    if character < "\u0300":
        return False
    first = unicodedata.normalize("NFKD", character)[0]
    return unicodedata.category(first)[0] == "M" or ord(first) in _HANGUL_TAILS


def _taken_apart(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """A letter with its marks, cut wherever both sides are normalised as if alone."""
    whole = unicodedata.normalize("NFKC", text[start:end])
    cuts = [start]
    for place in range(start + 1, min(end, start + _MOST_MARKS)):
        sides = (unicodedata.normalize("NFKC", s) for s in (text[start:place], text[place:end]))
        if "".join(sides) == whole:
            cuts.append(place)
    for left, right in zip(cuts, [*cuts[1:], end], strict=True):
        if not _stays_in_place(text[left:right]):
            yield left, right


# What is asked of some texts at a time, by whoever has time for it: `core.engines`


@dataclass(frozen=True, kw_only=True)
class Tokenised:
    """Some documents: the texts that were encoded, how many tokens each has, and what of each is
    somebody's own words."""

    texts: list[str]
    num_tokens: np.ndarray
    spoken: list[str]

    @property
    def starts(self) -> np.ndarray:
        """Where the tokens of each document begin, and where the last one's end."""
        return np.append(0, np.cumsum(self.num_tokens))


class TokenWords:
    """Which words the tokens of documents cover."""

    def __init__(self, tokenizer: Any) -> None:
        self._encoder = Encoder(tokenizer, with_spans=True)

    def placed(self, documents: Tokenised) -> tuple[PlacedWords, np.ndarray]:
        """The words of all documents, and each token's first character and one past its last."""
        _, sizes, spans = self._encoder.end_to_end(documents.texts)
        assert spans is not None
        if not np.array_equal(sizes, documents.num_tokens):
            raise changed_meanwhile()
        begins = np.cumsum([0, *(len(text) + 1 for text in documents.texts)])[:-1]
        # No mark or letter joins across the line break, which is part of no word.
        words = placed_words("\n".join(documents.spoken))
        return words, spans.astype(np.int64) + np.repeat(begins, sizes)[:, None]

    def of_stretches(
        self, asked: tuple[Tokenised, np.ndarray, np.ndarray]
    ) -> tuple[list[str], np.ndarray, np.ndarray]:
        """The words of stretches of tokens, given by where they start and how long they are: each word
        once; those of all stretches one after the other, by their places among these; and how many
        each stretch has."""
        documents, starts, lengths = asked
        words, spans = self.placed(documents)
        low, high = words.within(spans[starts, 0], spans[starts + lengths - 1, 1])
        size = len(words.words) + 1
        depth = np.bincount(low, minlength=size) - np.bincount(high, minlength=size)
        covered = np.flatnonzero(np.cumsum(depth))
        distinct, places = numbered_words([words.words[at] for at in covered.tolist()])
        of_word = np.zeros(len(words.words), np.int32)
        of_word[covered] = places
        num_words = high - low
        ends = np.cumsum(num_words)
        inside = np.repeat(low - (ends - num_words), num_words) + np.arange(num_words.sum())
        return distinct, of_word[inside], num_words

    def of_tokens(
        self, documents: Tokenised
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """The words of all documents: each once; all, by their places among these; how many each
        document has; and of each token the words that it bounds, counted in its document."""
        words, spans = self.placed(documents)
        begins = np.cumsum([0, *(len(text) + 1 for text in documents.spoken)])
        own = np.searchsorted(words.starts, begins)
        bounded = np.stack(words.bounded(*spans.T), axis=1)
        edges = (bounded - np.repeat(own[:-1], documents.num_tokens)[:, None]).astype(np.int32)
        return *numbered_words(words.words), np.diff(own), edges


class KnownWords:
    """Words by their numbers; `other` is that of every word that is not among them."""

    def __init__(self, numbers: dict[str, int], other: int) -> None:
        self._numbers, self._other = numbers, other

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of all words of the texts, and where each text's end."""
        found, ends, numbers, other = array("i"), array("q"), self._numbers, self._other
        for text in texts:
            found.extend([numbers.get(word, other) for word in words_of(text)])
            ends.append(len(found))
        return np.frombuffer(found, np.int32), np.frombuffer(ends, np.int64)


def numbered_words(words: list[str]) -> tuple[list[str], np.ndarray]:
    """Each word once, as they first appear, and the place of each among these."""
    places: dict[str, int] = {}
    found = array("i", [places.setdefault(word, len(places)) for word in words])
    return [*places], np.frombuffer(found, np.int32)


def changed_meanwhile() -> UsageError:
    return UsageError(
        "The corpus changed while it was audited: its text is no longer what was scanned. "
        "Give the command again once nothing writes to it."
    )
