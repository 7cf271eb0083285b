"""Stock models, unpatched: every family that the engine says it covers."""

import runpy
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, get_peft_model

from privacy.oracles import check_equal, clipped_sum, norm_of, unit_gradients
from tightlip.core.errors import UsageError
from tightlip.models.configurations import GRUConfig, LSTMConfig, TransformerConfig
from tightlip.models.recurrent import GRUForCausalLM, LSTMForCausalLM
from tightlip.models.transformer import TransformerForCausalLM
from tightlip.privacy import PrivateTraining
from tightlip.privacy.per_unit import clipped_gradients

TOKENS = {"vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0}
SHAPE = {
    **TOKENS,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
GROUPED = {**SHAPE, "num_key_value_heads": 1}
GPT2 = {**TOKENS, "n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16}
OPT = {
    **{name: value for name, value in SHAPE.items() if name != "intermediate_size"},
    "ffn_dim": 12,
    "word_embed_proj_dim": 8,
    "pad_token_id": 1,
}
BERT = {**SHAPE, "is_decoder": True, "pad_token_id": 1}
OURS = {"vocab_size": 31, "hidden_size": 8, "num_layers": 2}
RECURRENT = {**OURS, "embedding_size": 8}
FAMILIES = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SHAPE),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", {**GROUPED, "head_dim": 4}),
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "OPTForCausalLM": ("OPTConfig", OPT),
    "BertLMHeadModel": ("BertConfig", BERT),
    "LSTMForCausalLM": (LSTMConfig, RECURRENT),
    "GRUForCausalLM": (GRUConfig, RECURRENT),
    "TransformerForCausalLM": (
        TransformerConfig,
        {**OURS, "num_heads": 2, "max_position_embeddings": 16},
    ),
}
MIXTURE = {**GROUPED, "head_dim": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
LATENT = {
    **MIXTURE,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "kv_lora_rank": 4,
    "q_lora_rank": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
del LATENT["head_dim"]
STATES = {**TOKENS, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}
# What makes something of its weights first, convolves, or sends tokens to experts.
FURTHER = {
    "GemmaForCausalLM": ("GemmaConfig", {**GROUPED, "head_dim": 4}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "head_dim": 4}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**GROUPED, "head_dim": 4}),
    "CohereForCausalLM": ("CohereConfig", {**GROUPED, "use_qk_norm": True}),
    "HeliumForCausalLM": ("HeliumConfig", {**GROUPED, "head_dim": 4}),
    "NemotronForCausalLM": ("NemotronConfig", {**GROUPED, "head_dim": 4}),
    "FalconForCausalLM": ("FalconConfig", SHAPE),
    "RecurrentGemmaForCausalLM": (
        "RecurrentGemmaConfig",
        {**GROUPED, "lru_width": 8, "block_types": ["recurrent", "attention"]},
    ),
    "MambaForCausalLM": ("MambaConfig", STATES),
    "Mamba2ForCausalLM": (
        "Mamba2Config",
        {**STATES, "num_heads": 4, "head_dim": 4, "n_groups": 1, "chunk_size": 4},
    ),
    "Lfm2ForCausalLM": ("Lfm2Config", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    "MixtralForCausalLM": ("MixtralConfig", {**MIXTURE, "num_local_experts": 3}),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**MIXTURE, "num_experts": 3, "shared_expert_intermediate_size": 10},
    ),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**MIXTURE, "num_experts": 3}),
    "GptOssForCausalLM": ("GptOssConfig", {**MIXTURE, "num_local_experts": 3}),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", {**LATENT, "n_routed_experts": 4}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {**LATENT, "n_routed_experts": 4}),
}
IN_SINGLE = {
    *("CohereForCausalLM", "HeliumForCausalLM", "MambaForCausalLM", "Mamba2ForCausalLM"),
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
}
OWN = {each.__name__: each for each in (LSTMForCausalLM, GRUForCausalLM, TransformerForCausalLM)}


def stock(name, *, tied=False, seed=0, **changes):
    """A family's smallest model, its weights large enough for every part to matter."""
    config, shape = {**FAMILIES, **FURTHER}[name]
    config = getattr(transformers, config) if isinstance(config, str) else config
    torch.manual_seed(seed)
    kind = OWN.get(name) or getattr(transformers, name)
    made = config(**{**shape, "tie_word_embeddings": tied, **changes})
    made._experts_implementation = "eager"  # torch's grouped product knows no float64
    model = kind(made).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def padded(side, num_rows=5, length=7, seed=0):
    """Rows of all lengths, their padding on one side, and some labels left out."""
    torch.manual_seed(seed)
    ids = torch.randint(2, 31, (num_rows, length))
    lengths = torch.randint(2, length + 1, (num_rows, 1))
    lengths[0] = length
    places = torch.arange(length)[None]
    mask = (places < lengths if side == "right" else places >= length - lengths).long()
    labels = torch.where((mask == 0) | (torch.rand(num_rows, length) < 0.1), -100, ids)
    return ids, labels, mask


def check_fast(model, ids, labels, clip_norm=0.5, within=1e-9, **options):
    names = {"attention_mask": "mask", "units": "units"}
    given = {names[name]: each for name, each in options.items() if name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = clipped_gradients(model, ids, labels, clip_norm=clip_norm, **options)
    every = unit_gradients(model, ids, labels, **given)
    check_equal(found, every, clip_norm, per_layer=options.get("per_layer", False), within=within)
    assert int((found.norms > clip_norm).sum()) > 0


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_clipped_as_autograd_would(name, tied, side):
    model = stock(name, tied=tied)
    ids, labels, mask = padded(side, seed=len(name))
    check_fast(model, ids, labels, attention_mask=mask)
    check_fast(model, ids, labels, attention_mask=mask, units=torch.tensor([4, 1, 4, -2, 4]))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_clipped_layer_by_layer_without_a_mask(name):
    ids, labels, _ = padded("right", num_rows=7)
    check_fast(stock(name, tied=True), ids, labels, per_layer=True)


@pytest.mark.parametrize("name", FURTHER)
def test_further_families_are_clipped_as_autograd_would(name):
    ids, labels, mask = padded("right", seed=len(name))
    model = stock(name, tied=name < "H")
    # Some of these take parts of their sums in float32, whatever their weights are.
    how = {"clip_norm": 0.1, "within": 1e-5 if name in IN_SINGLE else 1e-9}
    check_fast(model, ids, labels, attention_mask=mask, units=torch.tensor([4, 1, 4, -2, 4]), **how)
    check_fast(model, ids, labels, per_layer=True, **how)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("GPT2LMHeadModel", ["c_attn", "c_proj"]),
        ("LlamaForCausalLM", ["q_proj", "v_proj", "down_proj"]),
    ],
)
def test_adapters_on_a_frozen_model_are_clipped_as_autograd_would(name, modules):
    adapted = LoraConfig(r=3, target_modules=modules, fan_in_fan_out=name.startswith("GPT2"))
    model = get_peft_model(stock(name), adapted).double()
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter)
    ids, labels, mask = padded("right")
    check_fast(
        model, ids, labels, clip_norm=0.05, attention_mask=mask, units=torch.tensor([0, 1, 1, 2, 1])
    )
    found = clipped_gradients(model, ids, labels, clip_norm=1.0)
    assert found.gradients
    assert all("lora_" in key for key in found.gradients)


ADAPTED = {
    "GPT2LMHeadModel": ["c_attn", "mlp.c_proj"],
    "LlamaForCausalLM": ["q_proj", "v_proj", "down_proj"],
    "Gemma2ForCausalLM": ["q_proj", "down_proj"],
    "FalconForCausalLM": ["query_key_value", "dense_4h_to_h"],
    "MambaForCausalLM": ["in_proj", "x_proj"],
}


def shaken(model):
    """Adapters begin as no change at all; so far from it that every part matters."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double()


def adapters(kind, name, modules):
    turned = name.startswith("GPT2")
    if kind == "IA3":
        return IA3Config(
            target_modules=modules, feedforward_modules=modules[-1:], fan_in_fan_out=turned
        )
    return LoraConfig(r=2, target_modules=modules, use_dora=kind == "DoRA", fan_in_fan_out=turned)


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "IA3"])
@pytest.mark.parametrize("name", ADAPTED)
def test_every_kind_of_adapter_is_clipped_as_autograd_would(name, kind):
    model = shaken(get_peft_model(stock(name), adapters(kind, name, ADAPTED[name])))
    ids, labels, mask = padded("right")
    how = {"clip_norm": 0.05, "within": 1e-5 if name in IN_SINGLE else 1e-9}
    check_fast(model, ids, labels, attention_mask=mask, units=torch.tensor([0, 1, 1, 2, 1]), **how)


@pytest.mark.parametrize(
    ("name", "router"),
    [("MixtralForCausalLM", "mlp.gate.weight"), ("GptOssForCausalLM", "mlp.router.weight")],
)
def test_adapters_of_routers_are_clipped_as_autograd_would(name, router):
    adapted = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=[router])
    model = shaken(get_peft_model(stock(name), adapted))
    assert any(
        "lora_A" in key and router.split(".")[1] in key for key, _ in model.named_parameters()
    )
    ids, labels, mask = padded("right")
    check_fast(model, ids, labels, clip_norm=0.05, attention_mask=mask)


@pytest.mark.parametrize(
    "name", ["MixtralForCausalLM", "GptOssForCausalLM", "DeepseekV2ForCausalLM"]
)
def test_adapters_of_everything_linear_reach_experts_too(name):
    stacks = ["experts.gate_up_proj", "experts.down_proj"] if "Oss" in name else None
    adapted = LoraConfig(r=2, target_modules="all-linear", target_parameters=stacks)
    model = shaken(get_peft_model(stock(name), adapted))
    assert any("experts" in key and "lora_A" in key for key, _ in model.named_parameters())
    ids, labels, mask = padded("right")
    how = {"clip_norm": 0.05, "within": 1e-5 if name in IN_SINGLE else 1e-9}
    check_fast(model, ids, labels, attention_mask=mask, units=torch.tensor([0, 1, 1, 2, 1]), **how)


UNSTEADY = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


@pytest.mark.parametrize("options", [{}, {"use_reentrant": False}])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_gradient_checkpointing_changes_nothing(name, options):
    model = stock(
        name, tied=True, **(dict.fromkeys(UNSTEADY, 0.0) if "GPT2" in name else {})
    ).train()
    ids, labels, mask = padded("right")
    plain = clipped_gradients(model, ids, labels, clip_norm=0.5, attention_mask=mask)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None)
    assert model.is_gradient_checkpointing
    check_fast(model, ids, labels, attention_mask=mask)
    found = clipped_gradients(model, ids, labels, clip_norm=0.5, attention_mask=mask)
    for key, gradient in plain.gradients.items():
        assert torch.allclose(found.gradients[key], gradient, rtol=1e-12, atol=1e-15)


def stepped(folder, name, *, checkpoints, **changes):
    """A private step's change of the weights, noise left out, and how often its first layer ran."""
    model = stock(name, seed=3, **changes).float()
    if checkpoints:
        model.gradient_checkpointing_enable()
    layer = next(each for key, each in model.named_modules() if key.endswith(".0"))
    calls = []
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: (calls.append(1), forward(*args, **kwargs))[1]
    torch.manual_seed(5)
    texts = [torch.randint(2, 31, (6,)) for _ in range(4)]
    training = PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        texts,
        ledger=folder / f"{name}-{checkpoints}.json",
        noise_multiplier=0.0,
        expected_batch=4,
        insecure_seed=1,
        widths=(8,),  # Mamba takes its time for each position
    )
    before = torch.cat([each.detach().flatten() for each in model.parameters()])
    calls.clear()
    training.step()
    training.close()
    assert not any(module.training for module in model.modules())
    return before - torch.cat([each.detach().flatten() for each in model.parameters()]), len(calls)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("LlamaForCausalLM", {"attention_dropout": 0.5}),
        ("OPTForCausalLM", {"dropout": 0.5}),
        ("GPT2LMHeadModel", dict.fromkeys(UNSTEADY, 0.5)),
        ("MixtralForCausalLM", {"attention_dropout": 0.5}),
        ("MambaForCausalLM", {}),
    ],
)
def test_a_private_step_computes_checkpointed_layers_once_more_and_drops_nothing(
    name, changes, tmp_path
):
    kept, calls_kept = stepped(tmp_path, name, checkpoints=False, **changes)
    again, calls_again = stepped(tmp_path, name, checkpoints=True, **changes)
    assert calls_again == 2 * calls_kept > 0
    torch.testing.assert_close(again, kept, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("frozen", [False, True])
def test_checkpoints_that_go_back_by_themselves_are_refused(frozen):
    model = stock("GPT2LMHeadModel").train()
    if frozen:  # as a base is under adapters: torch would only warn, and the gradient be nothing
        model.transformer.wte.requires_grad_(False)
        model.transformer.wpe.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    ids, labels, _ = padded("right")
    with pytest.raises(UsageError, match="'use_reentrant': False"):
        clipped_gradients(model, ids, labels, clip_norm=1.0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dropout_in_training_does_not_force_the_slow_way():
    model = stock("GPT2LMHeadModel").train()
    ids, labels, mask = padded("left")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        draws = [
            clipped_gradients(model, ids, labels, clip_norm=1.0, attention_mask=mask).norms
            for _ in range(2)
        ]
    assert not torch.equal(*draws)


@pytest.mark.parametrize(
    ("setting", "value"), [("output_router_logits", True), ("expert_capacity", 2)]
)
def test_what_lets_rows_of_a_batch_share_experts_is_refused(setting, value, tmp_path):
    model = stock("MixtralForCausalLM")
    setattr(model.config, setting, value)
    ids, labels, _ = padded("right")
    with pytest.raises(UsageError, match=f"{setting}={value}"):
        clipped_gradients(model, ids, labels, clip_norm=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match=f"{setting}={value}"):
        PrivateTraining(
            model,
            optimizer,
            [*ids],
            ledger=tmp_path / "ledger.json",
            noise_multiplier=1.0,
            expected_batch=2,
        )


@pytest.mark.parametrize(
    "name", ["MixtralForCausalLM", "GptOssForCausalLM", "MambaForCausalLM", "GemmaForCausalLM"]
)
def test_a_row_is_the_same_to_the_last_bit_whoever_shares_its_batch(name):
    model = stock(name).float()
    ids, labels, _ = padded("right", num_rows=6, length=9)
    other_ids, other_labels, _ = padded("right", num_rows=6, length=9, seed=8)
    other_ids[2], other_labels[2] = ids[2], labels[2]
    losses = [
        clipped_gradients(model, *rows, clip_norm=1.0).losses[2]
        for rows in ((ids, labels), (other_ids, other_labels))
    ]
    assert torch.equal(*losses)


def test_the_page_on_families_says_what_the_code_does():
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "families.py"))
    lines = script["PAGE"].read_text().splitlines()
    for family in ("gemma2", "falcon", "mamba", "mixtral", "jetmoe", "xlnet"):
        assert script["row_of"](family)[0] in lines


@pytest.fixture
def bfloat16():
    """bfloat16 products without oneDNN: its kernels are illegal instructions on some machines."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    with torch.autocast("cpu", torch.bfloat16):
        yield
    torch._C._set_mkldnn_enabled(before)


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "TransformerForCausalLM"])
def test_bfloat16_is_within_one_per_cent_of_autograd(name, tied):
    model = stock(name, tied=tied).float()
    ids, labels, mask = padded("right", num_rows=6, length=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = clipped_gradients(model, ids, labels, clip_norm=0.5, attention_mask=mask)
    every = unit_gradients(model, ids, labels, mask=mask)
    expected = clipped_sum(every, 0.5)
    assert torch.allclose(found.norms, torch.stack([*map(norm_of, every)]).float(), rtol=1e-2)
    off = {key: found.gradients[key] - gradient for key, gradient in expected.items()}
    assert norm_of(off) <= 1e-2 * norm_of(expected)


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "LSTMForCausalLM"])
def test_no_unit_adds_more_than_the_bound_in_bfloat16(name):
    model = stock(name, tied=True).float()
    ids, labels, _ = padded("right", num_rows=12, length=9)
    for row in range(12):
        own = slice(row, row + 1)
        found = clipped_gradients(model, ids[own], labels[own], clip_norm=0.01)
        assert 0.0098 < norm_of(found.gradients) <= 0.01
