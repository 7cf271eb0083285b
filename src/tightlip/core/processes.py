"""Several processes that train one model, as torchrun and accelerate start them.

Each runs the same program. The first one decides, draws, writes and speaks; the others are told.
"""

import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from tightlip.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Told = TypeVar("Told")
# The others wait while the first one prepares a corpus. A process that dies is noticed at once.
_PATIENCE = timedelta(hours=12)


@dataclass(frozen=True)
class Processes:
    """This process and those beside it; alone where nobody started several."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> "Processes":
        """Those that torch has joined into a group."""
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def are_several(self) -> bool:
        return self.size > 1

    def told(self, make: Callable[[], Told]) -> Told:
        """What the first process makes, on every process, in memory only; what it raises is raised on
        all of them, or the others would wait for ever."""
        if not self.are_several:
            return make()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = make()
            except Exception as error:
                outcome[1] = error
        from torch import distributed

        distributed.broadcast_object_list(outcome, src=0)  # by way of the CPU where the group can
        if outcome[1] is not None:
            raise outcome[1]
        made: Told = outcome[0]
        return made

    def all_gathered(self, own: Told) -> list[Told]:
        """What each process has, by rank."""
        if not self.are_several:
            return [own]
        from torch import distributed

        every: list[Any] = [None] * self.size
        distributed.all_gather_object(every, own)
        return every

    def agreed(self, own: Told, what: str, *, is_shown: bool = True) -> Told:
        """`own`, or a refusal where the processes differ in it, which tells how if that may be shown."""
        every = self.all_gathered(own)
        if any(other != every[0] for other in every):
            raise UsageError(
                f"The processes differ in {what}{f': {every}' if is_shown else ''}. Start all of them with the same command, on "
                "machines of one kind."
            )
        return own

    def add_up(self, tensors: "list[Tensor]") -> None:
        """Every tensor becomes its sum over all processes, in place."""
        if self.are_several:
            from torch import distributed

            for tensor in tensors:
                distributed.all_reduce(tensor)

    def own_part(self, parts_NK: "Tensor") -> "Tensor":
        """The sum over all processes of this one's row: each row goes to its owner alone."""
        if not self.are_several:
            return parts_NK[0]
        from torch import distributed

        scatter = getattr(distributed, "reduce_scatter_single", None)  # its name since torch 2.13
        own_K = parts_NK.new_empty(parts_NK.shape[1])
        (scatter or distributed.reduce_scatter_tensor)(own_K, parts_NK.flatten())
        return own_K

    def all_parts(self, own_K: "Tensor") -> "Tensor":
        """Everybody's row, by rank."""
        if not self.are_several:
            return own_K[None]
        from torch import distributed

        gather = getattr(distributed, "all_gather_single", None)
        parts = own_K.new_empty(self.size * len(own_K))
        (gather or distributed.all_gather_into_tensor)(parts, own_K)
        return parts.view(self.size, -1)

    def same_draws(self) -> random.Random:
        """Random numbers that nobody can guess, the same ones on every process."""
        if not self.are_several:
            return random.SystemRandom()
        return random.Random(self.told(lambda: secrets.randbits(128)))

    def own_seed(self, insecure_seed: int | None) -> int | None:
        """A known seed that is no other process'; the first has it as it was given."""
        return None if insecure_seed is None else insecure_seed + (self.rank << 64)


def leave_at_exit() -> None:
    """Leave a group that others made, before its threads die with the interpreter, at times with an abort.
    One of GPUs is left alone: leaving it waits for processes that may be gone."""
    from torch import distributed

    is_joined = distributed.is_available() and distributed.is_initialized()
    if is_joined and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


@contextmanager
def joined_processes(device: str = "auto") -> Iterator[Processes]:
    """Join the processes that torchrun started beside this one, if it did, for as long as inside."""
    import torch
    from torch import distributed

    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or distributed.is_initialized():
        yield Processes.here()
        return
    # It keeps the group that there is when it is imported, as parts of torch.compile do it: of a group that is kept
    # threads run on, and die with the interpreter. Not every torch has it.
    import torch.distributed.nn

    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",  # what is said in words goes by the CPU
        timeout=_PATIENCE,
    )
    try:
        yield Processes.here()
    finally:
        distributed.destroy_process_group()
