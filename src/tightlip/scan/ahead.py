"""A scan that begins while the corpus is still tokenised, where a device of its own does the scanning."""

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from tightlip.scan import store

DEVICES = ("cuda",)  # a CPU has tokenising to do
MOST_TOKENS = 100_000_000  # whose columns are held in memory, 8 to 16 bytes each
# Each call of torch's lets go of Python's lock, and then waits so long for it while another computes.
_SWITCH_SECONDS = 1e-4

Place = tuple[int, int]


class ScanAhead:
    """Scans each shard once its tokens are known, until whoever scans the whole takes over.

    `begin` begins with the tokens and bounds of a shard; without it nothing is scanned ahead. Nothing
    of it is on disk, and what goes wrong is left for the whole scan to say.

    Holds:
        same: shards and columns are those of a scan that begins when all tokens are known.
    """

    def __init__(
        self, begin: Callable[[np.ndarray, np.ndarray], Iterable[np.ndarray]] | None
    ) -> None:
        self._begin, self._thread = begin, ThreadPoolExecutor(1)
        self._shard: list[np.ndarray] = []
        self._size = self._start = 0
        self._begun: dict[Place, Iterable[np.ndarray]] = {}
        self._done: dict[Place, tuple[np.ndarray, ...]] = {}
        self._switch_before = sys.getswitchinterval()

    def add(self, documents: Sequence[np.ndarray]) -> None:
        """The tokens of the documents that follow; a shard ends as in `shard_edges`."""
        for tokens in documents if self._begin is not None else ():
            self._shard.append(tokens)
            self._size += len(tokens)
            if self._size >= store.SHARD_TOKENS:
                place = self._start, self._start + self._size
                if place[1] <= MOST_TOKENS:
                    sys.setswitchinterval(_SWITCH_SECONDS)
                    self._thread.submit(self._scan, place, self._shard)
                self._shard, self._size, self._start = [], 0, place[1]

    def _scan(self, place: Place, documents: list[np.ndarray]) -> None:
        if self._begin is None:
            return
        try:
            bounds = np.append(0, np.cumsum([len(tokens) for tokens in documents]))
            begun = self._begin(np.concatenate(documents), bounds)
            self._read_back()  # of the one before, for which the device need not stop
            self._begun[place] = begun
        except Exception:  # the whole scan meets it too, and has the words for it
            self._begin = None

    def _read_back(self) -> None:
        for place in [*self._begun]:
            self._done[place] = (*self._begun.pop(place),)

    def finished(self) -> dict[Place, tuple[np.ndarray, ...]]:
        """The columns of what was scanned, by its first token and its end. Nothing is under way then."""
        self._thread.shutdown(cancel_futures=True)
        self._begin = None
        sys.setswitchinterval(self._switch_before)
        with suppress(Exception):
            self._read_back()
        return self._done
