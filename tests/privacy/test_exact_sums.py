"""Sums of whole numbers: one unit more moves them by its own vector, to the bit, and by no more than
the bound."""

import math

import pytest
import torch
from torch import nn

from privacy.test_rounding import SHAPES, length, outer, watched
from privacy.tiny_models import LAYERS, VOCABULARY
from tightlip.core.grid_gaussian import grid_of
from tightlip.privacy.clipping import Clip, clipped_sum
from tightlip.privacy.exact_sums import step_of
from tightlip.privacy.layers import Layout, Lookup, Outer, Whole
from tightlip.privacy.passes import Passes, Physical
from tightlip.privacy.row_losses import NO_LABEL

UNITS, ROWS, WIDTH = 4, 2, 5


def found_for(uses, shapes, num_units=1, clip=1.0):
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    layout = Layout(num_units=num_units, rows_per_unit=1)
    with torch.no_grad():
        return clipped_sum(
            watched(uses), parameters, torch.zeros(num_units), layout, Clip(norm=clip, exact=True)
        )


def batch(present, seed=0):
    """Units side by side; one that is not present has nothing to predict."""
    draw = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(VOCABULARY, (2, UNITS * ROWS, WIDTH), generator=draw)
    is_there = torch.tensor([unit in present for unit in range(UNITS)]).repeat_interleave(ROWS)
    targets = torch.where(is_there[:, None], targets, NO_LABEL)
    layout = Layout(num_units=UNITS, rows_per_unit=ROWS)
    return Physical.of(ids, targets, torch.full((UNITS,), ROWS), layout)


def sums(model, present, *, way="eager", exact=True, norm=0.05):
    found = Passes(model, Clip(norm=norm, exact=exact), way=way)(batch(present))
    return {name: each.clone() for name, each in found.gradients.items()}


def test_a_step_is_a_power_of_two_that_127_units_leave_room_for():
    for clip in (1.0, 0.1, 3.7, 1e-9, 2.0**20):
        step = step_of(clip)
        assert math.frexp(step)[0] == 0.5
        assert 2.0**-24 <= step / clip < 2.0**-23
        assert 127 * clip / step < 2**31


@pytest.mark.parametrize("way", ["eager", "slow"])
@pytest.mark.parametrize("kind", LAYERS)
def test_one_unit_more_moves_the_sum_by_its_own_vector_to_the_bit(kind, way):
    torch.manual_seed(3)
    model = LAYERS[kind]().eval()
    everybody, others, own = (
        sums(model, units, way=way) for units in (range(UNITS), (0, 1, 3), (2,))
    )
    step = step_of(0.05)
    for name in everybody:
        assert torch.equal(everybody[name], everybody[name].round())
        assert torch.equal(everybody[name] - others[name], own[name]), name
    assert 0 < length(own) * step <= 0.05
    usual = sums(model, range(UNITS), way=way, exact=False)
    for name, each in usual.items():
        torch.testing.assert_close(everybody[name] * step, each.double(), rtol=1e-4, atol=1e-7)


def test_sums_of_floats_do_not_do_that():
    """The control: the same units in float32, whose products are rounded together."""
    torch.manual_seed(3)
    model = LAYERS["linear"]().eval()
    everybody, others, own = (
        sums(model, units, exact=False) for units in (range(UNITS), (0, 1, 3), (2,))
    )
    assert any(not torch.equal(everybody[n] - others[n], own[n]) for n in everybody)


@pytest.mark.parametrize("kind", SHAPES)
def test_tokens_that_cancel_take_no_unit_above_the_bound(kind):
    shape = SHAPES[kind]
    for seed in range(20):
        use = outer(seed, shape, rest=8.0 if seed % 2 else 0.5)
        exact = float((use.left_BTP[0].double().t() @ use.right_BTD[0].double()).norm())
        clip = 0.5 * exact + 1e-30
        found = found_for({"w": [use]}, {"w": shape}, clip=clip)
        assert length(found.gradients) * step_of(clip) <= clip


def test_rounding_to_steps_is_taken_off_the_bound():
    """A gradient of a million equal entries, each of which half a step would be added to."""
    size = 1_000_000
    found = found_for({"w": [Whole(torch.full((1, size), 1.0))]}, {"w": (size,)}, clip=1.0)
    steps = found.gradients["w"]
    entry = 1 / math.sqrt(size) / 2.0**-24  # 16777.2 steps: rounding goes down here
    assert bool((steps <= entry).all())
    assert float(steps.norm()) * 2.0**-24 <= 1.0
    for nudge in torch.linspace(0.1, 1.0, 40):
        values = torch.full((1, size), 1.0)
        values[0, ::2] = nudge
        found = found_for({"w": [Whole(values)]}, {"w": (size,)}, clip=1.0)
        assert float(found.gradients["w"].norm()) * 2.0**-24 <= 1.0


def test_a_unit_that_is_not_finite_counts_nothing():
    left = torch.randn(3, 4, 6)
    left[1] = math.nan
    uses = {
        "w": [Outer(left, torch.randn(3, 4, 5))],
        "e": [Lookup(torch.randint(7, (3, 4)), left)],
        "v": [Whole(left[:, 0])],
    }
    shapes = {"w": (6, 5), "e": (7, 6), "v": (6,)}
    found = found_for(uses, shapes, num_units=3)
    assert all(bool(each.isfinite().all()) for each in found.gradients.values())
    assert length(found.gradients) > 0


def test_each_lookup_of_a_row_is_rounded_by_itself_and_bounded():
    ids = torch.zeros(1, 50, dtype=torch.long)
    for seed in range(20):
        torch.manual_seed(seed)
        found = found_for({"e": [Lookup(ids, torch.randn(1, 50, 8))]}, {"e": (3, 8)}, clip=1e-3)
        assert length(found.gradients) * step_of(1e-3) <= 1e-3


def test_the_engine_promises_exact_sums_and_releases_cells(tmp_path):
    from tightlip.privacy import PrivateTraining

    torch.manual_seed(0)
    model = LAYERS["linear"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    documents = [torch.randint(VOCABULARY, (9,)) for _ in range(30)]
    private = PrivateTraining(
        model, optimizer, documents, ledger=tmp_path / "ledger.json", noise_multiplier=1.0,
        expected_batch=8, steps=3, exact_sums=True,
    )  # fmt: skip
    private.step()
    for name, each in model.named_parameters():
        cells = (before[name] - each.detach()).double() * 8 / grid_of(1.0)
        assert float((cells - cells.round()).abs().max()) < 1e-2
    assert private.guarantee()["arithmetic"].startswith("exact")
