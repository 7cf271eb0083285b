"""Attackers find what is there, find nothing in noise, and gain by averaging what theory says."""

import sys
from functools import partial

import numpy as np
import pytest
from scipy.stats import norm

from tightlip.core.errors import UsageError
from tightlip.vectors import attackers
from tightlip.vectors.attack_figures import Target, attribute_figures, judged_rows
from tightlip.vectors.attackers import Parts, Reading, Releases, best_on_dev
from tightlip.vectors.settings import ATTACKERS

SIZES = {"train": 400, "dev": 100, "test": 300}
read_attribute = partial(attackers.read_attribute, seed=0)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Networks and forests that are over soon; the promises are the same."""
    monkeypatch.setattr(attackers, "MOST_EPOCHS", 12)
    monkeypatch.setattr(attackers, "TREES", 20)


def split(rows):
    ends = np.cumsum(list(SIZES.values()))
    train, dev, test = np.split(rows, ends[:-1])
    return Parts(train=train, dev=dev, test=test)


def toy(signal, noise, *, dimensions=8, num_values=2, copies=16, seed=0):
    """Vectors that point where their value says, under Gaussian noise, and means of 16 of them."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, num_values, sum(SIZES.values()))
    places = signal * np.eye(num_values, dimensions)[codes]
    if num_values == 2:
        places = np.zeros((len(codes), dimensions))
        places[:, 0] = signal * (2 * codes - 1)
    heard = [places + noise * rng.standard_normal(places.shape) for _ in range(copies)]
    as_parts = lambda rows: split(rows.astype(np.float32))  # noqa: E731
    releases = Releases(single=as_parts(heard[0]), averaged=as_parts(np.mean(heard, axis=0)))
    return releases, split(codes)


def accuracy(attacker, releases, values, num_values=2):
    reading = read_attribute(attacker, releases, values, num_values=num_values)
    return float((reading.test.argmax(axis=1) == values.test).mean())


@pytest.mark.parametrize("attacker", ATTACKERS)
@pytest.mark.parametrize("num_values", [2, 4])
def test_an_attribute_spelled_out_is_found(attacker, num_values):
    releases, values = toy(1.0, 0.05, num_values=num_values)
    assert accuracy(attacker, releases, values, num_values) > 0.98


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_in_pure_noise_nobody_beats_the_majority_beyond_the_interval(attacker):
    releases, values = toy(0.0, 1.0, seed=3)
    target = Target(name="a", values=("no", "yes"), codes=values)
    names, all_of_them = [str(n) for n in range(SIZES["test"])], np.ones(SIZES["test"], dtype=bool)
    on = judged_rows(names, all_of_them, seed=0, num_draws=1000)
    reading = read_attribute(attacker, releases, values, num_values=2)
    figures = attribute_figures(target, reading, on)
    assert figures["above_majority"]["low"] <= 0 <= figures["auc"]["high"] - 0.4
    assert figures["auc"]["low"] <= 0.5


@pytest.mark.parametrize("noise", [1.0, 2.0, 4.0])
def test_averaging_gains_what_the_noise_theory_says(noise):
    """Two centres 2 apart under noise: the best rule is right with probability Φ(1/noise), Φ(√16/noise) of means."""
    releases, values = toy(1.0, noise, seed=5)
    for attacker, best in (("logistic", norm.cdf(1 / noise)), ("averaged", norm.cdf(4 / noise))):
        spread = 3 * np.sqrt(best * (1 - best) / SIZES["test"]) + 0.005
        found = accuracy(attacker, releases, values)
        assert best - spread - 0.03 < found < best + spread, attacker


def test_nothing_of_the_test_part_but_its_vectors_is_looked_at():
    releases, values = toy(1.0, 1.0)
    other = Parts(train=values.train, dev=values.dev, test=1 - values.test)
    for attacker in ATTACKERS:
        one, two = (
            read_attribute(attacker, releases, v, num_values=2).test for v in (values, other)
        )
        np.testing.assert_array_equal(one, two)


def test_a_value_that_nobody_trained_on_is_never_guessed():
    releases, values = toy(1.0, 0.1)
    for attacker in ("logistic", "trees"):
        scores = read_attribute(attacker, releases, values, num_values=3).test
        assert scores.shape == (SIZES["test"], 3)
        assert (scores[:, 2] == 0).all()
        np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-5)


def test_the_development_part_decides_and_ties_go_to_the_less_surprised():
    truth = np.array([0, 1])
    offers = [
        Reading(dev=np.array([[0.9, 0.1], [0.9, 0.1]]), test=np.zeros((0, 2)), chosen={"n": 1}),
        Reading(dev=np.array([[0.6, 0.4], [0.4, 0.6]]), test=np.zeros((0, 2)), chosen={"n": 2}),
        Reading(dev=np.array([[0.8, 0.2], [0.2, 0.8]]), test=np.zeros((0, 2)), chosen={"n": 3}),
    ]
    assert best_on_dev(iter(offers), truth).chosen == {"n": 3}


def test_one_value_only_leaves_nothing_to_tell_apart():
    releases, values = toy(1.0, 1.0)
    alike = Parts(train=np.zeros_like(values.train), dev=values.dev, test=values.test)
    with pytest.raises(UsageError, match="fewer than two values of 'gender'"):
        read_attribute("logistic", releases, alike, num_values=2, name="gender")


def test_an_unknown_attacker_is_named_beside_those_there_are():
    releases, values = toy(1.0, 1.0)
    with pytest.raises(UsageError, match="mlp, logistic, averaged, trees"):
        read_attribute("forest", releases, values, num_values=2)


def test_without_scikit_learn_the_way_to_install_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(UsageError, match=r"pip install 'tightlip\[represent\]'"):
        attackers.sklearn_part("linear_model")
