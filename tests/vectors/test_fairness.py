"""Equal accuracies are called unequal one time in twenty, wide gaps are seen; rows of a user are one."""

from functools import partial

import numpy as np
import pytest
from scipy.stats import ttest_ind

from tightlip.core import resampling
from tightlip.vectors import attack_figures
from tightlip.vectors.attack_figures import by_user, wald

UserDraws = partial(resampling.UserDraws, seed=0, num_draws=1000)
fairness = partial(attack_figures.fairness, seed=0)


def people(rng, num_users, rows_each, chances):
    """Each user has a chance of their own to be right, and one group."""
    group = np.arange(num_users) % len(chances)
    base = np.asarray(chances)[group]
    own = np.clip(base + rng.choice([-0.35, 0.35], num_users), 0, 1)
    correct = rng.random((num_users, rows_each)) < own[:, None]
    users = np.repeat(np.arange(num_users), rows_each)
    return correct.reshape(-1), ["mf"[g] for g in np.repeat(group, rows_each)], users


@pytest.mark.parametrize("swap", [True, False])
def test_equal_accuracies_are_called_unequal_one_time_in_twenty(swap):
    """Whether each user has one group (users swap) or both (an F distribution)."""
    rng = np.random.default_rng(0)
    called = 0
    for trial in range(160):
        correct, groups, users = people(rng, 30, 8, [0.5, 0.5])
        if not swap:
            groups = list(rng.permutation(groups))
        draws = UserDraws(users, num_draws=2)
        called += fairness(correct, groups, draws, seed=trial, num_swaps=99)["p"] < 0.05
    assert 1 <= called <= 18  # 8 expected; taking rows for independent would call about 56


def test_a_wide_gap_over_many_users_is_seen():
    correct, groups, users = people(np.random.default_rng(1), 60, 8, [0.35, 0.65])
    found = fairness(correct, groups, UserDraws(users))
    assert found["p"] <= 0.01
    assert found["gap"]["low"] > 0
    assert found["groups"]["f"]["value"] == correct[np.asarray(groups) == "f"].mean()
    assert found["groups"]["f"]["num_users"] == 30


def test_the_interval_between_two_groups_holds_their_difference_nineteen_times_in_twenty():
    rng = np.random.default_rng(5)
    held = {0.0: 0, 0.2: 0}
    for trial in range(100):
        for difference in held:
            correct, groups, users = people(rng, 40, 6, [0.4, 0.4 + difference])
            found = fairness(
                correct, groups, UserDraws(users, seed=trial, num_draws=200), num_swaps=1
            )
            gap, first = found["gap"], found["groups"]["m"]["value"]
            # The best is "f", as in truth, or "m", and the difference then has the other sign.
            signed = difference if found["groups"]["f"]["value"] >= first else -difference
            held[difference] += gap["low"] <= signed <= gap["high"]
    assert all(88 <= times <= 100 for times in held.values()), held


@pytest.mark.parametrize("num_groups", [3, 10, 36])
def test_a_gap_between_the_best_and_the_worst_of_several_groups_has_no_interval(num_groups):
    """Equal accuracy everywhere still leaves a best and a worst, and their interval excludes 0."""
    rng = np.random.default_rng(num_groups)
    users = np.repeat(np.arange(8 * num_groups), 5)
    groups = [f"g{user % num_groups}" for user in users]
    found = fairness(rng.random(len(users)) < 0.6, groups, UserDraws(users), num_swaps=49)
    shares = [group["value"] for group in found["groups"].values()]
    assert found["gap"] == {"value": max(shares) - min(shares), "low": None, "high": None}
    assert found["p"] > 0.02


def test_with_a_row_a_user_the_statistic_is_welchs():
    rng = np.random.default_rng(2)
    correct, groups = rng.random(200) < 0.7, rng.integers(0, 2, 200)
    hits, rows = by_user(correct, groups, 2, UserDraws(np.arange(200), num_draws=1))
    theirs = ttest_ind(correct[groups == 0], correct[groups == 1], equal_var=False).statistic ** 2
    assert wald(hits, rows) == pytest.approx(theirs, rel=0.02)  # they divide by n - 1 in each group


def test_three_groups_are_tested_together():
    correct, groups, users = people(np.random.default_rng(3), 90, 6, [0.5, 0.5])
    third = ["x" if user % 3 == 0 else group for user, group in zip(users, groups, strict=True)]
    draws = UserDraws(users)
    assert fairness(correct, third, draws)["p"] > 0.01
    better = correct | (np.asarray(third) == "x")
    assert fairness(better, third, draws)["p"] < 0.01


def test_few_users_get_no_p_and_the_reason():
    correct, groups, users = people(np.random.default_rng(4), 8, 50, [0.1, 0.9])
    found = fairness(correct, groups, UserDraws(users))
    assert found["p"] is None
    assert "fewer than 5 users" in found["test"]
    assert found["gap"]["value"] > 0


def test_one_group_has_no_gap_and_unknown_groups_are_left_out():
    found = fairness(np.ones(6, dtype=bool), ["m"] * 4 + [None] * 2, UserDraws(range(6)))
    assert found["gap"] is None
    assert found["p"] is None
    assert found["groups"]["m"]["num_rows"] == 4


def test_groups_that_are_always_right_are_equal():
    found = fairness(np.ones(40, dtype=bool), ["m", "f"] * 20, UserDraws(range(40)))
    assert found["p"] == 1
    assert found["gap"]["value"] == 0
