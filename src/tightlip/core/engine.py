"""What an engine promises. The audit needs the promise, never the engine's code."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Engine(Protocol):
    """Apply a pure function to each item, yielding (item, result) in the items' order."""

    workers: int

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result]]: ...
