import math
from collections import Counter

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from scipy.stats import chisquare, geom, logser

from privacy.accounts import WORDS, mechanism, theirs
from tightlip.core.errors import UsageError
from tightlip.core.randomness import keyed_generator
from tightlip.privacy.accounting import Release, epsilon_spent
from tightlip.privacy.composition import compose_runs
from tightlip.privacy.people import runs_before
from tightlip.privacy.rdp_filter import ORDERS
from tightlip.privacy.selection import Selection, drawn_number, halting_probability

BASE = 0.95911  # at q = 0.01, 1,000 steps and δ = 1e-5 its ε is 2


def selection(*candidates, mean=10.0, before=(), delta=1e-5):
    return Selection(candidates=candidates, mean=mean, before=before, delta=delta)


def trial(sigma, rate=0.01, steps=1000, *others):
    """One trial as dp-accounting has it."""
    sampled = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    events = [dp_accounting.GaussianDpEvent(other) for other in others]
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(sampled, steps), *events]
    )


def best_of(event, mean, *before, orders=None):
    """ε of the best of a logarithmic number of trials, and of what was told before."""
    accountant = RdpAccountant(orders)
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(event, mean, 0))
    for sigma in before:
        accountant.compose(dp_accounting.GaussianDpEvent(sigma))
    return accountant.get_epsilon(1e-5)


@pytest.mark.parametrize(("mean", "printed", "composed"), [(3, 3.28, 3.47), (10, 3.85, 6.72)])
def test_the_figures_of_a_base_of_two_are_those_that_were_worked_out_before(
    mean, printed, composed
):
    base = mechanism(BASE)
    assert epsilon_spent(base, 1000, 1e-5) == pytest.approx(2, abs=0.01)
    assert best_of(trial(BASE), mean) == pytest.approx(printed, abs=0.01)
    one = selection((base, 1000), mean=float(mean))
    # Whole orders only: up to 0.4% more than dp-accounting's, and never less.
    assert best_of(trial(BASE), mean) <= one.epsilon() <= 1.005 * best_of(trial(BASE), mean)
    every = selection(*[(base, 1000)] * mean, mean=float(mean))
    assert every.composed() == pytest.approx(composed, abs=0.01)
    assert every.composed() == pytest.approx(
        theirs(PLDAccountant(), BASE, 0.01, 1000 * mean).get_epsilon(1e-5), rel=1e-3
    )


@pytest.mark.parametrize("mean", [1.5, 3.0, 40.0])
def test_repeating_and_selecting_costs_what_dp_accounting_says(mean):
    own = Release(name="loss", noise_multiplier=4.0, delta=0.0, note="", own=True)
    one = selection((mechanism(0.8, 0.02, own), 300), mean=mean)
    told = best_of(trial(0.8, 0.02, 300, 4.0), mean, orders=list(ORDERS))
    assert one.epsilon() == pytest.approx(told, rel=1e-6)


def test_the_costliest_candidate_counts_at_each_order():
    """A few loud steps and many faint ones: at low orders one costs more, at high orders the other."""
    loud, faint = (mechanism(0.7, 0.001), 20), (mechanism(3.0, 0.5), 20)
    curves = []
    for (each, steps), accountant in (
        (loud, RdpAccountant(ORDERS)),
        (faint, RdpAccountant(ORDERS)),
    ):
        theirs(accountant, each.noise_multiplier, each.sampling_rate, steps)
        curves.append(np.array(accountant._rdp))
    assert {*np.sign(curves[0] - curves[1])} == {-1, 1}
    base, gamma, orders = np.maximum(*curves), halting_probability(5.0), np.array(ORDERS)
    more = np.min((1 - 1 / orders) * base + math.log(1 / gamma) / orders)
    worst = base + more + math.log(5) / (orders - 1)
    both = selection(loud, faint, mean=5.0).epsilon()
    assert both == pytest.approx(compute_epsilon(orders, worst, 1e-5)[0], rel=1e-6)
    assert both >= max(selection(each, mean=5.0).epsilon() for each in (loud, faint))


def test_what_was_told_of_the_corpus_before_is_composed_once():
    both = selection((mechanism(1.0), 500), before=(WORDS,), mean=4.0)
    accountant = RdpAccountant(list(ORDERS))
    event = dp_accounting.dp_event.RepeatAndSelectDpEvent(trial(1.0, 0.01, 500), 4.0, 0)
    accountant.compose(event).compose(dp_accounting.GaussianDpEvent(WORDS.noise_multiplier))
    assert both.epsilon() == pytest.approx(accountant.get_epsilon(1e-5 - WORDS.delta), rel=1e-6)


def test_each_candidate_once_counts_what_each_of_them_tells():
    own = Release(name="loss", noise_multiplier=3.0, delta=0.0, note="", own=True)
    pair = (mechanism(1.0, 0.01, own), 200), (mechanism(2.0, 0.05, own), 100)
    accountant = theirs(theirs(PLDAccountant(), 1.0, 0.01, 200, 3.0), 2.0, 0.05, 100, 3.0)
    assert selection(*pair, mean=None).epsilon() == pytest.approx(
        accountant.get_epsilon(1e-5), rel=1e-3
    )


def test_noise_is_found_that_keeps_a_choice_within_its_target():
    pair = (mechanism(1.0, 0.1), 30), (mechanism(1.0, 0.2), 20)
    for mean in (6.0, None):  # random trials, and each once
        chosen = selection(*pair, mean=mean).calibrated(3.0)
        assert 2.9 < chosen.epsilon() <= 3.0
    loud = Release(name="loss", noise_multiplier=2.2, delta=0.0, note="", own=True)
    with pytest.raises(UsageError, match="No noise keeps a choice"):
        selection((mechanism(1.0, 0.1, loud), 30)).calibrated(3.0)


def test_a_record_tells_all_that_the_figure_needs():
    own = Release(name="loss", noise_multiplier=3.0, delta=0.0, note="", own=True)
    made = selection((mechanism(1.0, 0.01, own), 200), before=(WORDS,))
    record = {"selection": made.record(), "delta": 1e-5, "releases": [WORDS.record()]}
    assert Selection.of_record(record) == made


@pytest.mark.parametrize("mean", [1.2, 3.0, 10.0, 500.0])
def test_the_law_has_the_mean_that_was_asked_for(mean):
    gamma = halting_probability(mean)
    assert logser.mean(1 - gamma) == pytest.approx(mean, rel=1e-9)


def test_the_number_of_trials_follows_the_logarithmic_law():
    mean, size, last = 4.0, 20_000, 12
    generator = keyed_generator(3)
    counts = Counter(min(drawn_number(mean, generator), last) for _ in range(size))
    seen = [counts[k] for k in range(1, last + 1)]

    def p_value(law, p):
        shares = [law.pmf(k, p) for k in range(1, last)]
        return chisquare(seen, [size * each for each in (*shares, 1 - sum(shares))]).pvalue

    assert p_value(logser, 1 - halting_probability(mean)) > 1e-3
    assert p_value(geom, 1 / mean) < 1e-9  # another law of the same mean


# Beside other runs


def run(**changed):
    return {
        "epsilon": 1.0, "delta": 1e-5, "unit": "user", "adjacency": "add or remove one user",
        "sampling": "Poisson", "steps": 500, "standing": "proved", "because": "",
        "noise_multiplier": 1.0, "sampling_rate": 0.01, "releases": [], "run": "a",
    } | changed  # fmt: skip


def choice(**changed):
    made = selection((mechanism(2.0), 500), mean=5.0)
    figures = {"epsilon": made.epsilon(), "selection": made.record(), "run": "b"}
    return run(noise_multiplier=None, sampling_rate=None, steps=12, **figures) | changed


def test_a_choice_beside_other_runs_adds_its_own_epsilon_and_delta():
    pair = compose_runs([run(), run(noise_multiplier=2.0)])
    joint = compose_runs([run(), choice(), run(noise_multiplier=2.0)])
    assert joint["epsilon"] == pytest.approx(pair["epsilon"] + choice()["epsilon"])
    assert joint["delta"] == pytest.approx(2e-5)
    assert compose_runs([choice()])["epsilon"] == choice()["epsilon"]
    wide = compose_runs([run(), choice()], delta=1e-4)
    assert wide["epsilon"] == pytest.approx(
        epsilon_spent(mechanism(), 500, 9e-5) + choice()["epsilon"]
    )
    with pytest.raises(UsageError, match="less than the choices among trials took"):
        compose_runs([run(), choice()], delta=1e-5)


def test_what_runs_told_by_themselves_counts_for_each_of_them():
    told = Release(name="loss", noise_multiplier=3.0, delta=0.0, note="", own=True)
    pair = [run(corpus_fingerprint="c", releases=[told.record()], run=name) for name in "ab"]
    both = theirs(PLDAccountant(), 1.0, 0.01, 1000, 3.0, 3.0).get_epsilon(1e-5)
    assert compose_runs(pair)["epsilon"] == pytest.approx(both, rel=1e-3)


def test_a_model_that_was_chosen_among_trials_counts_where_training_goes_on_from_it():
    (before,) = runs_before(choice())
    assert before["selection"] == choice()["selection"]
    assert compose_runs([before, run()])["epsilon"] > choice()["epsilon"]
