"""A matrix product of each unit's tokens, rounded to whole numbers and added as such.

Imported on a GPU only. Shapes: U units, S tokens of a unit, P and D the parameter's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

ROWS, COLUMNS, TOKENS = 128, 128, 64


@triton.jit
def _exact_product(
    left, right, scales, out, num_units, num_tokens, rows, columns, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, FLAT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    s = tl.arange(0, TOKENS)
    left += s[:, None] * rows + p[None, :]
    right += s[:, None] * columns + d[None, :]
    is_row, is_column = (p < rows)[None, :], (d < columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for unit in tl.range(0, num_units, flatten=FLAT):
        own = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, num_tokens, TOKENS):
            at = (unit * num_tokens + start).to(tl.int64)
            is_token = (start + s < num_tokens)[:, None]
            left_SP = tl.load(left + at * rows, is_token & is_row, 0.0)
            right_SD = tl.load(right + at * columns, is_token & is_column, 0.0)
            own = tl.dot(tl.trans(left_SP), right_SD, own, input_precision="ieee")
        scale = tl.load(scales + unit)
        # A unit of scale 0 is wiped out, whatever it holds.
        steps = libdevice.rint(tl.where(scale > 0, own * scale, 0.0))
        if WRAPS:
            # One use of a tied weight may be long where another cancels it: wrapped around to 32
            # bits, exactly, in place of stopping at their largest number.
            steps -= 4294967296.0 * libdevice.rint(steps * 2.3283064365386963e-10)
            steps = tl.where(steps >= 2147483648.0, -2147483648.0, steps)
        total += steps.to(tl.int32)
    where = out + p[:, None].to(tl.int64) * columns + d[None, :]
    tl.store(where, total, (p < rows)[:, None] & is_column)


@torch.library.custom_op("tightlip::exact_product", mutates_args=())
def exact_product(left_USP: Tensor, right_USD: Tensor, scales_U: Tensor, wraps: bool) -> Tensor:
    """Σ over units of round(scale · Σ over tokens of left ⊗ right), [P, D] whole numbers; those that 32
    bits do not hold wrap around where it `wraps`.

    A unit's tokens are added up in float32, by tensor cores where they are bfloat16. Written by
    hand: a library's product would add up all units' tokens at once.
    """
    left_USP, right_USD = left_USP.contiguous(), right_USD.contiguous()
    num_units, num_tokens, rows = left_USP.shape
    columns = right_USD.shape[2]
    out_PD = torch.empty(rows, columns, dtype=torch.int32, device=left_USP.device)
    _exact_product[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))](
        *(left_USP, right_USD, scales_U.float(), out_PD, num_units, num_tokens, rows, columns),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TOKENS=TOKENS if left_USP.dtype != torch.float32 else 16,
        # One loop of both is loaded ahead better, where a unit has more than one piece.
        FLAT=num_tokens > TOKENS,
        WRAPS=wraps,
        num_warps=8,
        num_stages=4,
    )
    return out_PD


@exact_product.register_fake
def _(left_USP: Tensor, right_USD: Tensor, scales_U: Tensor, wraps: bool) -> Tensor:
    return left_USP.new_empty(left_USP.shape[2], right_USD.shape[2], dtype=torch.int32)
