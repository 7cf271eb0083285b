"""The privacy loss of one step as dp-accounting has it, in a fifth of the time.

dp-accounting asks for δ at one ε after the other, in Python. Its losses, its bounds and its
"connect the dots" stay as they are; here δ is worked out at all points at once.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import (
    AdjacencyType,
    GaussianPrivacyLoss,
    MixtureGaussianPrivacyLoss,
)


def loss_distribution(
    sigma: float, rate: float, interval: float, *, law: Sequence[float] | None = None
) -> PrivacyLossDistribution:
    """Of Gaussian noise on a Poisson sample; with `law`, of how often one person is drawn.

    Holds:
        as_dp_accounting: what its from_gaussian_mechanism and from_mixture_gaussian_mechanism make.
    """
    # With everybody in every step both directions are one.
    kinds = (AdjacencyType.REMOVE, AdjacencyType.ADD)[: 1 if rate == 1 else 2]
    parts = []
    for kind in kinds:
        loss: Any = _Gaussian(sigma, sampling_prob=rate, adjacency_type=kind)
        if law is not None:
            loss = _Mixture(sigma, range(len(law)), law, adjacency_type=kind)
        bounds = loss.connect_dots_bounds()
        least = math.floor(bounds.epsilon_lower / interval)
        most = math.ceil(bounds.epsilon_upper / interval)
        deltas = loss.get_delta_for_epsilon(np.arange(least, most + 1) * interval)
        parts.append(create_pmf_pessimistic_connect_dots_fixed_gap(interval, least, most, deltas))
    return PrivacyLossDistribution(*parts)


class _Gaussian(GaussianPrivacyLoss):  # type: ignore[misc]
    """dp-accounting's, asked at all points at once."""

    def get_delta_for_epsilon(self, epsilon: np.ndarray) -> np.ndarray:
        rate, removes = self.sampling_prob, self.adjacency_type == AdjacencyType.REMOVE
        sign = 1.0 if removes else -1.0
        loss = sign * epsilon
        # `whole` is the loss of the same noise without sampling, 1 + (e^loss - 1) / q = e^whole. Sampling
        # leaves no loss below log(1 - q): there everything lies above it.
        is_reached = loss > (math.log1p(-rate) if rate < 1 else -math.inf)
        low, high = np.minimum(loss, 0), np.maximum(loss, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            whole = np.where(
                loss > 0,
                high + np.log1p(-(1 - rate) * np.exp(-high)) - math.log(rate),
                np.log1p(np.expm1(low) / rate),
            )
            x = -sign * (0.5 + self.standard_deviation**2 * whole)
            deltas = self.mu_upper_cdf(x) - np.exp(epsilon + self.mu_lower_log_cdf(x))
        everything = -np.expm1(np.minimum(epsilon, 0)) if removes else 0.0
        return np.clip(np.where(is_reached, deltas, everything), 0, 1)


class _Mixture(MixtureGaussianPrivacyLoss):  # type: ignore[misc]
    """The same of the mixture, whose search it makes in Python too."""

    def _inverse_privacy_losses_with_range(
        self, privacy_losses: np.ndarray, bounds: tuple[float, float], precision: float = 1e-6
    ) -> np.ndarray:
        low, high = (np.full(len(privacy_losses), each) for each in bounds)
        while (is_open := high - low > precision).any():
            middle = (low + high) / 2
            is_above = privacy_losses < self._losses(middle)
            low = np.where(is_open & is_above, middle, low)
            high = np.where(is_open & ~is_above, middle, high)
        return np.floor(high / precision) * precision

    def _losses(self, x: np.ndarray) -> np.ndarray:
        """`privacy_loss` at every point."""
        sign = 1.0 if self.adjacency_type == AdjacencyType.REMOVE else -1.0
        shares, shifts = np.log(self.sampling_probs), self.sensitivities / self._variance
        each = shares - shifts * self.sensitivities / 2 - sign * np.multiply.outer(x, shifts)
        return sign * np.logaddexp.reduce(each, axis=1)
