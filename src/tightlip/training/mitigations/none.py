"""Plain training: nothing is done against leakage, and nothing is promised."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightlip.privacy.layers import Layout
from tightlip.privacy.passes import Passes, Physical
from tightlip.training.batches import Rows, TokenRows, epoch_order, filled
from tightlip.training.config import MitigationConfig, TrainConfig
from tightlip.training.losses import is_recurrent
from tightlip.training.mitigations import LEDGER_KEYS, Mitigation, RunContext
from tightlip.training.together import add_up_step


class NoMitigation(Mitigation):
    """Gradient descent on the loss of shuffled batches, each weighted by its share of targets.

    Rows of like length share a batch, so batches differ in targets; unweighted, a token in a
    batch of short rows would count many times over. It cost 8 epochs 317 against 280 in
    validation perplexity, and the weights bring that back.
    """

    config_kind: type[MitigationConfig] = MitigationConfig
    context: RunContext

    def __init__(self) -> None:
        self._epoch: tuple[int, Sequence[np.ndarray]] = (-1, ())

    def steps_per_epoch(self, rows: Rows, config: TrainConfig) -> int:
        return -(-len(rows) // config.batch_size)

    def prepare(self, context: RunContext) -> None:
        self.context = context
        self.source = TokenRows(context.rows, np.arange(len(context.rows)))
        self.passes: Passes | None = None
        if context.device.type == "cuda" and is_recurrent(context.model):
            # Our own recurrent layers in a CUDA graph: half of cuDNN's time.
            self.passes = Passes(context.model, None, way="graph", bf16=context.options.bf16)

    def step(self, number: int) -> tuple[Tensor, int]:
        context, chosen = self.context, self._chosen(number)
        loss, num_targets = self.gradients(number, chosen)
        if context.processes.are_several:
            nats = loss.detach() * num_targets
            add_up_step(context.processes, context.model, nats)
            num_targets = int(context.rows.num_targets[chosen].sum())
            loss = nats / num_targets
        if (largest_norm := context.config.gradient_clip) is not None:
            torch.nn.utils.clip_grad_norm_(context.model.parameters(), largest_norm)
        context.optimizer.step()
        return loss.detach(), num_targets

    def gradients(self, number: int, chosen: np.ndarray) -> tuple[Tensor, int]:
        """Give the parameters the step's gradients, as far as this process' rows go: the mean loss
        and the targets of these."""
        if self.passes is not None:
            return self._captured_gradients(self.passes, chosen)
        context, part = self.context, self.context.part(len(chosen))
        batch = context.batch(chosen[part.run])
        num_targets = batch.num_targets * part.counts
        loss = context.forward.backward(batch, num_targets / context.targets_per_batch)
        return loss, num_targets

    def _chosen(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.context.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        return self._epoch[1][place]

    def _order(self, epoch: int) -> Sequence[np.ndarray]:
        rows, config = self.context.rows, self.context.config
        size, by_user = config.batch_size, self.batches_by_user(config)
        return epoch_order(rows, batch_size=size, seed=config.seed, epoch=epoch, by_user=by_user)

    def batches_by_user(self, config: TrainConfig) -> bool:
        """Whether a batch holds rows of one user only."""
        return False

    def _captured_gradients(self, passes: Passes, chosen: np.ndarray) -> tuple[Tensor, int]:
        context, part = self.context, self.context.part(len(chosen))
        chosen = chosen[part.run]
        longest = int(self.source.lengths[chosen].max())
        width = min(width for width in context.widths if width >= longest)
        rows = filled(chosen, -(-context.config.batch_size // context.processes.size), -1)
        ids_BT, targets_BT = (part.to(context.device) for part in self.source.gather(rows, width))
        num_targets = int(context.rows.num_targets[chosen].sum()) * part.counts
        weights_BT = (targets_BT >= 0) * part.counts / context.targets_per_batch
        outcome = passes(
            Physical(ids_BT, targets_BT, weights_BT, Layout(num_units=len(rows), rows_per_unit=1))
        )
        for name, parameter in passes.parameters.items():
            parameter.grad = outcome.gradients[name]
        with torch.no_grad():
            whole = context.targets_per_batch / max(1, num_targets)
            return outcome.losses.sum() * whole, num_targets

    def guarantee(self, num_steps: int, *, ended: bool = True) -> dict[str, Any]:
        return dict.fromkeys(LEDGER_KEYS) | {
            "mechanism": "none",
            "steps": num_steps,
            "standing": "measured only",
            "because": "Plain training bounds nobody's influence on the weights; only audits say what they give away.",
            "covers": [],
            "outside": [],
        }

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert not state
