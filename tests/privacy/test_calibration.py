import pytest

from privacy.accounts import WORDS, calibrated_noise_multiplier, mechanism
from tightlip.core.errors import UsageError
from tightlip.privacy import accounting
from tightlip.privacy.accounting import epsilon_spent
from tightlip.privacy.plans import largest_steps


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate", "steps", "releases"),
    [
        (4.0, 1e-5, 0.05, 300, ()),
        (2.0, 1e-5, 0.2, 100, (WORDS,)),
        (3.0, 1e-5, 1.0, 50, ()),
        (200.0, 1e-5, 0.05, 500, ()),
    ],
)
def test_calibrated_noise_keeps_the_budget_and_less_does_not(epsilon, delta, rate, steps, releases):
    sigma = calibrated_noise_multiplier(
        epsilon=epsilon, delta=delta, sampling_rate=rate, steps=steps, releases=releases
    )
    assert epsilon_spent(mechanism(sigma, rate, *releases), steps, delta) <= epsilon
    assert epsilon_spent(mechanism(0.998 * sigma, rate, *releases), steps, delta) > epsilon


def test_calibration_looks_at_few_fine_distributions(monkeypatch):
    seen = []
    plain = accounting._pld_epsilon

    def noting(spend, coarser):
        seen.append(coarser)
        return plain(spend, coarser)

    monkeypatch.setattr(accounting, "_pld_epsilon", noting)
    calibrated_noise_multiplier(epsilon=1.0, delta=1e-5, sampling_rate=0.05, steps=200)
    assert seen.count(1.0) <= 7
    assert len(seen) <= 20


def test_a_budget_that_no_noise_reaches_is_refused_with_what_to_do():
    with pytest.raises(UsageError, match="spent before training: vocabulary took"):
        calibrated_noise_multiplier(
            epsilon=0.1, delta=1e-5, sampling_rate=0.01, steps=10, releases=(WORDS,)
        )
    with pytest.raises(UsageError, match="No noise up to"):
        calibrated_noise_multiplier(epsilon=1e-4, delta=1e-9, sampling_rate=1.0, steps=10**9)
    with pytest.raises(UsageError, match="leaves nothing"):
        calibrated_noise_multiplier(epsilon=0.0, delta=1e-5, sampling_rate=0.1, steps=10)


@pytest.mark.parametrize(("sigma", "rate", "epsilon"), [(2.0, 0.05, 1.5), (2.0, 1.0, 5.0)])
def test_the_largest_number_of_steps_fits_and_one_more_does_not(sigma, rate, epsilon):
    run = mechanism(sigma, rate)
    steps = largest_steps(run, epsilon, 1e-5, 5000)
    assert 0 < steps < 5000
    assert epsilon_spent(run, steps, 1e-5) <= epsilon < epsilon_spent(run, steps + 1, 1e-5)


def test_the_number_of_steps_has_its_ends():
    assert largest_steps(mechanism(), 100.0, 1e-5, 50) == 50
    assert largest_steps(mechanism(0.5, 1.0), 0.1, 1e-5, 50) == 0
    assert largest_steps(mechanism(0.0), 8.0, 1e-5, 50) == 0
    assert largest_steps(mechanism(), 8.0, 1e-5, 0) == 0
