"""Models in few bits, and models that are spread over memory and disk."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import tightlip.models.checks as quantised
from models.test_adapters import OPTIONS
from models.tiny_finetunes import KINDS, logits_of, save_adapter, save_base, words_tokenizer
from tightlip.core.errors import UsageError
from tightlip.models.adapters import open_adapter
from tightlip.models.folders import state_fingerprint
from tightlip.models.loading import load_causal_lm
from tightlip.scan.models import open_beside, open_model
from tightlip.scan.options import ScanOptions

NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)
INT8 = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0)


def int8_by_torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


METHODS = {"4bit": lambda: NF4, "8bit": lambda: INT8, "torchao": int8_by_torchao}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    # bitsandbytes' blocks of 64 weights must not be longer than a row.
    return save_base(tmp_path_factory.mktemp("base"), hidden_size=64, intermediate_size=128)


def by_transformers(base, method):
    """Oracle: the same folder, quantised by transformers itself."""
    how = {"quantization_config": METHODS[method](), "device_map": {"": "cpu"}}
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **how)


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_folder_predicts_as_it_was_saved(method, base, tmp_path):
    model = by_transformers(base, method)
    model.save_pretrained(tmp_path)
    words_tokenizer().save_pretrained(tmp_path)
    opened = open_model(tmp_path, OPTIONS)
    assert torch.equal(logits_of(opened.model), logits_of(model))
    assert not torch.equal(logits_of(opened.model), logits_of(load_causal_lm(base)))
    assert opened.scanner is not None
    assert state_fingerprint(opened.model) != state_fingerprint(load_causal_lm(base))
    with pytest.raises(UsageError, match=r"quantised already .*quantize='4bit'"):
        open_model(tmp_path, ScanOptions(device="cpu", quantize="4bit"))


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_quantize_reads_a_plain_folder_as_it_will_be_served(bits, base):
    opened = open_model(base, ScanOptions(device="cpu", quantize=bits))
    assert torch.equal(logits_of(opened.model), logits_of(by_transformers(base, bits)))
    assert opened.files != open_model(base, OPTIONS).files
    assert any(bits[0] in note for note in opened.notes)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_an_adapter_stands_on_a_quantised_base(bits, base, tmp_path):
    save_adapter(tmp_path, base, KINDS["lora"]())
    opened = open_model(tmp_path, ScanOptions(device="cpu", quantize=bits))
    pefts = PeftModel.from_pretrained(by_transformers(base, bits), tmp_path)
    assert torch.equal(logits_of(opened.model), logits_of(pefts.eval()))
    public = open_beside(opened, "base", ScanOptions(device="cpu", quantize=bits))
    with public.scanning(public.model):
        assert torch.equal(logits_of(public.model), logits_of(by_transformers(base, bits)))
    assert public.files == open_model(base, ScanOptions(device="cpu", quantize=bits)).files


@pytest.mark.parametrize("method", ["mxfp4", "eetq", "evil", None])
def test_methods_that_fetch_code_are_refused(method, base, tmp_path):
    folder = save_base(tmp_path / "model")
    path = folder / "config.json"
    written = json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}
    path.write_text(json.dumps(written))
    with pytest.raises(UsageError, match="fetch from the hub"):
        open_model(folder, OPTIONS)


@pytest.mark.parametrize(
    ("method", "words"),
    [("gptq", "gptqmodel"), ("awq", "gptqmodel"), ("torchao", r"tightlip\[quantised\]")],
)
def test_what_is_not_installed_is_named(method, words, tmp_path, monkeypatch):
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    written = {"quantization_config": {"quant_method": method}}
    with pytest.raises(UsageError, match=f"not installed. Run: pip install '?{words}"):
        quantised.method_of(tmp_path, written)


def test_no_kernel_is_fetched_while_a_model_is_read(monkeypatch):
    for before in ({}, {"kernels": os}):
        monkeypatch.delitem(sys.modules, "kernels", raising=False)
        for name, module in before.items():
            monkeypatch.setitem(sys.modules, name, module)
        with quantised.without_fetched_kernels(), pytest.raises(ImportError):
            import kernels  # noqa: F401
        assert sys.modules.get("kernels") is before.get("kernels")
        assert ("kernels" in sys.modules) == bool(before)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_larger_than_memory_is_read_from_disk_layer_by_layer(
    adapted, base, tmp_path, monkeypatch
):
    """`max_memory` lets two thirds of the tiny model no room but on disk."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    whole = load_causal_lm(base)
    save_adapter(tmp_path / "adapter", base, KINDS["lora"]())
    how = {"adapted": open_adapter(tmp_path / "adapter").applied} if adapted else {}
    model = load_causal_lm(base, device_map="auto", max_memory={"cpu": "100KB"}, **how)
    assert {"disk"} <= set(map(str, model.hf_device_map.values()))
    (offloaded,) = (tmp_path / "temporary").iterdir()
    assert offloaded.stat().st_mode & 0o077 == 0
    if adapted:
        whole = PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    assert torch.equal(logits_of(model), logits_of(whole))
    del model
    import gc

    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


def test_a_mapped_model_is_scanned(base):
    import numpy as np

    mapped, plain = (
        open_model(base, ScanOptions(device="cpu", device_map=where, begin="always"))
        for where in ("auto", None)
    )
    tokens, bounds = np.arange(3, 15), np.array([0, 12])
    for one, two in zip(
        mapped.scanner.scan(tokens, bounds), plain.scanner.scan(tokens, bounds), strict=True
    ):
        assert np.array_equal(one, two)


def test_a_gguf_file_is_not_as_served_and_says_so(tmp_path):
    from models.tiny_gguf import write_gguf

    write_gguf(tmp_path / "tiny.gguf")
    assert any("fewer bits" in note for note in open_model(tmp_path / "tiny.gguf", OPTIONS).notes)
    with pytest.raises(UsageError, match=r"GGUF file, which quantize='4bit' does not go with"):
        load_causal_lm(Path(tmp_path / "tiny.gguf"), quantize="4bit")


def save_compressed(base, folder):
    """int8 by compressed-tensors itself, a scale for each row."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    rows = QuantizationArgs(num_bits=8, strategy="channel", symmetric=True)
    config = QuantizationConfig(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=rows)},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.COMPRESSED,
        format="int-quantized",
    )
    model = AutoModelForCausalLM.from_pretrained(base)
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.data.abs().amax(1, keepdim=True) / 127
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    words_tokenizer().save_pretrained(folder)


def test_a_folder_by_compressed_tensors_is_read_as_transformers_reads_it(base, tmp_path):
    pytest.importorskip("compressed_tensors", exc_type=ImportError)
    save_compressed(base, tmp_path)
    opened = open_model(tmp_path, OPTIONS)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, device_map={"": "cpu"}
    )
    assert torch.equal(logits_of(opened.model), logits_of(theirs))
    off = (logits_of(opened.model) - logits_of(load_causal_lm(base))).abs().max()
    assert 0 < off < 0.1
    assert opened.scanner is not None
