"""Vectors brought into a fixed range, so that noise of a fixed scale hides any of them.

Each record is normalised by itself: its least and largest value, or its length, are used and never
released. What cannot be normalised becomes a fixed vector, all zeros.
"""

import math
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
        return _UnitRange.apply(vectors_BK)
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
        return _UnitBall.apply(vectors_BK)
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


class _UnitRange(torch.autograd.Function):
    """With its gradient written out: left to torch it is several times as many small operations,
    each of which takes a GPU as long as a large one. What cannot be normalised ends in 0/0."""

    @staticmethod
    def forward(ctx: Any, vectors_BK: Tensor) -> Tensor:
        least, first = vectors_BK.min(dim=1, keepdim=True)
        largest, last = vectors_BK.max(dim=1, keepdim=True)
        # Halves, so that the difference of two very large numbers is one too.
        least = least / 2
        spread = largest / 2 - least
        found_BK = _or_zero((vectors_BK / 2 - least) / spread)
        ctx.save_for_backward(found_BK, spread, first, last)
        return found_BK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        """Each entry moves itself; the least and the largest move all others too."""
        found_BK, spread, first, last = ctx.saved_tensors
        (grad_BK,) = grads
        by_last = (grad_BK * found_BK).sum(dim=1, keepdim=True)
        by_first = grad_BK.sum(dim=1, keepdim=True) - by_last
        ends, by_ends = torch.cat([first, last], dim=1), torch.cat([by_first, by_last], dim=1)
        return _or_zero(grad_BK.scatter_add(1, ends, -by_ends) / (2 * spread))


class _UnitBall(torch.autograd.Function):
    """With its gradient written out, for the same reason."""

    @staticmethod
    def forward(ctx: Any, vectors_BK: Tensor) -> Tensor:
        # By the largest entry first: squares of numbers far from 1 are lost.
        largest = torch.linalg.vector_norm(vectors_BK, math.inf, dim=1, keepdim=True)
        found_BK = vectors_BK / largest
        length = torch.linalg.vector_norm(found_BK, dim=1, keepdim=True)
        found_BK = _or_zero(found_BK / length)
        ctx.save_for_backward(found_BK, largest * length)
        return found_BK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        """What would change the length alone changes nothing."""
        found_BK, length = ctx.saved_tensors
        (grad_BK,) = grads
        along = (grad_BK * found_BK).sum(dim=1, keepdim=True)
        return _or_zero((grad_BK - found_BK * along) / length)


def _or_zero(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
