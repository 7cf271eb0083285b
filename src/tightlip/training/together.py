"""Training in several processes: who runs which rows, sums over all, weights split over all.

Every process has the model, or a part of every weight, and runs its rows of each batch. Gradients
are added up by hand, not by torch's DDP: a batch's rows count by their targets, so what is wanted
are sums and no means, and the loop reaches into the model. Shapes: B rows of a batch, H hidden.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tightlip.core.devices import usable_device
from tightlip.core.errors import UsageError
from tightlip.core.processes import Processes
from tightlip.core.progress import log
from tightlip.models.checks import is_quantised
from tightlip.models.recurrent import RecurrentForCausalLM
from tightlip.privacy.shards import is_shard
from tightlip.training.config import RunOptions, TrainConfig

Made = TypeVar("Made")
_LONGEST_REFUSAL = timedelta(seconds=10)  # after which the first process refuses too, if it does
_calls = itertools.count()


@contextmanager
def one_voice(processes: Processes) -> Iterator[None]:
    """The first process speaks and the others are silent, but for one that fails alone."""
    if not processes.are_several:
        yield
        return
    from torch.distributed.distributed_c10d import _get_default_store

    store, key, before = _get_default_store(), f"tightlip refuses {next(_calls)}", log.level
    if not processes.is_first:
        log.setLevel("CRITICAL")
    try:
        with _lost_processes_in_words():
            yield
    except Exception as error:
        if processes.is_first:
            store.set(key, "1")
        elif not _is_set(store, key):
            log.critical("Process %d: %s", processes.rank, error)
        raise
    finally:
        log.setLevel(before)


@contextmanager
def _lost_processes_in_words() -> Iterator[None]:
    from torch.distributed import DistError

    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, DistError) and "gloo" not in str(error):
            raise
        raise UsageError(
            "Another process of this run ended, and this one cannot go on alone. What is above may say why. Give the same "
            "command again to go on where it stopped."
        ) from error


def _is_set(store: Any, key: str) -> bool:
    try:
        store.wait([key], _LONGEST_REFUSAL)
    except RuntimeError:  # no word came, or whoever would pass it on is gone
        return False
    return True


def in_turn(processes: Processes, make: Callable[[], Made]) -> Made:
    """What `make` makes here: the first process begins, the others find what it left on the disk."""
    made: list[Made] = []
    processes.told(lambda: made.append(make()))
    return made[0] if made else make()


@contextmanager
def by_first(processes: Processes, entered: AbstractContextManager[None]) -> Iterator[None]:
    """Inside `entered` on the first process; where it refuses, all do."""
    with ExitStack() as held:
        processes.told(lambda: held.enter_context(entered))
        yield


def any_wants(processes: Processes, wanted: bool) -> bool:
    """Whether any process wants something; cheap enough to be asked after every step."""
    if processes.are_several:
        count = torch.tensor(float(wanted))
        processes.add_up([count])
        wanted = bool(count)
    return wanted


def own_device(options: RunOptions, processes: Processes) -> torch.device:
    """Where this process trains."""
    device = torch.device(usable_device(options.device, bf16=options.bf16))
    if processes.are_several and device.index is not None:
        raise UsageError(
            f"device={options.device!r} is one GPU, and {processes.size} processes train, each on its own. Use device=cuda."
        )
    return device


@dataclass(frozen=True, kw_only=True)
class Part:
    """The places of a batch that one process runs.

    Where there are more processes than rows it runs the first row all the same, which then counts
    for nothing: split weights come together only where all processes run.
    """

    run: np.ndarray
    counts: bool

    @classmethod
    def of(cls, num_rows: int, processes: Processes) -> "Part":
        # One row in so many: those of a batch are sorted by length, and so all have like work.
        own = np.arange(num_rows)[processes.rank :: processes.size]
        return cls(run=own if len(own) else np.zeros(1, np.int64), counts=len(own) > 0)

    @property
    def places(self) -> np.ndarray:
        """Those that count."""
        return self.run if self.counts else self.run[:0]


def add_up_step(processes: Processes, model: nn.Module, loss_nats: Tensor) -> None:
    """A step's gradients and its loss become their sums over all processes, the same everywhere.

    Holds:
        none_where_none: a weight that no process has a gradient of is left without one.
    """
    # Those of split weights were added up on the way back.
    trained = [each for each in model.parameters() if each.requires_grad and not is_shard(each)]
    known = loss_nats.new_tensor([each.grad is not None for each in trained])
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
    parts = [loss_nats, known, *gradients]
    flat = torch.cat([part.flatten() for part in parts])
    processes.add_up([flat])
    summed = [*flat.split([part.numel() for part in parts])]
    loss_nats.copy_(summed[0][0])
    for number, (one, gradient) in enumerate(zip(trained, summed[2:], strict=True)):
        if one.grad is not None or summed[1][number]:
            one.grad = gradient.view_as(one).to(one.dtype)


def states_of_all(processes: Processes, own_KH: Tensor, part: Part, num_rows: int) -> Tensor:
    """The states of all rows of a batch, on every process; each differentiates its own.

    A term on all of them is then the same everywhere, and the gradients that it gives to each
    process' rows add up to its gradient.
    """
    if not processes.are_several:
        return own_KH
    places = torch.from_numpy(part.places).to(own_KH.device)
    own_KH = own_KH[: len(places)]
    all_BH = own_KH.new_zeros(num_rows, own_KH.shape[1]).index_copy(0, places, own_KH.detach())
    processes.add_up([all_BH])
    return all_BH.index_copy(0, places, own_KH)


def begin_alike(processes: Processes, model: nn.Module) -> None:
    """Every process begins from the first one's weights: another machine might draw others."""
    if processes.are_several:
        for each in model.parameters():
            if each.requires_grad:
                if not processes.is_first:
                    each.data.zero_()
                processes.add_up([each.data])


# Weights of which every process holds a part


def check_splits(config: TrainConfig, options: RunOptions, model: nn.Module) -> None:
    """Refuse to split what cannot be, or what gains nothing by it."""
    instead = "Leave fsdp out: every process then has the whole model."
    if isinstance(model, RecurrentForCausalLM):
        raise UsageError(
            f"fsdp=True splits a Transformer layer by layer, and {config.model} is an LSTM or GRU, small enough for every process. "
            f"{instead}"
        )
    if is_quantised(model):
        raise UsageError(
            f"fsdp=True cannot split weights in few bits, as {config.model} is held. {instead}"
        )
    if not config.mitigation.takes_split_weights:
        raise UsageError(
            f"fsdp=True under mitigation={config.mitigation.name!r} is not there: its term runs a part of the model by itself. {instead}"
        )
    if options.compile:
        raise UsageError(
            "fsdp=True brings weights together while a pass runs, and compile=True captures passes as they are. Leave one of them out."
        )


def split_weights(model: Any, device: torch.device, processes: Processes) -> None:
    """Split every weight over all processes (FSDP2), each layer coming together when it is run."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (processes.size,))
    layers = getattr(model, "_no_split_modules", None) or ()
    for module in reversed([*model.modules()]):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    # Also the outermost at once: between two passes parameters() are then the parts, always.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum, as ours
            module.set_force_sum_reduction_for_comms(True)


def has_split_weights(model: nn.Module) -> bool:
    return any(map(is_shard, model.parameters()))


def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as files have them: those that are split, whole on the first process. All must ask."""
    is_first, whole = Processes.here().is_first, dict(tensors)
    put_together: dict[int, Tensor] = {}  # a tied weight once, under both its names
    for name, tensor in tensors.items():
        if is_shard(tensor):
            if id(tensor) not in put_together:
                all_of_it = tensor.detach().full_tensor()  # type: ignore[operator]
                put_together[id(tensor)] = all_of_it.cpu() if is_first else all_of_it.new_empty(0)
            whole[name] = put_together[id(tensor)]
    return whole


def split_as(tensor: Tensor, like: Any) -> Tensor:
    """The whole `tensor` as `like` is split, or as it is."""
    if not is_shard(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    where = {"device_mesh": like.device_mesh, "placements": like.placements}
    return distribute_tensor(tensor.to(like.device), **where, src_data_rank=None)
