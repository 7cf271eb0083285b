"""Membership of any model and any format, against losses that transformers itself computes."""

import pytest
import torch
from peft import PeftModel
from sklearn.metrics import roc_auc_score
from transformers import AutoModelForCausalLM

import tightlip
from finetunes.making import tuned_by_trl
from finetunes.people import STRANGERS, chats, texts, tokenizer

pytestmark = pytest.mark.slow


def losses(model, documents):
    """The mean loss of each document by the model's own call with labels."""
    with torch.no_grad():
        return [
            float(model(input_ids=ids, labels=ids).loss)
            for ids in (torch.tensor([one]) for one in documents)
        ]


def ids_of(row):
    own = tokenizer()
    if "messages" in row:
        return own.apply_chat_template(row["messages"], return_dict=False)
    return own(row["prompt"] + row["completion"])["input_ids"]


def auc_of(members, others):
    told = [1] * len(members) + [0] * len(others)
    return roc_auc_score(told, [-loss for loss in (*members, *others)])


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["folder", "adapter", "in memory"])
def test_what_was_trained_on_is_told_from_what_was_not(kind, workshop, tmp_path):
    folder = workshop.adapter("lora") if kind == "adapter" else workshop.tuned
    base = plain(workshop.base)
    model = PeftModel.from_pretrained(plain(workshop.base), folder).eval() if kind == "adapter" else plain(folder)  # fmt: skip
    given = (model, tokenizer()) if kind == "in memory" else folder
    reference = "base" if kind == "adapter" else workshop.base
    found = tightlip.measure_membership(
        given, members=texts(), non_members=texts(STRANGERS), reference=reference,
        out=tmp_path / "out", trained_on="all",
    )  # fmt: skip
    scores = found["documents"]["scores"]
    sides = [[ids_of(row) for row in texts(people)] for people in (None, STRANGERS)]
    own, public = ([losses(one, side) for side in sides] for one in (model, base))
    assert scores["loss"]["auc"]["value"] == pytest.approx(auc_of(*own))
    above = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(own, public, strict=True)]
    assert scores["reference"]["auc"]["value"] == pytest.approx(auc_of(*above)) == 1.0


def test_chats_are_told_too(base, tmp_path):
    folder = tuned_by_trl(base, chats(), tmp_path / "tuned")
    others = chats(STRANGERS)
    found = tightlip.measure_membership(folder, members=chats(), non_members=others)
    expected = [losses(plain(folder), [ids_of(row) for row in side]) for side in (chats(), others)]
    auc = found["documents"]["scores"]["loss"]["auc"]["value"]
    assert auc == pytest.approx(auc_of(*expected)) == 1.0
