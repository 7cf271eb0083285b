"""Adapters trained by `train`: PEFT's own loop and merging, and autograd, say what they must be."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel
from transformers import AutoModelForCausalLM

import tightlip
from models.tiny_finetunes import save_base, tiny_gpt2, tiny_llama, words_tokenizer
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.corpus.prepare import prepare_corpus
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.models.folders import state_fingerprint
from tightlip.models.loading import load_causal_lm
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.loop import train_model as train
from tightlip.training.lora import adapted_model, check_rows_stay_alone
from tightlip.training.plan import Plan
from training.by_peft import (
    WEIGHTS,
    adapter_in,
    assert_close,
    by_peft,
    clipped_sum_by_autograd,
    named_as_saved,
    padded,
    trained_by_hand,
)
from training.small_corpora import documents

pytestmark = pytest.mark.slow

ROWS = documents(num_documents=24, num_users=6, longest=9)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """One base in each precision and of each layout of weights."""
    folder = tmp_path_factory.mktemp("bases")
    save_base(folder / "llama")
    save_base(folder / "gpt2", make=tiny_gpt2)
    save_base(folder / "half", make=lambda: tiny_llama().bfloat16())
    # Large enough for bitsandbytes to have anything to quantise.
    wide = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    save_base(folder / "wide", make=tiny_llama, **wide)
    return folder


@pytest.fixture(scope="module")
def corpus(bases, tmp_path_factory):
    config = PrepareConfig(tokenizer=str(bases / "llama"), split="none")
    return prepare_corpus(ROWS, tmp_path_factory.mktemp("corpus") / "prepared", config)


def adapting(base, **settings):
    plain = {"lora": 2, "steps": 3, "batch_size": 6, "sequence_length": 10, "learning_rate": 0.05}
    return TrainConfig.of(model=str(base), **{**plain, **settings})


def encoded(rows):
    """Every document after its begin token."""
    tokenizer = words_tokenizer()
    return [[tokenizer.bos_token_id, *tokenizer(row["text"]).input_ids] for row in rows]


# Plain training


@pytest.mark.parametrize("base", ["llama", "gpt2", "half"])
def test_a_plain_run_trains_what_a_loop_by_hand_with_peft_trains(base, bases, corpus, tmp_path):
    """All rows in one batch, so that nothing is asked of the order."""
    targets = {"llama": ("q_proj", "down_proj"), "gpt2": ("c_attn",), "half": None}[base]
    shape = {"lora": 3, "lora_alpha": 12.0, "lora_targets": targets}
    config = adapting(bases / base, batch_size=24, optimizer="sgd", momentum=0.9, **shape)
    if base == "gpt2":  # whose own dropout goes by torch's generator
        about = json.loads((bases / base / "config.json").read_text())
        rates = dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], 0.0)
        (bases / base / "config.json").write_text(json.dumps(about | rates))
    run = train(corpus, tmp_path / "run", config)
    named = {"r": 3, "lora_alpha": 12, "target_modules": list(targets or ()) or "all-linear"}
    model = by_peft(bases / base, **named)
    expected = trained_by_hand(model, encoded(ROWS), steps=3, rate=0.05, momentum=0.9)
    found = adapter_in(run.model_folder)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    rounding = {"rtol": 2e-2, "atol": 2e-3} if base == "half" else {"rtol": 1e-4, "atol": 1e-6}
    assert_close(found, expected, **rounding)


def test_merged_is_the_base_in_its_own_precision_with_the_adapter_that_peft_adds(
    bases, corpus, tmp_path
):
    config = adapting(bases / "half", steps=5)
    run = train(corpus, tmp_path / "run", config, RunOptions(merge=True))
    base = AutoModelForCausalLM.from_pretrained(bases / "half", dtype="auto")
    expected = PeftModel.from_pretrained(base, run.model_folder).merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(run.folder / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    batch = {"input_ids": padded(encoded(ROWS))["input_ids"]}
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, expected(**batch).logits)
    own = json.loads((run.folder / "merged" / "guarantee.json").read_text())
    assert own == json.loads((run.model_folder / "guarantee.json").read_text())
    assert words_tokenizer().get_vocab() == (
        tightlip.models.load_tokenizer(run.folder / "merged").get_vocab()
    )


def test_a_finished_run_is_merged_when_that_is_asked_for_and_training_goes_on_from_it(
    bases, corpus, tmp_path
):
    config = adapting(bases / "llama", steps=1)
    run = train(corpus, tmp_path / "run", config)
    with pytest.raises(UsageError, match="trained adapters, and training goes on from a whole"):
        tightlip.train(corpus, tmp_path / "next", model=str(run.folder), steps=1)
    before = (run.model_folder / WEIGHTS).read_bytes()
    train(corpus, tmp_path / "run", config, RunOptions(merge=True))
    assert (run.model_folder / WEIGHTS).read_bytes() == before
    how = {"steps": 1, "sequence_length": 10}
    later = tightlip.train(corpus, tmp_path / "next", model=str(run.folder), **how)
    assert later.config["train"]["model"] == str((run.folder / "merged").resolve())


def test_an_audit_reads_the_run_as_it_was_trained_with_its_base_as_the_public_model(
    bases, corpus, tmp_path
):
    run = train(corpus, tmp_path / "run", adapting(bases / "llama", steps=4))
    summary = tightlip.audit(str(run.folder), out=tmp_path / "report").summary
    base = AutoModelForCausalLM.from_pretrained(bases / "llama")
    with torch.no_grad():
        loss = PeftModel.from_pretrained(base, run.model_folder)(**padded(encoded(ROWS))).loss
    assert summary["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert summary["public_model"] == str(bases / "llama")


def test_adapters_start_as_their_base(bases):
    ids = {"input_ids": padded(encoded(ROWS))["input_ids"]}
    base = AutoModelForCausalLM.from_pretrained(bases / "half", dtype="auto")
    adapted = adapted_model(adapting(bases / "half"), torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(adapted(**ids).logits, base(**ids).logits)


# Private training


def written_out(model):
    """Put plain layers with the same numbers in the place of those in four bits."""
    for module in list(model.modules()):
        if type(layer := getattr(module, "base_layer", None)).__name__ == "Linear4bit":
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            numbers = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            plain.weight = torch.nn.Parameter(numbers.float(), requires_grad=False)
            module.base_layer = plain


def texts_of_users(rows):
    """What each user wrote; no text is without a word."""
    texts = {}
    for row, text in zip(rows, encoded(rows), strict=True):
        texts.setdefault(row["user"], []).append(text)
    return texts


@pytest.mark.parametrize(
    ("base", "load_in"),
    [("llama", None), ("gpt2", None), ("half", None), ("wide", "4bit"), ("wide", "8bit")],
)
def test_a_private_step_is_the_sum_of_clipped_gradients_of_autograd(
    base, load_in, bases, corpus, tmp_path
):
    """Without noise, everybody drawn, sgd at rate 1: the step itself is what was summed."""
    clip, num_users = 0.3, 6
    config = adapting(
        bases / base, steps=1, batch_size=num_users, optimizer="sgd", learning_rate=1.0,
        mitigation="dp", noise_multiplier=0.0, clip_norm=clip, rows_per_unit=4, load_in=load_in,
    )  # fmt: skip
    torch.manual_seed(config.seed)
    model = adapted_model(config, torch.device("cpu"))
    base_before = state_fingerprint(model.get_base_model())
    start = {name: each.detach().clone() for name, each in named_as_saved(model).items()}
    if load_in == "4bit":
        written_out(model)
    total = clipped_sum_by_autograd(model.eval(), texts_of_users(ROWS), clip)
    run = train(corpus, tmp_path / "run", config)
    expected = {name: start[name] - total[name] / num_users for name in start}
    assert run.guarantee["num_units"] == num_users
    largest = max(float(each.abs().max()) for each in total.values()) / num_users
    # Rounding in eight bits is the base's, and the same for both; what is left is float32's, and what
    # is taken off the bound for it. A bfloat16 base hands on gradients of 8 bits.
    share = 0.05 if base == "half" else 5e-3
    assert_close(adapter_in(run.model_folder), expected, rtol=0, atol=share * largest)
    if load_in != "4bit":
        assert state_fingerprint(model.get_base_model()) == base_before


def test_a_private_run_of_adapters_carries_its_promise_and_says_what_it_stands_on(
    bases, corpus, tmp_path
):
    config = adapting(bases / "llama", mitigation="dp", epsilon=8.0, steps=2, batch_size=3)
    run = train(corpus, tmp_path / "run", config)
    for folder in (run.model_folder, run.snapshots[-1].folder):
        card, own = (folder / "README.md").read_text(), json.loads(
            (folder / "guarantee.json").read_text()
        )  # fmt: skip
        assert own["epsilon"] == run.guarantee["epsilon"] <= 8.0
        assert "ε = 8.00" in card
        assert f'base_model: "{bases / "llama"}"' in card
        named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == str(bases / "llama")


def test_eight_bits_that_look_at_all_rows_are_refused_under_dp_and_ours_do_not(bases):
    """The reason, seen: with the usual threshold one row changes what another is rounded to."""
    few = adapting(bases / "wide", load_in="8bit")
    ours = adapted_model(few, torch.device("cpu"))
    check_rows_stay_alone(ours)
    usual = load_causal_lm(bases / "wide", quantize="8bit", dtype=torch.float32)
    with pytest.raises(GuaranteeError, match="llm_int8_threshold=6: columns to be kept whole"):
        check_rows_stay_alone(usual)
    layer = next(each for each in usual.modules() if type(each).__name__ == "Linear8bitLt")
    mild, wild = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    wild[..., :4] = 50.0

    def first(layer, other):
        with torch.no_grad():
            return layer(torch.cat([mild, other]))[0]

    moved = (first(layer, mild) - first(layer, wild)).abs().max()
    layer.state.threshold = 0.0
    assert moved > 1e-3
    assert torch.equal(first(layer, mild), first(layer, wild))


# Room on the disk


def test_snapshots_are_counted_as_they_will_be_named():
    draw = np.random.default_rng(0)
    for _ in range(300):
        config = SimpleNamespace(
            epochs=None,
            steps=int(draw.integers(1, 40)),
            snapshot=str(draw.choice(["epoch", "none"])),
            snapshot_steps=[None, 1, 2, 3, 7][draw.integers(5)],
            first_quarter=bool(draw.integers(2)),
        )
        plan = Plan(config=config, steps_per_epoch=int(draw.integers(1, 15)))
        names = [plan.snapshot_name(step) for step in range(1, plan.num_steps + 1)]
        assert plan.num_snapshots == len([name for name in names if name is not None])


def test_a_run_without_room_is_refused_before_it_begins_and_fewer_snapshots_fit(
    bases, corpus, tmp_path, monkeypatch
):
    config = TrainConfig.of(
        model="transformer", hidden_size=16, num_heads=2, sequence_length=10, snapshot_steps=1,
        steps=20, batch_size=6,
    )  # fmt: skip
    small = train(corpus, tmp_path / "one", TrainConfig.of(**config.tree() | {"steps": 1}))
    one = sum(path.stat().st_size for path in small.model_folder.iterdir())
    usage = shutil.disk_usage(tmp_path)._replace(free=14 * one)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(
        UsageError,
        match=r"[1-9]\d*\.\d\d [KM]B free, and the run would need [1-9].* 20 snapshots of [1-9]",
    ):
        train(corpus, tmp_path / "run", config)
    assert not (tmp_path / "run").exists()
    run = train(corpus, tmp_path / "run", config, RunOptions(keep_snapshots=2))
    assert [one.name for one in run.snapshots] == ["step-19", "epoch-5"]


# What is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"base": "transformer"}, "a new transformer would stay as random as it begins"),
        ({"lora": None, "lora_alpha": 4.0}, "lora_alpha=4.0 is about adapters"),
        ({"lora": None, "load_in": "4bit"}, "load_in=4bit is about adapters"),
        (
            {"lora_dropout": 0.1, "mitigation": "dp", "epsilon": 8.0},
            "would let one user more or less change everybody's masks",
        ),
        ({"lora_targets": ("q_proj", "qq")}, "has 'qq', and no layer has it. Layers .* q_proj"),
        ({"lora_targets": ("lm_head",)}, "lm_head is not a linear layer inside the model"),
        ({"lora_targets": ("embed_tokens",)}, "embed_tokens is not a linear layer inside"),
    ],
)
def test_what_adapters_cannot_do_is_refused_with_the_reason(
    settings, words, bases, corpus, tmp_path
):
    base = settings.get("base", bases / "llama")
    settings = {name: value for name, value in settings.items() if name != "base"}
    with pytest.raises(UsageError, match=words):
        train(corpus, tmp_path / "run", adapting(base, **settings))
    assert not (tmp_path / "run").exists()


def test_merging_needs_adapters_and_weights_that_can_take_them_up(bases, corpus, tmp_path):
    merging = RunOptions(merge=True)
    with pytest.raises(UsageError, match="merge=True is about adapters"):
        train(corpus, tmp_path / "run", adapting(bases / "llama", lora=None), merging)
    few = tmp_path / "few"
    load_causal_lm(bases / "wide", quantize="4bit").save_pretrained(few)
    words_tokenizer().save_pretrained(few)
    with pytest.raises(UsageError, match="merging an adapter would round it"):
        train(corpus, tmp_path / "run", adapting(few), merging)
    with pytest.raises(UsageError, match=r"weights in few bits cannot be trained\. Add lora=16"):
        train(corpus, tmp_path / "run", adapting(few, lora=None))
    assert train(corpus, tmp_path / "run", adapting(few)).finished
