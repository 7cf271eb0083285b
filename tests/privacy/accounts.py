"""What the tests of accounting share: mechanisms in short, and dp-accounting's word on them."""

import dp_accounting

from tightlip.privacy.accounting import Mechanism, Release
from tightlip.privacy.plans import noise_for_target

WORDS = Release(name="vocabulary", noise_multiplier=5.0, delta=1e-6, note="words of at least …")


def theirs(accountant, sigma, rate, steps, *others):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(event, steps)
    for other in others:
        accountant.compose(dp_accounting.GaussianDpEvent(other))
    return accountant


def mechanism(sigma=1.0, rate=0.01, *releases):
    return Mechanism(noise_multiplier=sigma, sampling_rate=rate, releases=releases)


def calibrated_noise_multiplier(*, epsilon, delta, steps, **mechanism_of):
    mechanism = Mechanism(noise_multiplier=1.0, **mechanism_of)
    return noise_for_target(mechanism, epsilon, delta, steps)
