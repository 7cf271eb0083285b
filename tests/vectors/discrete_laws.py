"""Slow, plain oracles: laws on whole numbers, and what tells two of them apart."""

import numpy as np


def laplace_law(units: float, reach: int) -> np.ndarray:
    """Probabilities of −reach … reach, proportional to e^(−|x|/units)."""
    weights = np.exp(-np.abs(np.arange(-reach, reach + 1)) / units)
    return weights / weights.sum()


def gaussian_law(units: float, reach: int) -> np.ndarray:
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * units**2))
    return weights / weights.sum()


def moved(law: np.ndarray, by: int, room: int) -> np.ndarray:
    """The law of x + by, 0 <= by <= room, on a support that has room for all such."""
    return np.concatenate([np.zeros(by), law, np.zeros(room - by)])


def hockey_stick(one: np.ndarray, other: np.ndarray, epsilon: float) -> float:
    """The least δ at which `one` is at most e^ε times `other`."""
    return float(np.maximum(one - np.exp(epsilon) * other, 0).sum())


def least_epsilon(delta_at, delta: float, high: float) -> float:
    """The least ε with delta_at(ε) <= delta, by bisection."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return high
