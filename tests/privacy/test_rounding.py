"""In bfloat16 too no unit moves the sum by more than the bound, though its tokens cancel."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tightlip.core.devices import full_precision, products_in
from tightlip.privacy.clipping import Clip, clipped_sum
from tightlip.privacy.layers import Layout, Lookup, Outer, Whole
from tightlip.privacy.norms import Norms
from tightlip.privacy.rounding import Scaled, _columns

HALF = 30  # tokens that cancel as many others
# Gram matrices, the left or the right side scaled; and a gradient that is written out.
SHAPES = {"left": (150, 200), "right": (200, 150), "small": (12, 16), "one row": (1, 16)}


def cancelling(seed, size, rest):
    """Whole numbers of 8 bits: tokens all alike, as many that take them off in other portions, and
    one that is left over. In float64 the sum is that one exactly."""
    torch.manual_seed(seed)
    first = torch.randint(128, 256, (size,)).double().expand(HALF, -1)
    second = torch.randint(128, 256, (HALF, size)).double()
    for token in second.clone():
        second += ((first.sum(0) - second.sum(0)) / HALF).round().clamp(-20, 20)
        second.clamp_(1, 255)
        token.zero_()
    for token in second:
        missing = first.sum(0) - second.sum(0)
        token.copy_((token + missing).clamp(1, 255))
    over = (rest * torch.randn(1, size)).round().clamp(-255, 255).double()
    tokens = torch.cat([first, -second, over])
    return tokens[torch.randperm(len(tokens))]


def outer(seed, shape, rest=8.0):
    """A use of one unit: what cancels stands on the narrower side, which is the one scaled."""
    narrow = cancelling(seed, min(shape), rest)
    wide = torch.randint(128, 256, (max(shape),)).double().expand(len(narrow), -1)
    left, right = (narrow, wide) if shape[0] <= shape[1] else (wide, narrow)
    return Outer(left.bfloat16()[None], right.bfloat16()[None])


def watched(uses):
    return SimpleNamespace(uses=uses, finite={})


def found_for(uses, shapes, rows_per_unit=1, num_units=1, clip=1.0, exact=False):
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    layout = Layout(num_units=num_units, rows_per_unit=rows_per_unit)
    losses = torch.zeros(layout.num_rows)
    with torch.no_grad():
        return clipped_sum(watched(uses), parameters, losses, layout, Clip(norm=clip, exact=exact))


def length(gradients):
    return float(torch.cat([each.double().flatten() for each in gradients.values()]).norm())


def length_by_the_norm_alone(use, shape):
    """Oracle of the bug: the factor from the exact norm, then rounding, summed in float64."""
    exact = use.left_BTP[0].double().t() @ use.right_BTD[0].double()
    factor = 1 / float(exact.norm()) / (1 + 2.0**-7)
    sides = [use.left_BTP[0], use.right_BTD[0]]
    narrow = 0 if shape[0] <= shape[1] else 1
    sides[narrow] = (sides[narrow].double() * factor).bfloat16()
    return float((sides[0].double().t() @ sides[1].double()).norm())


@pytest.mark.parametrize("kind", SHAPES)
def test_tokens_that_cancel_take_no_unit_above_the_bound_in_bfloat16(kind):
    shape, before = SHAPES[kind], []
    for seed in range(40):
        use = outer(seed, shape, rest=8.0 if seed % 2 else 0.5)
        exact = (use.left_BTP[0].double().t() @ use.right_BTD[0].double()).norm()
        found = found_for({"w": [use]}, {"w": shape}, clip=0.5 * float(exact) + 1e-30)
        assert length(found.gradients) <= 0.5 * float(exact) + 1e-30
        if float(exact):
            before.append(length_by_the_norm_alone(use, shape))
    assert max(before) > 1.2  # the tokens are as bad as they are meant to be


def test_a_parameter_used_twice_and_looked_up_stays_within_the_bound_in_bfloat16():
    shape = (150, 200)
    for seed in range(20):
        one, two = outer(seed, shape), outer(seed + 100, shape)
        num_tokens = one.left_BTP.shape[1]
        ids = torch.randint(150, (1, num_tokens))
        lookup = Lookup(ids, cancelling(seed, 200, 1.0).bfloat16()[None])
        for uses in ([one, two], [one, lookup], [lookup], [one, two, lookup]):
            found = found_for({"w": uses}, {"w": shape})
            assert length(found.gradients) <= 1


def test_biases_and_small_parameters_are_scaled_in_float32_and_lose_next_to_nothing():
    for seed in range(20):
        left = cancelling(seed, 40, 30.0).bfloat16()[None]
        right = torch.randn(1, left.shape[1], 40).bfloat16()
        rows = cancelling(seed, 8, 30.0).bfloat16()  # rows of one unit that cancel
        alone = found_for({"b": [Outer(left)]}, {"b": (40,)})
        assert 0.99 < length(alone.gradients) <= 1
        whole = found_for({"w": [Whole(rows)]}, {"w": (8,)}, rows_per_unit=len(rows))
        assert 0.99 < length(whole.gradients) <= 1
        both = found_for(
            {"w": [Outer(left, right)], "b": [Outer(left)]}, {"w": (40, 40), "b": (40,)}
        )
        assert length(both.gradients) <= 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from([*SHAPES.values(), (40, 40), (300, 20)]),
    alike=st.floats(0, 1),
    log_factor=st.floats(-12, 0),
)
def test_what_rounding_adds_is_at_most_what_is_taken_off_for_it(seed, shape, alike, log_factor):
    """Oracle: the rounded operands less the exact ones, multiplied out in float64."""
    torch.manual_seed(seed)
    left, right = (
        (alike * torch.randn(1, size) + (1 - alike) * torch.randn(70, size)).bfloat16()
        for size in shape
    )
    factor = torch.tensor([2.0**log_factor])
    measured = Norms(Layout(num_units=1, rows_per_unit=1)).measured(
        [Outer(left[None], right[None])], torch.Size(shape)
    )
    use = Outer(left[None], right[None])
    summed = Scaled(factor, wipe=False, finite=()).sum([use], torch.zeros(shape))
    exact = float(factor) * (left.double().t() @ right.double())
    added = float((summed.double() - exact).norm())
    assert added <= float(factor) * float(measured.rounded_U) * (1 + 1e-5)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [8, 400])  # a Gram matrix, and written out
@pytest.mark.parametrize("exact", [False, True])
def test_a_side_whose_squares_are_too_small_for_float32_hides_nothing(
    exact, num_tokens, kind, swapped
):
    tiny = torch.full((1, num_tokens, 512), 2e-23, dtype=kind)
    huge = torch.full((1, num_tokens, 512), 7e17, dtype=kind)
    sides = (huge, tiny) if swapped else (tiny, huge)
    clip = 1e-3
    found = found_for({"w": [Outer(*sides)]}, {"w": (512, 512)}, clip=clip, exact=exact)
    moved = found.gradients["w"].double().norm() * Clip(norm=clip, exact=exact).step
    assert moved <= clip


def test_ordinary_units_lose_less_than_one_per_cent_to_rounding():
    torch.manual_seed(0)
    for shape in ((150, 200), (200, 150)):
        left, right = (torch.randn(1, 64, size).bfloat16() for size in shape)
        found = found_for({"w": [Outer(left, right)]}, {"w": shape})
        assert 0.985 < length(found.gradients) <= 1


def test_three_numbers_of_bfloat16_make_up_a_factor_to_all_its_digits():
    factors = torch.rand(1000) * 2.0 ** torch.randint(-30, 1, (1000,))
    columns = _columns(factors, torch.bfloat16)
    assert columns.dtype == torch.bfloat16
    assert torch.equal(columns.double().sum(1), factors.double())


@contextmanager
def told(switch):
    """torch's two ways to let products of float32 take fewer bits."""
    matmul = torch.backends.mkldnn.matmul
    older, newer = torch.get_float32_matmul_precision(), matmul.fp32_precision
    try:
        if switch == "older":
            torch.set_float32_matmul_precision("medium")
        else:
            matmul.fp32_precision = "bf16"
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        matmul.fp32_precision = newer


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("switch", ["older", "newer"])
def test_a_cpu_that_may_take_bfloat16_for_float32_takes_it_for_no_sum(switch, exact):
    # Found at "proved": 298 C. Only CPUs with products in bfloat16 ever failed here.
    right = torch.ones(1, 32, 64)
    pair = torch.tensor([[1.0], [-(1 - 1e-3)]]).expand(2, 64)
    step = Clip(norm=1e-3, exact=True).step if exact else 1.0
    for size in torch.linspace(1, 2, 17).tolist():  # one or other is between two bfloat16s
        with told(switch):
            uses = {"weight": [Outer(size * pair.repeat(16, 1)[None], right)]}
            found = found_for(uses, {"weight": (64, 64)}, clip=1e-3, exact=exact)
        assert 0 < length(found.gradients) * step <= 1e-3


@pytest.mark.parametrize("switch", ["older", "newer"])
def test_precision_is_left_as_it_was(switch):
    with told(switch):
        before = (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,
        )
        with full_precision(), products_in("high"):
            pass
        with products_in():
            assert torch.get_float32_matmul_precision() == "highest"
        assert before == (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,
        )
        if switch == "older":
            assert torch.get_float32_matmul_precision() == "medium"
