"""What a scan keeps of each token, and scans kept on disk, so that each model reads each text once.

    scan/<digest of the key>/key.json    which model read which text, and how
    scan/<digest of the key>/000000.npz  the scorer's columns, ranks (int32) and log_probs (float32)
                                         unless told otherwise, of a shard's tokens,
                                         and `of`: a digest of the key, the number and the tokens,
                                         and `by`: the kind of device and torch's build, as text

Ranks and log-probabilities tell nearly as much as the text: all of it is for its owner only.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tightlip.core import files
from tightlip.core.checksums import checked
from tightlip.core.devices import kind_of_device
from tightlip.core.engines import Engine, local_engine
from tightlip.core.errors import DamagedError, UsageError
from tightlip.core.files import written_whole
from tightlip.core.progress import task
from tightlip.corpus.tokens import TokenizedCorpus

if TYPE_CHECKING:
    from torch import Tensor

SCAN = "scan"  # the folder's name, wherever it lies
FORMAT = 2
NOT_SCORED = -1  # the rank of a token that was never predicted: the first without a BOS
SHARD_TOKENS = 250_000
_PATIENCE = 60.0  # seconds until a file that another machine wrote is seen here

# Tokens and the bounds of some documents in; the scorer's columns of their tokens out, which may
# still be under way until they are asked for.
ScanFunction = Callable[[np.ndarray, np.ndarray], Iterable[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """The columns of a scan, and the function that fills them from rows of logits and their targets.

    `score` gives one tensor for each column, in their order. A float that is NaN refuses the whole
    scan: what cannot be is minus infinity. `settings` is whatever else decides the figures, as JSON
    can hold it; name and settings are part of a kept scan's key. Scans of those in `found_in` have the
    same columns, and more.
    """

    name: str
    columns: Mapping[str, type[np.generic]]
    score: Callable[["Tensor", "Tensor"], "tuple[Tensor, ...]"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    found_in: tuple["Scorer", ...] = ()

    @property
    def key(self) -> dict[str, Any]:
        """What tells its scans from those of others; the first scorer's are older than scorers."""
        return {} if self.name == PLAIN.name else {"scorer": self.name, **self.settings}

    def empty(self, size: int) -> list[np.ndarray]:
        """A column each, for tokens that nobody has predicted yet."""
        return [
            np.full(size, np.nan if issubclass(kind, np.floating) else NOT_SCORED, dtype=kind)
            for kind in self.columns.values()
        ]


def _scored(
    logits_NV: "Tensor", targets_N: "Tensor", *, moments: bool = False
) -> "tuple[Tensor, ...]":
    from tightlip.scan.scoring import score_logits  # with all that torch takes

    return score_logits(logits_NV, targets_N, moments=moments)


_COLUMNS: dict[str, type[np.generic]] = {"ranks": np.int32, "log_probs": np.float32}
# Beside them the mean and the deviation of the log-probability under the model's own distribution.
MOMENTS = Scorer(
    name="moments",
    columns=_COLUMNS | {"means": np.float32, "deviations": np.float32},
    score=partial(_scored, moments=True),
)
PLAIN = Scorer(name="plain", columns=_COLUMNS, score=_scored, found_in=(MOMENTS,))


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
    kinds: tuple[str, ...] = ()  # of devices that scanned it, where that is known

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
        resumed: a killed scan goes on at its shard, on a device of the same kind.
        another_key: another model, text, tokenizer, begin token, window, type, device or scorer is another scan.
        not_trusted: a damaged shard, or one of other text, is scanned anew.
        anywhere: the files are the same whichever engine scans, on devices of one kind.
        private: folders and files are for their owner only.
    """

    def __init__(self, folder: Path, beside: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.beside = [place for place in dict.fromkeys(beside) if place != folder]

    def has_scans(self) -> bool:
        """Whether any stand here or beside, of whatever."""
        return any(any(place.glob("*/key.json")) for place in (self.folder, *self.beside))

    def scan(
        self,
        corpus: TokenizedCorpus,
        *,
        key: Mapping[str, Any],
        open_scan: Callable[[], ScanFunction],
        description: str,
        scorer: Scorer = PLAIN,
        engine: Engine | None = None,
    ) -> ScannedCorpus:
        """The scan of `corpus` under `key`; `open_scan` is called once a shard is missing."""
        engine, device = engine or local_engine(), str(key.get("device", "cpu"))
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
        edges = shard_edges(corpus.bounds)
        shards = [_Shard(n, *ends) for n, ends in enumerate(pairwise(edges))]
        found = {one: place for one in shards if (place := _found(one, corpus, folders, scorer))}
        if len(found) < len(shards):
            here = {*engine.kinds(device), ""}
            found = {one: place for one, place in found.items() if place[1] in here}
            if not (
                own / "key.json"
            ).exists():  # before any shard: those without a key are nobody's
                files.write_json(files.make_private_folder(own) / "key.json", whole_key)
        missing = [one for one in shards if one not in found]
        opening = partial(_opened, open_scan, corpus, own, whole_key, scorer, device)
        with task(description, corpus.num_tokens) as bar:
            bar.advance(float(sum(one.size(corpus) for one in found)))
            for one, (of, kind) in engine.scatter(opening, missing):
                found[one] = one.path(own), kind
                _check_written(own, one, corpus, of)
                bar.advance(float(one.size(corpus)))
        if missing and engine.is_remote:
            files.remove_partials_in(own, of_all=True)  # of workers that died, on whichever machine
        return ScannedCorpus(
            corpus=corpus,
            files=[found[one][0] for one in shards],
            edges=edges,
            scorer=scorer,
            kinds=tuple(sorted({kind for _, kind in found.values() if kind})),
        )


@dataclass(frozen=True)
class _Shard:
    """Documents [first, end), which one worker scans at a time."""

    number: int
    first: int
    end: int

    def path(self, folder: Path) -> Path:
        return folder / f"{self.number:06d}.npz"

    def bounds(self, corpus: TokenizedCorpus) -> np.ndarray:
        return corpus.bounds[self.first : self.end + 1]

    def tokens(self, corpus: TokenizedCorpus) -> np.ndarray:
        bounds = self.bounds(corpus)
        return corpus.tokens[bounds[0] : bounds[-1]]

    def size(self, corpus: TokenizedCorpus) -> int:
        return int(corpus.bounds[self.end] - corpus.bounds[self.first])


def _opened(
    open_scan: Callable[[], ScanFunction],
    corpus: TokenizedCorpus,
    folder: Path,
    key: dict[str, Any],
    scorer: Scorer,
    device: str,
) -> Callable[[_Shard], "Future[tuple[bytes, str]]"]:
    """What a worker does with a shard, once the model is open: scan it, and wait for the device's last
    answers and write its file while the next is scanned. Writing took 50 ms, a GPU's scan 140."""
    if not _is_of(folder, key):
        raise UsageError(
            f"{socket.gethostname()} does not see {folder} as it was written. Every machine must have the report's folder at "
            "the same path: give --out on a file system that all of them share."
        )
    scan, kind, writer = open_scan(), kind_of_device(device), ThreadPoolExecutor(1)

    def write(shard: _Shard, values: Iterable[np.ndarray]) -> tuple[bytes, str]:
        path = shard.path(folder)
        of = _digest_of_shard(path, shard.number, shard.tokens(corpus))
        _write_shard(path, dict(zip(scorer.columns, values, strict=True)), of, kind)
        return of, kind

    return lambda shard: writer.submit(write, shard, scan(corpus.tokens, shard.bounds(corpus)))


def _check_written(folder: Path, shard: _Shard, corpus: TokenizedCorpus, of: bytes) -> None:
    """Refuse what was not written here, or was made of other tokens than those here."""
    path, end = shard.path(folder), time.monotonic() + _PATIENCE
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    if not path.exists() or of != _digest_of_shard(path, shard.number, shard.tokens(corpus)):
        raise UsageError(
            f"A worker scanned {path}, and it is not what belongs there. Every machine must see the corpus and the report's "
            "folder at the same paths: put both on a file system that all of them share."
        )


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
        return bool(files.read_json(folder / "key.json") == key)
    except (FileNotFoundError, DamagedError):
        return False


def _digest_of_shard(path: Path, number: int, tokens: np.ndarray) -> bytes:
    """Of the key, for which its folder is named, the number and the tokens."""
    start = f"{path.parent.name}/{number}/".encode()
    return hashlib.sha256(start + np.asarray(tokens, np.int64).tobytes()).digest()


def _found(
    shard: _Shard, corpus: TokenizedCorpus, folders: Sequence[Path], scorer: Scorer
) -> tuple[Path, str] | None:
    """Where a shard stands whole, and the kind of device that scanned it."""
    tokens = shard.tokens(corpus)
    for path in map(shard.path, folders):
        if (kind := _kind_of(path, shard.number, tokens, scorer)) is not None:
            return path, kind
    return None


def _kind_of(path: Path, number: int, tokens: np.ndarray, scorer: Scorer) -> str | None:
    """The kind of device that scanned a shard, "" if it does not say; None unless it reads back and
    is of this text. Reading checks each array's checksum."""
    try:
        with np.load(checked(path)) as stored:
            arrays = [stored[name] for name in scorer.columns]
            is_its = stored["of"].tobytes() == _digest_of_shard(path, number, tokens)
            kind = stored["by"].tobytes().decode() if "by" in stored else ""
    except Exception:  # damage makes numpy raise whatever its parsers do, tokenize.TokenError too
        return None
    kinds = [array.dtype for array in arrays]
    same_size = all(one.shape == tokens.shape for one in arrays)
    return kind if kinds == list(scorer.columns.values()) and same_size and is_its else None


def _write_shard(path: Path, columns: dict[str, Any], of: bytes, kind: str) -> None:
    """Replaces whatever damaged shard stood there."""
    of_key, by = np.frombuffer(of, np.uint8), np.frombuffer(kind.encode(), np.uint8)
    with written_whole(path) as beside, beside.open("wb") as stream:
        np.savez(stream, **columns, of=of_key, by=by)


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
