"""From clipped sums to changed weights: noise once, and what follows from it alone.

Of several processes every one adds up its own units. Of each entry of the sum one process is the
owner: it alone is sent all shares, puts noise on their sum once, and gives out what it released.
Shapes: N processes, K entries that one of them owns.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightlip.core.errors import UsageError
from tightlip.core.grid_gaussian import NotFinite
from tightlip.core.processes import Processes
from tightlip.privacy.noise_schedules import Noise
from tightlip.privacy.shards import is_shard, kept_parameters
from tightlip.privacy.sources import Source


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
    sums = [each.contiguous() for each in sums]  # noise goes by memory
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
        try:
            was_open = settle()
        except NotFinite:
            optimizer.zero_grad()  # some of it has no noise
            raise
        if not was_open:
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
        parameter.grad = _lying_as(values.to(parameter.dtype), parameter)


def _lying_as(values: Tensor, parameter: Tensor) -> Tensor:
    """Fused optimizers go by memory, and would move other weights of one that lies transposed."""
    if values.stride() == parameter.stride():
        return values
    return torch.empty_like(parameter, requires_grad=False).copy_(values)


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


_TOGETHER = 1 << 23  # entries that are sent at once: 64 MiB
_ROWS = 1024  # of a text that are read at once


class Shares:
    """Who owns which entries of the trained weights: of a shard whoever has it, of a weight that is
    whole on every process one N-th each.

    Holds:
        once: every entry gets noise once, from its owner's own source, on the sum over all processes.
        same: every process is given the same gradients, to the bit.
        all_or_none: where one owner finds no number to put noise on, nobody is given anything.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self._processes, self._model = processes, model
        self._parameters = list(kept_parameters(model).values())
        self._sizes = [self._size(each) for each in self._parameters]
        self._groups = list(_groups(self._parameters))

    def release(
        self,
        sums: list[Tensor],
        optimizer: Optimizer,
        noise: Noise | None,
        *,
        applies: bool,
        scale: float,
        share: float,
        unit: float = 1.0,
    ) -> None:
        """Give the parameters the noisy sums over all processes as gradients and, if it `applies`
        them, take the optimizer's step; without `noise`, the sums as they are."""
        owned = self._owned(sums)
        failed = torch.zeros((), device=owned[0].device)
        some = [each for each in owned if len(each)]  # of few rows the last process has none
        try:
            if noise is None:
                owned = [each * (share * unit) for each in owned]
            elif some:
                noise.add(some, scale=scale, share=share, unit=unit)
        except NotFinite:
            failed += 1
        self._processes.add_up([failed])
        if bool(failed):
            raise NotFinite(
                "A sum is no number that noise could hide. The step was charged and not applied; lower the learning rate, or look "
                "for weights that are not finite."
            )
        optimizer.zero_grad()  # also of what is frozen: an old gradient has no noise
        self._give(owned)
        if applies:
            optimizer.step()

    def digest(self, *, frozen: bool = False) -> str:
        """SHA-256 of the trained weights that every process has whole, the same on all of them; with
        what is `frozen` too, since who is drawn decides which process runs whose rows."""
        every = [*self._model.parameters(), *self._model.buffers()] if frozen else self._parameters
        return _digest(each for each in every if not is_shard(each))

    def _owned(self, sums: list[Tensor]) -> list[Tensor]:
        """The sums over all processes, of each parameter the entries that this one owns; in float64,
        which holds whole numbers exactly and rounds others far below what was measured of a pass."""
        owned: list[Tensor] = []
        for numbers in self._groups:
            rows = [self._by_owner(sums[number], self._sizes[number]) for number in numbers]
            own_K = self._processes.own_part(torch.cat(rows, 1))
            parts = own_K.split([self._sizes[number] for number in numbers])
            owned += [
                part[: self._num_own(number)] for number, part in zip(numbers, parts, strict=True)
            ]
        return owned

    def _give(self, owned: list[Tensor]) -> None:
        for numbers in self._groups:
            own = [owned[number].to(self._parameters[number].dtype) for number in numbers]
            if is_shard(self._parameters[numbers[0]]):
                for number, each in zip(numbers, own, strict=True):
                    self._parameters[number].grad = _as_shard(each, self._parameters[number])
                continue
            sizes = [self._sizes[number] for number in numbers]
            padded = [_padded(each, size) for each, size in zip(own, sizes, strict=True)]
            parts_NK = self._processes.all_parts(torch.cat(padded))
            for number, part_NK in zip(numbers, parts_NK.split(sizes, 1), strict=True):
                parameter = self._parameters[number]
                values = part_NK.reshape(-1)[: parameter.numel()].view(parameter.shape)
                parameter.grad = _lying_as(values, parameter)

    def _size(self, parameter: Tensor) -> int:
        """How many entries each process owns; the last ones may own fewer."""
        of_row = parameter.shape[1:].numel() if is_shard(parameter) else 1  # shards are whole rows
        return -(-parameter.numel() // max(1, of_row) // self._processes.size) * of_row

    def _num_own(self, number: int) -> int:
        size = self._sizes[number]
        left = self._parameters[number].numel() - self._processes.rank * size
        return min(size, max(0, left))

    def _by_owner(self, sums: Tensor, size: int) -> Tensor:
        flat = sums.to(torch.float64).reshape(-1)
        return _padded(flat, size * self._processes.size).view(self._processes.size, size)


def _groups(parameters: list[nn.Parameter]) -> Iterator[list[int]]:
    """Parameters that are sent together: one after the other, all of a kind, and not too many."""
    group: list[int] = []
    for number, parameter in enumerate(parameters):
        first = parameters[group[0]] if group else parameter
        alike = (is_shard(first), first.dtype) == (is_shard(parameter), parameter.dtype)
        size = sum(parameters[each].numel() for each in group) + parameter.numel()
        if group and not (alike and size <= _TOGETHER):
            yield group
            group = []
        group.append(number)
    yield group


def _padded(values: Tensor, size: int) -> Tensor:
    return nn.functional.pad(values, (0, size - len(values)))


def _as_shard(values: Tensor, parameter: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values.view(parameter.to_local().shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def check_same_text(source: Source, processes: Processes) -> None:
    """Refuse where processes hold other rows, or other people's: a row's number is all that they are
    told of it."""
    processes.agreed(_text_digest(source), "the texts they train on", is_shown=False)


def _text_digest(source: Source) -> str:
    def parts() -> Iterator[np.ndarray]:
        yield np.asarray(source.unit_of_row, np.int64)
        yield np.asarray(source.lengths, np.int64)
        yield np.frombuffer(source.fingerprint.encode(), np.uint8).copy()
        if source.fingerprint:  # of a corpus, whose rows need not all be read
            return
        for start in range(0, len(source.lengths), _ROWS):
            rows = np.arange(start, min(start + _ROWS, len(source.lengths)))
            longest = int(source.lengths[rows].max())
            yield from (each.numpy() for each in source.gather(rows, longest))

    return _digest(torch.from_numpy(each) for each in parts())


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = sha256()
    for each in tensors:
        digest.update(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


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
        if not (state := self.state[weight]):
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
