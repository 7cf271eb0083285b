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
from collections.abc import Iterable
from statistics import NormalDist

import numpy as np
from numpy.random import Generator
from transformers import PreTrainedTokenizerFast

from tightlip.core.grid_gaussian import GridGaussian, grid_of
from tightlip.core.randomness import keyed_generator
from tightlip.corpus import vocabulary
from tightlip.corpus.prepare_config import VocabularyRelease
from tightlip.corpus.readers import Corpus


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
    tallies = vocabulary.Tallies(len(words))
    tallies.add_all(corpus, words)
    sums = bounded_sums(tallies.by_user(), len(words), release.words_per_user, draw)
    released = [words[number] for number in released_words(sums, release, draw)]
    return vocabulary.word_tokenizer(vocabulary.with_digits(released, size))


def release_threshold(release: VocabularyRelease) -> float:
    """What a noisy sum must exceed, so that nobody's own words get out but with probability δ.

    Of t words that nobody else gave, each weighs at most 1/√t, and all stay below
    1/√t + σ·z with probability Φ(z)^t. The threshold is the largest over t of those with
    Φ(z)^t = 1 − δ.

    >>> round(release_threshold(VocabularyRelease(noise_multiplier=1, words_per_user=1)), 2)
    6.2
    """
    numbers, below = range(1, release.words_per_user + 1), math.log1p(-release.delta)
    return max(
        1 / math.sqrt(t) - release.noise_multiplier * NormalDist().inv_cdf(-math.expm1(below / t))
        for t in numbers
    )


def bounded_sums(
    counts_by_user: Iterable[tuple[np.ndarray, np.ndarray]],
    num_words: int,
    words_per_user: int,
    draw: Generator,
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
            words = words[np.lexsort((draw.random(len(words)), -counts))[:words_per_user]]
        sums[words] += 1 / math.sqrt(len(words))
    return sums


def released_words(
    sums: np.ndarray, release: VocabularyRelease, draw: Generator, noise: GridGaussian | None = None
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
