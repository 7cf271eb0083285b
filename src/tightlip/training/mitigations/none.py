"""Plain training: nothing is done against leakage, and nothing is promised."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightlip.privacy.layers import Layout
from tightlip.privacy.passes import Passes, Physical
from tightlip.training.batches import Rows, TokenRows, epoch_order
from tightlip.training.config import TrainConfig
from tightlip.training.losses import is_recurrent
from tightlip.training.mitigations import CorpusFacts, Setting
from tightlip.training.plan import clip_gradients


class NoMitigation:
    """Gradient descent on the loss of shuffled batches, each weighted by its share of targets.

    Rows of like length share a batch, so batches differ in targets; unweighted, a token in a
    batch of short rows would count many times over. It cost 8 epochs 317 against 280 in
    validation perplexity, and the weights bring that back.
    """

    losses_are_private = False
    setting: Setting

    def __init__(self) -> None:
        self._epoch: tuple[int, Sequence[np.ndarray]] = (-1, ())

    def check(self, config: TrainConfig, corpus: CorpusFacts) -> None: ...

    def steps_per_epoch(self, rows: Rows, config: TrainConfig) -> int:
        return -(-len(rows) // config.batch_size)

    def prepare(self, setting: Setting) -> None:
        self.setting = setting
        self.source = TokenRows(setting.rows, np.arange(len(setting.rows)))
        self.passes: Passes | None = None
        if setting.device.type == "cuda" and is_recurrent(setting.model):
            # Our own recurrent layers in a CUDA graph: half of cuDNN's time.
            self.passes = Passes(setting.model, None, way="graph", bf16=setting.options.bf16)

    def step(self, number: int) -> tuple[Tensor, int]:
        setting, chosen = self.setting, self._chosen(number)
        if self.passes is not None:
            loss, num_targets = self._captured_gradients(self.passes, chosen)
        else:
            batch = setting.batch(chosen)
            setting.optimizer.zero_grad(set_to_none=True)
            loss, num_targets = setting.forward.mean_loss(batch), batch.num_targets
            (loss * (num_targets / setting.targets_per_batch)).backward()
        clip_gradients(setting.model, setting.config.gradient_clip)
        setting.optimizer.step()
        return loss.detach(), num_targets

    def _chosen(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.setting.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        return self._epoch[1][place]

    def _order(self, epoch: int) -> Sequence[np.ndarray]:
        config = self.setting.config
        return epoch_order(
            self.setting.rows, batch_size=config.batch_size, seed=config.seed, epoch=epoch
        )

    def _captured_gradients(self, passes: Passes, chosen: np.ndarray) -> tuple[Tensor, int]:
        setting = self.setting
        longest = int(self.source.lengths[chosen].max())
        width = min(width for width in setting.widths if width >= longest)
        rows = np.full(setting.config.batch_size, -1)
        rows[: len(chosen)] = chosen
        ids_BT, targets_BT = (part.to(setting.device) for part in self.source.gather(rows, width))
        num_targets = int(setting.rows.num_targets[chosen].sum())
        weights_BT = (targets_BT >= 0) / setting.targets_per_batch
        found = passes(
            Physical(ids_BT, targets_BT, weights_BT, Layout(num_units=len(rows), rows_per_unit=1))
        )
        for name, parameter in passes.parameters.items():
            parameter.grad = found.gradients[name]
        with torch.no_grad():
            return found.losses.sum() * (setting.targets_per_batch / num_targets), num_targets

    def may_go_on(self) -> bool:
        return True

    def settle(self) -> None: ...

    def said(self) -> str:
        return ""

    def guarantee(self, num_steps: int, *, ended: bool = True) -> dict[str, Any]:
        return {
            "mechanism": "none",
            "epsilon": None,
            "delta": None,
            "unit": None,
            "adjacency": None,
            "sampling": None,
            "accountant": None,
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
