"""The statistics of the one-run check: its bound against exact optima and against chance.

The oracle is a linear program over every mechanism there is: (ε, δ)-privacy is linear in the
probabilities Pr[guesses | coins], and so is the probability of many right guesses.
"""

import itertools
import json
import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import lil_matrix
from scipy.stats import beta, binom, binomtest

from tightlip.audit.dp_check import (
    Claim,
    DPCheckAudit,
    DPChecks,
    check_guesses,
    default_num_guesses,
    epsilon_lower_bound,
    gated,
    p_value,
)
from tightlip.audit.trade_off import Steps, correct_guesses
from tightlip.core.errors import UsageError


def right_at(epsilon):
    return 1 / (1 + math.exp(-epsilon))


def best_mechanism(m, r, v, epsilon, delta):
    """Oracle: the largest Pr[at least v of r guesses right] of any (ε, δ)-private mechanism."""
    coins = list(itertools.product([0, 1], repeat=m))
    answers = [
        dict(zip(chosen, bits, strict=True))
        for chosen in itertools.combinations(range(m), r)
        for bits in itertools.product([0, 1], repeat=r)
    ]
    wins = np.array([[sum(s[i] == g for i, g in t.items()) >= v for t in answers] for s in coins])
    pairs = [
        (one, coins.index(tuple(bit ^ (place == i) for place, bit in enumerate(s))))
        for one, s in enumerate(coins)
        for i in range(m)
    ]
    num, total = len(answers), len(coins) * len(answers)
    # Unknowns: Pr[t | s], and for each neighbouring pair the excess (Pr[t | s] - e^ε Pr[t | s'])⁺.
    limits, at_most = lil_matrix((len(pairs) * (num + 1), total + len(pairs) * num)), []
    for number, (one, other) in enumerate(pairs):
        excess = total + number * num
        for t in range(num):
            row = number * (num + 1) + t
            limits[row, one * num + t] = 1
            limits[row, other * num + t] = -math.exp(epsilon)
            limits[row, excess + t] = -1
        limits[number * (num + 1) + num, excess : excess + num] = 1
        at_most += [0.0] * num + [delta]
    whole = lil_matrix((len(coins), limits.shape[1]))
    for one in range(len(coins)):
        whole[one, one * num : (one + 1) * num] = 1
    gain = np.zeros(limits.shape[1])
    gain[:total] = wins.ravel() / len(coins)
    found = linprog(-gain, limits.tocsr(), at_most, whole.tocsr(), np.ones(len(coins)))
    assert found.status == 0
    return -found.fun


@pytest.mark.parametrize(("m", "r"), [(1, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 3), (4, 4)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.05), (0.7, 0.02), (2.0, 0.1), (1.0, 0.0)])
def test_no_mechanism_has_more_right_guesses_than_the_bound(m, r, epsilon, delta):
    for v in range(1, r + 1):
        best = best_mechanism(m, r, v, epsilon, delta)
        assert best <= p_value(m, r, v, epsilon, delta) + 1e-7


@pytest.mark.parametrize(("m", "r", "v"), [(100, 40, 30), (1000, 200, 150), (1000, 200, 199)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-3), (1.0, 1e-5), (4.0, 1e-4)])
def test_the_delta_term_is_at_least_the_papers(m, r, v, epsilon, delta):
    chances = binom(r, 1 / (1 + math.exp(-epsilon)))
    highest = max((chances.cdf(v - 1) - chances.cdf(v - 1 - i)) / i for i in range(1, v + 1))
    papers = min(1.0, chances.sf(v - 1) + 2 * m * delta * highest)
    assert p_value(m, r, v, epsilon, delta) >= papers * (1 - 1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 5.0])
@pytest.mark.parametrize("num_guesses", [1, 7, 200, 3000])
def test_without_delta_it_is_the_tail_of_a_binomial(epsilon, num_guesses):
    for v in np.unique(np.linspace(0, num_guesses, 9).astype(int)):
        theirs = binom.sf(v - 1, num_guesses, right_at(epsilon))
        assert p_value(5000, num_guesses, v, epsilon, 0.0) == pytest.approx(
            theirs, rel=1e-8, abs=1e-300
        )


@pytest.mark.parametrize("epsilon", [0.3, 1.5])
def test_randomised_response_passes_the_bound_as_often_as_it_says(epsilon):
    draw, m, repeats = np.random.default_rng(1), 120, 20_000
    num_right = draw.binomial(m, right_at(epsilon), repeats)
    for v in (round(m * right_at(epsilon)), round(m * right_at(epsilon)) + 8):
        times = int((num_right >= v).sum())
        assert binomtest(times, repeats, p_value(m, m, v, epsilon, 0.0)).pvalue > 1e-3


@pytest.mark.parametrize("block", [1, 3, 10, 25, 60])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_telling_a_few_coins_outright_now_and_then_stays_below_the_bound(block, epsilon):
    """With probability mδ/block the coins of a random block are told, else randomised response:
    nothing gains more from δ, once the block is as large as what was missing."""
    m, delta = 100, 1e-3
    told, others = m * delta / block, binom(m - block, right_at(epsilon))
    for v in range(1, m + 1):
        plain = binom.sf(v - 1, m, right_at(epsilon))
        truth = (1 - told) * plain + told * others.sf(v - block - 1)
        assert truth <= p_value(m, m, v, epsilon, delta) + 1e-12


def test_telling_all_coins_with_probability_delta_is_seen_and_no_more_often():
    draw, m, epsilon, delta, repeats = np.random.default_rng(2), 50, 1.0, 0.02, 20_000
    num_right = np.where(draw.random(repeats) < delta, m, draw.binomial(m, right_at(1.0), repeats))
    for v in (45, 50):
        times = int((num_right >= v).sum())
        assert times > 2 * repeats * p_value(m, m, v, epsilon, 0.0)  # δ must count
        assert times < repeats * p_value(m, m, v, epsilon, delta)


@pytest.mark.parametrize("delta", [0.0, 1e-6, 1e-4])
def test_more_right_guesses_raise_the_bound_and_more_delta_or_confidence_lower_it(delta):
    bounds = [epsilon_lower_bound(500, 100, v, delta) for v in range(101)]
    assert bounds == sorted(bounds)
    assert bounds[50] == 0.0
    assert bounds[100] > 3
    ruled_out = [p_value(500, 100, v, each, delta) for v, each in enumerate(bounds) if each]
    assert max(ruled_out) <= 0.05 + 1e-12
    assert epsilon_lower_bound(500, 100, 80, delta, 0.99) < bounds[80]
    assert epsilon_lower_bound(500, 100, 80, 10 * delta + 1e-6) < bounds[80]
    p_values = [p_value(500, 100, v, 1.0, delta) for v in range(101)]
    assert p_values == sorted(p_values, reverse=True)


@pytest.mark.parametrize(("r", "v"), [(20, 20), (40, 33), (200, 150), (1000, 600)])
def test_without_delta_the_bound_is_that_of_clopper_and_pearson(r, v):
    lower = beta.ppf(0.05, v, r - v + 1)
    expected = math.log(lower / (1 - lower))
    assert epsilon_lower_bound(2000, r, v, 0.0) == pytest.approx(expected, abs=1e-9)


def test_scores_that_know_nothing_give_zero_in_about_95_of_100_seeds():
    draw, num_seeds, m = np.random.default_rng(3), 5000, 300
    r = default_num_guesses(m)
    bounds = np.array([epsilon_lower_bound(m, r, v, 1e-6) for v in range(r + 1)])
    by_chance = binom.sf(np.argmax(bounds > 0) - 1, r, 0.5)
    assert 0.02 < by_chance <= 0.05
    found = sum(
        bounds[correct_guesses(draw.normal(size=m), draw.random(m) < 0.5, r)] > 0
        for _ in range(num_seeds)
    )
    assert binomtest(int(found), num_seeds, by_chance).pvalue > 1e-3


@pytest.mark.parametrize("m", [100, 1000, 10_000])
def test_scores_that_know_everything_give_a_bound_that_grows_like_the_logarithm(m):
    included = np.random.default_rng(4).random(m) < 0.5
    check = check_guesses(included + 0.0, included, Claim(epsilon=2.0, delta=1e-6))
    assert check.num_correct == check.num_guesses == default_num_guesses(m)
    assert check.epsilon_lower_bound == pytest.approx(math.log(check.num_guesses / 3), abs=0.1)
    assert check.verdict == "contradicted"


def test_guesses_are_the_highest_and_the_lowest_scores():
    scores = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 0.0])
    included = np.array([True, False, True, True, False, False])
    assert correct_guesses(scores, included, 4) == 4
    assert correct_guesses(scores, included, 6) == 4  # 3.0 is guessed in, 2.0 out
    assert correct_guesses(scores, ~included, 4) == 0
    assert correct_guesses(np.zeros(6), np.ones(6, bool), 4) == 2


@pytest.mark.parametrize("m", [0, 1, 2, 3, 10, 99, 100, 1001])
def test_the_number_of_guesses_is_even_and_leaves_some_out(m):
    r = default_num_guesses(m)
    assert r % 2 == 0
    assert r <= m // 2 + 1


def test_a_check_says_what_was_claimed_and_how_it_stands():
    scores, included = np.arange(100.0), np.arange(100) >= 50
    found = check_guesses(scores, included, Claim(epsilon=2.0, delta=1e-5))
    assert found.verdict == "contradicted"
    record = DPChecks(claimed_epsilon=2.0, delta=1e-5, text=found).to_json()
    assert json.loads(json.dumps(record))["text"]["num_correct"] == 40
    assert gated(record)["text_num_correct"] == 40
    weaker = check_guesses(scores, included, Claim(epsilon=8.0, delta=1e-5))
    assert weaker.verdict == "consistent"
    assert weaker.epsilon_lower_bound == found.epsilon_lower_bound
    unclaimed = check_guesses(scores, included, Claim(epsilon=None, delta=1e-5))
    assert unclaimed.verdict == "nothing claimed"


def test_too_few_canaries_or_no_confidence_rule_nothing_out():
    assert epsilon_lower_bound(2, 0, 0, 0.0) == 0.0
    assert epsilon_lower_bound(8, 4, 4, 0.0) == 0.0
    with pytest.raises(UsageError, match="confidence=1"):
        epsilon_lower_bound(8, 4, 4, 0.0, 1.0)


def test_the_audit_accuses_by_the_verdict_and_not_by_the_bound():
    """One that Steinke's bound lets go is accused by the trade-off function, as the command says."""
    claim = Claim(
        epsilon=2.0, delta=1e-5, steps=Steps(noise_multiplier=1.6, sampling_rate=0.1, steps=20)
    )
    included = np.random.default_rng(0).random(1000) < 0.5
    for separation, accused in ((0.0, False), (1.0, True)):
        scores = separation * included + np.random.default_rng(1).normal(size=1000)
        engine = check_guesses(scores, included, claim, independent=True)
        found = DPChecks(claimed_epsilon=2.0, delta=1e-5, engine=engine).to_json()
        assert engine.epsilon_lower_bound < 2
        assert (found["verdict"] == "contradicted") == accused
        assert DPCheckAudit().accuses(found) == accused


def test_of_a_run_that_claims_nothing_the_bound_accuses():
    included = np.arange(100) < 50
    for scores, accused in ((included * 1.0, True), (np.arange(100) % 2, False)):
        text = check_guesses(scores, included, Claim(epsilon=None, delta=1e-5))
        found = DPChecks(claimed_epsilon=None, delta=1e-5, text=text).to_json()
        assert DPCheckAudit().accuses(found) == accused
