"""Clipped gradients of units in one forward and one backward pass.

Shapes: U units, M rows of each, B rows, T positions.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tightlip.core.devices import products_in
from tightlip.core.errors import UsageError
from tightlip.privacy import rounding
from tightlip.privacy.exact_sums import ExactSums, rounded_off, step_of
from tightlip.privacy.layers import Layout, wide, zeros_for
from tightlip.privacy.norms import Measured, Norms, added_up
from tightlip.privacy.row_losses import RowLosses, has_kernels
from tightlip.privacy.watching import NoRule, Watch


@dataclass(frozen=True, eq=False)
class ClippedGradients:
    """The sum over units of clipped gradients, and each unit's norm before clipping.

    `norms` and `losses` belong to single units: they are private and must not be published.
    """

    gradients: dict[str, Tensor]
    norms: Tensor
    losses: Tensor


@dataclass(frozen=True, kw_only=True)
class Clip:
    """How gradients are clipped: flat, or a share of the bound for every layer.

    `exact` sums are whole numbers of `step`. Without `wipes` a unit that is not finite may make the
    sum no number, rather than count nothing.
    """

    norm: float
    per_layer: bool = False
    exact: bool = False
    wipes: bool = True

    @property
    def step(self) -> float:
        """What one unit of a sum's numbers stands for."""
        return step_of(self.norm) if self.exact else 1.0

    def __post_init__(self) -> None:
        if not self.norm >= 1e-30:  # float32 has too few digits left for factors below
            raise UsageError(
                f"clip_norm={self.norm} bounds nothing. Use a number from 1e-30 up, such as 1.0."
            )


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes, a shared parameter once under its first name."""
    trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not trainable:
        raise UsageError("The model has no parameter that requires a gradient. Unfreeze some.")
    return trainable


def watched_pass(
    parameters: dict[str, nn.Parameter],
    forward: Callable[[], Tensor],
    targets_BT: Tensor,
    weights_BT: Tensor,
    *,
    look_for_unseen: bool,
) -> tuple[Watch, Tensor]:
    """Forward and back once: every use of every parameter, and each row's loss.

    Raises NoRule, before anything is changed, where a parameter is used in a way that no rule
    covers. `look_for_unseen` asks autograd itself whether it can reach a parameter; a CUDA
    graph cannot be asked while it is captured, only before.
    """
    watch = Watch(parameters, *targets_BT.shape)
    asked = [watch.anchor, *(parameters.values() if look_for_unseen else ())]
    # The way back is watched too: with gradient checkpointing layers run once more there.
    try:
        with _no_reentrant(), torch.enable_grad(), watch:
            logits_BTV = forward()
            whole = watch.straight_from_a_layer(logits_BTV)
            straight = whole is not None and whole.ndim == 3
            if straight and whole is not logits_BTV:
                straight = has_kernels(whole)  # plain operations know of no padding
            losses_B = RowLosses.apply(
                whole if straight else logits_BTV,
                *(targets_BT, weights_BT, watch, logits_BTV.shape[2], straight),
            )
            reached = watch.backward(losses_B.sum(), asked)
        for name, gradient in zip(parameters, reached[1:], strict=False):
            if gradient is not None:
                raise NoRule(name, "used by an operation that cannot be seen")
    except BaseException:
        watch.forget()
        raise
    return watch, losses_B.detach()


REENTRANT = (
    "Gradient checkpointing with use_reentrant=True cannot be clipped per unit. Use "
    "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})."
)


@contextmanager
def _no_reentrant() -> Iterator[None]:
    """Say what to do about checkpoints that run a backward pass of their own inside ours.

    What they reach would land in `.grad`, unclipped and unseen; torch refuses them here too.
    """
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise UsageError(REENTRANT) from error


def clipped_sum(
    watch: Watch,
    parameters: dict[str, nn.Parameter],
    losses_B: Tensor,
    layout: Layout,
    clip: Clip,
    shares_U: Tensor | None = None,
) -> ClippedGradients:
    """From the uses noted to norms, factors and the sum.

    A unit's bound is its share, above 0 and at most 1, of the clip's; all of it where none is given.
    """
    how = rounding.Products(tf32=rounding.products_in_tf32(losses_B.device), exact=clip.exact)
    norms = Norms(layout, how)
    losses_U = layout.sum_by_unit(losses_B)
    if shares_U is None:
        shares_U = torch.ones_like(losses_U)
    with products_in():
        measured = norms.of_all(watch.uses, parameters)
    groups = _groups(parameters, clip)
    lengths = [
        _lengths([measured[name] for name in names if name in measured], losses_U)
        for names in groups
    ]
    total_U = added_up([squares_U for squares_U, _ in lengths])
    fine_U = (added_up([off_U for _, off_U in lengths]) + total_U + losses_U).isfinite()
    gradients: dict[str, Tensor] = {}
    # What tf32 rounds is in the norms' allowance; a CPU's bfloat16 is not, and exact sums have none.
    precise = nullcontext if how.tf32 and not clip.exact else products_in
    for names, (squares_U, off_U) in zip(groups, lengths, strict=True):
        bound = clip.norm / math.sqrt(len(groups))
        if clip.exact:
            parts = [rounded_off(watch.uses[n], parameters[n], layout, clip.step) for n in names]
            bound -= math.hypot(*parts)
        bound /= 1 + rounding.slack(total_U.dtype)
        # A share multiplies last: times 1 nothing changes, not even a last bit.
        room_U = bound / (squares_U.sqrt() + off_U) * shares_U.to(squares_U.dtype)
        factors_U = torch.where(fine_U, room_U.clamp(max=1.0), 0)
        sums = _sums(factors_U, fine_U, layout, clip, watch)
        with precise():
            for name in names:
                own, like = watch.uses[name], parameters[name]
                gradients[name] = sums.sum(own, like) if own else sums.zeros(like)
    ordered = {name: gradients[name] for name in parameters}
    return ClippedGradients(ordered, total_U.sqrt(), losses_U)


def _sums(
    factors_U: Tensor, fine_U: Tensor, layout: Layout, clip: Clip, watch: Watch
) -> rounding.Scaled | ExactSums:
    if clip.exact:
        return ExactSums(factors_U, layout, clip.step)
    on_cpu = factors_U.device.type == "cpu" and type(fine_U) is Tensor
    wipe = clip.wipes and not (on_cpu and bool(fine_U.all()))
    return rounding.Scaled(layout.to_rows(factors_U), wipe=wipe, finite=watch.finite)


def _lengths(parts: list[Measured], like_U: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of some parameters together, and the most that rounding adds to them."""
    nothing_U = torch.zeros_like(like_U)
    rounded = [part.rounded_U for part in parts if part.rounded_U is not None]
    squares_U = added_up([part.squares_U for part in parts] or [nothing_U]).clamp(min=0)
    if not rounded:
        return squares_U, nothing_U
    return squares_U, rounding.summed_rows(torch.stack(rounded, 1).square()).sqrt()


def unit_by_unit(
    parameters: dict[str, nn.Parameter],
    forward: Callable[[slice], Tensor],
    targets_BT: Tensor,
    weights_BT: Tensor,
    layout: Layout,
    clip: Clip,
    shares_U: Tensor | None = None,
    *,
    beside: bool = False,
) -> ClippedGradients:
    """The same by plain autograd, one row after the other: slow, and right for any model.

    Rows run alone, so that a model that mixes rows cannot mix one unit with another. With `beside`
    they run among all the others, whose losses must count nothing.
    """
    kind = torch.float64 if clip.exact else None
    total = {name: zeros_for(each).to(kind or wide(each)) for name, each in parameters.items()}
    groups = _groups(parameters, clip)
    norms, losses = [], []
    for unit in range(layout.num_units):
        first = unit * layout.rows_per_unit
        rows = [
            slice(row, row + 1)
            for row in range(first, first + layout.rows_per_unit)
            if bool(weights_BT[row].any())
        ]
        rows = [slice(None)] if rows and beside else rows
        loss, gradients = _plain(parameters, forward, targets_BT, weights_BT, rows)
        squares = {
            name: torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            for name, gradient in gradients.items()
        }
        norm = torch.stack([*squares.values()]).sum().sqrt().to(loss.dtype) if squares else loss * 0
        norms.append(norm)
        losses.append(loss)
        if not bool(norm.isfinite() & loss.isfinite()):
            continue
        bound = clip.norm / math.sqrt(len(groups)) / (1 + rounding.slack(norm.dtype))
        bound *= 1.0 if shares_U is None else float(shares_U[unit])
        for names in groups:
            own = [squares[name] for name in names if name in squares]
            if own:
                group_norm = float(torch.stack(own).sum().sqrt())
                room = bound
                if clip.exact:  # rounding to steps comes on top
                    size = sum(parameters[name].numel() for name in names)
                    room -= math.sqrt(size) * clip.step / 2
                factor = 1.0 if group_norm <= room else room / group_norm
                for name in {*names} & {*gradients}:
                    if clip.exact:
                        total[name] += (gradients[name].double() * (factor / clip.step)).round()
                    else:
                        total[name].add_(gradients[name], alpha=factor)
    return ClippedGradients(total, torch.stack(norms), torch.stack(losses))


def _plain(
    parameters: dict[str, nn.Parameter],
    forward: Callable[[slice], Tensor],
    targets_BT: Tensor,
    weights_BT: Tensor,
    rows: list[slice],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of some rows, each slice of them run by itself."""
    first = next(iter(parameters.values()))
    loss = torch.zeros((), dtype=wide(first), device=first.device)
    gradients: dict[str, Tensor] = {}
    for row in rows:
        # cuDNN's recurrent layers have no way back in evaluation mode; torch's own have.
        with _no_reentrant(), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            own = RowLosses.apply(forward(row), targets_BT[row], weights_BT[row], None).sum()
            of_row = Watch.backward(own, list(parameters.values()))
        loss = loss + own.detach()
        for name, gradient in zip(parameters, of_row, strict=True):
            if gradient is not None:
                own_part = gradient.to(wide(gradient))
                gradients[name] = gradients[name] + own_part if name in gradients else own_part
    return loss, gradients


def _groups(parameters: dict[str, nn.Parameter], clip: Clip) -> list[list[str]]:
    """Every parameter in exactly one group: all together, or those of a layer."""
    if not clip.per_layer:
        return [list(parameters)]
    layers: dict[str, list[str]] = {}
    for name in parameters:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())
