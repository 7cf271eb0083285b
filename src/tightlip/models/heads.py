"""What every model here shares: tokens in, kept positions out, weights filled once."""

from torch import Tensor, nn

from tightlip.core.errors import UsageError


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


def kept_positions(hidden_BTH: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The last `logits_to_keep` positions (all for 0), or those a one-dimensional tensor names."""
    if isinstance(logits_to_keep, int):
        return hidden_BTH[:, -logits_to_keep:]
    return hidden_BTH[:, logits_to_keep]


def is_filled(parameter: nn.Parameter) -> bool:
    """Whether transformers already read this parameter from a checkpoint."""
    return bool(getattr(parameter, "_is_hf_initialized", False))
