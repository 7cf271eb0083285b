"""Held-out text that comes as a file of its own instead of a share of the corpus.

It is cleaned like the training text, but by itself: what it holds depends on the file and the
settings alone, so that several runs on different text can be judged on the very same documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from tightlip.corpus.readers import Corpus, DocumentBatch, open_corpus


def held_out_source(given: str) -> Path:
    """The file that holds the text; `FOLDER/validation` is a prepared corpus' held-out part."""
    path = Path(given)
    if path.name == "validation" and (path.parent / "prepared.json").is_file():
        return path.with_suffix(".parquet")
    return path


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Held-out documents that were trained on: in all, and by the same user."""

    num_documents: int
    num_same_user: int
    of: int

    def warning(self, name: str) -> str | None:
        """What to say of it; None where there is nothing."""
        if not self.num_documents:
            return None
        return (
            f"{self.num_documents:,} of the {self.of:,} documents in {name} stand in the training text too "
            f"({self.num_same_user:,} by the same user), so validation looks better than it is. Take them out of one of the "
            "two."
        )


def overlap(train: Path, held: Path) -> Overlap:
    """Which documents of `held` stand in `train`; case and white space make no difference.

    Holds:
        bounded: what is kept in memory is 16 bytes for each document of `held`, not of `train`.
    """
    digests = list(_digests(open_corpus(held)))
    by_anybody, by_user = ({each[which] for each in digests if each} for which in (0, 1))
    seen: set[bytes] = set()
    for found in _digests(open_corpus(train)):
        if found and found[0] in by_anybody:
            seen.add(found[0])
            seen.update({found[1]} & by_user)
    return Overlap(
        num_documents=sum(bool(each) and each[0] in seen for each in digests),
        num_same_user=sum(bool(each) and each[1] in seen for each in digests),
        of=len(digests),
    )


def _digests(corpus: Corpus) -> Iterator[tuple[bytes, ...]]:
    """Of each document its text, and its text with its user; nothing of one without words."""
    for batch in corpus.batches():
        yield from map(_digest, batch.users, _words(batch))


def _words(batch: DocumentBatch) -> list[str]:
    return [" ".join(text.split()).casefold() for text in batch.texts]


def _digest(user: str, words: str) -> tuple[bytes, ...]:
    if not words:
        return ()
    return tuple(
        blake2b(text.encode("utf-8"), digest_size=16).digest()
        for text in (words, f"{words}\0{user}")
    )
