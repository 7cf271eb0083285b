"""Telling two neighbouring batches apart by how loud the noise is, and the ε that this proves.

Noise hides a unit as long as its scale is public. In adaptive DP as published the scale is the
private batch's own mean weight, and one noisy update is d samples of it: whoever sees the
update knows the scale to one part in √(2d). Under `clip` and `scale` the same look at the same
update finds nothing that the ledger has not charged.

The attacker knows where the gradient is zero (the embeddings of words that nobody wrote, say)
and takes the mean square there. For two Gaussians of known scale this is the likelihood ratio
test, so nobody who looks at the scale alone does better.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from tightlip.core.errors import UsageError

Verdict = Literal["consistent", "contradicted"]
_NEARLY_NATS = 0.1


@dataclass(frozen=True, kw_only=True)
class NoiseScaleAttack:
    """How often the attacker cried "the unit is in", rightly and wrongly, and what that proves."""

    num_trials: int
    true_alarms: int
    false_alarms: int
    epsilon_lower_bound: float
    confidence: float
    claimed_epsilon: float
    delta: float
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def tell_apart(
    without: np.ndarray,
    within: np.ndarray,
    *,
    claimed_epsilon: float,
    delta: float,
    confidence: float = 0.95,
) -> NoiseScaleAttack:
    """Attack with the mean squares of updates whose batch could not, and could, hold the unit.

    The first half of the trials sets the alarm, the second half is counted: an alarm that was
    set on the trials it is judged by would accuse honest noise.

    Holds:
        honest: updates of one law contradict a claim with probability at most 1 - `confidence`.
        finds: scales that differ by many times the estimate's own error give about ln(trials/4).
    """
    if len(without) != len(within) or len(without) < 4:
        raise UsageError(
            f"{len(without)} trials without the unit and {len(within)} with it. Give as many of either, 4 or more."
        )
    half = len(without) // 2
    alarm = _best_alarm(without[:half], within[:half], delta, confidence)
    true_alarms, false_alarms = (int(alarm(part[half:]).sum()) for part in (within, without))
    num_trials = len(without) - half
    bound = bound_from_alarms(true_alarms, false_alarms, num_trials, delta, confidence)
    return NoiseScaleAttack(
        num_trials=num_trials,
        true_alarms=true_alarms,
        false_alarms=false_alarms,
        epsilon_lower_bound=bound,
        confidence=confidence,
        claimed_epsilon=claimed_epsilon,
        delta=delta,
        verdict="contradicted" if bound > claimed_epsilon else "consistent",
    )


def mean_square(update: np.ndarray) -> float:
    """The variance of coordinates whose gradient is zero."""
    return float(np.square(update, dtype=np.float64).mean())


def log_likelihood_ratio(
    mean_squares: np.ndarray, num_coordinates: float, without: float, within: float
) -> np.ndarray:
    """Nats by which updates speak for noise of scale `within` against `without`.

    It grows or falls with the mean square alone, so an alarm on one is an alarm on the other.
    """
    per_coordinate = (without**-2 - within**-2) * mean_squares / 2 - math.log(within / without)
    return np.asarray(num_coordinates * per_coordinate)


def divergence_nats(num_coordinates: float, without: float, within: float) -> float:
    """The mean of the log-likelihood ratio under `within`: Kullback and Leibler's divergence.

    For scales that differ by a small share s of themselves it is about d·s².

    >>> round(divergence_nats(1e8, 1.0, 1.0 + 1 / 4096), 2)
    5.96
    """
    excess = (within - without) / without
    # By log1p and expm1-like forms: the plain ones lose all figures where s² is 1e-8.
    return num_coordinates * (excess + excess**2 / 2 - math.log1p(excess))


def simulated_mean_squares(
    scale: float, num_coordinates: float, num_trials: int, draw: np.random.Generator
) -> np.ndarray:
    """Mean squares of so many updates of pure noise, by their law: scale²·χ²/d."""
    return scale**2 * draw.chisquare(num_coordinates, num_trials) / num_coordinates


def sum_moved(
    normalise: Callable[[np.ndarray], np.ndarray],
    nats: np.ndarray,
    newcomer_nats: float,
    batch_size: int,
) -> float:
    """How far one more document moves the weights of a batch that it is not even in, summed.

    `nats` are the log-perplexities of the documents before; a batch is one of them as a whole,
    `batch_size` documents on average.
    """
    after = normalise(np.append(nats, newcomer_nats))[:-1]
    return float(batch_size * np.abs(normalise(nats) - after).mean())


def bound_from_alarms(
    true_alarms: Any, false_alarms: Any, num_trials: int, delta: float, confidence: float = 0.95
) -> Any:
    """The largest ε that the alarms rule out, 0 where they rule out none.

    (ε, δ)-privacy bounds Pr[alarm | in] by e^ε·Pr[alarm | out] + δ, and the same of silence.
    Both probabilities are taken at Clopper and Pearson's limits, at half of the error each.

    Holds:
        silent: alarms as frequent without the unit as with it give 0.
        monotone: more true alarms or fewer false ones never give less.
    """
    if not 0 < confidence < 1:
        raise UsageError(f"confidence={confidence} is none. Use a number such as 0.95.")
    least_true, most_false = _limits(true_alarms, false_alarms, num_trials, (1 - confidence) / 2)
    by_alarm = _log_ratio(least_true - delta, most_false)
    by_silence = _log_ratio(1 - most_false - delta, 1 - least_true)
    found = np.maximum(0.0, np.maximum(by_alarm, by_silence))
    return found if np.ndim(found) else float(found)


def _limits(
    true_alarms: Any, false_alarms: Any, num_trials: int, error: float
) -> tuple[np.ndarray, np.ndarray]:
    from scipy.stats import beta

    hits, wrong = np.asarray(true_alarms), np.asarray(false_alarms)
    low = beta.ppf(error, np.maximum(hits, 1), num_trials - hits + 1)
    high = beta.ppf(1 - error, wrong + 1, np.maximum(num_trials - wrong, 1))
    return np.where(hits == 0, 0.0, low), np.where(wrong == num_trials, 1.0, high)


def _log_ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(above > 0, np.log(above / below), -np.inf)


def _best_alarm(
    without: np.ndarray, within: np.ndarray, delta: float, confidence: float
) -> Callable[[np.ndarray], np.ndarray]:
    """A threshold and a side: of those that rule out nearly most, the one in the widest gap.

    The very best often hugs a value by luck, and rings falsely on the other half of the trials.
    """
    values = np.unique(np.concatenate([without, within]))
    if len(values) < 2:
        return lambda seen: seen > values[0]
    between = (values[:-1] + values[1:]) / 2
    above_without = len(without) - np.searchsorted(np.sort(without), between)
    above_within = len(within) - np.searchsorted(np.sort(within), between)
    louder, quieter = (
        bound_from_alarms(true_alarms, false_alarms, len(without), delta, confidence)
        for true_alarms, false_alarms in (
            (above_within, above_without),
            (len(within) - above_within, len(without) - above_without),
        )
    )
    rings_above = louder.max() >= quieter.max()
    bounds = louder if rings_above else quieter
    gaps = np.where(bounds >= bounds.max() - _NEARLY_NATS, np.diff(values), -1.0)
    threshold = between[int(gaps.argmax())]
    return lambda seen: seen > threshold if rings_above else seen <= threshold
