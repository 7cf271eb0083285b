"""Models as people leave them: a tiny base, and what PEFT, Trainer and TRL make of it."""

import shutil

import torch
from peft import IA3Config, LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from animals import WORDS

SPECIAL = ["<s>", "</s>", "<unk>"]
VOCABULARY = len(SPECIAL) + len(WORDS)
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
KINDS = {
    "lora": lambda: LoraConfig(**LORA, task_type="CAUSAL_LM"),
    "rslora": lambda: LoraConfig(**LORA, use_rslora=True, rank_pattern={"v_proj": 2}),
    "regex": lambda: LoraConfig(**LORA | {"target_modules": r".*\.(q|down)_proj"}),
    "dora": lambda: LoraConfig(**LORA, use_dora=True, task_type="CAUSAL_LM"),
    "lora-all": lambda: LoraConfig(r=2, target_modules="all-linear", init_lora_weights="gaussian"),
    "biased": lambda: LoraConfig(**LORA, bias="all"),
    "saved": lambda: LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "embedded": lambda: LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "pissa": lambda: LoraConfig(**LORA, init_lora_weights="pissa"),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def words_tokenizer(extra=()):
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.add_tokens(list(extra))
    return fast


def tiny_llama(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes | heads | changes)
    return lively(LlamaForCausalLM(config))


def tiny_gpt2(seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    return lively(GPT2LMHeadModel(config))


def lively(model):
    """Weights large enough that what an adapter does shows."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                weight.mul_(5.0)
    return model.eval()


def save_base(folder, make=tiny_llama, **how):
    make(**how).save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return folder


def shaken(model, seed=1):
    """As after training: every trainable weight moved, the zeros of lora_B too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def save_adapter(folder, base, config, *, name="default", resize=None):
    """An adapter on the model in `base`, saved by PEFT itself; returns PEFT's model."""
    kind = GPT2LMHeadModel if "gpt2" in (base / "config.json").read_text() else LlamaForCausalLM
    model = kind.from_pretrained(base)
    if resize is not None:
        torch.manual_seed(7)
        model.resize_token_embeddings(resize, mean_resizing=False)
    adapted = shaken(get_peft_model(model, config, adapter_name=name))
    adapted.save_pretrained(folder)
    return adapted


def copied(folder, to):
    shutil.copytree(folder, to)
    return to


def some_ids(seed=0, shape=(2, 12)):
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def logits_of(model, ids=None):
    with torch.no_grad():
        return model(input_ids=some_ids() if ids is None else ids).logits
