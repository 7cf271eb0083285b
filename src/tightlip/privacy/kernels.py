"""Triton kernels for what would otherwise be many small operations, or many passes over memory.

Imported on a GPU only. Shapes: B rows, H hidden units, N positions, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Parts = tuple[Tensor, ...]

BLOCK = 256


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1


@triton.jit
def _lstm(gates, c, c_out, h_out, size, room, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    first = gates + (at // size) * (4 * size) + at % size
    i = _sigmoid(tl.load(first, inside, 0).to(tl.float32))
    f = _sigmoid(tl.load(first + size, inside, 0).to(tl.float32))
    g = _tanh(tl.load(first + 2 * size, inside, 0).to(tl.float32))
    o = _sigmoid(tl.load(first + 3 * size, inside, 0).to(tl.float32))
    cell = f * tl.load(c + at, inside, 0).to(tl.float32) + i * g
    tl.store(first, i, inside)
    tl.store(first + size, f, inside)
    tl.store(first + 2 * size, g, inside)
    tl.store(first + 3 * size, o, inside)
    tl.store(c_out + at, cell, inside)
    tl.store(h_out + (at // size) * room + at % size, o * _tanh(cell), inside)


@triton.jit
def _lstm_back(gates, c, c_out, dh, dc, out, size, room, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    offset = (at // size) * (4 * size) + at % size
    first = gates + offset
    i = tl.load(first, inside, 0).to(tl.float32)
    f = tl.load(first + size, inside, 0).to(tl.float32)
    g = tl.load(first + 2 * size, inside, 0).to(tl.float32)
    o = tl.load(first + 3 * size, inside, 0).to(tl.float32)
    tanh_c = _tanh(tl.load(c_out + at, inside, 0).to(tl.float32))
    above = tl.load(dh + (at // size) * room + at % size, inside, 0).to(tl.float32)
    cell = tl.load(dc + at, inside, 0).to(tl.float32) + above * o * (1 - tanh_c * tanh_c)
    before = tl.load(c + at, inside, 0).to(tl.float32)
    out = out + offset
    tl.store(out, cell * g * i * (1 - i), inside)
    tl.store(out + size, cell * before * f * (1 - f), inside)
    tl.store(out + 2 * size, cell * i * (1 - g * g), inside)
    tl.store(out + 3 * size, above * tanh_c * o * (1 - o), inside)
    tl.store(dc + at, cell * f, inside)


@triton.jit
def _gru(gates, inner, h, h_out, new, size, room, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    offset = (at // size) * (3 * size) + at % size
    first, own = gates + offset, inner + offset
    r = _sigmoid((tl.load(first, inside, 0) + tl.load(own, inside, 0)).to(tl.float32))
    z = _sigmoid((tl.load(first + size, inside, 0) + tl.load(own + size, inside, 0)).to(tl.float32))
    hidden = tl.load(own + 2 * size, inside, 0)
    n = _tanh(tl.load(first + 2 * size, inside, 0).to(tl.float32) + r * hidden.to(tl.float32))
    state = (at // size) * room + at % size
    before = tl.load(h + state, inside, 0).to(tl.float32)
    tl.store(first, r, inside)
    tl.store(first + size, z, inside)
    tl.store(first + 2 * size, n, inside)
    tl.store(new + at, hidden, inside)
    tl.store(h_out + state, n + z * (before - n), inside)


@triton.jit
def _gru_back(gates, new, h, dh, out, out_hidden, kept, size, room, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    offset = (at // size) * (3 * size) + at % size
    first = gates + offset
    r = tl.load(first, inside, 0).to(tl.float32)
    z = tl.load(first + size, inside, 0).to(tl.float32)
    n = tl.load(first + 2 * size, inside, 0).to(tl.float32)
    state = (at // size) * room + at % size
    above = tl.load(dh + state, inside, 0).to(tl.float32)
    before = tl.load(h + state, inside, 0).to(tl.float32)
    dn = above * (1 - z) * (1 - n * n)
    dr = dn * tl.load(new + at, inside, 0).to(tl.float32) * r * (1 - r)
    dz = above * (before - n) * z * (1 - z)
    tl.store(out + offset, dr, inside)
    tl.store(out + offset + size, dz, inside)
    tl.store(out + offset + 2 * size, dn, inside)
    tl.store(out_hidden + offset, dr, inside)
    tl.store(out_hidden + offset + size, dz, inside)
    tl.store(out_hidden + offset + 2 * size, dn * r, inside)
    tl.store(kept + state, above * z, inside)


class Steps:
    """A recurrent step's arithmetic after the matrix products, one kernel each."""

    @staticmethod
    def lstm(gates_BG: Tensor, c_BH: Tensor, c_out_BH: Tensor, h_out_BH: Tensor) -> None:
        _over(_lstm, 4, h_out_BH, gates_BG, c_BH, c_out_BH, h_out_BH)

    @staticmethod
    def lstm_slopes(gates_TBG: Tensor, cells: Tensor) -> Parts:
        """A kernel works them out on the way."""
        return gates_TBG, cells

    @staticmethod
    def lstm_back(slopes: Parts, t: int, dh_BH: Tensor, dc_BH: Tensor, out_BG: Tensor) -> None:
        gates_TBG, cells = slopes
        _over(_lstm_back, 4, dh_BH, gates_TBG[t], cells[t], cells[t + 1], dh_BH, dc_BH, out_BG)

    @staticmethod
    def gru(
        gates_BG: Tensor, inner_BG: Tensor, h_BH: Tensor, h_out_BH: Tensor, new_BH: Tensor
    ) -> None:
        _over(_gru, 3, h_BH, gates_BG, inner_BG, h_BH, h_out_BH, new_BH)

    @staticmethod
    def gru_slopes(gates_TBG: Tensor, news_TBH: Tensor, hidden: Tensor) -> Parts:
        return gates_TBG, news_TBH, hidden

    @staticmethod
    def gru_back(
        slopes: Parts, t: int, dh_BH: Tensor, out_BG: Tensor, out_hidden_BG: Tensor, kept_BH: Tensor
    ) -> None:
        gates_TBG, news_TBH, hidden = slopes
        states = (news_TBH[t], hidden[t], dh_BH, out_BG, out_hidden_BG, kept_BH)
        _over(_gru_back, 3, dh_BH, gates_TBG[t], *states)


def _over(kernel: Any, num_gates: int, state_BH: Tensor, gates_BG: Tensor, *others: Tensor) -> None:
    """One lane for each hidden unit of each row; states may have room beyond their size."""
    assert all(tensor.is_contiguous() for tensor in (gates_BG, *others))
    size = gates_BG.shape[1] // num_gates
    total = len(gates_BG) * size
    kernel[(triton.cdiv(total, BLOCK),)](
        gates_BG, *others, size, state_BH.shape[1], total, BLOCK=BLOCK
    )


@triton.jit
def _log_sums(logits, targets, log_sums, at_target, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + lanes
        x = tl.load(logits + at, at < width, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A lane that has seen only -inf adds nothing, rather than exp(-inf + inf).
        moved = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - moved) + tl.exp(x - moved)
        # A maximum would lose a NaN; the sum must not.
        total = tl.where(x != x, x, total)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - highest), 0)
    tl.store(log_sums + row, tl.log(total) + highest)
    tl.store(at_target + row, tl.load(logits + tl.load(targets + row)).to(tl.float32))


@triton.jit
def _logit_gradient(
    logits, targets, log_sums, weights, out, width, room, stride, out_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weights + row)
    x = tl.load(logits + row * stride + at, at < width, 0).to(tl.float32)
    share = tl.exp(x - tl.load(log_sums + row))
    share = tl.where(at == tl.load(targets + row), share - 1, share)
    back = tl.where((weight != 0) & (at < width), share * weight, 0.0)
    tl.store(out + row * out_stride + at, back, at < room)


# Operations of their own, so that compiled passes have them too: the compiler makes more passes over
# the logits.
@torch.library.custom_op("tightlip::log_sums", mutates_args=())
def log_sums(logits_NV: Tensor, targets_N: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The log of the summed exponentials of each row's first `width` logits, and the logit at its
    target, in one reading."""
    assert logits_NV.stride(1) == 1
    sums_N = torch.empty(len(logits_NV), device=logits_NV.device)
    at_target_N = torch.empty_like(sums_N)
    tensors = (logits_NV, targets_N, sums_N, at_target_N)
    _log_sums[(len(logits_NV),)](*tensors, width, logits_NV.stride(0), BLOCK=2048, num_warps=8)
    return sums_N, at_target_N


@log_sums.register_fake
def _(logits_NV: Tensor, targets_N: Tensor, width: int) -> tuple[Tensor, Tensor]:
    sums_N = logits_NV.new_empty(len(logits_NV), dtype=torch.float32)
    return sums_N, torch.empty_like(sums_N)


@torch.library.custom_op("tightlip::logit_gradient", mutates_args=())
def logit_gradient(
    logits_NV: Tensor, targets_N: Tensor, log_sums_N: Tensor, weights_N: Tensor, width: int
) -> Tensor:
    """weight · (softmax − target), in the logits' kind of number; 0 beyond `width`."""
    out_NV = torch.empty_like(logits_NV)
    logit_gradient_into(out_NV, logits_NV, targets_N, log_sums_N, weights_N, width)
    return out_NV


@logit_gradient.register_fake
def _(
    logits_NV: Tensor, targets_N: Tensor, log_sums_N: Tensor, weights_N: Tensor, width: int
) -> Tensor:
    return torch.empty_like(logits_NV)


def logit_gradient_into(
    out_NV: Tensor,
    logits_NV: Tensor,
    targets_N: Tensor,
    log_sums_N: Tensor,
    weights_N: Tensor,
    width: int,
) -> None:
    """The same where there is room, perhaps the logits' own."""
    assert logits_NV.stride(1) == 1
    tensors = (logits_NV, targets_N, log_sums_N, weights_N, out_NV)
    room = out_NV.shape[1]
    shape = (width, room, logits_NV.stride(0), out_NV.stride(0))
    grid = (len(logits_NV), triton.cdiv(room, 4096))
    _logit_gradient[grid](*tensors, *shape, BLOCK=4096, num_warps=8)


@triton.jit
def _scaled_rows(values, factors, out, row_size, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    factor = tl.load(factors + at // row_size, inside, 0)
    value = tl.load(values + at, inside, 0).to(tl.float32)
    tl.store(out + at, tl.where(factor > 0, value * factor, 0.0), inside)


def scaled_rows(values_BX: Tensor, factors_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Each row times its factor; a row whose factor is 0 becomes 0, whatever it holds."""
    values_BX = values_BX.contiguous()
    out_BX = torch.empty_like(values_BX, dtype=dtype)
    total = values_BX.numel()
    _scaled_rows[(triton.cdiv(total, 4096),)](
        values_BX,
        factors_B.float(),
        out_BX,
        total // len(values_BX),
        total,
        BLOCK=4096,
        num_warps=8,
    )
    return out_BX
