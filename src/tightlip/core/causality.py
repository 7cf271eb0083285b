"""Whether a language model looks left only: asked of the model, since configurations do not tell.

GPT-NeoX says is_decoder=False and looks back only; so says BERT, which looks both ways.
Shapes: B rows, T positions, V vocabulary.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def looks_ahead(
    logits_of: "Callable[[Tensor], Tensor]", ids_BT: "Tensor", *, tolerance: float
) -> bool:
    """Whether the logits at a position change with what stands to the right of it.

    Rows cut short must be answered as their beginnings are, up to `tolerance` of the largest logit.
    Logits that are no numbers are like nothing, not even themselves.
    """
    import torch

    with torch.no_grad():
        long_BTV = logits_of(ids_BT)
        for length in _lengths(ids_BT.shape[1]):
            short_BTV, beginning_BTV = logits_of(ids_BT[:, :length]), long_BTV[:, :length]
            # Of -inf, as of a word that is never said, the difference to itself is no number.
            same_BTV = short_BTV == beginning_BTV
            off = (short_BTV - beginning_BTV).masked_fill_(same_BTV, 0).abs().max()
            size = short_BTV.masked_fill(~short_BTV.isfinite(), 0).abs().max().clamp(min=1e-3)
            if not bool(off <= tolerance * size):
                return True
    return False


def rounding_tolerance(dtype: "torch.dtype", *, least: float = 1e-4) -> float:
    """Products of other shapes round differently; a position that looks right is off by far more."""
    import torch

    return max(least, 16 * torch.finfo(dtype).eps)


def _lengths(length: int) -> list[int]:
    """1, 2, 4, … and all but one: a model may look right only at the beginning, or only of long rows."""
    powers = {1 << power for power in range(length.bit_length()) if 1 << power < length}
    return sorted(powers | {max(1, length - 1)})
