"""From clipped sums to changed weights: noise once, and what follows from it alone."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightlip.privacy.noise_schedules import Noise


def release(
    sums: list[Tensor],
    parameters: Iterable[nn.Parameter],
    optimizer: Optimizer,
    noise: Noise | None,
    *,
    applies: bool = True,
    **amounts: float,
) -> None:
    """Give the parameters the noisy sums as gradients and, if it `applies` them, take the
    optimizer's step; without `noise`, the sums as they are.

    Holds:
        settled: no step applies a value whose cell is open.
    """
    parameters = list(parameters)
    optimizer.zero_grad()  # also of what is frozen: an old gradient has no noise
    if noise is None:
        times = amounts["share"] * amounts.get("unit", 1.0)
        sums = [each.double() * times for each in sums]
    elif applies and hasattr(noise, "launch") and _can_skip(optimizer):
        # The optimizer is begun before the noise has ended, and does nothing where a cell is open: a
        # GPU need not wait for Python in between.
        settle = noise.launch(sums, **amounts)
        give(sums, parameters)
        with _skipping(optimizer, noise.is_open):  # type: ignore[attr-defined]
            optimizer.step()
        if not settle():
            return
    else:
        noise.add(sums, **amounts)
    give(sums, parameters)
    if applies:
        optimizer.step()


def give(sums: list[Tensor], parameters: Iterable[nn.Parameter]) -> None:
    """The sums as gradients, in each parameter's kind of number."""
    for parameter, each in zip(parameters, sums, strict=True):
        values = each.view(torch.float32) if each.dtype == torch.int32 else each
        parameter.grad = values.to(parameter.dtype)


def _can_skip(optimizer: Optimizer) -> bool:
    """Whether it asks the device if it may step, as torch's fused ones do for mixed precision."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    fused = all(group.get("fused") for group in groups)
    return fused and getattr(optimizer, "_step_supports_amp_scaling", False)


@contextmanager
def _skipping(optimizer: Any, is_open: Tensor) -> Iterator[None]:
    optimizer.found_inf, optimizer.grad_scale = is_open, None
    try:
        yield
    finally:
        del optimizer.found_inf, optimizer.grad_scale
