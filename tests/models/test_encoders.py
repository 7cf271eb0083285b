"""Loading encoders: nothing run, nothing made up, and a pooling head that nobody needs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2Model, T5Config, T5Model

from tightlip.core.errors import UsageError
from tightlip.models.encoders import load_encoder, most_tokens
from vectors.toy_corpora import tiny_encoder


@pytest.mark.parametrize(("kind", "positions"), [("bert", 20), ("roberta", 20)])
def test_how_many_tokens_fit_is_told_and_true(kind, positions, tmp_path):
    """RoBERTa's 22 positions hold 20 tokens: one more is an index error in its table."""
    model = load_encoder(tiny_encoder(tmp_path, kind))
    assert most_tokens(model) == positions
    ids = torch.full((1, positions), 7)
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    ids = torch.full((1, positions + 1), 7)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))


def test_a_checkpoint_without_its_pooling_head_is_whole_all_the_same(tmp_path):
    model = load_encoder(tiny_encoder(tmp_path, "bert", with_pooler=False))
    assert model.pooler is None


def test_the_encoder_of_a_masked_language_model_is_read(tmp_path):
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=30, intermediate_size=8, max_position_embeddings=8, **shape)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    assert load_encoder(tmp_path).config.hidden_size == 8


def test_a_weight_that_is_missing_is_refused(tmp_path):
    folder = tiny_encoder(tmp_path, "bert")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("encoder.layer.1.output.dense.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks weights.*layer\.1"):
        load_encoder(folder)


def test_a_model_that_needs_its_own_code_is_refused(tmp_path):
    folder = tiny_encoder(tmp_path, "bert")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('executed')")
    with pytest.raises(UsageError, match="never executes code"):
        load_encoder(folder)


def test_a_pickle_is_refused(tmp_path):
    folder = tiny_encoder(tmp_path, "bert")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match="pickle"):
        load_encoder(folder)


def test_half_a_translator_is_refused_and_a_decoder_is_not(tmp_path):
    T5Model(
        T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "t5")
    with pytest.raises(UsageError, match="half of which writes"):
        load_encoder(tmp_path / "t5")
    GPT2Model(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "gpt"
    )
    assert load_encoder(tmp_path / "gpt").config.hidden_size == 8
