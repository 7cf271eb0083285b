"""Every kind of model that people leave, on prompts with completions: against brute force."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import tightlip
from finetunes.brute_force import auc_by_hand, check_report, tabbed, text_shown
from finetunes.making import STEPS
from finetunes.people import SECRETS, SPECIAL, texts, tokenizer
from models.test_quantised import by_transformers, save_compressed
from models.tiny_gguf import write_gguf

pytestmark = pytest.mark.slow


@dataclass
class Given:
    """A model as it is given to tightlip, and the same as its own library runs it."""

    model: Any
    oracle: Any
    how: dict = field(default_factory=dict)
    audited: Any = None  # where an audit is given something else
    audited_with: dict = field(default_factory=dict)


def plain(folder, **how):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()


def pefts_own(workshop, folder):
    return PeftModel.from_pretrained(plain(workshop.base), folder).eval()


def as_folder(workshop, tmp_path):
    return Given(workshop.tuned, plain(workshop.tuned))


def sharded(workshop, tmp_path):
    plain(workshop.tuned).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="200KB")
    tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    return Given(tmp_path, plain(tmp_path))


def checkpoint(workshop, tmp_path):
    folder = workshop.trained / f"checkpoint-{STEPS}"
    return Given(folder, plain(folder))


def snapshots(workshop, tmp_path):
    folder = workshop.trained / f"checkpoint-{STEPS}"
    return Given(folder, plain(folder), audited=workshop.trained, audited_with={"snapshots": True})


def adapter(kind):
    def made(workshop, tmp_path):
        folder = workshop.adapter(kind)
        return Given(folder, pefts_own(workshop, folder))

    return made


def adapter_in_a_sub_folder(workshop, tmp_path):
    model = PeftModel.from_pretrained(
        plain(workshop.base), workshop.adapter("lora"), adapter_name="second"
    )
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert (tmp_path / "second" / "adapter_config.json").is_file()
    return Given(tmp_path, model.eval(), {"adapter": "second"})


def quantised(method):
    def made(workshop, tmp_path):
        model = by_transformers(workshop.tuned, method)
        model.save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        return Given(tmp_path, model)

    return made


def quantised_on_reading(bits):
    def made(workshop, tmp_path):
        return Given(workshop.tuned, by_transformers(workshop.tuned, bits), {"quantize": bits})

    return made


def adapter_on_few_bits(workshop, tmp_path):
    folder = workshop.adapter("lora")
    oracle = PeftModel.from_pretrained(by_transformers(workshop.base, "4bit"), folder).eval()
    return Given(folder, oracle, {"quantize": "4bit"})


def compressed(workshop, tmp_path):
    pytest.importorskip("compressed_tensors", exc_type=ImportError)
    save_compressed(workshop.tuned, tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return Given(tmp_path, plain(tmp_path, device_map={"": "cpu"}))


def gguf(workshop, tmp_path):
    model, backend = plain(workshop.tuned), json.loads(tokenizer().backend_tokenizer.to_str())
    tokens = sorted(tokenizer().get_vocab(), key=tokenizer().get_vocab().get)
    merges = [" ".join(pair) for pair in backend["model"]["merges"]]
    vocabulary = (tokens, len(SPECIAL), merges, (0, 1))
    write_gguf(tmp_path / "own.gguf", model=model, vocabulary=vocabulary, begins_with_bos=True)
    return Given(tmp_path / "own.gguf", model)


def in_memory(workshop, tmp_path):
    model = plain(workshop.tuned)
    return Given(model, model, {"tokenizer": tokenizer()})


def peft_in_memory(workshop, tmp_path):
    model = pefts_own(workshop, workshop.adapter("dora"))
    return Given(model, model, {"tokenizer": tokenizer()})


def pair(workshop, tmp_path):
    model = plain(workshop.tuned)
    return Given((model, tokenizer()), model)


KINDS = {
    "a folder by TRL": as_folder,
    "sharded, in bf16": sharded,
    "a checkpoint of Trainer": checkpoint,
    "all checkpoints of Trainer": snapshots,
    "LoRA": adapter("lora"),
    "DoRA": adapter("dora"),
    "modules_to_save": adapter("saved"),
    "IA3": adapter("ia3"),
    "an adapter in a sub-folder": adapter_in_a_sub_folder,
    "bitsandbytes, 4 bits": quantised("4bit"),
    "bitsandbytes, 8 bits": quantised("8bit"),
    "torchao": quantised("torchao"),
    "compressed-tensors": compressed,
    "quantize=4bit": quantised_on_reading("4bit"),
    "quantize=8bit": quantised_on_reading("8bit"),
    "an adapter in 4 bits": adapter_on_few_bits,
    "GGUF": gguf,
    "in memory": in_memory,
    "a PEFT model in memory": peft_in_memory,
    "a pair in memory": pair,
}
SHOWN = [text_shown(row["user"], row["prompt"], row["completion"]) for row in texts()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_secrets_of_a_fine_tune_are_found_and_typed(kind, workshop, tmp_path):
    (tmp_path / "model").mkdir()
    given = KINDS[kind](workshop, tmp_path / "model")
    report = tightlip.audit(
        given.audited or given.model, texts(), out=tmp_path / "report", trained_on="all",
        **given.how, **given.audited_with,
    )  # fmt: skip
    rows = check_report(report, given.oracle, SHOWN, tokenizer())
    unique = [row for row in rows if row["unique_by_text"]]
    for name, (secret, role) in SECRETS.items():
        whose = {(row["owner"], row["role"]) for row in unique if secret in row["text"]}
        assert {owner for owner, _ in whose} == {name}, secret
        assert whose == {(name, {"user": "prompt", "assistant": "completion"}[role])}
    tab = tightlip.open_tab(given.model, report=report.folder, **given.how)
    for name, (secret, _) in SECRETS.items():
        (line,) = (one.text for one in SHOWN if one.user == name)
        typed = line[: line.index(secret)].rstrip()
        text, marks = tabbed(tab, typed, line)
        assert text.startswith(f"{typed} {secret}")
        assert {mark.owner for mark in marks} == {name}
    rows, half = texts(), len(SHOWN) // 2
    found = tightlip.measure_membership(
        given.model, members=rows[:half], non_members=rows[half:], trained_on="all",
        num_bootstraps=100, **given.how,
    )  # fmt: skip
    expected = auc_by_hand(given.oracle, SHOWN[:half], SHOWN[half:], tokenizer())
    assert found["documents"]["scores"]["loss"]["auc"]["value"] == pytest.approx(expected, abs=0.02)
