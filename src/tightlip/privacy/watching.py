"""Watching a model use its parameters, so that one backward pass tells of every use.

A rule computes the same, keeps the parameter out of autograd, and sees to it that the way back
notes what its gradient is made of. Shapes: B rows, T tokens of a row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tightlip.privacy.derived import (
    IN_PLACE,
    ONLY_KIND,
    Derived,
    NoRule,
    Wire,
    cat,
    conv1d,
    derive,
    elementwise,
    every_tensor,
    like_before,
)
from tightlip.privacy.experts import baddbmm, bmm, current_watch
from tightlip.privacy.layers import (
    EmbeddingUse,
    NormUse,
    Outer,
    Use,
    linear_use,
    missing_columns,
    written_if_small,
)
from tightlip.privacy.recurrent_layers import GRULayer, LSTMLayer

# What can put rows in an order that only this batch holds; two synthetic rows would not tell.
_PICKING = {
    function
    for name in (
        *("index_select", "gather", "take", "take_along_dim", "masked_select"),
        *("roll", "flip", "sort"),
        *("index_add", "index_copy", "index_put", "scatter", "scatter_add"),
    )
    for owner, spelling in ((torch, name), (Tensor, name), (Tensor, f"{name}_"))
    if (function := getattr(owner, spelling, None)) is not None
} | {Tensor.__getitem__, Tensor.__setitem__}
_ADDS_ROWS = {Tensor.unsqueeze, torch.unsqueeze, Tensor.__getitem__}
_HEAD = 8  # times as many outputs as inputs
_AT_FRONT = ((0,), (None,), ((None, ...),))


def _linear(watch: "Watch", name: str, input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    if watch.is_watched(input):
        raise NoRule(name, "used as the input of a linear layer")
    watch.check_constant(name, weight, bias)
    rows = watch.by_row(input, name)
    return like_before(linear_use(watch, rows, weight, bias), input, rows)


def _is_frozen_odd_head(
    watch: "Watch", input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> bool:
    """Whether autograd would copy this layer's output and its gradient to have even columns, and they
    are large: of an adapter's frozen head over 50,257 words no tensors are larger."""
    are_frozen = all(
        type(each) in (Tensor, nn.Parameter, FakeTensor) and not each.requires_grad
        for each in (weight, bias)
        if each is not None
    )
    # Rows stand in front, so none meets another in a product that nobody looks into.
    is_usual = input.ndim == 3 and len(input) == watch.num_rows and weight.ndim == 2
    if not are_frozen or not is_usual or (bias is not None and bias.ndim != 1):
        return False
    return len(weight) > _HEAD * weight.shape[1] and missing_columns(weight, len(weight)) > 0


def _frozen_linear(watch: "Watch", input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    return linear_use(watch, input, weight, bias)


def _addmm(
    watch: "Watch", name: str, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any
) -> Tensor:
    """transformers' Conv1D: a linear layer whose weight lies the other way round."""
    if scales or watch.is_watched(mat1) or input.ndim != 1:
        raise NoRule(name, "used by addmm in an unusual way")
    watch.check_constant(name, input, mat2)
    rows = watch.by_row(mat1, name)
    output = linear_use(watch, rows, mat2, input, transposed=True)
    return like_before(output, mat1, rows)


def _matmul(watch: "Watch", name: str, input: Tensor, other: Tensor) -> Tensor:
    if watch.is_watched(input) and input.ndim == 2 and other.ndim > 2:  # W x, as Mamba has it
        rows = watch.by_row(other, name).transpose(-1, -2)
        return linear_use(watch, rows, input, None).transpose(-1, -2)
    if watch.is_watched(input) or other.ndim != 2:
        raise NoRule(name, "used by a product in an unusual way")
    rows = watch.by_row(input, name)
    return like_before(linear_use(watch, rows, other, None, transposed=True), input, rows)


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
    return like_before(output, input, rows)


def _rms_norm(
    watch: "Watch",
    name: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> Tensor:
    normal = functional.rms_norm(input, normalized_shape, None, eps)
    return elementwise(torch.mul)(watch, name, normal, weight)


def _recurrent(layer: Any) -> Callable[..., Any]:
    def rule(watch: "Watch", name: str, *args: Any) -> Any:
        if len(args) != 9 or not isinstance(args[2], list | tuple):
            raise NoRule(name, "a recurrent layer over packed rows")
        input, start, weights, has_biases, num_layers, dropout, training, *order = args
        per_layer = 4 if has_biases else 2
        both_ways, batch_first = order
        is_plain = batch_first and not both_ways and len(weights) == per_layer * num_layers
        if not is_plain or len(input) != watch.num_rows:
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
            states = (part[number] for part in starts)
            output, *end = layer.apply(watch.anchor, output, *states, tuple(own), watch)
            ends.append(end)
        return (output, *(torch.stack(parts) for parts in zip(*ends, strict=True)))

    return rule


RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    functional.embedding: _embedding,
    functional.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    torch.conv1d: conv1d,
    torch.cat: cat,
    torch.bmm: bmm,
    torch.baddbmm: baddbmm,
    **{
        spelling: elementwise(operation)
        for operation, spellings in {
            torch.mul: (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
            torch.add: (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__),
            torch.sub: (torch.sub, Tensor.sub, Tensor.__sub__),
            torch.div: (torch.div, Tensor.div, Tensor.__truediv__),
            Tensor.expand_as: (Tensor.expand_as,),
            Tensor.mul_: (Tensor.mul_, Tensor.__imul__),
            Tensor.add_: (Tensor.add_, Tensor.__iadd__),
        }.items()
        for spelling in spellings
    },
    torch.lstm: _recurrent(LSTMLayer),
    torch.gru: _recurrent(GRULayer),
}


class Watch(TorchFunctionMode):
    """Everything that happened to the trainable parameters of one model in one pass."""

    def __init__(self, parameters: dict[str, nn.Parameter], num_rows: int, row_length: int) -> None:
        super().__init__()
        self.num_rows, self.row_length = num_rows, row_length
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.uses: dict[str, list[Use]] = {name: [] for name in parameters}
        self.finite: dict[int, Tensor] = {}
        # Of a linear layer, without its columns of padding and with them; nothing else keeps it.
        self.last_output: tuple[Tensor, Tensor] | None = None
        self.spread: dict[int, Tensor] = {}
        self.derived: dict[int, Derived] = {}
        self.expanded: dict[int, Tensor] = {}
        self.factors: dict[int, tuple[Tensor, Tensor, float]] = {}
        self.stacks: dict[str, tuple[Tensor, dict[int, list[Use]]]] = {}
        # What hangs on no row, by `id`; kept, so that no other tensor gets the `id`.
        self.rowless: dict[int, Tensor] = {}
        for name, parameter in parameters.items():
            if parameter._backward_hooks:
                raise NoRule(name, "a hook of its own changes its gradient")
        first = next(iter(parameters.values()))
        # What every watched operation hangs on, so that autograd calls its way back.
        self.anchor = torch.zeros((), device=first.device, requires_grad=True)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is current_watch:
            return self
        met = every_tensor(args[:1] if func in ONLY_KIND else args, kwargs)
        named = [self.names[id(each)] for each in met if id(each) in self.names]
        if func is torch.eye or self._are_rowless(met):
            return self._rowless(func, args, kwargs, named)
        if func in IN_PLACE:
            self.rowless.pop(id(args[0]), None)
        if not named:
            if func in _PICKING and _picks_rows(func, args, kwargs):
                raise NoRule("the model", f"it moves rows or tokens about by {func.__name__}")
            if func in _ADDS_ROWS and id(args[0]) in self.spread and args[1:] in _AT_FRONT:
                return args[0]  # it has the rows already that it is to be spread over
            if func is functional.linear and _is_frozen_odd_head(self, *args, **kwargs):
                return _frozen_linear(self, *args, **kwargs)
            return func(*args, **kwargs)
        if func in RULES:
            return RULES[func](self, named[0], *args, **kwargs)
        result = func(*args, **kwargs)
        if every_tensor((result,), {}):
            raise NoRule(named[0], f"used by {getattr(func, '__name__', func)}")
        return result  # a shape, a dtype: nothing that a gradient flows through

    def note(self, parameter: Tensor, use: Use) -> None:
        derived = self.derived.get(id(parameter))
        pulled = [(self.names[id(parameter)], use)] if derived is None else derived.pulled_back(use)
        for name, own in pulled:
            self.uses[name].append(written_if_small(own, self._shapes[name]))

    def note_matrix(self, stack: Tensor, number: int, use: Outer) -> None:
        """Remember a use of one matrix of a stack.

        Of W + a·LR it is one of L and one of R: Σ left ⊗ right times Rᵗ, and Lᵗ times it.
        """
        if id(stack) in self.factors:
            lower, upper, scale = self.factors[id(stack)]
            left, right = use.left_BTP, use.right_BTD
            assert right is not None
            below, above = (each[number].detach().to(left.dtype) for each in (lower, upper))
            self.note_matrix(lower, number, Outer(left, scale * (right @ above.T)))
            self.note_matrix(upper, number, Outer(scale * (left @ below), right))
            return
        derived, name = self._stand_in(stack), self.names[id(stack)]
        first, uses = self.stacks.setdefault(name, (derived.made, {}))
        if not derived.is_rearranged or first.stride() != derived.made.stride():
            raise NoRule(name, "a stack of matrices that is computed")
        uses.setdefault(number, []).append(use)

    def apart(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Parameters as their uses are noted: each matrix of a stack by itself."""
        separate = {name: each for name, each in parameters.items() if name not in self.stacks}
        for name, (stack, uses) in self.stacks.items():
            if self.uses.pop(name):
                raise NoRule(name, "used as a stack of matrices and otherwise too")
            for number, matrix in enumerate(stack.detach()):
                separate[f"{name}[{number}]"] = matrix
                self.uses[f"{name}[{number}]"] = uses.get(number, [])
        return separate

    def together(self, found: dict[str, Tensor], parameters: dict[str, Any]) -> dict[str, Tensor]:
        """The gradients of matrices as those of their stacks, in the order of the parameters."""
        whole = {name: found.get(name, parameter) for name, parameter in parameters.items()}
        for name, (stack, _) in self.stacks.items():
            kind = found[f"{name}[0]"].dtype  # exact sums are whole numbers
            whole[name] = torch.zeros_like(parameters[name], dtype=kind)
            room = whole[name].as_strided(stack.shape, stack.stride())
            for number, matrix in enumerate(room):
                matrix.copy_(found[f"{name}[{number}]"])
            whole[name] = whole[name].contiguous()
        return whole

    def straight_from_a_layer(self, values: Tensor) -> Tensor | None:
        """A linear layer's whole output, padding included, if that is where these come from; asked
        once."""
        last, self.last_output = self.last_output, None
        return last[1] if last is not None and last[0] is values else None

    def forget(self) -> None:
        """Let go of all tensors; autograd's graph and this watch hold each other otherwise."""
        self.uses = {name: [] for name in self.uses}
        self.finite, self.spread, self.last_output = {}, {}, None
        self.derived, self.rowless, self.stacks = {}, {}, {}
        self.expanded, self.factors = {}, {}

    @staticmethod
    def backward(total: Tensor, asked: list[Tensor]) -> tuple[Tensor | None, ...]:
        """What autograd finds for each of `asked`, any watch on all the way.

        torch.autograd.grad would hand itself to the watch, and a watch is off while it works.
        """
        engine = torch.autograd.Variable._execution_engine
        start = ((total,), (torch.ones_like(total),), False, False, tuple(asked))
        return engine.run_backward(*start, allow_unreachable=True, accumulate_grad=False)

    def note_finite(self, values: Tensor) -> None:
        """Remember a tensor that cannot hold anything but finite numbers, by itself."""
        self.finite[id(values)] = values

    def is_watched(self, value: Any) -> bool:
        return id(value) in self.names

    def check_constant(self, name: str, *values: Any) -> None:
        """What stands beside a parameter in its layer may not have a gradient that we drop."""
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad and not self.is_watched(value):
                raise NoRule(name, "it stands beside a weight that is computed")

    def by_row(self, values: Tensor, name: str) -> Tensor:
        """`values` with one leading entry per row: [B, …].

        A tensor that all rows share is repeated; one that lines up the tokens of all rows is cut.
        """
        size = len(values) if values.ndim else 0
        if values.ndim >= 2 and size == self.num_rows:
            return values
        if values.ndim >= 2 and size == 1:
            return values.expand(self.num_rows, *values.shape[1:])
        if values.ndim == 2 and size and size % self.num_rows == 0:
            return values.view(self.num_rows, -1, values.shape[1])
        raise NoRule(
            name, f"it meets a tensor of shape {tuple(values.shape)} for {self.num_rows} rows"
        )

    def _are_rowless(self, tensors: list[Tensor]) -> bool:
        """Whether these are parameters, or made of them alone, and not just numbers."""
        some = False
        for each in tensors:
            if not self._hangs_on_no_row(each):
                return False
            some = some or each.ndim > 0 or self.is_watched(each)
        return some

    def _hangs_on_no_row(self, value: Tensor) -> bool:
        if id(value) in self.names or id(value) in self.rowless:
            return True
        # Of a plain tensor torch's parameters would be asked in Python, at each operation.
        is_parameter = type(value) is not Tensor and isinstance(value, nn.Parameter)
        return is_parameter or not (value.ndim or value.requires_grad)

    def _rowless(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], named: list[str]
    ) -> Any:
        if func in IN_PLACE and named:
            raise NoRule(named[0], f"changed in place by {func.__name__}")
        watched = filter(self.is_watched, every_tensor(args, kwargs))
        result = derive(func, args, kwargs, {id(each): self._stand_in(each) for each in watched})
        if isinstance(result, list):
            return tuple(self._watched(each) for each in result)
        made = self._watched(result)
        if func is Tensor.expand and self.is_watched(made):
            self.expanded[id(made)] = args[0]
        if func is torch.baddbmm and not self.is_watched(args[0]) and {*kwargs} <= {"alpha"}:
            self.factors[id(made)] = (args[1], args[2], kwargs.get("alpha", 1))
        return made

    def _stand_in(self, parameter: Tensor) -> Derived:
        if id(parameter) not in self.derived:
            leaf = parameter.detach().requires_grad_()
            self.derived[id(parameter)] = Derived(leaf, {self.names[id(parameter)]: leaf})
        return self.derived[id(parameter)]

    def _watched(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not self.is_watched(value):
            self.rowless[id(value)] = value
        if not isinstance(value, Derived):
            return value
        name = next(iter(value.leaves))
        tensor = Wire.apply(self.anchor, value.made.detach(), name)
        self.rowless[id(tensor)] = tensor
        self.names[id(tensor)], self.derived[id(tensor)] = name, value
        return tensor


def _picks_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether rows that a gradient flows through are taken, or written, by number."""
    if not any(isinstance(each, Tensor) and each.requires_grad for each in args):
        return False
    where = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("dims", 0))
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        first = where[0] if isinstance(where, tuple) and where else where
        return isinstance(first, Tensor | list)
    return not isinstance(where, int) or where % args[0].ndim == 0
