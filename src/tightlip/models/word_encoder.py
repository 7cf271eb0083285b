"""Small encoders to train from scratch where no encoder's weights are at hand.

A bag gives each token its embedding, so that their mean is a bag of words; an LSTM reads the
text in both directions. Both are Hugging Face models, and built from what ONNX knows.
Shapes: B rows, T positions, E embedding, H hidden.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple

from tightlip.models.configurations import WordEncoderConfig
from tightlip.models.heads import embedded, is_filled
from tightlip.models.recurrent import fill_recurrent


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
