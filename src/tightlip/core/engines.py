"""Where an audit's work runs: what an engine does, and the settings that all of them share."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from tightlip.core.children import Item, Result
from tightlip.core.errors import UsageError
from tightlip.core.registry import look_up, names_of
from tightlip.core.settings import Settings, setting

Kept = TypeVar("Kept")


class Engine(Protocol):
    """Applies functions to items, here or on other machines, and yields (item, result) in the
    items' order. What a function needs goes with it; that must be picklable where `is_remote`.

    Of `num_workers` in all, `workers` share the memory of one machine, and each computes with
    `threads`; `num_python` of them can run Python's code side by side. `device` is what a model runs
    on, and `notes` are for the readers of figures.
    """

    num_workers: int
    workers: int
    threads: int
    num_python: int
    device: str
    is_remote: bool
    notes: list[str]

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result]]:
        """Several items at a time."""

    def map_python(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result]]:
        """The same for a function that holds Python's lock; one that cannot be pickled stays here."""

    def scatter(
        self, opening: Callable[[], Callable[[Item], Any]], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Any]]:
        """With what a worker opens once, when its first item comes: a model, say. What it answers may
        still be under way, as a file that is written while the next item is worked on."""

    def kinds(self, device: str) -> list[str]:
        """What scans: devices and builds, by name. More than one only where that was allowed."""


def map_beside(
    engine: Engine, function: Callable[[Item], Result], pairs: Iterable[tuple[Kept, Item]]
) -> Iterator[tuple[Kept, Result]]:
    """Of each pair what is kept here, and what a function of Python makes of the other."""
    kept = deque[Kept]()

    def items() -> Iterator[Item]:
        for own, item in pairs:
            kept.append(own)
            yield item

    for _, result in engine.map_python(function, items()):
        yield kept.popleft(), result


def settled(answer: Any) -> Any:
    """An answer that may still be under way."""
    return answer.result() if isinstance(answer, Future) else answer


def local_engine() -> Engine:
    """This machine, for whoever asks for nothing else."""
    engine: Engine = look_up("engine", "local")()
    return engine


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    """Where scanning and counting run. None of it changes the report, but for the last digits."""

    panel: ClassVar[str | None] = "Where it runs"

    engine: str = setting(
        "local",
        "This machine, or the machines of a Ray cluster.",
        choices=tuple(names_of("engine")),
    )
    address: str | None = setting(
        None,
        "A running Ray cluster: HOST:PORT, or auto for the one that this machine is part of.",
        default_words="a cluster of this machine alone",
    )
    workers: int | None = setting(
        None,
        "How many shards are worked on at a time.",
        at_least=1,
        default_words="one for each core; with Ray as many as find room",
    )
    threads_per_worker: int | None = setting(
        None,
        "Threads that a model computes with; others may round otherwise.",
        at_least=1,
        at_most=1024,
        default_words="as many as torch takes on this machine",
    )
    mixed: bool = setting(
        False, "Let machines of different kinds scan one text; the report then says so."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.engine != "ray":
            raise UsageError(
                f"address={self.address!r} is that of a Ray cluster, and the engine is {self.engine!r}. Give --engine ray too."
            )
        if self.mixed and self.engine != "ray":
            raise UsageError(
                "mixed=True is for machines of a Ray cluster, and the engine is 'local'. Give --engine ray too, or leave it out."
            )

    def opened(self, device: str = "auto") -> AbstractContextManager[Any]:
        """The engine, for as long as inside."""
        engine: AbstractContextManager[Any] = look_up("engine", self.engine).opened(self, device)
        return engine
