"""Gaussian noise added to gradients, on the CPU or on a GPU, from a key nobody knows."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tightlip.core.randomness import NoiseSource


class Noise(Protocol):
    """Adds fresh noise to tensors in place."""

    def add(self, tensors: list[Tensor], *, scale: float, share: float) -> None:
        """Every entry becomes (entry + scale · N(0, 1)) · share."""


class CPUNoise:
    """Noise drawn by numpy on as many threads as torch uses."""

    def __init__(self, insecure_seed: int | None = None) -> None:
        self._source = NoiseSource(insecure_seed, num_threads=torch.get_num_threads())
        self._room = np.empty(0, np.float32)

    def add(self, tensors: list[Tensor], *, scale: float, share: float) -> None:
        total = sum(tensor.numel() for tensor in tensors)
        if len(self._room) != total:
            self._room = np.empty(total, np.float32)
        self._source.fill(self._room)
        parts = torch.from_numpy(self._room).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.add_(part.view(tensor.shape), alpha=scale).mul_(share)
        self._room.fill(0)  # whoever reads this memory later must not find the noise


def noise_for(device: torch.device, insecure_seed: int | None) -> Noise:
    """The noise for gradients on `device`."""
    if device.type != "cuda":
        return CPUNoise(insecure_seed)
    from tightlip.privacy.kernels import GPUNoise

    return GPUNoise(device, insecure_seed=insecure_seed)
