"""Vectors brought into a fixed range, so that noise of a fixed scale hides any of them.

Each record is normalised by itself: its least and largest value, or its length, are used and never
released. What cannot be normalised becomes a fixed vector, all zeros.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def unit_range(vectors_BK: Any) -> Any:
    """Each record's least value at 0 and its largest at 1; numpy in float64, or torch with gradients.

    Holds:
        bounded: every entry lies in [0, 1].
        fixed: a constant or non-finite record becomes zeros.
        agree: numpy and torch give the same up to rounding.
    """
    if isinstance(vectors_BK, Tensor):
        return _torch_unit_range(vectors_BK)
    values, usable = _usable(vectors_BK)
    least = values.min(axis=1, keepdims=True)
    spread = values.max(axis=1, keepdims=True) - least
    usable = usable & (spread > 0)
    scaled = (values - least) / np.where(usable, spread, 1)
    return np.where(usable, np.clip(scaled, 0, 1), 0)


def unit_ball(vectors_BK: Any) -> Any:
    """Each record at length 1; numpy in float64, or torch with gradients.

    Holds:
        bounded: no record is longer than 1, up to rounding.
        fixed: a record of zeros or with a non-finite entry becomes zeros.
        agree: numpy and torch give the same up to rounding.
    """
    if isinstance(vectors_BK, Tensor):
        return _torch_unit_ball(vectors_BK)
    values, usable = _usable(vectors_BK)
    # By the largest entry first: squares of numbers far from 1 are lost.
    largest = np.abs(values).max(axis=1, keepdims=True)
    usable = usable & (largest > 0)
    values = values / np.where(usable, largest, 1)
    length = np.sqrt(np.sum(values * values, axis=1, keepdims=True))
    return np.where(usable, values / np.where(usable, length, 1), 0)


def _usable(vectors_BK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The records in float64, zeros where one is not finite, and which are finite."""
    values = np.asarray(vectors_BK, np.float64)
    finite = np.asarray(np.isfinite(values).all(axis=1, keepdims=True))
    return np.where(finite, values, 0), finite


def _torch_usable(vectors_BK: Tensor) -> tuple[Tensor, Tensor]:
    finite = torch.isfinite(vectors_BK).all(dim=1, keepdim=True)
    return torch.where(finite, vectors_BK, 0), finite


def _torch_unit_range(vectors_BK: Tensor) -> Tensor:
    values, usable = _torch_usable(vectors_BK)
    least, largest = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
    # Halves, so that the difference of two very large numbers is one too.
    spread = largest / 2 - least / 2
    usable = usable & (spread > 0)
    scaled = (values / 2 - least / 2) / torch.where(usable, spread, 1)
    return torch.where(usable, scaled.clamp(0, 1), 0)


def _torch_unit_ball(vectors_BK: Tensor) -> Tensor:
    values, usable = _torch_usable(vectors_BK)
    largest = values.detach().abs().amax(dim=1, keepdim=True)
    usable = usable & (largest > 0)
    values = values / torch.where(usable, largest, 1)
    length = torch.where(usable, values, 1).square().sum(dim=1, keepdim=True).sqrt()
    return torch.where(usable, values / length, 0)
