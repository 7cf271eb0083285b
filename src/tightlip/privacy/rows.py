"""Rows of units side by side, and a language model's logits for them.

Shapes: B rows, T positions, U units, M rows of each.
"""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tightlip.core.errors import UsageError
from tightlip.privacy.clipping import Clip, ClippedGradients, one_pass, unit_by_unit
from tightlip.privacy.row_losses import NO_LABEL, next_targets, token_weights
from tightlip.privacy.uses import Layout
from tightlip.privacy.watching import NoRule


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
    """The rows of one group, unit after unit. A place without a row repeats the unit's first,
    without a target: another unit's row there could spoil this unit by a NaN."""

    ids_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    mask_BT: Tensor | None
    layout: Layout

    @classmethod
    def chosen(cls, group: Group, ids: Tensor, labels: Tensor, mask: Tensor | None) -> "Rows":
        num_units, size = group.rows_UM.shape
        is_row_UM = group.rows_UM >= 0
        taken_B = (
            torch.where(is_row_UM, group.rows_UM, group.rows_UM[:, :1]).flatten().to(ids.device)
        )
        is_row_B = is_row_UM.flatten().to(ids.device)
        targets_BT = next_targets(labels[taken_B])
        targets_BT = torch.where(is_row_B[:, None], targets_BT, NO_LABEL)
        num_rows_U = is_row_UM.sum(1).to(ids.device)
        return cls(
            ids_BT=ids[taken_B],
            targets_BT=targets_BT,
            weights_BT=token_weights(targets_BT, num_rows_U.repeat_interleave(size)),
            mask_BT=None if mask is None else mask[taken_B],
            layout=Layout(num_units=num_units, rows_per_unit=size),
        )

    def in_one_pass(
        self, model: nn.Module, parameters: dict[str, nn.Parameter], clip: Clip
    ) -> ClippedGradients:
        return one_pass(
            parameters,
            lambda: logits_of(model, self.ids_BT, self.mask_BT),
            self.targets_BT,
            self.weights_BT,
            self.layout,
            clip,
        )

    def clipped(
        self, model: nn.Module, parameters: dict[str, nn.Parameter], clip: Clip, *, slow: bool
    ) -> ClippedGradients:
        if not slow:
            try:
                return self.in_one_pass(model, parameters, clip)
            except NoRule as error:  # shapes of this batch that leave it open whose row is whose
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
    if attention_mask is not None and not takes_any and "attention_mask" not in known:
        raise UsageError(f"{type(model).__name__} takes no attention_mask. Leave it out.")
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    if "use_cache" in known or takes_any:
        options["use_cache"] = False
    outputs = model(input_ids, **options)
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    logits = outputs[0] if logits is None else logits
    if logits.ndim != 3 or logits.shape[:2] != input_ids.shape:
        raise UsageError(
            f"{type(model).__name__} gives logits of shape {tuple(logits.shape)} for ids of shape "
            f"{tuple(input_ids.shape)}. It must give one row of numbers per id."
        )
    return logits


def warn_slow(reason: str) -> None:
    warnings.warn(
        f"No fast rule covers {reason}. Units are clipped one after the other instead: exact, but slow.",
        stacklevel=3,
    )
