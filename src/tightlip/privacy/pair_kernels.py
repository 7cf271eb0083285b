"""Triton kernels for squared norms: sums over the pairs of a unit's tokens.

Imported on a GPU only. Shapes: N weights, U units, S tokens of a unit, P and D a weight's sides.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightlip.privacy.rounding import Roundings

PAIR_ROWS = 16
TILE, DEPTH = 128, 64  # tokens of a program's pairs, and numbers of a token read at a time
MOST_TOGETHER = 32  # weights in one launch: each is two arguments of a kernel


@triton.jit
def _pair_parts(
    first, second, parts, size, BOTH: tl.constexpr, ROUND_FIRST: tl.constexpr,
    ROUND_SECOND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of some rows of one unit's pairs: the four sums that `_pair_totals` adds up."""
    unit = tl.program_id(0).to(tl.int64)
    first += unit * size * size
    second += unit * size * size
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < size
    own_first = tl.load(first + row * (size + 1), is_row, 0)
    own_second = tl.load(second + row * (size + 1), is_row, 0)
    length = tl.sum(tl.sqrt(own_first), 0)
    if BOTH:
        is_short = tl.maximum(own_first, own_second) < 1e18  # see rounding.TOO_LONG
        length = tl.sum(tl.where(is_short, tl.sqrt(own_first * own_second), float("inf")), 0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    by_first = tl.zeros((ROWS, COLUMNS), tl.float32)
    by_second = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < size
        inside = is_row[:, None] & is_column[None, :]
        at = row[:, None] * size + column[None, :]
        one = tl.load(first + at, inside, 0)
        if BOTH:
            other = tl.load(second + at, inside, 0)
            if ROUND_FIRST:
                across = tl.sqrt(tl.load(first + column * (size + 1), is_column, 0))
                by_first += tl.sqrt(own_first)[:, None] * across[None, :] * tl.abs(other)
            if ROUND_SECOND:
                across = tl.sqrt(tl.load(second + column * (size + 1), is_column, 0))
                by_second += tl.sqrt(own_second)[:, None] * across[None, :] * tl.abs(one)
            total += one * other
        else:
            total += one
    out = parts + (unit * tl.num_programs(1) + tl.program_id(1)) * 4
    tl.store(out, tl.sum(total))
    tl.store(out + 1, length)
    tl.store(out + 2, tl.sum(by_first))
    tl.store(out + 3, tl.sum(by_second))


@triton.jit
def _pair_totals(
    parts, out, num_units, num_parts, of_first, of_second, per_length, per_square,
    PARTS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    total, length, by_first, by_second = 0.0, 0.0, 0.0, 0.0
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        at = parts + (unit * num_parts + part) * 4
        total += tl.sum(tl.load(at, part < num_parts, 0), 0)
        length += tl.sum(tl.load(at + 1, part < num_parts, 0), 0)
        by_first += tl.sum(tl.load(at + 2, part < num_parts, 0), 0)
        by_second += tl.sum(tl.load(at + 3, part < num_parts, 0), 0)
    allowed = per_square * length * length
    rounded = (of_first * of_second + per_length) * length
    rounded += of_first * tl.sqrt(by_first + allowed) + of_second * tl.sqrt(by_second + allowed)
    tl.store(out + unit, total + allowed)
    tl.store(out + num_units + unit, rounded)


def pair_sums(
    first_USS: Tensor, second_USS: Tensor | None, rounds: Roundings
) -> tuple[Tensor, Tensor]:
    """Σ first · second over the pairs of each unit, with the allowance of `norms._of_pairs`, and
    what rounding may add, as in `rounding.rounded_share`."""
    out_2U = _pair_sums(first_USS, second_USS, [*rounds])
    return out_2U[0], out_2U[1]


# An operation of its own, so that compiled passes have it too: what the compiler made of the same
# sums took several passes over the matrices.
@torch.library.custom_op("tightlip::pair_sums", mutates_args=())
def _pair_sums(first_USS: Tensor, second_USS: Tensor | None, rounds: list[float]) -> Tensor:
    first_USS = first_USS.contiguous()
    second = first_USS if second_USS is None else second_USS.contiguous()
    num_units, size = first_USS.shape[:2]
    num_parts = triton.cdiv(size, PAIR_ROWS)
    parts = torch.empty(num_units, num_parts, 4, device=first_USS.device)
    out_2U = torch.empty(2, num_units, device=first_USS.device)
    _pair_parts[(num_units, num_parts)](
        *(first_USS, second, parts, size),
        BOTH=second_USS is not None,
        ROUND_FIRST=rounds[0] > 0,
        ROUND_SECOND=rounds[1] > 0,
        ROWS=PAIR_ROWS,
        COLUMNS=128,
    )
    _pair_totals[(num_units,)](parts, out_2U, num_units, num_parts, *rounds, PARTS=16)
    return out_2U


@_pair_sums.register_fake
def _(first_USS: Tensor, second_USS: Tensor | None, rounds: list[float]) -> Tensor:
    return first_USS.new_empty(2, len(first_USS))


@triton.jit
def _picked(pointers, which, NUM: tl.constexpr):
    """The address of one of several tensors of bfloat16, whose rows begin at 16 bytes."""
    found = pointers[0].to(tl.uint64)
    for number in tl.static_range(1, NUM):
        found = tl.where(which == number, pointers[number].to(tl.uint64), found)
    return tl.multiple_of(found.to(tl.pointer_type(tl.bfloat16)), 16)


@triton.jit
def _dot_products(
    values, stride, width, row, column, size,
    SAME: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Of some tokens of a unit with some others, or the same ones."""
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, width, DEPTH):
        at = start + tl.arange(0, DEPTH)
        one_at = values + row[:, None] * stride + at[None, :]
        other_at = values + column[:, None] * stride + at[None, :]
        if EVEN:
            one = tl.load(one_at)
            other = one if SAME else tl.load(other_at)
        else:
            inside = at[None, :] < width
            one = tl.load(one_at, inside & (row[:, None] < size), 0)
            other = one if SAME else tl.load(other_at, inside & (column[:, None] < size), 0)
        total = tl.dot(one, tl.trans(other), total)
    return total


@triton.jit
def _outer_parts(
    lefts, rights, roots, parts, left_parts, num_units, size,
    left_stride, left_width, right_stride, right_width,
    NUM: tl.constexpr, DIAGONAL: tl.constexpr, OWN_LEFT: tl.constexpr, EVEN: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Of some pairs of tokens of one unit, for one weight: the sums that `_pair_totals` adds up.

    Programs on the diagonal go first and leave each token's length on the side that is rounded, which
    the others need. Pairs below the diagonal count twice, for those above it.
    """
    num_blocks = tl.cdiv(size, TILE)
    num_tiles = num_blocks * (num_blocks + 1) // 2
    which, unit, tile = tl.program_id(2), tl.program_id(1).to(tl.int64), tl.program_id(0)
    row_block, column_block = tile, tile
    if not DIAGONAL:
        row_block = ((1.0 + tl.sqrt_rn((8 * tile + 1).to(tl.float32))) / 2).to(tl.int32)
        column_block = tile - row_block * (row_block - 1) // 2
        tile += num_blocks
    row = row_block * TILE + tl.arange(0, TILE)
    column = column_block * TILE + tl.arange(0, TILE)
    is_same = row[:, None] == column[None, :]
    right = _picked(rights, which, NUM) + unit * size * right_stride
    by_right = _dot_products(right, right_stride, right_width, row, column, size, DIAGONAL, EVEN, TILE, DEPTH)  # fmt: skip
    left = _picked(lefts, which, NUM) + unit * size * left_stride
    by_left = _dot_products(left, left_stride, left_width, row, column, size, DIAGONAL, EVEN, TILE, DEPTH)  # fmt: skip
    own, other = by_right, by_left
    if OWN_LEFT:
        own, other = by_left, by_right
    line = which * num_units + unit  # of 64 bits, as the unit is
    own_roots = roots + line * num_blocks * TILE
    out = parts + (line * num_tiles + tile) * 4
    left_out = left_parts + (line * num_tiles + tile) * 4
    times = 1.0 if DIAGONAL else 2.0
    if DIAGONAL:
        of_left = tl.sqrt(tl.sum(tl.where(is_same, by_left, 0.0), 1))
        of_right = tl.sqrt(tl.sum(tl.where(is_same, by_right, 0.0), 1))
        own_root = of_left if OWN_LEFT else of_right
        tl.store(own_roots + row, own_root)
        # The same numbers for the columns, which are laid out otherwise.
        across = tl.sqrt(tl.sum(tl.where(is_same, own, 0.0), 0))
        is_short = tl.maximum(of_left, of_right) < 1e9
        tl.store(out + 1, tl.sum(tl.where(is_short, of_left * of_right, float("inf")), 0))
        tl.store(left_out + 1, tl.sum(of_left, 0))
    else:
        own_root, across = tl.load(own_roots + row), tl.load(own_roots + column)
        tl.store(out + 1, 0.0)
        tl.store(left_out + 1, 0.0)
    rounded = times * tl.sum(tl.sum(own_root[:, None] * across[None, :] * tl.abs(other), 1), 0)
    tl.store(out, times * tl.sum(tl.sum(by_left * by_right, 1), 0))
    tl.store(out + 2, rounded if OWN_LEFT else 0.0)
    tl.store(out + 3, 0.0 if OWN_LEFT else rounded)
    tl.store(left_out, times * tl.sum(tl.sum(by_left, 1), 0))
    tl.store(left_out + 2, 0.0)
    tl.store(left_out + 3, 0.0)


def outer_norms(
    lefts: list[Tensor], rights: list[Tensor], of_both: Roundings, of_left: Roundings
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """For weights of one shape, [U, S, P] and [U, S, D] in bfloat16 each: what `pair_sums` gives of
    their two Gram matrices, and of the left ones alone, in three quarters of the work and without
    writing any."""
    found: tuple[list, list] = ([], [])
    for start in range(0, len(lefts), MOST_TOGETHER):
        some = slice(start, start + MOST_TOGETHER)
        both_22NU = _outer_norms(lefts[some], rights[some], [*of_both], [*of_left])
        for mine, each_2NU in zip(found, both_22NU, strict=True):
            mine.extend(zip(*each_2NU, strict=True))
    return found


@torch.library.custom_op("tightlip::outer_norms", mutates_args=())
def _outer_norms(
    lefts: list[Tensor], rights: list[Tensor], of_both: list[float], of_left: list[float]
) -> Tensor:
    lefts, rights = _in_rows(lefts), _in_rows(rights)
    (num_units, size, left_width), right_width = lefts[0].shape, rights[0].shape[2]
    left_stride, right_stride = lefts[0].stride(1), rights[0].stride(1)
    num_blocks, like = triton.cdiv(size, TILE), {"device": lefts[0].device}
    lines, num_tiles = len(lefts) * num_units, num_blocks * (num_blocks + 1) // 2
    roots = torch.empty(lines, num_blocks * TILE, **like)
    parts, left_parts = (torch.empty(lines, num_tiles, 4, **like) for _ in range(2))
    out_22NU = torch.empty(2, 2, len(lefts), num_units, **like)
    for is_diagonal, tiles in ((True, num_blocks), (False, num_tiles - num_blocks)):
        if tiles:
            _outer_parts[(tiles, num_units, len(rights))](
                *(tuple(lefts), tuple(rights), roots, parts, left_parts, num_units, size),
                *(left_stride, left_width, right_stride, right_width),
                NUM=len(rights),
                DIAGONAL=is_diagonal,
                OWN_LEFT=of_both[0] > 0,  # the side that is rounded
                EVEN=size % TILE == 0 and left_width % DEPTH == 0 and right_width % DEPTH == 0,
                TILE=TILE,
                DEPTH=DEPTH,
                num_warps=8,
                num_stages=4,
            )
    for each, rounds, out in ((parts, of_both, out_22NU[0]), (left_parts, of_left, out_22NU[1])):
        _pair_totals[(lines,)](each, out, lines, num_tiles, *rounds, PARTS=16)
    return out_22NU


@_outer_norms.register_fake
def _(
    lefts: list[Tensor], rights: list[Tensor], of_both: list[float], of_left: list[float]
) -> Tensor:
    return lefts[0].new_empty(2, 2, len(lefts), len(lefts[0]), dtype=torch.float32)


def _in_rows(values: list[Tensor]) -> list[Tensor]:
    """As they are where all have tokens at equal distances, at multiples of 16 bytes."""
    units, tokens, numbers = values[0].stride()
    is_even = numbers == 1 and tokens % 8 == 0 and units == tokens * values[0].shape[1]
    alike = all(each.stride() == values[0].stride() for each in values)
    if is_even and alike and all(each.data_ptr() % 16 == 0 for each in values):
        return values
    missing = -values[0].shape[2] % 8
    return [torch.nn.functional.pad(each, (0, missing)).contiguous() for each in values]
