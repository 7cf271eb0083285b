"""Whether a model looks left only, keeps nothing and starts from numbers: what padding relies on."""

import torch
from torch import Tensor, nn

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy.per_unit import logits_of


def check_causal(model: nn.Module, ids_BT: Tensor) -> None:
    """Refuse a model whose answer for a row depends on what stands to the right of it.

    How far a row is padded depends on who else is drawn, so for such a model one unit more would
    change everybody's gradient. Refused too: weights that are no numbers, and buffers that a
    pass changes, since they would keep private text that no noise hides.
    """
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise UsageError(f"{name} is not all finite numbers. Give a model that is whole.")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        long = logits_of(model, ids_BT, None)
        for length in _prefixes(ids_BT.shape[1]):
            short = logits_of(model, ids_BT[:, :length], None)
            _check_same(short, long[:, :length])
    for name, buffer in model.named_buffers():
        if name not in before or not torch.equal(buffer, before[name]):
            raise GuaranteeError(
                f"{name} is a buffer that a pass over text changes: nothing would clip it or hide it."
            )


def _prefixes(length: int) -> list[int]:
    """1, 2, 4, … and all but one: a model may look right only at the beginning, or only of long rows."""
    return sorted(
        {1 << power for power in range(length.bit_length()) if 1 << power < length}
        | {max(1, length - 1)}
    )


def _check_same(short: Tensor, long: Tensor) -> None:
    off, size = (short - long).abs().max(), short.abs().max()
    # Products of other shapes round differently; a position that looks right is off by far more.
    tolerance = max(1e-3, 16 * torch.finfo(short.dtype).eps)
    if not float(off) <= tolerance * (1 + float(size)):
        raise GuaranteeError(
            "The model's logits depend on what stands to the right of a position (padding changes them), so one unit "
            "more would change everybody's gradient. Give a causal model (of BERT: is_decoder=True)."
        )
