"""Adapters are applied as PEFT applies them, switched off where that is the base, or refused."""

import json
import os
import socket
from dataclasses import replace

import cloudpickle
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.tiny_finetunes import (
    KINDS,
    LORA,
    VOCABULARY,
    copied,
    logits_of,
    save_adapter,
    save_base,
    some_ids,
    tiny_gpt2,
    words_tokenizer,
)
from tightlip.core.errors import UsageError
from tightlip.models.adapters import adapters_off, open_adapter
from tightlip.models.loading import load_causal_lm
from tightlip.scan.models import open_beside, open_model
from tightlip.scan.options import ScanOptions

OPTIONS = ScanOptions(device="cpu")
HARD = r"(?:(?:[a-z_.0-9]|[a-z_.0-9]{2})+)+[^a-z_.0-9]"  # to match, it tries for years
SHARING = {"lora", "rslora", "regex", "dora", "lora-all", "saved", "ia3"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """A folder for each kind of adapter."""
    root = tmp_path_factory.mktemp("adapters")
    for kind, config in KINDS.items():
        changes = {"attention_bias": True} if kind == "biased" else {}
        own = save_base(root / "base-with-biases", **changes) if changes else base
        save_adapter(root / kind, own, config())
    return root


@pytest.fixture(scope="module")
def plain(adapters):
    return adapters / "lora"


def pefts_own(folder):
    """Oracle: what PEFT's from_pretrained makes of the folder."""
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(named), folder).eval()


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def edit_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_predicts_exactly_as_under_peft(kind, adapters):
    opened = open_model(adapters / kind, OPTIONS)
    assert torch.equal(logits_of(opened.model), logits_of(pefts_own(adapters / kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_of_an_adapter_is_the_base(kind, adapters, base):
    folder = adapters / "base-with-biases" if kind == "biased" else base
    opened = open_model(adapters / kind, OPTIONS)
    adapted = logits_of(opened.model)
    public = open_beside(opened, "base", OPTIONS)
    with public.scanning(public.model):
        off = logits_of(public.model)
    assert torch.equal(off, logits_of(load_causal_lm(folder)))
    assert not torch.equal(off, adapted)
    assert torch.equal(logits_of(opened.model), adapted)
    assert (public.model is opened.model) == (kind in SHARING)


def test_switched_off_a_trained_bias_would_not_be_the_base(adapters):
    """Why the base is read a second time there."""
    model = open_model(adapters / "biased", OPTIONS).model
    with adapters_off(model):
        off = logits_of(model)
    assert not torch.allclose(off, logits_of(load_causal_lm(adapters / "base-with-biases")))


def test_adapters_on_gpt2_work_too(tmp_path):
    base = save_base(tmp_path / "gpt2", tiny_gpt2)
    config = LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True)
    save_adapter(tmp_path / "adapter", base, config)
    opened = open_model(tmp_path / "adapter", OPTIONS)
    assert torch.equal(logits_of(opened.model), logits_of(pefts_own(tmp_path / "adapter")))


@pytest.mark.parametrize("how", ["saved", "stored"])
def test_added_tokens_come_with_the_adapter_and_the_base_is_read_apart(how, base, tmp_path):
    modules = ["embed_tokens", "lm_head"] if how == "saved" else None
    config = LoraConfig(**LORA, modules_to_save=modules)
    adapted = save_adapter(tmp_path, base, config, resize=VOCABULARY + 2)
    words_tokenizer(["yak", "zebra"]).save_pretrained(tmp_path)
    opened = open_model(tmp_path, OPTIONS)
    assert len(opened.tokenizer) == VOCABULARY + 2
    ids = torch.tensor([[0, 5, VOCABULARY, 6, VOCABULARY + 1, 4]])
    assert torch.equal(logits_of(opened.model, ids), logits_of(adapted, ids))
    assert opened.base.model is not opened.model
    assert torch.equal(logits_of(opened.base.model), logits_of(load_causal_lm(base)))


def test_the_tokenizer_is_the_adapters_or_the_one_beside_it_or_the_bases(plain, base, tmp_path):
    assert len(open_model(plain, OPTIONS).tokenizer) == VOCABULARY
    folder = copied(plain, tmp_path / "out" / "checkpoint-3")
    words_tokenizer(["yak"]).save_pretrained(folder.parent)
    assert len(open_model(folder, OPTIONS).tokenizer) == VOCABULARY + 1
    words_tokenizer(["yak", "zebra"]).save_pretrained(folder)
    assert len(open_model(folder, OPTIONS).tokenizer) == VOCABULARY + 2


def test_an_adapter_in_a_sub_folder_is_chosen_by_name(base, tmp_path):
    for name in ("first", "second"):
        save_adapter(tmp_path, base, LoraConfig(**LORA), name=name)
    edit_tensors(tmp_path / "second", lambda all: {key: 2 * one for key, one in all.items()})
    with pytest.raises(UsageError, match="adapter='first'"):
        open_model(tmp_path, OPTIONS)
    with pytest.raises(UsageError, match=r"no adapter 'third'. It has: first, second"):
        open_model(tmp_path, ScanOptions(device="cpu", adapter="third"))
    with pytest.raises(UsageError, match="no adapter"):
        open_model(tmp_path / "first", ScanOptions(device="cpu", adapter="../second"))
    one, two = (
        open_model(tmp_path, ScanOptions(device="cpu", adapter=name))
        for name in ("first", "second")
    )
    assert one.files != two.files
    assert torch.equal(logits_of(two.model), logits_of(pefts_own(tmp_path / "second")))
    assert not torch.equal(logits_of(one.model), logits_of(two.model))


def test_the_fingerprint_covers_base_adapter_and_bits(plain, base, tmp_path):
    own = open_model(plain, OPTIONS)
    assert own.files == open_model(copied(plain, tmp_path / "copy"), OPTIONS).files
    other_base = save_base(tmp_path / "other", seed=5)
    others = [
        open_model(plain, ScanOptions(device="cpu", base=str(other_base))),
        open_model(plain, ScanOptions(device="cpu", quantize="4bit")),
        open_model(edit(copied(plain, tmp_path / "louder"), lora_alpha=32), OPTIONS),
        own.base,
    ]
    assert len({own.files, *(one.files for one in others)}) == 5
    assert len({own.fingerprint, others[0].fingerprint, own.base.fingerprint}) == 3
    assert own.base.files == open_model(base, OPTIONS).files


def test_the_base_given_goes_before_the_one_named(plain, tmp_path):
    other = save_base(tmp_path / "other", seed=5)
    opened = open_model(plain, ScanOptions(device="cpu", base=str(other)))
    public = opened.base
    with public.scanning(public.model):
        assert torch.equal(logits_of(public.model), logits_of(load_causal_lm(other)))


@pytest.mark.parametrize("named", ["gpt2", "meta-llama/Llama-3-8B", "", None, 7, "/nowhere/base"])
def test_a_base_that_is_not_here_is_refused_and_never_fetched(named, plain, tmp_path, monkeypatch):
    def refuse(*args, **how):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    folder = edit(copied(plain, tmp_path / "adapter"), base_model_name_or_path=named)
    with pytest.raises(
        UsageError, match=r"not a folder here.*never? .*fetched|ever fetched.*base=DIR"
    ):
        open_model(folder, OPTIONS)


def test_a_base_named_by_a_path_upwards_is_refused(plain, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = edit(copied(plain, tmp_path / "adapter"), base_model_name_or_path=f"../{base.name}")
    with pytest.raises(UsageError, match=r"leads upwards.*base=DIR"):
        open_model(folder, OPTIONS)


def test_a_base_that_is_an_adapter_is_refused(plain, tmp_path):
    with pytest.raises(UsageError, match="is an adapter itself"):
        open_model(plain, ScanOptions(device="cpu", base=str(plain)))


def test_pickled_weights_are_refused(plain, tmp_path):
    folder = copied(plain, tmp_path / "adapter")
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    open_model(folder, OPTIONS)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UsageError, match="a pickle, and unpickling can execute any code"):
        open_model(folder, OPTIONS)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(UsageError, match=r"no adapter_model\.safetensors"):
        open_model(folder, OPTIONS)


def test_truncated_weights_are_refused(plain, tmp_path):
    path = copied(plain, tmp_path / "adapter") / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UsageError, match="not a whole safetensors file"):
        open_model(path.parent, OPTIONS)


@pytest.mark.parametrize(
    "change", [{"r": 10**9}, {"rank_pattern": {"q_proj": 10**9}}, {"r": 10**30}]
)
def test_a_huge_rank_is_refused_before_it_takes_memory(change, plain, tmp_path):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError, match=r"another shape|cannot be loaded"):
        open_model(edit(copied(plain, tmp_path / "adapter"), **change), OPTIONS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 200_000


@pytest.mark.parametrize("wanted", ["lora_A", "lora_B", "layers.1.self_attn.q_proj"])
def test_missing_tensors_are_named_not_made_up(wanted, plain, tmp_path):
    folder = copied(plain, tmp_path / "adapter")
    edit_tensors(folder, lambda all: {key: one for key, one in all.items() if wanted not in key})
    with pytest.raises(UsageError, match=f"lacks weights.*{wanted}"):
        open_model(folder, OPTIONS)


def test_tensors_without_a_place_are_refused(plain, tmp_path):
    folder = edit(copied(plain, tmp_path / "adapter"), target_modules=["q_proj"])
    with pytest.raises(UsageError, match=r"no place in the base: .*v_proj"):
        open_model(folder, OPTIONS)


def test_the_base_of_another_model_is_refused(plain, tmp_path):
    other = save_base(tmp_path / "other", head_dim=8)
    with pytest.raises(UsageError, match=r"another shape .* with base, "):
        open_model(plain, ScanOptions(device="cpu", base=str(other)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "of type 'PROMPT_TUNING'"),
        ({"peft_type": None}, "of type None"),
        ({"peft_type": ["LORA"]}, "of type"),
        ({"auto_mapping": {"parent_library": "evil.code"}}, "never executes"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"init_lora_weights": "pissa_niter_4"}, "cannot be repeated exactly"),
        ({"corda_config": {"cache_file": "x.pt"}}, "sets corda_config"),
        ({"runtime_config": {"ephemeral_gpu_offload": True}}, "sets runtime_config"),
        ({"megatron_config": {"a": 1}}, "sets megatron_config"),
        ({"layer_replication": [[0, 10**9]]}, "sets layer_replication"),
        ({"target_parameters": ["q_proj.weight"]}, "sets target_parameters"),
        ({"something_new": 1}, "sets something_new"),
        ({"target_modules": HARD}, "cannot be matched"),
        ({"rank_pattern": {HARD: 4}}, "cannot be matched"),
        ({"layers_pattern": "(a+)+$", "layers_to_transform": [0]}, "not a plain name"),
        ({"target_modules": ["nothing"]}, "cannot be loaded"),
        ({"r": "four"}, "cannot be loaded"),
        ({"modules_to_save": ["norm"]}, "lacks weights"),
    ],
)
def test_settings_that_are_not_known_are_refused(changes, words, plain, tmp_path):
    folder = edit(copied(plain, tmp_path / "adapter"), **changes)
    with pytest.raises(UsageError, match=words):
        open_model(folder, OPTIONS)


@pytest.mark.parametrize("text", ["[]", "{", "7"])
def test_a_configuration_that_is_not_one_is_refused(text, plain, tmp_path):
    folder = copied(plain, tmp_path / "adapter")
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(UsageError):
        open_model(folder, OPTIONS)


def test_a_model_in_memory_comes_with_its_tokenizer_as_a_pair(base):
    model = load_causal_lm(base)
    opened = open_model((model, words_tokenizer()), OPTIONS)
    assert opened.model is model
    with pytest.raises(UsageError, match=r"\(model, tokenizer\)"):
        open_model(model, OPTIONS)
    with pytest.raises(UsageError, match="is not an adapter, so it has no base"):
        open_beside(opened, "base", OPTIONS)


@pytest.mark.parametrize("kind", ["lora", "biased"])
def test_a_peft_model_in_memory_has_a_base_and_stays_as_it_was(kind, adapters, base, tmp_path):
    model = save_adapter(tmp_path / "again", adapters / "base-with-biases", KINDS[kind]())
    folder = adapters / "base-with-biases"
    trainable = [weight.requires_grad for weight in model.parameters()]
    opened = open_model((model, words_tokenizer()), OPTIONS)
    assert torch.equal(logits_of(opened.model), logits_of(model))
    public = open_beside(opened, "base", OPTIONS)
    assert public.files != opened.files
    with public.scanning(public.model):
        assert torch.equal(logits_of(public.model), logits_of(load_causal_lm(folder)))
    assert [weight.requires_grad for weight in model.parameters()] == trainable
    assert (public.model is opened.model) == (kind == "lora")


def test_a_base_in_memory_that_was_changed_and_is_nowhere_is_refused(adapters, tmp_path):
    model = save_adapter(tmp_path / "again", adapters / "base-with-biases", KINDS["biased"]())
    model.peft_config["default"].base_model_name_or_path = "somewhere/else"
    opened = open_model((model, words_tokenizer()), OPTIONS)
    with pytest.raises(UsageError, match="Give base="):
        open_beside(opened, "base", OPTIONS)


def test_what_needs_a_whole_model_says_what_to_do_with_an_adapter(plain):
    with pytest.raises(UsageError, match="Merge it first"):
        load_causal_lm(plain)


def test_the_scan_of_an_adapter_scores_as_pefts_forward_pass(plain):
    import numpy as np

    ids = some_ids(3, (1, 30))
    scanner = open_model(plain, replace(OPTIONS, begin="always")).scanner_of(None)
    tokens, bounds = ids[0].numpy(), np.array([0, 30])
    ranks, log_probs = scanner.scan(tokens, bounds)
    told = torch.cat([torch.tensor([[0]]), ids[:, :-1]], dim=1)  # <s> first
    expected = logits_of(pefts_own(plain), told)[0]
    nats = expected.log_softmax(-1).gather(1, ids[0][:, None])[:, 0]
    above = (expected > expected.gather(1, ids[0][:, None])).sum(1)
    assert np.array_equal(ranks, above.numpy())
    assert np.allclose(log_probs, nats.numpy(), atol=1e-5)


def test_opening_reads_no_numbers_of_the_base(plain, monkeypatch):
    monkeypatch.setattr("tightlip.scan.models.load_causal_lm", None)
    assert open_adapter(plain).shares_base


def test_a_pipe_beside_an_adapter_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(UsageError, match="a pipe or a device"):
        open_adapter(tmp_path)


def test_an_opened_model_goes_to_another_process_without_what_is_loaded(plain):
    opened = open_model(plain, OPTIONS)
    unloaded = {one.name: len(cloudpickle.dumps(one)) for one in (opened, opened.base)}
    tokens, bounds = some_ids().flatten().numpy(), np.array([0, 12, 24])
    for model in (opened, opened.base):
        with model.scanning(model.model):
            here = model.scanner.scan(tokens, bounds)
        sent = cloudpickle.dumps(model)
        assert len(sent) == unloaded[model.name], "its weights went with it"
        there = cloudpickle.loads(sent)
        assert there.files == model.files
        assert there.read_files is None or there.read_files() == there.files
        with there.scanning(there.model):
            np.testing.assert_array_equal(here, there.scanner.scan(tokens, bounds))
