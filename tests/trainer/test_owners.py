"""A trainer's user column that holds lists of owners."""

import math
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from dp_accounting.pld import privacy_loss_distribution as pld

from finetunes.people import USERS, chats
from privacy.oracles import norm_of
from privacy.test_owners import taken_by_hand
from tightlip.core.errors import GuaranteeError
from tightlip.privacy.accounting import OWNED
from tightlip.privacy.ledger import read_ledger
from tightlip.privacy.sampling import ownership_of
from tightlip.privacy.sources import LabelledRows, sampled_units
from tightlip.trainer import PrivacySpec
from tightlip.trainer.rows import users_left, users_of
from trainer.private_runs import (
    Gradients,
    mean_of_clipped,
    private_sft,
    several,
    users_gradients,
)

OWNERS = [["ann", "bob"], ["bob"], ["cyd", "ann"], ["dan"]]


def dataset(owners):
    return Dataset.from_dict({"user": owners, "input_ids": [[1, 2]] * len(owners)})


def test_lists_of_owners_become_documents_that_are_drawn_a_few_of_each_owner():
    users = users_of(dataset(OWNERS), "user")
    assert users == OWNERS
    assert users_left(dataset(OWNERS), "user", users) == OWNERS
    with pytest.raises(GuaranteeError, match=r"2 of 4 rows were left out .* others of its owners"):
        users_left(dataset(OWNERS[1:3]), "user", users)
    ids = [np.array([1, 2])] * 4
    source = LabelledRows(ids, ids, users)
    assert source.unit_of_row.tolist() == [0, 1, 2, 3]
    assert sampled_units(source, 1).tolist() == ownership_of(OWNERS).taken(1).tolist()
    assert len(sampled_units(source, None)) == 4
    for others in (OWNERS[::-1], [*OWNERS, OWNERS[0]]):
        with pytest.raises(GuaranteeError, match=r"another order.* or are more than before"):
            users_left(dataset(others), "user", users)


@pytest.mark.parametrize("owners", [[], ["ann", ""], ["ann", "ann"], ["ann", None]])
def test_a_list_that_names_nobody_or_somebody_twice_is_refused(owners):
    with pytest.raises(GuaranteeError, match="Row 1 has a user of type list"):
        users_of(dataset([["ann"], owners]), "user")


def mail(seed=0):
    """Two chats of each of the eight people, every one of them owned by one to three."""
    draw = random.Random(seed)
    return [row | {"user": draw.sample(USERS, draw.choice([1, 2, 3]))} for row in several(chats())]


@pytest.mark.slow
def test_a_steps_gradient_is_that_of_every_taken_document_clipped_by_brute_force(tmp_path):
    rows, kept = mail(), Gradients()
    taken = taken_by_hand([row["user"] for row in rows], 2)
    assert 4 < len(taken) < len(rows)
    how = {"max_steps": 1, "max_grad_norm": 0.0, "learning_rate": 0.0, "per_device_train_batch_size": len(taken)}  # fmt: skip
    whole = PrivacySpec(noise_multiplier=0.0, documents_per_owner=2)
    trainer = private_sft(tmp_path, rows=rows, privacy=whole, callbacks=[kept], given={"start": "public"}, **how)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:  # not zero, as it is at first
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    trainer.model.eval()
    documents = {place: [{name: trainer.train_dataset[place][name] for name in ("input_ids", "labels")}] for place in taken}  # fmt: skip
    alone = users_gradients(trainer.model, documents, trainer.data_collator)
    norms = sorted(float(norm_of(each)) for each in alone.values())
    clip_norm = norms[len(norms) // 2]  # half of them are cut
    trainer.privacy = PrivacySpec(noise_multiplier=0.0, documents_per_owner=2, clip_norm=clip_norm)
    trainer.train()
    expected = mean_of_clipped(alone, clip_norm)
    for name, gradient in kept.steps[0].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5 * norms[-1])


@pytest.mark.slow
def test_the_ledgers_epsilon_is_the_mixture_of_dp_accounting_by_hand(tmp_path):
    rows, steps, sigma, most = mail(), 3, 1.5, 2
    privacy = PrivacySpec(noise_multiplier=sigma, documents_per_owner=most)
    how = {"max_steps": steps, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    private_sft(tmp_path, rows=rows, privacy=privacy, **how).train()
    ledger = read_ledger(tmp_path / "ledger.json")
    rate = 4 / len(taken_by_hand([row["user"] for row in rows], most))
    owners = {owner for row in rows for owner in row["user"]}
    assert (ledger["num_units"], ledger["documents_per_owner"]) == (len(owners), most)
    assert (ledger["sampling_rate"], ledger["adjacency"]) == (pytest.approx(rate), OWNED)
    times = range(most + 1)
    law = [math.comb(most, n) * rate**n * (1 - rate) ** (most - n) for n in times]
    step = pld.from_mixture_gaussian_mechanism(
        sigma, [*times], law, value_discretization_interval=1e-3
    )
    by_hand = step.self_compose(steps).get_epsilon_for_delta(ledger["delta"])
    assert ledger["epsilon"] == pytest.approx(by_hand, rel=1e-2)
