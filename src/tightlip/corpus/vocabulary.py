"""Vocabularies built on a corpus: words, words that enough users wrote, or byte-level BPE.

None of these is differentially private; private_vocabulary.py has one that is.

A vocabulary is a plain `tokenizer.json`: any program that reads Hugging Face
tokenizers encodes and decodes with it as we do.

Word level: a word is letters with their combining marks and inner apostrophes
("don't"), every digit and every other visible character is a token of its own.
"""

from collections.abc import Iterator
from itertools import compress, pairwise
from typing import Any, Literal

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tightlip.core.errors import UsageError
from tightlip.core.progress import task
from tightlip.corpus.encoding import WORD_PATTERN, Encoder, pieces
from tightlip.corpus.readers import Corpus

SPECIAL_TOKENS = ["<pad>", "<unk>", "<s>", "</s>"]
DIGITS = list("0123456789")
_SMALLEST_BPE = len(SPECIAL_TOKENS) + 256

# What the decoder does to tokens joined by spaces, in this order. No rule removes a
# space whose going would change how the text is cut into words again.
_CLOSING = r"[,.;:!?%…)\]}”’]"
_LETTER_OR_DIGIT = r"[\p{L}\p{M}\p{N}]"
_TIDYING = [
    (rf" (?={_CLOSING})", ""),  # word ,  -> word,
    (r"(?<=[(\[{“‘¿¡#$€£]) ", ""),  # ( word  -> (word
    (r"(?<=\p{Nd}) (?=\p{Nd})", ""),  # 1 9  -> 19
    (r"(?<=\p{Nd}[.:]) (?=\p{Nd})", ""),  # 3. 14  -> 3.14
    (r"(?<=\p{Nd},) (?=\p{Nd}{3}(?!\p{Nd}))", ""),  # 1, 000  -> 1,000
    (r"(?<=-) (?=-)", ""),  # - -  -> --
    *((rf"(?<={_LETTER_OR_DIGIT}) {mark} (?={_LETTER_OR_DIGIT})", mark) for mark in "-@/_"),
    (r"(?<=<) (?=(?:EMAIL|URL|IP|CARD|ACCOUNT|PHONE|NAME) >)", ""),  # cleaning.py's placeholders
    (r"(?<=<EMAIL|<URL|<IP|<CARD|<ACCOUNT|<PHONE|<NAME) (?=>)", ""),
    # parts of one emoji: variation selectors, keycaps, skin tones, joiners, flags
    (r"(?<=[^\p{L}\p{M}\s]) (?=[\x{FE0E}\x{FE0F}])", ""),
    (r"(?<=[^\p{L}\p{M}\s]\x{FE0F}) (?=\x{20E3})", ""),
    (r" (?=[\x{200D}\x{1F3FB}-\x{1F3FF}])", ""),
    (r"(?<=\x{200D}) (?=[^\p{L}\p{M}\s])", ""),
    (r"(?<=[\x{1F1E6}-\x{1F1FF}]) (?=[\x{1F1E6}-\x{1F1FF}])", ""),
]


def build_tokenizer(
    corpus: Corpus,
    *,
    kind: Literal["words", "bpe"] = "words",
    size: int | None = 10_000,
    min_users: int | None = None,
) -> PreTrainedTokenizerFast:
    """A tokenizer fitted to `corpus`, of at most `size` tokens, the four specials among them.

    Holds:
        frequent: the tokens kept are the most frequent; of equals, the first in code point order.
        shared: with `min_users`, every token but specials and digits was written by as many users.
        deterministic: the same corpus gives the same file.
    """
    if kind == "bpe":
        return _byte_level_bpe(corpus, size)
    check_size(size)
    ranked = words_by_frequency(corpus)
    if min_users is not None:
        ranked = _written_by(corpus, ranked, min_users)
    return word_tokenizer(with_digits(ranked, size))


def check_size(size: int | None) -> None:
    """Refuse a word vocabulary too small for one word."""
    if size is not None and size < len(SPECIAL_TOKENS) + len(DIGITS) + 1:
        raise UsageError(
            f"vocabulary size={size} leaves no room beside 4 special tokens and 10 digits. Use 15 or more."
        )


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly these words, numbered in this order after the specials."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL_TOKENS, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = word_splitter()
    tidy = [decoders.Replace(Regex(pattern), content) for pattern, content in _TIDYING]
    # WordPiece puts the spaces; no token of ours begins with its prefix.
    backend.decoder = decoders.Sequence(
        [decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(), *tidy]
    )
    return _wrapped(backend)


def word_splitter() -> Any:
    return pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="removed", invert=True)


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    # For whoever else encodes a text: it begins as those did that a model was trained on.
    begin = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    # A user who writes "<s>" wrote three characters, not the start of a document.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def words_by_frequency(corpus: Corpus) -> list[str]:
    """Every word of `corpus`, the most frequent first."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = word_splitter()
    trainer = trainers.WordLevelTrainer(vocab_size=2**31, show_progress=False)
    _train(backend, trainer, corpus, "Counting words")
    vocabulary = backend.get_vocab()
    vocabulary.pop("<unk>", None)
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _train(backend: Tokenizer, trainer: Any, corpus: Corpus, description: str) -> None:
    with task(description, None) as bar:

        def texts() -> Iterator[list[str]]:
            for batch in corpus.batches():
                yield [piece for text in batch.texts for piece in pieces(text)]
                bar.advance(len(batch))

        backend.train_from_iterator(texts(), trainer)


def _written_by(corpus: Corpus, ranked: list[str], min_users: int) -> list[str]:
    """The words of `ranked` that at least `min_users` users wrote, in the same order."""
    if min_users < 1:
        raise UsageError(f"min_users={min_users} is below 1. Use 2 or more, or leave it out.")
    counts = _DistinctUsers(len(ranked), min_users)
    counts.add_all(corpus, ranked)
    return list(compress(ranked, counts.enough))


def tokens_by_user(corpus: Corpus, words: list[str]) -> Iterator[tuple[int, np.ndarray]]:
    """Each document's user, numbered by first appearance, and its ids in `word_tokenizer(words)`."""
    encoder = Encoder(word_tokenizer(words))
    numbers: dict[str, int] = {}
    with task("Counting users", None) as bar:
        for batch in corpus.batches():
            for user, ids in zip(batch.users, encoder.encode(batch.texts)[0], strict=True):
                yield numbers.setdefault(user, len(numbers)), ids
            bar.advance(len(batch))


class Tallies:
    """How often each user wrote each word.

    A (user, word) pair is one number, its count another: 16 bytes a distinct pair, about 50
    while sorting.
    """

    _UNSORTED = 4_000_000

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self.enough = np.zeros(num_words, bool)  # words that are counted no further
        self._pairs = [np.empty(0, np.int64)]
        self._counts = [np.empty(0, np.int64)]
        self._num_unsorted = 0

    def add_all(self, corpus: Corpus, words: list[str]) -> None:
        """Count all of a corpus; special tokens are no words."""
        first = len(SPECIAL_TOKENS)
        for user, ids in tokens_by_user(corpus, words):
            written = ids[ids >= first] - first
            distinct, counts = np.unique(written[~self.enough[written]], return_counts=True)
            self._pairs.append(user * self._num_words + distinct.astype(np.int64))
            self._counts.append(counts)
            self._num_unsorted += len(distinct)
            if self._num_unsorted > self._UNSORTED:
                self._sort()
        self._sort()

    def by_user(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each user's distinct words, by their numbers, and how often the user wrote them."""
        (pairs,), (counts,) = self._pairs, self._counts
        next_user = np.flatnonzero(np.diff(pairs // self._num_words)) + 1
        for start, end in pairwise([0, *next_user, len(pairs)]) if len(pairs) else ():
            yield pairs[start:end] % self._num_words, counts[start:end]

    def _sort(self) -> None:
        pairs, place = np.unique(np.concatenate(self._pairs), return_inverse=True)
        counts = np.zeros(len(pairs), np.int64)
        np.add.at(counts, place, np.concatenate(self._counts))
        self._pairs, self._counts, self._num_unsorted = [pairs], [counts], 0


class _DistinctUsers(Tallies):
    """Which words at least `needed` users wrote; pairs are kept only of words still short of users."""

    def __init__(self, num_words: int, needed: int) -> None:
        super().__init__(num_words)
        self._needed = needed

    def _sort(self) -> None:
        super()._sort()
        words = self._pairs[0] % self._num_words
        self.enough |= np.bincount(words, minlength=self._num_words) >= self._needed
        is_short = ~self.enough[words]
        self._pairs, self._counts = [self._pairs[0][is_short]], [self._counts[0][is_short]]


def with_digits(ranked: list[str], size: int | None) -> list[str]:
    """The first of `ranked` that fit, the ten digits always among them."""
    room = len(ranked) if size is None else size - len(SPECIAL_TOKENS)
    kept = ranked[:room]
    missing = [digit for digit in DIGITS if digit not in set(kept)]
    while size is not None and len(kept) + len(missing) > room:
        if (dropped := kept.pop()) in DIGITS:
            missing = sorted([*missing, dropped])
    return kept + missing


def _byte_level_bpe(corpus: Corpus, size: int | None) -> PreTrainedTokenizerFast:
    if size is None or size < _SMALLEST_BPE:
        raise UsageError(
            f"vocabulary size={size} is too small for BPE: 256 bytes and 4 special tokens come first. "
            f"Use {_SMALLEST_BPE} or more."
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _train(backend, trainer, corpus, "Fitting byte pairs")
    return _wrapped(backend)
