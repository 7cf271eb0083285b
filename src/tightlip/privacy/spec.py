"""What a private run promises, and how sure the promise is."""

import math
from dataclasses import dataclass

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy.accounting import Release


@dataclass(frozen=True, kw_only=True)
class PrivacySpec:
    """What changes the promise. Give `epsilon`, `noise_multiplier`, or both: with both, the
    noise is as given and training stops before `epsilon` is passed.

    A drawn unit gives at most `rows_per_unit` of its rows, chosen at random, to a step.
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


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How sure the promise is, and of what it is one."""

    standing: str = "proved"
    because: str = "Every step adds Gaussian noise to a sum of clipped gradients over a Poisson sample; PLD composes the steps."
    covers: tuple[str, ...] = ("the weights", "every snapshot")
    outside: tuple[str, ...] = (
        "settings, checkpoints and seeds chosen by looking at private results",
        "losses, norms and batch sizes, which are private",
    )
    releases: tuple[Release, ...] = ()
