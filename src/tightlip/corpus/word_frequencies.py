"""How surprising a text is by the words of a public corpus: a frequency estimate, no language model.

A word's probability is a fixed mixture of how often it followed the word before, how often it
stands in the public text at all, and an equal share for every word there and one unknown.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable

FREQUENCY_ESTIMATE = "frequency estimate, no language model"
AFTER_WORD, BY_ITSELF, EQUAL = 0.6, 0.35, 0.05
_WORD = re.compile(r"\w+|[^\w\s]")
_START = ""  # before the first word; no word is empty


def words_of(text: str) -> list[str]:
    """Words and punctuation in small letters.

    >>> words_of("It's late, Bob!")
    ['it', "'", 's', 'late', ',', 'bob', '!']
    """
    return _WORD.findall(text.casefold())


class WordFrequencies:
    """Counts of words and of pairs of neighbours in public text.

    Holds:
        sums_to_one: after any word, the known words and the unknown one have probability 1 together.
        without_itself: a text scored `without_itself` is scored as if it had never been counted.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.words: Counter[str] = Counter()
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.firsts: Counter[str] = Counter()  # how often a word has another after it
        for text in texts:
            words, pairs = _counted(text)
            self.words.update(words)
            self.pairs.update(pairs)
            self.firsts.update(first for first, _ in pairs)
        self.num_words, self.num_known = self.words.total(), len(self.words)

    def log_perplexity(self, text: str, *, without_itself: bool = False) -> float:
        """Nats a word; NaN for a text without words. Public texts are scored without themselves,
        or their own words would look more ordinary than anybody else's ever could."""
        words, pairs = _counted(text)
        if not words:
            return math.nan
        own = WordFrequencies([text]) if without_itself else _NOTHING
        # Only words that stand elsewhere too are known.
        num_known = self.num_known - sum(self.words[each] == n for each, n in own.words.items())
        nats = [math.log(self._probability(*pair, own, num_known)) for pair in pairs]
        return -math.fsum(nats) / len(nats)

    def _probability(self, first: str, word: str, own: "WordFrequencies", num_known: int) -> float:
        """A part of the mixture that was never seen gives its share to the next."""
        equal = 1 / (num_known + 1)
        left = self.num_words - own.num_words
        alone = (self.words[word] - own.words[word]) / left if left else equal
        times = self.firsts[first] - own.firsts[first]
        after = (self.pairs[first, word] - own.pairs[first, word]) / times if times else alone
        return AFTER_WORD * after + BY_ITSELF * alone + EQUAL * equal


def _counted(text: str) -> tuple[list[str], list[tuple[str, str]]]:
    words = words_of(text)
    return words, list(zip([_START, *words], words, strict=False))


_NOTHING = WordFrequencies([])
