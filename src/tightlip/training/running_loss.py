"""The training loss of the epoch under way, and the alarm when it is no number."""

import math

import torch
from torch import Tensor

from tightlip.training.checkpoints import Progress


class RunningLoss:
    """Losses on their way into the epoch's sum, looked at some at a time."""

    def __init__(self, progress: Progress, *, together: int) -> None:
        self.progress, self._together = progress, together
        self._waiting: list[tuple[Tensor, int]] = []

    def add(self, loss: Tensor, num_targets: int) -> None:
        self._waiting.append((loss, num_targets))
        if len(self._waiting) >= self._together:
            self.look()

    def look(self) -> None:
        """Add what waits to the sum; a loss that is no number raises FloatingPointError."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        values = torch.stack([loss for loss, _ in waiting]).tolist()
        for late, (value, (_, num_targets)) in enumerate(zip(values, waiting, strict=True)):
            if not math.isfinite(value):
                step = self.progress.step - len(waiting) + late + 1
                raise FloatingPointError(f"The loss at step {step} is {value}")
            self.progress.loss_nats += value * num_targets
            self.progress.num_targets += num_targets
