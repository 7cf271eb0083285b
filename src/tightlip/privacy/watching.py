"""Watching a model use its parameters, so that one backward pass tells of every use.

While a model runs under `Watch`, each operation on a trainable parameter is replaced by one
that computes the same, keeps the parameter out of autograd, and on the way back notes what the
parameter's gradient is made of. Parameters stay leaves that require a gradient: one that
autograd can reach after all was used by an operation we did not see, and that is found out.
Shapes: B rows, T tokens of a row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tightlip.privacy.rules import RULES, NoRule
from tightlip.privacy.uses import Use

# What can put rows in an order that only this batch holds; two synthetic rows would not tell.
_PICKING = {
    function
    for name in [
        "index_select",
        "gather",
        "take",
        "take_along_dim",
        "masked_select",
        "roll",
        "flip",
        "sort",
        "index_add",
        "index_copy",
        "index_put",
        "scatter",
        "scatter_add",
    ]
    for owner, spelling in ((torch, name), (Tensor, name), (Tensor, f"{name}_"))
    if (function := getattr(owner, spelling, None)) is not None
} | {Tensor.__getitem__, Tensor.__setitem__}
_ADDS_ROWS = {Tensor.unsqueeze, torch.unsqueeze, Tensor.__getitem__}
_AT_FRONT = ((0,), (None,), ((None, ...),))


class Watch(TorchFunctionMode):
    """Everything that happened to the trainable parameters of one model in one pass."""

    def __init__(self, parameters: dict[str, nn.Parameter], num_rows: int, row_length: int) -> None:
        super().__init__()
        self.num_rows, self.row_length = num_rows, row_length
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.uses: dict[str, list[Use]] = {name: [] for name in parameters}
        self.finite: dict[int, Tensor] = {}
        self.last_output: Tensor | None = None  # of a linear layer; nothing else keeps it
        self.spread: dict[int, Tensor] = {}
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
        named = self._parameters_in(args, kwargs)
        if not named:
            if func in _PICKING and _picks_rows(func, args, kwargs):
                raise NoRule("the model", f"it moves rows or tokens about by {func.__name__}")
            if func in _ADDS_ROWS and id(args[0]) in self.spread and args[1:] in _AT_FRONT:
                return args[0]  # it has the rows already that it is to be spread over
            return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None:
            return rule(self, named[0], *args, **kwargs)
        result = func(*args, **kwargs)
        if _holds_tensor(result):
            raise NoRule(named[0], f"used by {getattr(func, '__name__', func)}")
        return result  # a shape, a dtype: nothing that a gradient flows through

    def note(self, parameter: Tensor, use: Use) -> None:
        self.uses[self.names[id(parameter)]].append(use)

    def is_last_output(self, values: Tensor) -> bool:
        """Whether these came straight out of a linear layer; asked once."""
        last, self.last_output = self.last_output, None
        return last is values

    def forget(self) -> None:
        """Let go of all tensors; autograd's graph and this watch hold each other otherwise."""
        self.uses = {name: [] for name in self.uses}
        self.finite, self.spread, self.last_output = {}, {}, None

    def backward(self, total: Tensor, asked: list[Tensor]) -> tuple[Tensor | None, ...]:
        """What autograd finds for each of `asked`, this watch on all the way.

        torch.autograd.grad would hand itself to the watch, and a watch is off while it works.
        """
        engine = torch.autograd.Variable._execution_engine
        return engine.run_backward(
            (total,), (torch.ones_like(total),), False, False, tuple(asked),
            allow_unreachable=True, accumulate_grad=False,
        )  # fmt: skip

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

    def _parameters_in(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
        found = []
        for value in (*args, *kwargs.values()):
            for each in value if isinstance(value, list | tuple) else (value,):
                if id(each) in self.names:
                    found.append(self.names[id(each)])
        return found


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_tensor(each) for each in value)
    return isinstance(value, Tensor)


def _picks_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether rows that a gradient flows through are taken, or written, by number."""
    if not any(isinstance(each, Tensor) and each.requires_grad for each in args):
        return False
    where = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("dims", 0))
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        first = where[0] if isinstance(where, tuple) and where else where
        return isinstance(first, Tensor | list)
    return not isinstance(where, int) or where % args[0].ndim == 0
