"""The sum over units of clipped gradients, one matrix product per use.

Shapes: B rows, T tokens of a row, P and D the parameter's.
"""

from collections.abc import Container

import torch
from torch import Tensor

from tightlip.privacy.uses import Lookup, Use, Whole, fp32_product


class Scaled:
    """Uses scaled by a factor per row, and summed over all rows; without factors, just summed.

    A row whose unit is not finite has factor 0 and is wiped out first: 0 · NaN is NaN.
    `finite` says that a tensor cannot hold anything else, by `id`.
    """

    def __init__(self, factors_B: Tensor | None, *, wipe: bool, finite: Container[int]) -> None:
        self.factors_B, self.wipe, self.finite = factors_B, wipe, finite
        self._scaled: dict[int, tuple[Tensor, Tensor]] = {}
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
            return self.scaled(use.gradient_BX).sum(0, dtype=dtype).reshape(like.shape)
        if isinstance(use, Lookup):
            left_ND = self.scaled(use.left_BTD).flatten(0, 1).to(dtype)
            whole = torch.zeros(like.shape, dtype=dtype, device=left_ND.device)
            return whole.index_add_(0, use.ids_BT.flatten(), left_ND)
        if use.right_BTD is None:
            return self._sum_left(use.left_BTP, like, dtype)
        rows, columns = like.shape
        return self._product(use.left_BTP, use.right_BTD)[:rows, :columns].contiguous()

    def _product(self, left_BTP: Tensor, right_BTD: Tensor) -> Tensor:
        # Scale the narrower side: the output layer's other side is as wide as the vocabulary.
        if left_BTP.shape[2] > right_BTD.shape[2] and id(left_BTP) not in self._scaled:
            left, right = self.clean(left_BTP), self.scaled(right_BTD)
        else:
            left, right = self.scaled(left_BTP), self.clean(right_BTD)
        return fp32_product(left.flatten(0, 1).t(), right.flatten(0, 1))

    def _sum_left(self, left_BTP: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
        if self.factors_B is None or id(left_BTP) in self._scaled:
            return self.scaled(left_BTP).sum((0, 1), dtype=dtype)[: like.numel()]
        # As a product it reads the wide side once and writes nothing of its size.
        factors_N = self.factors_B.repeat_interleave(left_BTP.shape[1]).to(left_BTP.dtype)
        factors_N8 = torch.nn.functional.pad(factors_N[:, None], (0, 7))
        whole = fp32_product(self.clean(left_BTP).flatten(0, 1).t(), factors_N8)
        return whole[: like.numel(), 0].contiguous()

    def scaled(self, values_BX: Tensor) -> Tensor:
        if self.factors_B is None:
            return values_BX
        known = self._scaled.get(id(values_BX))
        if known is None:
            known = self._scaled[id(values_BX)] = (values_BX, self._times_factors(values_BX))
        return known[1]

    def _times_factors(self, values_BX: Tensor) -> Tensor:
        assert self.factors_B is not None
        if values_BX.device.type == "cuda" and type(values_BX) is Tensor:
            from tightlip.privacy import kernels

            return kernels.scaled_rows(values_BX, self.factors_B)
        factors = self.factors_B.to(values_BX.dtype).view(-1, *[1] * (values_BX.ndim - 1))
        if self.wipe and id(values_BX) not in self.finite:
            return torch.where(factors > 0, values_BX * factors, 0)
        return values_BX * factors

    def clean(self, values_BX: Tensor) -> Tensor:
        """The values with every wiped row at zero."""
        if self.factors_B is None or not self.wipe or id(values_BX) in self.finite:
            return values_BX
        known = self._clean.get(id(values_BX))
        if known is None:
            keep = (self.factors_B > 0).view(-1, *[1] * (values_BX.ndim - 1))
            known = self._clean[id(values_BX)] = (values_BX, torch.where(keep, values_BX, 0))
        return known[1]
