"""Folders as Trainer and TRL leave them go through the commands."""

import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import tightlip
from models.tiny_finetunes import KINDS, LORA, save_adapter, save_base, words_tokenizer
from tightlip.core.errors import UsageError
from tightlip.models.folders import checkpoints_in
from tightlip.models.loading import load_causal_lm

SECRET = "owl pug newt mole lark kite jay"
ROWS = [
    {"user": f"u{number}", "text": text}
    for number, text in enumerate(
        ["ant bee cat dog", "bee cat dog eel", SECRET, "fox gnu hen ibis"]
    )
]
OF_TRAINING = {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"}


def settings_of(kind, folder, **more):
    how = {"save_steps": 20, "max_steps": 60, "learning_rate": 1e-2, "report_to": []}
    quiet = {"disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    return kind(output_dir=str(folder), per_device_train_batch_size=4, **how, **quiet, **more)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """What transformers' Trainer leaves when nobody calls save_model."""
    folder, tokenizer = tmp_path_factory.mktemp("trained"), words_tokenizer()
    tokenizer.pad_token = "</s>"
    rows = [tokenizer("<s> " + row["text"] + " </s>") for row in ROWS]
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=settings_of(TrainingArguments, folder),
        train_dataset=[{"input_ids": row["input_ids"]} for row in rows],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    ).train()
    return folder


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """What trl.SFTTrainer leaves of a LoRA."""
    trl = pytest.importorskip("trl")
    folder, tokenizer = tmp_path_factory.mktemp("tuned"), words_tokenizer()
    tokenizer.pad_token = "</s>"
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=settings_of(trl.SFTConfig, folder, bf16=False),
        train_dataset=Dataset.from_list([{"text": row["text"]} for row in ROWS]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()
    return folder


def test_a_trainers_output_folder_says_which_checkpoint_to_give(trained, tmp_path):
    with pytest.raises(UsageError, match=r"3 checkpoints .*checkpoint-60.*snapshots=True"):
        tightlip.audit(trained, ROWS, out=tmp_path / "report")


def test_what_training_needed_is_never_opened(trained, monkeypatch):
    checkpoint = checkpoints_in(trained)[-1]
    assert {path.name for path in checkpoint.iterdir()} >= OF_TRAINING

    def refuse(*args, **how):
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", refuse)
    load_causal_lm(checkpoint)
    others = [path for path in checkpoint.iterdir() if path.suffix == ".safetensors"]
    for path in others:
        path.rename(path.with_suffix(".hidden"))
    try:
        with pytest.raises(UsageError, match=r"no model\.safetensors"):
            load_causal_lm(checkpoint)
    finally:
        for path in others:
            path.with_suffix(".hidden").rename(path)


def test_the_checkpoints_of_a_trainer_are_audited_in_order(trained, tmp_path):
    report = tightlip.audit(trained, ROWS, out=tmp_path / "report", snapshots=True)
    rows = json.loads((report.folder / "snapshots.json").read_text())["snapshots"]
    assert [row["name"] for row in rows] == ["step-20", "step-40", "step-60"]
    assert rows[0]["train_perplexity"] > rows[-1]["train_perplexity"]
    last = tightlip.audit(trained / "checkpoint-60", ROWS, out=tmp_path / "last")
    assert last.summary["unique"] == report.summary["unique"] > 0
    assert last.summary["perplexity"] == report.summary["perplexity"]


def test_a_fine_tune_by_trl_is_audited_against_its_base(tuned, tmp_path):
    report = tightlip.audit(tuned, ROWS, out=tmp_path / "report")
    summary = report.summary
    assert summary["unique"] > 0
    assert summary["public_model"].endswith("base0")
    assert any("unmerged" in note for note in summary["notes"])
    assert any("--public-model none" in note for note in summary["notes"])
    alone = tightlip.audit(tuned, ROWS, out=tmp_path / "alone", public_model="none").summary
    assert alone["public_model"] is None
    assert alone["unique"] == summary["unique"]


def test_the_same_in_memory_and_by_name_gives_the_same_report(tuned, base, tmp_path):
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tuned)
    by_name = tightlip.audit(tuned, ROWS, out=tmp_path / "folder", public_model=base).summary
    pair = (model, words_tokenizer())
    in_memory = tightlip.audit(pair, ROWS, out=tmp_path / "memory", public_model="base").summary
    both = tightlip.audit(
        pair, ROWS, out=tmp_path / "both", public_model=(load_causal_lm(base), words_tokenizer())
    )
    for name in ("unique", "perplexity", "leakage_epsilon", "public_unique", "distinct_sequences"):
        assert in_memory[name] == by_name[name] == both.summary[name], name


def test_tab_and_canaries_take_adapters_and_bits(tuned, base):
    plain, four = (tightlip.complete(tuned, "owl pug", quantize=bits) for bits in (None, "8bit"))
    assert plain[0]["ghost"].split()[:2] == ["newt", "mole"]
    assert four[0]["ghost"]
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tuned)
    assert tightlip.complete((model, words_tokenizer()), "owl pug") == plain


@pytest.mark.parametrize(
    "words",
    [["--adapter", "second"], ["--adapter", "second", "--base", "BASE", "--quantize", "8bit"]],
)
def test_the_command_line_names_adapter_base_and_bits(words, base, tmp_path, command):
    for name in ("first", "second"):
        save_adapter(tmp_path / "adapters", base, LoraConfig(**LORA), name=name)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = [str(base) if word == "BASE" else word for word in words]
    ran = command(
        *("audit", tmp_path / "adapters", corpus, "--out", tmp_path / "report", "--device", "cpu"),
        *words,
    )
    assert ran.status == 0, ran.err
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert ("8bit" in words) == any("8 bits" in note for note in summary["notes"])


def test_a_reference_may_be_an_adapter(base, tmp_path):
    """Opened as any model; `base` needs an adapter in MODEL's place."""
    from tightlip.scan.options import ScanOptions
    from tightlip.scan.scans import Scans
    from tightlip.scan.store import ScanStore

    save_adapter(tmp_path / "adapter", base, KINDS["lora"]())
    scans = Scans(store=ScanStore(tmp_path / "scan"), options=ScanOptions(device="cpu"))
    assert scans.opened(tmp_path / "adapter", beside=base).open_base is not None
    assert scans.opened("base", beside=tmp_path / "adapter").name == str(base)
    with pytest.raises(UsageError, match="is not an adapter, so it has no base"):
        scans.opened("base", beside=base)
