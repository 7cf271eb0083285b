"""One unit more moves the sum by its own clipped gradient and by nothing else.

Sums of all draws of a few units of unlike lengths are read from the engine's own steps. Whatever
the model does, the sum with a unit less the sum without it must be what the unit gives when it
is drawn alone: otherwise it moved the others, and no noise was added for that.
"""

import pytest
import torch
from torch import nn

from privacy.draws import DRAWS, UNITS, documents, noiseless, sums_of_draws, trainable
from privacy.test_clipping_families import FAMILIES, stock
from privacy.tiny_models import LAYERS, UNCOVERED, VOCABULARY, Chain, Stretch
from tightlip.core.errors import GuaranteeError

CLIP = 0.1  # below every unit's norm, so that each gives all it may
# METHODS.md 7.2: what one unit changes in how float32 sums of others are rounded is at most 6e-6 C,
# and ten times that is charged.
ROUNDING = 6e-5
STEPS = 40
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:No fast rule")]


def flat(tensors):
    return torch.cat([each.double().flatten() for each in tensors])


def neighbours():
    """Every draw without a unit, and the unit."""
    return [(draw, 1 << u) for u in range(UNITS) for draw in DRAWS if not draw & 1 << u]


def reach(sums):
    """The most that one unit more moves a sum, in clip norms."""
    return max(float((flat(sums[d | u]) - flat(sums[d])).norm()) for d, u in neighbours()) / CLIP


def moved_others(sums):
    """The most that one unit more moves the shares of others, in clip norms."""
    return max(
        float((flat(sums[d | u]) - flat(sums[d]) - flat(sums[u])).norm()) for d, u in neighbours()
    ) / CLIP  # fmt: skip


def moved_losses(losses):
    """The same of losses, as a share of the largest."""
    off = max(abs(losses[d | u] - losses[d] - losses[u]) for d, u in neighbours())
    return off / max(losses.values())


BF16 = {
    **{name: lambda name=name: stock(name).float() for name in FAMILIES},
    **{name: LAYERS[name] for name in ("linear", "LayerNorm", "GRU", "tied", "positions T")},
    "slow": UNCOVERED["layers.0.scale"],
}


@pytest.mark.parametrize("name", BF16)
def test_in_bf16_one_unit_more_moves_the_sum_by_its_own_share_alone(tmp_path, name):
    torch.manual_seed(0)
    training = noiseless(tmp_path, BF16[name](), documents(VOCABULARY), clip_norm=CLIP, bf16=True)
    sums, losses = sums_of_draws(training)
    assert float(flat(sums[1]).norm()) > 0.9 * CLIP
    assert moved_losses(losses) < 1e-6
    assert moved_others(sums) < ROUNDING
    assert reach(sums) < 1 + ROUNDING
