"""A moving average of the weights: what a run leaves, while the weights themselves train on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class AveragedWeights:
    """An exponential average of all that is trained; one more copy of it in memory.

    Not a mean over the last steps of the plan: a snapshot inside a run, and a private run that its
    budget ends, would have none. Early on the average forgets faster, as though every step were
    among ten (De et al. 2022, from TensorFlow's): otherwise random weights would stay in it.

    Under DP it follows from what was released, and so costs nothing. Without a decay it is empty, and
    the model itself is what is left.

    Holds:
        closed_form: after t steps it is the weighted sum of t + 1 weights that the decays give.
        given_back: inside `in_place` the model is the average, and afterwards to the bit itself.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.decay = decay
        trained = [each for each in model.parameters() if each.requires_grad]
        self.weights = trained if decay is not None else []
        self.average = [each.detach().clone() for each in self.weights]

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Take up the weights after `step` steps, counted from 1."""
        if self.decay is not None:
            decay = min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.average, self.weights, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # Where they lie: captured passes read the same memory each time.
        for weight, average in zip(self.weights, self.average, strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

    def state_dict(self) -> dict[str, Tensor]:
        return {str(number): each for number, each in enumerate(self.average)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, each in self.state_dict().items():
            each.copy_(state[name])
