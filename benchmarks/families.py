"""Which way private training takes for every causal language model that transformers knows.

    python benchmarks/families.py            # all of them, written into docs/families.md
    python benchmarks/families.py llama rwkv # some, printed

Models are built tiny from their configurations, with random weights.
"""

import logging
import signal
import sys
import warnings
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy.clipping import Clip
from tightlip.privacy.passes import Passes
from tightlip.privacy.per_unit import can_be_mapped, check_model, no_rule_for
from tightlip.privacy.physical_batches import Shape
from tightlip.privacy.rows_alone import rows_meet

IDS = torch.tensor([[5, 9, 14, 3, 27, 9, 30], [2, 2, 8, 21, 11, 4, 17]])
PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
SECONDS = 60  # for one model; what takes longer cannot be built tiny
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
# What some need besides, or otherwise.
OTHERWISE = {
    "bamba": {
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "attn_layer_indices": [1],
    },
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "diffllama": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "layer_types": ["mamba", "attention"],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "recurrent_gemma": {"lru_width": 16, "block_types": ["recurrent", "attention"]},
    "xlnet": {"d_head": 8},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
}


def tiny(family):
    """The family's smallest model, its weights large enough for every part to matter."""
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    known = kind.config_class().to_dict()
    if {"vision_config", "audio_config", "text_config"} & {*known}:
        raise ValueError("it reads more than text")
    sizes = {name: size for name, size in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention works its heads out from its parts
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = 2
    config = kind.config_class(**{**sizes, **OTHERWISE.get(family, {})})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model(IDS, use_cache=False)
    return model


def way_of(model):
    """How private training runs it: its way, and why it is not the fastest."""
    try:
        check_model(model, IDS)
        reason = no_rule_for(model, IDS)
    except (GuaranteeError, UsageError) as error:
        return "refused", str(error).split(". ")[0]
    if reason is None:
        meets = rows_meet(Passes(model, Clip(norm=1.0)), Shape(IDS.shape[1], 1, 8))
        return ("rules", "") if meets is None else ("rules, a pass for each unit", meets)
    way = "vmap" if can_be_mapped(model, IDS) else "one row at a time"
    return way, reason.split(". ")[0]


def adapted(family):
    """The model under LoRA: all that is linear, or as much of it as peft can do."""
    for modules in ("all-linear", ["q_proj", "v_proj"], ["in_proj"]):
        try:
            model = get_peft_model(tiny(family), LoraConfig(r=2, target_modules=modules)).eval()
            model(input_ids=IDS, use_cache=False)
        except Exception as error:
            reason = error
        else:
            return model
    raise reason


def row_of(family):
    """The family's line of the table, or why there is none."""
    try:
        model = tiny(family)
    except Exception as error:  # configurations need not fit together, nor what they import be here
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    full, why = way_of(model)
    lora, lora_why = way_of(adapted(family))
    whys = "; ".join(dict.fromkeys(each for each in (why, lora_why) if each))
    return f"| {family} | {full} | {lora} | {whys.replace('|', '/')} |", ""


def main():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGALRM, _too_long)
    lines, missing = [], []
    for family in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        signal.alarm(SECONDS)
        try:
            line, why = row_of(family)
        except Exception as error:
            line, why = None, str(error).splitlines()[0]
        finally:
            signal.alarm(0)
        print(line or f"{family}: {why}", flush=True)
        lines += [line] if line else []
        missing += [] if line else [family]
    if not sys.argv[1:]:
        write(lines, missing)


def write(lines, missing):
    table = ["| family | full fine-tuning | LoRA | why |", "|---|---|---|---|", *lines]
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    told = f"Not built tiny here, so not tried: {', '.join(missing)}."
    made = "\n".join(
        [BEGIN, f"transformers {transformers.__version__}.", "", *table, "", told, END]
    )
    PAGE.write_text(before + made + after)


def _too_long(*_):
    raise TimeoutError(f"it took more than {SECONDS} s")


if __name__ == "__main__":
    main()
