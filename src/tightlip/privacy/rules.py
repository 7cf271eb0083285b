"""What replaces each operation on a trainable parameter while a model is watched.

A rule computes the same, keeps the parameter out of autograd, and sees to it that the way back
notes what its gradient is made of. Shapes: B rows, T tokens of a row.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from tightlip.privacy.layers import EmbeddingUse, NormUse, linear_use
from tightlip.privacy.recurrent import GRULayer, LSTMLayer
from tightlip.privacy.uses import Whole

if TYPE_CHECKING:
    from tightlip.privacy.watching import Watch


class NoRule(Exception):
    """A trainable parameter is used in a way whose gradient per unit no rule tells."""

    def __init__(self, parameter: str, why: str) -> None:
        super().__init__(f"{parameter} ({why})")
        self.parameter, self.why = parameter, why


def _linear(watch: "Watch", name: str, input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    if watch.is_watched(input):
        raise NoRule(name, "used as the input of a linear layer")
    watch.check_constant(name, weight, bias)
    rows = watch.by_row(input, name)
    return _like_before(linear_use(watch, rows, weight, bias), input, rows)


def _addmm(
    watch: "Watch", name: str, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any
) -> Tensor:
    """transformers' Conv1D: a linear layer whose weight lies the other way round."""
    if scales or watch.is_watched(mat1) or input.ndim != 1:
        raise NoRule(name, "used by addmm in an unusual way")
    watch.check_constant(name, input, mat2)
    rows = watch.by_row(mat1, name)
    output = linear_use(watch, rows, mat2, input, transposed=True)
    return _like_before(output, mat1, rows)


def _like_before(output: Tensor, given: Tensor, rows: Tensor) -> Tensor:
    """Tokens of all rows that came in one line go on in one line."""
    return output if rows.ndim == given.ndim else output.flatten(0, 1)


def _embedding(
    watch: "Watch",
    name: str,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None or scale_grad_by_freq:
        raise NoRule(name, "an embedding with max_norm or scale_grad_by_freq")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)

    def looked_up(ids: Tensor) -> Tensor:
        return EmbeddingUse.apply(watch.anchor, ids, weight, padding_idx, watch)

    if input.ndim != 1:
        return looked_up(watch.by_row(input, name))
    if len(input) == watch.num_rows * watch.row_length:
        return looked_up(input.view(watch.num_rows, -1)).flatten(0, 1)
    if len(input) != watch.row_length or len(input) == watch.num_rows:
        raise NoRule(name, f"it is looked up at {len(input)} places for {watch.num_rows} rows")
    # Positions that all rows share: each row gets its own.
    output = looked_up(input.expand(watch.num_rows, -1))
    watch.spread[id(output)] = output
    return output


def _layer_norm(
    watch: "Watch",
    name: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) != 1:
        raise NoRule(name, "a norm over more than the last dimension")
    watch.check_constant(name, weight, bias)
    rows = watch.by_row(input, name)
    output = NormUse.apply(watch.anchor, rows, weight, bias, eps, watch)
    return _like_before(output, input, rows)


def _rms_norm(
    watch: "Watch",
    name: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> Tensor:
    normal = functional.rms_norm(input, normalized_shape, None, eps)
    return _per_row(torch.mul)(watch, name, normal, weight)


def _per_row(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give every row a copy of a small parameter, and let autograd differentiate each."""

    def rule(watch: "Watch", name: str, first: Any, second: Any, **others: Any) -> Tensor:
        if others:
            raise NoRule(name, f"used by {operation.__name__} with {', '.join(others)}")
        parameter, other = (first, second) if watch.is_watched(first) else (second, first)
        if watch.is_watched(other) or not isinstance(other, Tensor) or parameter.ndim != 1:
            raise NoRule(name, f"used by {operation.__name__} with something that has no rows")
        rows = watch.by_row(other, name)
        if rows.ndim < 3 or rows.ndim != other.ndim or rows.shape[-1] != len(parameter):
            raise NoRule(name, f"it meets a tensor of shape {tuple(other.shape)}")
        copies = _Copies.apply(watch.anchor, parameter, watch.num_rows, watch)
        copies = copies.view(watch.num_rows, *[1] * (rows.ndim - 2), -1)
        return operation(copies, rows) if watch.is_watched(first) else operation(rows, copies)

    return rule


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, anchor: Tensor, parameter: Tensor, num_rows: int, watch: "Watch"
    ) -> Tensor:
        context.watch, context.parameter = watch, parameter
        return parameter.detach().expand(num_rows, -1).clone()

    @staticmethod
    def backward(context: Any, gradient_BX: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        context.watch.note(context.parameter, Whole(gradient_BX))
        return (None,) * 4


def _recurrent(layer: Any) -> Callable[..., Any]:
    def rule(watch: "Watch", name: str, *args: Any) -> Any:
        if len(args) != 9 or not isinstance(args[2], list | tuple):
            raise NoRule(name, "a recurrent layer over packed rows")
        input, start, weights, has_biases, num_layers, dropout, training, both_ways, batch_first = (
            args
        )
        per_layer = 4 if has_biases else 2
        if (
            both_ways
            or not batch_first
            or len(weights) != per_layer * num_layers
            or len(input) != watch.num_rows
        ):
            raise NoRule(
                name, "a recurrent layer that runs both ways, projects, or has rows second"
            )
        starts = start if isinstance(start, list | tuple) else (start,)
        output, ends = input, []
        for number in range(num_layers):
            own = weights[per_layer * number : per_layer * (number + 1)]
            if not all(watch.is_watched(weight) for weight in own):
                raise NoRule(name, "a recurrent layer that is frozen in part")
            if number and dropout and training:
                output = functional.dropout(output, dropout, training=True)
            output, *end = layer.apply(
                watch.anchor, output, *(part[number] for part in starts), *own[:2],
                *(own[2:] or (None, None)), watch,
            )  # fmt: skip
            ends.append(end)
        return (output, *(torch.stack(parts) for parts in zip(*ends, strict=True)))

    return rule


RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    functional.embedding: _embedding,
    functional.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm,
    torch.mul: _per_row(torch.mul),
    Tensor.mul: _per_row(torch.mul),
    Tensor.__mul__: _per_row(torch.mul),
    Tensor.__rmul__: _per_row(torch.mul),
    torch.add: _per_row(torch.add),
    Tensor.add: _per_row(torch.add),
    Tensor.__add__: _per_row(torch.add),
    Tensor.__radd__: _per_row(torch.add),
    torch.lstm: _recurrent(LSTMLayer),
    torch.gru: _recurrent(GRULayer),
}
