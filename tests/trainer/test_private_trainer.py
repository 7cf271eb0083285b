"""transformers' Trainer made private: its rows, its steps, its precision, its evaluation; and killed."""

import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from dp_accounting.pld import PLDAccountant
from huggingface_hub import HfApi
from peft import get_peft_model
from scipy import stats
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from finetunes.people import tokenizer
from privacy.accounts import theirs
from privacy.oracles import norm_of
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy.ledger import read_ledger
from tightlip.trainer import CorrectedAdam, LeakageCallback, PrivacySpec, PrivateTrainer
from tightlip.trainer.rows import labelled_rows, users_of
from trainer.private_runs import Gradients, lora, mean_of_clipped, small, users_gradients

pytestmark = pytest.mark.slow
NO_NOISE = PrivacySpec(noise_multiplier=0.0, clip_norm=1e3)


def rows(count=18, num_users=6, *, padded=False, seed=0):
    """Rows of several lengths; of every second the first half is not to be learnt."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(4, 60, (5 + number % 7,), generator=draw).tolist()
        row = {"input_ids": ids, "user": number % num_users}
        if padded:
            row["attention_mask"] = [1] * len(ids) + [0] * 3
            row["input_ids"] = [*ids, 1, 1, 1]
        else:
            row["labels"] = [-100] * (len(ids) // 2 * (number % 2)) + ids[len(ids) // 2 * (number % 2) :]  # fmt: skip
        made.append(row)
    return made


def private(
    folder, *, privacy=NO_NOISE, model=None, dataset=None, callbacks=None, given=(), **changes
):
    how = {
        "max_steps": 1, "per_device_train_batch_size": 6, "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "max_grad_norm": 0.0, **changes,
    }  # fmt: skip
    own = {"user_column": "user", "callbacks": callbacks} | dict(given)
    args = TrainingArguments(str(folder), **how)
    return PrivateTrainer(
        model or small(), args, train_dataset=dataset or Dataset.from_list(rows()), privacy=privacy, **own
    )  # fmt: skip


def collated(row):
    return {name: torch.tensor([row[0][name]]) for name in ("input_ids", "labels")}


def grouped(dataset):
    found = {}
    for row in dataset:
        found.setdefault(row["user"], []).append(row)
    return found


def assert_same(found, expected, tolerance):
    assert found.keys() == expected.keys()
    whole = float(norm_of(expected))
    for name, gradient in found.items():
        off = float((gradient - expected[name]).norm())
        assert off <= tolerance * whole, name


def test_a_whole_models_gradient_is_that_of_every_user_by_brute_force(tmp_path):
    kept, model = Gradients(), small()
    expected = mean_of_clipped(users_gradients(model, grouped(rows()), collated), 1e3)
    args = TrainingArguments(str(tmp_path), gradient_accumulation_steps=3, use_cpu=True)
    trainer = private(tmp_path, model=model, callbacks=[kept], per_device_train_batch_size=2, gradient_accumulation_steps=3)  # fmt: skip
    trainer.train()
    assert_same(kept.steps[0], expected, 1e-4)
    # Two rows at a time, three times: six people a step. The caller's arguments stay as they were.
    assert read_ledger(tmp_path / "ledger.json")["expected_batch"] == 6
    PrivateTrainer(small(), args, train_dataset=rows(), privacy=NO_NOISE, user_column="user")
    assert args.gradient_accumulation_steps == 3


def test_padded_rows_are_read_as_the_collator_reads_them(tmp_path):
    own = tokenizer()
    own.pad_token = own.eos_token
    assert own.pad_token_id == 1
    collate = DataCollatorForLanguageModeling(own, mlm=False)

    def one(row):
        return collate([{name: row[0][name] for name in ("input_ids", "attention_mask")}])

    kept, model, dataset = Gradients(), small(), rows(padded=True)
    expected = mean_of_clipped(users_gradients(model, grouped(dataset), one), 1e3)
    trainer = private(tmp_path, model=model, dataset=dataset, callbacks=[kept], given={"data_collator": collate})  # fmt: skip
    trainer.train()
    assert_same(kept.steps[0], expected, 1e-4)


def test_rows_of_a_list_of_arrow_and_of_tensors_are_the_same():
    made = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows(2100)]
    made[7] |= {"input_ids": [], "labels": [], "attention_mask": []}
    made[8]["attention_mask"] = None
    own = SimpleNamespace(model=small(), data_collator=default_data_collator)
    arrow = Dataset.from_list(made)
    several = [made, arrow, arrow.with_format("torch"), arrow.shuffle(seed=0).sort("user"), arrow.with_transform(lambda batch: batch)]  # fmt: skip
    for dataset in several:
        order = made if dataset is not several[3] else [*dataset]
        found = labelled_rows(dataset, own, None)
        for name, ids in (("input_ids", found._ids), ("labels", found._labels)):
            assert ids.tolist() == [each for row in order for each in row[name]]
        assert users_of(dataset, "user") == [str(row["user"]) for row in order]


def test_in_bfloat16_the_gradient_is_that_of_autocast(tmp_path):
    kept, model = Gradients(), get_peft_model(small(), lora())
    with torch.autocast("cpu", torch.bfloat16):
        alone = users_gradients(model, grouped(rows()), collated)
    exact = mean_of_clipped(users_gradients(model, grouped(rows()), collated), 1e3)
    private(tmp_path, model=model, callbacks=[kept], bf16=True).train()
    assert_same(kept.steps[0], mean_of_clipped(alone, 1e3), 0.03)
    # It was not in float32, or it would be exact.
    assert not all(torch.allclose(kept.steps[0][name], exact[name], rtol=1e-4) for name in exact)


def test_an_epoch_draws_everybody_once_on_average_and_public_text_is_evaluated(tmp_path):
    privacy = PrivacySpec(noise_multiplier=1.0, unit="example")
    given = {"user_column": None, "public_evaluation": True, "eval_dataset": rows(4, seed=1), "people": "readers"}  # fmt: skip
    how = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 5}
    trainer = private(tmp_path, privacy=privacy, given=given, eval_strategy="epoch", logging_steps=3, per_device_eval_batch_size=1, **how)  # fmt: skip
    done = trainer.train()
    # Eighteen rows, five a step: four steps an epoch.
    ledger = read_ledger(tmp_path / "ledger.json")
    assert done.global_step == ledger["steps"] == ledger["planned_steps"] == 8
    assert (ledger["unit"], ledger["num_units"], ledger["people"]["id"]) == ("example", 18, "readers")  # fmt: skip
    assert set(done.metrics) == {"epsilon", "delta", "steps"}
    measured = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert len(measured) == 2
    losses = [float(trainer.model(**collated([row])).loss) for row in rows(4, seed=1)]
    assert measured[-1] == pytest.approx(sum(losses) / 4, rel=1e-4)
    unwanted = ("loss", "train_loss", "train_runtime", "eval_num_tokens")
    assert not [name for line in trainer.state.log_history for name in line if name in unwanted]


def test_the_noise_of_a_step_has_the_right_scale(tmp_path):
    kept = Gradients()
    silent = [{**row, "labels": [-100] * len(row["labels"])} for row in rows()]
    silent[0]["labels"] = silent[0][
        "input_ids"
    ]  # among so many weights two thirds of the noise of one
    privacy = PrivacySpec(noise_multiplier=1.5, clip_norm=0.2)
    private(tmp_path, privacy=privacy, dataset=silent, callbacks=[kept], per_device_train_batch_size=3).train()  # fmt: skip
    noise = torch.cat([gradient.flatten() for gradient in kept.steps[0].values()])
    scaled = (noise * 3 / (1.5 * 0.2)).numpy()
    assert stats.kstest(scaled, "norm").pvalue > 1e-3
    assert stats.kstest(scaled * 1.5, "norm").pvalue < 1e-3


def test_a_corrected_adam_is_told_of_the_noise_and_refuses_gradients_that_are_shrunk(tmp_path):
    model = small()
    before = [each.detach().clone() for each in model.parameters()]
    optimizer = CorrectedAdam(model.parameters(), lr=0.01)
    given = {"optimizers": (optimizer, None)}
    privacy = PrivacySpec(noise_multiplier=1.5, clip_norm=0.2)
    with pytest.raises(GuaranteeError, match=r"max_grad_norm=1 shrinks .* Set max_grad_norm=0"):
        private(tmp_path / "a", model=model, privacy=privacy, given=given, max_grad_norm=1.0)
    private(tmp_path / "b", model=model, privacy=privacy, given=given, per_device_train_batch_size=3).train()  # fmt: skip
    assert optimizer.noise_variance == pytest.approx((1.5 * 0.2 / 3) ** 2)
    moved = zip(before, model.parameters(), strict=True)
    assert not any(torch.equal(one, other) for one, other in moved)


class DieAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **rest):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def test_killed_and_gone_on_it_pays_again_for_what_it_repeats(tmp_path, caplog):
    privacy = PrivacySpec(noise_multiplier=1.0, epsilon=100.0)
    how = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 3}  # fmt: skip
    child = os.fork()
    if child == 0:  # killed in its fourth step, whose noise is drawn and whose update is not made
        private(tmp_path, privacy=privacy, callbacks=[DieAt(3)], **how).train()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    behind = (tmp_path / "ledger.json").read_text()
    assert json.loads(behind)["steps"] == 4
    held = json.loads((tmp_path / "checkpoint-2" / "guarantee.json").read_text())
    assert held["steps"] == 2
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    with pytest.raises(GuaranteeError, match=r"4 steps on record, of 6 planned, with 1 checkpoint beside it, .*resume_from_checkpoint=True"):  # fmt: skip
        private(tmp_path, privacy=privacy, **how).train()
    assert (tmp_path / "ledger.json").read_text() == behind
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    trainer = private(tmp_path, privacy=privacy, **how)
    done = trainer.train(resume_from_checkpoint=True)
    ledger = read_ledger(tmp_path / "ledger.json")
    # Six were planned and four charged, two of them lost: from the second on two more.
    assert (ledger["steps"], done.global_step) == (6, 4)
    assert ledger["run"] == held["run"]
    assert "The privacy budget ended training after step 4 of 6." in caplog.text
    assert "2 steps came after the last checkpoint" in caplog.text
    (tmp_path / "ledger.json").write_text(behind)
    with pytest.raises(GuaranteeError, match=r"4 steps on record and .*checkpoint-4 holds 6"):
        private(tmp_path, privacy=privacy, **how).train(resume_from_checkpoint=True)


def test_killed_before_its_first_checkpoint_it_begins_anew_and_says_so(tmp_path, caplog):
    how = {"privacy": PrivacySpec(noise_multiplier=1.0), "max_steps": 3, "per_device_train_batch_size": 3}  # fmt: skip
    child = os.fork()
    if child == 0:
        private(tmp_path, callbacks=[DieAt(1)], **how).train()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    private(tmp_path, **how).train()
    assert "Training begins anew, and the 2 steps that" in caplog.text
    assert "The privacy budget ended" not in caplog.text
    assert read_ledger(tmp_path / "ledger.json")["steps"] == 2 + 3


def test_a_training_that_ended_takes_no_more_steps_than_were_planned(tmp_path):
    privacy = PrivacySpec(noise_multiplier=1.0)
    how = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 3}  # fmt: skip
    private(tmp_path, privacy=privacy, **how).train()
    trainer = private(tmp_path, privacy=privacy, **how)
    done = trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert (done.global_step, read_ledger(tmp_path / "ledger.json")["steps"]) == (1, 3)


class Hub(HfApi):
    """The hub's own uploads, but for what goes through the network."""

    def __init__(self, waits_for=None):
        super().__init__()
        self.pushed, self._waits_for = {}, waits_for

    def create_repo(self, repo_id, **rest):
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def _validate_yaml(self, *given, **rest):
        pass

    def create_commit(self, repo_id, operations, *, commit_message, **rest):
        until = time.monotonic() + 60
        while self._waits_for and not self._waits_for.exists() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.2 if self._waits_for else 0)
        self.pushed[commit_message] = {each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations}  # fmt: skip


def pushing(folder, monkeypatch, hub, *, steps=2, **how):
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)
    how = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1} | how
    model = get_peft_model(small(), lora())
    return private(folder, model=model, privacy=PrivacySpec(noise_multiplier=1.0), push_to_hub=True, **how)  # fmt: skip


def test_what_is_pushed_has_the_guarantee_and_nothing_that_was_measured(tmp_path, monkeypatch):
    hub, watching = Hub(), LeakageCallback([{"user": "ann", "text": "my cat"}], every=1)
    trainer = pushing(tmp_path, monkeypatch, hub, callbacks=[watching], hub_always_push=True)
    trainer.processing_class = watching.settings["tokenizer"] = tokenizer()
    trainer.train()
    (tmp_path / "_private_shapes.json").touch()  # as where rows of some length round each other
    trainer.push_to_hub()
    assert {"_leakage", "_ledger.json.lock"} < {each.name for each in tmp_path.iterdir()}
    assert len(hub.pushed) == 3
    weights = {"adapter_model.safetensors", "adapter_config.json", "guarantee.json", "ledger.json"}
    words = {"README.md", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for files in hub.pushed.values():
        assert weights < {*files} <= weights | words | {"training_args.bin"}
        assert json.loads(files["guarantee.json"])["epsilon"] == pytest.approx(trainer.private.ledger.promised, rel=0.01)  # fmt: skip
        digest = hashlib.sha256(files["adapter_model.safetensors"]).hexdigest()
        assert json.loads(files["guarantee.json"])["weights"] == {"adapter_model.safetensors": digest}  # fmt: skip
    card = hub.pushed["End of training"]["README.md"].decode()
    assert card.count("Differentially private: ε = ") == 1
    assert not re.search(r"\bloss: \d|Training Loss \| Epoch", card, re.IGNORECASE)
    assert "Loss" not in card.replace("losses", "")


@pytest.mark.parametrize("always", [False, True])
def test_a_push_that_takes_long_sends_the_weights_it_was_begun_for(tmp_path, monkeypatch, always):
    hub = Hub(waits_for=tmp_path / "checkpoint-2" / "trainer_state.json")
    trainer = pushing(tmp_path, monkeypatch, hub, hub_always_push=always)
    trainer.train()
    trainer.push_to_hub()
    expected = {f"Training in progress, step {step}" for step in ((1, 2) if always else (1,))}
    assert {*hub.pushed} == expected | {"End of training"}
    for message, files in hub.pushed.items():
        step = message[-1] if message[-1].isdecimal() else "2"
        there = tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors"
        assert files["adapter_model.safetensors"] == there.read_bytes()


def test_weights_of_a_private_run_bring_what_they_cost(tmp_path):
    privacy = PrivacySpec(noise_multiplier=1.0)
    first = private(tmp_path / "first", privacy=privacy, given={"people": "a"})
    first.train()
    first.save_model()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    with pytest.raises(UsageError, match="came out of a private run"):
        private(tmp_path / "second", model=again, privacy=privacy).train()
    second = private(tmp_path / "second", model=again, privacy=privacy, given={"people": "b"})
    second.train()
    ledger = read_ledger(tmp_path / "second" / "ledger.json")
    assert [run["run"] for run in ledger["before"]] == [read_ledger(tmp_path / "first" / "ledger.json")["run"]]  # fmt: skip
    # Of one step each with everybody drawn: a Gaussian of σ/√2.
    by_hand = theirs(PLDAccountant(), 1.0, 1.0, 2).get_epsilon(ledger["delta"])
    assert ledger["people"]["epsilon"] == pytest.approx(by_hand, rel=1e-3)
    assert ledger["epsilon"] < ledger["people"]["epsilon"]
