"""Randomness as a function of the seed and the step, and of nothing else in the process."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch for the run and leave its generators, and its precision, as they were."""
    devices = [device] if device.type == "cuda" else []
    precision = torch.get_float32_matmul_precision()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        # As torch's LSTM does on its own; twice as fast, and training does not notice.
        torch.set_float32_matmul_precision("high" if devices else precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


def seed_step(seed: int, step: int) -> None:
    """Make a step's dropout a function of seed and step, so that no state need be kept."""
    torch.manual_seed(
        int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0]) >> 1
    )
