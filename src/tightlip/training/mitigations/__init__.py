"""What a mitigation is: a way to take a step, and an honest word about what it promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from transformers.modeling_utils import PreTrainedModel

from tightlip.training.batches import Batch, Rows
from tightlip.training.config import TrainConfig
from tightlip.training.losses import Forward

LEDGER_KEYS = (
    *("mechanism", "epsilon", "delta", "unit", "adjacency", "sampling", "accountant", "steps"),
    *("standing", "because", "covers", "outside"),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a mitigation is given before the first step."""

    model: PreTrainedModel
    forward: Forward
    rows: Rows
    config: TrainConfig
    steps_per_epoch: int
    num_steps: int

    @cached_property
    def targets_per_batch(self) -> float:
        """How many targets a batch has on average."""
        return float(self.rows.num_targets.sum()) / self.steps_per_epoch


class Mitigation(Protocol):
    """One way to train. The loop asks for an epoch's batches, then hands each back to `step`.

    A mitigation that needs randomness of its own, a second model or an accountant keeps it
    itself; `state_dict` is what a resumed run gives back to it.
    """

    def prepare(self, setting: Setting) -> None:
        """Look at the run before its first step, and refuse what cannot work."""

    def batches(self, epoch: int) -> Sequence[np.ndarray]:
        """The rows of each of the epoch's batches: `steps_per_epoch` of them."""

    def step(self, model: PreTrainedModel, batch: Batch, optimizer: Optimizer) -> Tensor:
        """Change the weights by one batch; the mean loss in nats over its targets, detached."""

    def guarantee(self, num_steps: int) -> dict[str, Any]:
        """What may be said of the weights after `num_steps` steps, under all `LEDGER_KEYS`."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...
