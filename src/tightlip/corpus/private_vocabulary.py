"""A word vocabulary released with differential privacy for whole users.

Each user gives one vector of length 1: 1/√n at each of n words, those the user wrote most
often, at most `words_per_user`. The vectors are added up, every word that was given gets
Gaussian noise of standard deviation σ, and words above a threshold are released in the order
of their noisy sums: the weighted Gaussian of Gopi et al. 2020, "Differentially Private Set
Union". The sums themselves, with noise or without, are written nowhere.

Why it is private. Let D' be D and one user u more.

1. Which words a user gives, and their weight, follow from that user's own text and coins, so
   the sums of D and D' differ by u's vector: L2 sensitivity 1. On the words of D the release
   is a Gaussian mechanism with noise multiplier σ, whose privacy profile we call H(α).
2. Words in D' alone are t ≤ n words of weight 1/√n ≤ 1/√t. By `release_threshold` one of them
   passes with a probability p ≤ δ, whatever the noise on the words of D. If none passes, what
   is released is the mechanism of 1.
3. So D' against D has the profile p + (1 − p) H(α/(1 − p)) ≤ δ + (1 − δ) H(α), and D against
   D' has H(α(1 − p)) ≤ δ + (1 − δ) H(α), for H is convex, falling and H(0) = 1.

That is the profile of a Gaussian mechanism which with probability δ tells everything: a ledger
composes a Gaussian of multiplier σ with the rest and adds δ to δ. One document more or less
replaces its user's vector by another, at most √2 away, and may take words away as well as
bring some; the same steps give multiplier σ/√2 and the same δ.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from tightlip.core.errors import UsageError
from tightlip.core.grid_gaussian import GridGaussian, grid_of
from tightlip.core.randomness import keyed_generator
from tightlip.corpus import vocabulary
from tightlip.corpus.prepare_config import VOCABULARY_DELTA, WORDS_PER_USER
from tightlip.corpus.readers import Corpus


@dataclass(frozen=True, kw_only=True)
class VocabularyRelease:
    """What a private vocabulary promises: noise over a user's weight, δ, and words a user gives."""

    noise_multiplier: float
    words_per_user: int = WORDS_PER_USER
    delta: float = VOCABULARY_DELTA

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise UsageError(
                f"vocabulary_noise={self.noise_multiplier} is no noise to hide a user in. "
                "Use a number above 0, such as 2, or leave it out for exact counts."
            )
        if self.words_per_user < 1:
            raise UsageError(
                f"vocabulary_words_per_user={self.words_per_user} lets nobody give a word. Use 1 or more."
            )
        if not 0 < self.delta < 1:
            raise UsageError(
                f"vocabulary_delta={self.delta} is no probability between 0 and 1. "
                "Use one far below 1 over the number of users, such as 1e-7."
            )

    def record(self) -> dict[str, Any]:
        """What a ledger needs to charge it."""
        return {
            "name": "vocabulary",
            "mechanism": "Gaussian histogram of words with a threshold",
            "noise_multiplier": self.noise_multiplier,
            "example_noise_multiplier": self.noise_multiplier / math.sqrt(2),
            "delta": self.delta,
            "unit": "user",
            "words_per_user": self.words_per_user,
            "note": "The words of the vocabulary were chosen by noisy counts of who wrote them.",
        }


def build_private_tokenizer(
    corpus: Corpus, release: VocabularyRelease, *, size: int | None = 10_000
) -> PreTrainedTokenizerFast:
    """A word tokenizer that shows no user's part in it beyond what `release` allows.

    Special tokens and digits are public: always there, and no user spends weight on them.

    Holds:
        fresh: every call draws anew from the operating system's randomness, and spends anew.
        public: with nothing released, special tokens and digits are left.
    """
    vocabulary.check_size(size)
    # Any numbering would do: it decides neither who gives what nor the order of what is released.
    ranked = vocabulary.words_by_frequency(corpus)
    words = [word for word in ranked if word not in vocabulary.DIGITS]
    draw = keyed_generator()
    sums = bounded_sums(_counts_by_user(corpus, words), len(words), release.words_per_user, draw)
    released = released_words(sums, release, draw)
    return vocabulary.word_tokenizer(
        vocabulary.with_digits([words[number] for number in released], size)
    )


def release_threshold(release: VocabularyRelease) -> float:
    """What a noisy sum must exceed, so that nobody's own words get out but with probability δ.

    Of t words that nobody else gave, each weighs at most 1/√t, and all stay below
    1/√t + σ·z with probability Φ(z)^t. The threshold is the largest over t of those with
    Φ(z)^t = 1 − δ.

    >>> round(release_threshold(VocabularyRelease(noise_multiplier=1, words_per_user=1)), 2)
    6.2
    """
    passing = (
        -math.expm1(math.log1p(-release.delta) / t) for t in range(1, release.words_per_user + 1)
    )
    return max(
        1 / math.sqrt(t) - release.noise_multiplier * NormalDist().inv_cdf(tail)
        for t, tail in enumerate(passing, start=1)
    )


def bounded_sums(
    counts_by_user: Iterable[tuple[np.ndarray, np.ndarray]],
    num_words: int,
    words_per_user: int,
    draw: np.random.Generator,
) -> np.ndarray:
    """The users' vectors added up; (words, counts) are one user's.

    Of words a user wrote equally often, chance decides which are given.

    Holds:
        bounded: one user more moves the sums by at most 1 in L2, and at `words_per_user` words.
    """
    sums = np.zeros(num_words)
    for words, counts in counts_by_user:
        if not len(words):
            continue
        if len(words) > words_per_user:
            most = np.lexsort((draw.random(len(words)), -counts))
            words = words[most[:words_per_user]]
        sums[words] += 1 / math.sqrt(len(words))
    return sums


def released_words(
    sums: np.ndarray,
    release: VocabularyRelease,
    draw: np.random.Generator,
    noise: GridGaussian | None = None,
) -> np.ndarray:
    """Numbers of the words that pass, largest noisy sum first; `noise` fresh where none is given.

    Holds:
        given: a word that nobody gave is never released, whatever the noise.
    """
    given = np.flatnonzero(sums)
    noisy = sums[given].astype(np.float64)
    (noise or GridGaussian()).add([noisy], scale=release.noise_multiplier)
    # On a grid some are equal, and the words' own numbers go by how often they were written.
    order = np.lexsort((draw.random(len(given)), -noisy))
    # A cell passes that lies above the threshold with both its edges.
    least = release_threshold(release) + grid_of(release.noise_multiplier) / 2
    return given[order][noisy[order] > least]


def _counts_by_user(corpus: Corpus, words: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each user's distinct words, by their numbers, and how often the user wrote them."""
    first = len(vocabulary.SPECIAL_TOKENS)
    tallies = _Tallies(len(words))
    for user, ids in vocabulary.tokens_by_user(corpus, words):
        tallies.add(user, ids[ids >= first] - first)
    return tallies.by_user()


class _Tallies:
    """How often each user wrote each word.

    A (user, word) pair is one number, its count another: 16 bytes a distinct pair, about 50
    while sorting.
    """

    _UNSORTED = 4_000_000

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._pairs = [np.empty(0, np.int64)]
        self._counts = [np.empty(0, np.int64)]
        self._num_unsorted = 0

    def add(self, user: int, words: np.ndarray) -> None:
        distinct, counts = np.unique(words, return_counts=True)
        self._pairs.append(user * self._num_words + distinct.astype(np.int64))
        self._counts.append(counts)
        self._num_unsorted += len(distinct)
        if self._num_unsorted > self._UNSORTED:
            self._sort()

    def by_user(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        self._sort()
        (pairs,), (counts,) = self._pairs, self._counts
        next_user = np.flatnonzero(np.diff(pairs // self._num_words)) + 1
        for start, end in pairwise([0, *next_user, len(pairs)]) if len(pairs) else ():
            yield pairs[start:end] % self._num_words, counts[start:end]

    def _sort(self) -> None:
        pairs, place = np.unique(np.concatenate(self._pairs), return_inverse=True)
        counts = np.zeros(len(pairs), np.int64)
        np.add.at(counts, place, np.concatenate(self._counts))
        self._pairs, self._counts, self._num_unsorted = [pairs], [counts], 0
