"""Rules that give every row its own copy of a small parameter, and let autograd differentiate each.

Shapes: B rows, C channels, T positions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightlip.privacy.derived import MOST_NUMBERS, NoRule, written_out


def elementwise(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rule of an operation that spreads a parameter over each row."""

    def rule(watch: Any, name: str, first: Any, second: Any, **others: Any) -> Tensor:
        if others:
            raise NoRule(name, f"used by {operation.__name__} with {', '.join(others)}")
        is_first = watch.is_watched(first)
        parameter, other = (first, second) if is_first else (second, first)
        if watch.is_watched(other) or not isinstance(other, Tensor):
            raise NoRule(name, f"used by {operation.__name__} with something that has no rows")
        rows = watch.by_row(other, name)
        shape = list(parameter.shape)
        while shape and shape[0] == 1 and parameter.ndim <= other.ndim:
            del shape[0]
        missing = rows.ndim - 1 - len(shape)
        # Of two dimensions it would be open whether the first are rows.
        if rows.ndim < 3 or missing < (rows.ndim != other.ndim):
            raise NoRule(name, f"it meets a tensor of shape {tuple(other.shape)}")
        copies = per_row(watch, name, parameter).view(len(rows), *[1] * missing, *shape)
        return like_before(
            operation(copies, rows) if is_first else operation(rows, copies), other, rows
        )

    return rule


def conv1d(
    watch: Any,
    name: str,
    input: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """All rows' channels side by side, each row with its own weights: one convolution of more groups."""
    if input.ndim != 3 or len(input) != watch.num_rows or not watch.is_watched(weight):
        raise NoRule(name, f"a convolution over a tensor of shape {tuple(input.shape)}")
    watch.check_constant(name, bias)
    weights = per_row(watch, name, weight).flatten(0, 1)
    if watch.is_watched(bias):
        bias = per_row(watch, name, bias).flatten()
    elif bias is not None:
        bias = bias.repeat(len(input))
    beside = input.reshape(1, -1, input.shape[2])
    how = (stride, padding, dilation, groups * len(input))
    return torch.conv1d(beside, weights, bias, *how).view(len(input), len(weight), -1)


def cat(watch: Any, name: str, tensors: Any, dim: int = 0) -> Tensor:
    """Rows joined by a parameter that was spread over them, as by an attention's sinks."""
    if dim % tensors[0].ndim == 0 or any(len(each) != watch.num_rows for each in tensors):
        raise NoRule(name, "joined to something that has no rows")
    return torch.cat([_by_row_again(watch, name, each) for each in tensors], dim)


def _by_row_again(watch: Any, name: str, tensor: Tensor) -> Tensor:
    if not watch.is_watched(tensor):
        return tensor
    source = watch.expanded.get(id(tensor))
    if source is None or source.ndim != tensor.ndim or len(source) != 1:
        raise NoRule(name, f"joined to rows with shape {tuple(tensor.shape)}")
    return per_row(watch, name, source).flatten(0, 1).expand_as(tensor)


def per_row(watch: Any, name: str, parameter: Tensor) -> Tensor:
    """[B, …]: the parameter once for every row."""
    if parameter.numel() > MOST_NUMBERS:
        raise NoRule(name, f"{parameter.numel():,} numbers are too many to copy for every row")
    return _Copies.apply(watch.anchor, parameter, watch)


def like_before(output: Tensor, given: Tensor, rows: Tensor) -> Tensor:
    """Tokens of all rows that came in one line go on in one line."""
    return output if rows.ndim == given.ndim else output.flatten(0, 1)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, anchor: Tensor, parameter: Tensor, watch: Any) -> Tensor:
        context.watch, context.parameter = watch, parameter
        return parameter.detach().expand(watch.num_rows, *parameter.shape).clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        context.watch.note(context.parameter, written_out(gradient))
        return (None,) * 3
