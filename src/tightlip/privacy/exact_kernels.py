"""A matrix product of each unit's tokens, rounded to whole numbers and added as such.

Imported on a GPU only. Shapes: U units, S tokens of a unit, P and D the parameter's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, TOKENS = 128, 128, 64


@triton.jit
def _exact_product(
    left,
    right,
    scales,
    out,
    num_units,
    num_tokens,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    s = tl.arange(0, TOKENS)
    own = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    pieces = tl.cdiv(num_tokens, TOKENS)
    for piece in range(num_units * pieces):
        unit = piece // pieces
        token = (piece % pieces) * TOKENS + s
        at = (unit * num_tokens + token).to(tl.int64)
        is_token = token < num_tokens
        left_SP = tl.load(
            left + at[:, None] * rows + p[None, :], is_token[:, None] & (p < rows)[None, :], 0.0
        )
        right_SD = tl.load(
            right + at[:, None] * columns + d[None, :],
            is_token[:, None] & (d < columns)[None, :],
            0.0,
        )
        own = tl.dot(tl.trans(left_SP), right_SD, own, input_precision="ieee")
        if piece % pieces == pieces - 1:
            scale = tl.load(scales + unit)
            own = tl.where(scale > 0, own * scale, 0.0)
            total += tl.extra.cuda.libdevice.rint(own).to(tl.int32)
            own = tl.zeros((ROWS, COLUMNS), tl.float32)
    where = out + p[:, None].to(tl.int64) * columns + d[None, :]
    tl.store(where, total, (p < rows)[:, None] & (d < columns)[None, :])


@torch.library.custom_op("tightlip::exact_product", mutates_args=())
def exact_product(left_USP: Tensor, right_USD: Tensor, scales_U: Tensor) -> Tensor:
    """Σ over units of round(scale · Σ over tokens of left ⊗ right), [P, D] whole numbers.

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
        num_warps=8,
        num_stages=3,
    )
    return out_PD


@exact_product.register_fake
def _(left_USP: Tensor, right_USD: Tensor, scales_U: Tensor) -> Tensor:
    return left_USP.new_empty(left_USP.shape[2], right_USD.shape[2], dtype=torch.int32)
