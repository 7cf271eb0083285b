"""This machine: a few threads. The counting kernels release Python's lock."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class LocalEngine:
    """At most `workers` items are in memory at a time; they are drawn as places fall free."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or os.cpu_count() or 1

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
