"""What stands before a text: found by encoding, and the same as transformers' own loss."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoTokenizer,
    GemmaTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaTokenizer,
    Qwen2Tokenizer,
)

import tightlip
from tightlip.core.devices import begin_ids
from tightlip.core.errors import UsageError
from tightlip.scan.models import open_model
from tightlip.scan.options import ScanOptions

TEXTS = ["my pin is 4711", "the door opens at noon", "x"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789Ġ▁"
# Of each family the class, the special tokens of its vocabulary, and whether a text begins with one.
FAMILIES = {
    "gpt2": (GPT2Tokenizer, ["<|endoftext|>"], {}, False),
    "qwen": (Qwen2Tokenizer, ["<|endoftext|>"], {}, False),
    "llama": (LlamaTokenizer, ["<unk>", "<s>", "</s>"], {"add_bos_token": True}, True),
    "gemma": (
        GemmaTokenizer,
        ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"],
        {"add_bos_token": True},
        True,
    ),
}


def saved(name, folder):
    """A tokenizer of the family and a small model, as they are loaded from a folder."""
    kind, special, options, _ = FAMILIES[name]
    vocabulary = {token: number for number, token in enumerate([*special, *_LETTERS])}
    tokenizer = kind(vocab=vocabulary, merges=[], **options)
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder), model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_perplexity_is_that_of_the_models_own_loss(name, tmp_path):
    """`model(input_ids, labels=input_ids)` on what the tokenizer makes of each text."""
    tokenizer, model = saved(name, tmp_path / "model")
    assert len(begin_ids(tokenizer)) == FAMILIES[name][3]
    nats, num_tokens = 0.0, 0
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        if ids.shape[1] > 1:
            nats += float(model(ids, labels=ids).loss.detach()) * (ids.shape[1] - 1)
            num_tokens += ids.shape[1] - 1
    rows = [{"user": str(number), "text": text} for number, text in enumerate(TEXTS)]
    report = tightlip.audit(tmp_path / "model", rows)
    assert report.perplexity == pytest.approx(np.exp(nats / num_tokens), rel=1e-5)


def test_asked_for_it_stands_there_and_asked_away_it_does_not(tmp_path):
    tokenizer, _ = saved("llama", tmp_path / "llama")
    opened = {
        how: open_model(tmp_path / "llama", ScanOptions(begin=how)).begin_id
        for how in ("auto", "always", "never")
    }
    bos = tokenizer.convert_tokens_to_ids("<s>")
    assert opened == {"auto": bos, "always": bos, "never": None}
    saved("gpt2", tmp_path / "gpt2")
    gpt2 = open_model(tmp_path / "gpt2", ScanOptions(begin="always"))
    assert gpt2.begin_id == gpt2.tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_a_tokenizer_without_one_cannot_always_begin_with_it(tmp_path):
    saved("qwen", tmp_path / "qwen")
    with pytest.raises(UsageError, match="no begin token"):
        _ = open_model(tmp_path / "qwen", ScanOptions(begin="always")).begin_id


def test_our_own_models_always_begin_with_it(tmp_path):
    rows = [{"user": f"u{n % 4}", "text": f"word {n} is number {n}"} for n in range(40)]
    run = tightlip.train(rows, tmp_path / "run", hidden_size=8, epochs=1)
    opened = open_model(run.model_folder, ScanOptions())
    begin = opened.tokenizer.bos_token_id
    assert begin_ids(opened.tokenizer) == [begin]
    opened.tokenizer.backend_tokenizer.post_processor = None  # as 0.1 left it
    assert opened.begin_id == begin is not None


def test_a_model_that_a_run_went_on_training_begins_as_the_run_had_it(tmp_path):
    tokenizer, _ = saved("gpt2", tmp_path / "gpt2")
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    rows = [{"user": f"u{n % 4}", "text": f"word {n} is number {n}"} for n in range(40)]
    run = tightlip.train(
        rows, tmp_path / "run", model=str(tmp_path / "gpt2"), epochs=1, sequence_length=16
    )
    assert open_model(tmp_path / "gpt2", ScanOptions()).begin_id is None
    assert open_model(run.model_folder, ScanOptions()).begin_id == tokenizer.bos_token_id
    # So the start is no reference as it is, which is said before anything is scanned.
    given = {"reference": tmp_path / "gpt2", "device": "cpu"}
    for measure in (tightlip.extract, tightlip.measure_membership):
        with pytest.raises(UsageError, match=r"do not begin .* Add begin='always'"):
            measure(run.folder, **given)
    assert not (run.folder / "scan").exists()
    assert tightlip.extract(run.folder, **given, begin="always", lengths=(3,)).summary["reference"]
