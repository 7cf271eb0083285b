"""Sentences and documents that the corpus already said.

What a model saw twice it remembers better. The first occurrence stays, whoever
wrote it; case and white space do not make a difference. Of each distinct sentence
16 bytes of hash are kept, not its text.
"""

import re
from collections import Counter
from hashlib import blake2b
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.corpus.readers import DocumentBatch
from tightlip.corpus.scrub import presidio_names, scrub
from tightlip.corpus.tokens import TokenizedCorpus


class Cleaner:
    """Cleans batches in corpus order. Duplicates are counted even where they stay.

    Scrubbing comes first: two texts that differ in a phone number alone are the same text.
    """

    def __init__(
        self, *, deduplicate: str = "none", scrub: bool = False, names: bool = False
    ) -> None:
        self._deduplicate, self._scrub = deduplicate, scrub
        self._names = presidio_names() if names else None
        self.sentences, self.documents = DuplicateSentences(), DuplicateDocuments()
        self.documents_per_user: Counter[str] = Counter()
        self.scrubbed: Counter[str] = Counter()
        self.num_read = self.num_removed = self.num_emptied = 0

    def clean(self, batch: DocumentBatch) -> DocumentBatch:
        """The batch without what is to go; whole documents may be missing."""
        self.num_read += len(batch)
        texts = [self._cleaned(text) for text in batch.texts]
        kept = [text is not None for text in texts]
        rest = chosen(batch, kept)
        self.documents_per_user.update(rest.users)
        return DocumentBatch(
            users=rest.users,
            texts=[text for text in texts if text is not None],
            attributes=rest.attributes,
        )

    def removed(self) -> dict[str, int]:
        """How many documents and sentences went."""
        sentences = self.sentences.num_duplicates if self._deduplicate == "sentences" else 0
        return {
            "documents": self.num_removed + self.num_emptied,
            "sentences": sentences,
            "emptied_documents": self.num_emptied,
        }

    def _cleaned(self, text: str) -> str | None:
        if self._scrub:
            text, counts = scrub(text, names=self._names)
            self.scrubbed.update(counts)
        is_duplicate = self.documents.is_duplicate(text)
        rest = self.sentences.without(text)
        if self._deduplicate == "documents":
            self.num_removed += is_duplicate
            return None if is_duplicate else text
        if self._deduplicate == "none":
            return text
        emptied = bool(text.strip()) and not rest.strip()
        self.num_emptied += emptied
        return None if emptied else rest


def chosen(batch: DocumentBatch, keep: list[bool]) -> DocumentBatch:
    """The documents of a batch where `keep` is true."""

    def pick(values: list) -> list:
        return [value for value, kept in zip(values, keep, strict=True) if kept]

    return DocumentBatch(
        users=pick(batch.users),
        texts=pick(batch.texts),
        attributes={name: pick(values) for name, values in batch.attributes.items()},
    )


# Sentences and documents that the corpus already said


# After . ! ? (and a closing quote or bracket), and at the end of a line.
_BOUNDARY = re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'”’)\]]))\s+|\n\s*")
# A full stop that ends no sentence: after a title or an abbreviation.
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|e\.g|i\.e)\.$")
MIN_WORDS = 3


class SeenBefore:
    """Remembers texts by their hash."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def __call__(self, words: list[str]) -> bool:
        """Whether these words, in this order, came before; from now on they did."""
        digest = blake2b(" ".join(words).casefold().encode("utf-8"), digest_size=16).digest()
        before = digest in self._seen
        self._seen.add(digest)
        return before


class DuplicateSentences:
    """Removes sentences of at least three words that stood in the corpus before.

    Holds:
        first_stays: the first occurrence of a sentence is never removed.
        settled: no sentence of three words stands twice in what is left.
    """

    def __init__(self) -> None:
        self.num_duplicates = 0
        self._seen_before = SeenBefore()

    def without(self, text: str) -> str:
        """`text` less its repeated sentences, which are counted."""
        kept: list[str] = []
        removed = 0
        for sentence, space in sentences(text):
            words = sentence.split()
            if len(words) >= MIN_WORDS and self._seen_before(words):
                removed += 1
                if "\n" in space and kept:
                    kept[-1] = space  # the line still ends where it did
            else:
                kept += [sentence, space]
        self.num_duplicates += removed
        return "".join(kept).rstrip() if removed else text


class DuplicateDocuments:
    """Tells documents whose whole text stood in the corpus before. Empty ones repeat nothing."""

    def __init__(self) -> None:
        self.num_duplicates = 0
        self._seen_before = SeenBefore()

    def is_duplicate(self, text: str) -> bool:
        words = text.split()
        duplicate = bool(words) and self._seen_before(words)
        self.num_duplicates += duplicate
        return duplicate


def sentences(text: str) -> list[tuple[str, str]]:
    """Each sentence with the white space after it; joined, they are `text` again.

    >>> sentences("So be it. Farewell!")
    [('So be it.', ' '), ('Farewell!', '')]
    """
    found, start = [], 0
    for boundary in _BOUNDARY.finditer(text):
        if "\n" not in boundary.group() and _ABBREVIATION.search(text[start : boundary.start()]):
            continue
        found.append((text[start : boundary.start()], boundary.group()))
        start = boundary.end()
    found.append((text[start:], ""))
    return found


# What a prepared corpus holds, in numbers


_CHUNK = 4_000_000


def describe_source(cleaner: Cleaner, num_skipped: int) -> dict[str, Any]:
    """What was read, found and removed."""
    return {
        "documents_read": cleaner.num_read,
        "skipped_rows": num_skipped,
        "duplicate_documents": cleaner.documents.num_duplicates,
        "duplicate_sentences": cleaner.sentences.num_duplicates,
        "scrubbed": dict(sorted(cleaner.scrubbed.items())),
        "removed": cleaner.removed(),
        "documents": sum(cleaner.documents_per_user.values()),
        "users": len(cleaner.documents_per_user),
        "documents_per_user": _spread(np.array([*cleaner.documents_per_user.values()])),
    }


def describe_tokens(corpus: TokenizedCorpus, tokenizer: Any) -> dict[str, Any]:
    """Documents, users and tokens of one split."""
    num_unknown = 0
    if tokenizer.unk_token_id is not None:
        for start in range(0, corpus.num_tokens, _CHUNK):
            chunk = corpus.tokens[start : start + _CHUNK]
            num_unknown += int((chunk == tokenizer.unk_token_id).sum())
    return {
        "documents": corpus.num_documents,
        "users": corpus.num_users,
        "tokens": corpus.num_tokens,
        "unknown_tokens": num_unknown,
        "unknown_share": num_unknown / max(corpus.num_tokens, 1),
        "documents_per_user": _spread(np.bincount(corpus.users, minlength=corpus.num_users)),
        "corpus_fingerprint": corpus.corpus_fingerprint,
        "tokenizer_fingerprint": corpus.tokenizer_fingerprint,
    }


def total_tokens(splits: dict[str, Any]) -> dict[str, Any]:
    """Tokens of all splits together."""
    known = [splits[name] for name in ("train", "validation") if name in splits]
    num_tokens = sum(split["tokens"] for split in known)
    num_unknown = sum(split["unknown_tokens"] for split in known)
    return {"tokens": num_tokens, "unknown_share": num_unknown / max(num_tokens, 1)}


def check_unknown(
    split: str, described: dict[str, Any], tokenizer: Any, given: str | None
) -> list[str]:
    """Warnings about tokens the tokenizer does not know; none known in training is an error."""
    share = described["unknown_share"]
    advice = (
        f"tokenizer={given!r} does not fit this text; choose the model's own or build one here"
        if given
        else "the vocabulary is too small for this text; raise --vocabulary-size or lower --min-users"
    )
    if split == "train" and described["tokens"] == described["unknown_tokens"] > 0:
        raise UsageError(
            f"All {described['tokens']} tokens of {split} are {tokenizer.unk_token}: {advice}."
        )
    if not described["tokens"]:
        return [f"{split} holds no tokens: every document is empty."]
    return (
        [f"{share:.0%} of {split}'s tokens are {tokenizer.unk_token}: {advice}."]
        if share > 0.5
        else []
    )


def _spread(counts: np.ndarray) -> dict[str, float]:
    if not len(counts):
        return {"min": 0, "median": 0, "max": 0}
    return {
        "min": int(counts.min()),
        "median": float(np.median(counts)),
        "max": int(counts.max()),
    }
