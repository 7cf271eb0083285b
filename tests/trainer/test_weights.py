"""What weights cost: runs behind a model in memory or in a folder, and the record beside its files."""

import contextlib
import copy
import hashlib
import json
import shutil

import pytest
import torch
from datasets import Dataset
from dp_accounting.pld import PLDAccountant
from peft import (
    EvaConfig,
    IA3Config,
    LoraConfig,
    PeftModel,
    get_peft_model,
    initialize_lora_eva_weights,
)
from transformers import AutoModelForCausalLM, TrainerCallback

import tightlip
from finetunes.people import texts, tokenizer
from privacy.accounts import theirs
from tightlip.cli.train import ledger as ledger_command
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.register import guarantee_beside, weights_in
from tightlip.privacy.ledger import read_ledger
from tightlip.privacy.plans import PrivacySpec
from tightlip.trainer.weights import checkpoint_of, leave_mark, runs_behind, tell
from tightlip.training.config import TrainConfig
from tightlip.training.starting import runs_behind as runs_behind_a_run
from trainer.private_runs import lora, small
from trainer.test_private_trainer import private, rows

pytestmark = pytest.mark.slow
TEXTS = [{"user": row["user"], "text": row["prompt"] + row["completion"]} for row in texts()]
NOISY = PrivacySpec(noise_multiplier=1.0)
HALF = {"per_device_train_batch_size": 3}  # of six people


class StopAt(TrainerCallback):
    def __init__(self, step, error=None):
        self.step, self.error = step, error

    def on_step_end(self, args, state, control, **rest):
        if state.global_step == self.step and self.error:
            raise self.error
        control.should_training_stop |= state.global_step == self.step


def run_in(folder):
    return read_ledger(folder / "ledger.json")["run"]


def test_a_model_trained_in_memory_brings_that_run_along(tmp_path):
    first = private(tmp_path / "a", model=get_peft_model(small(), lora()), privacy=NOISY, callbacks=[StopAt(1)], max_steps=2, **HALF)  # fmt: skip
    first.train()
    first.train()  # the same run goes on
    ledger = read_ledger(tmp_path / "a" / "ledger.json")
    assert (ledger["steps"], "before" in ledger) == (2, False)
    with pytest.raises(GuaranteeError, match="a model that is loaded anew"):
        first.train()
    run = run_in(tmp_path / "a")
    first.args.output_dir = str(tmp_path / "b")
    with pytest.raises(UsageError, match="came out of a private run"):
        first.train()
    merged = get_peft_model(first.model.merge_and_unload(), lora(target_modules=["v_proj"]))
    second = private(tmp_path / "c", model=merged, privacy=NOISY, given={"people": "staff"}, **HALF)
    second.train()
    ledger = read_ledger(tmp_path / "c" / "ledger.json")
    assert [each["run"] for each in ledger["before"]] == [run]
    by_hand = theirs(PLDAccountant(), 1.0, 0.5, 2 + 1).get_epsilon(ledger["delta"])
    assert ledger["people"]["epsilon"] == pytest.approx(by_hand, rel=1e-3)
    # Both are behind it now; and a deleted ledger forgets nothing of the model.
    third = runs_behind(merged, None, tmp_path / "d" / "ledger.json")
    assert [each["run"] for each in third] == [run_in(tmp_path / "c"), run]
    (tmp_path / "c" / "ledger.json").unlink()
    assert len(runs_behind(merged, None, tmp_path / "c" / "ledger.json")) == 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a private model and its two checkpoints."""
    folder = tmp_path_factory.mktemp("saved") / "out"
    how = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **HALF}
    trainer = private(folder, privacy=NOISY, **how)
    trainer.train()
    trainer.save_model()
    return folder


@pytest.fixture
def out(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "out")
    return tmp_path / "out"


def test_a_guarantee_names_the_weights_that_it_is_about(out):
    for folder in (out, out / "checkpoint-1"):
        weights = json.loads((folder / "guarantee.json").read_text())["weights"]
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert weights == {"model.safetensors": digest}
        assert [each["run"] for each in runs_behind(small(), folder, out / "other.json")] == [run_in(out)]  # fmt: skip


def test_where_a_plain_trainer_wrote_over_the_weights_nothing_vouches_for_them(out):
    whole = runs_behind_a_run(TrainConfig(model=str(out)))
    assert [each["run"] for each in whole] == [run_in(out)]
    assert tightlip.ledger(out)["run"] == tightlip.ledger(out / "ledger.json")["run"] == run_in(out)
    small().save_pretrained(out)
    again = AutoModelForCausalLM.from_pretrained(out)
    for asked in (
        lambda: runs_behind(again, None, out / "other.json"),
        lambda: runs_behind(small(), out, out / "other.json"),
        lambda: runs_behind_a_run(TrainConfig(model=str(out))),
        lambda: ledger_command([out]),
        lambda: tightlip.ledger(out),
        lambda: tightlip.ledger(out / "ledger.json", out),
        lambda: tightlip.audit(out, TEXTS, tokenizer=tokenizer()),
        lambda: tightlip.compare([out / "checkpoint-1", out], corpus=TEXTS, out=out.parent / "c"),
    ):
        with pytest.raises(GuaranteeError, match=r"model\.safetensors was changed"):
            asked()
    (out / "model.safetensors").unlink()
    with pytest.raises(GuaranteeError, match=r"model\.safetensors was changed, added or removed"):
        guarantee_beside(out)
    (out / "guarantee.json").unlink()
    assert guarantee_beside(out) == {}


def test_an_audit_tells_what_the_trainer_promised_of_the_weights(out):
    told = tightlip.audit(out, TEXTS, tokenizer=tokenizer()).summary["guarantee"]
    assert (told["run"], told["epsilon"]) == (run_in(out), tightlip.ledger(out)["epsilon"])
    # A copy that lists no weights may lie beside any.
    record = json.loads((out / "guarantee.json").read_text())
    del record["weights"]
    (out / "guarantee.json").write_text(json.dumps(record))
    assert tightlip.audit(out, TEXTS, tokenizer=tokenizer()).summary["guarantee"] is None


def test_files_that_stood_there_before_are_not_vouched_for(tmp_path):
    record = {"run": "r", "because": "", "standing": "proved", "epsilon": 1.0, "delta": 1e-5, "unit": "user"}  # fmt: skip
    (tmp_path / "model.safetensors").write_bytes(b"plain")
    before = weights_in(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"private")
    (tmp_path / "optimizer.bin").write_bytes(b"state")
    tell(tmp_path, record, before)
    with pytest.raises(GuaranteeError, match=r"model\.safetensors was changed, added"):
        guarantee_beside(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert [*guarantee_beside(tmp_path)["weights"]] == ["adapter_model.safetensors"]
    tell(tmp_path, record)  # a card written anew
    assert [*guarantee_beside(tmp_path)["weights"]] == ["adapter_model.safetensors"]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"plain")
    tell(tmp_path, record)
    with pytest.raises(GuaranteeError, match=r"adapter_model\.safetensors was changed"):
        guarantee_beside(tmp_path)


def test_checkpoints_that_others_wrote_or_nobody_finished_are_not_gone_on_from(out):
    how = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **HALF}
    small().save_pretrained(out / "checkpoint-2")
    with pytest.raises(GuaranteeError, match=r"model\.safetensors was changed"):
        private(out, privacy=NOISY, **how).train(resume_from_checkpoint=True)
    (out / "checkpoint-2" / "trainer_state.json").unlink()
    assert checkpoint_of(True, out) == out / "checkpoint-1"
    with pytest.raises(GuaranteeError, match=r"half-written \(trainer_state\.json is missing\)"):
        private(out, privacy=NOISY, **how).train(resume_from_checkpoint=out / "checkpoint-2")


@pytest.mark.parametrize("start", ["nowhere", "empty", "plain"])
def test_only_public_weights_cost_nothing(start, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "guarantee.json").write_text(json.dumps({"epsilon": None}))
    assert runs_behind(small(), "public", tmp_path / "none.json") == []
    with pytest.raises(UsageError, match="start='public' where nothing but public text"):
        runs_behind(small(), tmp_path / start, tmp_path / "none.json")


def test_a_model_of_the_hub_brings_what_its_cached_guarantee_says(out, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--me--private" / "snapshots" / "abc"
    shutil.copytree(out, snapshot, ignore=lambda *_: ["checkpoint-1", "checkpoint-2"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = small()
    model.config._name_or_path, model.config._commit_hash = "me/private", "abc"
    assert [each["run"] for each in runs_behind(model, None, tmp_path / "none.json")] == [run_in(out)]  # fmt: skip
    model.config._name_or_path = "me/other"
    assert runs_behind(model, None, tmp_path / "none.json") == []


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (lora(), "lora_B"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "ia3_l"),
        (lora(modules_to_save=["lm_head"]), "modules_to_save"),
        (lora(target_modules=["embed_tokens"]), "lora_embedding_A"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_adapter_that_does_something_already_must_say_where_it_is_from(config, part, tmp_path):
    model = get_peft_model(small(), config)
    assert runs_behind(model, None, tmp_path / "none.json") == []
    weight = next(each for name, each in model.named_parameters() if part in name)
    weight.data.view(-1)[-1] += 0.25
    with pytest.raises(GuaranteeError, match="trained before, or initialised from the base"):
        runs_behind(model, None, tmp_path / "none.json")
    assert runs_behind(model, "public", tmp_path / "none.json") == []


def test_of_a_model_that_a_trainer_changed_adapters_that_others_trained_are_asked_about(tmp_path):
    model = get_peft_model(small(), lora())
    leave_mark(model, {"run": "an earlier run that trained these"})
    for weight in model.parameters():
        weight.data += 0.25
    assert len(runs_behind(model, None, tmp_path / "none.json")) == 1
    model.add_adapter("theirs", lora())
    model.set_adapter("theirs")
    assert len(runs_behind(model, None, tmp_path / "none.json")) == 1  # new, so it does nothing yet
    for name, weight in model.named_parameters():
        weight.data += 0.25 * ("lora_B.theirs" in name)
    with pytest.raises(GuaranteeError, match="trained before, or initialised from the base"):
        runs_behind(model, None, tmp_path / "none.json")


def test_what_other_code_trained_since_is_not_saved_with_the_guarantee(tmp_path):
    trainer = private(tmp_path / "out", model=get_peft_model(small(), lora()), privacy=NOISY, **HALF)  # fmt: skip
    trainer.train()
    trainer.model.to(torch.bfloat16)  # no change but of its last bits
    trainer.save_model(str(tmp_path / "saved"))
    assert guarantee_beside(tmp_path / "saved")["run"] == run_in(tmp_path / "out")
    ids = torch.tensor([rows()[0]["input_ids"]])
    trainer.model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD([each for each in trainer.model.parameters() if each.requires_grad]).step()
    with pytest.raises(GuaranteeError, match="have changed in memory since private training"):
        trainer.save_model(str(tmp_path / "openly"))
    assert not (tmp_path / "openly").exists()


def openly(model, weights=None):
    """Two steps of anybody's training."""
    weights = weights or [each for each in model.parameters() if each.requires_grad]
    ids = torch.tensor([rows()[0]["input_ids"]])
    for _ in range(2):  # in the first one lora_A has no gradient
        model(input_ids=ids, labels=ids).loss.backward()
        torch.optim.SGD(weights, lr=1.0).step()
        model.zero_grad()


def trained_in(folder, **how):
    trainer = private(folder, **{"model": get_peft_model(small(), lora()), "privacy": NOISY} | how, **HALF)  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    return trainer


def refused(trainer, folder):
    with pytest.raises(GuaranteeError, match="have changed in memory since private training"):
        trainer.save_model(str(folder))
    assert not folder.exists()


def test_neither_adapters_put_in_nor_weights_once_frozen_nor_interrupted_ones_are_vouched_for(
    tmp_path,
):
    stop = StopAt(1, KeyboardInterrupt("seen enough"))
    interrupted = trained_in(tmp_path / "a", callbacks=[stop])
    openly(interrupted.model)
    refused(interrupted, tmp_path / "openly")
    beside = trained_in(tmp_path / "b")
    beside.model.add_adapter("theirs", lora())
    refused(beside, tmp_path / "openly")
    frozen = small()
    for name, weight in frozen.named_parameters():
        weight.requires_grad_("lm_head" in name)
    headed = trained_in(tmp_path / "c", model=frozen)
    others = [each for each in frozen.parameters() if not each.requires_grad]
    frozen.requires_grad_(True)
    openly(frozen, others)
    refused(headed, tmp_path / "openly")
    headed.model = small()
    refused(headed, tmp_path / "openly")


def test_what_does_not_train_leaves_the_guarantee(tmp_path):
    trainer = trained_in(tmp_path / "a")
    trainer.model.half().float()
    trainer.model.merge_adapter()
    trainer.model.unmerge_adapter()
    trainer.model.generate(torch.tensor([[3, 4]]), max_new_tokens=2)
    for model in (trainer.model, copy.deepcopy(trainer.model)):
        assert len(runs_behind(model, None, tmp_path / "none.json")) == 1
    trainer.save_model(str(tmp_path / "saved"))
    trainer.model = trainer.model.merge_and_unload()
    trainer.save_model(str(tmp_path / "merged"))
    for folder in ("saved", "merged"):
        assert guarantee_beside(tmp_path / folder)["run"] == run_in(tmp_path / "a")


def test_openly_trained_weights_do_not_start_a_private_run_under_an_earlier_ones_mark(tmp_path):
    theirs = get_peft_model(small(), lora())
    openly(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    base = trained_in(tmp_path / "a").model.merge_and_unload()
    again = PeftModel.from_pretrained(base, tmp_path / "theirs", is_trainable=True)
    with pytest.raises(GuaranteeError, match="does something already"):  # under the same names
        runs_behind(again, None, tmp_path / "none.json")
    between = trained_in(tmp_path / "b").model
    openly(between)
    with pytest.raises(GuaranteeError, match="since private training left them, so what they cost"):
        runs_behind(between, None, tmp_path / "none.json")
    assert len(runs_behind(between, "public", tmp_path / "none.json")) == 1


def test_an_open_run_that_began_at_a_private_one_is_still_an_open_one(saved, tmp_path):
    small().save_pretrained(tmp_path / "open")
    record = {"mechanism": "none", "epsilon": None, "standing": "measured only", "learnt_from": {}}
    before = {"before": runs_behind(small(), saved, tmp_path / "none.json")}
    (tmp_path / "open" / "guarantee.json").write_text(json.dumps(record | before))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "open")
    with pytest.raises(GuaranteeError, match="was trained without privacy, as its"):
        runs_behind(model, None, tmp_path / "none.json")
    with pytest.raises(UsageError, match="of a private run, so it does not say"):
        runs_behind(small(), tmp_path / "open", tmp_path / "none.json")
    assert len(runs_behind(model, "public", tmp_path / "none.json")) == 1


def test_an_adapter_initialised_from_the_base_is_told_so(tmp_path):
    model = get_peft_model(small(), LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights="pissa"))  # fmt: skip
    with pytest.raises(GuaranteeError, match="or initialised from the base"):
        runs_behind(model, None, tmp_path / "none.json")


def test_an_adapter_that_begins_at_what_texts_activate_must_say_which_texts(tmp_path):
    config = LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights="eva", eva_config=EvaConfig(rho=1.0))  # fmt: skip
    model = get_peft_model(small(), config)
    ids = [{"input_ids": torch.tensor([row["input_ids"]])} for row in rows() if len(row["input_ids"]) > 7]  # fmt: skip
    initialize_lora_eva_weights(model, ids, show_progress_bar=False)
    weights = dict(model.named_parameters()).items()
    assert all((each == 0).all() for name, each in weights if "lora_B" in name)
    for num_before in range(2):
        with pytest.raises(GuaranteeError, match="or initialised from the base or from texts"):
            runs_behind(model, None, tmp_path / "none.json")
        assert len(runs_behind(model, "public", tmp_path / "none.json")) == num_before
        leave_mark(model, {"run": "an earlier run that changed the base"})


def test_a_run_without_noise_leaves_no_epsilon_to_whoever_starts_from_it(tmp_path):
    bare = private(tmp_path / "bare", given={"people": "staff"})
    bare.train()
    bare.save_model()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bare")
    second = private(tmp_path / "two", model=model, privacy=NOISY, given={"people": "staff"}, **HALF)  # fmt: skip
    second.train()
    people = read_ledger(tmp_path / "two" / "ledger.json")["people"]
    assert (people["epsilon"], people["standing"], people["runs"]) == (None, "measured only", 2)


def test_weights_that_a_plain_run_left_are_refused_unless_they_are_said_to_be_public(tmp_path):
    plain, ledger = tmp_path / "plain", tmp_path / "none.json"
    small().save_pretrained(plain)
    record = {"mechanism": "none", "epsilon": None, "standing": "measured only", "learnt_from": {}}
    (plain / "guarantee.json").write_text(json.dumps(record))
    model = AutoModelForCausalLM.from_pretrained(plain)
    with pytest.raises(GuaranteeError, match="was trained without privacy, as its"):
        runs_behind(model, None, ledger)
    assert runs_behind(model, "public", ledger) == []


def test_an_exception_ends_a_training_by_choice_and_the_last_weights_are_saved(tmp_path):
    how = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, **HALF}
    stop = StopAt(4, KeyboardInterrupt("seen enough"))
    with pytest.raises(KeyboardInterrupt):
        private(tmp_path, privacy=NOISY, callbacks=[stop], **how).train()
    ledger = read_ledger(tmp_path / "ledger.json")
    assert (ledger["steps"], ledger["finished"]) == (4, True)
    trainer = private(tmp_path, privacy=NOISY, **how)
    done = trainer.train(resume_from_checkpoint=True)
    # Five were planned and four taken: one is left, from the second on.
    assert read_ledger(tmp_path / "ledger.json")["steps"] == 5
    assert done.global_step == 3
    assert guarantee_beside(tmp_path / "checkpoint-3")["steps"] == 5
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    for one, other in zip(last.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_out_of_a_subfolder_bring_the_run_whose_ledger_lies_above(tmp_path):
    how = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, **HALF}
    private(tmp_path, privacy=NOISY, **how).train()
    assert not (tmp_path / "guarantee.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="checkpoint-1")
    (run,) = runs_behind(model, None, tmp_path / "another.json")
    assert run["run"] == run_in(tmp_path)
    assert runs_behind(model, None, tmp_path / "ledger.json") == []  # which goes on


class ChangesTheBase(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **rest):
        with torch.no_grad():
            model.get_input_embeddings().weight[0] += state.global_step > 1


def test_a_promise_that_is_lost_is_lost_beside_earlier_checkpoints_too(tmp_path):
    how = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **HALF}
    adapted = get_peft_model(small(), lora())
    private(tmp_path, model=adapted, privacy=NOISY, callbacks=[ChangesTheBase()], **how).train()
    for folder in (tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"):
        assert guarantee_beside(folder)["epsilon"] is None
        assert (folder / "README.md").read_text().count("**Measured only.**") == 1
        assert "proved" not in (folder / "README.md").read_text().lower()


class Hooks(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **rest):
        next(model.parameters()).register_hook(lambda gradient: gradient)


def test_a_hook_is_refused_before_a_step_is_charged_and_an_unused_ledger_may_go(tmp_path):
    with pytest.raises(GuaranteeError, match="has a hook that is shown its gradients"):
        private(tmp_path, privacy=NOISY, callbacks=[Hooks()], **HALF).train()
    ledger = read_ledger(tmp_path / "ledger.json")
    assert (ledger["steps"], ledger["finished"]) == (0, False)
    fewer = Dataset.from_list(rows(15, 5))
    with pytest.raises(GuaranteeError, match=r"Or delete .*ledger\.json: it has no step on record"):
        private(tmp_path, privacy=NOISY, dataset=fewer, **HALF).train()


def test_an_older_copy_of_a_run_that_ended_does_not_go_on_in_its_place(tmp_path):
    how = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "given": {"people": "staff"}, **HALF}  # fmt: skip
    out, backup = tmp_path / "out", tmp_path / "backup"
    private(out, privacy=NOISY, callbacks=[StopAt(2)], **how).train()
    shutil.copytree(out, backup)
    private(out, privacy=NOISY, **how).train(resume_from_checkpoint=True)
    assert read_ledger(out / "ledger.json")["steps"] == 4
    shutil.move(out, tmp_path / "published")
    for folder in (backup, shutil.copytree(backup, out)):
        with pytest.raises(GuaranteeError, match=r"2 steps on record, and its run ended with 4"):
            private(folder, privacy=NOISY, **how).train(resume_from_checkpoint=True)
    shutil.rmtree(out)
    shutil.move(tmp_path / "published", out)
    trainer = private(out, privacy=NOISY, **how)
    with pytest.raises(GuaranteeError, match="training would begin anew"):
        trainer.train()


def test_weights_that_were_saved_past_the_trainer_are_asked_about(saved, tmp_path):
    for number, model in enumerate([small(), get_peft_model(small(), lora())]):
        trainer = trained_in(tmp_path / str(number), model=model)
        trainer.save_model(str(tmp_path / f"told {number}"))
        whole = trainer.model.merge_and_unload() if number else trainer.model
        whole.save_pretrained(tmp_path / f"past {number}")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"past {number}")
        for start in (None, saved):
            with pytest.raises(GuaranteeError, match="saved past their trainer"):
                runs_behind(again, start, tmp_path / "none.json")
        # The run itself goes on, and where it is named it is counted.
        ledger = tmp_path / str(number) / "ledger.json"
        assert runs_behind(again, None, ledger) == []
        told = runs_behind(again, tmp_path / f"told {number}", tmp_path / "none.json")
        assert [each["run"] for each in told] == [read_ledger(ledger)["run"]]
