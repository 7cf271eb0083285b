"""`clipped_gradients`: per-unit clipping of any language model's gradient, in one call.

Shapes: B rows, T positions, U units, M rows of each.
"""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tightlip.core.errors import UsageError
from tightlip.privacy.clipping import (
    Clip,
    ClippedGradients,
    one_pass,
    trainable_parameters,
    unit_by_unit,
)
from tightlip.privacy.row_losses import NO_LABEL, next_targets, token_weights
from tightlip.privacy.uses import Layout
from tightlip.privacy.watching import NoRule

_BUFFERED = (nn.modules.batchnorm._BatchNorm,)
# By model: which parameters the one-pass rules were found exact for, or why not.
_verdicts: WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], str | None]] = WeakKeyDictionary()


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
    slow = no_rule_for(model, parameters, input_ids)
    if units is None:
        units = torch.arange(len(input_ids))
    distinct, place_B = torch.unique(units.cpu(), return_inverse=True)
    norms = torch.zeros(len(distinct))
    parts: list[ClippedGradients] = []
    for group in groups_of_rows(place_B, len(distinct)):
        rows = Rows.chosen(group, input_ids, labels, attention_mask)
        parts.append(rows.clipped(model, parameters, clip, slow=slow is not None))
        norms = norms.to(parts[-1].norms.dtype)
        norms[group.units] = parts[-1].norms.cpu()
    return _joined(parts, parameters, norms.to(input_ids.device))


@dataclass(frozen=True, eq=False)
class Group:
    """Units with about equally many rows; a place without a row is -1."""

    units: Tensor
    rows_UM: Tensor


def groups_of_rows(unit_B: Tensor, num_units: int) -> Iterator[Group]:
    """Units by number of rows, rounded up to a power of two, so that little is padding."""
    counts_U = torch.bincount(unit_B, minlength=num_units)
    order_B = torch.argsort(unit_B, stable=True)
    starts_U = counts_U.cumsum(0) - counts_U
    sizes_U = 2 ** counts_U.clamp(min=1).double().log2().ceil().long()
    for size in sizes_U.unique().tolist():
        chosen = (sizes_U == size).nonzero()[:, 0]
        place_1M = torch.arange(size)[None]
        where_UM = (starts_U[chosen, None] + place_1M).clamp(max=max(len(order_B) - 1, 0))
        rows_UM = torch.where(place_1M < counts_U[chosen, None], order_B[where_UM], -1)
        yield Group(chosen, rows_UM)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one group, unit after unit, padding rows without a target among them."""

    ids_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    mask_BT: Tensor | None
    layout: Layout

    @classmethod
    def chosen(cls, group: Group, ids: Tensor, labels: Tensor, mask: Tensor | None) -> "Rows":
        num_units, size = group.rows_UM.shape
        rows_B = group.rows_UM.flatten().to(ids.device)
        is_row_B = rows_B >= 0
        taken_B = rows_B.clamp(min=0)
        targets_BT = next_targets(labels[taken_B])
        targets_BT = torch.where(is_row_B[:, None], targets_BT, NO_LABEL)
        num_rows_U = (group.rows_UM >= 0).sum(1).to(ids.device)
        return cls(
            ids_BT=ids[taken_B],
            targets_BT=targets_BT,
            weights_BT=token_weights(targets_BT, num_rows_U.repeat_interleave(size)),
            mask_BT=None if mask is None else mask[taken_B],
            layout=Layout(num_units=num_units, rows_per_unit=size),
        )

    def clipped(
        self, model: nn.Module, parameters: dict[str, nn.Parameter], clip: Clip, *, slow: bool
    ) -> ClippedGradients:
        if not slow:
            try:
                return one_pass(
                    parameters,
                    lambda: logits_of(model, self.ids_BT, self.mask_BT),
                    self.targets_BT,
                    self.weights_BT,
                    self.layout,
                    clip,
                )
            except NoRule as error:
                _verdicts[model] = (tuple(parameters), str(error))
                warn_slow(str(error))
        return unit_by_unit(
            parameters,
            lambda rows: logits_of(
                model, self.ids_BT[rows], None if self.mask_BT is None else self.mask_BT[rows]
            ),
            self.targets_BT,
            self.weights_BT,
            self.layout,
            clip,
        )


def logits_of(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The logits of any language model: its `.logits`, its first output, or its output."""
    known = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    options: dict[str, Any] = {}
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    if "use_cache" in known or takes_any:
        options["use_cache"] = False
    outputs = model(input_ids, **options)
    if isinstance(outputs, Tensor):
        return outputs
    return outputs.logits if hasattr(outputs, "logits") else outputs[0]


def no_rule_for(
    model: nn.Module, parameters: dict[str, nn.Parameter], input_ids: Tensor
) -> str | None:
    """Why the one-pass rules may not be used for this model; None where they are exact.

    Asked once a model: two short rows of synthetic ids are compared with plain autograd,
    parameter by parameter.
    """
    known = _verdicts.get(model)
    if known is None or known[0] != tuple(parameters):
        reason = _found_wanting(model, parameters, input_ids)
        known = _verdicts[model] = (tuple(parameters), reason)
        if reason is not None:
            warn_slow(reason)
    return known[1]


def _found_wanting(
    model: nn.Module, parameters: dict[str, nn.Parameter], input_ids: Tensor
) -> str | None:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # dropout would make two passes two functions
    try:
        ids_BT = synthetic_rows(model, input_ids)
        rows = Rows.chosen(next(groups_of_rows(torch.arange(2), 2)), ids_BT, ids_BT, None)
        limitless = Clip(norm=float("inf"))
        for unit in range(2):
            own = Rows(
                rows.ids_BT,
                rows.targets_BT,
                # The other unit's loss counts nothing, so what is summed is this unit's alone.
                rows.weights_BT * (torch.arange(2, device=ids_BT.device) == unit)[:, None],
                None,
                rows.layout,
            )
            one = one_pass(
                parameters, lambda: logits_of(model, ids_BT, None), own.targets_BT,
                own.weights_BT, own.layout, limitless,
            )  # fmt: skip
            alone = own.clipped(model, parameters, limitless, slow=True)
            if (name := _first_unlike(one, alone)) is not None:
                return f"{name} (its gradient for two synthetic rows is not that of autograd)"
            if not torch.allclose(one.norms, alone.norms, rtol=_tolerance(one.norms), atol=1e-12):
                return "the whole model (its norms for two synthetic rows are not those of autograd)"
    except NoRule as error:
        return str(error)
    finally:
        for module, training in modes:
            module.training = training
    return None


def _first_unlike(one: ClippedGradients, other: ClippedGradients) -> str | None:
    scale = max(float(other.norms.max()), 1e-30)
    for name, gradient in one.gradients.items():
        expected = other.gradients[name]
        off = float((gradient - expected).norm())
        if not off <= _tolerance(gradient) * (float(expected.norm()) + 1e-3 * scale):
            return name
    return None


def _tolerance(values: Tensor) -> float:
    # Both passes round differently; a wrong rule is off by far more.
    return 1e-7 if values.dtype == torch.float64 else 2e-2


def synthetic_rows(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Two rows of five ids each, no two rows alike, one id twice in a row."""
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None) or int(input_ids.max()) + 1
    ids = torch.arange(10, device=input_ids.device).view(2, 5) * 7 % max(1, size)
    ids[:, 4] = ids[:, 0]
    return ids.to(input_ids.dtype)


def warn_slow(reason: str) -> None:
    warnings.warn(
        f"No fast rule covers {reason}. Units are clipped one after the other instead: exact, but slow.",
        stacklevel=3,
    )


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
        raise UsageError(f"attention_mask has shape {tuple(mask.shape)} for ids {tuple(ids.shape)}.")
    if units is not None and units.shape != ids.shape[:1]:
        raise UsageError(
            f"units has shape {tuple(units.shape)} for {len(ids)} rows. Give one id per row."
        )


def _joined(
    parts: list[ClippedGradients], parameters: dict[str, nn.Parameter], norms: Tensor
) -> ClippedGradients:
    gradients = parts[0].gradients
    for part in parts[1:]:
        gradients = {name: gradients[name] + part.gradients[name] for name in parameters}
    return ClippedGradients(gradients, norms, torch.cat([part.losses for part in parts]))
