"""What the two privacy regularisers share: plain training plus λ times a term on last states.

The last state h_x of a row x is the hidden state at its last input, the one that predicts its
last token. Shapes: B rows, H hidden units.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightlip.core.errors import UsageError
from tightlip.training.batches import Rows, user_order
from tightlip.training.config import TrainConfig
from tightlip.training.mitigations import Setting
from tightlip.training.mitigations.none import NoMitigation
from tightlip.training.optimizers import clip_gradients


class Regulariser(NoMitigation, ABC):
    """Plain training whose loss has a term more: L = L_CE + λ · L_P.

    As each batch's loss counts by its share of targets, its term counts by its share of rows.

    Holds:
        untouched: with λ = 0 and uniform batches, the weights of plain training bit for bit.
    """

    name: str
    authors: np.ndarray  # of each row, counted from 0 without gaps
    num_authors: int
    # Sums over the epoch under way, kept where the model is so that no step waits for them.
    tallied: tuple[str, ...]
    sums: Tensor

    def steps_per_epoch(self, rows: Rows, config: TrainConfig) -> int:
        if config.batching == "uniform":
            return super().steps_per_epoch(rows, config)
        rows_of_user = np.unique(rows.users, return_counts=True)[1]
        return int((-(-rows_of_user // config.batch_size)).sum())

    def prepare(self, setting: Setting) -> None:
        self.setting = setting
        users, self.authors = np.unique(setting.rows.users, return_inverse=True)
        self.num_authors = len(users)
        if self.num_authors < 2:
            raise UsageError(
                f"mitigation={self.name!r} hides who of several people wrote a text, and all {len(setting.rows)} rows "
                f"have one author. Use a corpus of at least two users, or leave the mitigation out."
            )
        self.sums = torch.zeros(len(self.tallied), dtype=torch.float64, device=setting.device)

    def step(self, number: int) -> tuple[Tensor, int]:
        setting, chosen = self.setting, self._chosen(number)
        batch = setting.batch(chosen)
        setting.optimizer.zero_grad(set_to_none=True)
        loss, last_BH = setting.forward.mean_loss_and_last(batch)
        whole = loss * (batch.num_targets / setting.targets_per_batch)
        weight = self.weight(number)
        term = self.term(number, chosen, last_BH, weight)
        if term is not None:
            rows_per_batch = len(setting.rows) / setting.steps_per_epoch
            whole = whole + term * (weight * len(chosen) / rows_per_batch)
        whole.backward()
        clip_gradients(setting.model, setting.config.gradient_clip)
        setting.optimizer.step()
        self._tell_if_due(number)
        return loss.detach(), batch.num_targets

    def weight(self, number: int) -> float:
        """λ at a step: it rises in a line to its full size over the warm-up."""
        config = self.setting.config
        risen = min(1.0, number / config.privacy_warmup_steps) if config.privacy_warmup_steps else 1
        return config.privacy_weight * risen

    @abstractmethod
    def term(
        self, number: int, chosen: np.ndarray, last_BH: Tensor, weight: float
    ) -> Tensor | None:
        """L_P of a batch as a mean over its rows; None where the weight is 0."""

    @abstractmethod
    def tell(self, epoch: int, sums: dict[str, float]) -> None:
        """Log what an epoch's sums say."""

    def tally(self, **values: Tensor | float) -> None:
        """Add to the epoch's sums, under the names in `tallied`."""
        row = [torch.as_tensor(values[name], dtype=torch.float64) for name in self.tallied]
        self.sums += torch.stack([value.to(self.sums.device) for value in row])

    def _tell_if_due(self, number: int) -> None:
        done, steps_per_epoch = number + 1, self.setting.steps_per_epoch
        if done % steps_per_epoch == 0 or done == self.setting.num_steps:
            sums = dict(zip(self.tallied, self.sums.tolist(), strict=True))
            self.tell(-(-done // steps_per_epoch), sums)
            self.sums.zero_()

    def _order(self, epoch: int) -> Sequence[np.ndarray]:
        config = self.setting.config
        if config.batching == "uniform":
            return super()._order(epoch)
        return user_order(
            self.setting.rows, batch_size=config.batch_size, seed=config.seed, epoch=epoch
        )

    def guarantee(self, num_steps: int) -> dict[str, Any]:
        return super().guarantee(num_steps) | {
            "mechanism": f"{self.name} regulariser",
            "because": "A privacy regulariser steers the weights away from telling authors apart but bounds nobody's "
            "influence on them; only audits say what they give away.",
        }

    def state_dict(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.sums.copy_(state["sums"])
