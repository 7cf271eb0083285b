"""No unit moves the sum by more than the bound, whatever it holds."""

import warnings

import pytest
import torch
from torch import nn

from privacy.oracles import clipped_one, norm_of, unit_gradients
from privacy.tiny_models import LAYERS, SIZE, UNCOVERED, VOCABULARY
from tightlip.core.errors import UsageError
from tightlip.privacy.clipping import Clip
from tightlip.privacy.layers import Layout, Lookup, Outer
from tightlip.privacy.norms import Norms
from tightlip.privacy.per_unit import clipped_gradients, synthetic_rows
from tightlip.privacy.row_losses import RowLosses, token_weights

MODELS = {**LAYERS, **UNCOVERED}
SOME = ["wide linear", "LayerNorm", "LSTM of 2", "GRU", "tied", "positions 1T", "layers.0.scale"]
UNITS = torch.tensor([0, 3, 3, 9, 0, 3, 5])


@pytest.fixture(autouse=True)
def _quiet():
    """The fallback warns; it must be bounded like the rest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def built(name, dtype=torch.float64):
    torch.manual_seed(1)
    return MODELS[name]().to(dtype)


def some_rows(seed=0, length=6):
    torch.manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(UNITS), length))
    return ids, torch.where(torch.rand(ids.shape) < 0.1, -100, ids)


def summed(model, ids, labels, keep, clip_norm, **options):
    found = clipped_gradients(
        model, ids[keep], labels[keep], clip_norm=clip_norm, units=UNITS[keep], **options
    )
    return found.gradients


def difference(one, other):
    return {name: one[name] - other[name] for name in one}


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_unit_more_or_less_moves_the_sum_by_its_own_clipped_gradient(name, per_layer):
    model = built(name)
    ids, labels = some_rows(len(name))
    own = unit_gradients(model, ids, labels, units=UNITS)
    clip_norm = 0.5 * float(torch.stack([norm_of(each) for each in own]).median())
    everyone = summed(model, ids, labels, UNITS == UNITS, clip_norm, per_layer=per_layer)
    for unit, gradients in zip(UNITS.unique(), own, strict=True):
        others = summed(model, ids, labels, unit != UNITS, clip_norm, per_layer=per_layer)
        moved = difference(everyone, others)
        assert norm_of(moved) <= clip_norm * (1 + 1e-12)
        expected = clipped_one(gradients, clip_norm, per_layer=per_layer)
        assert norm_of(difference(moved, expected)) <= 1e-9 * clip_norm


@pytest.mark.parametrize("name", SOME)
def test_a_unit_alone_adds_at_most_the_bound_in_float32_too(name):
    model = built(name, torch.float32)
    for seed in range(6):
        ids, labels = some_rows(seed)
        for unit in UNITS.unique():
            moved = summed(model, ids, labels, unit == UNITS, 1e-3)
            assert norm_of(moved) <= 1e-3


def poisoned(model, ids, how):
    """One token that no synthetic row holds, and what it does to its row."""
    made_up = synthetic_rows(model, ids).flatten().tolist()
    token = next(each for each in range(VOCABULARY) if each not in made_up)
    clean = next(each for each in range(VOCABULARY) if each != token)
    ids = torch.where(ids == token, clean, ids)

    def spoil(module, inputs, output):
        is_bad = (inputs[0] == token)[..., None]
        if how == "gradient" and output.requires_grad:
            output.register_hook(lambda back: torch.where(is_bad, float("nan"), back))
            return output * 1
        amount = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}.get(how, 1.0)
        return torch.where(is_bad, output * how if isinstance(how, float) else amount, output)

    clipped_gradients(model, ids, ids, clip_norm=1.0)
    model.embed.register_forward_hook(spoil)
    return ids, token


@pytest.mark.parametrize("how", ["nan", "inf", "-inf", "gradient"])
@pytest.mark.parametrize("name", SOME)
def test_a_unit_that_is_not_finite_adds_nothing_and_touches_nobody(name, how):
    model = built(name)
    ids, _ = some_rows(3)
    ids, token = poisoned(model, ids, how)
    # Unit 3 has three rows and room for four: its padding may not be another's, such as row 0.
    for row in (0, 3, 4):
        bad = ids.clone()
        bad[row, 2] = token
        moved = summed(model, bad, bad, UNITS == UNITS, 0.3)
        others = summed(model, bad, bad, UNITS[row] != UNITS, 0.3)
        alone = summed(model, bad, bad, UNITS[row] == UNITS, 0.3)
        assert norm_of(difference(difference(moved, others), alone)) <= 1e-12
        assert norm_of(alone) <= 0.3
        # Past a tanh an infinite number may leave a finite gradient: then it is clipped.
        if how in ("nan", "gradient"):
            assert not any(each.any() for each in alone.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e4, 1e30])
@pytest.mark.parametrize("name", SOME)
def test_a_unit_with_an_enormous_loss_is_clipped_like_everyone(name, size, dtype):
    model = built(name, dtype)
    ids, _ = some_rows(4)
    ids, token = poisoned(model, ids, size)
    ids[3, 2:4] = token
    moved = summed(model, ids, ids, UNITS == UNITS, 0.3)
    others = summed(model, ids, ids, UNITS[3] != UNITS, 0.3)
    assert norm_of(summed(model, ids, ids, UNITS[3] == UNITS, 0.3)) <= 0.3
    assert norm_of(difference(moved, others)) <= 0.3 * (1 + 1e-5)


def test_infinite_logits_where_no_label_looks_spoil_nobody():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    logits[0, 2] = float("nan")
    logits[1, 0, 3] = -float("inf")
    logits.requires_grad_()
    targets = torch.tensor([[1, 2, -100], [0, 4, -100]])
    weights = token_weights(targets, torch.ones(2))
    losses = RowLosses.apply(logits, targets, weights, None)
    (back,) = torch.autograd.grad(losses.sum(), logits)
    assert bool(losses.isfinite().all())
    assert bool(back.isfinite().all())
    assert not back[0, 2].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numbers", [1, 17, 1 << 20])
def test_row_losses_are_cross_entropy_whatever_the_piece_size(dtype, numbers, monkeypatch):
    monkeypatch.setattr("tightlip.privacy.row_losses.CHUNK", numbers)
    torch.manual_seed(0)
    logits = torch.randn(4, 5, 9).to(dtype).requires_grad_()
    targets = torch.where(torch.rand(4, 5) < 0.3, -100, torch.randint(9, (4, 5)))
    found = RowLosses.apply(logits, targets, token_weights(targets, torch.ones(4)), None)
    plain = nn.functional.cross_entropy(
        logits.double().transpose(1, 2), targets, ignore_index=-100, reduction="none"
    )
    plain = plain.sum(1) / (targets != -100).sum(1).clamp(min=1)
    (back,), (expected,) = (torch.autograd.grad(each.sum(), logits) for each in (found, plain))
    near = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    assert torch.allclose(
        found.double(), plain, rtol=max(near, 1e-14) if dtype == torch.float64 else 1e-6
    )
    assert torch.allclose(back.double(), expected.double(), rtol=near, atol=near)


@pytest.mark.parametrize("kind", ["product", "lookup"])
@pytest.mark.parametrize("excess", [1.0, 1e2, 1e4])
def test_tokens_that_cancel_do_not_make_a_norm_look_smaller(kind, excess):
    """Float32 rounds what was summed, and what is left may be ten thousand times smaller."""
    layout, shape = Layout(num_units=1, rows_per_unit=1), torch.Size((300, 300))
    for seed in range(10):
        torch.manual_seed(seed)
        left = torch.randn(140, 300)
        left = left - left.mean(0) + torch.randn(300) / excess
        right, ids = torch.randn(300).expand(140, 300), torch.zeros(1, 140).long()
        if kind == "product":
            use, length = Outer(left[None], right[None]), float(right[0].norm())
        else:
            use, length = Lookup(ids, left[None]), 1.0
        true = (float(left.double().sum(0).norm()) * length) ** 2
        found = float(Norms(layout).measured([use], shape).squares_U)
        summed_lengths = float(left.norm(dim=1).sum()) * length
        assert true * (1 - 1e-6) <= found <= true * (1 + 1e-5) + 5e-5 * summed_lengths**2


def test_a_norm_that_cannot_be_is_refused():
    for norm in (0.0, -1.0, float("nan"), 5e-45):  # of the last a unit moved 1.7 times as much
        with pytest.raises(UsageError, match="Use a number from 1e-30 up"):
            Clip(norm=norm)


def test_without_a_bound_the_sum_is_the_plain_gradient_of_all_units():
    model = built("tied")
    ids, labels = some_rows(5)
    found = clipped_gradients(model, ids, labels, clip_norm=float("inf"), units=UNITS)
    own = unit_gradients(model, ids, labels, units=UNITS)
    for name, gradient in found.gradients.items():
        assert torch.allclose(gradient, sum(each[name] for each in own), rtol=1e-11)
        assert gradient.shape[-1] in (SIZE, VOCABULARY)
