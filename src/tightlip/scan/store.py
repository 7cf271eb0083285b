"""Scans kept on disk, so that each model reads each text once.

    scan/<digest of the key>/key.json    which model read which text, and how
    scan/<digest of the key>/000000.npz  the scorer's columns, ranks (int32) and log_probs (float32)
                                         unless told otherwise, of a shard's tokens,
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
from concurrent.futures import Future, ThreadPoolExecutor
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
from tightlip.scan.scorers import PLAIN, Scorer

SCAN = "scan"  # the folder's name, wherever it lies
FORMAT = 2
SHARD_TOKENS = 250_000

# Tokens and the bounds of some documents in; the scorer's columns of their tokens out.
ScanFunction = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]


@dataclass(frozen=True, kw_only=True)
class ScanShard:
    """Documents [first, end) with what the scorer said of each of their tokens, by column."""

    first: int
    end: int
    columns: dict[str, np.ndarray]

    @property
    def ranks(self) -> np.ndarray:
        return self.columns["ranks"]

    @property
    def log_probs(self) -> np.ndarray:
        return self.columns["log_probs"]


@dataclass(frozen=True, kw_only=True)
class ScannedCorpus:
    """All shards of one model's scan, read back one at a time; `edges` are their documents'."""

    corpus: TokenizedCorpus
    files: list[Path]
    edges: list[int]
    scorer: Scorer = PLAIN

    def shards(self) -> Iterator[ScanShard]:
        for path, (first, end) in zip(self.files, pairwise(self.edges), strict=True):
            with np.load(path) as stored:
                columns = {name: stored[name] for name in self.scorer.columns}
            yield ScanShard(first=first, end=end, columns=columns)


class ScanStore:
    """A folder of scans, one sub-folder for each key; those in `beside` are read and never written.

    Holds:
        once: what stands here or beside is not scanned again, and its model is not asked for; a scan
            with more columns stands for one with fewer.
        resumed: a killed scan goes on at its shard.
        another_key: another model, text, tokenizer, begin token, window, type, device or scorer is another scan.
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
        scorer: Scorer = PLAIN,
    ) -> ScannedCorpus:
        """The scan of `corpus` under `key`; `open_scan` is called once a shard is missing."""
        whole_key, *richer = (
            {
                **key,
                **one.key,
                "corpus": corpus.corpus_fingerprint,
                "tokenizer": corpus.tokenizer_fingerprint,
                "num_tokens": corpus.num_tokens,
                "shard_tokens": SHARD_TOKENS,
                "format": FORMAT,
            }
            for one in (scorer, *scorer.found_in)
        )
        own = self.folder / _digest(whole_key)
        if own.exists() and not _is_of(own, whole_key):
            shutil.rmtree(own)
        folders = [
            folder
            for one in (whole_key, *richer)
            for place in (self.folder, *self.beside)
            if _is_of(folder := place / _digest(one), one)
        ]
        edges, files = shard_edges(corpus.bounds), []
        scan: ScanFunction | None = None
        with task(description, corpus.num_tokens) as bar, _writing_behind() as write:
            for number, (first, end) in enumerate(pairwise(edges)):
                bounds = corpus.bounds[first : end + 1]
                tokens = corpus.tokens[bounds[0] : bounds[-1]]
                places = [folder / f"{number:06d}.npz" for folder in folders]
                path = next((one for one in places if _is_whole(one, number, tokens, scorer)), None)
                if path is None:
                    scan = scan or open_scan()
                    path = own / f"{number:06d}.npz"
                    columns = zip(scorer.columns, scan(corpus.tokens, bounds), strict=True)
                    write(path, whole_key, number, tokens, dict(columns))
                files.append(path)
                bar.advance(float(len(tokens)))
        return ScannedCorpus(corpus=corpus, files=files, edges=edges, scorer=scorer)


@contextmanager
def _writing_behind() -> Iterator[Callable[..., None]]:
    """Write each shard while the next is scanned, one at a time and in order; what goes wrong is
    raised at the next one, or at the end. All are on the disk when this ends."""
    waiting: list[Future[None]] = []

    def write(*shard: Any) -> None:
        if waiting:
            waiting.pop().result()
        waiting.append(writer.submit(_write_shard, *shard))

    with ThreadPoolExecutor(1) as writer:
        yield write
        if waiting:
            waiting.pop().result()


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


def _digest_of_shard(path: Path, number: int, tokens: np.ndarray) -> bytes:
    """Of the key, for which its folder is named, the number and the tokens."""
    start = f"{path.parent.name}/{number}/".encode()
    return hashlib.sha256(start + np.asarray(tokens, np.int64).tobytes()).digest()


def _is_whole(path: Path, number: int, tokens: np.ndarray, scorer: Scorer) -> bool:
    """Whether a shard reads back and is of this text; reading checks each array's checksum."""
    try:
        with np.load(checked(path)) as stored:
            arrays = [stored[name] for name in scorer.columns]
            is_its = stored["of"].tobytes() == _digest_of_shard(path, number, tokens)
    except Exception:  # damage makes numpy raise whatever its parsers do, tokenize.TokenError too
        return False
    kinds = [array.dtype for array in arrays]
    same_size = all(one.shape == tokens.shape for one in arrays)
    return kinds == list(scorer.columns.values()) and same_size and is_its


def _write_shard(
    path: Path, key: dict[str, Any], number: int, tokens: np.ndarray, columns: dict[str, Any]
) -> None:
    """Replaces whatever damaged shard stood there. The key comes first: shards without one are
    nobody's."""
    if not (path.parent / "key.json").exists():
        make_private_folder(path.parent)
        write_json(path.parent / "key.json", key)
    of = _digest_of_shard(path, number, tokens)
    with written_whole(path) as beside, beside.open("wb") as stream:
        np.savez(stream, **columns, of=np.frombuffer(of, np.uint8))


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
