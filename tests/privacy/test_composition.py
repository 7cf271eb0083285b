import pytest
from dp_accounting.pld import PLDAccountant

from privacy.accounts import WORDS, mechanism, theirs
from tightlip.privacy.accounting import epsilon_spent
from tightlip.privacy.composition import compose_runs


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
