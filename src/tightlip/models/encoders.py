"""Text encoders: any that lies in a folder, and small ones of our own to train where none is at hand.

Nothing in a folder is ever executed.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple

from tightlip.core.errors import UsageError
from tightlip.models.causal_lm import embedded, is_filled
from tightlip.models.checks import check_all_weights_came, usage_errors, without_progress_bar
from tightlip.models.configurations import WordEncoderConfig
from tightlip.models.loading import read_configuration, read_weights
from tightlip.models.recurrent import fill_recurrent

# Made for another task than ours and never asked; many a checkpoint comes without it.
UNUSED_PART = "pooler"


def load_encoder(folder: Path | str) -> PreTrainedModel:
    """The encoder in `folder` in float32 and evaluation mode, without its pooling head.

    Holds:
        nothing_executed: code and pickles in the folder are never run.
        nothing_made_up: a weight missing from the checkpoint is a usage error.
        one_vector_a_token: what gives no hidden state per token is a usage error.
    """
    folder = Path(folder)
    config = read_configuration(folder)
    if config.is_encoder_decoder:
        raise UsageError(
            f"{folder} holds a '{config.model_type}' model, half of which writes text. Give an encoder such as BERT, "
            "RoBERTa or MiniLM."
        )
    with without_progress_bar(reports=False):
        model, info = read_weights(AutoModel, folder, config, torch.float32)
    check_all_weights_came(folder, without_the_unused(info))
    if hasattr(model, UNUSED_PART):
        setattr(model, UNUSED_PART, None)
    check_hidden_states(folder, model)
    return model.eval()


def without_the_unused(info: dict[str, Any]) -> dict[str, Any]:
    unused = f"{UNUSED_PART}."
    missing = [key for key in info["missing_keys"] if not key.startswith(unused)]
    mismatched = [entry for entry in info["mismatched_keys"] if not entry[0].startswith(unused)]
    return {"missing_keys": missing, "mismatched_keys": mismatched}


def check_hidden_states(folder: Path, model: PreTrainedModel) -> None:
    """Ask the model itself: configurations do not tell what comes out."""
    ids = torch.ones(1, 3, dtype=torch.int64)
    with torch.inference_mode(), usage_errors(folder):
        outputs = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
    hidden = getattr(outputs, "last_hidden_state", None)
    if hidden is None or hidden.shape[:2] != ids.shape:
        raise UsageError(
            f"{folder} holds a '{model.config.model_type}' model that gives no vector for each token. Give an encoder "
            "such as BERT, RoBERTa or MiniLM."
        )


def most_tokens(model: PreTrainedModel) -> int | None:
    """How long a row the model has positions for; None where any length will do."""
    if (positions := getattr(model.config, "max_position_embeddings", None)) is None:
        return None
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    # RoBERTa counts its positions from behind the padding's own.
    padding = getattr(table, "padding_idx", None)
    return positions if padding is None else positions - padding - 1


class WordEncoder(PreTrainedModel):
    """Tokens in, one vector per position out; padding belongs on the right.

    Holds:
        padding_unseen: padding changes nothing at real positions.
        both_ways: of an LSTM, every position has seen the whole text.
    """

    config_class = WordEncoderConfig
    base_model_prefix = "encoder"

    def __init__(self, config: WordEncoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        self.dropout = nn.Dropout(config.dropout)
        if config.kind == "lstm":
            self.forwards = nn.LSTM(config.embedding_size, config.hidden_size, batch_first=True)
            self.backwards = nn.LSTM(config.embedding_size, config.hidden_size, batch_first=True)
            self.join = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if is_filled(parameter):
                continue
            if isinstance(module, nn.RNNBase):
                fill_recurrent(parameter, name, module)
            elif parameter.dim() == 1:
                nn.init.zeros_(parameter)
            elif isinstance(module, nn.Embedding):
                # Vectors are normalised, so only the ratio of a step to a weight matters: starting wide, a
                # bag had learnt half as much after four epochs.
                nn.init.normal_(parameter, std=0.1)
            else:
                bound = math.sqrt(6.0 / sum(parameter.shape))
                nn.init.uniform_(parameter, -bound, bound)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **unused: Any,
    ) -> BaseModelOutput:
        hidden_BTE = self.dropout(embedded(self.embed_tokens, input_ids, inputs_embeds))
        if self.config.kind == "bag":
            return BaseModelOutput(last_hidden_state=hidden_BTE)
        if attention_mask is None:
            attention_mask = torch.ones(
                hidden_BTE.shape[:2], dtype=torch.int64, device=hidden_BTE.device
            )
        turned_BT = last_first(attention_mask)
        ahead_BTH, _ = self.forwards(hidden_BTE)
        back_BTH, _ = self.backwards(take_positions(hidden_BTE, turned_BT))
        both_BTH = torch.cat([ahead_BTH, take_positions(back_BTH, turned_BT)], dim=-1)
        return BaseModelOutput(last_hidden_state=self.join(self.dropout(both_BTH)))


def last_first(attention_mask: Tensor) -> Tensor:
    """The order that turns each row's real tokens round and leaves its padding where it is.

    >>> last_first(torch.tensor([[1, 1, 1, 0]])).tolist()
    [[2, 1, 0, 3]]
    """
    lengths_B1 = attention_mask.sum(dim=1, keepdim=True)
    places_1T = torch.arange(attention_mask.shape[1], device=attention_mask.device)[None]
    return torch.where(places_1T < lengths_B1, lengths_B1 - 1 - places_1T, places_1T)


def take_positions(values_BTX: Tensor, order_BT: Tensor) -> Tensor:
    # Repeated, not expanded: torch's exporter writes an expanded index that ONNX Runtime refuses.
    return values_BTX.gather(1, order_BT[..., None].repeat(1, 1, values_BTX.shape[-1]))
