"""Clipped gradients of any language model in one call, by the one-pass rules where they are exact.

Whether they are is asked of the model, not assumed. Shapes: B rows, T positions, U units, M rows of a unit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from tightlip.core.devices import full_precision, looks_ahead, rounding_tolerance
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy.clipping import REENTRANT, Clip, ClippedGradients, trainable_parameters
from tightlip.privacy.experts import check_no_batch_losses
from tightlip.privacy.layers import Layout
from tightlip.privacy.passes import Passes, Physical, Way, logits_of, warn_slow
from tightlip.privacy.row_losses import NO_LABEL, next_targets
from tightlip.privacy.shards import local, resharded
from tightlip.privacy.watching import NoRule

# By model, and by what it was when it was asked: why the one-pass rules will not do, if so.
_verdicts: WeakKeyDictionary[nn.Module, dict[tuple, str | None]] = WeakKeyDictionary()
_DROPOUTS = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout),
}
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
    # In the caller's precision, since nothing is promised here that was asked in another.
    passes = Passes(model, clip, bf16=torch.is_autocast_enabled(input_ids.device.type))
    _check_shapes(input_ids, labels, attention_mask, units)
    check_no_buffers(model)
    if (unruly := no_rule_for(model, input_ids, with_mask=attention_mask is not None)) is not None:
        warn_slow(unruly)
        passes.way = "slow"
    if units is None:
        units = torch.arange(len(input_ids))
    distinct, place_B = torch.unique(units.cpu(), return_inverse=True)
    groups = list(groups_of_rows(place_B, len(distinct)))
    parts = [passes(rows_of(group, input_ids, labels, attention_mask)) for group in groups]
    return _joined(parts, torch.cat([group.units for group in groups]).to(input_ids.device))


def check_no_buffers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BUFFERED):
            raise UsageError(
                f"{name} is a {type(module).__name__}: it mixes rows, and keeps averages of private text that no noise "
                f"hides. Replace it with a LayerNorm."
            )
        # Adapters' layers are given frozen rows: torch then only warns, and their gradient is nothing.
        looks_up = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if looks_up and module.sparse and module.weight.requires_grad:
            raise UsageError(
                f"{name} gives sparse gradients, and noise is on every entry. Use sparse=False."
            )
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(checkpoint, "keywords", {}).get("use_reentrant"):
            raise UsageError(REENTRANT)
    check_no_batch_losses(model)


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
    norms, losses = (torch.cat([getattr(p, name) for p in parts]) for name in ("norms", "losses"))
    return ClippedGradients(gradients, norms[order_U], losses[order_U])


def check_model(model: nn.Module, ids_BT: Tensor) -> None:
    """Refuse a model whose answer for a row depends on what stands to the right of it.

    A row's padding is its unit's own, so such a model would move nobody else; but it would learn
    from padding, and see the very words that it is to predict. Refused too: weights that are no
    numbers, and buffers that a pass changes, since they would keep private text that no noise hides.
    """
    check_no_buffers(model)
    for name, parameter in model.named_parameters():
        if not bool(local(parameter).isfinite().all()):
            raise UsageError(f"{name} is not all finite numbers. Give a model that is whole.")
        if parameter.is_complex() and parameter.requires_grad:
            raise UsageError(f"{name} is complex, and clipping knows real numbers. Freeze it.")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # A base of few bits rounds between its layers, though its embedding be in float32.
    dtypes = {
        each.dtype if each.is_floating_point() else torch.bfloat16 for each in model.parameters()
    }
    tolerance = max(rounding_tolerance(each, least=1e-3) for each in dtypes)
    # A GPU's tf32 would round by as much as a little looking ahead changes.
    device = next(model.parameters()).device.type
    with full_precision(), torch.autocast(device, enabled=False):
        ahead = looks_ahead(lambda ids: logits_of(model, ids, None), ids_BT, tolerance=tolerance)
    if ahead:
        raise UsageError(
            "The model's logits depend on what stands to the right of a position, so it would learn from padding and see "
            "the words it is to predict. Give a causal model (of BERT: is_decoder=True)."
        )
    for name, buffer in model.named_buffers():
        if name not in before or not torch.equal(buffer, before[name]):
            raise GuaranteeError(
                f"{name} is a buffer that a pass over text changes: nothing would clip it or hide it."
            )


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that changes other weights than those that are clipped."""
    needs_loss = signature(optimizer.step).parameters.get("closure")
    if needs_loss is not None and needs_loss.default is needs_loss.empty:
        raise UsageError(
            f"{type(optimizer).__name__} asks for the loss several times in a step, which would each cost ε. Use SGD or Adam."
        )
    changed = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, parameter in resharded(model).named_parameters():
        if parameter.requires_grad and id(parameter) not in changed:
            raise UsageError(
                f"The optimizer does not hold {name}, so it would never change. Give it the optimizer, or freeze it."
            )
        changed.discard(id(parameter))
    if changed:
        raise GuaranteeError(
            f"The optimizer changes {len(changed)} tensors that are no parameters of the model: nothing would clip them. "
            f"Build it from model.parameters()."
        )


class Group(NamedTuple):
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


def rows_of(group: Group, ids: Tensor, labels: Tensor, mask: Tensor | None) -> Physical:
    """The rows of one group, unit after unit. A place without a row repeats the unit's first,
    without a target: another unit's row there could spoil this unit by a NaN."""
    is_row_UM = group.rows_UM >= 0
    taken_UM = torch.where(is_row_UM, group.rows_UM, group.rows_UM[:, :1])
    taken_B, is_row_B = taken_UM.flatten().to(ids.device), is_row_UM.flatten().to(ids.device)
    num_units, size = group.rows_UM.shape
    return Physical.of(
        ids[taken_B],
        torch.where(is_row_B[:, None], next_targets(labels[taken_B]), NO_LABEL),
        is_row_UM.sum(1).to(ids.device),
        Layout(num_units=num_units, rows_per_unit=size),
        mask_BT=None if mask is None else mask[taken_B],
    )


def no_rule_for(
    model: nn.Module,
    input_ids: Tensor,
    *,
    with_mask: bool = False,
    bf16: bool = False,
    beside: bool = False,
) -> str | None:
    """Why the one-pass rules may not be used for this model; None where they are exact.

    Two rows of synthetic ids, as long as those given, are compared with plain autograd,
    parameter by parameter, where asked in bfloat16 as well; once a model, and again when its
    modules, their modes or what is frozen have changed.

    Autograd reads each row alone; but with `beside`, in few bits, both in one pass. There a row's
    last bits follow from the shape of its pass, and thirty layers make half of a gradient of them.
    Only for who asks by other means whether rows meet.
    """
    known = _verdicts.setdefault(model, {})
    state = (bf16, beside, *_state(model, with_mask))
    if state not in known:
        known[state] = _fault(
            model, input_ids, "eager", with_mask=with_mask, bf16=bf16, beside=beside
        )
    return known[state]


def can_be_mapped(model: nn.Module, input_ids: Tensor, *, bf16: bool = False) -> bool:
    """Whether `vmap` over rows gives what plain autograd gives, where no rules do. A model that keeps
    tensors may be left with some that are of no use to it: give a copy."""
    try:
        return _fault(model, input_ids, "mapped", bf16=bf16, beside=True) is None
    except RuntimeError:  # plain autograd met such a tensor
        return False


def _fault(
    model: nn.Module,
    input_ids: Tensor,
    way: Way,
    *,
    with_mask: bool = False,
    bf16: bool = False,
    beside: bool,
) -> str | None:
    rows = synthetic_rows(model, input_ids)
    faults = (
        _first_fault(model, rows, with_mask, each, way, beside=beside and (each or _rounds(model)))
        for each in sorted({False, bf16})
    )
    return next((fault for fault in faults if fault is not None), None)


def _rounds(model: nn.Module) -> bool:
    """Whether most weights have few bits, so that what is between them has as well."""
    sizes = [(each.numel(), each.dtype.itemsize) for each in model.parameters()]
    return 2 * sum(size for size, num_bytes in sizes if num_bytes < 4) > sum(n for n, _ in sizes)


def _state(model: nn.Module, with_mask: bool) -> tuple:
    """All that a verdict hangs on and that may change between two calls."""
    parameters = trainable_parameters(model)
    modules = tuple(
        (ref(each), each.training, getattr(each, "gradient_checkpointing", False))
        for each in model.modules()
    )
    hooked = tuple(bool(each._backward_hooks) for each in parameters.values())
    return with_mask, tuple(parameters), hooked, modules


def _first_fault(
    model: nn.Module,
    ids_BT: Tensor,
    with_mask: bool,
    bf16: bool,
    way: Way,
    *,
    beside: bool,
) -> str | None:
    mask_BT = torch.ones_like(ids_BT) if with_mask else None
    if mask_BT is not None:
        mask_BT[1, -2:] = 0
    rows = rows_of(next(groups_of_rows(torch.arange(2), 2)), ids_BT, ids_BT, mask_BT)
    limitless = Passes(model, Clip(norm=float("inf")), way=way, bf16=bf16)
    with Steady():
        for unit in range(2):
            # The other unit's loss counts nothing, so what is summed is this unit's alone.
            is_own_B = torch.arange(2, device=ids_BT.device) == unit
            own = replace(rows, weights_BT=rows.weights_BT * is_own_B[:, None])
            try:
                one = limitless.mapped(own) if way == "mapped" else limitless.eager(own)
            except NoRule as error:
                return str(error)
            except UsageError:
                raise
            except Exception as error:  # a model may break on tensors that a rule has spread
                return f"the model (watched, it fails: {error})"
            alone = limitless.slow(own, beside=beside)
            tolerance = _tolerance(one.norms, bf16 or beside)
            if (name := _first_unlike(one, alone, tolerance)) is not None:
                return f"{name} (its gradient for two synthetic rows is not that of autograd)"
            if not torch.allclose(one.norms, alone.norms, rtol=tolerance, atol=1e-12):
                return "the whole model (its norms of two synthetic rows are not those of autograd)"
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


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, but for layers that the way back is to compute once more:
    transformers keeps checkpoints in training only. Dropout stays off in them too."""
    model.eval()
    keep_differentiable(model)
    layers = [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
        and "GradientCheckpointingLayer" in {each.__name__ for each in type(module).__mro__}
    ]
    try:
        for layer in layers:
            layer.training = True
        with Steady() if layers else nullcontext():
            yield
    finally:
        for layer in layers:
            layer.training = False


def keep_differentiable(model: nn.Module) -> None:
    """Keep bitsandbytes from packing weights of 4 bits anew for inference on a CPU, as it does in
    evaluation mode: no gradient passes such a layer, without a word."""
    for name, module in model.named_modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise UsageError(
                    f"{name} was packed for inference by a pass in evaluation mode, and no gradient passes it any more. Load the "
                    "model again, and train before anything else."
                )


def _first_unlike(one: ClippedGradients, other: ClippedGradients, tolerance: float) -> str | None:
    scale = max(float(other.norms.max()), 1e-30)
    for name, gradient in one.gradients.items():
        expected = other.gradients[name]
        off = float((gradient - expected).norm())
        if not off <= tolerance * (float(expected.norm()) + 1e-3 * scale):
            return name
    return None


def _tolerance(values: Tensor, rounds: bool) -> float:
    # Both passes round differently; a wrong rule is off by far more.
    if rounds:
        return 0.2
    return 1e-7 if values.dtype == torch.float64 else 2e-2


def synthetic_rows(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Two rows of ids, one id twice in a row; not two of two, which would hide a mix-up."""
    size = num_ids_of(model, input_ids.shape[1])
    length = input_ids.shape[1] if input_ids.shape[1] > 2 else 5
    fixed = torch.Generator().manual_seed(0)
    ids = torch.randint(size, (2, length), generator=fixed)
    ids[:, -1] = ids[:, 0]
    return ids.to(input_ids)


def num_ids_of(model: nn.Module, width: int) -> int:
    """How many ids a model knows: from the model alone, since what is measured with them is published.
    One that does not say is taken to know as many as its first embedding and its logits of rows of
    this width both have."""
    if (known := getattr(getattr(model, "config", None), "vocab_size", None)) is not None:
        return int(known)
    ids_1T = torch.zeros((1, width), dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        num_logits = logits_of(model, ids_1T, None).shape[2]
    first = next((each for each in model.modules() if isinstance(each, nn.Embedding)), None)
    return min(num_logits, num_logits if first is None else first.num_embeddings)
