"""What it costs to train several times with privacy and to keep the best.

With `mean`, a secret number of trials is drawn from the logarithmic law, each trial draws one of the
candidates, and only the best trial is ever told of: that costs little more than one trial, however
many there were (Papernot and Steinke 2022, Theorem 2 with η = 0, in Rényi divergence). Without it
each candidate is trained once, and all of them are composed.

A run may stop, or be chosen, by the mean loss of held-out text, told with noise. A unit's mean loss
a token is cut to [0, bound] and counted from the middle, so that one unit more or less moves the
sum by half the bound at most. How many units there are is told once, with the same noise. All that
is planned is charged before the first step as one Gaussian: k releases at multiplier z are one at
z/√k.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.grid_gaussian import GridGaussian
from tightlip.core.progress import log
from tightlip.privacy import accounting
from tightlip.privacy.ledger import Ledger
from tightlip.privacy.plans import noise_for_target, rounded_up_to_five
from tightlip.privacy.rdp_filter import ORDERS, epsilon_of_rdp, release_rdp, subsampled_gaussian_rdp

_MOST_MORE = 64.0  # times the noise of one trial alone
_MORE = 1 + 1e-9  # for what rounding loses


def halting_probability(mean: float) -> float:
    """γ of the logarithmic law P(K = k) = (1 − γ)^k / (k · ln(1/γ)) with this mean, above 1.

    The mean is (1/γ − 1) / ln(1/γ), which Lambert's W turns round.

    Holds:
        inverse: the law's mean is the given one.
    """
    from scipy.special import lambertw

    return float(-1 / (mean * lambertw(-math.exp(-1 / mean) / mean, -1).real))


def drawn_number(mean: float, generator: np.random.Generator) -> int:
    """K, of the logarithmic law.

    Holds:
        law: each number comes as often as the law has it.
    """
    return int(generator.logseries(1 - halting_probability(mean)))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The candidates, each so many steps of a mechanism with releases of its own; `mean` trials, or
    each once where it is None; and what was told of the corpus before, once for all.

    Holds:
        theirs: with one candidate it is dp-accounting's figure for repeating and selecting.
        widest: a candidate more never costs less.
    """

    candidates: tuple[tuple[accounting.Mechanism, int], ...]
    mean: float | None
    before: tuple[accounting.Release, ...]
    delta: float

    @property
    def accountant(self) -> str:
        if self.mean is None:
            return f"{accounting.accountant_at(self.delta)} of all candidates"
        return "RDP of the best of a random number of trials"

    def epsilon(self, coarser: float = 1.0) -> float:
        """ε of the one that is kept."""
        left = accounting.delta_left((*self.before, *self._own), self.delta)
        if self.mean is None:
            releases = (*self.before, *self._own)
            return accounting.epsilon_of(
                accounting.Spend(self.candidates, releases, left), "pld", coarser
            )
        divergences = {order: self._divergence(order) for order in ORDERS}
        log_halting = math.log(halting_probability(self.mean))
        more = min((1 - 1 / order) * d - log_halting / order for order, d in divergences.items())
        return min(
            epsilon_of_rdp(
                (d + more + math.log(self.mean) / (order - 1) + release_rdp(self.before, order))
                * _MORE,
                order,
                left,
            )
            for order, d in divergences.items()
        )

    def composed(self) -> float:
        """ε of training each candidate once."""
        return replace(self, mean=None).epsilon()

    def calibrated(self, epsilon: float) -> "Selection":
        """The same with as little noise as keeps within `epsilon`: for each candidate as many times
        what it would need alone.

        Holds:
            kept: ε of the result is at most `epsilon`.
        """
        alike = [(replace(m, noise_multiplier=1.0), n) for m, n in self.candidates]
        alone = {
            (each, steps): noise_for_target(
                replace(each, releases=(*self.before, *each.releases)), epsilon, self.delta, steps
            )
            for each, steps in {*alike}
        }

        def times(factor: float) -> "Selection":
            noise = [alone[each] for each in alike]
            return self.with_noise([rounded_up_to_five(factor * each) for each in noise])

        little, enough = 1.0, 1.0
        while times(enough).epsilon(accounting.COARSER) > epsilon:
            if enough >= _MOST_MORE:
                raise UsageError(
                    f"No noise keeps a choice among these trials within epsilon={epsilon:g}. Use a larger epsilon, a smaller "
                    "mean, or more noise in what else is told."
                )
            little, enough = enough, 2 * enough
        while enough > 1.001 * little:
            middle = (little + enough) / 2
            if times(middle).epsilon(accounting.COARSER) <= epsilon:
                enough = middle
            else:
                little = middle
        return times(enough)

    def with_noise(self, noise: list[float]) -> "Selection":
        pairs = zip(self.candidates, noise, strict=True)
        made = [(replace(each, noise_multiplier=sigma), steps) for (each, steps), sigma in pairs]
        return replace(self, candidates=tuple(made))

    def with_more_steps(self, more: int) -> "Selection":
        """Every candidate with the steps that a killed trial had to repeat."""
        repeated = tuple((each, steps + more) for each, steps in self.candidates)
        return replace(self, candidates=repeated)

    @property
    def _own(self) -> tuple[accounting.Release, ...]:
        """What the candidates tell by themselves; a random trial has its own inside its divergence."""
        told = [each.releases for each, _ in self.candidates] if self.mean is None else []
        return tuple(release for releases in told for release in releases)

    def _divergence(self, order: int) -> float:
        """Of one trial: whichever candidate it draws, no more than the costliest."""
        return max(
            steps * subsampled_gaussian_rdp(order, each.noise_multiplier, each.sampling_rate)
            + release_rdp(each.releases, order)
            for each, steps in self.candidates
        )

    def record(self) -> dict[str, Any]:
        """As a ledger has it."""
        return {
            "mean": self.mean,
            "candidates": [
                {
                    "noise_multiplier": each.noise_multiplier,
                    "sampling_rate": each.sampling_rate,
                    "releases": [release.record() for release in each.releases],
                    "steps": steps,
                }
                for each, steps in self.candidates
            ],
        }

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Selection":
        made = record["selection"]
        return cls(
            candidates=tuple(
                (accounting.Mechanism.of_record(e), e["steps"]) for e in made["candidates"]
            ),
            mean=made["mean"],
            before=tuple(accounting.Release(**each) for each in record["releases"]),
            delta=record["delta"],
        )


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

    def release(self) -> accounting.Release:
        """All of it together, the number of units included."""
        return accounting.Release(
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
