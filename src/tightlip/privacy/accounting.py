"""What a run spends: ε of Poisson-subsampled Gaussian noise, composed over its steps.

The figure we stand by is that of dp-accounting's privacy loss distributions (PLD). They are
discretised pessimistically ("connect the dots", Doroshenko et al. 2022), so it is an upper
bound at every interval, and a coarse interval only costs tightness. RDP stands beside it. The
central limit of Gaussian differential privacy understates, and serves as what papers published
and as the place where a search begins.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tightlip.core.errors import UsageError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

# "published" is the ε that papers print: the Gaussian-DP central limit. It can understate; never
# promise it.
Accountant = Literal["pld", "rdp", "published"]

# 1e-4 is dp-accounting's own interval, 1e-3 the coarsest that we take to save time.
INTERVAL, COARSEST = 1e-4, 1e-3
# A step whose loss varies by less than the interval is rounded up to it each time (q = 1e-4,
# σ = 1, 1e5 steps: 0.165 at 1e-4, 0.157 at 1e-5). An eighth of the deviation costs 0.1% of ε.
_INTERVALS_PER_DEVIATION = 8
# Points of one step's distribution: as many take 0.05 s, and as many at the very most 0.3 s.
_ENOUGH_POINTS, _MOST_POINTS_OF_A_STEP = 30_000, 200_000
# Where an owner may be drawn several times, each point is searched for: as many take 0.1 s of a few
# draws.
_ENOUGH_POINTS_OF_SEVERAL, _COARSEST_OF_SEVERAL = 10_000, 1e-2
_MOST_POINTS = 4_000_000  # of the composed distribution
# Searches and meters first look at intervals this much coarser, which cost a tenth.
COARSER, _COARSEST_OF_A_STEP = 10.0, 3.0
# dp-accounting cuts the noise's tails at e^-50, 9.7 standard deviations out.
_TAIL = 10.0
# The mass it cuts off counts as lost: about 1e-15 in all, so that PLD is loose from δ = 1e-14 on and
# infinite from 1e-15 on, where RDP still says something.
_SMALL_DELTA = 1e-10
MOST_DOCUMENTS_PER_OWNER = 64
# The neighbours of a run on texts of several owners, as its ledger says it.
OWNED = "none of one owner's texts contributes anything; who owns what is fixed and public"


class _Sampled(NamedTuple):
    """A step that sampling amplifies: one person is drawn up to `most` times, each by its own coin."""

    sigma: float
    rate: float
    most: int = 1

    def law(self) -> list[float]:
        """How likely 0, 1, … of the person's documents are drawn."""
        q, most = self.rate, self.most
        return [math.comb(most, n) * q**n * (1 - q) ** (most - n) for n in range(most + 1)]


@dataclass(frozen=True, kw_only=True)
class Release:
    """Something else told about the same data: Gaussian noise, once, and a δ of its own.

    What a run told by its `own` counts for each run; the rest was told of the corpus they share.
    """

    name: str
    noise_multiplier: float
    delta: float
    note: str
    own: bool = False

    def record(self) -> dict[str, Any]:
        """As a ledger has it; those of earlier versions do not say whose it is."""
        return {name: value for name, value in asdict(self).items() if value is not False}


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Each step: Gaussian noise on the clipped sum over a Poisson sample; add or remove one unit.

    Where texts have several owners, documents are sampled and none of one owner's contributes
    anything: at most `documents_per_owner` of them are ever sampled, so one owner moves a step by at
    most binomial(documents_per_owner, sampling_rate) clip norms, and what they move it by is a
    mixture of Gaussians (Ganesh et al. 2025; Choquette-Choo et al. 2023, Corollary 4.7, for vectors).
    """

    noise_multiplier: float
    sampling_rate: float
    releases: tuple[Release, ...] = ()
    documents_per_owner: int | None = None

    def __post_init__(self) -> None:
        if self.documents_per_owner is not None and not (
            1 <= self.documents_per_owner <= MOST_DOCUMENTS_PER_OWNER
        ):
            raise UsageError(
                f"documents_per_owner={self.documents_per_owner} is out of range. Use 1 to {MOST_DOCUMENTS_PER_OWNER}."
            )
        if not 0 <= self.noise_multiplier < math.inf:
            raise UsageError(
                f"noise_multiplier={self.noise_multiplier} is no amount of noise. Use a number such as 1.0."
            )
        if not 0 < self.sampling_rate <= 1:
            raise UsageError(
                f"sampling_rate={self.sampling_rate} is no probability. Use a batch smaller than the number of units."
            )

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Mechanism":
        """The mechanism that a ledger describes."""
        return cls(
            noise_multiplier=record["noise_multiplier"],
            sampling_rate=record["sampling_rate"],
            releases=tuple(Release(**release) for release in record.get("releases", ())),
            # Missing where owners are spoken of, it would count as one.
            documents_per_owner=(
                record["documents_per_owner"]
                if "owner" in str(record.get("adjacency"))
                else record.get("documents_per_owner")
            ),
        )


@dataclass(frozen=True)
class Spend:
    """Steps and releases to be composed, and the δ left for them together."""

    steps: tuple[tuple[Mechanism, int], ...]
    releases: tuple[Release, ...]
    delta: float

    def is_empty(self) -> bool:
        return not self.releases and not any(steps for _, steps in self.steps)

    def is_bare(self) -> bool:
        """Whether something was told without any noise."""
        return any(steps and not each.noise_multiplier for each, steps in self.steps) or any(
            not release.noise_multiplier for release in self.releases
        )

    def sampled(self) -> list[tuple[_Sampled, int]]:
        """What is amplified by sampling, and for how many steps."""
        return [
            (_Sampled(m.noise_multiplier, m.sampling_rate, m.documents_per_owner or 1), steps)
            for m, steps in self.steps
            if steps and m.sampling_rate < 1
        ]

    def draws_several(self) -> bool:
        """Whether one person may be drawn several times in a step."""
        return any(each.most > 1 for each, _ in self.sampled())

    def whole(self) -> float:
        """Everything told about all units at once, as one Gaussian: its 1/σ, 0 where nothing is."""
        squares = [
            steps * ((m.documents_per_owner or 1) / m.noise_multiplier) ** 2
            for m, steps in self.steps
            if m.sampling_rate == 1
        ]
        return math.sqrt(sum(squares) + sum(r.noise_multiplier**-2 for r in self.releases))


def epsilon_spent(
    mechanism: Mechanism, steps: int, delta: float, accountant: Accountant = "pld"
) -> float:
    """ε at `delta` after `steps` steps and the mechanism's releases: never below the truth, but as
    published.

    Holds:
        nothing: no step and no release spend 0; a step without noise spends infinity.
        least: where δ is very small it is the lesser of PLD and RDP, which both hold.
        monotone: more steps, a higher sampling rate or less noise never spend less.
        analytic: with every unit in every step it is the Gaussian mechanism's own ε.
        several: where an owner may be drawn several times PLD alone has a figure; the others are infinite.
    """
    return epsilon_of(spend_of(mechanism, steps, delta), accountant)


def accountant_at(delta: float, documents_per_owner: int | None = None) -> str:
    """What ε at this δ is worked out by, in words."""
    by_pld = delta >= _SMALL_DELTA or (documents_per_owner or 1) > 1
    return "PLD" if by_pld else "the lesser of PLD and RDP"


def spend_of(mechanism: Mechanism, steps: int, delta: float) -> Spend:
    """One run's steps and releases."""
    left = delta_left(mechanism.releases, delta)
    return Spend(((mechanism, steps),), mechanism.releases, left)


def delta_left(releases: Sequence[Release], delta: float) -> float:
    """What releases leave of δ, each having taken its own; a refusal where nothing is left."""
    _check_probability(delta)
    taken = sum(release.delta for release in releases)
    if taken >= delta:
        names = ", ".join(release.name for release in releases)
        raise UsageError(
            f"delta={delta:g} is used up by what was released before training ({names}: {taken:g}). "
            f"Use a delta above {taken:g}, or release with a smaller one."
        )
    return delta - taken


def epsilon_of(spend: Spend, accountant: Accountant, coarser: float = 1.0) -> float:
    """ε of what is to be composed; a `coarser` interval of PLD is quicker and never gives less."""
    if spend.is_empty():
        return 0.0
    if spend.is_bare():
        return math.inf
    if accountant != "pld" and spend.draws_several():
        return math.inf  # nobody has worked these out for a mixture
    if accountant == "published":
        return _gaussian_epsilon(1 / _published_mu(spend), spend.delta)
    if accountant == "rdp":
        return _rdp_epsilon(spend)
    by_pld = _pld_epsilon(spend, coarser)
    is_loose = spend.delta < _SMALL_DELTA and spend.sampled() and not spend.draws_several()
    return min(by_pld, _rdp_epsilon(spend)) if is_loose else by_pld


def _gaussian_epsilon(sigma: float, delta: float) -> float:
    # Imported when asked for, with scipy's statistics: plain training needs no accountant.
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    return float(get_epsilon_gaussian(sigma, delta))


def _pld_epsilon(spend: Spend, coarser: float) -> float:
    if not (sampled := spend.sampled()):
        # One Gaussian: the loss distribution is normal and ε known exactly (Balle and Wang 2018).
        return _gaussian_epsilon(1 / spend.whole(), spend.delta)
    return _sampled_epsilon(tuple(sampled), spend.whole(), _interval(spend, coarser), spend.delta)


@lru_cache(maxsize=1024)  # a run is asked again by its ledger, the register and its pages
def _sampled_epsilon(
    sampled: tuple[tuple[_Sampled, int], ...], whole: float, interval: float, delta: float
) -> float:
    parts = [_one_step(each, interval).self_compose(steps) for each, steps in sampled]
    if whole:
        parts.append(_one_step(_Sampled(1 / whole, 1.0), interval))
    total = reduce(lambda one, other: one.compose(other), parts)
    return max(0.0, float(total.get_epsilon_for_delta(delta)))


@lru_cache(maxsize=8)
def _one_step(step: _Sampled, interval: float) -> "PrivacyLossDistribution":
    from tightlip.privacy.loss_distributions import loss_distribution  # with dp-accounting

    law = step.law() if step.most > 1 else None
    return loss_distribution(step.sigma, step.rate, interval, law=law)


def _interval(spend: Spend, coarser: float) -> float:
    """The discretisation: dp-accounting's, or finer where steps are small, or coarser where that
    saves time and steps are large."""
    deviations = [_deviation(each) for each, _ in spend.sampled()]
    reaches = [_reach(each) for each, _ in spend.sampled()]
    span = spend.whole() ** 2 / 2 + _TAIL * spend.whole()
    # A step's mean loss is at most its Rényi divergence of order 2, ln(1 + deviation²).
    for (_, steps), deviation, reach in zip(spend.sampled(), deviations, reaches, strict=True):
        span += steps * math.log1p(deviation**2) + _TAIL * math.sqrt(steps) * min(deviation, reach)
    small = min(deviations) / _INTERVALS_PER_DEVIATION
    enough, coarsest = _ENOUGH_POINTS, COARSEST
    if spend.draws_several():
        enough, coarsest = _ENOUGH_POINTS_OF_SEVERAL, _COARSEST_OF_SEVERAL
    wanted = max(min(INTERVAL, small), min(max(reaches) / enough, small, coarsest))
    least = max(max(reaches) / _MOST_POINTS_OF_A_STEP, span / _MOST_POINTS)
    if coarser > 1:
        wanted = min(coarser * wanted, max(wanted, _COARSEST_OF_A_STEP * small))
    return max(wanted, coarser * least)


def _reach(step: _Sampled) -> float:
    """The furthest privacy loss of one step that dp-accounting's distribution holds."""
    variance, furthest = step.sigma**2, step.most + _TAIL * step.sigma
    losses = (min(n * (furthest - n / 2) / variance, 700) for n in range(step.most + 1))
    return math.log1p(
        sum(share * math.expm1(loss) for share, loss in zip(step.law(), losses, strict=True))
    )


def _deviation(step: _Sampled) -> float:
    """How much one step's privacy loss varies, √χ²; of one draw q·√(e^{1/σ²} − 1) (Bu et al. 2020)."""
    law, variance = step.law(), step.sigma**2
    return math.sqrt(
        sum(
            law[one] * law[other] * math.expm1(min(one * other / variance, 700))
            for one in range(1, len(law))
            for other in range(1, len(law))
        )
    )


def _rdp_epsilon(spend: Spend) -> float:
    from dp_accounting.rdp import compute_epsilon
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    orders = np.array(DEFAULT_RDP_ORDERS)
    total = orders * spend.whole() ** 2 / 2
    for each, steps in spend.sampled():
        total = total + steps * _rdp_of_a_step(each.sigma, each.rate)
    return float(compute_epsilon(orders, total, spend.delta)[0])


@lru_cache(maxsize=256)  # a run's figures are asked for after ever more of the same steps
def _rdp_of_a_step(sigma: float, rate: float) -> np.ndarray:
    """At each of dp-accounting's orders."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    # It warns of each order it leaves out; without one the bound is looser, never wrong.
    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian))
    rdp: np.ndarray = accountant._rdp
    return rdp


def _published_mu(spend: Spend) -> float:
    sampled = sum(steps * _deviation(each) ** 2 for each, steps in spend.sampled())
    return math.sqrt(sampled + spend.whole() ** 2)


class EpsilonMeter:
    """An upper bound on ε at any step of a run, cheap enough to ask at every step.

    It knows about 27 step counts, each worked out when first needed, and answers with that of
    the next one. On the way the coarse interval serves (a few hundredths of a second); at the
    planned end and beyond, ε is exact, so that a calibrated run ends within its budget.

    Holds:
        never_below: the answer is at least `epsilon_spent` at that step.
        once: no step count is worked out twice.
    """

    def __init__(self, mechanism: Mechanism, delta: float, num_steps: int) -> None:
        self.mechanism, self.delta, self.num_steps = mechanism, delta, num_steps
        self._stride = max(1, math.ceil(num_steps / 16))
        self._known: dict[int, float] = {}

    def upper(self, steps: int) -> float:
        """At least the ε spent after `steps` steps."""
        point = self._next_point(steps)
        if point not in self._known:
            self._known[point] = self._epsilon_at(point)
        return self._known[point]

    def _next_point(self, steps: int) -> int:
        """The next step count we know: powers of 2, then sixteenths of the plan; beyond it, doubling."""
        if 0 < steps < self._stride:
            return min(_next_power(steps), self._stride)
        if steps <= self.num_steps:
            return min(math.ceil(steps / self._stride) * self._stride, self.num_steps)
        beyond = math.ceil((steps - self.num_steps) / self._stride)
        return self.num_steps + self._stride * _next_power(beyond)

    def _epsilon_at(self, point: int) -> float:
        if point >= self.num_steps:
            return epsilon_spent(self.mechanism, point, self.delta)
        on_the_way = epsilon_of(spend_of(self.mechanism, point, self.delta), "pld", COARSER)
        return min(on_the_way, self.upper(self.num_steps))


def _next_power(count: int) -> int:
    """The smallest power of 2 that is at least `count`."""
    return 1 << (count - 1).bit_length()


def default_delta(num_units: int) -> float:
    """min(1e-5, 1/(10·units)): far less than one unit's chance of being told outright."""
    return min(1e-5, 1 / (10 * num_units))


def check_delta(
    delta: float, num_units: int, allow_loose: bool = False, *, unit: str = "unit"
) -> None:
    """Refuse a δ at which telling one unit's data outright would count as private."""
    _check_probability(delta)
    if delta > 1 / num_units and not allow_loose:
        digits = 1 - math.floor(math.log10(1 / num_units))
        below = math.floor(10**digits / num_units) / 10**digits
        raise UsageError(
            f"delta={delta:g} is looser than 1/num_{unit}s (1/{num_units}). Use delta below {below:.1e}."
        )


def _check_probability(delta: float) -> None:
    if not 0 < delta < 1:
        raise UsageError(f"delta={delta} is no probability between 0 and 1. Use one such as 1e-6.")
