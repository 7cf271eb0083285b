"""Sums in which no two units ever meet in floating point.

How float32 rounds a sum depends on all that is in it, so one unit more would change what the others
add. Here a unit's gradient is summed by itself, multiplied by its factor and rounded to whole steps;
whole numbers add up exactly, in any order. One unit more then moves the sum by its own vector.
Shapes: U units, S tokens of a unit, P and D the parameter's.
"""

import math
from functools import reduce

import torch
from torch import Tensor

from tightlip.privacy.layers import Layout, Lookup, Outer, Use, Whole, fp32_product, wide

MOST_UNITS = 127  # of whole numbers up to 2^24 that 32 bits hold


def step_of(clip_norm: float) -> float:
    """What sums are whole numbers of: the power of two from 2⁻²⁴ of the clip norm up.

    >>> step_of(1.0) == 2.0**-24, step_of(1.5) == 2.0**-23
    (True, True)
    """
    mantissa, exponent = math.frexp(clip_norm)
    return math.ldexp(1.0, exponent - 24 - (mantissa == 0.5))


def rounded_off(uses: list[Use], like: Tensor, layout: Layout, step: float) -> float:
    """The most that rounding to steps adds to one unit's share of a parameter's sum."""
    total = 0.0
    for use in uses:
        if isinstance(use, Lookup):  # token by token, and all of them may look up one row
            num_tokens = use.ids_BT.shape[1] * layout.rows_per_unit
            total += num_tokens * math.sqrt(use.left_BTD.shape[2])
        else:
            total += math.sqrt(like.numel())
    return total * step / 2


class ExactSums:
    """Uses scaled by a factor per unit and summed, in whole steps: float64 holding whole numbers on a
    CPU, 32-bit ones on a GPU.

    Holds:
        own: one unit more changes the sum by what that unit alone would give, to the bit.
        wiped: a unit whose factor is 0 counts nothing, whatever it holds.
    """

    def __init__(self, factors_U: Tensor, layout: Layout, step: float) -> None:
        self.layout = layout
        self.scales_U = factors_U / step
        self.kind = torch.int32 if factors_U.device.type == "cuda" else torch.float64
        assert self.kind == torch.float64 or layout.num_units <= MOST_UNITS

    def zeros(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=self.kind, device=like.device)

    def sum(self, uses: list[Use], like: Tensor) -> Tensor:
        """Σ over units of factor · gradient, in `like`'s shape and in steps."""
        wraps = len(uses) > 1  # one use alone is as short as its unit
        return reduce(torch.add, (self._sum(use, like, wraps) for use in uses))

    def _sum(self, use: Use, like: Tensor, wraps: bool) -> Tensor:
        if isinstance(use, Lookup):
            return self._of_lookup(use, like)
        if isinstance(use, Outer) and use.right_BTD is not None:
            return self._of_products(use, like, wraps)
        if isinstance(use, Whole):
            gradients_UX = self.layout.sum_by_unit(use.gradient_BX.to(wide(use.gradient_BX)))
        else:
            left_USP = self.layout.by_unit(use.left_BTP)
            gradients_UX = left_USP.sum(1, dtype=wide(left_USP))[:, : like.numel()]
        return self._whole(gradients_UX).sum(0, dtype=self.kind).reshape(like.shape)

    def _of_lookup(self, use: Lookup, like: Tensor) -> Tensor:
        left_USD = self.layout.by_unit(use.left_BTD)
        whole_ND = self._whole(left_USD.to(wide(left_USD))).flatten(0, 1)
        return self.zeros(like).index_add_(0, use.ids_BT.flatten(), whole_ND)

    def _of_products(self, use: Outer, like: Tensor, wraps: bool) -> Tensor:
        assert use.right_BTD is not None
        both = torch.promote_types(use.left_BTP.dtype, use.right_BTD.dtype)
        left_USP = self.layout.by_unit(use.left_BTP.to(both))
        right_USD = self.layout.by_unit(use.right_BTD.to(both))
        rows, columns = like.shape
        if self.kind == torch.int32 and both != torch.float64:
            from tightlip.privacy.exact_kernels import exact_product

            product_PD = exact_product(left_USP, right_USD, self.scales_U, wraps)
            return product_PD[:rows, :columns].contiguous()
        total = self.zeros(like)
        for left_SP, right_SD, scale in zip(left_USP, right_USD, self.scales_U, strict=True):
            # A tracer's stand-ins have no values to ask for.
            if type(scale) is Tensor and not float(scale) > 0:
                continue
            product_PD = fp32_product(left_SP.t(), right_SD)[:rows, :columns]
            total += self._whole_steps(product_PD.mul(scale))
        return total

    def _whole(self, values_UX: Tensor) -> Tensor:
        """Values times their units' factors in whole steps; nothing where the factor is 0."""
        scales = self.scales_U.view(-1, *[1] * (values_UX.ndim - 1))
        return self._whole_steps(torch.where(scales > 0, values_UX * scales, 0))

    def _whole_steps(self, values: Tensor) -> Tensor:
        whole = values.round()
        # A token may be far longer than its unit, whose others cancel it. By way of 64 bits, 32 wrap
        # around, and the unit's sum comes out right; they would stop at their largest number.
        return (whole.to(torch.int64) if self.kind == torch.int32 else whole).to(self.kind)
