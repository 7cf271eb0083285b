"""A scan that begins while the corpus is still tokenised, where a device of its own does the scanning."""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from tightlip.scan import store

DEVICES = ("cuda",)  # a CPU has tokenising to do
BYTES_PER_TOKEN = 32  # at most: tokens and where they stand, columns, and rows of short documents
# Each call of torch's lets go of Python's lock, and then waits so long for it while another computes.
_SWITCH_SECONDS = 1e-4

Place = tuple[int, int]  # the first token of a shard, and the end
OpenScan = Callable[[Any], store.ScanFunction]


class ScanAhead:
    """Scans each shard once its tokens are known; whoever then scans the whole takes its answers.

    Only one thread ever asks the model. `open_scan` opens it on some tokens and bounds, `read_as` tells
    in which of its ways it reads them, and at most `most_tokens` are scanned before all are known.
    Nothing of it is on disk, and what goes wrong until then is left for the whole scan to say.

    Holds:
        same: shards, their order and columns are those of a scan that begins when all tokens are known.
    """

    def __init__(self, open_scan: OpenScan, read_as: Callable[[], Any], most_tokens: int) -> None:
        self._open_scan, self._read_as, self._most_tokens = open_scan, read_as, most_tokens
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []  # tokens, sizes of their documents
        self._start = self._size = 0  # of these documents
        self._scan: store.ScanFunction | None = None
        self._shards: dict[Place, tuple[np.ndarray, np.ndarray]] = {}
        self._begun: dict[Place, Future[Iterable[np.ndarray]]] = {}

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> None:
        """The tokens of the documents that follow, and how many each has."""
        if self._start + self._size > self._most_tokens:
            self._waiting = []  # the rest is scanned when all of it is known
            return
        self._waiting.append((ids, sizes))
        self._size += len(ids)
        if self._size < store.SHARD_TOKENS:
            return
        tokens, sizes = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        bounds = np.append(0, np.cumsum(sizes))
        for first, end in pairwise(store.shard_edges(bounds)):
            own = bounds[first : end + 1] - bounds[first]
            if own[-1] < store.SHARD_TOKENS:  # the next documents are of this shard too
                break
            place = self._start, self._start + int(own[-1])
            self._shards[place] = tokens[bounds[first] : bounds[end]], own
            self._begun[place] = self._thread.submit(self._begin, *self._shards[place])
            self._waiting = [(tokens[bounds[end] :], sizes[end:])]
            self._start, self._size = place[1], self._size - int(own[-1])

    def _begin(self, tokens: np.ndarray, bounds: np.ndarray) -> Iterable[np.ndarray]:
        try:
            if self._scan is None:
                seen = SimpleNamespace(tokens=tokens, bounds=bounds, begins_itself=False)
                self._scan = self._open_scan(seen)
            return self._scan(tokens, bounds)
        except Exception:
            self._most_tokens = 0  # the whole scan will meet it too, and has the words for it
            raise

    def take_over(self, corpus: Any) -> store.ScanFunction:
        """The scan of the whole, of which some is done, and the next shards are while these are written."""
        waiting = [place for place, one in self._begun.items() if one.cancel()]
        self._scan, is_as_before = self._thread.submit(self._open_whole, corpus).result()
        done = {place: one for place, one in self._begun.items() if place not in waiting}
        if not is_as_before or any(one.exception() for one in done.values()):
            self._begun = {}
        else:
            again = {at: self._thread.submit(self._begin, *self._shards[at]) for at in waiting}
            self._begun = {**done, **again}
        self._shards = {}

        def scan(tokens: np.ndarray, bounds: np.ndarray) -> Iterable[np.ndarray]:
            begun = self._begun.pop((int(bounds[0]), int(bounds[-1])), None)
            return (begun or self._thread.submit(self._begin, tokens, bounds)).result()

        return scan

    def _open_whole(self, corpus: Any) -> tuple[store.ScanFunction, bool]:
        """Opened on the whole, whose longest document may have all of it read in another way."""
        if self._scan is None:
            return self._open_scan(corpus), True
        before = self._read_as()
        return self._open_scan(corpus), before is self._read_as()

    @contextmanager
    def under_way(self) -> Iterator["ScanAhead"]:
        """Itself, with nothing left to do at the end."""
        switch_before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            yield self
        finally:
            self._thread.shutdown(cancel_futures=True)
            sys.setswitchinterval(switch_before)
