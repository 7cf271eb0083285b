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

from tightlip.privacy.passes import Passes
from tightlip.privacy.per_unit import num_ids_of
from tightlip.privacy.physical_batches import PhysicalBatches
from tightlip.privacy.rows_alone import synthetic_units

DRAWS, TIMES = 4, 10
LEAST = 2.0**-24  # of the clip norm: four draws that show less have not seen it all


@dataclass(frozen=True)
class Arithmetic:
    """In words, and the share of the clip norm that is kept free for it."""

    words: str
    charged: float = 0.0

    @property
    def terms(self) -> dict[str, Any]:
        """What stands in a ledger."""
        return {"arithmetic": self.words, "arithmetic_charged": self.charged}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Arithmetic | None":
        """That of a run that goes on: measured anew it would be another promise."""
        if record.get("arithmetic") is None:
            return None
        return cls(record["arithmetic"], record["arithmetic_charged"])


def arithmetic_of(passes: Passes, batches: PhysicalBatches) -> Arithmetic:
    """How the sums of these passes come about, measured where they are sums of floats."""
    assert passes.clip is not None
    on_gpu = batches.device.type == "cuda"
    if passes.clip.exact:
        assumed = ", tensor cores taken to add as float32 does" if on_gpu else ""
        return Arithmetic(f"exact: units never meet in floating point{assumed}")
    kind = "float64" if all(_is_double(each) for each in passes.parameters.values()) else "float32"
    off = rounded_together(passes, batches)
    charged = TIMES * max(off, LEAST)
    words = f"{kind}: measured {off:.1e} C over {DRAWS} draws, {TIMES} x charged"
    return Arithmetic(words, charged)


def rounded_together(passes: Passes, batches: PhysicalBatches) -> float:
    """The most, in clip norms, that others' sums changed with a unit beside them, over some units of
    made-up text; two passes added up, as a step does."""
    assert passes.clip is not None
    shape = batches.usual()
    num_ids = num_ids_of(passes.model, batches.some_id())
    first, second = (
        synthetic_units(shape, num_ids, places, batches.device)
        for places in (slice(0, 1), slice(shape.num_units - 1, None))
    )
    beside = _sums(passes(second).gradients.values())
    together = _sums(passes(first).gradients.values())
    everybody = [one + other for one, other in zip(together, beside, strict=True)]
    most = 0.0
    for draw in range(DRAWS):
        places_U = torch.arange(shape.num_units, device=batches.device)
        is_own_U = places_U == draw % shape.num_units
        others = _sums(passes(first.without(is_own_U)).gradients.values())
        own = _sums(passes(first.without(~is_own_U)).gradients.values())
        squares = [
            float((whole.double() - (part + more).double() - alone.double()).square().sum())
            for whole, part, more, alone in zip(everybody, others, beside, own, strict=True)
        ]
        most = max(most, math.sqrt(sum(squares)) / passes.clip.norm)
    return most


def _sums(gradients: Any) -> list[Tensor]:
    """Copies: a captured pass writes to the same memory each time."""
    return [each.clone() for each in gradients]


def _is_double(parameter: Tensor) -> bool:
    return parameter.dtype == torch.float64
