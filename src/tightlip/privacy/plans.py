"""From what a run is asked for to its noise, its δ and its budget, before the first step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy.accounting import (
    COARSER,
    EpsilonMeter,
    Mechanism,
    Release,
    check_delta,
    default_delta,
    delta_left,
    epsilon_of,
    epsilon_spent,
    spend_of,
)
from tightlip.privacy.adaptive import AdaptiveSpec, Promise, joint_multiplier, noise_without_release
from tightlip.privacy.ledger import Meter, people_of
from tightlip.privacy.rdp_filter import RdpFilter, RdpMeter, filter_for

_LEAST_NOISE, _MOST_NOISE = 0.05, 1e6

Point = tuple[float, float]  # where we looked, and the ε there


@dataclass(frozen=True, kw_only=True)
class PrivacySpec:
    """What changes the promise. Give `epsilon`, `noise_multiplier`, or both: with both, the
    noise is as given and training stops before `epsilon` is passed.

    A drawn unit gives at most `rows_per_unit` of its rows, chosen at random, to a step. Where texts
    have several owners, `documents_per_owner` of each are ever drawn; see `sampling.py`.
    """

    unit: str = "user"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    clip_norm: float = 1.0
    per_layer: bool = False
    rows_per_unit: int = 4
    expected_batch: float = 32
    steps: int = 1000
    allow_loose_delta: bool = False
    insecure_seed: int | None = None
    documents_per_owner: int | None = None

    def __post_init__(self) -> None:
        if self.epsilon is None and self.noise_multiplier is None:
            raise UsageError(
                "Private training needs a target: give epsilon (such as 8) or noise_multiplier (such as 1.0)."
            )
        for name in ("epsilon", "noise_multiplier", "delta"):
            value = getattr(self, name)
            least = 0 if name == "noise_multiplier" else math.nextafter(0, 1)
            if value is not None and not least <= value < math.inf:
                raise UsageError(f"{name}={value} is out of range. Give a finite number above 0.")
        if self.unit not in ("user", "example"):
            raise UsageError(f"Unknown unit {self.unit!r}. Available: user, example.")
        if self.rows_per_unit < 1 or self.steps < 1:
            raise UsageError(
                f"rows_per_unit={self.rows_per_unit} and steps={self.steps}: both must be at least 1."
            )
        if self.noise_multiplier != 0 and not math.isfinite(self.clip_norm):
            raise GuaranteeError(
                f"clip_norm={self.clip_norm} bounds nobody, so no noise can hide anybody. Use a number such as 1.0."
            )


UNREGISTERED = "runs that this register does not know: without noise, of other machines, of other users of this one"


def unregistered(people: str | None) -> str:
    """Which other runs are outside a promise to these people, where they were given a name."""
    nameless = "other runs on the same people: name them, and they are counted together"
    return nameless if people is None else UNREGISTERED


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How sure the promise is, and of what it is one.

    `people` are the ids of those whose text it is, in the register; `before` are the private runs
    that the starting weights came out of.
    """

    standing: str = "proved"
    because: str = "Every step adds Gaussian noise to a sum of clipped gradients over a Poisson sample; PLD composes the steps."
    covers: tuple[str, ...] = ("the weights", "every snapshot")
    outside: tuple[str, ...] = (
        "settings, checkpoints and seeds chosen by looking at private results",
        "losses, norms and batch sizes, which are private",
    )
    releases: tuple[Release, ...] = ()
    people: tuple[str, ...] = ()
    before: tuple[dict[str, Any], ...] = ()

    def whose(self) -> dict[str, Any]:
        """What a ledger says of the people and of earlier runs on them."""
        people = {"people": people_of(self.people)} if self.people else {}
        return people | ({"before": list(self.before)} if self.before else {})


@dataclass(frozen=True, kw_only=True)
class NoisePlan:
    """Everything about the noise that is fixed before training.

    `noise_multiplier` is σ; the mechanism's is the least that any step can have, which is the
    same but where the noise varies. `most_steps` is the budget in steps and `budget` in Rényi
    divergence; None where there is none of the kind.
    """

    noise_multiplier: float
    mechanism: Mechanism
    delta: float
    planned_steps: int
    target: float | None
    most_steps: int | None = None
    budget: RdpFilter | None = None

    def meter(self, adaptive: AdaptiveSpec | None) -> Meter:
        """What the run promises while it goes on."""
        if adaptive is not None and adaptive.mode == "scale":
            target = self.target if self.budget is not None else None
            return Promise(self.mechanism, self.delta, self.planned_steps, target, self.budget)
        if adaptive is not None and adaptive.mode == "as-published":
            return RdpMeter(self.mechanism, self.delta)
        return EpsilonMeter(self.mechanism, self.delta, self.most_steps or self.planned_steps)


def noise_plan(
    spec: PrivacySpec, mechanism: Mechanism, *, num_units: int, adaptive: AdaptiveSpec | None
) -> NoisePlan:
    """The noise that a run has, calibrated where only a target is given; of the `mechanism` all but its
    noise counts here. `num_units` is how many the promise is for, and with `documents_per_owner`
    what is sampled are their documents."""
    delta = default_delta(num_units) if spec.delta is None else spec.delta
    check_delta(delta, num_units, spec.allow_loose_delta, unit=spec.unit)
    if adaptive is not None:
        check_varying(adaptive.mode, spec.epsilon, spec.noise_multiplier)
    if (sigma := spec.noise_multiplier) is None:
        sigma = _calibrated(spec, delta, mechanism, adaptive)
    least = sigma if adaptive is None else adaptive.least_noise(sigma)
    mechanism = replace(mechanism, noise_multiplier=least)
    budget = _filter(spec, sigma, mechanism, delta, adaptive)
    most_steps = None if budget is not None else _most_steps(spec, mechanism, delta)
    return NoisePlan(
        noise_multiplier=sigma,
        mechanism=mechanism,
        delta=delta,
        planned_steps=most_steps or spec.steps,
        target=spec.epsilon,
        most_steps=most_steps,
        budget=budget,
    )


def check_varying(mode: str, epsilon: float | None, noise_multiplier: float | None) -> None:
    """Refuse what cannot be asked of noise that varies."""
    if mode == "as-published" and epsilon is not None:
        raise UsageError(
            f"epsilon={epsilon:g} cannot be a target of adaptive='as-published': its noise, and so its figure, is known only "
            "once the batches are drawn. Give --noise-multiplier (such as 1.0) without --epsilon."
        )
    if mode != "clip" and noise_multiplier == 0:
        raise UsageError(
            f"noise_multiplier=0 leaves adaptive={mode!r} nothing to scale. Use a number such as 1.0."
        )


def _calibrated(
    spec: PrivacySpec, delta: float, mechanism: Mechanism, adaptive: AdaptiveSpec | None
) -> float:
    """The noise for the target. In mode `scale`: with which all planned steps fit though each had
    the least noise it can have, so that no run ends early, whatever is released."""
    assert spec.epsilon is not None
    sigma = noise_for_target(mechanism, spec.epsilon, delta, spec.steps)
    if adaptive is None or adaptive.mode != "scale":
        return sigma
    return rounded_up_to_five(noise_without_release(sigma, adaptive))


def _filter(
    spec: PrivacySpec,
    sigma: float,
    mechanism: Mechanism,
    delta: float,
    adaptive: AdaptiveSpec | None,
) -> RdpFilter | None:
    """The filter that keeps a target with a σ that was given. A σ that was calibrated keeps it at
    the floor, and without a target the floor is what the run promises."""
    if adaptive is None or adaptive.mode != "scale" or adaptive.accountant != "filter":
        return None
    if spec.epsilon is None or spec.noise_multiplier is None:
        return None
    return filter_for(
        epsilon=spec.epsilon,
        delta=delta_left(mechanism.releases, delta),
        noise_multiplier=joint_multiplier(sigma, adaptive.release_noise_for(sigma)),
        least_noise=mechanism.noise_multiplier,
        steps=spec.steps,
        sampling_rate=mechanism.sampling_rate,
        releases=mechanism.releases,
    )


def _most_steps(spec: PrivacySpec, mechanism: Mechanism, delta: float) -> int | None:
    """How many steps the budget has; None where there is no target."""
    if spec.epsilon is None:
        return None
    if spec.noise_multiplier is None:
        return spec.steps
    most = largest_steps(mechanism, spec.epsilon, delta, spec.steps)
    if most == 0:
        raise UsageError(
            f"noise_multiplier={spec.noise_multiplier:g} spends more than epsilon={spec.epsilon:g} in its "
            f"first step. Use more noise, a larger epsilon, or leave noise_multiplier out."
        )
    return most


def noise_for_target(mechanism: Mechanism, epsilon: float, delta: float, steps: int) -> float:
    """The smallest noise whose ε, by PLD, is at most `epsilon`: rounded up, within 0.1%. That of the
    mechanism itself does not count.

    Takes 0.5 to 5 seconds: a bracket at the coarse interval, then about five fine figures.
    (Slower only far out, 18 s for ε = 0.01 over a million steps, and for owners of several
    documents: 5 to 20 s.)

    Holds:
        kept: `epsilon_spent` of the result never passes `epsilon`.
        tight: with 0.2% less noise it does.
    """
    _check_reachable(mechanism, epsilon, delta)

    def spent(sigma: float, coarser: float = 1.0) -> float:
        noisy = replace(mechanism, noise_multiplier=sigma)
        return epsilon_of(spend_of(noisy, steps, delta), "pld", coarser)

    def coarse(sigma: float) -> float:
        return spent(sigma, COARSER)

    # An owner of k documents is drawn as often as one of k times the steps.
    counted = steps * (mechanism.documents_per_owner or 1)
    start = _published_noise(epsilon, delta, mechanism.sampling_rate, counted)
    enough, little = _bracketed(coarse, epsilon, start, ratio=1.25)
    enough, _ = _narrowed(coarse, epsilon, enough, little, _within(2e-3), rounded_up_to_five)
    enough, little = _bracketed(spent, epsilon, enough[0], ratio=1.004)
    enough, _ = _narrowed(spent, epsilon, enough, little, _within(5e-4), rounded_up_to_five)
    return enough[0]


def _check_reachable(mechanism: Mechanism, epsilon: float, delta: float) -> None:
    if not epsilon > 0:
        raise UsageError(f"epsilon={epsilon} leaves nothing to spend. Use a number above 0.")
    before = epsilon_spent(mechanism, 0, delta)
    if before >= epsilon:
        names = ", ".join(release.name for release in mechanism.releases)
        raise UsageError(
            f"epsilon={epsilon:g} is spent before training: {names} took {before:.3g}. "
            f"Use a larger epsilon, or release with more noise."
        )


def _published_noise(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Where to begin: the noise that the central limit asks for."""
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    mu = 1 / get_sigma_gaussian(epsilon, delta)
    sigma = math.log1p(mu**2 / (steps * rate**2)) ** -0.5
    return rounded_up_to_five(min(max(sigma, _LEAST_NOISE), _MOST_NOISE))


def _bracketed(
    spent: Callable[[float], float], epsilon: float, start: float, *, ratio: float
) -> tuple[Point, Point]:
    """Noise that is enough and noise that is too little, close together and near `start`."""
    here = (start, spent(start))
    while True:
        onward = rounded_up_to_five(here[0] / ratio if here[1] <= epsilon else here[0] * ratio)
        if onward > _MOST_NOISE:
            raise UsageError(
                f"No noise up to {_MOST_NOISE:g} reaches epsilon={epsilon:g}. "
                "Use a larger epsilon, fewer steps or a smaller batch."
            )
        there = (onward, math.inf if onward < _LEAST_NOISE else spent(onward))
        if (here[1] <= epsilon) != (there[1] <= epsilon):
            return (here, there) if here[1] <= epsilon else (there, here)
        here, ratio = there, ratio**1.5


def _narrowed(
    spent: Callable[[float], float],
    epsilon: float,
    passing: Point,
    failing: Point,
    near: Callable[[float, float], bool],
    rounded: Callable[[float], float],
) -> tuple[Point, Point]:
    """The two sides of the budget, moved towards each other until they are near."""
    while not near(passing[0], failing[0]):
        where = rounded(_guess(passing, failing, epsilon))
        if where in (passing[0], failing[0]):
            where = rounded((passing[0] + failing[0]) / 2)
        if where in (passing[0], failing[0]):
            break
        here = (where, spent(where))
        passing, failing = (here, failing) if here[1] <= epsilon else (passing, here)
    return passing, failing


def _guess(passing: Point, failing: Point, epsilon: float) -> float:
    """Where a power law through both points meets ε, kept a tenth away from either."""
    share = 0.5
    if 0 < passing[1] < failing[1] < math.inf:
        share = math.log(epsilon / passing[1]) / math.log(failing[1] / passing[1])
    share = min(max(share, 0.1), 0.9)
    return math.exp((1 - share) * math.log(passing[0]) + share * math.log(failing[0]))


def _within(tolerance: float) -> Callable[[float, float], bool]:
    return lambda passing, failing: passing <= failing * (1 + tolerance)


def rounded_up_to_five(value: float) -> float:
    return rounded_up_to(5, value)


def rounded_up_to(figures: int, value: float) -> float:
    """So many figures, never less than the value.

    >>> rounded_up_to(5, 0.528612), rounded_up_to(3, 16119.2)
    (0.52862, 16200.0)
    """
    digits = figures - 1 - math.floor(math.log10(value))
    scaled = math.ceil(value * 10**digits * (1 - 1e-12))
    return round(scaled / 10**digits, max(digits, 0))


def largest_steps(mechanism: Mechanism, epsilon: float, delta: float, at_most: int) -> int:
    """How many steps, up to `at_most`, keep within `epsilon`; 0 where not even one does."""

    def spent(steps: float) -> float:
        return epsilon_spent(mechanism, int(steps), delta)

    last = (at_most, spent(at_most))
    if last[1] <= epsilon:
        return at_most
    first = (1, spent(1))
    if at_most <= 1 or first[1] > epsilon:
        return 0
    within, _ = _narrowed(
        spent, epsilon, first, last, lambda passing, failing: failing - passing <= 1, round
    )
    return int(within[0])
