"""A budget that steps may spend as earlier results tell: Rényi divergence at one fixed order.

Where the noise of a step depends on what earlier steps released, ε of the steps that happened is
not the run's ε: which steps happened depends on the data. A filter is sound all the same. Its
order and budget are fixed before training; a step is taken only if the sum with it stays within
the budget; the whole run is then (order, budget)-RDP (Feldman and Zrnic 2021; Lécuyer 2021). So
what the run promises is the budget, spent or not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy.accounting import Mechanism, Release, delta_left

ORDERS = (*range(2, 65), *range(68, 129, 4), *range(136, 257, 8), 320, 384, 512)
# Sums of costs are rounded: each is charged this much more, far beyond what a sum can lose.
_MORE = 1 + 1e-9


def subsampled_gaussian_rdp(order: int, noise_multiplier: float, sampling_rate: float) -> float:
    """Rényi divergence of one Poisson-subsampled Gaussian step, add or remove one unit.

    For a whole order α it is exact (Mironov, Talwar and Zhang 2019):
    ln(Σ_k C(α, k) (1 − q)^(α−k) q^k e^((k²−k)/2σ²)) / (α − 1). The weights of the sum add up to 1,
    which is taken off first: of a small q next to nothing is left above 1.

    Holds:
        exact: equals dp-accounting's figure.
        monotone: less noise or a higher rate never costs less.
    """
    if not 0 < noise_multiplier < math.inf:
        return math.inf if noise_multiplier == 0 else 0.0
    if sampling_rate == 1:
        return order / (2 * noise_multiplier**2)
    k, log_shares = _log_shares(order, sampling_rate)
    grown = (k * k - k) / (2 * noise_multiplier**2)
    logs = log_shares + grown + np.log(-np.expm1(-grown))  # ln of share · (e^grown − 1)
    most = float(logs.max())
    total = most + math.log(float(np.exp(logs - most).sum()))
    return float(np.logaddexp(0.0, total)) / (order - 1)


@lru_cache(maxsize=128)
def _log_shares(order: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """k from 2 on, and the logarithm of each one's chance: how many of α draws hold the unit."""
    k = np.arange(2, order + 1, dtype=np.float64)
    logs = [
        math.lgamma(order + 1) - math.lgamma(each + 1) - math.lgamma(order - each + 1) for each in k
    ]
    return k, np.array(logs) + (order - k) * math.log1p(-rate) + k * math.log(rate)


def epsilon_of_rdp(rdp: float, order: int, delta: float) -> float:
    """ε at δ of what is (order, rdp)-RDP (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    if math.isinf(rdp):
        return math.inf
    return max(0.0, rdp + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def rdp_within(epsilon: float, order: int, delta: float) -> float:
    """The divergence that is just within (ε, δ) at this order; 0 or less where none is.

    Holds:
        inverse: `epsilon_of_rdp` of the result is `epsilon`, wherever the result is above 0.
    """
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def release_rdp(releases: Sequence[Release], order: int) -> float:
    """What was told of everybody before training: Gaussians without sampling."""
    return sum(subsampled_gaussian_rdp(order, each.noise_multiplier, 1.0) for each in releases)


def best_order(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_rate: float,
    releases: Sequence[Release] = (),
) -> tuple[int, float]:
    """The order at which most steps of this noise fit into (ε, δ), and how many do.

    `delta` is what the releases leave of it. All of it is public and known before training.
    """
    fitting = {}
    for order in ORDERS:
        room = _room(epsilon, delta, order, releases)
        cost = subsampled_gaussian_rdp(order, noise_multiplier, sampling_rate) * _MORE
        fitting[order] = room / cost if room > 0 and 0 < cost < math.inf else 0.0
    best = max(fitting, key=lambda order: fitting[order])
    return best, fitting[best]


class RdpMeter:
    """An upper bound on ε at any step, cheap and looser than PLD: all orders, the best of them."""

    def __init__(self, mechanism: Mechanism, delta: float) -> None:
        self.mechanism, self.delta = mechanism, delta
        self._left = delta_left(mechanism.releases, delta)
        sigma, rate = mechanism.noise_multiplier, mechanism.sampling_rate
        self._costs = [
            (
                order,
                subsampled_gaussian_rdp(order, sigma, rate),
                release_rdp(mechanism.releases, order),
            )
            for order in ORDERS
        ]

    def upper(self, steps: int) -> float:
        if not steps and not self.mechanism.releases:
            return 0.0
        return min(
            epsilon_of_rdp(steps * cost + before, order, self._left)
            for order, cost, before in self._costs
        )


@dataclass
class RdpFilter:
    """What may be spent at one order, and what is.

    Holds:
        within: `spent` never passes `budget`, whatever is asked for.
        kept: what is charged stays charged.
    """

    order: int
    budget: float
    sampling_rate: float
    spent: float = 0.0
    _known: tuple[float, float] = field(default=(math.nan, math.nan), repr=False)

    def cost(self, noise_multiplier: float) -> float:
        """What a step of this noise is charged."""
        if self._known[0] != noise_multiplier:
            cost = subsampled_gaussian_rdp(self.order, noise_multiplier, self.sampling_rate)
            self._known = (noise_multiplier, cost * _MORE)
        return self._known[1]

    def fits(self, noise_multiplier: float) -> bool:
        return self.spent + self.cost(noise_multiplier) <= self.budget

    def charge(self, noise_multiplier: float) -> None:
        """Spend one step, or refuse it."""
        if not self.fits(noise_multiplier):
            raise GuaranteeError(
                f"A step of noise multiplier {noise_multiplier:g} would pass the budget of {self.budget:g} at order "
                f"{self.order}: {self.spent:g} is spent. Stop here, or begin a new run with more noise."
            )
        self.spent += self.cost(noise_multiplier)


def filter_for(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_rate: float,
    releases: Sequence[Release] = (),
    least_noise: float | None = None,
    steps: int = 1,
) -> RdpFilter:
    """The filter of a run that must end within (ε, δ), or a refusal where not one step fits.

    Its order is the one at which `steps` steps fit down to the least noise, between the full one and
    `least_noise`. An order that is best at full noise is a bad one for less: of σ = 1 at ε = 3 and
    q = 0.01 it let 8 steps through at 0.8 of the noise, where another lets 507.
    """
    best = partial(
        best_order, epsilon=epsilon, delta=delta, sampling_rate=sampling_rate, releases=releases
    )
    order, fitting = best(noise_multiplier=noise_multiplier)
    if fitting < 1:
        raise UsageError(
            f"Noise of {noise_multiplier:.3g}, release included, spends more than epsilon={epsilon:g} in its first step. "
            f"Use more noise or a larger epsilon."
        )
    low = noise_multiplier if least_noise is None else least_noise
    noise, high = low, noise_multiplier
    while fitting >= steps and high / low > 1.001:
        its_order, most = best(noise_multiplier=noise)
        if most >= steps:
            order, high = its_order, noise
        else:
            low = noise
        noise = math.sqrt(low * high)
    budget = _room(epsilon, delta, order, releases)
    return RdpFilter(order=order, budget=budget, sampling_rate=sampling_rate)


def _room(epsilon: float, delta: float, order: int, releases: Sequence[Release]) -> float:
    """What is left to the steps, rounded down to nine figures: the last bits of a logarithm are
    the machine's own, and a run may go on elsewhere."""
    room = rdp_within(epsilon, order, delta) - release_rdp(releases, order)
    return float(f"{room * (1 - 1e-8):.8e}") if room > 0 else 0.0
