"""Held-out text that comes as a file of its own instead of a share of the corpus.

It is cleaned like the training text, but by itself: what it holds depends on the file and the
settings alone, so that several runs on different text can be judged on the very same documents.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tightlip.corpus.prepare_config import SplitBy
from tightlip.corpus.readers import Corpus, DocumentBatch, open_corpus


def held_out_documents(user: str, num_documents: int, *, holdout: float, seed: int) -> np.ndarray:
    """True for each of a user's documents that is held out.

    Holds:
        exact: round(holdout · num_documents) are, but every user keeps one to train on.
    """
    num_held = min(round(holdout * num_documents), num_documents - 1)
    places = [_place(seed, user, index) for index in range(num_documents if num_held else 0)]
    held = np.zeros(num_documents, bool)
    held[sorted(range(len(places)), key=places.__getitem__)[:num_held]] = True
    return held


def held_out_users(users: Iterable[str], *, holdout: float, seed: int) -> set[str]:
    """round(holdout · users) of the users; somebody is left to train on."""
    distinct = set(users)
    num_held = min(round(holdout * len(distinct)), len(distinct) - 1)
    return set(sorted(distinct, key=lambda user: (_place(seed, user, None), user))[:num_held])


def held_out_text(user: str, text: str, *, holdout: float, seed: int) -> bool:
    """Whether a document is held out, by its own user and text and nothing else.

    Holds:
        alone: no other document, one more or one less, makes a difference.
        together: documents of a user that read the same are on the same side.
    """
    return int.from_bytes(_place(seed, user, text), "big") < holdout * 2**128


class Splitter:
    """Says of one document after the other, in corpus order, whether it is held out."""

    def __init__(
        self, documents_per_user: dict[str, int], *, split: SplitBy, holdout: float, seed: int
    ) -> None:
        self._documents_per_user = documents_per_user
        self._split, self._holdout, self._seed = split, holdout, seed
        self._held: dict[str, np.ndarray] = {}
        self._next: dict[str, int] = {}
        self._held_users: set[str] = set()
        if split == "user":
            self._held_users = held_out_users(documents_per_user, holdout=holdout, seed=seed)

    def is_held_out(self, user: str, text: str) -> bool:
        if self._split == "text":
            return held_out_text(user, text, holdout=self._holdout, seed=self._seed)
        if self._split != "document":
            return user in self._held_users
        index = self._next.get(user, 0)
        self._next[user] = index + 1
        if index == 0:
            num_documents = self._documents_per_user[user]
            self._held[user] = held_out_documents(
                user, num_documents, holdout=self._holdout, seed=self._seed
            )
        return bool(self._held[user][index])


def _place(seed: int, user: str, what: int | str | None) -> bytes:
    message = f"{'user' if what is None else what}\0{user}".encode()
    return blake2b(message, digest_size=16, key=str(seed).encode()).digest()


# Held-out text that comes as a file of its own instead of a share of the corpus


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
