"""The loss a unit's gradient is taken of, and its way back through the logits.

A row's loss is the mean cross-entropy over its targets, a unit's the mean over its rows; both
means are weights of tokens here. Shapes: B rows, T positions, V vocabulary, N = B·T.
"""

from typing import Any

import torch
from torch import Tensor

NO_LABEL = -100
CHUNK = 1 << 20  # logits in float32 at once on a CPU: few enough to stay in its cache


def next_targets(labels_BT: Tensor) -> Tensor:
    """What each position predicts: the label after it, as transformers shifts them."""
    return torch.nn.functional.pad(labels_BT[:, 1:], (0, 1), value=NO_LABEL)


def token_weights(targets_BT: Tensor, rows_of_unit_B: Tensor) -> Tensor:
    """A token's share of its unit's loss; 0 where there is no target.

    `rows_of_unit_B` is how many rows the row's unit has, rows without a target included.
    """
    has_target = targets_BT != NO_LABEL
    num_targets_B = has_target.sum(1).clamp(min=1) * rows_of_unit_B
    return has_target.double() / num_targets_B[:, None]


class RowLosses(torch.autograd.Function):
    """Σ over a row's tokens of weight · cross-entropy.

    The way back writes the gradient of every logit: softmax minus the target, times the
    weight. Where a row's logits are not all finite its loss is not, and its gradient is 0, so
    the gradient of the logits is always finite.
    """

    @staticmethod
    def forward(
        context: Any,
        logits_BTV: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        watch: Any = None,
        width: int | None = None,
        in_place: bool = False,
    ) -> Tensor:
        """Logits from `width` on are padding. With `in_place` nobody looks at them again, and their
        gradient may take their place."""
        context.width = logits_BTV.shape[2] if width is None else width
        targets_BT = targets_BT.clamp(min=0)
        flat_NV = logits_BTV.flatten(0, 1)
        if has_kernels(flat_NV):
            from tightlip.privacy import kernels

            log_sums_N, at_target_N = kernels.log_sums(flat_NV, targets_BT.flatten(), context.width)
        elif _is_plain(flat_NV):
            log_sums_N = torch.cat([_wide(flat_NV[part]).logsumexp(1) for part in _parts(flat_NV)])
            at_target_N = _wide(flat_NV.gather(1, targets_BT.flatten()[:, None]))[:, 0]
        else:
            wide = _wide(flat_NV)
            log_sums_N = wide.logsumexp(1)
            at_target_N = wide.gather(1, targets_BT.flatten()[:, None])[:, 0]
        losses_BT = (log_sums_N - at_target_N).view(targets_BT.shape)
        context.save_for_backward(logits_BTV, targets_BT, log_sums_N, weights_BT)
        context.watch, context.in_place = watch, in_place and _is_plain(flat_NV)
        # 0 · inf is no number: a position that does not count must not count here either.
        return torch.where(weights_BT > 0, losses_BT * weights_BT.to(losses_BT.dtype), 0).sum(1)

    @staticmethod
    def backward(context: Any, gradient_B: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits_BTV, targets_BT, log_sums_N, weights_BT = context.saved_tensors
        flat_NV = logits_BTV.detach().flatten(0, 1)
        weights_N = (weights_BT * gradient_B[:, None]).flatten().to(log_sums_N.dtype)
        weights_N = torch.where(log_sums_N.isfinite(), weights_N, 0)
        given = (targets_BT.flatten(), log_sums_N, weights_N)
        if has_kernels(flat_NV):
            from tightlip.privacy import kernels

            back_NV = flat_NV
            if context.in_place:
                kernels.logit_gradient_into(flat_NV, flat_NV, *given, context.width)
            else:
                back_NV = kernels.logit_gradient(flat_NV, *given, context.width)
        elif not _is_plain(flat_NV):
            back_NV = _back(flat_NV, *given)
        else:
            back_NV = flat_NV if context.in_place else flat_NV.new_empty(flat_NV.shape)
            for part in _parts(flat_NV):
                _back_into(back_NV[part], flat_NV[part], *(each[part] for each in given))
        back_BTV = back_NV.view(logits_BTV.shape)
        if context.watch is not None:
            context.watch.note_finite(back_BTV)
        return back_BTV, None, None, None, None, None


def has_kernels(values: Tensor) -> bool:
    return values.device.type == "cuda" and values.dtype != torch.float64


def _back(logits_NV: Tensor, targets_N: Tensor, log_sums_N: Tensor, weights_N: Tensor) -> Tensor:
    shares_NV = torch.exp(_wide(logits_NV) - log_sums_N[:, None])
    places_1V = torch.arange(logits_NV.shape[1], device=logits_NV.device)[None]
    shares_NV = shares_NV - (places_1V == targets_N[:, None]).to(shares_NV.dtype)
    # A weight of 0 wipes out what is no number.
    back_NV = torch.where(weights_N[:, None] > 0, shares_NV * weights_N[:, None], 0)
    return back_NV.to(logits_NV.dtype)


def _back_into(
    out_NV: Tensor, logits_NV: Tensor, targets_N: Tensor, log_sums_N: Tensor, weights_N: Tensor
) -> None:
    """The same in place."""
    room_NV = out_NV if out_NV.dtype == log_sums_N.dtype else _wide(logits_NV)
    torch.sub(logits_NV, log_sums_N[:, None], out=room_NV).exp_()
    room_NV.scatter_add_(1, targets_N[:, None], -torch.ones_like(weights_N)[:, None])
    room_NV.mul_(weights_N[:, None])
    if bool((weights_N == 0).any()):  # 0 · NaN is NaN
        room_NV[weights_N == 0] = 0
    if room_NV is not out_NV:
        out_NV.copy_(room_NV)


def _parts(values_NV: Tensor) -> list[slice]:
    size = max(1, CHUNK // max(1, values_NV.shape[1]))
    return [slice(start, start + size) for start in range(0, len(values_NV), size)]


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _is_plain(values: Tensor) -> bool:
    """Whether these are real numbers now, and not a tracer's stand-ins for them."""
    return type(values) is Tensor
