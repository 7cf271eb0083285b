"""TRL's trainer made private: three changed lines, the right gradient, the right ε, nothing told."""

import json
import re

import pytest
import torch
from datasets import Dataset
from dp_accounting.pld import PLDAccountant
from peft import PeftModel
from transformers import TrainerCallback

from finetunes.people import TOLD, chats, texts, tokenizer
from privacy.accounts import theirs
from privacy.oracles import norm_of
from tightlip.core.errors import GuaranteeError
from tightlip.privacy.ledger import read_ledger
from tightlip.trainer import LeakageCallback, PrivacySpec, PrivateSFTTrainer
from trainer.private_runs import (
    Gradients,
    lora,
    mean_of_clipped,
    private_sft,
    settings,
    several,
    small,
    users_gradients,
)

pytestmark = pytest.mark.slow

SCRIPT = """
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(output_dir=out, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
                   logging_steps=1, save_steps=2, use_cpu=True, disable_tqdm=True, report_to=[]),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"]),
)
trainer.train()
trainer.save_model()
"""
PRIVATE = SCRIPT.replace(
    "from trl import SFTConfig, SFTTrainer",
    "from trl import SFTConfig\nfrom tightlip.trainer import PrivacySpec, PrivateSFTTrainer",
).replace(
    "trainer = SFTTrainer(",
    'trainer = PrivateSFTTrainer(privacy=PrivacySpec(epsilon=8, unit="user"), user_column="user",',
)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The folder that the private script leaves, and its trainer."""
    out = tmp_path_factory.mktemp("script")
    names = {"model": small(), "out": str(out), "rows": several(chats()), "tokenizer": tokenizer()}  # fmt: skip
    exec(PRIVATE, names)
    return out, names["trainer"]


def test_three_lines_of_a_script_make_it_private(script):
    was, became = ({*text.splitlines()} for text in (SCRIPT, PRIVATE))
    assert len(became - was) == 3
    ledger = read_ledger(script[0] / "ledger.json")
    assert (ledger["steps"], ledger["finished"], ledger["standing"]) == (3, True, "proved")


def test_the_ledgers_epsilon_is_that_of_dp_accounting_by_hand(script):
    ledger = read_ledger(script[0] / "ledger.json")
    # Eight people, of whom a step draws 2 × 2 on average, three times.
    assert (ledger["num_units"], ledger["sampling_rate"], ledger["planned_steps"]) == (8, 0.5, 3)
    by_hand = theirs(PLDAccountant(), ledger["noise_multiplier"], 4 / 8, 3)
    assert ledger["epsilon"] == pytest.approx(by_hand.get_epsilon(ledger["delta"]), rel=1e-3)
    assert 7.9 < ledger["epsilon"] <= 8


def test_logs_and_state_hold_learning_rate_noisy_norm_and_epsilon_only(script):
    out, trainer = script
    told = {"learning_rate", "grad_norm", "epsilon", "epsilon_so_far", "epoch", "step"}
    state = json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())
    for history in (trainer.state.log_history, state["log_history"]):
        assert {name for line in history for name in line} <= told
    assert len(state["log_history"]) == 3
    assert (state["total_flos"], state["num_input_tokens_seen"], state["best_metric"]) == (0, 0, None)  # fmt: skip


def test_what_is_saved_is_an_adapter_with_its_guarantee_and_nothing_private(script):
    out, trainer = script
    guarantee = json.loads((out / "guarantee.json").read_text())
    ledger = read_ledger(out / "ledger.json")
    for folder, steps in ((out, 3), (out / "checkpoint-2", 2)):
        own = json.loads((folder / "guarantee.json").read_text())
        assert (own["epsilon"], own["run"], own["steps"]) == (ledger["epsilon"], ledger["run"], steps)  # fmt: skip
        card = (folder / "README.md").read_text()
        assert card.count("ε = 8.00 at δ = 1e-05, per user") == 1
        assert card.count("## Guarantee") == 1
    assert guarantee["unit"] == "user"
    adapter = PeftModel.from_pretrained(small(), out)
    for name, weight in adapter.named_parameters():
        if "lora_" in name:
            assert torch.equal(weight, trainer.model.get_parameter(name))
    # The tokenizer is public.
    words = [word for told in TOLD.values() for word in told] + [f"{name.title()} here" for name in TOLD]  # fmt: skip
    secret = re.compile("|".join(map(re.escape, words)).encode())
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "tokenizer.json"]
    assert len(files) > 10
    assert [path.name for path in files if secret.search(path.read_bytes())] == []
    arguments = torch.load(out / "training_args.bin", weights_only=False)
    assert not [v for v in vars(arguments).values() if isinstance(v, (torch.Tensor, list)) and len(v) > 8]  # fmt: skip


TOO_LONG = {"prompt": "word " * 60, "completion": "yes"}  # of which TRL leaves nothing to learn
WITH_DROPPED = [{"user": "zoe", **TOO_LONG}, *texts()[:3], {"user": texts()[5]["user"], **TOO_LONG}, *texts()[3:]]  # fmt: skip


def by_user(trainer):
    rows = {}
    for row in trainer.train_dataset:
        ids_and_labels = {name: row[name] for name in ("input_ids", "labels")}
        rows.setdefault(row["user"], []).append(ids_and_labels)
    return rows


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (chats(), {"assistant_only_loss": True, "gradient_checkpointing": False}),
        (chats(), {"assistant_only_loss": False, "gradient_checkpointing": True}),
        (texts(), {"completion_only_loss": True, "max_length": 40}),
        (WITH_DROPPED, {"completion_only_loss": True, "max_length": 40}),
    ],
    ids=["assistant only", "whole chats, checkpointed", "completions, cut", "some dropped"],
)
def test_a_steps_gradient_is_that_of_every_users_clipped_by_brute_force(rows, changes, tmp_path):
    kept = Gradients()
    model = small()
    privacy = PrivacySpec(noise_multiplier=0.0, clip_norm=1.0)
    how = {"max_steps": 1, "max_grad_norm": 0.0, "learning_rate": 0.0, **changes}
    given = {"start": "public"}
    trainer = private_sft(tmp_path, rows=several(rows, 3), model=model, privacy=privacy, callbacks=[kept], given=given, **how)  # fmt: skip
    # A step draws 8 of 8 people, and LoRA's second factor is not zero as it is at first.
    generator = torch.Generator().manual_seed(0)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    trainer.model.eval()
    alone = users_gradients(trainer.model, by_user(trainer), trainer.data_collator)
    norms = sorted(float(norm_of(each)) for each in alone.values())
    trainer.privacy = PrivacySpec(noise_multiplier=0.0, clip_norm=(norms[3] + norms[4]) / 2)
    trainer.train()
    expected = mean_of_clipped(alone, trainer.privacy.clip_norm)
    (found,) = kept.steps
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5 * norms[-1])


def test_rows_that_trl_drops_are_told_and_the_others_stay_whose_they_are(tmp_path, caplog):
    trainer = private_sft(tmp_path, rows=WITH_DROPPED, max_length=40)
    assert "2 rows of 10 without a token to learn" in caplog.text
    whose = {tuple(row["prompt"].split()[:3]): row["user"] for row in texts()}
    for row, user in zip(trainer.train_dataset, trainer._users, strict=True):
        said = trainer.processing_class.decode(row["input_ids"], skip_special_tokens=True)
        assert whose[tuple(said.split()[:3])] == user


class Packs(PrivateSFTTrainer):
    def _prepare_dataset(self, dataset, *given):
        rows = super()._prepare_dataset(dataset, *given)
        return rows.select(range(len(rows) // 2)).map(
            lambda row: {"input_ids": row["input_ids"] * 2}
        )


def test_only_trl_drops_rows_and_only_as_it_prepares_them(tmp_path):
    dataset = Dataset.from_list(several(chats()))
    example = PrivacySpec(noise_multiplier=1.0, unit="example")
    own = {"privacy": example, "peft_config": lora(), "train_dataset": dataset, "processing_class": tokenizer()}  # fmt: skip
    with pytest.raises(GuaranteeError, match="16 rows were given and there are 8 after"):
        Packs(small(), settings(tmp_path), **own)
    trainer = private_sft(tmp_path, privacy=example, given={"user_column": None})
    trainer.train_dataset = trainer.train_dataset.select(range(8))
    for _ in range(2):
        with pytest.raises(GuaranteeError, match="16 rows were given and there are 8 after"):
            trainer.train()


@pytest.mark.parametrize("empty", [None, []])
def test_nobodys_empty_chat_decides_how_everybodys_rows_are_read(empty, tmp_path):
    rows = [{**row, "text": "other words"} for row in several(chats())]
    with pytest.raises(GuaranteeError, match="A row has nothing in 'messages'"):
        private_sft(tmp_path, rows=[rows[0] | {"messages": empty}, *rows[1:]])


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **rest):
        control.should_training_stop = state.global_step >= self.step


def test_going_on_from_a_checkpoint_charges_what_is_repeated_and_ends_with_the_budget(tmp_path):
    how = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    privacy = PrivacySpec(epsilon=30.0, noise_multiplier=1.0)
    private_sft(tmp_path, privacy=privacy, callbacks=[StopAt(3)], **how).train()
    assert read_ledger(tmp_path / "ledger.json")["steps"] == 3
    trainer = private_sft(tmp_path, privacy=privacy, **how)
    done = trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    # Three were charged, the third of them for nothing: two are left of five.
    assert read_ledger(tmp_path / "ledger.json")["steps"] == 5
    assert done.global_step == 4
    assert trainer.state.log_history[-1]["step"] == 4


def test_an_audit_of_private_text_leaves_its_reports_and_tells_nobody(tmp_path):
    rows, privacy = several(chats()), PrivacySpec(noise_multiplier=1.0, insecure_seed=3)
    how = {"privacy": privacy, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    plain = private_sft(tmp_path / "plain", **how)
    plain.train()
    callbacks = {
        "private": LeakageCallback(rows, every=1),
        "public": LeakageCallback(rows, every=1, fail_on="people_affected>1000", public=True),
    }
    for name, callback in callbacks.items():
        trainer = private_sft(tmp_path / name, callbacks=[callback], **how)
        trainer.train()
        reports = sorted((tmp_path / name / "_leakage").iterdir())
        assert [one.name for one in reports] == ["step-00000001", "step-00000002"]
        assert all(one.stat().st_mode & 0o077 == 0 for one in reports)
        state = json.loads((tmp_path / name / "checkpoint-2" / "trainer_state.json").read_text())
        told = {each for line in state["log_history"] for each in line if "leakage" in each}
        assert bool(told) == (name == "public")
        assert len([line for line in state["log_history"] if "grad_norm" in line]) == 2
        for one, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(one, other)
