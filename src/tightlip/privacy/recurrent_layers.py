"""LSTM and GRU layers that note their gates' gradients on the way back.

Written by hand: torch's own layers give the gradients of weights summed over rows, and nothing
of a row's own. Time comes first inside, so that a step's numbers lie together.
Shapes: T steps, B rows, E inputs, H hidden units, G = 4H gates of an LSTM, 3H of a GRU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tightlip.privacy.layers import Outer, aligned, product_dtype, wide

Parts = tuple[Tensor, ...]


class LSTMLayer(torch.autograd.Function):
    """One LSTM layer: all outputs, the last hidden state and the last cell.

    torch orders the gates: input, forget, cell, output.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        context: Any, anchor: Tensor, input_BTE: Tensor, h_BH: Tensor, c_BH: Tensor, *others: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        right_BTE, own_GE, own_GH, biases = _begun(context, input_BTE, *others)
        bias_G = biases[0].detach() + biases[1].detach() if biases else None
        gates_TBG = _gates(right_BTE, own_GE, bias_G)
        num_steps = len(gates_TBG)
        hidden = _states(num_steps, h_BH, own_GH.shape[1], gates_TBG.dtype)
        cells = _states(num_steps, c_BH, c_BH.shape[1], wide(gates_TBG))
        steps = _steps(gates_TBG)
        for t in range(num_steps):
            gates_TBG[t].addmm_(hidden[t], own_GH.t())
            steps.lstm(gates_TBG[t], cells[t], cells[t + 1], hidden[t + 1])
        context.save_for_backward(right_BTE, gates_TBG, hidden, cells, own_GH, own_GE)
        return (*_outputs(hidden, h_BH.shape[1]), cells[-1].to(hidden.dtype))

    @staticmethod
    def backward(  # type: ignore[override]
        context: Any, outputs_BTH: Tensor, h_BH: Tensor, c_BH: Tensor
    ) -> tuple[Tensor | None, ...]:
        right_BTE, gates_TBG, hidden, cells, own_GH, own_GE = context.saved_tensors
        outputs_TBH, dh = _from_above(outputs_BTH, h_BH, hidden)
        back_TBG = torch.empty_like(gates_TBG)
        steps = _steps(gates_TBG)
        slopes = steps.lstm_slopes(gates_TBG, cells)
        dc = c_BH.to(cells.dtype, copy=True).contiguous()
        # The watch would look at each operation of each step.
        with torch._C.DisableTorchFunction():
            for t in reversed(range(len(gates_TBG))):
                back_BG = back_TBG[t]
                steps.lstm_back(slopes, t, dh, dc, back_BG)
                dh = torch.addmm(outputs_TBH[t - 1], back_BG, own_GH) if t else back_BG @ own_GH
        left_BTG = back_TBG.transpose(0, 1).contiguous()
        _note(context, left_BTG, left_BTG, right_BTE, hidden)
        back = _to_input(context, left_BTG, own_GE)
        return None, back, dh[:, : h_BH.shape[1]], dc.to(c_BH.dtype), None, None


class GRULayer(torch.autograd.Function):
    """One GRU layer: all outputs and the last hidden state.

    torch orders the gates: reset, update, new. The new gate's hidden part is multiplied by the
    reset gate, so the gradients on the input's side and the hidden side differ.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        context: Any, anchor: Tensor, input_BTE: Tensor, h_BH: Tensor, *others: Any
    ) -> tuple[Tensor, Tensor]:
        right_BTE, own_GE, own_GH, biases = _begun(context, input_BTE, *others)
        gates_TBG = _gates(right_BTE, own_GE, biases[0].detach() if biases else None)
        own_bias_G = own_GH.new_zeros(len(own_GH))
        if biases:
            own_bias_G = biases[1].detach().to(gates_TBG.dtype)
        num_steps = len(gates_TBG)
        hidden = _states(num_steps, h_BH, own_GH.shape[1], gates_TBG.dtype)
        news_TBH = gates_TBG.new_empty(num_steps, *h_BH.shape)
        steps = _steps(gates_TBG)
        for t in range(num_steps):
            inner_BG = torch.addmm(own_bias_G, hidden[t], own_GH.t())
            steps.gru(gates_TBG[t], inner_BG, hidden[t], hidden[t + 1], news_TBH[t])
        context.save_for_backward(right_BTE, gates_TBG, hidden, news_TBH, own_GH, own_GE)
        return _outputs(hidden, h_BH.shape[1])

    @staticmethod
    def backward(  # type: ignore[override]
        context: Any, outputs_BTH: Tensor, h_BH: Tensor
    ) -> tuple[Tensor | None, ...]:
        right_BTE, gates_TBG, hidden, news_TBH, own_GH, own_GE = context.saved_tensors
        outputs_TBH, dh = _from_above(outputs_BTH, h_BH, hidden)
        back_TBG, back_hidden_TBG = torch.empty_like(gates_TBG), torch.empty_like(gates_TBG)
        steps = _steps(gates_TBG)
        slopes = steps.gru_slopes(gates_TBG, news_TBH, hidden)
        rooms = torch.zeros(2, *dh.shape, dtype=dh.dtype, device=dh.device)
        with torch._C.DisableTorchFunction():
            for t in reversed(range(len(gates_TBG))):
                kept = rooms[t % 2]  # what reaches the state before past all gates
                steps.gru_back(slopes, t, dh, back_TBG[t], back_hidden_TBG[t], kept)
                if t:
                    kept += outputs_TBH[t - 1]
                dh = kept.addmm_(back_hidden_TBG[t], own_GH)
        left_BTG = back_TBG.transpose(0, 1).contiguous()
        left_hidden_BTG = back_hidden_TBG.transpose(0, 1).contiguous()
        _note(context, left_BTG, left_hidden_BTG, right_BTE, hidden)
        back = _to_input(context, left_BTG, own_GE)
        return None, back, dh[:, : h_BH.shape[1]], None, None


def _begun(
    context: Any, input_BTE: Tensor, parameters: Parts, watch: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Input and weights as they are multiplied, in autocast's kind of number, rows aligned; and the
    biases, input's and hidden. The context keeps what the way back must know.

    Parameters come as a tuple, which autograd does not look into: they are constants here.
    """
    context.watch, context.parameters = watch, parameters
    context.num_inputs, context.input_dtype = input_BTE.shape[2], input_BTE.dtype
    dtype = product_dtype(input_BTE)
    weight_GE, weight_GH, *biases = parameters
    own_GE, own_GH = (aligned(each.detach().to(dtype)) for each in (weight_GE, weight_GH))
    return aligned(input_BTE.to(dtype)), own_GE, own_GH, biases


def _gates(right_BTE: Tensor, own_GE: Tensor, bias_G: Tensor | None) -> Tensor:
    """What the input adds to every step's gates, all steps in one product."""
    bias_G = None if bias_G is None else bias_G.to(own_GE.dtype)
    return functional.linear(right_BTE.transpose(0, 1).contiguous(), own_GE, bias_G)


def _states(num_steps: int, first_BH: Tensor, room: int, dtype: torch.dtype) -> Tensor:
    """Room for a state before the first step and one after each; zeros beyond its size."""
    states = first_BH.new_zeros(num_steps + 1, len(first_BH), room, dtype=dtype)
    states[0, :, : first_BH.shape[1]] = first_BH
    return states


def _outputs(hidden: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return hidden[1:, :, :size].transpose(0, 1), hidden[-1, :, :size].clone()


def _from_above(outputs_BTH: Tensor, h_BH: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs' gradients by step, and what reaches the last state."""
    room = hidden.shape[2] - h_BH.shape[1]
    outputs_TBH = functional.pad(
        outputs_BTH.transpose(0, 1).to(hidden.dtype), (0, room)
    ).contiguous()
    return outputs_TBH, outputs_TBH[-1] + functional.pad(h_BH.to(hidden.dtype), (0, room))


def _note(
    context: Any, left_BTG: Tensor, left_hidden_BTG: Tensor, right_BTE: Tensor, hidden: Tensor
) -> None:
    weight_GE, weight_GH, *biases = context.parameters
    note = context.watch.note
    note(weight_GE, Outer(left_BTG, right_BTE))
    note(weight_GH, Outer(left_hidden_BTG, hidden[:-1].transpose(0, 1).contiguous()))
    for bias, left in zip(biases, (left_BTG, left_hidden_BTG), strict=False):
        note(bias, Outer(left))


def _to_input(context: Any, left_BTG: Tensor, own_GE: Tensor) -> Tensor | None:
    if not context.needs_input_grad[1]:
        return None
    return (left_BTG @ own_GE)[..., : context.num_inputs].to(context.input_dtype)


def _steps(like: Tensor) -> Any:
    """What a step does to its gates: one kernel on a GPU, torch's operations elsewhere."""
    if like.device.type == "cuda":
        from tightlip.privacy import kernels

        return kernels.Steps
    return Steps


class Steps:
    """A step's arithmetic after the matrix products; gates are left activated in their place."""

    @staticmethod
    def lstm(gates_BG: Tensor, c_BH: Tensor, c_out_BH: Tensor, h_out_BH: Tensor) -> None:
        size = c_BH.shape[1]
        gates_BG[:, : 2 * size].sigmoid_()
        gates_BG[:, 2 * size : 3 * size].tanh_()
        gates_BG[:, 3 * size :].sigmoid_()
        i, f, g, o = gates_BG.chunk(4, 1)
        torch.mul(f, c_BH, out=c_out_BH)
        c_out_BH.addcmul_(i, g)
        torch.tanh(c_out_BH, out=h_out_BH).mul_(o)

    @staticmethod
    def lstm_slopes(gates_TBG: Tensor, cells: Tensor) -> Parts:
        """What each gate's gradient is to that of its cell (the last gate's: to that of the
        output), for all steps at once; the output's to the cell's; and the forget gates."""
        i, f, g, o = gates_TBG.chunk(4, 2)
        tanh_c = cells[1:].tanh()
        slopes_TBG = torch.empty_like(gates_TBG)
        of_i, of_f, of_g, of_o = slopes_TBG.chunk(4, 2)
        torch.mul(i, 1 - i, out=of_i).mul_(g)
        torch.mul(f, 1 - f, out=of_f).mul_(cells[:-1])
        torch.mul(g, -g, out=of_g).add_(1).mul_(i)
        torch.mul(o, 1 - o, out=of_o).mul_(tanh_c)
        return slopes_TBG, tanh_c.square_().neg_().add_(1).mul_(o), f

    @staticmethod
    def lstm_back(slopes: Parts, t: int, dh_BH: Tensor, dc_BH: Tensor, out_BG: Tensor) -> None:
        slopes_TBG, reach_TBH, forget_TBH = slopes
        size = dc_BH.shape[1]
        dc_BH.addcmul_(dh_BH, reach_TBH[t])
        first = slopes_TBG[t][:, : 3 * size].unflatten(1, (3, size))
        torch.mul(first, dc_BH[:, None], out=out_BG[:, : 3 * size].unflatten(1, (3, size)))
        torch.mul(slopes_TBG[t][:, 3 * size :], dh_BH, out=out_BG[:, 3 * size :])
        dc_BH.mul_(forget_TBH[t])

    @staticmethod
    def gru(
        gates_BG: Tensor, inner_BG: Tensor, h_BH: Tensor, h_out_BH: Tensor, new_BH: Tensor
    ) -> None:
        size = h_BH.shape[1]
        both = gates_BG[:, : 2 * size]
        both.add_(inner_BG[:, : 2 * size]).sigmoid_()
        r, z, n = gates_BG.chunk(3, 1)
        new_BH.copy_(inner_BG[:, 2 * size :])
        n.addcmul_(r, new_BH).tanh_()
        torch.sub(h_BH, n, out=h_out_BH).mul_(z).add_(n)

    @staticmethod
    def gru_slopes(gates_TBG: Tensor, news_TBH: Tensor, hidden: Tensor) -> Parts:
        """What each gate's gradient is to that of the output, on the input's side and on the
        hidden side, for all steps at once; and the update gates."""
        r, z, n = gates_TBG.chunk(3, 2)
        slopes_TBG = torch.empty_like(gates_TBG)
        of_r, of_z, of_n = slopes_TBG.chunk(3, 2)
        torch.mul(n, -n, out=of_n).add_(1).mul_(1 - z)
        torch.mul(r, 1 - r, out=of_r).mul_(news_TBH).mul_(of_n)
        torch.mul(z, 1 - z, out=of_z).mul_(hidden[:-1] - n)
        on_hidden_TBG = slopes_TBG.clone()
        on_hidden_TBG.chunk(3, 2)[2].mul_(r)
        return slopes_TBG, on_hidden_TBG, z

    @staticmethod
    def gru_back(
        slopes: Parts, t: int, dh_BH: Tensor, out_BG: Tensor, out_hidden_BG: Tensor, kept_BH: Tensor
    ) -> None:
        slopes_TBG, on_hidden_TBG, update_TBH = slopes
        by_gate = (3, dh_BH.shape[1])
        dh_B1H = dh_BH[:, None]
        torch.mul(slopes_TBG[t].unflatten(1, by_gate), dh_B1H, out=out_BG.unflatten(1, by_gate))
        torch.mul(
            on_hidden_TBG[t].unflatten(1, by_gate), dh_B1H, out=out_hidden_BG.unflatten(1, by_gate)
        )
        torch.mul(dh_BH, update_TBH[t], out=kept_BH)
