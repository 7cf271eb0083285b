"""The mean loss of held-out text, told with noise, so that a private run may stop or be chosen by it.

A unit's mean loss a token is cut to [0, bound] and counted from the middle, so that one unit more
or less moves the sum by half the bound at most. How many units there are is told once, with the
same noise. All that is planned is charged before the first step as one Gaussian: k releases at
multiplier z are one at z/√k.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tightlip.core.grid_gaussian import GridGaussian
from tightlip.core.progress import log
from tightlip.privacy.accounting import Release
from tightlip.privacy.ledger import Ledger

_STEPS = 2.0**30  # that a unit's share of the sum is told in


@dataclass(frozen=True, kw_only=True)
class NoisyLoss:
    """What is told of the held-out text of all units, so many times and no more.

    Holds:
        bounded: one unit more or less moves the sum by at most 1, and the number of units by 1.
        charged: no more is told than was planned, whatever was killed and repeated.
        kept: what was told of the weights as they are is told again, not drawn again.
    """

    noise_multiplier: float
    num_planned: int

    def release(self) -> Release:
        """All of it together, the number of units included."""
        return Release(
            name="noisy validation",
            noise_multiplier=self.noise_multiplier / math.sqrt(self.num_planned + 1),
            delta=0.0,
            note=f"the mean held-out loss, {self.num_planned} times, each with noise of {self.noise_multiplier:g}",
            own=True,
        )

    def told(
        self,
        ledger: Ledger,
        losses: Callable[[], np.ndarray],
        *,
        bound: float,
        insecure_seed: int | None = None,
    ) -> float | None:
        """The mean loss in nats for the steps that are charged; None where all that was planned
        is told. `losses` has one of each unit, and is asked where a new figure is due."""
        before = ledger.told.get("losses", [])
        for steps, nats in before:
            if steps == ledger.steps:
                return float(nats)
        if len(before) >= self.num_planned:
            log.warning("All %d planned validation losses are told.", self.num_planned)
            return None
        # A seed of its own for each, or a known one would give all of them the same noise.
        seed = None if insecure_seed is None else insecure_seed + 2 + len(before)
        total, count = self._noisy(reach(losses(), bound), GridGaussian(seed))
        count = ledger.told.get("num_units", count)
        middle = bound / 2
        nats = min(max(middle + total * middle / max(1.0, count), 0.0), bound)
        ledger.told = {"num_units": count, "losses": [*before, [ledger.steps, nats]]}
        ledger.rewrite()  # before anybody sees it: what is not on record was never told
        ledger.settle()
        return nats

    def _noisy(self, reach_U: np.ndarray, noise: GridGaussian) -> tuple[float, float]:
        """The sum of the units' shares, and how many units there are."""
        # In whole steps, so that one unit moves the sum by its own share and no last bit besides.
        total = float((reach_U * _STEPS).astype(np.int64).sum()) / _STEPS
        sums = np.array([total, float(len(reach_U))])
        noise.add([sums], scale=self.noise_multiplier)
        return float(sums[0]), float(sums[1])


def reach(losses_U: np.ndarray, bound: float) -> np.ndarray:
    """Each unit's loss between -1 (none) and 1 (the bound or more); one that is no number is 1.

    >>> reach(np.array([0.0, 3.0, 9.0, math.nan]), 4.0)
    array([-1. ,  0.5,  1. ,  1. ])
    """
    return np.clip(np.nan_to_num(losses_U, nan=bound) / (bound / 2) - 1, -1.0, 1.0)
