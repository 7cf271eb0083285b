"""Splits: exact in number, fixed by the seed, blind to everything else."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightlip.corpus.prepare_config import Splitter, held_out_documents, held_out_users

users_in_order = st.lists(st.sampled_from(["ann", "bob", "", "é"]), min_size=1, max_size=60)


def held(users, **settings):
    splitter = Splitter(Counter(users), **settings)
    return [splitter.is_held_out(user, "") for user in users]


@settings(max_examples=60, deadline=None)
@given(users=users_in_order, holdout=st.sampled_from([0.1, 0.2, 0.5]), seed=st.integers(-5, 2**70))
def test_exactly_the_rounded_share_of_each_users_documents_is_held_out(users, holdout, seed):
    out = held(users, split="document", holdout=holdout, seed=seed)
    counts = Counter(user for user, is_out in zip(users, out, strict=True) if is_out)
    for user, num_documents in Counter(users).items():
        assert counts[user] == round(holdout * num_documents)


@pytest.mark.parametrize("holdout", [0.1, 0.5, 0.9])
def test_every_user_keeps_a_document_to_train_on(holdout):
    for num_documents in range(1, 12):
        out = held_out_documents("ann", num_documents, holdout=holdout, seed=1)
        assert len(out) == num_documents
        assert not out.all()


@settings(max_examples=40, deadline=None)
@given(users=users_in_order, seed=st.integers(0, 99))
def test_by_user_a_user_is_in_or_out(users, seed):
    out = held(users, split="user", holdout=0.5, seed=seed)
    sides = {
        user: {is_out for other, is_out in zip(users, out, strict=True) if other == user}
        for user in users
    }
    assert all(len(side) == 1 for side in sides.values())
    assert sum(side == {True} for side in sides.values()) == min(
        round(len(sides) / 2), len(sides) - 1
    )


def test_without_a_split_nothing_is_held_out():
    assert not any(held(["a", "b"] * 20, split="none", holdout=0.5, seed=0))


def test_a_users_split_does_not_depend_on_the_others():
    alone = held(["ann"] * 10, split="document", holdout=0.3, seed=4)
    mixed = held(["ann", "bob"] * 10, split="document", holdout=0.3, seed=4)
    assert mixed[::2] == alone


def test_every_document_is_held_out_about_as_often():
    counts = sum(
        held_out_documents("ann", 10, holdout=0.2, seed=seed).astype(int) for seed in range(2_000)
    )
    # 2,000 draws of probability 0.2: five standard deviations are 90.
    assert abs(counts - 400).max() < 90


def test_the_split_does_not_follow_pythons_hash_seed():
    code = (
        "from tightlip.corpus.prepare_config import held_out_users\n"
        "print(sorted(held_out_users([str(n) for n in range(30)], holdout=0.3, seed=2)))"
    )
    expected = sorted(held_out_users([str(n) for n in range(30)], holdout=0.3, seed=2))
    for hash_seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.strip() == str(expected)
