"""Stacks of matrices: the heads of a block-diagonal layer, and the experts of a mixture.

Each matrix of a stack is noted as a parameter of its own. A row's tokens go to their experts by
themselves, so that the shape of every product follows from that row alone: in one product with
others' tokens a row's numbers would be rounded as others' number of tokens has it.
Shapes: E matrices, B rows, T tokens of a row, K experts of a token, S = T·K, X inputs, Y outputs.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function

from tightlip.core.errors import UsageError
from tightlip.privacy.derived import NoRule, per_row
from tightlip.privacy.layers import Outer, product_dtype

# What transformers' `use_experts_implementation` says of every kind of experts.
_TOLD = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed")
_CAPACITIES = ("expert_capacity", "capacity_factor", "moe_capacity_factor")


def bmm(watch: Any, name: str, input_ENX: Tensor, weight_EXY: Tensor) -> Tensor:
    """One product for each matrix of a stack, the tokens of all rows in one line."""
    num_tokens = input_ENX.shape[1]
    if not watch.is_watched(weight_EXY) or num_tokens % watch.num_rows:
        raise NoRule(name, f"it meets a stack of {num_tokens} tokens for {watch.num_rows} rows")
    num_matrices, each_has = len(weight_EXY), num_tokens // watch.num_rows
    input_BSX = input_ENX.unflatten(1, (watch.num_rows, each_has)).transpose(0, 1).flatten(1, 2)
    sizes_BE = [[each_has] * num_matrices] * watch.num_rows
    how = (sizes_BE, each_has, True, watch)
    output_BSY = _Routed.apply(watch.anchor, input_BSX, weight_EXY, None, *how)
    return output_BSY.unflatten(1, (num_matrices, each_has)).transpose(0, 1).flatten(1, 2)


def baddbmm(
    watch: Any, name: str, input: Tensor, batch1: Tensor, batch2: Tensor, **scales: Any
) -> Tensor:
    if scales or not watch.is_watched(input) or input.ndim != 3 or input.shape[1] != 1:
        raise NoRule(name, "used by baddbmm in an unusual way")
    output_EBTY = bmm(watch, name, batch1, batch2).unflatten(1, (watch.num_rows, -1))
    return (output_EBTY + per_row(watch, name, input).transpose(0, 1)).flatten(1, 2)


def current_watch(like: Tensor) -> Any:
    """The watch that is on; it answers for this function itself."""
    return handle_torch_function(current_watch, (like,), like)


def experts_in(model: nn.Module) -> list[nn.Module]:
    """The mixtures of experts in a model, as transformers writes them."""
    return [module for module in model.modules() if all(hasattr(module, told) for told in _TOLD)]


@contextmanager
def rows_apart(experts: list[nn.Module]) -> Iterator[None]:
    """Let these experts send each row's tokens about by themselves."""
    changed = [(module, vars(module).get("forward")) for module in experts]
    try:
        for module, _ in changed:
            module.forward = partial(_by_row, module)
        yield
    finally:
        for module, before in changed:
            del module.forward
            if before is not None:
                module.forward = before


def _by_row(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    _, hidden_NX, choices_NK, shares_NK = bound.args
    num_rows, each_takes = current_watch(hidden_NX).num_rows, choices_NK.shape[1]
    # A compiler's stand-ins do not say which expert a token takes.
    if len(hidden_NX) % num_rows or type(choices_NK) is not Tensor:
        raise NoRule("the model", f"experts of {len(hidden_NX)} tokens for {num_rows} rows")
    choices_BS, shares_BS = (each.reshape(num_rows, -1) for each in (choices_NK, shares_NK))
    order_BS = choices_BS.argsort(dim=1, stable=True)
    sizes_BE = functional.one_hot(choices_BS, module.num_experts).sum(1).tolist()
    hidden_BTX = hidden_NX.reshape(num_rows, -1, hidden_NX.shape[-1])
    values_BSX = _taken(hidden_BTX.repeat_interleave(each_takes, dim=1), order_BS)
    num_tokens = len(hidden_NX) // num_rows
    through = partial(_through_experts, module, sizes_BE, num_tokens)
    gated = module._apply_gate if module.has_gate else module.act_fn
    values_BSX = through(
        "down_proj", gated(through("gate_up_proj" if module.has_gate else "up_proj", values_BSX))
    )
    if module.has_post_expert_norm:
        values_BSX = module.post_expert_norm(values_BSX)
    values_BSX = values_BSX * shares_BS.gather(1, order_BS)[..., None]
    in_place_BSX = _taken(values_BSX, order_BS.argsort(dim=1))
    return in_place_BSX.view(*choices_NK.shape, -1).sum(1).to(hidden_NX.dtype)


def _taken(values_BSX: Tensor, places_BS: Tensor) -> Tensor:
    return values_BSX.gather(1, places_BS[..., None].expand_as(values_BSX))


def _through_experts(
    module: Any, sizes_BE: list[list[int]], num_tokens: int, name: str, values_BSX: Tensor
) -> Tensor:
    watch, weight = current_watch(values_BSX), getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    watch.check_constant(name, weight, bias)
    how = (sizes_BE, num_tokens, module.is_transposed, watch)
    return _Routed.apply(watch.anchor, values_BSX, weight, bias, *how)


class _Routed(torch.autograd.Function):
    """Each row's tokens, in the order of their matrices, each times its own."""

    @staticmethod
    def forward(
        context: Any,
        anchor: Tensor,
        input_BSX: Tensor,
        weight: Tensor,
        bias: Any,
        sizes_BE: list[list[int]],
        most: int,
        transposed: bool,
        watch: Any,
    ) -> Tensor:
        """No row sends an expert more than `most` tokens, however it chooses."""
        context.watch, context.weight, context.bias = watch, weight, bias
        context.sizes_BE, context.most, context.transposed = sizes_BE, most, transposed
        context.input_dtype = input_BSX.dtype
        dtype = product_dtype(input_BSX)
        own_BSX, own_EXY = input_BSX.to(dtype), weight.detach().to(dtype)
        own_EXY = own_EXY if transposed else own_EXY.mT
        own_EY = None if bias is None else bias.detach().to(dtype)
        context.save_for_backward(own_BSX, own_EXY)

        def product(values_NX: Tensor, expert: int) -> Tensor:
            output_NY = values_NX @ own_EXY[expert]
            return output_NY if own_EY is None else output_NY + own_EY[expert]

        return _each_alone(own_BSX, sizes_BE, own_EXY.shape[2], product)

    @staticmethod
    def backward(context: Any, gradient_BSY: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        own_BSX, own_EXY = context.saved_tensors
        lefts, rights = (
            _by_expert(each, context.sizes_BE, context.most) for each in (gradient_BSY, own_BSX)
        )
        watch = context.watch
        for expert, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            if watch.is_watched(context.weight):
                use = Outer(right, left) if context.transposed else Outer(left, right)
                watch.note_matrix(context.weight, expert, use)
            if watch.is_watched(context.bias):
                watch.note_matrix(context.bias, expert, Outer(left))
        back = None
        if context.needs_input_grad[1]:
            back = _each_alone(
                gradient_BSY,
                context.sizes_BE,
                own_BSX.shape[2],
                lambda values_NY, expert: values_NY @ own_EXY[expert].T,
            ).to(context.input_dtype)
        return None, back, None, None, None, None, None, None


def _each_alone(
    values_BSX: Tensor,
    sizes_BE: list[list[int]],
    width: int,
    product: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """A product for each row and expert."""
    output_BSY = values_BSX.new_empty(*values_BSX.shape[:2], width)
    for values_SX, output_SY, sizes_E in zip(values_BSX, output_BSY, sizes_BE, strict=True):
        parts = zip(values_SX.split(sizes_E), output_SY.split(sizes_E), strict=True)
        for expert, (part_NX, room_NY) in enumerate(parts):
            if len(part_NX):
                room_NY.copy_(product(part_NX, expert))
    return output_BSY


def _by_expert(values_BSX: Tensor, sizes_BE: list[list[int]], most: int) -> list[Tensor]:
    """Each expert's tokens, [B, T, X], zeros up to the most that a row can send: to the most that one
    of this batch sends, the others' norms would be rounded by it."""
    parts = [
        values_SX.split(sizes_E) for values_SX, sizes_E in zip(values_BSX, sizes_BE, strict=True)
    ]
    return [
        torch.stack([functional.pad(own_NX, (0, 0, 0, most - len(own_NX))) for own_NX in of_expert])
        for of_expert in zip(*parts, strict=True)
    ]


def check_no_batch_losses(model: nn.Module) -> None:
    """Refuse what makes one row's experts, or the loss, hang on the other rows of the batch."""
    config = getattr(model, "config", None)
    for name in _CAPACITIES:
        if getattr(config, name, None):
            raise UsageError(
                f"{name}={getattr(config, name)} lets an expert take only so many tokens of a batch, so who shares it "
                f"decides on everybody's. Set config.{name} to None, or give a model without a limit."
            )
    if getattr(config, "output_router_logits", False):
        raise UsageError(
            "output_router_logits=True asks for a loss that balances experts over the whole batch: it mixes units and "
            "cannot be clipped. Set model.config.output_router_logits = False."
        )
