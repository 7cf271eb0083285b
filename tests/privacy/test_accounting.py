import math
from functools import partial

import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant

from privacy.accounts import WORDS, mechanism, theirs
from tightlip.core.errors import UsageError
from tightlip.privacy import accounting
from tightlip.privacy.accounting import (
    EpsilonMeter,
    Mechanism,
    check_delta,
    default_delta,
    epsilon_spent,
)


def gaussian_delta(epsilon, mu):
    """Oracle: δ of one Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""
    above, below = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    return normal_tail(above) - math.exp(epsilon) * normal_tail(below)


def normal_tail(value):
    return math.erfc(value / math.sqrt(2)) / 2


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (4.0, 30), (30.0, 5), (0.3, 2)])
def test_with_everybody_in_every_step_it_is_the_gaussian_mechanism(sigma, steps):
    epsilon = epsilon_spent(mechanism(sigma, 1.0), steps, 1e-5)
    assert gaussian_delta(epsilon, math.sqrt(steps) / sigma) == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [(1.0, 0.01, 1000, 1e-5), (3.0, 0.2, 50, 1e-6)],
)
def test_it_agrees_with_dp_accounting_by_both_accountants(sigma, rate, steps, delta):
    ours = mechanism(sigma, rate)
    by_pld = theirs(PLDAccountant(), sigma, rate, steps).get_epsilon(delta)
    by_rdp = theirs(RdpAccountant(), sigma, rate, steps).get_epsilon(delta)
    assert epsilon_spent(ours, steps, delta) == pytest.approx(by_pld, rel=1e-3)
    assert epsilon_spent(ours, steps, delta, "rdp") == pytest.approx(by_rdp)
    assert by_pld < by_rdp


@pytest.mark.parametrize(
    ("sigma", "rate", "most"),
    [(0.03, 0.02, 1), (0.7, 0.5, 1), (40.0, 1e-3, 1), (2.0, 1.0, 1), (0.8, 0.2, 3), (9.0, 0.01, 2)],
)
def test_a_steps_distribution_is_that_of_dp_accounting(sigma, rate, most):
    step = accounting._Sampled(sigma, rate, most)
    interval = accounting._reach(step) / 1000
    ours, how = accounting._one_step(step, interval), {"value_discretization_interval": interval}
    theirs = pld.from_gaussian_mechanism(sigma, sampling_prob=rate, **how)
    if most > 1:
        theirs = pld.from_mixture_gaussian_mechanism(sigma, range(most + 1), step.law(), **how)
    epsilons = np.linspace(-1, 1, 21) * accounting._reach(step)
    expected = theirs.get_delta_for_epsilon(epsilons)
    np.testing.assert_allclose(ours.get_delta_for_epsilon(epsilons), expected, 1e-9, 1e-14)


@pytest.mark.parametrize("delta", [1e-11, 1e-14, 1e-15, 1e-30])
@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.0, 0.01, 1000), (3.0, 0.2, 50)])
def test_at_a_very_small_delta_it_is_the_lesser_of_pld_and_rdp(sigma, rate, steps, delta):
    """PLD alone is infinite from 1e-15 on, and loose a little before."""
    by_pld = theirs(PLDAccountant(), sigma, rate, steps).get_epsilon(delta)
    by_rdp = theirs(RdpAccountant(), sigma, rate, steps).get_epsilon(delta)
    ours = epsilon_spent(mechanism(sigma, rate), steps, delta)
    assert ours == pytest.approx(min(by_pld, by_rdp), rel=1e-2)
    assert ours <= by_rdp


def test_a_very_small_delta_of_the_gaussian_mechanism_is_exact():
    epsilon = epsilon_spent(mechanism(4.0, 1.0), 30, 1e-20)
    assert gaussian_delta(epsilon, math.sqrt(30) / 4.0) == pytest.approx(1e-20, rel=1e-4)


def test_a_published_claim_of_one_is_really_above_three_and_a_half():
    claimed = mechanism(0.5286, 2.56e-4)
    assert epsilon_spent(claimed, 20_000, 1e-7, "published") == pytest.approx(1.0, abs=1e-3)
    assert epsilon_spent(claimed, 20_000, 1e-7) == pytest.approx(3.59, abs=5e-3)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(8.0, 1e-3, 10**5), (2.0, 1e-4, 10**4)])
def test_steps_smaller_than_the_usual_interval_are_not_rounded_up_to_it(sigma, rate, steps):
    # With much noise the central limit is nearly the truth; dp-accounting's default is not near.
    ours = epsilon_spent(mechanism(sigma, rate), steps, 1e-6)
    fine = theirs(PLDAccountant(value_discretization_interval=1e-5), sigma, rate, steps)
    usual = theirs(PLDAccountant(), sigma, rate, steps)
    assert ours == pytest.approx(fine.get_epsilon(1e-6), rel=4e-3)
    assert ours < usual.get_epsilon(1e-6)


def test_with_much_noise_many_steps_approach_the_central_limit():
    many = mechanism(20.0, 0.05)
    published = epsilon_spent(many, 2000, 1e-5, "published")
    assert epsilon_spent(many, 2000, 1e-5) == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("sigma", "rate", "steps"),
    [(1.5, 0.003, 10), (1.2, 0.1, 100), (3.0, 0.003, 300), (4.0, 0.1, 10)],
)
def test_more_steps_a_higher_rate_and_less_noise_each_spend_more(sigma, rate, steps, accountant):
    def spent(sigma, rate, steps):
        return epsilon_spent(mechanism(sigma, rate), steps, 1e-5, accountant)

    here = spent(sigma, rate, steps)
    assert 0 < here < spent(sigma, rate, 2 * steps)
    assert here < spent(sigma, 1.5 * rate, steps)
    assert here < spent(0.9 * sigma, rate, steps)


def test_nothing_done_spends_nothing_and_no_noise_spends_everything():
    assert epsilon_spent(mechanism(), 0, 1e-5) == 0.0
    assert epsilon_spent(mechanism(0.0), 0, 1e-5) == 0.0
    assert epsilon_spent(mechanism(0.0), 1, 1e-5) == math.inf
    assert epsilon_spent(mechanism(0.0), 1, 1e-5, "published") == math.inf
    assert epsilon_spent(mechanism(), 0, 1e-5, "published") == 0.0


def test_almost_no_noise_gives_a_large_number_and_no_error():
    assert 1e5 < epsilon_spent(mechanism(0.05, 0.5), 10_000, 1e-5) < 1e7


def test_an_earlier_release_is_composed_and_its_delta_taken_off():
    ours = epsilon_spent(mechanism(1.0, 0.01, WORDS), 1000, 1e-5)
    oracle = theirs(PLDAccountant(), 1.0, 0.01, 1000, WORDS.noise_multiplier)
    assert ours == pytest.approx(oracle.get_epsilon(9e-6), rel=1e-3)
    assert ours > epsilon_spent(mechanism(), 1000, 1e-5)
    alone = epsilon_spent(mechanism(1.0, 0.01, WORDS), 0, 1e-5)
    assert gaussian_delta(alone, 1 / 5.0) == pytest.approx(9e-6, rel=1e-6)


@pytest.mark.parametrize("spent", [epsilon_spent, partial(epsilon_spent, accountant="published")])
def test_a_delta_used_up_by_a_release_is_refused(spent):
    with pytest.raises(UsageError, match=r"used up .*vocabulary: 1e-06.*above 1e-06"):
        spent(mechanism(1.0, 0.01, WORDS), 10, 1e-6)


@pytest.mark.parametrize("wrong", [{"noise_multiplier": -1.0}, {"sampling_rate": 0.0}])
def test_a_mechanism_that_is_none_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Mechanism(**{"noise_multiplier": 1.0, "sampling_rate": 0.1} | wrong)


@pytest.mark.parametrize("num_steps", [1, 7, 300])
def test_the_meter_never_understates_and_is_exact_at_the_end(num_steps):
    run = mechanism(1.5, 0.05)
    meter = EpsilonMeter(run, 1e-5, num_steps)
    read = [meter.upper(steps) for steps in range(num_steps + 5)]
    assert read[0] == 0.0
    assert read == sorted(read)
    for steps in {1, num_steps // 3, num_steps // 2 + 1, num_steps + 1, num_steps + 4}:
        assert read[steps] >= epsilon_spent(run, steps, 1e-5)
    assert meter.upper(num_steps) == epsilon_spent(run, num_steps, 1e-5)


def test_the_meter_works_out_few_points_and_each_once(monkeypatch):
    worked_out = []
    plain = accounting._pld_epsilon

    def noting(spend, coarser):
        worked_out.append(spend.steps[0][1])
        return plain(spend, coarser)

    monkeypatch.setattr(accounting, "_pld_epsilon", noting)
    meter = EpsilonMeter(mechanism(), 1e-5, 3000)
    assert worked_out == []
    for steps in [*range(3001), *range(3001)]:
        meter.upper(steps)
    assert len(worked_out) == len(set(worked_out)) <= 28


def test_delta_by_default_is_far_below_one_over_the_units():
    assert default_delta(100) == 1e-5
    assert default_delta(1_000_000) == 1e-7


def test_a_delta_looser_than_one_over_the_units_is_refused_unless_allowed():
    line = r"delta=0\.01 is looser than 1/num_users \(1/4812\)\. Use delta below 2\.0e-04\."
    with pytest.raises(UsageError, match=line):
        check_delta(0.01, 4812, unit="user")
    check_delta(0.01, 4812, allow_loose=True)
    check_delta(1 / 4812, 4812)
    with pytest.raises(UsageError, match="no probability"):
        check_delta(0.0, 4812, allow_loose=True)
