"""Canaries for the one-run check: random documents, each trained on or not by a fair coin."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from tightlip.core.canary_key import CanaryKey, read_key, write_key
from tightlip.core.errors import UsageError
from tightlip.core.randomness import keyed_generator
from tightlip.training.batches import Rows


def plant(
    rows: Rows,
    num_canaries: int,
    *,
    vocabulary_size: int,
    forbidden: set[int],
    length: int,
    key_file: Path,
) -> Rows:
    """`rows` and, behind them, about half of the canaries, each a document of a user of its own.

    Canaries are `length` random tokens, none of them `forbidden`. The key file keeps them and
    their coins; where it exists, as in a resumed run, they are read from it.

    Holds:
        fair: each canary is in with probability 1/2, whoever else is.
        alone: no canary shares its user or document with anybody.
        same: planting again with the same key file gives the same rows.
    """
    if key_file.exists():
        key = read_key(key_file)
        _check_same(key, num_canaries, length, key_file)
    else:
        key = _drawn(num_canaries, length, vocabulary_size, forbidden)
        write_key(key_file, key)
    return _with_included(rows, key)


def _drawn(num_canaries: int, length: int, vocabulary_size: int, forbidden: set[int]) -> CanaryKey:
    if num_canaries < 1 or length < 2:
        raise UsageError(
            f"{num_canaries} canaries of {length} tokens tell nothing. Use --dp-check-canaries 1000 and rows of "
            "at least 2 tokens."
        )
    allowed = np.setdiff1d(np.arange(vocabulary_size), list(forbidden))
    if len(allowed) < 2:
        raise UsageError(
            f"A vocabulary of {vocabulary_size} leaves {len(allowed)} words for canaries, which would all read alike. "
            "Give a corpus with more words."
        )
    generator = keyed_generator()
    return CanaryKey(
        tokens_ML=generator.choice(allowed, (num_canaries, length)),
        included_M=generator.integers(0, 2, num_canaries).astype(bool),
    )


def _check_same(key: CanaryKey, num_canaries: int, length: int, key_file: Path) -> None:
    if (len(key), key.length) != (num_canaries, length):
        raise UsageError(
            f"{key_file} holds {len(key)} canaries of {key.length} tokens, and {num_canaries} of {length} were asked for. "
            "Give the old settings, or another --out."
        )


def _with_included(rows: Rows, key: CanaryKey) -> Rows:
    chosen = np.flatnonzero(key.included_M)
    tokens = key.tokens_ML[chosen].ravel().astype(rows.tokens.dtype)
    count = len(chosen)

    def extended(part: np.ndarray, more: np.ndarray) -> np.ndarray:
        return np.concatenate([part, more.astype(part.dtype)])

    return replace(
        rows,
        # A corpus read from disk as it is needed is copied into memory here: a row says where
        # its tokens start in one array.
        tokens=np.concatenate([rows.tokens, tokens]),
        starts=extended(rows.starts, len(rows.tokens) + key.length * np.arange(count)),
        lengths=extended(rows.lengths, np.full(count, key.length)),
        begins=extended(rows.begins, np.full(count, rows.bos is not None)),
        users=extended(rows.users, _after(rows.users) + chosen),
        documents=extended(rows.documents, _after(rows.documents) + chosen),
    )


def _after(numbers: np.ndarray) -> int:
    return int(numbers.max(initial=-1)) + 1
