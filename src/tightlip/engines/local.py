"""This machine: models in this process, counting in a few threads. Its kernels release Python's lock."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tightlip.core.devices import kind_of_device
from tightlip.core.engines import EngineSettings, Item, Result, settled


class LocalEngine:
    """At most `workers` items are in memory at a time; they are drawn as places fall free."""

    is_remote = False

    def __init__(
        self, workers: int | None = None, threads: int | None = None, device: str = "auto"
    ) -> None:
        self.workers = workers or os.cpu_count() or 1
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
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        with ThreadPoolExecutor(self.workers) as pool:
            for item in items:
                if len(waiting) == self.workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
                    del first, future
                waiting.append((item, pool.submit(function, item)))
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()

    def scatter(
        self, opening: Callable[[], Callable[[Item], Any]], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Any]]:
        function: Callable[[Item], Any] | None = None
        under_way: list[tuple[Item, Any]] = []
        try:
            for item in items:
                function = function or opening()
                under_way.append((item, function(item)))
                if len(under_way) > 1:
                    first, answer = under_way.pop(0)
                    yield first, settled(answer)
            for last, answer in under_way:
                yield last, settled(answer)
        finally:  # whatever happened, what is under way is not left half done
            wait([answer for _, answer in under_way if isinstance(answer, Future)])

    def kinds(self, device: str) -> list[str]:
        return [kind_of_device(device)]
