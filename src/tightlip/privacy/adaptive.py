"""Adaptive differential privacy: what a text's weight ρ may change, and what that costs.

Three modes (docs/adaptive-dp.md). `clip`: a unit's clip bound falls with its weight, the noise
stays. `scale`: the noise follows a private estimate of earlier batches' mean weight.
`as-published`: the noise follows the very batch's mean weight, as the paper has it, which no
theorem covers.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.registry import unknown
from tightlip.privacy.accounting import COARSER, Mechanism, epsilon_of, epsilon_spent, spend_of
from tightlip.privacy.rdp_filter import RdpFilter

MODES = ("clip", "scale", "as-published")
MECHANISMS = {
    "clip": "Poisson-subsampled Gaussian, clip bounds by weight",
    "scale": "Poisson-subsampled Gaussian, scaled by noisy releases of earlier batches' weight",
    "as-published": "Gaussian scaled by the batch's own weight (adaptive DP as published)",
}
BECAUSE = {
    "clip": (
        "Every step adds Gaussian noise to a sum of gradients over a Poisson sample, each clipped to at most the clip "
        "norm, by a weight that hangs on the unit's own text alone; PLD composes the steps."
    ),
    "scale": (
        "Every step adds Gaussian noise to a sum of clipped gradients over a Poisson sample. Its scale follows from noisy "
        "releases of earlier steps only, each charged with its step's gradient as one Gaussian; the target and the least "
        "scale were fixed before training."
    ),
    "as-published": (
        "The noise's scale is the private batch's own mean weight, and one update shows it: no theorem covers that. ε "
        "composes σ·γ of each batch, our reading: the paper gives no accounting."
    ),
}
ACCOUNTANTS = ("filter", "floor")
_OF_MODE = {"clip": ("least_clip",), "scale": ("gamma_floor", "averaging", "accountant")}
RELEASE_NOISE = 10.0  # z by default, in noise multipliers
_NEAR = 1e-12
# Of less noise ε is in the millions, and its distribution too long to compose.
_LEAST_COMPOSED = 0.005


@dataclass(frozen=True, kw_only=True)
class AdaptiveSpec:
    """What the weights do. Everything here is public and fixed before training.

    `least_weight` is ρ_min, below which no weight is; `facts` say where the weights came from.
    Of the rest each belongs to one mode: `least_clip` is the share of the clip norm left to a
    weight of 1; `gamma_floor` the least share of the noise; `release_noise` z, None for 10σ;
    `averaging` how much of the moving average an earlier one keeps. `accountant` is how `scale`
    keeps a target with a given σ: `filter` charges what each step has, `floor` all of them at the
    least noise. A σ that is calibrated is so for the floor.
    """

    mode: str
    least_weight: float
    least_clip: float = 1.0
    gamma_floor: float = 0.5
    release_noise: float | None = None
    averaging: float = 0.9
    accountant: str = "filter"
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(unknown("adaptive", self.mode, list(MODES)))
        if self.mode != "as-published" and self.facts.get("is_sound") is False:
            raise GuaranteeError(
                f"The weights were normalised over the private text itself, so one document moves every other's and "
                f"adaptive={self.mode!r} could promise nothing. Use constants of public text, or adaptive='as-published'."
            )
        if not 0 < self.least_weight < 1:
            raise UsageError(
                f"least_weight={self.least_weight} is not between 0 and 1, so no weight can fall between them. Prepare "
                "the weights with --least-weight 0.05."
            )
        for name in ("least_clip", "gamma_floor"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(
                    f"{name}={getattr(self, name)} is out of range. It must be above 0 and at most 1."
                )
        if self.accountant not in ACCOUNTANTS:
            raise UsageError(unknown("scale_accountant", self.accountant, list(ACCOUNTANTS)))
        if not 0 <= self.averaging < 1:
            raise UsageError(
                f"averaging={self.averaging} is out of range. It must be at least 0 and below 1."
            )
        if self.release_noise is not None and not 0 < self.release_noise < math.inf:
            raise UsageError(
                f"release_noise={self.release_noise} is no amount of noise. Use a number such as 10."
            )

    def clip_shares(self, rho_U: np.ndarray) -> np.ndarray:
        """Each unit's share of the clip norm: w(ρ), which is 1 in every mode but `clip`."""
        if self.mode != "clip":
            return np.ones(len(rho_U))
        return clip_shares(rho_U, self.least_weight, self.least_clip)

    def release_noise_for(self, noise_multiplier: float) -> float:
        """z: the release's noise in units of what one unit can move it."""
        given = self.release_noise
        return RELEASE_NOISE * noise_multiplier if given is None else given

    def least_noise(self, noise_multiplier: float) -> float:
        """The least multiplier that any step can be charged at, whatever is drawn or released."""
        if self.mode == "clip":
            return noise_multiplier
        if self.mode == "as-published":
            return noise_multiplier * self.least_weight
        z = self.release_noise_for(noise_multiplier)
        return joint_multiplier(noise_multiplier * self.gamma_floor, z)

    def terms(self, noise_multiplier: float) -> dict[str, Any]:
        """The part of a ledger that says which mode a run is in; it may not change on the way."""
        terms = {"mode": self.mode, "noise_multiplier": noise_multiplier}
        terms |= {
            name: getattr(self, name) for name in ("least_weight", *_OF_MODE.get(self.mode, ()))
        }
        if self.mode == "scale":
            terms["release_noise"] = self.release_noise_for(noise_multiplier)
        return {**terms, "weights": self.facts}


def clip_shares(rho_U: np.ndarray, least_weight: float, least_clip: float) -> np.ndarray:
    """w(ρ) = 1 − (1 − w_min)(ρ − ρ_min)/(1 − ρ_min): 1 at ρ_min, w_min at 1, even between.

    Rounded down to a float32, so that no kind of number makes a bound larger than it is.

    Holds:
        falling: a larger weight never has a larger share.
        bounded: every share is above 0 and at most 1; with `least_clip` 1 all are 1 exactly.

    >>> clip_shares(np.array([0.05, 0.525, 1.0]), 0.05, 0.5).tolist()
    [1.0, 0.75, 0.5]
    """
    along = np.clip((rho_U - least_weight) / (1 - least_weight), 0.0, 1.0)
    shares = np.minimum(1 - (1 - least_clip) * along, 1.0)
    rounded = shares.astype(np.float32)
    rounded = np.where(rounded > shares, np.nextafter(rounded, np.float32(0)), rounded)
    return rounded.astype(np.float64)


def checked_weights(rho: np.ndarray, num_rows: int, least_weight: float) -> np.ndarray:
    """A weight for every row, or a refusal: one out of range would pass the release's bound."""
    rho = np.asarray(rho, np.float64)
    if rho.shape != (num_rows,):
        raise UsageError(
            f"{rho.size} weights for {num_rows} rows. Give one weight for each row to train on."
        )
    if not bool(((rho >= least_weight - _NEAR) & (rho <= 1)).all()):
        raise UsageError(
            f"A weight is not between least_weight={least_weight:g} and 1. Make the weights anew: "
            "tightlip prepare CORPUS --privacy-weights."
        )
    return np.clip(rho, least_weight, 1.0)


def joint_multiplier(noise_multiplier: float, release_noise: float) -> float:
    """(σ⁻² + z⁻²)^−½: gradient and release look at one draw, so they are one Gaussian.

    >>> round(joint_multiplier(1.0, 1.28), 4)
    0.788
    """
    if noise_multiplier == 0:
        return 0.0
    return (noise_multiplier**-2 + release_noise**-2) ** -0.5


def noise_without_release(joint: float, spec: AdaptiveSpec) -> float:
    """σ such that γ_floor·σ and its release together are a Gaussian of multiplier `joint`."""
    gamma = spec.gamma_floor
    if spec.release_noise is None:
        return joint * math.sqrt(gamma**-2 + RELEASE_NOISE**-2)
    if spec.release_noise <= joint:
        raise UsageError(
            f"release_noise={spec.release_noise:g} alone spends more than the target allows. Use one well above "
            f"{joint:.3g}, or leave it out."
        )
    return (joint**-2 - spec.release_noise**-2) ** -0.5 / gamma


class Promise:
    """What a `scale` run promises from before its first step to its end.

    The smaller of two bounds: the target that the filter keeps, and ε by PLD with every planned
    step charged at the least noise it can have. Steps repeated after a kill come on top. When a
    process dies is nobody's data, so they may be counted as well, as long as no release could
    have ended the run before: as long as all of them, and one more, fit though each had the least
    noise. Beyond that their number tells of the releases, and the target alone holds.

    Holds:
        planned: it is the same at every step that was planned.
        rising: more steps never promise less, and never more than the target.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        delta: float,
        planned_steps: int,
        target: float | None,
        budget: RdpFilter | None = None,
    ) -> None:
        self.mechanism, self.delta = mechanism, delta
        self.planned_steps, self.target = planned_steps, target
        self._budget = 0.0 if budget is None else budget.budget
        self._dearest = 0.0 if budget is None else budget.cost(mechanism.noise_multiplier)
        self._known: dict[int, float] = {}

    def upper(self, steps: int) -> float:
        """The ε that covers the run, `steps` steps into it."""
        if (most := self.counted(steps)) is None:
            assert self.target is not None
            return self.target  # which the filter keeps, however long it goes on
        if most not in self._known:
            self._known[most] = promised_epsilon(self.mechanism, most, self.delta, self.target)
        return self._known[most]

    def counted(self, steps: int) -> int | None:
        """How many steps of the least noise cover the run; None where the target alone does."""
        if steps <= self.planned_steps:
            return self.planned_steps
        if not self.planned_steps and self.target is None:
            return steps
        # Sixteenths of the plan, doubling: each count is worked out anew and takes a while.
        stride = max(1, math.ceil(self.planned_steps / 16))
        beyond = math.ceil((steps - self.planned_steps) / stride)
        most = self.planned_steps + stride * (1 << (beyond - 1).bit_length())
        is_public = self.target is None or 0 < (most + 1) * self._dearest <= self._budget
        return most if is_public else None


def promised_epsilon(mechanism: Mechanism, steps: int, delta: float, target: float | None) -> float:
    """The target, or ε of `steps` steps at the mechanism's noise where that is less."""
    if mechanism.noise_multiplier < _LEAST_COMPOSED:
        return math.inf if target is None else target
    if target is None:
        return epsilon_spent(mechanism, steps, delta)
    # A coarse figure is an upper bound too; the fine one takes a while and is worth it only near.
    coarse = epsilon_of(spend_of(mechanism, steps, delta), "pld", COARSER)
    if coarse > 1.5 * target:
        return target
    return min(target, coarse, epsilon_spent(mechanism, steps, delta))
