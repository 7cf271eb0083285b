"""The words of every window, however it was cut into tokens, and whose they are."""

from array import array
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tightlip.audit.leakage.by_text import numbered, spans_end_to_end, spoken
from tightlip.audit.leakage.counting import edges_of
from tightlip.audit.leakage.words import inside_or_touched, placed_words
from tightlip.corpus.encoding import Encoder
from tightlip.corpus.shared_text import Documents
from tightlip.corpus.tokens import TokenizedCorpus


@dataclass(frozen=True, kw_only=True)
class WordPlaces:
    """The documents as numbers of words, and which words each token bounds.

    A row of `edges` is a token: the first word that begins in or behind it and one past the last
    that ends in or before it; then the same of words that it touches. Counted in its document.
    """

    corpus: TokenizedCorpus
    edges: np.ndarray

    def most_in(self, num_tokens: int) -> int:
        """No window of so many tokens has more words."""
        return num_tokens * int((self.edges[:, 3] - self.edges[:, 2]).max(initial=1))

    def within(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First word and number of words of each stretch of tokens: those wholly inside it, or
        where there is none those it touches."""
        low, high = self.edges[starts], self.edges[ends - 1]
        first, last = inside_or_touched(low[:, 0], high[:, 1], low[:, 2], high[:, 3])
        return first, last - first


def read_words(
    corpus: TokenizedCorpus,
    documents: Documents,
    tokenizer: Any,
    numbers: dict[str, int],
) -> WordPlaces:
    """Read the corpus' text once more; new words join `numbers`."""
    encoder, of_words = Encoder(tokenizer, with_spans=True), array("i")
    edges, bounds = [np.zeros((0, 4), np.int32)], [np.zeros(1, np.int64)]
    for first, batch in numbered(documents, corpus):
        lengths = np.diff(corpus.bounds[first : first + len(batch) + 1])
        spans = spans_end_to_end(encoder, batch.texts, lengths)
        texts = spoken(batch)
        # No mark or letter joins across the line break, which is part of no word.
        words = placed_words("\n".join(texts))
        begins = edges_of(np.array([len(text) + 1 for text in texts]))
        own = np.searchsorted(words.starts, begins)
        bounded = np.stack(words.bounded(*spans.T), axis=1)
        edges.append((bounded - np.repeat(own[:-1], lengths)[:, None]).astype("i4"))
        of_words.extend([numbers.setdefault(word, len(numbers)) for word in words.words])
        bounds.append(bounds[-1][-1] + own[1:])
    as_words = replace(
        corpus,
        tokens=np.frombuffer(of_words, np.int32),
        bounds=np.concatenate(bounds),
        spans=None,
        roles=None,
        trained=None,
    )
    return WordPlaces(corpus=as_words, edges=np.concatenate(edges))
