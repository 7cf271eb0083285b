"""Adam that takes the noise's own share out of its second moment."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tightlip.core.errors import UsageError


class CorrectedAdam(Optimizer):
    """Adam, or with `decoupled` weight decay AdamW, for gradients with noise of known variance Φ.

    DP-AdamBC (Tang, Shpilevskiy and Lécuyer 2024; no library has it): squares of noisy gradients
    are Φ too large on average, and where noise prevails Adam divides every weight by the same √Φ.
    Here the denominator is √max(v̂ − Φ, γ'). The paper's γ' is a number to be tuned anew for each
    noise and batch. Ours is `floor` standard deviations of what noise alone leaves in v̂: v̂ weighs
    squares of t normal numbers, each of variance 2Φ², by powers of β₂, so that the variance is
    2Φ²·(1 − β₂)(1 + β₂ᵗ) / ((1 + β₂)(1 − β₂ᵗ)). Below one of them nobody can tell v̂ − Φ from 0.

    `PrivateTraining` sets `noise_variance`, Φ = (σ·C/B)², which is public.

    Holds:
        by_hand: a step is the formula's, weight by weight.
        without_noise: where Φ is 0 it is torch's Adam or AdamW.
    """

    noise_variance: float | None = None

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        floor: float = 1.0,
    ) -> None:
        if not floor > 0:
            raise UsageError(f"floor={floor} would divide by next to nothing. Use 1 or more.")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "decoupled": decoupled, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if self.noise_variance is None:
            raise UsageError(
                "CorrectedAdam does not know how much noise there is. Give it to PrivateTraining or a private trainer, which "
                "tell it, or set noise_variance."
            )
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self._step(group, self.noise_variance)
        return loss

    def _step(self, group: dict[str, Any], noise_variance: float) -> None:
        weights = [each for each in group["params"] if each.grad is not None]
        if not weights:
            return
        states = [self._state_of(each) for each in weights]
        first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_add_([state["step"] for state in states], 1)
        steps = [float(state["step"]) for state in states]
        (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
        gradients = [each.grad for each in weights]
        if decay and group["decoupled"]:
            torch._foreach_mul_(weights, 1 - rate * decay)
        elif decay:
            gradients = torch._foreach_add(gradients, weights, alpha=decay)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        below = torch._foreach_div(second, [1 - beta2**t for t in steps])
        torch._foreach_sub_(below, noise_variance)
        least = [group["floor"] * noise_variance * _spread(beta2, t) for t in steps]
        torch._foreach_clamp_min_(below, least)
        torch._foreach_sqrt_(below)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_addcdiv_(weights, first, below, [-rate / (1 - beta1**t) for t in steps])

    def _state_of(self, weight: nn.Parameter) -> dict[str, Any]:
        """Named as torch's Adam names it, and so kept and brought back in the same way."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(weight) for _ in range(2))
        return state


def _spread(beta2: float, step: float) -> float:
    """Standard deviation of v̂ after `step` gradients of nothing but noise, in Φ."""
    past = beta2**step
    return math.sqrt(2 * (1 - beta2) * (1 + past) / ((1 + beta2) * (1 - past)))


def tell_noise(optimizer: Optimizer, deviation: float, mode: str | None) -> None:
    """Tell an optimizer that corrects for it how much noise every entry of a gradient has."""
    if not isinstance(optimizer, CorrectedAdam):
        return
    if mode in ("scale", "as-published"):
        raise UsageError(
            f"adaptive={mode!r} changes the noise from step to step, and CorrectedAdam takes one variance out of its second "
            "moment. Use torch's Adam, or mode 'clip'."
        )
    optimizer.noise_variance = deviation**2
