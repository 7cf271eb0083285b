"""Figures of an attack against scikit-learn's metrics, closed forms and simulations."""

from functools import partial

import numpy as np
import pytest
from scipy.stats import beta
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, roc_auc_score

from tightlip.core import resampling
from tightlip.vectors import attack_figures
from tightlip.vectors.attack_figures import (
    Target,
    attribute_figures,
    auc,
    best_threshold,
    empirical_privacy,
    entity_f1,
    entity_figures,
    everywhere_f1_privacy,
    majority_f1_privacy,
    majority_figure,
    majority_privacy,
)
from tightlip.vectors.attackers import Parts, Reading

NUM = 120
UserDraws = partial(resampling.UserDraws, seed=0, num_draws=1000)
judged_rows = partial(attack_figures.judged_rows, seed=0, num_draws=1000)


def target_of(codes, train=None, values=("a", "b")):
    train = codes if train is None else train
    return Target(name="t", values=values, codes=Parts(train=train, dev=codes, test=codes))


def reading_of(scores):
    return Reading(dev=scores, test=scores, chosen={})


def random_scores(rng, num_values):
    scores = rng.random((NUM, num_values)).round(1) + 0.01  # rounded, so that there are ties
    return scores / scores.sum(axis=1, keepdims=True)


def on_all(num=NUM, num_users=30):
    return judged_rows(
        [str(n % num_users) for n in range(num)], np.ones(num, dtype=bool), num_draws=200
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_values", [2, 3])
def test_accuracy_and_auc_agree_with_scikit_learn(seed, num_values):
    rng = np.random.default_rng(seed)
    truth, scores = rng.integers(0, num_values, NUM), random_scores(rng, num_values)
    names = tuple("abc"[:num_values])
    found = attribute_figures(target_of(truth, values=names), reading_of(scores), on_all())
    assert found["accuracy"]["value"] == pytest.approx(accuracy_score(truth, scores.argmax(axis=1)))
    theirs = (
        roc_auc_score(truth, scores[:, 1])
        if num_values == 2
        else roc_auc_score(truth, scores, multi_class="ovr")
    )
    assert found["auc"]["value"] == pytest.approx(theirs)


def test_an_auc_under_draws_is_that_of_the_drawn_rows():
    rng = np.random.default_rng(1)
    truth, scores = rng.integers(0, 2, NUM), random_scores(rng, 2)
    draws = UserDraws([str(n % 10) for n in range(NUM)], num_draws=3)
    times = [t[draws.user_of_row] for t in draws._times.astype(int)]
    slow = [
        roc_auc_score(np.repeat(truth, t), np.repeat(scores[:, 1], t)) for t in times
    ]  # fmt: skip
    seen = []
    draws.interval = lambda value, drawn: seen.append(drawn)
    auc(truth, scores, draws)
    np.testing.assert_allclose(seen[0], slow)


@pytest.mark.parametrize("seed", range(5))
def test_f1_over_all_entities_agrees_with_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    truth, guess = rng.random((2, NUM, 5)) < 0.3
    found = entity_f1(truth, guess, on_all().draws)
    theirs = f1_score(truth, guess, average="micro")
    assert found["value"] == pytest.approx(theirs)
    assert found["low"] < theirs < found["high"]


def test_f1_of_nothing_present_and_nothing_guessed_is_nought():
    nothing = np.zeros((NUM, 2), dtype=bool)
    assert entity_f1(nothing, nothing, on_all().draws)["value"] == 0


def test_empirical_privacy_is_one_minus_the_mean_accuracy():
    rng = np.random.default_rng(0)
    truths, scores = rng.integers(0, 2, (2, NUM)), [random_scores(rng, 2) for _ in range(2)]
    found = empirical_privacy(
        [target_of(t) for t in truths], [reading_of(s) for s in scores], on_all()
    )
    mean = np.mean([accuracy_score(t, s.argmax(1)) for t, s in zip(truths, scores, strict=True)])
    assert found["value"] == pytest.approx(1 - mean)
    assert found["low"] < found["value"] < found["high"]


def test_the_majority_is_the_training_parts_not_the_tests():
    test, train = np.repeat([0, 1], [30, 90]), np.repeat([0, 1], [90, 30])
    target = target_of(test, train)
    assert majority_figure(target, on_all())["value"] == 0.25
    assert majority_privacy([target], on_all())["value"] == 0.75


def test_rows_whose_value_is_not_known_count_for_nothing():
    rng = np.random.default_rng(4)
    truth, scores = rng.integers(0, 2, NUM), random_scores(rng, 2)
    truth[:40] = -1
    found = attribute_figures(target_of(truth), reading_of(scores), on_all())
    assert found["accuracy"]["value"] == pytest.approx(
        accuracy_score(truth[40:], scores[40:].argmax(axis=1))
    )
    assert found["auc"]["value"] == pytest.approx(roc_auc_score(truth[40:], scores[40:, 1]))


def test_rows_by_value_agree_with_a_confusion_matrix():
    rng = np.random.default_rng(6)
    truth, scores = rng.integers(0, 3, NUM), random_scores(rng, 3)
    target = target_of(truth, values=("a", "b", "c"))
    found = attribute_figures(target, reading_of(scores), on_all())["by_value"]
    matrix = confusion_matrix(truth, scores.argmax(axis=1))
    for place, value in enumerate("abc"):
        row, column = matrix[place].sum(), matrix[:, place].sum()
        assert found[value] == {"num": row, "said": column, "right": matrix[place, place]}


def test_only_the_rows_asked_for_are_judged():
    truth = np.repeat([0, 1], 60)
    scores = np.eye(2)[np.zeros(NUM, dtype=int)]
    on = judged_rows([str(n) for n in range(NUM)], truth == 0)
    found = attribute_figures(target_of(truth), reading_of(scores), on)
    assert found["accuracy"]["value"] == 1


def test_a_tuned_threshold_finds_rare_names_that_are_never_likelier_than_not():
    rng = np.random.default_rng(2)
    truth = (rng.random(NUM) < 0.1).astype(int)
    likely = np.where(truth == 1, 0.4, 0.1)
    reading = reading_of(np.stack([1 - likely, likely], axis=1))
    found = entity_figures([target_of(truth)], [reading], on_all())
    assert found["one_minus_f"]["value"] == 1
    assert found["one_minus_f_tuned"]["value"] == 0
    assert 0.1 < best_threshold(truth[:, None] == 1, likely[:, None]) <= 0.4


def test_the_threshold_is_chosen_on_the_development_part_not_on_the_test():
    truth = np.repeat([1, 0], [20, 100])
    scores = {}
    for part, (present, absent) in {"dev": (0.9, 0.6), "test": (0.4, 0.1)}.items():
        likely = np.where(truth == 1, present, absent)
        scores[part] = np.stack([1 - likely, likely], axis=1)
    found = entity_figures([target_of(truth)], [Reading(**scores, chosen={})], on_all())
    assert 0.6 < found["threshold"] <= 0.9
    assert found["one_minus_f_tuned"]["value"] == 1  # one of 0.4 would find every name


def test_baselines_for_names_are_their_closed_forms():
    truth = np.stack([np.repeat([1, 0], [80, 40]), np.repeat([1, 0], [30, 90])])
    targets = [target_of(row) for row in truth]
    # Says the first name of every text: 80 hits, 120 guesses, 110 present.
    assert majority_f1_privacy(targets, on_all())["value"] == pytest.approx(1 - 160 / 230)
    assert everywhere_f1_privacy(targets, on_all())["value"] == pytest.approx(1 - 220 / 350)


# Intervals


@pytest.mark.parametrize("rows_each", [1, 12])
def test_intervals_hold_the_truth_nineteen_times_in_twenty_however_rows_cluster(rows_each):
    """Users who are always right or always wrong: rows say nothing that their user has not said."""
    rng = np.random.default_rng(rows_each)
    held = 0
    for trial in range(200):
        right = np.repeat(rng.random(40) < 0.6, rows_each)
        users = np.repeat(np.arange(40), rows_each)
        found = UserDraws(users, seed=trial, num_draws=200).share(right)
        held += found["low"] <= 0.6 <= found["high"]
    assert held >= 180  # of rows taken for independent pieces, about 86 of 200 would hold it


def test_rows_taken_for_independent_would_have_too_short_intervals():
    rng = np.random.default_rng(0)
    right = np.repeat(rng.random(400) < 0.6, 12)
    by_user = UserDraws(np.repeat(np.arange(400), 12)).share(right)
    by_row = UserDraws(np.arange(4800)).share(right)
    width = lambda figure: figure["high"] - figure["low"]  # noqa: E731
    # Twelve copies of each row: the true spread is √12 times as wide.
    assert width(by_user) / width(by_row) == pytest.approx(np.sqrt(12), rel=0.15)


def test_never_wrong_is_not_taken_for_certain():
    found = UserDraws(np.arange(25)).share(np.ones(25, dtype=bool))
    assert found["low"] == pytest.approx(beta.ppf(0.025, 25, 1))
    assert found["high"] == 1


def test_one_user_says_nothing_about_users():
    found = UserDraws(["a", "a"]).share(np.array([True, False]))
    assert found == {"value": 0.5, "low": None, "high": None}


def test_a_drawn_user_brings_all_their_rows():
    draws = UserDraws(["a", "b", "b", "c"], num_draws=50)
    times = draws.over_rows(lambda times: times)
    assert (times[:, 1] == times[:, 2]).all()
    assert (times[:, [0, 1, 3]].sum(axis=1) == 3).all()
    np.testing.assert_allclose(
        draws.sums(np.arange(8.0).reshape(4, 2)), times @ np.arange(8.0).reshape(4, 2)
    )
