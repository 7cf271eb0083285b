"""Which documents are held out of training: some of each user, whole users, or by their own text.

What is held out follows from the seed and a hash, so that the same corpus is always split alike.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np

from tightlip.corpus.prepare_config import SplitBy


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
        self._held: dict[str, Iterator[bool]] = {}
        self._held_users: set[str] = set()
        if split == "user":
            self._held_users = held_out_users(documents_per_user, holdout=holdout, seed=seed)

    def is_held_out(self, user: str, text: str) -> bool:
        if self._split == "text":
            return held_out_text(user, text, holdout=self._holdout, seed=self._seed)
        if self._split != "document":
            return user in self._held_users
        if user not in self._held:
            num_documents = self._documents_per_user[user]
            held = held_out_documents(user, num_documents, holdout=self._holdout, seed=self._seed)
            self._held[user] = iter(held.tolist())
        return next(self._held[user])


def _place(seed: int, user: str, what: int | str | None) -> bytes:
    message = f"{'user' if what is None else what}\0{user}".encode()
    return blake2b(message, digest_size=16, key=str(seed).encode()).digest()
