"""The filter of adaptive runs: what a step costs, what fits, and that nothing passes the budget."""

import math
import random

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.accounts import WORDS, theirs
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy.accounting import Mechanism, epsilon_spent
from tightlip.privacy.adaptive import joint_multiplier
from tightlip.privacy.rdp_filter import (
    ORDERS,
    RdpFilter,
    RdpMeter,
    best_order,
    epsilon_of_rdp,
    filter_for,
    rdp_within,
    release_rdp,
    subsampled_gaussian_rdp,
)


def their_rdp(order, sigma, rate):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant = RdpAccountant([order])
    accountant.compose(event)
    return float(accountant._rdp[0])


@pytest.mark.parametrize("rate", [1e-5, 1e-3, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("order", [2, 3, 32, 256])
def test_a_step_costs_what_dp_accounting_says(order, sigma, rate):
    # Theirs sums numbers near 1, so that of a tiny divergence some of its digits are noise.
    expected = their_rdp(order, sigma, rate)
    found = subsampled_gaussian_rdp(order, sigma, rate)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_less_noise_or_a_higher_rate_never_costs_less():
    for order in (2, 17, 128):
        by_noise = [subsampled_gaussian_rdp(order, sigma, 0.1) for sigma in (0.2, 0.5, 1, 3, 9)]
        by_rate = [subsampled_gaussian_rdp(order, 1.0, rate) for rate in (1e-4, 0.01, 0.3, 0.9, 1)]
        assert by_noise == sorted(by_noise, reverse=True)
        assert by_rate == sorted(by_rate)
    assert subsampled_gaussian_rdp(4, 0.0, 0.1) == math.inf


@pytest.mark.parametrize("order", [2, 5, 64, 512])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_divergence_becomes_epsilon_as_in_dp_accounting_and_back(order, delta):
    for rdp in (0.01, 1.0, 30.0):
        epsilon = epsilon_of_rdp(rdp, order, delta)
        assert epsilon == pytest.approx(compute_epsilon([order], [rdp], delta)[0])
        if epsilon > 0:
            assert rdp_within(epsilon, order, delta) == pytest.approx(rdp)


def test_a_release_is_charged_with_its_gradient_as_one_and_not_apart():
    """METHODS' example. The mean of 64 weights in [0, 1] released with noise 0.02 is a sum of
    sensitivity 1 with noise 0.02 · 64, so z = 1.28 beside σ = 1."""
    z = 0.02 * 64

    def spent(*sigmas):
        accountant = PLDAccountant()
        for sigma in sigmas:
            theirs(accountant, sigma, 0.01, 1000)
        return math.ceil(100 * accountant.get_epsilon(1e-5)) / 100

    assert spent(joint_multiplier(1.0, z)) == 3.28
    assert spent(1.0, z) == 2.19
    assert spent(1.0) == 1.83
    joint = Mechanism(noise_multiplier=joint_multiplier(1.0, z), sampling_rate=0.01)
    assert epsilon_spent(joint, 1000, 1e-5) == pytest.approx(3.275, abs=5e-3)


def spent_by_hand(order, sigmas, rate, delta):
    """Oracle: dp-accounting at one order, a step at a time."""
    accountant = RdpAccountant([order])
    for sigma in sigmas:
        theirs(accountant, sigma, rate, 1)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize("how", ["random", "all least", "all full", "falling", "rising"])
@pytest.mark.parametrize("seed", range(3))
def test_no_sequence_of_noise_passes_the_target_and_the_stop_is_not_early(how, seed):
    draw = random.Random(seed)
    epsilon, rate = draw.choice([3.0, 8.0]), draw.choice([0.05, 0.2])
    budget = filter_for(epsilon=epsilon, delta=1e-5, noise_multiplier=1.2, sampling_rate=rate)
    taken: list[float] = []
    while len(taken) < 3000:
        share = {
            "random": draw.uniform(0.7, 1), "all least": 0.7, "all full": 1.0,
            "falling": max(0.7, 1 - len(taken) / 50), "rising": min(1.0, 0.7 + len(taken) / 50),
        }[how]  # fmt: skip
        if not budget.fits(1.2 * share):
            assert spent_by_hand(budget.order, [*taken, 1.2 * share], rate, 1e-5) > epsilon
            break
        budget.charge(1.2 * share)
        taken.append(1.2 * share)
    assert taken or how != "all full"
    assert spent_by_hand(budget.order, taken, rate, 1e-5) <= epsilon
    assert budget.spent <= budget.budget


@settings(max_examples=200, deadline=None)
@given(
    asked=st.lists(st.floats(0.05, 20), max_size=40),
    budget=st.floats(1e-6, 30),
    order=st.sampled_from([2, 7, 40, 256]),
    rate=st.sampled_from([1e-4, 0.05, 1.0]),
)
def test_whatever_is_asked_for_the_filter_stays_within_and_keeps_what_it_charged(
    asked, budget, order, rate
):
    held, before = RdpFilter(order=order, budget=budget, sampling_rate=rate), 0.0
    for sigma in asked:
        if held.fits(sigma):
            held.charge(sigma)
            assert held.spent > before
        else:
            with pytest.raises(GuaranteeError, match="would pass the budget"):
                held.charge(sigma)
            assert held.spent == before
        before = held.spent
        assert held.spent <= budget


def test_the_order_is_the_one_at_which_most_steps_fit():
    given_ = {"epsilon": 4.0, "delta": 1e-6, "noise_multiplier": 1.1, "sampling_rate": 0.02}
    order, steps = best_order(**given_)
    for other in ORDERS:
        room = rdp_within(4.0, other, 1e-6)
        assert room / subsampled_gaussian_rdp(other, 1.1, 0.02) <= steps * (1 + 1e-6)
    assert filter_for(**given_).order == order


@pytest.mark.parametrize("steps", [30, 200, 1500])
def test_the_order_lets_the_planned_steps_through_at_as_little_noise_as_any(steps):
    given_ = {"epsilon": 3.0, "delta": 1e-5, "sampling_rate": 0.01}
    held = filter_for(**given_, noise_multiplier=1.0, least_noise=0.4, steps=steps)

    def least(order, room):
        """Oracle: by small steps, the least noise of which so many fit at this order."""
        noises = [0.4 + 0.005 * number for number in range(121)]
        fit = [noise for noise in noises if steps * their_rdp(order, noise, 0.01) <= room]
        return min(fit, default=math.inf)

    found = least(held.order, held.budget)
    assert found <= 1.0
    for order in (2, 3, 4, 6, 8, 12, 16, 24, 40, 64):
        assert found <= least(order, rdp_within(3.0, order, 1e-5)) + 0.006


def test_an_order_for_less_noise_lets_many_more_steps_through_when_the_scale_falls():
    given_ = {"epsilon": 3.0, "delta": 1e-5, "sampling_rate": 0.01, "noise_multiplier": 1.0}
    for_full, for_less = filter_for(**given_), filter_for(**given_, least_noise=0.5, steps=300)
    assert for_full.budget / for_full.cost(0.8) < 50
    assert for_less.budget / for_less.cost(0.8) > 300


def test_what_was_released_before_training_is_taken_off_the_budget():
    given_ = {"epsilon": 4.0, "delta": 1e-5, "noise_multiplier": 1.0, "sampling_rate": 0.05}
    held = filter_for(**given_, releases=(WORDS,))
    assert held.budget == pytest.approx(
        rdp_within(4.0, held.order, 1e-5) - release_rdp((WORDS,), held.order)
    )
    assert release_rdp((WORDS,), 10) == pytest.approx(10 / (2 * 5.0**2))


def test_a_target_that_not_one_step_keeps_is_refused():
    with pytest.raises(UsageError, match=r"spends more than epsilon=0\.1 in its first step"):
        filter_for(epsilon=0.1, delta=1e-5, noise_multiplier=0.2, sampling_rate=0.5)


def test_the_cheap_meter_is_never_below_pld():
    mechanism = Mechanism(noise_multiplier=1.0, sampling_rate=0.05, releases=(WORDS,))
    meter = RdpMeter(mechanism, 1e-5)
    for steps in (0, 1, 40, 500):
        assert meter.upper(steps) >= epsilon_spent(mechanism, steps, 1e-5)
    bare = RdpMeter(Mechanism(noise_multiplier=1.0, sampling_rate=0.05), 1e-5)
    assert bare.upper(0) == 0
