"""Layers as autograd sees them under watch: the same numbers forward, notes on the way back.

Each takes the watch's anchor first, so that autograd calls it even where its input needs no
gradient. Parameters are constants here. Shapes: B rows, T tokens, P outputs, D inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


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


def wide(values: Tensor) -> torch.dtype:
    """What sums of these values are taken in: float32 or better."""
    return torch.promote_types(values.dtype, torch.float32)


def zeros_for(parameter: Tensor) -> Tensor:
    """Room for a parameter's gradient, in one line of memory however the parameter lies."""
    return parameter.new_zeros(parameter.shape, dtype=wide(parameter))


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


# Where small weights' gradients are written out row by row as they come.
WRITES_OUT = {"cuda"}


def written_if_small(use: Any, shape: torch.Size) -> Any:
    """A product as every row's gradient, where that takes less room than its two sides.

    An adapter's are: their sides need not be kept until the norms are known, and what is then scaled
    and summed is what the norm was taken of, so that nothing is rounded in between.
    """
    if not isinstance(use, Outer) or use.right_BTD is None or len(shape) != 2:
        return use
    size_P, size_D = shape
    is_small = 2 * size_P * size_D <= use.left_BTP.shape[1] * (size_P + size_D)
    if not is_small or use.left_BTP.device.type not in WRITES_OUT:
        return use
    product_BPD = fp32_product(use.left_BTP.transpose(1, 2), use.right_BTD)
    return Whole(product_BPD[:, :size_P, :size_D])


class LinearUse(torch.autograd.Function):
    """x Wᵀ + b, or x W + b where the weight is `transposed`, as transformers' Conv1D has it.

    On a GPU the output may have more columns than the layer: see `linear_use`.
    """

    @staticmethod
    def forward(
        context: Any,
        anchor: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Any,
        watch: Any,
        transposed: bool,
    ) -> Tensor:
        dtype = product_dtype(input)
        matrix = weight.detach().t() if transposed else weight.detach()
        own_input, own_matrix = aligned(input.to(dtype)).contiguous(), aligned(matrix.to(dtype))
        own_bias = None if bias is None else bias.detach().to(dtype)
        if missing := missing_columns(own_matrix, len(matrix)):
            own_matrix = functional.pad(own_matrix, (0, 0, 0, missing))
            own_bias = None if own_bias is None else functional.pad(own_bias, (0, missing))
        output = functional.linear(own_input, own_matrix, own_bias)
        context.save_for_backward(own_input, own_matrix)
        context.num_inputs = input.shape[-1]
        context.watch, context.weight, context.bias = watch, weight, bias
        context.transposed, context.input_dtype = transposed, input.dtype
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        watch = context.watch
        input, matrix = context.saved_tensors
        if watch.is_watched(context.weight):
            left, right = _tokens(gradient, watch.num_rows), _tokens(input, watch.num_rows)
            watch.note(
                context.weight, Outer(right, left) if context.transposed else Outer(left, right)
            )
        if watch.is_watched(context.bias):
            watch.note(context.bias, Outer(_tokens(gradient, watch.num_rows)))
        wanted = context.needs_input_grad[1]
        back = None
        if wanted:
            back = (gradient @ matrix)[..., : context.num_inputs].to(context.input_dtype)
        return None, back, None, None, None, None


def linear_use(
    watch: Any, input: Tensor, weight: Tensor, bias: Any, *, transposed: bool = False
) -> Tensor:
    """A linear layer under watch.

    A vocabulary of 50,257 makes every product with the logits' gradient several times as slow
    as one of 50,264, so the layer gets columns of zeros, cut off again outside autograd's
    function: the gradient then comes back with them.
    """
    num_outputs = weight.shape[1] if transposed else weight.shape[0]
    output = LinearUse.apply(watch.anchor, input, weight, bias, watch, transposed)
    whole = output
    if output.shape[-1] != num_outputs:
        output = output[..., :num_outputs]
    watch.last_output = (output, whole)
    return output


def missing_columns(like: Tensor, size: int) -> int:
    """How many columns a product on a GPU should have more."""
    return -size % 64 if like.device.type == "cuda" and size % 8 else 0


class EmbeddingUse(torch.autograd.Function):
    """Rows of a matrix. Like torch, one at `padding_idx` gets no gradient."""

    @staticmethod
    def forward(
        context: Any,
        anchor: Tensor,
        ids: Tensor,
        weight: Tensor,
        padding_idx: int | None,
        watch: Any,
    ) -> Tensor:
        context.save_for_backward(ids)
        context.watch, context.weight, context.padding_idx = watch, weight, padding_idx
        return functional.embedding(ids, weight.detach())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        (ids,) = context.saved_tensors
        left = _tokens(gradient, len(ids))
        ids_BT = ids.reshape(len(ids), -1)
        if context.padding_idx is not None:
            left = torch.where((ids_BT == context.padding_idx)[..., None], 0, left)
        context.watch.note(context.weight, Lookup(ids_BT, left))
        return (None,) * 5


class NormUse(torch.autograd.Function):
    """Layer normalisation; its weight's gradient is so small that each row's is written out."""

    @staticmethod
    def forward(
        context: Any, anchor: Tensor, input: Tensor, weight: Any, bias: Any, eps: float, watch: Any
    ) -> Tensor:
        own = None if weight is None else weight.detach()
        own_bias = None if bias is None else bias.detach()
        # As autocast does: sums over a row need the room.
        wide = input.to(own.dtype) if own is not None else input
        output, mean, scale = torch.native_layer_norm(wide, wide.shape[-1:], own, own_bias, eps)
        context.save_for_backward(input, mean, scale, own)
        context.watch, context.weight, context.bias = watch, weight, bias
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        watch = context.watch
        input, mean, scale, own = context.saved_tensors
        inner = tuple(range(1, input.ndim - 1))
        wide, wide_input = gradient.to(mean.dtype), input.to(mean.dtype)
        normal = (wide_input - mean) * scale
        if watch.is_watched(context.weight):
            watch.note(context.weight, Whole((wide * normal).sum(inner)))
        if watch.is_watched(context.bias):
            watch.note(context.bias, Whole(wide.sum(inner)))
        if not context.needs_input_grad[1]:
            return (None,) * 6
        if wide.device.type == "cpu":  # one kernel there, eight times as fast as these lines
            back, _, _ = torch.ops.aten.native_layer_norm_backward(
                wide, wide_input, wide.shape[-1:], mean, scale, own, None, [True, False, False]
            )
        else:
            inward = wide if own is None else wide * own
            mean_inward = inward.mean(-1, keepdim=True)
            along = (inward * normal).mean(-1, keepdim=True)
            back = scale * (inward - mean_inward - normal * along)
        return None, back.to(input.dtype), None, None, None, None


def product_dtype(input: Tensor) -> torch.dtype:
    """What a product of this input is taken in: autocast's kind of number, or the input's."""
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


def _tokens(values: Tensor, num_rows: int) -> Tensor:
    """[B, …, X] as [B, T, X]; the very tensor where it is that already."""
    if values.ndim == 3:
        return values
    return values.reshape(num_rows, -1, values.shape[-1])
