"""What a recurrent model remembers, and running one over padded rows exactly.

Shapes: B rows, T positions, E inputs, H hidden units, L layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tightlip.core.errors import UsageError


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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from row `beam_idx[i]`, as beam search asks."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.parts_LBH = tuple(
            part.index_select(1, indices.to(part.device)) for part in self.parts_LBH
        )

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
        copy = RecurrentState(self.parts_LBH, self.num_positions)
        copy.batch_repeat_interleave(repeats)
        return copy

    def detach(self) -> "RecurrentState":
        """The same memory without the gradient that led to it."""
        return RecurrentState(tuple(part.detach() for part in self.parts_LBH), self.num_positions)

    def to(self, *args: Any, **kwargs: Any) -> "RecurrentState":
        return RecurrentState(
            tuple(part.to(*args, **kwargs) for part in self.parts_LBH), self.num_positions
        )


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


def real_positions(attention_mask: Tensor | None, num_positions: int) -> Tensor | None:
    """The mask's last `num_positions` columns as booleans; None where nothing is padding.

    `generate` passes a mask over everything so far, a caller who scores chunks one over the
    chunk: the last columns are the same.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[1] < num_positions:
        raise UsageError(
            f"attention_mask has shape {tuple(attention_mask.shape)} for {num_positions} positions. "
            "Pass one number per row and position: 1 for a token, 0 for padding."
        )
    real_BT = attention_mask[:, attention_mask.shape[1] - num_positions :].bool()
    return None if bool(real_BT.all()) else real_BT


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
    if real_BT is None or (not keep_state and padding_is_last(real_BT)):
        outputs_BTH, end = rnn(inputs_BTE, start)
    else:
        outputs_BTH, end = run_padded(rnn, inputs_BTE, real_BT, start, keep_state=keep_state)
    if not keep_state:
        return outputs_BTH, None
    return outputs_BTH, RecurrentState(parts_of(end), state.num_positions + inputs_BTE.shape[1])


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
