"""Foreign models load; what cannot be trusted or is not whole is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from models.small_models import random_ids, small_model
from tightlip.core.errors import UsageError
from tightlip.models import load_causal_lm, load_tokenizer, state_fingerprint

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
GROUPED = SIZES | {"num_key_value_heads": 1}
FOREIGN = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=8)),
}


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def saved(tmp_path):
    """A folder with a small LSTM."""
    small_model("lstm").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_models_load_as_they_were_saved(kind, tmp_path):
    torch.manual_seed(0)
    model = FOREIGN[kind]().eval()
    model.save_pretrained(tmp_path)
    again = load_causal_lm(tmp_path)
    assert not again.training
    assert not getattr(again.config, "is_recurrent", False)
    assert state_fingerprint(again) == state_fingerprint(model)
    ids = random_ids(2, 6)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_sharded_checkpoint_loads(tmp_path):
    model = FOREIGN["llama"]()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert state_fingerprint(load_causal_lm(tmp_path)) == state_fingerprint(model)
    next(iter(tmp_path.glob("model-00002*"))).unlink()
    with pytest.raises(UsageError, match="which is missing"):
        load_causal_lm(tmp_path)


def test_the_type_of_the_weights_is_kept_unless_another_is_asked_for(tmp_path):
    small_model("lstm").to(torch.float16).save_pretrained(tmp_path)
    assert load_causal_lm(tmp_path).dtype == torch.float16
    assert load_causal_lm(tmp_path, dtype=torch.float32).dtype == torch.float32


EVIL = "import pathlib\npathlib.Path({mark!r}).write_text('executed')\n"


@pytest.mark.parametrize("model_type", ["evil", "gpt2"])
def test_code_in_the_folder_is_never_executed(model_type, tmp_path):
    folder, mark = tmp_path / "model", tmp_path / "executed"
    FOREIGN["gpt2"]().save_pretrained(folder)
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)) + "class Evil: ...\n")
    auto_map = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    edit_config(folder, model_type=model_type, auto_map=auto_map)
    if model_type == "evil":
        with pytest.raises(UsageError, match="never executes code"):
            load_causal_lm(folder)
    else:
        assert type(load_causal_lm(folder)) is GPT2LMHeadModel
    assert not mark.exists()


def test_tokenizer_code_in_the_folder_is_never_executed(tmp_path):
    mark = tmp_path / "executed"
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(mark)) + "class Evil: ...\n")
    written = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    with pytest.raises(UsageError):
        load_tokenizer(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("beside", [False, True])
def test_pickles_are_refused_even_when_harmless(saved, beside):
    model = small_model("lstm")
    torch.save(model.state_dict(), saved / "pytorch_model.bin")
    if beside:
        assert state_fingerprint(load_causal_lm(saved)) == state_fingerprint(model)
    else:
        (saved / "model.safetensors").unlink()
        with pytest.raises(UsageError, match="unpickling can execute any code"):
            load_causal_lm(saved)


def test_an_index_that_names_a_pickle_or_a_file_elsewhere_is_refused(saved):
    (saved / "model.safetensors").rename(saved.parent / "outside.safetensors")
    for name in ("pytorch_model.bin", "../outside.safetensors"):
        (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(UsageError, match=r"where a \.safetensors file of this folder belongs"):
            load_causal_lm(saved)


@pytest.mark.parametrize(
    "changes",
    [
        {"transformers_weights": "adapter_model.bin"},
        {"configuration_files": ["config.4.0.0.json"]},
        {"attn_implementation": "someone/kernel"},
        {"text_config": {"_attn_implementation": "someone/kernel"}},
    ],
)
def test_configurations_that_ask_for_code_are_refused(saved, changes):
    edit_config(saved, **changes)
    with pytest.raises(UsageError, match=r"config\.json"):
        load_causal_lm(saved)


def test_an_adapter_folder_is_refused_with_or_without_a_config(saved, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "gpt2"}))
    (saved / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "gpt2"}))
    for folder in (tmp_path, saved):
        with pytest.raises(UsageError, match="Merge it first"):
            load_causal_lm(folder)


def test_a_folder_that_is_not_there_or_not_a_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        load_causal_lm(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_causal_lm(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match="JSON"):
            load_causal_lm(tmp_path)
    for text in ("{}", '{"model_type": "nobody-knows"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match="cannot be loaded"):
            load_causal_lm(tmp_path)


def test_a_folder_without_weights_is_refused(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no model\.safetensors"):
        load_causal_lm(saved)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights_are_refused(saved, share):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UsageError, match="not a whole safetensors file"):
        load_causal_lm(saved)


@pytest.mark.parametrize("dropped", ["lm_head.weight", "model.rnn.weight_hh_l0"])
def test_missing_weights_are_named_not_made_up(saved, dropped):
    weights = load_file(saved / "model.safetensors")
    del weights[dropped]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=f"lacks weights .*{dropped}"):
        load_causal_lm(saved)


def test_weights_of_another_shape_are_named_not_made_up(saved):
    edit_config(saved, vocab_size=24)
    with pytest.raises(UsageError, match=r"another shape .*lm_head"):
        load_causal_lm(saved)


def test_a_configuration_that_cannot_be_is_refused(saved):
    edit_config(saved, hidden_size=-1)
    with pytest.raises(UsageError, match="hidden_size=-1"):
        load_causal_lm(saved)


def test_encoders_are_refused(tmp_path):
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(tmp_path / "bert")
    T5ForConditionalGeneration(
        T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "t5")
    for name in ("bert", "t5"):
        with pytest.raises(UsageError, match="decoder-only"):
            load_causal_lm(tmp_path / name)


@pytest.fixture
def words():
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def test_a_tokenizer_comes_back_from_beside_the_model(saved, words):
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(saved)
    tokenizer = load_tokenizer(saved)
    assert tokenizer.is_fast
    assert tokenizer("b a c", add_special_tokens=False).input_ids == [2, 1, 0]
    assert tokenizer.unk_token == "<unk>"


def test_a_tokenizer_json_alone_is_enough(tmp_path, words):
    words.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path)("b a c", add_special_tokens=False).input_ids == [2, 1, 0]


def test_a_missing_or_broken_tokenizer_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version"')
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
