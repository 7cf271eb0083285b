"""How a parameter was used in one pass, and what each use adds to its gradient.

A unit's gradient of a parameter is a sum over the tokens of its rows. It is never written out
for one unit: its norm and the clipped sum over units follow from what was multiplied.
Shapes: U units, M rows of each, B = U·M rows, S tokens of a unit, P and D the parameter's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Outer:
    """G = Σ left ⊗ right over tokens; without `right`, G = Σ left.

    For a linear layer `left` is the gradient of its output and `right` its input. Either may
    be wider than the parameter by columns of zeros.
    """

    left_BTP: Tensor
    right_BTD: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Lookup:
    """G[ids] += left for every token: an embedding."""

    ids_BT: Tensor
    left_BTD: Tensor


@dataclass(frozen=True, eq=False)
class Whole:
    """G of every row, written out: fit for parameters as small as a norm's."""

    gradient_BX: Tensor


Use = Outer | Lookup | Whole


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`num_units` units of `rows_per_unit` rows each stand one after the other."""

    num_units: int
    rows_per_unit: int

    @property
    def num_rows(self) -> int:
        return self.num_units * self.rows_per_unit

    def by_unit(self, values_BTX: Tensor) -> Tensor:
        """[B, T, …] as [U, S, …]: the tokens of a unit's rows in one line."""
        return values_BTX.reshape(self.num_units, -1, *values_BTX.shape[2:])

    def sum_by_unit(self, values_BX: Tensor) -> Tensor:
        return values_BX.reshape(self.num_units, self.rows_per_unit, *values_BX.shape[1:]).sum(1)

    def to_rows(self, values_U: Tensor) -> Tensor:
        return values_U.repeat_interleave(self.rows_per_unit)


def aligned(values_XD: Tensor) -> Tensor:
    """Zeros added to the last dimension on a GPU, where rows of 16 bytes multiply far faster.

    550 hidden units in bfloat16 made every product of an LSTM step three times as slow.
    """
    if values_XD.device.type != "cuda" or type(values_XD) is not Tensor:
        return values_XD  # a compiler pads by itself
    missing = -values_XD.shape[-1] % (16 // values_XD.element_size())
    return torch.nn.functional.pad(values_XD, (0, missing)) if missing else values_XD


def fp32_product(left_XN: Tensor, right_NY: Tensor) -> Tensor:
    """A matrix product (or a batch of them) kept in float32 or better.

    bfloat16 products summed in float32 must not be rounded again on the way out: what is
    rounded there is the norm that bounds a unit, or the sum that noise is to hide.
    """
    if left_XN.dtype in (torch.float32, torch.float64):
        return left_XN @ right_NY
    if left_XN.device.type == "cuda":
        multiply = torch.bmm if left_XN.ndim == 3 else torch.mm
        return multiply(left_XN, right_NY, out_dtype=torch.float32)
    return left_XN.float() @ right_NY.float()
