"""A small Llama with a byte-level tokenizer as a GGUF file, written as llama.cpp's converter does."""

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

BYTES = sorted(ByteLevel.alphabet())
MERGED = ["th", "the", "an", "and"]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *MERGED]
MERGES = ["t h", "th e", "a n", "an d"]
HEADS, GROUPS, SIZE, LAYERS = 4, 2, 16, 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def small_llama(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=SIZE, intermediate_size=24, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, max_position_embeddings=64,
        rms_norm_eps=1e-5, rope_theta=10_000.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tensors_of(model):
    """Weights under GGUF's names. Queries and keys have the two halves of a head interleaved there."""
    config = model.config
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    yield "output.weight", state["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for name, short in NAMES.items():
            value = state[f"model.layers.{layer}.{name}.weight"]
            heads = {
                "attn_q": config.num_attention_heads,
                "attn_k": config.num_key_value_heads,
            }.get(short)
            if heads is not None:
                split = value.reshape(heads, 2, -1, config.hidden_size)
                value = np.ascontiguousarray(split.swapaxes(1, 2).reshape(value.shape))
            yield f"blk.{layer}.{short}.weight", value


def write_gguf(path, *, seed=0, without=(), begins_with_bos=None, model=None, vocabulary=None):
    """The file, and the model it was made of: a small one, or the one that is given.

    `vocabulary` is its tokens, how many of them are special, which come first, its merges, and
    the numbers of its begin and end tokens.
    """
    tokens, num_special, merges, (bos, eos) = vocabulary or (TOKENS, 3, MERGES, (1, 2))
    model = model or small_llama(seed)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * num_special + [gguf.TokenType.NORMAL] * (len(tokens) - num_special))  # fmt: skip
    writer.add_token_merges(merges)
    if vocabulary is None:
        writer.add_unk_token_id(0)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    if begins_with_bos is not None:
        writer.add_add_bos_token(begins_with_bos)
    for name, value in tensors_of(model):
        if name not in without:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
