"""Clipped gradients the slow way: METHODS.md section 3 word for word, by plain autograd.

One call of autograd per unit, every row through the model's own forward alone.
"""

import torch
from torch.nn import functional


def first_output(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def row_loss(model, ids_T, labels_T, mask_T=None):
    """Mean cross-entropy over the labels after each position; None where there is none."""
    targets_T = labels_T[1:]
    if not bool((targets_T != -100).any()):
        return None
    options = {} if mask_T is None else {"attention_mask": mask_T[None]}
    if hasattr(
        model, "config"
    ):  # a recurrent model's padding says one thing with a cache, another without
        options["use_cache"] = False
    logits_TV = first_output(model(ids_T[None], **options))[0, :-1]
    logits_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return functional.cross_entropy(logits_TV, targets_T, ignore_index=-100)


def unit_gradients(model, ids, labels, *, mask=None, units=None):
    """Each unit's own gradient, by parameter name, in the order of the sorted unit ids."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    units = torch.arange(len(ids)) if units is None else units
    found = []
    for unit in units.unique():
        rows = (units == unit).nonzero()[:, 0].tolist()
        losses = [
            row_loss(model, ids[r], labels[r], None if mask is None else mask[r]) for r in rows
        ]
        counted = [loss / len(rows) for loss in losses if loss is not None]
        gradients = {name: torch.zeros_like(each) for name, each in parameters.items()}
        if counted:
            own = torch.autograd.grad(sum(counted), [*parameters.values()], allow_unused=True)
            gradients.update({n: g for n, g in zip(parameters, own, strict=True) if g is not None})
        found.append(gradients)
    return found


def norm_of(gradients):
    return torch.sqrt(sum(each.double().square().sum() for each in gradients.values()))


def clipped_one(gradients, clip_norm, *, per_layer=False):
    """One unit's gradient, its norm cut to the bound, or each of K layers to bound / √K."""
    layers = {name: name.rpartition(".")[0] if per_layer else "" for name in gradients}
    bound = clip_norm / len({*layers.values()}) ** 0.5
    factors = {}
    for layer in {*layers.values()}:
        norm = norm_of({name: gradients[name] for name in gradients if layers[name] == layer})
        factors[layer] = min(1.0, bound / max(float(norm), 1e-300))
    return {name: factors[layers[name]] * each for name, each in gradients.items()}


def clipped_sum(every, clip_norm, *, per_layer=False):
    clipped = [clipped_one(each, clip_norm, per_layer=per_layer) for each in every]
    return {name: sum(each[name] for each in clipped) for name in every[0]}


def check_equal(found, every, clip_norm, *, per_layer=False, within=1e-9):
    """Assert that norms and every gradient are those of the units' own gradients."""
    norms = torch.stack([norm_of(each) for each in every])
    assert torch.allclose(found.norms.double(), norms, rtol=within, atol=1e-12)
    expected = clipped_sum(every, clip_norm, per_layer=per_layer)
    assert [*found.gradients] == [*expected]
    scale = float(norm_of(expected))
    for name, gradient in expected.items():
        off = float((found.gradients[name].double() - gradient.double()).norm())
        # Some gradients are 0 but for rounding: the bias of an attention's keys.
        assert off <= within * (float(gradient.norm()) + 1e-2 * scale), name
