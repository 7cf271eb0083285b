"""Whether the one-pass rules are exact for a model: asked of the model, not assumed.

Shapes: B rows, T positions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tightlip.core.errors import UsageError
from tightlip.privacy.clipping import Clip, ClippedGradients
from tightlip.privacy.rows import Rows, groups_of_rows, warn_slow
from tightlip.privacy.watching import NoRule

# By model, and by what it was when it was asked: why the one-pass rules will not do, if so.
_verdicts: WeakKeyDictionary[nn.Module, dict[tuple, str | None]] = WeakKeyDictionary()
_DROPOUTS = {
    getattr(functional, name)
    for name in [
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
    ]
}


def no_rule_for(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    input_ids: Tensor,
    *,
    with_mask: bool = False,
) -> str | None:
    """Why the one-pass rules may not be used for this model; None where they are exact.

    Two rows of synthetic ids, as long as those given, are compared with plain autograd,
    parameter by parameter; once a model, and again when its modules, their modes or what is
    frozen have changed.
    """
    known = _verdicts.setdefault(model, {})
    looks = _looks(model, parameters, with_mask)
    if looks not in known:
        known[looks] = _found_wanting(
            model, parameters, synthetic_rows(model, input_ids), with_mask
        )
        if known[looks] is not None:
            warn_slow(str(known[looks]))
    return known[looks]


def _looks(model: nn.Module, parameters: dict[str, nn.Parameter], with_mask: bool) -> tuple:
    """All that a verdict hangs on and that may change between two calls."""
    modules = tuple(
        (ref(each), each.training, getattr(each, "gradient_checkpointing", False))
        for each in model.modules()
    )
    hooked = tuple(bool(each._backward_hooks) for each in parameters.values())
    return with_mask, tuple(parameters), hooked, modules


def _found_wanting(
    model: nn.Module, parameters: dict[str, nn.Parameter], ids_BT: Tensor, with_mask: bool
) -> str | None:
    mask_BT = torch.ones_like(ids_BT) if with_mask else None
    if mask_BT is not None:
        mask_BT[1, -2:] = 0
    rows = Rows.chosen(next(groups_of_rows(torch.arange(2), 2)), ids_BT, ids_BT, mask_BT)
    limitless = Clip(norm=float("inf"))
    with Steady():
        for unit in range(2):
            # The other unit's loss counts nothing, so what is summed is this unit's alone.
            is_own_B = torch.arange(2, device=ids_BT.device) == unit
            own = replace(rows, weights_BT=rows.weights_BT * is_own_B[:, None])
            try:
                one = own.in_one_pass(model, parameters, limitless)
            except NoRule as error:
                return str(error)
            except UsageError:
                raise
            except Exception as error:  # a model may break on tensors that a rule has spread
                return f"the model (watched, it fails: {error})"
            alone = own.clipped(model, parameters, limitless, slow=True)
            if (name := _first_unlike(one, alone)) is not None:
                return f"{name} (its gradient for two synthetic rows is not that of autograd)"
            if not torch.allclose(one.norms, alone.norms, rtol=_tolerance(one.norms), atol=1e-12):
                return (
                    "the whole model (its norms for two synthetic rows are not those of autograd)"
                )
    return None


class Steady(TorchFunctionMode):
    """Dropout lets everything through, so that two passes of a model are one function."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func in (torch.lstm, torch.gru) and len(args) == 9:
            args = (*args[:5], 0.0, *args[6:])
        return func(*args, **kwargs)


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
    """Two rows of ids, one id twice in a row; not two of two, which would hide a mix-up."""
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None) or int(input_ids.max()) + 1
    length = input_ids.shape[1] if input_ids.shape[1] > 2 else 5
    fixed = torch.Generator().manual_seed(0)
    ids = torch.randint(size, (2, length), generator=fixed)
    ids[:, -1] = ids[:, 0]
    return ids.to(input_ids)
