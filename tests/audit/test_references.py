"""The reference of a membership measure may be an adapter, or a model in memory."""

import json
import random
import shutil

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import tightlip
from animals import WORDS
from by_hand import unlisted
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


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_reference_that_learnt_a_side_under_another_file_is_told_by_its_own_loss(runs, tmp_path):
    """The loss of a model that learnt the members finds them; one that saw neither side does not."""
    members, others = (
        written(tmp_path / "in.jsonl", ROWS[:40]),
        written(tmp_path / "out.jsonl", ROWS[40:]),
    )
    learnt = tightlip.train(
        [{"user": "x", "text": row["text"]} for row in ROWS[:40]],
        tmp_path / "learnt",
        model="transformer",
        hidden_size=32,
        num_layers=1,
        learning_rate=0.01,
        steps=60,
        batch_size=20,
        prepare={"tokenizer": str(runs / "corpus/tokenizer"), "split": "none"},
    )
    sides = {"members": members, "non_members": others, "device": "cpu", "num_bootstraps": 100}
    for reference, knows in ((learnt.model_folder, True), (runs / "other/model", False)):
        copied = shutil.copytree(reference, tmp_path / f"copy {knows}")
        (copied / "guarantee.json").unlink()  # as of a model from elsewhere
        unlisted(copied / "guarantee.json")
        found = tightlip.measure_membership(runs / "run/model", reference=copied, **sides)
        told = f"reference {copied.name} finds the members easier by itself"
        assert any(told in note for note in found["notes"]) is knows
        assert any("learnt is not known here" in note for note in found["notes"])


def test_the_register_knows_a_copied_reference_that_was_trained_on_the_same_file(runs, tmp_path):
    members, others = (
        written(tmp_path / "in.jsonl", ROWS[:40]),
        written(tmp_path / "out.jsonl", ROWS[40:]),
    )
    words = {"tokenizer": str(runs / "corpus/tokenizer"), "split": "none"}
    made = tightlip.train(members, tmp_path / "made", model="transformer", prepare=words, **QUICK)
    copied = shutil.copytree(made.model_folder, tmp_path / "copy")
    shutil.rmtree(made.folder)
    for one, other in ((members, others), (others, members)):
        with pytest.raises(UsageError, match="was itself trained on this very"):
            tightlip.measure_membership(
                runs / "run/model", members=one, non_members=other, reference=copied, device="cpu"
            )


def test_non_members_that_were_trained_on_but_for_a_word_are_told(runs, tmp_path):
    """Exact copies are left out; with their last word gone they hid the members, and nothing said so."""
    shorter = [row | {"text": row["text"].rsplit(" ", 1)[0]} for row in ROWS[:40]]
    members = written(tmp_path / "in.jsonl", [row | {"text": row["text"] + " and so on"} for row in ROWS[:40]])  # fmt: skip
    for rows, num in ((shorter, 40), (ROWS[40:], 0)):
        others = written(tmp_path / "out.jsonl", [row | {"text": row["text"] + " and on"} for row in rows])  # fmt: skip
        found = tightlip.measure_membership(
            runs / "run/model",
            members=members,
            non_members=others,
            device="cpu",
            num_bootstraps=100,
        )
        said = "of the 40 held-out documents of eight words or more stand in training too"
        assert any(f"{num} {said}" in note for note in found["notes"]) is bool(num)
