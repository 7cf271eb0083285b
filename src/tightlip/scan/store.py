"""A scan kept on disk in shards: a killed audit goes on where it stopped."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.files import make_private_folder, read_json, write_json, written_whole
from tightlip.core.progress import task
from tightlip.corpus.tokens import TokenizedCorpus

SHARD_TOKENS = 250_000
NOT_SCORED = -1  # the rank of a token that was never predicted: the first without a BOS


@dataclass(frozen=True, kw_only=True)
class ScanShard:
    """Documents [first, end) with the rank and log-probability of each of their tokens."""

    first: int
    end: int
    ranks: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class ScannedCorpus:
    """All shards of one model's scan, read back one at a time."""

    corpus: TokenizedCorpus
    folder: Path
    edges: list[int]

    def shards(self) -> Iterator[ScanShard]:
        for number, (first, end) in enumerate(pairwise(self.edges)):
            with np.load(shard_file(self.folder, number)) as stored:
                yield ScanShard(
                    first=first, end=end, ranks=stored["ranks"], log_probs=stored["log_probs"]
                )


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.npz"


def scan_corpus(
    scan: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    corpus: TokenizedCorpus,
    folder: Path,
    *,
    key: dict[str, Any],
    description: str,
) -> ScannedCorpus:
    """Scan what is not yet stored under `folder`; a scan made with another key is thrown away."""
    edges = shard_edges(corpus.bounds)
    _start_or_resume(folder, key | {"shard_tokens": SHARD_TOKENS})
    with task(description, corpus.num_tokens) as bar:
        for number, (first, end) in enumerate(pairwise(edges)):
            path = shard_file(folder, number)
            if not path.exists():
                ranks, log_probs = scan(corpus.tokens, corpus.bounds[first : end + 1])
                with written_whole(path) as beside, beside.open("wb") as stream:
                    np.savez(stream, ranks=ranks, log_probs=log_probs)
            bar.advance(float(corpus.bounds[end] - corpus.bounds[first]))
    return ScannedCorpus(corpus=corpus, folder=folder, edges=edges)


def _start_or_resume(folder: Path, key: dict[str, Any]) -> None:
    key_file = folder / "key.json"
    if not (key_file.exists() and read_json(key_file) == key):
        shutil.rmtree(folder, ignore_errors=True)
        make_private_folder(folder)
        write_json(key_file, key)


def shard_edges(bounds: np.ndarray) -> list[int]:
    """First documents of the shards, and the end: at least SHARD_TOKENS each but for the last.

    >>> shard_edges(np.array([0, 10, 20, 30]))
    [0, 3]
    """
    num_documents = len(bounds) - 1
    edges = [0]
    while edges[-1] < num_documents:
        enough = bounds[edges[-1]] + SHARD_TOKENS
        edges.append(min(num_documents, int(np.searchsorted(bounds, enough))))
    return edges
