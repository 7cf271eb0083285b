"""How far a unit's share of the sum may be from what its norm was taken of.

The norm is that of Σ left_t ⊗ right_t, of numbers as they were noted. One side is then multiplied
by the unit's factor and rounded, token by token, and a GPU's tf32 rounds both sides once more.
Where a unit's tokens cancel, that is not small beside its norm: with made-up tokens in bfloat16 a
unit moved the sum by 1.5 times the bound. What rounding adds is itself a sum of outer products,
so the Gram matrices of the norm bound it too, and the bound is taken off the unit's room.
Shapes: U units, S tokens of a unit, N pieces of L tokens.
"""

from collections.abc import Container
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightlip.core.devices import products_in
from tightlip.privacy.layers import Layout, Lookup, Outer, Use, Whole, fp32_product, wide, zeros_for

# A number is off by at most so much of itself: half a unit in bfloat16's last place; tf32 cuts off.
BF16, TF32 = 2.0**-8, 2.0**-10
# What float32 may do to factors, norms and sums without any token cancelling another.
SLACK = {torch.float64: 2.0**-40}
_SLACK = 2.0**-19
AT_ONCE = 4096  # numbers of a dot product: the more, the more of its end may be lost
PIECE = 32  # tokens at a time where there is no Gram matrix of all
# Beside a token's side of this length the other may be so short that its square is 0 in float32, and
# their product would count for nothing: such a unit counts nothing. `pair_kernels` has it too.
TOO_LONG = 1e9


def slack(dtype: torch.dtype) -> float:
    return SLACK.get(dtype, _SLACK)


def products_in_tf32(device: torch.device) -> bool:
    matmul: Any = torch.backends.cuda.matmul
    return device.type == "cuda" and matmul.fp32_precision not in ("none", "ieee")


def scales_left(use: Outer) -> bool:
    """Which side the factors multiply: the narrower one, as the output layer's other side is as
    wide as the vocabulary."""
    assert use.right_BTD is not None
    return use.left_BTP.shape[2] <= use.right_BTD.shape[2]


class Products(NamedTuple):
    """How the sum will be taken: in tf32, or one unit after the other, factors last."""

    tf32: bool = False
    exact: bool = False


def roundings(use: Outer, how: Products) -> tuple[float, float]:
    """By how much of itself a number on the left, and one on the right, may be off in the sum."""
    if use.right_BTD is None or how.exact:  # summed as it is, with factors in full
        return 0.0, 0.0
    if use.left_BTP.dtype == torch.bfloat16:
        return (BF16, 0.0) if scales_left(use) else (0.0, BF16)
    if use.left_BTP.dtype == torch.float32 and how.tf32:
        return TF32, TF32
    return 0.0, 0.0


class Roundings(NamedTuple):
    """By how much of itself a number on the left and one on the right may be off in a sum, how much
    of the tokens' lengths adding them up may lose, and of the square of that sum the squared norm."""

    left: float = 0.0
    right: float = 0.0
    per_length: float = 0.0
    per_square: float = 0.0


def of_dot(size: int, like: Tensor) -> float:
    """How far a dot product of so many numbers may be off, in the product of both lengths: half a unit
    in the last place for each addition, at the very worst. Longer ones than `AT_ONCE` are added up
    in parts. Tensor cores add sixteen products at a time, and are taken to cut off."""
    size = min(size, AT_ONCE) + -(-size // AT_ONCE)
    eps = torch.finfo(wide(like)).eps
    on_tensor_cores = like.device.type == "cuda" and like.element_size() < 4
    return (size / 16 + 16) * eps if on_tensor_cores else (size / 2 + 4) * eps


def of_pairs(num_tokens: int, like: Tensor) -> float:
    """How far a sum over pairs of so many tokens may be off, in the sum of their sizes: taken in float64
    on a CPU; on a GPU many threads take some each."""
    eps = torch.finfo(wide(like)).eps
    return (num_tokens / 64 + 32) * eps if like.device.type == "cuda" else 2 * eps


def rounded_share(
    left_USS: Tensor, right_USS: Tensor, rounds: Roundings, lengths_U: Tensor
) -> Tensor:
    """The most that rounding can add to each unit's gradient, in units of the unit's factor.

    Tokens d_t off by at most u·|left_t| add Σ d_t ⊗ right_t, whose squared norm is
    Σ_s Σ_t (d_s·d_t)(right_s·right_t) ≤ u² Σ_s Σ_t |left_s||left_t||right_s·right_t|. Given are the
    Gram matrices of both sides, and Σ_t |left_t||right_t|.
    """
    of_left, of_right, per_length, per_square = rounds
    allowed_U = per_square * lengths_U.square()  # the Gram matrices are rounded themselves
    total_U = (of_left * of_right + per_length) * lengths_U
    for rounding, own_USS, other_USS in (
        (of_left, left_USS, right_USS),
        (of_right, right_USS, left_USS),
    ):
        if rounding:
            roots_US = own_USS.diagonal(dim1=1, dim2=2).sqrt()
            pairs_USS = roots_US[:, :, None] * roots_US[:, None, :] * other_USS.abs()
            total_U = total_U + rounding * (pairs_USS.sum((1, 2)) + allowed_U).sqrt()
    sides = (each.diagonal(dim1=1, dim2=2) for each in (left_USS, right_USS))
    is_short_U = (torch.maximum(*sides) < TOO_LONG**2).all(1)
    return torch.where(is_short_U, total_U, torch.inf)


def rounded_apart(use: Use, layout: Layout, part: slice, how: "Products") -> Tensor:
    """The same where a unit's gradient was written out, and what float32 may have taken from it."""
    if isinstance(use, Whole):
        rows_UMX = layout.by_unit(use.gradient_BX.flatten(1)[:, None])[part]
        return summed_in_float32(lengths(rows_UMX))
    left_USX = layout.by_unit(use.left_BTD if isinstance(use, Lookup) else use.left_BTP)[part]
    lengths_US = lengths(left_USX)
    if isinstance(use, Lookup) or use.right_BTD is None:
        return summed_in_float32(lengths_US)
    right_USX = layout.by_unit(use.right_BTD)[part]
    lengths_US = lengths_US * lengths(right_USX)
    total_U, rounds = summed_in_float32(lengths_US), roundings(use, how)
    return total_U + _in_pieces(left_USX, right_USX, rounds, lengths_US) if any(rounds) else total_U


def lengths(values_USX: Tensor) -> Tensor:
    values_USX = in_step(values_USX)
    return torch.linalg.vector_norm(values_USX, dim=2, dtype=wide(values_USX))


def summed_rows(values_UX: Tensor) -> Tensor:
    """The sum of each row, all in one order, rounded once: in float32 so many squares may lose more
    than a factor keeps free."""
    return in_step(values_UX).sum(-1, dtype=torch.float64).to(values_UX.dtype)


def in_step(values_UX: Tensor) -> Tensor:
    """Rows that all begin at a multiple of 16 bytes: one that does not, a GPU adds up in another order
    than those that do, and a norm would hang on its place."""
    return _padded(values_UX, 16) if values_UX.device.type == "cuda" else values_UX


def _padded(values_UX: Tensor, num_bytes: int) -> Tensor:
    """Zeros added to the rows, so that each begins at a multiple of so many bytes."""
    missing = -values_UX.shape[-1] % (num_bytes // values_UX.element_size())
    return torch.nn.functional.pad(values_UX, (0, missing)) if missing else values_UX


def summed_in_float32(lengths_US: Tensor) -> Tensor:
    """What float32 may lose of tokens of these lengths that it adds up, once for the norm and once
    for the sum, at the very worst."""
    return 2 * per_length(lengths_US.shape[1], lengths_US) * lengths_US.sum(1)


def per_length(num_tokens: int, like: Tensor) -> float:
    """How much of the tokens' lengths their sum can lose: 2⁻²³ for each addition in float32, and two
    for a factor. That a GPU's tensor cores add no worse is an assumption."""
    return (num_tokens + 2) * torch.finfo(wide(like)).eps


def _in_pieces(
    left_USX: Tensor, right_USX: Tensor, rounds: tuple[float, float], lengths_US: Tensor
) -> Tensor:
    """A few tokens at a time, and added up: more than all at once, and far cheaper than a Gram
    matrix of many tokens."""
    left_NLL, right_NLL = (gram(_pieces(values_USX)) for values_USX in (left_USX, right_USX))
    lengths_N = _pieces(lengths_US[..., None]).sum((1, 2))
    off = of_dot(left_USX.shape[2], left_USX) + of_dot(right_USX.shape[2], right_USX)
    how = Roundings(*rounds, per_square=off + of_pairs(PIECE, left_USX))
    shares_N = rounded_share(left_NLL, right_NLL, how, lengths_N)
    return shares_N.reshape(len(left_USX), -1).sum(1)


def _pieces(values_USX: Tensor) -> Tensor:
    missing = -values_USX.shape[1] % PIECE
    padded = torch.nn.functional.pad(values_USX, (0, 0, 0, missing))
    return padded.reshape(-1, PIECE, padded.shape[2])


def gram(values_USX: Tensor) -> Tensor:
    """The dot products of each unit's tokens with each other, as exact as `of_dot` has them."""
    if values_USX.device.type == "cpu":  # whose library multiplies what begins elsewhere otherwise
        values_USX = _padded(values_USX, 64)
    parts = [
        fp32_product(part_USX, part_USX.transpose(1, 2))
        for part_USX in values_USX.split(AT_ONCE, dim=2)
    ]
    return reduce(torch.add, parts)


class Scaled:
    """Uses scaled by a factor per row, and summed over all rows; without factors, just summed.

    A row whose unit is not finite has factor 0 and is wiped out first: 0 · NaN is NaN.
    `finite` says that a tensor cannot hold anything else, by `id`.
    """

    def __init__(self, factors_B: Tensor | None, *, wipe: bool, finite: Container[int]) -> None:
        self.factors_B, self.wipe, self.finite = factors_B, wipe, finite
        self._scaled: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._clean: dict[int, tuple[Tensor, Tensor]] = {}

    zeros = staticmethod(zeros_for)

    def sum(self, uses: list[Use], like: Tensor) -> Tensor:
        """Σ over rows of factor · gradient, in `like`'s shape and in float32 or better."""
        return reduce(torch.add, (self._sum(use, like) for use in uses))

    def _sum(self, use: Use, like: Tensor) -> Tensor:
        dtype = wide(like)
        if isinstance(use, Whole):  # used once, so that what is scaled need not be kept
            own_BX = use.gradient_BX
            own_BX = own_BX if self.factors_B is None else self._times_factors(own_BX, dtype)
            return own_BX.sum(0, dtype=dtype).reshape(like.shape)
        if isinstance(use, Lookup):
            left_ND = self.scaled(use.left_BTD, dtype).flatten(0, 1).to(dtype)
            whole = torch.zeros(like.shape, dtype=dtype, device=left_ND.device)
            return whole.index_add_(0, use.ids_BT.flatten(), left_ND)
        if use.right_BTD is None:
            return self._sum_left(use.left_BTP, like, dtype)
        rows, columns = like.shape
        return self._product(use)[:rows, :columns].contiguous()

    def _product(self, use: Outer) -> Tensor:
        left, right = use.left_BTP, use.right_BTD
        assert right is not None
        # float16 has too little room below for what is scaled down.
        kind = torch.float32 if left.dtype == torch.float16 else left.dtype
        if self.factors_B is None:
            kind = left.dtype
        if scales_left(use):
            left, right = self.scaled(left, kind), self.clean(right).to(kind)
        else:
            left, right = self.clean(left).to(kind), self.scaled(right, kind)
        return fp32_product(left.flatten(0, 1).t(), right.flatten(0, 1))

    def _sum_left(self, left_BTP: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
        known = self._scaled.get((id(left_BTP), dtype))
        if self.factors_B is None or known is not None:
            whole_BTP = left_BTP if known is None else known[1]
            return whole_BTP.sum((0, 1), dtype=dtype)[: like.numel()]
        if left_BTP.dtype == torch.float16:
            left_BTP = left_BTP.float()
        # As a product it reads the wide side once and writes nothing of its size.
        factors_N8 = _columns(self.factors_B.repeat_interleave(left_BTP.shape[1]), left_BTP.dtype)
        with products_in():
            whole_P8 = fp32_product(self.clean(left_BTP).flatten(0, 1).t(), factors_N8)
        return whole_P8[: like.numel()].sum(1)

    def scaled(self, values_BX: Tensor, dtype: torch.dtype) -> Tensor:
        """The values times their rows' factors, rounded once."""
        if self.factors_B is None:
            return values_BX
        key = (id(values_BX), dtype)
        if key not in self._scaled:
            self._scaled[key] = (values_BX, self._times_factors(values_BX, dtype))
        return self._scaled[key][1]

    def _times_factors(self, values_BX: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.factors_B is not None
        if values_BX.device.type == "cuda" and type(values_BX) is Tensor:
            from tightlip.privacy import kernels

            return kernels.scaled_rows(values_BX, self.factors_B, dtype)
        factors = self.factors_B.view(-1, *[1] * (values_BX.ndim - 1))
        times = (values_BX * factors).to(dtype)
        if self.wipe and id(values_BX) not in self.finite:
            return torch.where(factors > 0, times, 0)
        return times

    def clean(self, values_BX: Tensor) -> Tensor:
        """The values with every wiped row at zero."""
        if self.factors_B is None or not self.wipe or id(values_BX) in self.finite:
            return values_BX
        if (known := self._clean.get(id(values_BX))) is None:
            keep = (self.factors_B > 0).view(-1, *[1] * (values_BX.ndim - 1))
            known = self._clean[id(values_BX)] = (values_BX, torch.where(keep, values_BX, 0))
        return known[1]


def _columns(factors_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Eight columns, as GPUs like them, that add up to the factors to all their digits.

    Of bfloat16 it takes three. They are cut off bit by bit: a compiler that keeps float32 in its
    registers would make nothing of casting there and back.
    """
    if dtype in (torch.float32, torch.float64):
        return torch.nn.functional.pad(factors_N.to(dtype)[:, None], (0, 7))
    columns, rest_N = [], factors_N.float()
    for _ in range(3):
        columns.append((rest_N.view(torch.int32) & -65536).view(torch.float32))
        rest_N = rest_N - columns[-1]
    return torch.nn.functional.pad(torch.stack(columns, 1).to(dtype), (0, 5))
