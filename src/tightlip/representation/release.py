"""Raw vectors to what leaves the device: normalised, put on the grid, and noised.

What is released is a float of a whole number of grid steps plus discrete noise. Everything after
the noise depends on nothing else, so it gives nothing away; everything before is bounded by
construction, whatever the extractor computes.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.representation.grid_noise import GridNoise
from tightlip.representation.guarantees import BARE, VectorMechanism
from tightlip.representation.normalise import unit_ball, unit_range
from tightlip.representation.vector_accounting import GRID_STEP, GRID_STEPS

# A record a hair too long is made shorter by this share until it is not.
_SHORTER = 1 - 2**-12
_AT_ONCE = 128  # vectors normalised at a time: they stay in the cache


def released(vectors_NK: np.ndarray, mechanism: VectorMechanism, noise: GridNoise) -> np.ndarray:
    """What may be sent in place of raw vectors, float32; bare normalised ones without a mechanism.

    Holds:
        bounded: before noise every value is a whole number of steps within the range.
        scale: the noise has the mechanism's scale, fresh for each entry.
        finite: whatever the raw vectors hold, the result is finite.
    """
    vectors_NK = _checked(vectors_NK, mechanism)
    if mechanism.mechanism == BARE:
        return unit_range(vectors_NK).astype(np.float32)
    return noised(vectors_NK, mechanism, drawn(mechanism, noise, len(vectors_NK)))


def drawn(mechanism: VectorMechanism, noise: GridNoise, num_vectors: int) -> np.ndarray:
    """Noise for so many vectors, in steps; it may be drawn before they are known, and used once."""
    draw = noise.gaussian if mechanism.mechanism == "gaussian" else noise.laplace
    return draw(mechanism.grid_units, (num_vectors, mechanism.dimensions))


def noised(vectors_NK: np.ndarray, mechanism: VectorMechanism, noise_NK: np.ndarray) -> np.ndarray:
    """The released floats of raw vectors and noise drawn for them, which is wiped out."""
    if not noise_NK.flags.writeable:
        raise GuaranteeError("This noise was used before. Draw fresh noise for every release.")
    vectors_NK = _checked(vectors_NK, mechanism)
    if noise_NK.shape != vectors_NK.shape:
        raise GuaranteeError(
            f"Noise of shape {noise_NK.shape} is not for vectors of shape {vectors_NK.shape}: some would share it, or have none."
        )
    found_NK = np.empty(vectors_NK.shape, np.float32)

    def fill(start: int) -> None:
        part = slice(start, start + _AT_ONCE)
        steps = on_grid(vectors_NK[part], mechanism) + noise_NK[part]
        found_NK[part] = steps * GRID_STEP

    _on_all_cores(fill, range(0, len(vectors_NK), _AT_ONCE))
    noise_NK.fill(0)  # whoever reads this memory later must not find the noise
    noise_NK.flags.writeable = False  # nor may zeros be added in its place
    return found_NK


def _on_all_cores(action: Callable[[int], None], starts: Sequence[int]) -> None:
    if len(starts) <= 1:
        for start in starts:
            action(start)
        return
    # numpy lets go of the interpreter's lock while it works.
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:
        list(pool.map(action, starts))


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


def normalised(vectors_BK: Tensor, mechanism: VectorMechanism) -> Tensor:
    """The same normalisation inside training, with gradients."""
    if mechanism.normalisation == "unit-ball":
        return unit_ball(vectors_BK)
    return unit_range(vectors_BK)


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
