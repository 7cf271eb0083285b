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

import numpy as np

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
