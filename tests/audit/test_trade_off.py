"""How many right guesses a run's noise allows: against closed forms, the exact optimum by linear
programming, and thousands of simulated runs."""

import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binomtest, norm

from tightlip.audit.dp_check import Claim, check_guesses
from tightlip.audit.trade_off import (
    LEVEL,
    Independent,
    Steps,
    TradeOff,
    best_num_guesses,
    even,
    rejected_share,
)

# Noise as calibrated for ε 2 and ε 8 at δ 1e-5.
SELDOM_2 = Steps(noise_multiplier=0.959, sampling_rate=0.01, steps=1000)
OFTEN_2 = Steps(noise_multiplier=6.392, sampling_rate=0.1, steps=1000)
SELDOM_8 = Steps(noise_multiplier=0.586, sampling_rate=0.01, steps=1000)
HALF_8 = Steps(noise_multiplier=2.063, sampling_rate=0.5, steps=40)
FEW_2 = Steps(noise_multiplier=1.86, sampling_rate=0.1, steps=60)


@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_the_trade_off_of_one_gaussian_is_its_closed_form(sigma):
    found = Steps(noise_multiplier=sigma, sampling_rate=1.0, steps=1).trade_off()
    for least in (1e-4, 0.01, 0.2, 0.7):
        reached = norm.cdf(norm.ppf(least) + 1 / sigma)
        assert found.least(reached) == pytest.approx(least, rel=0.02)
        assert found.least(reached) <= least * (1 + 1e-9)


def most_by_linear_program(law, m, c, v):
    """Oracle: the largest tail of any law of the number of right guesses that fulfils every bound."""
    numbers = np.arange(c + 1)
    limits, at_most = [], []
    for i in range(1, c + 1):
        right, wrong = numbers / m * (numbers >= i), (c - numbers) / m * (numbers >= i - 1)
        for slope, offset in zip(law.slopes, law.offsets, strict=True):
            limits.append(right - slope * wrong)
            at_most.append(offset)
    found = linprog(-1.0 * (numbers >= v), limits, at_most, [np.ones(c + 1)], [1.0])
    assert found.status == 0
    return -found.fun


@pytest.mark.parametrize(("m", "c"), [(6, 2), (8, 8), (30, 10)])
@pytest.mark.parametrize("pairs", [([1.0], [1e-3]), ([0.0, 0.5, 2.0], [0.2, 0.05, 1e-4])])
def test_what_is_ruled_out_is_what_no_law_of_guesses_can_reach(m, c, pairs):
    law = TradeOff.of(*map(np.array, pairs))
    for v in range(1, c + 1):
        most = most_by_linear_program(law, m, c, v)
        assert law.p_value(m, c, v) == pytest.approx(most, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_without_delta_a_guess_is_right_as_often_as_in_randomised_response(epsilon):
    law = TradeOff.of(np.array([epsilon]), np.array([0.0]))
    for share in (0.05, 0.2):
        assert law.most_right(share) == pytest.approx(1 / (1 + math.exp(-epsilon)))


@pytest.mark.parametrize("law", [SELDOM_2.trade_off(), SELDOM_2.independent()])
def test_more_right_guesses_are_never_likelier_and_the_limit_is_where_they_contradict(law):
    chances = [law.p_value(500, 100, v) for v in range(40, 101, 6)]
    assert chances == sorted(chances, reverse=True)
    needed = law.least_to_contradict(500, 100)
    assert law.p_value(500, 100, needed) <= LEVEL < law.p_value(500, 100, needed - 1)


def share_of(steps, noise, *, watched=False, num_draws=100):
    number = even(1000, 0.5) if watched else best_num_guesses(steps, 1000)[0]
    return rejected_share(steps, 1000, number, noise=noise, watched=watched, num_draws=num_draws)


def test_the_finished_model_tells_half_the_noise_as_often_as_worked_out():
    assert 0.1 < share_of(SELDOM_2, 0.5, num_draws=400) < 0.25
    assert share_of(OFTEN_2, 0.5) > 0.9
    assert share_of(SELDOM_8, 0.5) == 0
    assert 0.6 < share_of(HALF_8, 0.5) <= 1


@pytest.mark.parametrize("steps", [FEW_2, HALF_8])
def test_whoever_watches_every_step_tells_half_the_noise(steps):
    assert share_of(steps, 0.5, watched=True, num_draws=30) >= 0.9


@pytest.mark.parametrize(("steps", "watched"), [(SELDOM_2, False), (OFTEN_2, False), (Steps(noise_multiplier=1.4, sampling_rate=0.1, steps=20), True)])  # fmt: skip
def test_honest_runs_are_contradicted_at_most_5_times_in_100(steps, watched):
    share = share_of(steps, 1.0, watched=watched, num_draws=2000)
    assert share <= LEVEL + 2 * math.sqrt(LEVEL * (1 - LEVEL) / 2000)


def test_randomised_response_is_contradicted_as_seldom_by_independent_guesses():
    draw, right, m = np.random.default_rng(5), 1 / (1 + math.exp(-1.0)), 400
    law = TradeOff.of(np.array([1.0]), np.array([0.0]))
    needed = Independent(law, law).least_to_contradict(m, 200)
    times = int((draw.binomial(200, right, 2000) >= needed).sum())
    assert binomtest(times, 2000, LEVEL, alternative="greater").pvalue > 1e-3
    assert times > 0.01 * 2000


def test_the_number_of_guesses_does_not_hang_on_the_scores():
    draw = np.random.default_rng(6)
    claim = Claim(epsilon=2.0, delta=1e-5, steps=SELDOM_2)
    included = draw.random(1000) < 0.5
    for scores in (draw.normal(size=1000), included + 0.0, ~included + draw.normal(size=1000)):
        assert check_guesses(scores, included, claim).num_guesses == 100


def test_a_ledger_of_steps_is_judged_by_them_and_another_by_its_epsilon():
    told = {"epsilon": 2.0, "delta": 1e-5, "noise_multiplier": 0.9, "sampling_rate": 0.01}
    assert Claim.of(told | {"steps": 10}).steps == Steps(
        noise_multiplier=0.9, sampling_rate=0.01, steps=10
    )
    for other in (told, told | {"steps": 10, "adaptive": {"mode": "scale"}}):
        assert Claim.of(other).steps is None
        assert len(Claim.of(other).law(independent=True).slopes) == 2
    assert Claim.of({"epsilon": None}).law(independent=True) is None
