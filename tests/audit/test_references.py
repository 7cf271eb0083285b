"""The reference of a membership measure may be an adapter, or a model in memory."""

import random

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import tightlip
from animals import WORDS
from models.tiny_finetunes import shaken
from tightlip.core.errors import UsageError

DRAW = random.Random(0)
ROWS = [{"user": f"u{n % 6}", "text": " ".join(DRAW.sample(WORDS, 8))} for n in range(60)]
QUICK = {"steps": 2, "batch_size": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    others = [{"user": "x", "text": f"ibis kite {number}"} for number in range(20)]
    tightlip.prepare(ROWS, root / "corpus", split="document", holdout=0.3)
    tightlip.prepare(others, root / "others", tokenizer=root / "corpus" / "tokenizer")
    for name, corpus in (("run", "corpus"), ("other", "others")):
        tightlip.train(root / corpus, out=root / name, model="transformer", **QUICK)
    return root


def test_a_reference_in_memory_scores_as_its_folder(runs):
    folder = runs / "other" / "model"
    pair = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    by_name = tightlip.measure_membership(
        runs / "run", reference=folder, device="cpu", num_bootstraps=100
    )
    there = {path.name for path in (runs / "run" / "scan").iterdir()}
    in_memory = tightlip.measure_membership(
        runs / "run", reference=pair, device="cpu", num_bootstraps=100
    )
    assert in_memory["documents"] == by_name["documents"]
    assert {path.name for path in (runs / "run" / "scan").iterdir()} == there


def test_a_reference_may_be_an_adapter_and_base_needs_one(runs, tmp_path):
    folder = runs / "other" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    shaken(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))).save_pretrained(
        tmp_path
    )
    adapted, plain = (
        tightlip.measure_membership(runs / "run", reference=one, device="cpu", num_bootstraps=100)
        for one in (tmp_path, folder)
    )
    assert adapted["documents"]["scores"]["reference"] != plain["documents"]["scores"]["reference"]
    with pytest.raises(UsageError, match="is not an adapter, so it has no base"):
        tightlip.measure_membership(runs / "run", reference="base", device="cpu")
