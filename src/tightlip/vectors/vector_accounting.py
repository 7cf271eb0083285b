"""ε of noise on a grid: k discrete Laplaces composed, or one discrete Gaussian on a ball.

Everything here is about the whole numbers that are released before they become floats: values on
a grid of `GRID_STEP`, with noise whose scale is `units` steps of it. No figure is below the truth:
dp-accounting's privacy loss distributions are discretised pessimistically, concentrated
differential privacy gives upper bounds, and the pure figure is exact.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from tightlip.core.errors import UsageError

# A power of two, so that a value on the grid is a float without rounding. Finer than any noise.
GRID_STEPS = 1 << 16
GRID_STEP = 1 / GRID_STEPS
MOST_UNITS = 1 << 40
# Points of the loss distribution between 0 and one coordinate's ε: 100 give the ε of hundreds of
# coordinates to six figures, 20 that of thousands to five.
_POINTS, _POINTS_OF_MANY, _MANY = 100, 20, 2000
# Held back from δ, for each coordinate, for the rounding of the accountant's Fourier transforms:
# 20 roundings in a transform, raised to the power k, summed over 20 deviations by Parseval's
# theorem, make 5e-15 at most. A δ not far above that is left to the other bounds.
_PLD_RESERVE = 1e-14
# Beyond these the distribution is too long to compose, or e^loss no float.
_MOST_COORDINATES, _MOST_PURE = 1_000_000, 100.0
_ABOVE = 1 + 1e-12  # floating-point results are taken this much higher


def amplified(epsilon: float, dropout: float) -> float:
    """ε after each word was masked with probability `dropout` at least: ln(1 + (1 − μ)(e^ε − 1)).

    Holds:
        untouched: without dropout nothing changes.
        smaller: the result is at most `epsilon` and falls as `dropout` rises.
    """
    if not dropout:
        return epsilon
    if epsilon < 1:
        return math.log1p((1 - dropout) * math.expm1(epsilon))
    return epsilon + math.log(1 - dropout + dropout * math.exp(-epsilon))


def before_dropout(epsilon: float, dropout: float) -> float:
    """The ε that dropout turns into `epsilon`; the inverse of `amplified`."""
    if not dropout:
        return epsilon
    if epsilon < 1:
        return math.log1p(math.expm1(epsilon) / (1 - dropout))
    return epsilon + math.log1p(-dropout * math.exp(-epsilon)) - math.log(1 - dropout)


def pure_epsilon(units: int, num_coordinates: int) -> float:
    """ε at δ = 0 of Laplace noise, every coordinate free to move over all of [0, 1]."""
    return float(Fraction(num_coordinates * GRID_STEPS, units))


@lru_cache(maxsize=256)
def laplace_epsilon(units: int, num_coordinates: int, delta: float) -> float:
    """ε at `delta` of discrete Laplace noise on each of so many coordinates in [0, 1].

    Holds:
        pure: at δ = 0 it is the exact pure figure, and never more than that.
        monotone: more noise, fewer coordinates or a larger δ never give more.
    """
    pure = pure_epsilon(units, num_coordinates)
    if delta <= 0:
        return pure
    # An ε-DP mechanism is ε²/2-zCDP (Bun and Steinke 2016, Proposition 1.4).
    rho = num_coordinates * pure_epsilon(units, 1) ** 2 / 2
    epsilon = min(pure, zcdp_epsilon(rho, delta))
    reserve = _PLD_RESERVE * num_coordinates
    too_long = num_coordinates > _MOST_COORDINATES or pure_epsilon(units, 1) > _MOST_PURE
    if too_long or delta < 10 * reserve or epsilon == 0:
        return epsilon
    return min(epsilon, _pld_epsilon(units, num_coordinates, delta - reserve))


def _pld_epsilon(units: int, num_coordinates: int, delta: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld

    points = _POINTS if num_coordinates <= _MANY else _POINTS_OF_MANY
    one = pld.from_discrete_laplace_mechanism(
        1 / units,
        sensitivity=GRID_STEPS,
        value_discretization_interval=GRID_STEPS / units / points,
        use_connect_dots=True,
    )
    composed = one.self_compose(num_coordinates) if num_coordinates > 1 else one
    epsilon = float(composed.get_epsilon_for_delta(delta))
    # Where e^loss overflows there may be no number; then it bounds nothing.
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon) * _ABOVE


def gaussian_epsilon(units: int, delta: float, num_releases: int = 1) -> float:
    """ε at `delta` of discrete Gaussian noise on a vector of norm 1 at most.

    Two such vectors are at most 2 apart, so the noise is 2/σ²-zCDP however many coordinates there
    are (Canonne, Kamath and Steinke 2020, Theorem 14).
    """
    return zcdp_epsilon(float(Fraction(2 * num_releases * GRID_STEPS**2, units**2)), delta)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """ε at `delta` of a ρ-zCDP mechanism (Canonne, Kamath and Steinke 2020, Proposition 12).

    Every order α > 1 gives a bound; the best lies where a golden section finds it.
    """
    if delta <= 0:
        return math.inf if rho else 0.0

    def at(log_order: float) -> float:
        above = math.exp(log_order)  # α − 1
        order = 1 + above
        return order * rho - math.log1p(1 / above) - (math.log(delta) + math.log(order)) / above

    return max(0.0, _least(at, -12.0, 24.0)) * _ABOVE


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """The least value seen by a golden section between two points."""
    golden = (math.sqrt(5) - 1) / 2
    least = math.inf
    for _ in range(80):
        left, right = high - golden * (high - low), low + golden * (high - low)
        at_left, at_right = function(left), function(right)
        least = min(least, at_left, at_right)
        low, high = (low, right) if at_left < at_right else (left, high)
    return least


def laplace_units(num_coordinates: int, epsilon: float, delta: float) -> int:
    """The least scale, up to two millionths, at which all coordinates together spend `epsilon`."""
    pure = math.ceil(Fraction(num_coordinates * GRID_STEPS) / Fraction(epsilon))
    if delta <= 0:
        return allowed_units(pure, epsilon)
    return _least_units(lambda units: laplace_epsilon(units, num_coordinates, delta), epsilon, pure)


def gaussian_units(epsilon: float, delta: float) -> int:
    """The least scale, up to two millionths, at which a vector in the unit ball spends `epsilon`."""
    return _least_units(lambda units: gaussian_epsilon(units, delta), epsilon, MOST_UNITS)


def _least_units(spent: Callable[[int], float], epsilon: float, enough: int) -> int:
    """A scale that spends at most `epsilon`, and would spend more if it were a little smaller."""
    from scipy.optimize import brentq

    enough = min(enough, MOST_UNITS)
    if spent(1) <= epsilon:
        return 1
    if spent(enough) > epsilon:
        allowed_units(enough + 1, epsilon)
        enough = MOST_UNITS
    excess = lambda log_units: math.log(  # noqa: E731
        max(spent(round(math.exp(log_units))), 1e-300) / epsilon
    )
    units = round(math.exp(brentq(excess, 0.0, math.log(enough) + 1e-9, xtol=1e-6, rtol=1e-9)))
    while spent(units) > epsilon:
        units += max(1, units // 1_000_000)
    return allowed_units(units, epsilon)


def allowed_units(units: int, epsilon: float) -> int:
    """The scale itself, refused where whole numbers of 64 bits would no longer hold the noise."""
    if units > MOST_UNITS:
        raise UsageError(
            f"epsilon={epsilon:g} would need noise {units / GRID_STEPS:.3g} times the range of the values: "
            "nothing would be left of them. Use a larger epsilon."
        )
    return max(1, units)
