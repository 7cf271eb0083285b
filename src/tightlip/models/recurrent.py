"""LSTM and GRU language models as Hugging Face models: what they remember, and running one over padded
rows exactly.

Built from nn.Embedding, nn.LSTM or nn.GRU, and nn.Linear alone: the DP engine has rules for
these. Shapes: B rows, T positions, E embedding, H hidden, L layers, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers.modeling_utils import PreTrainedModel

from tightlip.core.errors import UsageError
from tightlip.models.causal_lm import BaseModel, CausalLM, is_filled, real_positions
from tightlip.models.configurations import GRUConfig, LSTMConfig, RecurrentConfig


@dataclass(eq=False)
class RecurrentState:
    """The memory of a recurrent model, carried as `past_key_values`.

    `parts_LBH` is (h, c) for an LSTM, (h,) for a GRU and empty before the first token.
    A forward pass returns a new state and leaves the one it was given alone, so many
    continuations can start from one prefix. `num_positions` counts padding too: that is
    how transformers lines a cache up with its attention mask.
    """

    parts_LBH: tuple[Tensor, ...] = ()
    num_positions: int = 0

    # transformers asks: may it compile around this cache, and may it take tokens back?
    is_compileable = False
    is_croppable = False

    @property
    def num_rows(self) -> int | None:
        return self.parts_LBH[0].shape[1] if self.parts_LBH else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_positions

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """transformers' way to say that there is no limit."""
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Let row i go on from row `indices[i]`, as beam search asks under another name."""
        self.parts_LBH = tuple(
            part.index_select(1, indices.to(part.device)) for part in self.parts_LBH
        )

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.parts_LBH = tuple(part.repeat_interleave(repeats, dim=1) for part in self.parts_LBH)

    def crop(self, max_length: int) -> None:
        """Called by transformers' assisted and prompt-lookup generation to take guessed tokens back."""
        raise UsageError(
            f"A recurrent state cannot go back to {max_length} tokens: it keeps no history. "
            "Keep the state you want to return to, or use plain, sampled or beam generation."
        )

    def repeated(self, repeats: int) -> "RecurrentState":
        """A new state with every row `repeats` times over."""
        return self._changed(lambda part: part.repeat_interleave(repeats, dim=1))

    def detach(self) -> "RecurrentState":
        """The same memory without the gradient that led to it."""
        return self._changed(Tensor.detach)

    def to(self, *args: Any, **kwargs: Any) -> "RecurrentState":
        return self._changed(lambda part: part.to(*args, **kwargs))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "RecurrentState":
        return RecurrentState(tuple(map(change, self.parts_LBH)), self.num_positions)


def checked_state(given: Any, num_rows: int) -> RecurrentState:
    """`given` as a state for `num_rows` rows. A key-value cache would be ignored in silence."""
    if given is None:
        return RecurrentState()
    if not isinstance(given, RecurrentState):
        raise UsageError(
            f"past_key_values is a {type(given).__name__}; a recurrent model remembers a RecurrentState. "
            "Pass the past_key_values of an earlier output, or leave it out."
        )
    if given.num_rows not in (None, num_rows):
        raise UsageError(
            f"The state holds {given.num_rows} rows and the input {num_rows}: rows would go on from someone else's "
            "memory. Pass as many rows as before, or select them with state.batch_select_indices."
        )
    return given


def run_recurrent(
    rnn: nn.LSTM | nn.GRU,
    inputs_BTE: Tensor,
    real_BT: Tensor | None,
    state: RecurrentState,
    *,
    keep_state: bool,
) -> tuple[Tensor, RecurrentState | None]:
    """Outputs and new state of `rnn` as if padding did not exist.

    Without padding this is one plain call. Padding on the right needs care only where the
    state is wanted: it must stop at each row's last token.

    Holds:
        padding_unseen: padding anywhere changes no output at a real position, nor the state.
    """
    start = start_of(rnn, state)
    with _with_a_kernel(inputs_BTE):
        if real_BT is None or (not keep_state and padding_is_last(real_BT)):
            outputs_BTH, end = rnn(inputs_BTE, start)
        else:
            outputs_BTH, end = run_padded(rnn, inputs_BTE, real_BT, start, keep_state=keep_state)
    if not keep_state:
        return outputs_BTH, None
    return outputs_BTH, RecurrentState(parts_of(end), state.num_positions + inputs_BTE.shape[1])


@contextmanager
def _with_a_kernel(inputs: Tensor) -> Iterator[None]:
    """oneDNN takes recurrent layers in bfloat16 also on CPUs for which it has none, and then fails;
    torch's own layers run everywhere."""
    in_bf16 = torch.is_autocast_enabled("cpu") or inputs.dtype == torch.bfloat16
    if inputs.device.type != "cpu" or not in_bf16 or _has_bf16_kernels():
        yield
        return
    # As torch.backends.mkldnn.flags does, which warns of Intel's GPUs each time.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@cache
def _has_bf16_kernels() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def run_padded(
    rnn: nn.LSTM | nn.GRU, inputs_BTE: Tensor, real_BT: Tensor, start: Any, *, keep_state: bool
) -> tuple[Tensor, Any]:
    """Move each row's real tokens to the front, run, and put the outputs back in place."""
    order_BT = (~real_BT).int().argsort(dim=1, stable=True)
    packed_inputs_BTE = take(inputs_BTE, order_BT)
    if keep_state:
        outputs_BTH, end = run_packed(rnn, packed_inputs_BTE, real_BT.sum(dim=1), start)
    else:
        outputs_BTH, end = rnn(packed_inputs_BTE, start)
    return take(outputs_BTH, order_BT.argsort(dim=1)), end


def run_packed(
    rnn: nn.LSTM | nn.GRU, inputs_BTE: Tensor, lengths_B: Tensor, start: Any
) -> tuple[Tensor, Any]:
    """Run each row for its own length; a row of no tokens keeps the state it came with."""
    packed = pack_padded_sequence(
        inputs_BTE, lengths_B.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
    )
    packed_outputs, end = rnn(packed, start)
    outputs_BTH, _ = pad_packed_sequence(
        packed_outputs, batch_first=True, total_length=inputs_BTE.shape[1]
    )
    ends = parts_of(end)
    starts = [torch.zeros_like(part) for part in ends] if start is None else parts_of(start)
    moved_B1 = (lengths_B > 0)[:, None]
    kept = tuple(torch.where(moved_B1, new, old) for new, old in zip(ends, starts, strict=True))
    return outputs_BTH, kept if isinstance(rnn, nn.LSTM) else kept[0]


def start_of(rnn: nn.LSTM | nn.GRU, state: RecurrentState) -> Any:
    """The state in torch's words: (h, c), h, or None for zeros."""
    if not state.parts_LBH:
        return None
    parts = tuple(part.contiguous() for part in state.parts_LBH)
    return parts if isinstance(rnn, nn.LSTM) else parts[0]


def parts_of(torch_state: Any) -> tuple[Tensor, ...]:
    return torch_state if isinstance(torch_state, tuple) else (torch_state,)


def padding_is_last(real_BT: Tensor) -> bool:
    return bool((real_BT[:, 1:] <= real_BT[:, :-1]).all())


def take(values_BTX: Tensor, order_BT: Tensor) -> Tensor:
    return values_BTX.gather(1, order_BT[..., None].expand_as(values_BTX))


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
