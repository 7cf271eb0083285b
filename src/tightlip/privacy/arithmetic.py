"""What one unit can change in how others' sums are rounded: nothing, or measured and charged.

float32 rounds a product of all units' tokens as a whole, so one unit more changes the last bits of
what the others add. How much can be measured, and the worst case is too far off to be of use. Ten
times what was measured is taken off every unit's bound, and the ledger says so; or sums are whole
numbers, in which units never meet (`exact_sums`).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightlip.core.errors import GuaranteeError
from tightlip.privacy.passes import Passes, Physical
from tightlip.privacy.per_unit import num_ids_of
from tightlip.privacy.physical_batches import PhysicalBatches
from tightlip.privacy.rows_alone import synthetic_units

DRAWS, TIMES = 4, 10
MOST_CHARGED = 0.1  # of the clip norm
LEAST = 2.0**-24  # of the clip norm: four draws that show less have not seen it all


@dataclass(frozen=True)
class Arithmetic:
    """In words, and the share of the clip norm that is kept free for it."""

    words: str
    charged: float = 0.0
    setting: str = ""

    @property
    def terms(self) -> dict[str, Any]:
        """What stands in a ledger."""
        return {
            "arithmetic": self.words,
            "arithmetic_charged": self.charged,
            "arithmetic_setting": self.setting,
        }


def arithmetic_of(
    passes: Passes, batches: PhysicalBatches, before: dict[str, Any], *, expected_batch: float
) -> Arithmetic:
    """How the sums of these passes come about, measured where they are sums of floats; of a run that
    goes on as it was measured then, or the worse of both if it goes on in another setting."""
    assert passes.clip is not None
    kind = "exact" if passes.clip.exact else "floats"
    setting = f"{kind} {passes.way} {'bf16' if passes.bf16 else 'full'} {batches.device.type} {tuple(batches.usual())}"
    kept = None
    if before.get("arithmetic") is not None:
        kept = Arithmetic(before["arithmetic"], before["arithmetic_charged"], setting)
        if before.get("arithmetic_setting") == setting:
            return kept
    words, charged = _measured(passes, batches, expected_batch)
    if kept is not None and kept.words.startswith("exact") == passes.clip.exact:
        words, charged = max((charged, words), (kept.charged, kept.words))[::-1]
    return Arithmetic(words, charged, setting)


def _measured(passes: Passes, batches: PhysicalBatches, expected_batch: float) -> tuple[str, float]:
    assert passes.clip is not None
    on_gpu = batches.device.type == "cuda"
    if passes.clip.exact:
        assumed = ", tensor cores taken to add as float32 does" if on_gpu else ""
        return f"exact: units never meet in floating point{assumed}", 0.0
    kinds = {each.dtype for each in passes.parameters.values()}
    kind = "float64" if kinds == {torch.float64} else "float32"
    off = max(rounded_together(passes, batches), LEAST)
    # One unit more may move everybody after it to another place, and some to another pass.
    num_passes = batches.num_passes(expected_batch)
    words = (
        f"{kind}: measured {off:.1e} C over {DRAWS} draws, {TIMES} x charged for each of {num_passes} passes, taken off "
        "the clip norm"
    )
    charged = TIMES * off * num_passes
    if charged > MOST_CHARGED:
        raise GuaranteeError(
            f"Rounding may move others by {charged:.2g} of the clip norm in the {num_passes:,} passes of a step, too much to take off "
            "everybody's bound. Add exact_sums=True, or use more physical_rows or a smaller batch."
        )
    return words, charged


def rounded_together(passes: Passes, batches: PhysicalBatches) -> float:
    """The most, in clip norms, that others' sums changed with a unit beside them; over units of
    made-up text, all alike in one half of the draws, and the others moved up by a place."""
    assert passes.clip is not None
    shape = batches.usual()
    if shape.num_units == 1:
        return 0.0  # passes are added up in float64
    num_ids = num_ids_of(passes.model, shape.width)
    most = 0.0
    for draw in range(DRAWS):
        half, place = divmod(draw, DRAWS // 2)
        if not place:
            alike = slice(0, None if half else 1)
            together = synthetic_units(shape, num_ids, alike, batches.device)
            everybody = _sums(passes, together)
        places_U = torch.arange(shape.num_units, device=batches.device)
        gone_U = places_U == min(place, shape.num_units - 1)
        own = _sums(passes, together.without(~gone_U))
        others = _sums(passes, together.without(gone_U).moved_up())
        squares = [
            float((whole.double() - part.double() - alone.double()).square().sum())
            for whole, part, alone in zip(everybody, others, own, strict=True)
        ]
        most = max(most, math.sqrt(sum(squares)) / passes.clip.norm)
    return most


def _sums(passes: Passes, batch: Physical) -> list[Tensor]:
    """Copies: a captured pass writes to the same memory each time."""
    return [each.clone() for each in passes(batch).gradients.values()]
