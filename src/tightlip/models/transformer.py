"""A decoder-only Transformer language model as a Hugging Face model.

Pre-norm blocks, learned positions, causal attention by torch's own kernel, and
transformers' DynamicCache for generation. Shapes: B rows, T new positions, S positions with
the past, H hidden, N heads, D per head, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import PreTrainedModel

from tightlip.core.errors import UsageError
from tightlip.models.causal_lm import BaseModel, CausalLM, is_filled, real_positions
from tightlip.models.configurations import TransformerConfig


class SelfAttention(nn.Module):
    """Causal attention of every position to itself and those before it."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.queries_keys_values = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = residual_writer(config.hidden_size, config.hidden_size)

    def forward(self, hidden_BTH: Tensor, visible: Tensor | None, cache: Cache | None) -> Tensor:
        split_BTND = (*hidden_BTH.shape[:2], self.num_heads, -1)
        query, key, value = (
            part.view(split_BTND).transpose(1, 2)
            for part in self.queries_keys_values(hidden_BTH).chunk(3, dim=-1)
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        mixed_BNTD = scaled_dot_product_attention(
            # A single new token sees everything; `is_causal` would line it up with the oldest.
            query,
            key,
            value,
            attn_mask=visible,
            is_causal=visible is None and bool(query.shape[2] > 1),
        )
        return self.output(mixed_BNTD.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a feed-forward layer, each normalised first and added to its input."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = SelfAttention(config, layer)
        self.feed_norm = nn.LayerNorm(config.hidden_size)
        self.widen = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = residual_writer(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_BTH: Tensor, visible: Tensor | None, cache: Cache | None) -> Tensor:
        attended_BTH = self.attention(self.attention_norm(hidden_BTH), visible, cache)
        hidden_BTH = hidden_BTH + self.dropout(attended_BTH)
        fed_BTH = self.output(gelu(self.widen(self.feed_norm(hidden_BTH))))
        return hidden_BTH + self.dropout(fed_BTH)


class TransformerPreTrainedModel(PreTrainedModel):
    """What base and causal models share: starting weights as in GPT-2.

    Weights start normal with deviation 0.02; those that write into the residual stream
    are smaller by sqrt(2 num_layers), so that depth does not raise its variance; biases start at 0.
    """

    config_class = TransformerConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Linear) and not is_filled(module.weight):
            narrowing = math.sqrt(2 * self.config.num_layers) if writes_residual(module) else 1.0
            nn.init.normal_(module.weight, std=0.02 / narrowing)
        if isinstance(module, nn.LayerNorm) and not is_filled(module.weight):
            nn.init.ones_(module.weight)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter) and not is_filled(bias):
            nn.init.zeros_(bias)


def residual_writer(num_inputs: int, num_outputs: int) -> nn.Linear:
    """A linear layer marked as writing into the residual stream; a plain one to everyone else."""
    layer = nn.Linear(num_inputs, num_outputs)
    layer.writes_residual = True  # type: ignore[assignment]
    return layer


def writes_residual(module: nn.Module) -> bool:
    return bool(getattr(module, "writes_residual", False))


class TransformerModel(BaseModel, TransformerPreTrainedModel):
    """Embeddings and blocks: tokens in, one hidden state per position out.

    Holds:
        causal: a later token changes nothing at earlier positions.
        padding_unseen: padding on either side changes nothing at real positions.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def run(
        self,
        inputs_BTE: Tensor,
        attention_mask: Tensor | None,
        past: Cache | None,
        *,
        use_cache: bool,
        position_ids: Tensor | None = None,
        **unused: Any,
    ) -> tuple[tuple[Tensor, ...], Cache | None]:
        """`attention_mask` covers the past too. Unless given, positions count real tokens only."""
        cache = self.cache_for(past, use_cache)
        num_past = int(cache.get_seq_length()) if cache is not None else 0
        num_keys = num_past + inputs_BTE.shape[1]
        self.check_length(num_keys)
        real_BS = real_positions(attention_mask, num_keys, with_past=True)
        if position_ids is None:
            position_ids = positions(real_BS, num_past, inputs_BTE)
        hidden_BTH = self.dropout(inputs_BTE + self.embed_positions(position_ids))
        visible = visible_keys(real_BS, num_past, hidden_BTH)
        layers = [hidden_BTH]
        for block in self.blocks:
            layers.append(hidden_BTH := block(hidden_BTH, visible, cache))
        return (*layers[:-1], self.norm(hidden_BTH)), cache

    def cache_for(self, given: Cache | None, use_cache: bool) -> Cache | None:
        if given is not None and not isinstance(given, Cache):
            raise UsageError(
                f"past_key_values is a {type(given).__name__}; a Transformer keeps a transformers Cache. "
                "Pass the past_key_values of an earlier output, or leave it out."
            )
        return DynamicCache(config=self.config) if given is None and use_cache else given

    def check_length(self, num_positions: int) -> None:
        if num_positions > self.config.max_position_embeddings:
            raise UsageError(
                f"{num_positions} positions are more than the {self.config.max_position_embeddings} this model has learned. "
                "Shorten or split the text, or train with a larger max_position_embeddings."
            )


def positions(real_BS: Tensor | None, num_past: int, inputs_BTH: Tensor) -> Tensor:
    """Each new token's place among the real tokens of its row; padding takes place 0 or more."""
    num_new = inputs_BTH.shape[1]
    if real_BS is None:
        return torch.arange(num_past, num_past + num_new, device=inputs_BTH.device)[None]
    return (real_BS.long().cumsum(dim=1) - 1).clamp(min=0)[:, -num_new:]


def visible_keys(real_BS: Tensor | None, num_past: int, hidden_BTH: Tensor) -> Tensor | None:
    """Which keys each query sees (B or 1, 1, T, S); None where torch's plain rule will do.

    Padding sees itself, because a query that sees nothing yields NaN.
    """
    num_new = hidden_BTH.shape[1]
    if real_BS is None and (num_past == 0 or num_new == 1):
        return None
    new_T1 = torch.arange(num_past, num_past + num_new, device=hidden_BTH.device)[:, None]
    all_S = torch.arange(num_past + num_new, device=hidden_BTH.device)
    visible_1TS = (all_S <= new_T1)[None]
    if real_BS is not None:
        visible_1TS = visible_1TS & (real_BS[:, None, :] | (all_S == new_T1))
    return visible_1TS[:, None]


class TransformerForCausalLM(CausalLM, TransformerPreTrainedModel):
    """A decoder-only Transformer language model."""

    base_class = TransformerModel
    head_has_bias = False
