import math

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

from privacy.accounts import WORDS, mechanism, theirs
from tightlip.core.errors import UsageError
from tightlip.privacy.accounting import epsilon_spent
from tightlip.privacy.adaptive import Promise
from tightlip.privacy.composition import compose_runs, people_figure
from tightlip.privacy.rdp_filter import filter_for, rdp_within, subsampled_gaussian_rdp

pytestmark = pytest.mark.slow


def record(**changed):
    return {
        "mechanism": "Poisson-subsampled Gaussian",
        "epsilon": 1.0,
        "delta": 1e-5,
        "unit": "user",
        "adjacency": "add or remove one user",
        "sampling": "Poisson",
        "accountant": "PLD",
        "steps": 500,
        "standing": "proved",
        "because": "",
        "covers": ["weights"],
        "outside": [],
        "noise_multiplier": 1.0,
        "sampling_rate": 0.01,
        "releases": [],
        "corpus_fingerprint": "abc",
        "insecure_seed": False,
        "finished": True,
    } | changed


def test_one_run_composed_is_that_run():
    joint = compose_runs([record()])
    assert joint["epsilon"] == epsilon_spent(mechanism(), 500, 1e-5)
    assert joint["standing"] == "proved"


def test_runs_compose_to_more_than_either_and_less_than_their_sum():
    other = record(noise_multiplier=2.0, sampling_rate=0.05, steps=200, delta=1e-6)
    joint = compose_runs([record(), other], delta=1e-5)
    alone = [
        epsilon_spent(mechanism(), 500, 1e-5),
        epsilon_spent(mechanism(2.0, 0.05), 200, 1e-5),
    ]
    assert max(alone) < joint["epsilon"] < sum(alone)
    both = theirs(theirs(PLDAccountant(), 1.0, 0.01, 500), 2.0, 0.05, 200)
    assert joint["epsilon"] == pytest.approx(both.get_epsilon(1e-5), rel=1e-3)
    assert joint["epsilon"] < joint["epsilon_rdp"]
    assert joint["steps"] == 700
    assert compose_runs([record(), other])["delta"] == 1e-6


def test_two_halves_of_a_run_compose_to_the_run():
    half = record(steps=250)
    assert compose_runs([half, half])["epsilon"] == pytest.approx(
        epsilon_spent(mechanism(), 500, 1e-5), rel=1e-3
    )


def test_a_release_of_one_corpus_is_charged_once_and_of_two_twice():
    released = {"releases": [vars(WORDS)]}
    shared = compose_runs([record(**released), record(**released)])
    apart = compose_runs([record(**released), record(**released, corpus_fingerprint="xyz")])
    assert len(shared["releases"]) == 1
    assert len(apart["releases"]) == 2
    assert shared["epsilon"] == pytest.approx(
        epsilon_spent(mechanism(1.0, 0.01, WORDS), 1000, 1e-5), rel=1e-3
    )
    assert apart["epsilon"] > shared["epsilon"]
    assert "2 corpora" in apart["because"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"epsilon": None, "standing": "measured only"}, "Run 2 has no ε of its own"),
        ({"noise_multiplier": None}, "Run 2 does not say how much noise"),
        ({"unit": "example"}, "differ in unit"),
    ],
)
def test_runs_that_cannot_be_covered_together_have_no_joint_epsilon(other, reason):
    joint = compose_runs([record(), record(**other)])
    assert joint["epsilon"] is None
    assert joint["standing"] == "measured only"
    assert reason in joint["because"]


def test_examples_of_different_corpora_have_no_joint_epsilon():
    joint = compose_runs([record(unit="example"), record(unit="example", corpus_fingerprint="x")])
    assert joint["epsilon"] is None
    assert "different corpora" in joint["because"]


def test_runs_together_stand_no_better_than_the_weakest():
    weak = record(standing="as published", because="The vocabulary was learnt from the corpus.")
    joint = compose_runs([record(), weak | {"insecure_seed": True}])
    assert joint["standing"] == "as published"
    assert joint["because"] == weak["because"]
    assert joint["insecure_seed"]
    assert joint["epsilon"] > 0


# Runs of mode `scale`


def scale_record(*, epsilon=8.0, own=None, steps=3000, order=None, **changed):
    """A run under a filter: noise of 1 at the most and of 0.5 at the least, q = 0.01."""
    budget = filter_for(epsilon=epsilon, delta=1e-5, noise_multiplier=0.9, sampling_rate=0.01)
    order = order or budget.order
    adaptive = {
        "mode": "scale",
        "noise_multiplier": 1.0,
        "planned_steps": 4000,
        "epsilon": epsilon,
        "order": order,
        "rdp_budget": rdp_within(epsilon, order, 1e-5),
    }
    return record(
        epsilon=own or epsilon, noise_multiplier=0.5, steps=steps, adaptive=adaptive, **changed
    )


def test_one_scale_run_composed_is_that_run():
    joint = compose_runs([scale_record()])
    assert (joint["epsilon"], joint["delta"]) == (8.0, 1e-5)


def test_two_scale_runs_come_to_less_than_their_sum_though_their_steps_might_come_to_more():
    joint = compose_runs([scale_record(), scale_record()])
    at_the_floor = epsilon_spent(mechanism(0.5, 0.01), 8000, 1e-5)
    assert at_the_floor > 30
    assert 8 < joint["epsilon"] < 16
    assert joint["delta"] == 1e-5
    assert "RDP" in joint["accountant"]
    assert "whole budgets" in joint["because"]
    assert joint["standing"] == "proved"


def test_what_runs_promise_by_themselves_is_added_up_where_that_is_least_at_the_sum_of_deltas():
    joint = compose_runs([scale_record(own=5.0), scale_record(own=4.0)])
    assert (joint["epsilon"], joint["delta"]) == (9.0, 2e-5)
    assert "added up" in joint["accountant"]
    assert "added up" in joint["because"]


def test_at_a_delta_of_ones_own_nothing_is_read_at_a_larger_one():
    """Budgets at one order add up: by hand, with dp-accounting's conversion."""
    runs = [scale_record(order=6), scale_record(order=9)]
    joint = compose_runs(runs, delta=1e-5)
    total = sum(run["adaptive"]["rdp_budget"] for run in runs)
    (by_hand, _) = compute_epsilon([6], [total], 1e-5)
    assert joint["delta"] == 1e-5
    assert joint["epsilon"] == pytest.approx(by_hand, rel=1e-6)
    assert joint["epsilon"] >= by_hand
    assert "RDP at order 6" in joint["accountant"]
    assert compose_runs([scale_record(own=3.0)] * 2, delta=3e-5)["delta"] == 2e-5
    assert compose_runs([scale_record(own=3.0)] * 2, delta=1.9e-5)["delta"] == 1.9e-5


@pytest.mark.parametrize("order", [4, 8, 40])
def test_a_scale_run_and_a_plain_one_are_composed_the_smallest_way(order):
    """By hand: PLD at the least noise, divergences at the filter's order, ε and δ added up."""
    own = epsilon_spent(mechanism(), 500, 1e-5)
    joint = compose_runs([scale_record(order=order), record(epsilon=own)])
    rdp = rdp_within(8.0, order, 1e-5) + 500 * subsampled_gaussian_rdp(order, 1.0, 0.01)
    floor = theirs(theirs(PLDAccountant(), 0.5, 0.01, 4000), 1.0, 0.01, 500)
    ways = {
        "PLD": floor.get_epsilon(1e-5),
        "RDP": compute_epsilon([order], [rdp], 1e-5)[0],
        "added up": 8.0 + own,
    }
    best = min(ways, key=lambda name: ways[name])
    assert joint["epsilon"] == pytest.approx(ways[best], rel=1e-3)
    assert best in joint["accountant"]
    assert joint["delta"] == (2e-5 if best == "added up" else 1e-5)


def test_plain_runs_are_read_at_the_smallest_delta_as_ever():
    joint = compose_runs([record(), record(delta=1e-6)])
    assert (joint["delta"], joint["accountant"]) == (1e-6, "PLD")


def test_one_run_at_a_very_small_delta_leaves_the_others_a_figure():
    """Releases take more than its δ: read at the largest one, where dp-accounting has it too."""
    noisy = record(
        releases=[vars(WORDS)], epsilon=epsilon_spent(mechanism(1.0, 0.01, WORDS), 500, 1e-5)
    )
    runs = [
        noisy,
        noisy | {"corpus_fingerprint": "other"},
        record(delta=1e-11, noise_multiplier=2.0),
    ]
    joint = compose_runs(runs)
    assert joint["delta"] == 1e-5
    assert joint["because"].endswith(
        "read at the largest δ, for releases took all of the smallest."
    )
    assert max(each["epsilon"] for each in runs[:2]) < joint["epsilon"] < math.inf
    accountant = theirs(theirs(PLDAccountant(), 1.0, 0.01, 1000), 2.0, 0.01, 500)
    for _ in range(2):
        accountant.compose(GaussianDpEvent(WORDS.noise_multiplier))
    by_hand = accountant.get_epsilon(1e-5 - 2 * WORDS.delta)
    assert joint["epsilon"] == pytest.approx(by_hand, rel=1e-3)
    people = people_figure(runs)
    assert (people["epsilon"], people["delta"]) == (joint["epsilon"], 1e-5)
    with pytest.raises(UsageError, match="used up"):
        compose_runs(runs, delta=1e-11)


def test_steps_that_only_a_filter_bounds_are_not_counted_by_pld():
    """Steps beyond the plan may have come about by what was released: the budget holds, no count."""
    long = scale_record(steps=100_000)
    joint = compose_runs([long, record(epsilon=1.0)], delta=1e-5)
    assert "RDP" in joint["accountant"]
    assert joint["epsilon"] >= 8.0


# What a run promises where steps are repeated


def promise(**changed):
    given = {"noise": 2.0, "planned": 100, "target": 8.0} | changed
    least = mechanism(given["noise"], 0.02)
    budget = filter_for(
        epsilon=given["target"], delta=1e-5, noise_multiplier=2.2, least_noise=given["noise"],
        steps=given["planned"], sampling_rate=0.02,
    )  # fmt: skip
    return Promise(least, 1e-5, given["planned"], given["target"], budget), budget


def test_a_step_repeated_after_a_kill_costs_a_step_and_not_the_whole_target():
    made, _ = promise()
    planned = epsilon_spent(mechanism(2.0, 0.02), 100, 1e-5)
    assert [made.upper(steps) for steps in (0, 1, 100)] == [pytest.approx(planned, rel=1e-3)] * 3
    assert planned < made.upper(101) < 1.1 * planned
    for steps in (101, 120, 150, 400):
        assert made.upper(steps) >= epsilon_spent(mechanism(2.0, 0.02), steps, 1e-5) * 0.999


def test_a_promise_never_falls_and_never_passes_the_target():
    made, budget = promise(noise=1.0, planned=50, target=4.0)
    told = [made.upper(steps) for steps in (1, 50, 51, 80, 200, 1000, 5000, 50_000)]
    assert told == sorted(told)
    assert told[-1] == 4.0
    # A number of steps counts only while every run gets so far, whatever it releases.
    for steps in (51, 80, 200, 1000, 5000, 50_000):
        counted = made.counted(steps)
        fits = counted is not None
        dearest = subsampled_gaussian_rdp(budget.order, 1.0, 0.02)
        assert not fits or counted >= steps
        assert not fits or (counted + 1) * dearest <= budget.budget
