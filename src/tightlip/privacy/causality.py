"""Whether a model looks left only, keeps nothing and starts from numbers: what padding relies on."""

import torch
from torch import Tensor, nn

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy.rows import logits_of

MORE = 3  # positions to the right, there and not there


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
        short = logits_of(model, ids_BT[:, : max(1, ids_BT.shape[1] - MORE)], None)
    for name, buffer in model.named_buffers():
        if name in before and not torch.equal(buffer, before[name]):
            raise GuaranteeError(
                f"{name} is a buffer that a pass over text changes: nothing would clip it or hide it."
            )
    off = (short - long[:, : short.shape[1]]).abs().max()
    if not float(off) <= 1e-3 * (1 + float(short.abs().max())):
        raise GuaranteeError(
            "The model's logits depend on what stands to the right of a position (padding changes them), so one unit "
            "more would change everybody's gradient. Give a causal model (of BERT: is_decoder=True)."
        )
