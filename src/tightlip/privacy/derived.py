"""What a model makes of its parameters before a row comes near: `1 + weight`, `weight.T`, `-exp(A_log)`.

The result is watched as a parameter is. What is noted of it is taken back to the parameters that
it was made of: sides are swapped where a matrix was only turned, and elsewhere autograd takes
each row's gradient back by itself.

Where a small parameter meets rows, a rule gives every row its own copy, and autograd differentiates
each. Shapes: B rows, C channels, T positions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightlip.privacy.layers import Layout, Outer, Use, Whole
from tightlip.privacy.norms import gradients

# A parameter larger than this is not written out for every row.
MOST_NUMBERS = 1 << 20
_CASTS = {
    *(Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(Tensor.type, Tensor.type_as, Tensor.contiguous, Tensor.clone, torch.clone),
}
_TURNS = {
    *(Tensor.t, torch.t, Tensor.transpose, torch.transpose),
    *(Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
}
# Of their second argument these ask for nothing but its kind or shape.
ONLY_KIND = {Tensor.to, Tensor.type_as}
IN_PLACE = {
    function
    for name, function in vars(torch._C.TensorBase).items()
    if (name.endswith("_") and not name.startswith("__")) or name.startswith("__i")
} | {Tensor.__setitem__, Tensor.requires_grad_}


class NoRule(Exception):
    """A trainable parameter is used in a way whose gradient per unit no rule tells."""

    def __init__(self, parameter: str, why: str) -> None:
        super().__init__(f"{parameter} ({why})")


@dataclass(frozen=True, eq=False)
class Derived:
    """`made` hangs on the leaves, one for each parameter's name, by autograd.

    `turned` says that it is the one parameter's matrix the other way round, or the matrix itself;
    None, that it is any other function of them.
    """

    made: Tensor
    leaves: dict[str, Tensor]
    turned: bool | None = False

    @property
    def is_rearranged(self) -> bool:
        """Whether this is all of one parameter, its numbers at other places at most."""
        (leaf, *others) = self.leaves.values()
        same_memory = self.made.data_ptr() == leaf.data_ptr() and self.made.numel() == leaf.numel()
        return not others and (self.turned is False or same_memory)

    def pulled_back(self, use: Use) -> Iterator[tuple[str, Use]]:
        """The use as one of each parameter."""
        name = next(iter(self.leaves))
        if self.turned is False:
            yield name, use
        elif self.turned and isinstance(use, Outer) and use.right_BTD is not None:
            yield name, Outer(use.right_BTD, use.left_BTP)
        else:
            yield from self._written_out(name, use)

    def _written_out(self, name: str, use: Use) -> Iterator[tuple[str, Use]]:
        size = max(each.numel() for each in (self.made, *self.leaves.values()))
        if size > MOST_NUMBERS:
            raise NoRule(name, f"{size:,} numbers are too many to write out for every row")
        num_rows = len(next(iter(vars(use).values())))  # each of a use's tensors begins with rows
        with torch.no_grad(), torch.autocast(self.made.device.type, enabled=False):
            alone = Layout(num_units=num_rows, rows_per_unit=1)
            whole = gradients(use, alone, slice(None), self.made.shape)
            whole = whole.reshape(num_rows, *self.made.shape).to(self.made.dtype)
            found = torch.autograd.grad(
                self.made,
                [*self.leaves.values()],
                whole,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
        for leaf, gradient in zip(self.leaves, found, strict=True):
            if gradient is not None:
                yield leaf, written_out(gradient)


def written_out(gradient: Tensor) -> Whole:
    """Every row's gradient; of a single number as a vector of one."""
    return Whole(gradient if gradient.ndim > 1 else gradient[:, None])


def derive(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], known: dict[int, Derived]
) -> Any:
    """What `func` gives, Derived in place of tensors that hang on leaves.

    `known` says what stands for each watched tensor, by `id`. One that comes back as it was, as
    from a cast to its own kind, comes back itself.
    """
    watched = [each for each in every_tensor(args, kwargs) if id(each) in known]
    sources = [known[id(each)] for each in watched]
    # Kept as they are: a checkpoint would count what is saved here among its own.
    keep = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda kept: kept)
    with keep:
        result = func(
            *_replaced(args, known), **{k: _replaced(v, known) for k, v in kwargs.items()}
        )
    for each, source in zip(watched, sources, strict=True):
        if result is source.made:
            return each
    leaves = {name: leaf for source in sources for name, leaf in source.leaves.items()}
    if isinstance(result, list | tuple):
        return [_derived(each, leaves, None) for each in result]
    return _derived(result, leaves, _turned(func, sources))


def _derived(value: Any, leaves: dict[str, Tensor], turned: bool | None) -> Any:
    hangs = leaves and isinstance(value, Tensor) and value.requires_grad
    return Derived(value, leaves, turned) if hangs else value


def _turned(func: Any, sources: list[Derived]) -> bool | None:
    if len(sources) != 1 or sources[0].turned is None:
        return None
    if func in _CASTS:
        return sources[0].turned
    return not sources[0].turned if func in _TURNS and sources[0].made.ndim == 2 else None


def _replaced(value: Any, known: dict[int, Derived]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_replaced(each, known) for each in value)
    return known[id(value)].made if id(value) in known else value


def every_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors given to a function, those in lists included."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += every_tensor(value, {})
    return found


class Wire(torch.autograd.Function):
    """Says so if autograd comes here: then something used what was made, and no rule saw it."""

    @staticmethod
    def forward(context: Any, anchor: Tensor, value: Tensor, name: str) -> Tensor:
        context.name = name
        context.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        if gradient is not None:
            raise NoRule(context.name, "used by an operation that cannot be seen")
        return (None,) * 3


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
