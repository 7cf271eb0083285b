"""From what a run is asked for to its noise, its δ and its budget, before the first step."""

from dataclasses import dataclass

from tightlip.core.errors import UsageError
from tightlip.privacy.accounting import (
    EpsilonMeter,
    Mechanism,
    Release,
    check_delta,
    default_delta,
    delta_left,
)
from tightlip.privacy.adaptive import (
    AdaptiveSpec,
    Promise,
    joint_multiplier,
    noise_without_release,
)
from tightlip.privacy.calibration import (
    calibrated_noise_multiplier,
    largest_steps,
    rounded_up_to_five,
)
from tightlip.privacy.ledger import Meter
from tightlip.privacy.rdp_filter import RdpFilter, RdpMeter, filter_for
from tightlip.privacy.spec import PrivacySpec


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
    spec: PrivacySpec,
    *,
    num_units: int,
    sampling_rate: float,
    releases: tuple[Release, ...],
    adaptive: AdaptiveSpec | None,
) -> NoisePlan:
    """The noise that a run has, calibrated where only a target is given."""
    delta = default_delta(num_units) if spec.delta is None else spec.delta
    check_delta(delta, num_units, spec.allow_loose_delta, unit=spec.unit)
    mode = None if adaptive is None else adaptive.mode
    if mode in ("scale", "as-published"):
        _check_varying(spec, str(mode))
    sigma = spec.noise_multiplier
    if sigma is None:
        sigma = _calibrated(spec, delta, sampling_rate, releases, adaptive)
    least = sigma if adaptive is None else adaptive.least_noise(sigma)
    mechanism = Mechanism(noise_multiplier=least, sampling_rate=sampling_rate, releases=releases)
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


def _check_varying(spec: PrivacySpec, mode: str) -> None:
    if spec.noise_multiplier == 0:
        raise UsageError(
            f"noise_multiplier=0 leaves adaptive={mode!r} nothing to scale. Use a number such as 1.0."
        )
    if mode == "as-published" and (spec.epsilon is not None or spec.noise_multiplier is None):
        raise UsageError(
            "adaptive='as-published' cannot aim at an epsilon: its noise, and so its figure, is known only once the "
            "batches are drawn. Give --noise-multiplier (such as 1.0) without --epsilon."
        )


def _calibrated(
    spec: PrivacySpec,
    delta: float,
    sampling_rate: float,
    releases: tuple[Release, ...],
    adaptive: AdaptiveSpec | None,
) -> float:
    """The noise for the target. In mode `scale`: with which all planned steps fit though each had
    the least noise it can have, so that no run ends early, whatever is released."""
    assert spec.epsilon is not None
    scaled = adaptive if adaptive is not None and adaptive.mode == "scale" else None
    sigma = calibrated_noise_multiplier(
        epsilon=spec.epsilon,
        delta=delta,
        sampling_rate=sampling_rate,
        steps=spec.steps,
        releases=releases,
    )
    if scaled is None:
        return sigma
    return rounded_up_to_five(noise_without_release(sigma, scaled, scaled.gamma_floor))


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
