"""Which way private training takes for every causal language model that transformers knows.

    python benchmarks/families.py            # all of them, written into docs/families.md
    python benchmarks/families.py llama rwkv # some, printed

Models are built tiny from their configurations, with random weights.
"""

import logging
import re
import signal
import sys
import warnings
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tightlip.core.errors import TightlipError
from tightlip.privacy.per_unit import check_model, no_rule_for

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
SECONDS = 120
# Names that configurations give to the same few sizes.
SIZES = {
    "vocab_size": 31,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "model_dim"), 16),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "vocab_size_per_layer_input"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 1),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 24),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("ffn_hidden_size", "d_ff", "dim_ff", "n_inner", "dff"), 24),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "kv_lora_rank", "q_lora_rank"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "seq_length"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 4),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 1),
    "is_decoder": True,
}
