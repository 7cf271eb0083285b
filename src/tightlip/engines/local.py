"""This machine: models in this process, counting in a few threads, as its kernels release Python's
lock, and Python in processes of its own."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

from tightlip.core.children import ALONE_SECONDS, map_in_children, pickled
from tightlip.core.devices import kind_of_device
from tightlip.core.engines import EngineSettings, Item, Result, settled

_MOST_CHILDREN = 8


class LocalEngine:
    """At most `workers` items are in memory at a time; they are drawn as places fall free."""

    is_remote = False

    def __init__(
        self, workers: int | None = None, threads: int | None = None, device: str = "auto"
    ) -> None:
        self.num_workers = self.workers = workers or os.cpu_count() or 1
        self.device = device
        self.notes: list[str] = []
        self._threads = threads

    @classmethod
    @contextmanager
    def opened(cls, settings: EngineSettings, device: str) -> Iterator["LocalEngine"]:
        yield cls(settings.workers, settings.threads_per_worker, device)

    @cached_property
    def threads(self) -> int:
        import torch

        return self._threads or torch.get_num_threads()

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result]]:
        with ThreadPoolExecutor(self.workers) as pool:
            started = ((item, pool.submit(function, item)) for item in items)
            yield from _in_order(started, self.workers)

    @property
    def num_python(self) -> int:
        """Half of the workers: the others read, write and scan."""
        return max(1, min(_MOST_CHILDREN, self.num_workers // 2))

    def map_python(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result]]:
        remaining, seconds = iter(items), 0.0
        enough = ALONE_SECONDS if self.num_python > 1 else math.inf
        for item in remaining:
            start = time.perf_counter()
            result = function(item)
            seconds += time.perf_counter() - start
            yield item, result
            if seconds > enough:
                enough = math.inf
                if given := pickled(function):
                    yield from map_in_children(function, given, remaining, self.num_python)

    def scatter(
        self, opening: Callable[[], Callable[[Item], Any]], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Any]]:
        opened = cache(opening)
        yield from _in_order(((item, opened()(item)) for item in items), 2)

    def kinds(self, device: str) -> list[str]:
        return [kind_of_device(device)]


def _in_order(started: Iterable[tuple[Item, Any]], most: int) -> Iterator[tuple[Item, Any]]:
    """Items with their answers, of which at most so many are under way at a time."""
    under_way: deque[tuple[Item, Any]] = deque()
    try:
        for one in started:
            under_way.append(one)
            if len(under_way) == most:
                item, answer = under_way.popleft()
                yield item, settled(answer)
                del one, item, answer
        for item, answer in under_way:
            yield item, settled(answer)
    finally:  # whatever happened, what is under way is not left half done
        wait([answer for _, answer in under_way if isinstance(answer, Future)])
