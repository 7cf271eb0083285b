"""Texts with several owners: what one owner may cost, and which documents are drawn."""

import math
import random

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld

from privacy.accounts import calibrated_noise_multiplier, mechanism
from privacy.test_private_training import documents, lstm
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy import PrivateTraining
from tightlip.privacy.accounting import (
    OWNED,
    EpsilonMeter,
    Mechanism,
    accountant_at,
    epsilon_spent,
)
from tightlip.privacy.adaptive import AdaptiveSpec
from tightlip.privacy.composition import compose_runs, ledger
from tightlip.privacy.ledger import read_ledger
from tightlip.privacy.sampling import NOT_PROTECTED, PER_OWNER, Ownership, _turn, ownership_of


def owned(sigma, rate, per_owner):
    return Mechanism(noise_multiplier=sigma, sampling_rate=rate, documents_per_owner=per_owner)


@pytest.mark.parametrize(("per_owner", "epsilon"), [(1, 1.83), (2, 3.98), (4, 8.90)])
def test_the_figures_of_the_design_come_out(per_owner, epsilon):
    assert round(epsilon_spent(owned(1.0, 0.01, per_owner), 1000, 1e-5), 2) == epsilon


@pytest.mark.parametrize(
    ("sigma", "rate", "per_owner", "steps"), [(2.0, 0.05, 3, 60), (5.0, 0.3, 2, 9)]
)  # fmt: skip
def test_it_is_the_mixture_of_dp_accounting_composed_by_hand(sigma, rate, per_owner, steps):
    times = range(per_owner + 1)
    law = [math.comb(per_owner, n) * rate**n * (1 - rate) ** (per_owner - n) for n in times]
    step = pld.from_mixture_gaussian_mechanism(
        sigma, list(times), law, value_discretization_interval=5e-3
    )
    by_hand = step.self_compose(steps).get_epsilon_for_delta(1e-6)
    assert epsilon_spent(owned(sigma, rate, per_owner), steps, 1e-6) == pytest.approx(
        by_hand, rel=1e-2
    )


def test_one_document_of_each_owner_costs_what_one_unit_does():
    assert epsilon_spent(owned(1.0, 0.02, 1), 50, 1e-5) == epsilon_spent(
        mechanism(1.0, 0.02), 50, 1e-5
    )


def test_more_documents_of_an_owner_never_cost_less_and_at_most_so_many_clip_norms():
    spent = [epsilon_spent(owned(2.0, 0.05, per_owner), 20, 1e-5) for per_owner in (1, 2, 3)]
    assert spent == sorted(spent)
    # All of them drawn always, as one unit of three times the norm, and the worst that can be.
    assert spent[2] < epsilon_spent(mechanism(2.0 / 3, 1.0), 20, 1e-5)
    assert spent[2] < epsilon_spent(mechanism(2.0 / 3, 1 - 0.95**3), 20, 1e-5)


def test_with_every_document_in_every_step_it_is_a_gaussian_of_so_many_clip_norms():
    assert epsilon_spent(owned(3.0, 1.0, 3), 4, 1e-5) == pytest.approx(
        epsilon_spent(mechanism(1.0, 1.0), 4, 1e-5)
    )


def test_only_pld_has_a_figure_for_several_also_at_a_very_small_delta():
    for accountant in ("rdp", "published"):
        assert epsilon_spent(owned(1.0, 0.01, 2), 10, 1e-5, accountant) == math.inf
    assert epsilon_spent(owned(3.0, 0.01, 2), 5, 1e-12) >= epsilon_spent(
        owned(3.0, 0.01, 2), 5, 1e-6
    )
    assert (accountant_at(1e-12), accountant_at(1e-12, 2)) == ("the lesser of PLD and RDP", "PLD")


def test_calibration_keeps_the_target_and_with_less_noise_it_does_not():
    target = {"epsilon": 3.0, "delta": 1e-5, "sampling_rate": 0.05, "steps": 20}
    sigma = calibrated_noise_multiplier(**target, documents_per_owner=2)
    assert epsilon_spent(owned(sigma, 0.05, 2), 20, 1e-5) <= 3.0
    assert epsilon_spent(owned(sigma * 0.99, 0.05, 2), 20, 1e-5) > 3.0
    assert sigma > calibrated_noise_multiplier(**target)


def test_a_meter_is_never_below():
    meter = EpsilonMeter(owned(2.0, 0.05, 2), 1e-5, 12)
    for steps in (1, 5, 12, 13):
        assert meter.upper(steps) >= epsilon_spent(meter.mechanism, steps, 1e-5) * (1 - 1e-9)


@pytest.mark.parametrize("per_owner", [0, 65])
def test_a_number_out_of_range_is_refused(per_owner):
    with pytest.raises(UsageError, match=f"documents_per_owner={per_owner} is out of range"):
        owned(1.0, 0.1, per_owner)


def lists(seed, num_documents=80, num_owners=12):
    draw = random.Random(seed)
    people = [f"p{number}" for number in range(num_owners)]
    return [draw.sample(people, draw.choice([1, 1, 2, 3])) for _ in range(num_documents)]


def taken_by_hand(owners_of, most):
    """Oracle: go through all documents again for every one that is asked about."""
    order = sorted(range(len(owners_of)), key=_turn)
    chosen = []
    for document in order:
        num_taken = {
            owner: sum(owner in owners_of[other] for other in chosen)
            for owner in owners_of[document]
        }
        if max(num_taken.values()) < most:
            chosen.append(document)
    return sorted(chosen)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most", [1, 2, 4])
def test_documents_are_taken_in_turn_while_all_their_owners_have_fewer(seed, most):
    owners_of = lists(seed)
    taken = ownership_of(owners_of).taken(most).tolist()
    assert taken == taken_by_hand(owners_of, most)
    assert taken == ownership_of(owners_of).taken(most).tolist()
    for owner in {owner for own in owners_of for owner in own}:
        assert sum(owner in owners_of[document] for document in taken) <= most
    for document in {*range(len(owners_of))} - {*taken}:
        earlier = [other for other in taken if _turn(other) < _turn(document)]
        assert any(sum(o in owners_of[e] for e in earlier) == most for o in owners_of[document])


def test_turns_are_not_the_order_of_the_file():
    everybody = Ownership(np.zeros(100, int), np.arange(101))
    assert len({int(everybody.taken(1)[0]), *everybody.taken(10).tolist()} & {*range(10)}) < 10


@pytest.mark.parametrize("owners", [[], ["a", "a"], ["a", ""], ["a", None], [1, "1"]])
def test_a_list_that_does_not_name_everybody_once_is_refused(owners):
    with pytest.raises(UsageError, match="Document 1 has the owners"):
        ownership_of(["a", owners])


def private(folder, users, texts=None, **settings):
    model = lstm()
    given = {
        "noise_multiplier": 1.0, "expected_batch": 6, "steps": 4, "insecure_seed": 3, **settings
    }  # fmt: skip
    return PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        texts or documents(len(users)),
        users=users,
        ledger=folder / "ledger.json",
        **given,
    )


def test_the_ledger_says_whose_texts_are_emptied_and_what_is_not_protected(tmp_path):
    users = lists(0)
    training = private(tmp_path, users, documents_per_owner=2, people="mail")
    while training.has_budget():
        training.step()
    record = training.guarantee()
    num_owners = len({owner for own in users for owner in own})
    assert record["unit"] == "user"
    assert record["adjacency"] == OWNED
    assert (
        OWNED == "none of one owner's texts contributes anything; who owns what is fixed and public"
    )
    assert NOT_PROTECTED in record["outside"]
    assert (record["documents_per_owner"], record["num_units"]) == (2, num_owners)
    assert record["documents_taken"] == len(taken_by_hand(users, 2))
    assert record["sampling_rate"] == 6 / record["documents_taken"]
    by_hand = epsilon_spent(owned(1.0, record["sampling_rate"], 2), 4, record["delta"])
    assert record["epsilon"] == pytest.approx(by_hand)
    assert (record["epsilon_rdp"], record["epsilon_as_published"]) == (None, None)
    assert ledger(tmp_path / "ledger.json")["epsilon"] == pytest.approx(by_hand)


def test_it_goes_on_with_the_same_documents_and_not_with_more_of_each(tmp_path):
    users = lists(1)
    first = private(tmp_path, users)
    first.step()
    first.close()
    assert first.plan.mechanism.documents_per_owner == PER_OWNER
    again = private(tmp_path, users)
    assert again.ledger.steps == 1
    assert again._units.ids.tolist() == first._units.ids.tolist()
    again.close()
    with pytest.raises(GuaranteeError, match="one ε cannot cover both"):
        private(tmp_path, users, documents_per_owner=2)


def drawn_sums(tmp_path, users, texts, draws):
    """The clipped sum of each of these draws of documents."""
    training = private(tmp_path, users, texts, documents_per_owner=3, clip_norm=0.1)
    numbers = {int(document): place for place, document in enumerate(training._units.ids)}
    sums = []
    for draw in draws:
        rows_of, rho = training._drawn(np.array([numbers[document] for document in draw]))
        total, _ = training._clipped_sum(rows_of, rho)
        sums.append(torch.cat([each.double().flatten() for each in total]))
    training.close()
    return sums, training


@pytest.mark.slow
def test_emptying_an_owners_texts_moves_a_step_by_their_documents_drawn_and_takes_the_same(
    tmp_path,
):
    users, draw = lists(2, num_documents=24, num_owners=6), random.Random(5)
    texts = [text if len(text) > 1 else torch.tensor([1, 2, 3]) for text in documents(len(users))]
    taken = taken_by_hand(users, 3)
    draws = [draw.sample(taken, draw.randint(1, len(taken))) for _ in range(12)]
    whole, training = drawn_sums(tmp_path / "whole", users, texts, draws)
    for owner in ("p0", "p3"):
        emptied = [
            torch.tensor([], dtype=torch.long) if owner in own else text
            for own, text in zip(users, texts, strict=True)
        ]
        without, other = drawn_sums(tmp_path / owner, users, emptied, draws)
        assert other._units.ids.tolist() == training._units.ids.tolist()
        assert other.mechanism == training.mechanism
        moved = [float((one - two).norm()) for one, two in zip(whole, without, strict=True)]
        theirs = [sum(owner in users[document] for document in one) for one in draws]
        assert max(theirs) > 1
        for far, num in zip(moved, theirs, strict=True):
            assert far <= 0.1 * num * (1 + 1e-4) + 1e-9
            assert (far > 0) == (num > 0)


def test_an_empty_document_keeps_its_place_among_the_units(tmp_path):
    users = [["a", "b"], ["b", "c"], ["c"], ["d"]]
    texts = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.long)]
    training = private(tmp_path, users, [*texts, torch.tensor([5, 6])], expected_batch=4)
    assert training.num_units == 4
    training.step()


def test_texts_of_one_owner_each_are_drawn_by_user_and_take_no_such_number(tmp_path):
    with pytest.raises(UsageError, match="documents_per_owner=3 is for texts with several owners"):
        private(tmp_path, ["a", "b", "c", "a"], expected_batch=2, documents_per_owner=3)


@pytest.mark.parametrize("mode", ["scale", "as-published"])
def test_modes_that_count_one_draw_a_person_are_refused(tmp_path, mode):
    users = lists(3)
    with pytest.raises(UsageError, match="drawn at most once a step"):
        private(
            tmp_path,
            users,
            adaptive=AdaptiveSpec(mode=mode, least_weight=0.1),
            weights=np.full(len(users), 0.5),
        )


def record_of(folder, users, **settings):
    training = private(folder, users, **settings)
    record = training.guarantee()
    training.close()
    return record


def test_runs_of_other_numbers_compose_and_runs_of_other_neighbours_do_not(tmp_path):
    users = lists(4)
    two = record_of(tmp_path / "two", users, documents_per_owner=2)
    three = record_of(tmp_path / "three", users, documents_per_owner=3)
    joint = compose_runs([two, three], same_people=True)
    rates = [each["sampling_rate"] for each in (two, three)]
    steps = [
        pld.from_mixture_gaussian_mechanism(
            1.0,
            list(range(most + 1)),
            [math.comb(most, n) * q**n * (1 - q) ** (most - n) for n in range(most + 1)],
            value_discretization_interval=5e-3,
        ).self_compose(4)
        for most, q in zip((2, 3), rates, strict=True)
    ]
    by_hand = steps[0].compose(steps[1]).get_epsilon_for_delta(joint["delta"])
    assert joint["epsilon"] == pytest.approx(by_hand, rel=1e-2)
    assert (joint["epsilon_rdp"], joint["accountant"]) == (None, "PLD")
    plain = record_of(tmp_path / "plain", [own[0] for own in users])
    apart = compose_runs([two, plain], same_people=True)
    assert apart["epsilon"] is None
    assert "differ in adjacency" in apart["because"]


def test_a_ledger_that_lost_how_many_documents_an_owner_has_is_not_read_as_one(tmp_path):
    record = record_of(tmp_path, lists(5), documents_per_owner=2)
    kept = read_ledger(tmp_path / "ledger.json")
    assert Mechanism.of_record(kept) == Mechanism.of_record(record)
    with pytest.raises(KeyError):
        Mechanism.of_record({n: v for n, v in kept.items() if n != "documents_per_owner"})


@pytest.mark.parametrize("kind", [np.array, tuple])
def test_owners_in_an_array_are_as_many_as_in_a_list(kind):
    users = [["ann", "bob"], ["ann", "cat"], ["dan"]]
    found, expected = ownership_of([kind(each) for each in users]), ownership_of(users)
    assert found.owners.tolist() == expected.owners.tolist() == [0, 1, 0, 2, 3]
    assert found.bounds.tolist() == expected.bounds.tolist()


@pytest.mark.parametrize("user", [{"ann", "bob"}, None, "", 1.5, ["ann", None], ["ann", "ann"], []])
def test_what_may_name_several_people_as_one_or_nobody_is_refused(user):
    with pytest.raises(UsageError, match="Document 1 has the owners"):
        ownership_of(["zoe", user])


def test_a_record_of_owners_is_never_read_as_one_of_single_users():
    record = {"noise_multiplier": 1.0, "sampling_rate": 0.01, "documents_per_owner": 4}
    assert Mechanism.of_record(record | {"adjacency": "in other words"}).documents_per_owner == 4
    with pytest.raises(KeyError):
        Mechanism.of_record({"noise_multiplier": 1.0, "sampling_rate": 0.01, "adjacency": OWNED})
