"""What every model here shares: tokens in, kept positions out, weights filled once.

Shapes: B rows, T positions, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple

from tightlip.core.errors import UsageError


class BaseModel(PreTrainedModel):
    """Embeddings and layers: tokens in, one hidden state per position out."""

    embed_tokens: nn.Embedding
    # The hidden states of the layers, the last one last, and what to go on from.
    run: Callable[..., tuple[tuple[Tensor, ...], Any]]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Run over `input_ids`, going on from `past_key_values` where given.

        `use_cache` decides whether a state comes back; unless given it does in evaluation and
        not in training.
        """
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        hidden, state = self.run(
            embedded(self.embed_tokens, input_ids, inputs_embeds),
            attention_mask,
            past_key_values,
            use_cache=use_cache,
            **others,
        )
        return BaseModelOutputWithPast(
            last_hidden_state=hidden[-1],
            past_key_values=state,
            hidden_states=hidden if output_hidden_states else None,
        )


class CausalLM(PreTrainedModel, GenerationMixin):
    """A base model and a linear layer from its hidden states to the vocabulary."""

    base_class: type[PreTrainedModel]
    head_has_bias = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=self.head_has_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Next-token logits; with `labels` the mean loss over those that are not -100."""
        outputs = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            position_ids=position_ids,
            return_dict=True,
        )
        # The last so many positions (all for 0), or those that a tensor names.
        last = isinstance(logits_to_keep, int)
        kept = slice(-logits_to_keep, None) if last else logits_to_keep
        logits_BTV = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **others
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )


def embedded(
    embedding: nn.Embedding, input_ids: Tensor | None, inputs_embeds: Tensor | None
) -> Tensor:
    """The embeddings of `input_ids`, or those the caller already has."""
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither" if input_ids is None else "both"
        raise UsageError(
            f"Exactly one of input_ids and inputs_embeds is needed; {given} came. Pass one."
        )
    return inputs_embeds if input_ids is None else embedding(input_ids)


def real_positions(
    attention_mask: Tensor | None, num_positions: int, *, with_past: bool = False
) -> Tensor | None:
    """The mask's last `num_positions` columns as booleans; None where nothing is padding.

    `generate` passes a mask over everything so far, a caller who scores chunks one over the
    chunk: the last columns are the same. `with_past`, they must be all there are.
    """
    if attention_mask is None:
        return None
    num_more = attention_mask.shape[-1] - num_positions
    if attention_mask.ndim != 2 or num_more < 0 or (with_past and num_more):
        past = ", past ones included" if with_past else ""
        raise UsageError(
            f"attention_mask has shape {tuple(attention_mask.shape)} for {num_positions} positions{past}. "
            "Pass one number per row and position: 1 for a token, 0 for padding."
        )
    real_BT = attention_mask[:, num_more:].bool()
    return None if bool(real_BT.all()) else real_BT


def is_filled(parameter: nn.Parameter) -> bool:
    """Whether transformers already read this parameter from a checkpoint."""
    return bool(getattr(parameter, "_is_hf_initialized", False))
