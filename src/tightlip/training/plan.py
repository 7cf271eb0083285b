"""What happens at which step, a function of the settings and the number of rows; the optimizer; dropout."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn, optim

from tightlip.core.devices import products_in
from tightlip.privacy.releasing import CorrectedAdam
from tightlip.privacy.shards import is_shard
from tightlip.training.config import TrainConfig

_OPTIMIZERS = {name.lower(): getattr(optim, name) for name in ("Adam", "AdamW", "Adamax", "SGD")}
_NEVER_FUSED = {"adamax"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps are counted from 1 where they are done, from 0 where they are still to do."""

    config: TrainConfig
    steps_per_epoch: int

    @property
    def num_steps(self) -> int:
        """All steps of the run, unless it stops early."""
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None
        return max(1, round(self.config.epochs * self.steps_per_epoch))

    def epoch(self, step: int) -> float:
        """How many epochs `step` steps are; whole at an epoch's end."""
        return round(step / self.steps_per_epoch, 6)

    def ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def is_recorded(self, step: int) -> bool:
        """Whether metrics are taken after `step` steps."""
        is_last = step == self.num_steps
        return is_last or self.ends_epoch(step) or self.snapshot_name(step) is not None

    def snapshot_name(self, step: int) -> str | None:
        """What the snapshot after `step` steps is called; None where none is taken.

        Holds:
            one_name: an epoch's end is called by its epoch, whatever else falls on it.
            last: a run that ends inside an epoch leaves a snapshot of its end.
        """
        by_epoch = self.config.snapshot == "epoch"
        if by_epoch and self.ends_epoch(step):
            return f"epoch-{step // self.steps_per_epoch}"
        if self.config.first_quarter and step == max(1, round(self.steps_per_epoch / 4)):
            return "epoch-0.25"
        every = self.config.snapshot_steps
        if (every is not None and step % every == 0) or (by_epoch and step == self.num_steps):
            return f"step-{step}"
        return None

    @property
    def num_snapshots(self) -> int:
        """How many snapshots all steps leave.

        Holds:
            counted: as many as `snapshot_name` names.
        """
        by_epoch, every = self.config.snapshot == "epoch", self.config.snapshot_steps
        periods = [*([self.steps_per_epoch] if by_epoch else []), *([every] if every else [])]
        number = sum(self.num_steps // each for each in periods)
        if len(periods) == 2:
            number -= self.num_steps // math.lcm(*periods)  # both fall on one step
        others = {self.num_steps} if by_epoch else set()
        if self.config.first_quarter:
            others |= {max(1, round(self.steps_per_epoch / 4))}
        alone = [step for step in others if all(step % each for each in periods)]
        return number + sum(step <= self.num_steps for step in alone)

    @property
    def num_recorded(self) -> int:
        """How often metrics are taken at most."""
        return sum(map(self.is_recorded, range(1, self.num_steps + 1)))

    def learning_rate(self, step: int) -> float:
        """The rate of the step that comes after `step` steps.

        Holds:
            warm: it rises evenly to the full rate over `warmup_steps`.
            closed_form: then it stays, falls evenly, or falls as half a cosine, to 0.
        """
        full, warmup = self.config.learning_rate, self.config.warmup_steps
        if step < warmup:
            return full * (step + 1) / warmup
        done = (step - warmup) / max(1, self.num_steps - warmup)
        if self.config.schedule == "linear":
            return full * (1 - done)
        if self.config.schedule == "cosine":
            return full * (1 + math.cos(math.pi * done)) / 2
        return full


def build_optimizer(model: nn.Module, config: TrainConfig) -> optim.Optimizer:
    """The optimizer the settings ask for, over every parameter that may change."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rates: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if (floor := getattr(config.mitigation, "adam_correction", None)) is not None:
        decoupled = config.optimizer == "adamw"
        return CorrectedAdam(parameters, floor=floor, decoupled=decoupled, **rates)
    extra: dict[str, Any] = {}
    if config.optimizer == "sgd":
        extra["momentum"] = config.momentum
    never = _NEVER_FUSED | ({"sgd"} if is_shard(parameters[0]) else set())
    if config.optimizer not in never and parameters[0].device.type in ("cpu", "cuda"):
        extra["fused"] = True
    return _OPTIMIZERS[config.optimizer](parameters, **rates, **extra)


@contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch for the run and leave its generators, and its precision, as they were."""
    devices = [device] if device.type == "cuda" else []
    # As torch's LSTM does on its own; twice as fast, and training does not notice.
    precision = products_in("high") if devices else nullcontext()
    with torch.random.fork_rng(devices), precision:
        torch.manual_seed(seed)
        yield


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Make a step's dropout a function of seed and step, so that no state need be kept.

    Of several processes each draws masks of its own: with the same ones, their rows would all miss
    the same units.
    """
    drawn_from = [seed, step, *([rank] if rank else [])]
    state = np.random.SeedSequence(drawn_from).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(state) >> 1)
