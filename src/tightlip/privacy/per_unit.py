"""`clipped_gradients`: per-unit clipping of any language model's gradient, in one call.

Shapes: B rows, T positions, U units.
"""

import torch
from torch import Tensor, nn

from tightlip.core.errors import UsageError
from tightlip.privacy.clipping import Clip, ClippedGradients, trainable_parameters
from tightlip.privacy.rows import Rows, groups_of_rows, logits_of
from tightlip.privacy.self_check import no_rule_for

__all__ = ["check_no_buffers", "clipped_gradients", "logits_of", "no_rule_for"]

_BUFFERED = (nn.modules.batchnorm._BatchNorm,)


def clipped_gradients(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    *,
    clip_norm: float,
    attention_mask: Tensor | None = None,
    units: Tensor | None = None,
    per_layer: bool = False,
) -> ClippedGradients:
    """The sum over units of clipped gradients, without noise, and every unit's norm.

    A row's loss is the mean cross-entropy over its labels that are not -100, shifted as
    transformers does; a unit's loss is the mean over its rows. `units` says whose each row is;
    without it every row is a unit of its own. Norms come in the order of the sorted distinct
    unit ids. A unit whose loss or gradient is not finite contributes nothing.

    Holds:
        exact: equals clipping each unit's gradient from plain autograd.
        bounded: no unit moves the sum by more than `clip_norm`.
        whole: every trainable parameter is there, once, by its first name; an unused one is 0.
        kept: the model's mode, its gradients and its weights stay as they were.
    """
    clip = Clip(norm=clip_norm, per_layer=per_layer)
    parameters = trainable_parameters(model)
    _check_shapes(input_ids, labels, attention_mask, units)
    check_no_buffers(model)
    slow = no_rule_for(model, parameters, input_ids, with_mask=attention_mask is not None)
    if units is None:
        units = torch.arange(len(input_ids))
    distinct, place_B = torch.unique(units.cpu(), return_inverse=True)
    groups = list(groups_of_rows(place_B, len(distinct)))
    parts = [
        Rows.chosen(group, input_ids, labels, attention_mask).clipped(
            model, parameters, clip, slow=slow is not None
        )
        for group in groups
    ]
    return _joined(parts, torch.cat([group.units for group in groups]).to(input_ids.device))


def check_no_buffers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BUFFERED):
            raise UsageError(
                f"{name} is a {type(module).__name__}: it mixes rows, and keeps averages of private text that no noise "
                f"hides. Replace it with a LayerNorm."
            )


def _check_shapes(ids: Tensor, labels: Tensor, mask: Tensor | None, units: Tensor | None) -> None:
    if ids.ndim != 2 or not len(ids) or labels.shape != ids.shape:
        raise UsageError(
            f"input_ids has shape {tuple(ids.shape)} and labels {tuple(labels.shape)}. Give one row of each per document."
        )
    if mask is not None and mask.shape != ids.shape:
        raise UsageError(
            f"attention_mask has shape {tuple(mask.shape)} for ids {tuple(ids.shape)}."
        )
    if units is not None and units.shape != ids.shape[:1]:
        raise UsageError(
            f"units has shape {tuple(units.shape)} for {len(ids)} rows. Give one id per row."
        )


def _joined(parts: list[ClippedGradients], units: Tensor) -> ClippedGradients:
    """One sum of all groups; `units` says whose norms and losses they are, group by group."""
    gradients = parts[0].gradients
    for part in parts[1:]:
        gradients = {name: gradients[name] + part.gradients[name] for name in gradients}
    order_U = units.argsort()
    norms, losses = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("norms", "losses")
    )
    return ClippedGradients(gradients, norms[order_U], losses[order_U])
