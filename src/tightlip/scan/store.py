"""Scans kept on disk, so that each model reads each text once.

    scan/<digest of the key>/key.json    which model read which text, and how
    scan/<digest of the key>/000000.npz  ranks (int32) and log_probs (float32) of a shard's tokens,
                                         and `of`: a digest of the key, the number and the tokens

Ranks and log-probabilities tell nearly as much as the text: all of it is for its owner only.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.checksums import checked
from tightlip.core.errors import DamagedError
from tightlip.core.files import (
    make_private_folder,
    read_json,
    write_json,
    written_whole,
)
from tightlip.core.progress import task
from tightlip.corpus.tokens import TokenizedCorpus

SCAN = "scan"  # the folder's name, wherever it lies
FORMAT = 2
SHARD_TOKENS = 250_000
NOT_SCORED = -1  # the rank of a token that was never predicted: the first without a BOS

# Tokens and the bounds of some documents in; rank and log-probability of each of their tokens out.
ScanFunction = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class ScanShard:
    """Documents [first, end) with the rank and log-probability of each of their tokens."""

    first: int
    end: int
    ranks: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class ScannedCorpus:
    """All shards of one model's scan, read back one at a time; `edges` are their documents'."""

    corpus: TokenizedCorpus
    files: list[Path]
    edges: list[int]

    def shards(self) -> Iterator[ScanShard]:
        for path, (first, end) in zip(self.files, pairwise(self.edges), strict=True):
            with np.load(path) as stored:
                yield ScanShard(
                    first=first, end=end, ranks=stored["ranks"], log_probs=stored["log_probs"]
                )


class ScanStore:
    """A folder of scans, one sub-folder for each key; those in `beside` are read and never written.

    Holds:
        once: what stands here or beside is not scanned again, and its model is not asked for.
        resumed: a killed scan goes on at its shard.
        another_key: another model, text, tokenizer, begin token, window, type or device is another scan.
        not_trusted: a damaged shard, or one of other text, is scanned anew.
        private: folders and files are for their owner only.
    """

    def __init__(self, folder: Path, beside: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.beside = [place for place in dict.fromkeys(beside) if place != folder]

    def scan(
        self,
        corpus: TokenizedCorpus,
        *,
        key: Mapping[str, Any],
        open_scan: Callable[[], ScanFunction],
        description: str,
    ) -> ScannedCorpus:
        """The scan of `corpus` under `key`; `open_scan` is called once a shard is missing."""
        whole_key = {
            **key,
            "corpus": corpus.corpus_fingerprint,
            "tokenizer": corpus.tokenizer_fingerprint,
            "num_tokens": corpus.num_tokens,
            "shard_tokens": SHARD_TOKENS,
            "format": FORMAT,
        }
        name = _digest(whole_key)
        own = self.folder / name
        others = [place / name for place in self.beside if _is_of(place / name, whole_key)]
        if own.exists() and not _is_of(own, whole_key):
            shutil.rmtree(own)
        edges, files = shard_edges(corpus.bounds), []
        scan: ScanFunction | None = None
        with task(description, corpus.num_tokens) as bar:
            for number, (first, end) in enumerate(pairwise(edges)):
                bounds = corpus.bounds[first : end + 1]
                num_tokens = int(bounds[-1] - bounds[0])
                places = [folder / f"{number:06d}.npz" for folder in (own, *others)]
                of = _digest_of_shard(name, number, corpus.tokens[bounds[0] : bounds[-1]])
                path = next((one for one in places if _is_whole(one, num_tokens, of)), None)
                if path is None:
                    scan = scan or open_scan()
                    path = places[0]
                    _write_shard(path, whole_key, of, *scan(corpus.tokens, bounds))
                files.append(path)
                bar.advance(float(num_tokens))
        return ScannedCorpus(corpus=corpus, files=files, edges=edges)


@contextmanager
def scan_store(folder: Path, beside: Sequence[Path] = (), *, keep: bool) -> Iterator[ScanStore]:
    """The store in `folder`; unless its scans are to be kept, one that reads what stands there.

    That one is gone at the end, whatever happens; what a killed process left of its own is gone on
    with. Whoever asks has claimed what `folder` stands in. Where that cannot be written to, the
    store is a temporary folder.
    """
    if not os.access(folder.parent, os.W_OK):
        with tempfile.TemporaryDirectory(prefix="tightlip-") as elsewhere:
            yield ScanStore(Path(elsewhere), [folder, *beside])
        return
    passing = folder.with_name(f".{folder.name}")
    try:
        yield ScanStore(folder if keep else passing, [passing if keep else folder, *beside])
    finally:
        shutil.rmtree(passing, ignore_errors=True)


def remove_scans(folder: Path) -> None:
    """Take away the scans in `folder`, and the folder where nothing else is in it."""
    for path in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
        if re.fullmatch("[0-9a-f]{32}", path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _is_of(folder: Path, key: dict[str, Any]) -> bool:
    try:
        return bool(read_json(folder / "key.json") == key)
    except (FileNotFoundError, DamagedError):
        return False


def _digest_of_shard(name: str, number: int, tokens: np.ndarray) -> bytes:
    start = f"{name}/{number}/".encode()
    return hashlib.sha256(start + np.asarray(tokens, np.int64).tobytes()).digest()


def _is_whole(path: Path, num_tokens: int, of: bytes) -> bool:
    """Whether a shard reads back and is of this text; reading checks each array's checksum."""
    try:
        with np.load(checked(path)) as stored:
            arrays, is_its = (stored["ranks"], stored["log_probs"]), stored["of"].tobytes() == of
    except Exception:  # damage makes numpy raise whatever its parsers do, tokenize.TokenError too
        return False
    kinds = [array.dtype for array in arrays]
    fits = kinds == [np.int32, np.float32] and all(one.shape == (num_tokens,) for one in arrays)
    return fits and is_its


def _write_shard(
    path: Path, key: dict[str, Any], of: bytes, ranks: np.ndarray, log_probs: np.ndarray
) -> None:
    """Replaces whatever damaged shard stood there. The key comes first: shards without one are
    nobody's."""
    if not (path.parent / "key.json").exists():
        make_private_folder(path.parent)
        write_json(path.parent / "key.json", key)
    with written_whole(path) as beside, beside.open("wb") as stream:
        np.savez(stream, ranks=ranks, log_probs=log_probs, of=np.frombuffer(of, np.uint8))


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
