"""Raw vectors to what leaves the device: normalised, put on the grid, and noised.

What is released is a float of a whole number of grid steps plus discrete noise. Everything after
the noise depends on nothing else, so it gives nothing away; everything before is bounded by
construction, whatever the extractor computes.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.vectors.grid_noise import GridNoise, on_all_cores
from tightlip.vectors.guarantees import BARE, VectorMechanism
from tightlip.vectors.vector_accounting import GRID_STEP, GRID_STEPS

# A record a hair too long is made shorter by this share until it is not.
_SHORTER = 1 - 2**-12
_AT_ONCE = 128  # vectors normalised at a time: they stay in the cache


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
        scaled_BK = _or_zero((vectors_BK / 2 - least) / spread)
        ctx.save_for_backward(scaled_BK, spread, first, last)
        return scaled_BK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        """Each entry moves itself; the least and the largest move all others too."""
        scaled_BK, spread, first, last = ctx.saved_tensors
        (grad_BK,) = grads
        by_last = (grad_BK * scaled_BK).sum(dim=1, keepdim=True)
        by_first = grad_BK.sum(dim=1, keepdim=True) - by_last
        ends, by_ends = torch.cat([first, last], dim=1), torch.cat([by_first, by_last], dim=1)
        return _or_zero(grad_BK.scatter_add(1, ends, -by_ends) / (2 * spread))


class _UnitBall(torch.autograd.Function):
    """With its gradient written out, for the same reason."""

    @staticmethod
    def forward(ctx: Any, vectors_BK: Tensor) -> Tensor:
        # By the largest entry first: squares of numbers far from 1 are lost.
        largest = torch.linalg.vector_norm(vectors_BK, math.inf, dim=1, keepdim=True)
        scaled_BK = vectors_BK / largest
        length = torch.linalg.vector_norm(scaled_BK, dim=1, keepdim=True)
        scaled_BK = _or_zero(scaled_BK / length)
        ctx.save_for_backward(scaled_BK, largest * length)
        return scaled_BK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        """What would change the length alone changes nothing."""
        scaled_BK, length = ctx.saved_tensors
        (grad_BK,) = grads
        along = (grad_BK * scaled_BK).sum(dim=1, keepdim=True)
        return _or_zero((grad_BK - scaled_BK * along) / length)


def _or_zero(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def released(vectors_NK: np.ndarray, mechanism: VectorMechanism, noise: GridNoise) -> np.ndarray:
    """What may be sent in place of raw vectors, float32; bare normalised ones without a mechanism.

    Holds:
        bounded: before noise every value is a whole number of steps within the range.
        scale: the noise has the mechanism's scale, fresh for each entry.
        finite: whatever the raw vectors hold, the result is finite.
    """
    return noised(vectors_NK, mechanism, drawn(mechanism, noise, len(vectors_NK)))


def drawn(mechanism: VectorMechanism, noise: GridNoise, num_vectors: int) -> np.ndarray:
    """Noise for so many vectors, in steps; it may be drawn before they are known, and used once.
    There is none for bare ones."""
    num_vectors = 0 if mechanism.mechanism == BARE else num_vectors
    draw = noise.gaussian if mechanism.mechanism == "gaussian" else noise.laplace
    return draw(mechanism.grid_units, (num_vectors, mechanism.dimensions))


def noised(vectors_NK: np.ndarray, mechanism: VectorMechanism, noise_NK: np.ndarray) -> np.ndarray:
    """The released floats of raw vectors and noise drawn for them, which is wiped out; bare ones
    without a mechanism."""
    if not noise_NK.flags.writeable:
        raise GuaranteeError("This noise was used before. Draw fresh noise for every release.")
    vectors_NK = _checked(vectors_NK, mechanism)
    if mechanism.mechanism == BARE:
        return unit_range(vectors_NK).astype(np.float32)
    if noise_NK.shape != vectors_NK.shape:
        raise GuaranteeError(
            f"Noise of shape {noise_NK.shape} is not for vectors of shape {vectors_NK.shape}: some would share it, or have none."
        )
    released_NK = np.empty(vectors_NK.shape, np.float32)

    def fill(start: int) -> None:
        part = slice(start, start + _AT_ONCE)
        released_NK[part] = (on_grid(vectors_NK[part], mechanism) + noise_NK[part]) * GRID_STEP

    # numpy lets go of the interpreter's lock while it works.
    on_all_cores(fill, range(0, len(vectors_NK), _AT_ONCE), few=1)
    noise_NK.fill(0)  # whoever reads this memory later must not find the noise
    noise_NK.flags.writeable = False  # nor may zeros be added in its place
    return released_NK


def on_grid(vectors_NK: np.ndarray, mechanism: VectorMechanism) -> np.ndarray:
    """Normalised vectors as whole numbers of steps: in [0, 1] for each, or of length 1 at most."""
    if mechanism.normalisation == "unit-range":
        steps_NK = np.rint(unit_range(vectors_NK) * GRID_STEPS).astype(np.int64)
        return np.clip(steps_NK, 0, GRID_STEPS)
    steps_NK = np.trunc(unit_ball(vectors_NK) * GRID_STEPS).astype(np.int64)
    while (longer := np.sum(steps_NK * steps_NK, axis=1) > GRID_STEPS**2).any():
        # A float's length can end a hair above 1. Whole numbers are compared without rounding.
        steps_NK[longer] = np.trunc(steps_NK[longer] * _SHORTER).astype(np.int64)
    return steps_NK


def _checked(vectors_NK: np.ndarray, mechanism: VectorMechanism) -> np.ndarray:
    vectors_NK = np.asarray(vectors_NK)
    if vectors_NK.ndim != 2 or vectors_NK.shape[1] != mechanism.dimensions:
        raise UsageError(
            f"Vectors of shape {vectors_NK.shape} do not fit a mechanism for {mechanism.dimensions} dimensions. "
            "Calibrate one for the extractor that made them."
        )
    return vectors_NK


def normalised(vectors_BK: Any, mechanism: VectorMechanism) -> Any:
    """The mechanism's normalisation: numpy in float64, or torch with gradients."""
    normalise = unit_ball if mechanism.normalisation == "unit-ball" else unit_range
    return normalise(vectors_BK)


def training_noise(normalised_BK: Tensor, mechanism: VectorMechanism) -> Tensor:
    """Noise of the same scale for robust training, on any device; no guarantee rests on it."""
    scale = mechanism.noise_scale
    if mechanism.mechanism == BARE:
        return torch.zeros_like(normalised_BK)
    if mechanism.mechanism == "gaussian":
        return torch.randn_like(normalised_BK) * scale
    # The difference of two exponentials is Laplace; both in one call.
    pair_2BK = torch.empty((2, *normalised_BK.shape), device=normalised_BK.device).exponential_()
    return ((pair_2BK[0] - pair_2BK[1]) * scale).to(normalised_BK.dtype)
