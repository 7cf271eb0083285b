"""The sum over units of clipped gradients, one matrix product per use.

Only the scaled side of a product is rounded, and `rounding` bounds what that does. Everything else
is scaled in float32.
Shapes: B rows, T tokens of a row, P and D the parameter's.
"""

from collections.abc import Container

import torch
from torch import Tensor

from tightlip.privacy.rounding import full_precision, scales_left
from tightlip.privacy.uses import Lookup, Outer, Use, Whole, fp32_product


class Scaled:
    """Uses scaled by a factor per row, and summed over all rows; without factors, just summed.

    A row whose unit is not finite has factor 0 and is wiped out first: 0 · NaN is NaN.
    `finite` says that a tensor cannot hold anything else, by `id`.
    """

    def __init__(self, factors_B: Tensor | None, *, wipe: bool, finite: Container[int]) -> None:
        self.factors_B, self.wipe, self.finite = factors_B, wipe, finite
        self._scaled: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._clean: dict[int, tuple[Tensor, Tensor]] = {}

    def sum(self, uses: list[Use], like: Tensor) -> Tensor:
        """Σ over rows of factor · gradient, in `like`'s shape and in float32 or better."""
        total: Tensor | None = None
        for use in uses:
            added = self._sum(use, like)
            total = added if total is None else total + added
        assert total is not None
        return total

    def _sum(self, use: Use, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if isinstance(use, Whole):
            return self.scaled(use.gradient_BX, dtype).sum(0, dtype=dtype).reshape(like.shape)
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
        with full_precision():
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
        known = self._clean.get(id(values_BX))
        if known is None:
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
