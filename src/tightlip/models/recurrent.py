"""LSTM and GRU language models as Hugging Face models.

Built from nn.Embedding, nn.LSTM or nn.GRU, and nn.Linear alone: the DP engine has rules for
these. Shapes: B rows, T positions, E embedding, H hidden, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from tightlip.core.errors import UsageError
from tightlip.models.causal_lm import BaseModel, CausalLM, is_filled
from tightlip.models.configurations import GRUConfig, LSTMConfig, RecurrentConfig
from tightlip.models.states import RecurrentState, checked_state, real_positions, run_recurrent


class RecurrentPreTrainedModel(PreTrainedModel):
    """What base and causal models share: starting weights, and that they carry a state.

    Embeddings start standard normal, output (and tied) weights uniform in ±0.1; each gate's
    input weights start Xavier-uniform and its recurrent weights orthogonal, so that gradients
    neither die nor blow up over a long line; biases start at 0, an LSTM's forget gates at 1, so
    that it starts out remembering.
    """

    config_class = RecurrentConfig
    base_model_prefix = "model"
    # Assisted generation takes tokens back, which a recurrent state cannot.
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.RNNBase):
            for name, parameter in module.named_parameters():
                if not is_filled(parameter):
                    fill_recurrent(parameter, name, module)
        elif isinstance(module, nn.Embedding | nn.Linear):
            if not is_filled(module.weight):
                # Wide embeddings learn faster (15 demo epochs: training perplexity 32, not 72), but
                # a tied matrix is an output layer too and must start small.
                if isinstance(module, nn.Embedding) and not self.config.tie_word_embeddings:
                    nn.init.normal_(module.weight)
                else:
                    nn.init.uniform_(module.weight, -0.1, 0.1)
            bias = getattr(module, "bias", None)
            if bias is not None and not is_filled(bias):
                nn.init.zeros_(bias)


def fill_recurrent(parameter: nn.Parameter, name: str, rnn: nn.RNNBase) -> None:
    """Fill one parameter of an LSTM or GRU, gate by gate."""
    if name.startswith("bias"):
        nn.init.zeros_(parameter)
        if isinstance(rnn, nn.LSTM) and name.startswith("bias_ih"):
            # torch orders an LSTM's gates: input, forget, cell, output.
            parameter[rnn.hidden_size : 2 * rnn.hidden_size].fill_(1.0)
        return
    for gate in parameter.split(rnn.hidden_size):
        if name.startswith("weight_hh"):
            nn.init.orthogonal_(gate)
        else:
            bound = math.sqrt(6.0 / sum(gate.shape))
            nn.init.uniform_(gate, -bound, bound)


class RecurrentModel(BaseModel, RecurrentPreTrainedModel):
    """Embeddings and recurrent layers: tokens in, one hidden state per position out.

    Holds:
        chunks: passing the returned state along scores a long text in pieces as in one go.
        padding_unseen: padding on either side changes nothing at real positions.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        self.dropout = nn.Dropout(config.dropout)
        rnn_class = nn.LSTM if isinstance(config, LSTMConfig) else nn.GRU
        self.rnn = rnn_class(
            config.embedding_size,
            config.hidden_size,
            config.num_layers,
            batch_first=True,
            # torch warns of dropout between layers where there is only one.
            dropout=config.dropout if config.num_layers > 1 else 0.0,
        )
        self.post_init()

    def run(
        self,
        inputs_BTE: Tensor,
        attention_mask: Tensor | None,
        past: RecurrentState | None,
        *,
        use_cache: bool,
        **unused: Any,
    ) -> tuple[tuple[Tensor, ...], RecurrentState | None]:
        """The embeddings and the last layer: torch keeps the layers between to itself."""
        hidden_BTH, state = run_recurrent(
            self.rnn,
            self.dropout(inputs_BTE),
            real_positions(attention_mask, inputs_BTE.shape[1]),
            checked_state(past, inputs_BTE.shape[0]),
            keep_state=use_cache,
        )
        return (inputs_BTE, self.dropout(hidden_BTH)), state


class RecurrentForCausalLM(CausalLM, RecurrentPreTrainedModel):
    """A recurrent language model: a linear layer with bias from hidden state to vocabulary.

    Holds:
        generates_as_recomputed: every step of `generate` sees what a full pass would give it.
    """

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        *others: Any,
        **more: Any,
    ) -> None:
        """Give `generate` a RecurrentState: with its own choice, a DynamicCache that no layer
        fills, every step would see one token and nothing before it."""
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache is False:
            return
        num_copies = max(
            generation_config.num_beams or 1, generation_config.num_return_sequences or 1
        )
        state = checked_state(given, batch_size)
        model_kwargs["past_key_values"] = state.repeated(num_copies)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As transformers does, but refuse to read again what the state has already read."""
        if next_sequence_length is not None and next_sequence_length < 1:
            raise UsageError(
                "The state given to generate has already read all of input_ids, so no token is left to predict from. "
                "Append at least one token that the state has not seen."
            )
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, **kwargs
        )


class LSTMModel(RecurrentModel):
    """An LSTM without its output layer."""

    config_class = LSTMConfig


class LSTMForCausalLM(RecurrentForCausalLM):
    """An LSTM language model."""

    config_class = LSTMConfig
    base_class = LSTMModel


class GRUModel(RecurrentModel):
    """A GRU without its output layer."""

    config_class = GRUConfig


class GRUForCausalLM(RecurrentForCausalLM):
    """A GRU language model."""

    config_class = GRUConfig
    base_class = GRUModel
