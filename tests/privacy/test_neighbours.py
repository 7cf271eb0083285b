"""One unit more moves the sum by its own clipped gradient and by nothing else.

Sums of all draws of a few units of unlike lengths are read from the engine's own steps. Whatever
the model does, the sum with a unit less the sum without it must be what the unit gives when it
is drawn alone: otherwise it moved the others, and no noise was added for that.
"""

import pytest
import torch
from torch import nn

from privacy.draws import (
    DRAWS,
    UNITS,
    catch_sums,
    documents,
    engine,
    noiseless,
    sums_of_draws,
)
from privacy.test_clipping_families import FAMILIES, stock
from privacy.tiny_models import SIZE, VOCABULARY, Chain, Stretch
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


SHORTEST = 3
# Wide enough that products of other shapes are added up in another order.
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
HUGGING_FACE = {**WIDE, "intermediate_size": 128, "max_position_embeddings": 32}
OURS = {"hidden_size": 64, "num_layers": 1}
WIDER = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 32},
    "OPTForCausalLM": {
        **WIDE, "ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 32,
    },
    "Qwen3ForCausalLM": {**HUGGING_FACE, "head_dim": 16},
    "LSTMForCausalLM": {**OURS, "embedding_size": 64},
    "GRUForCausalLM": {**OURS, "embedding_size": 64},
    "TransformerForCausalLM": {**OURS, "num_heads": 4, "max_position_embeddings": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bf16_one_unit_more_moves_the_sum_by_its_own_share_alone(tmp_path, name):
    model = stock(name, **WIDER.get(name, HUGGING_FACE)).float()
    texts = documents(VOCABULARY, shortest=SHORTEST)
    training = noiseless(tmp_path, model, texts, clip_norm=CLIP, bf16=True)
    sums, losses = sums_of_draws(training, shortest=SHORTEST)
    assert float(flat(sums[1]).norm()) > 0.9 * CLIP
    assert moved_others(sums) < ROUNDING
    assert moved_losses(losses) < 1e-6
    assert reach(sums) < 1 + ROUNDING


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "OPTForCausalLM", "LSTMForCausalLM"])
def test_a_draw_of_a_single_position_is_like_any_other(tmp_path, name):
    training = noiseless(tmp_path, stock(name).float(), documents(VOCABULARY), clip_norm=CLIP)
    assert moved_others(sums_of_draws(training)[0]) < ROUNDING


def closed():
    layer = nn.Linear(SIZE, SIZE)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class Gated(nn.Module):
    """Adds a mean to each position, by gates that are closed at first: one gate, two of which
    neither has a gradient while the other is closed, or one that has none below 0."""

    def __init__(self, gates, dimension):
        super().__init__()
        self.gates, self.dimension = gates, dimension
        self.first, self.second = closed(), closed() if gates == "two" else nn.Identity()

    def forward(self, x):
        inner = torch.relu(self.first(x)) if self.gates == "relu" else self.first(x)
        if self.dimension is not None:
            inner = inner.mean(self.dimension, keepdim=True).expand_as(x)
        return x + self.second(inner)


class SeesPadding(Chain):
    """Moves a row by the number of padding words at its end, if there are three or more."""

    def forward(self, input_ids):
        at_end = (input_ids == 0).flip(1).cumprod(1).sum(1)
        moved = torch.where(at_end > 2, 0.1 * at_end, 0.0)[:, None, None]
        hidden = self.embed(input_ids) + moved
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


class MixesThree(nn.Module):
    """Rows that see each other where there are three or more."""

    def forward(self, x):
        return x - 0.5 * x.mean(0, keepdim=True) if len(x) > 2 else x


def after_training(folder, model):
    """Sums of all draws after some steps, by the engine that took them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    training = engine(
        folder, model, documents(VOCABULARY), optimizer, noise_multiplier=1.0, clip_norm=CLIP
    )
    caught = catch_sums(training)
    for _ in range(STEPS):
        training.step()
    optimizer.param_groups[0]["lr"] = 0.0
    found = sums_of_draws(training, caught=caught)
    training.guarantee()  # refuses where what was checked at the start no longer holds
    return found


PATHS = {"fast": lambda: nn.Linear(SIZE, SIZE), "slow": Stretch}
COUPLED = {
    "one gate over rows": lambda *rest: Chain(Gated("one", 0), *rest),
    "two gates over rows": lambda *rest: Chain(Gated("two", 0), *rest),
    "relu over rows": lambda *rest: Chain(Gated("relu", 0), *rest),
    "one gate over positions": lambda *rest: Chain(Gated("one", 1), *rest),
    "two gates over positions": lambda *rest: Chain(Gated("two", 1), *rest),
    "padding": SeesPadding,
    "three rows": lambda *rest: Chain(MixesThree(), *rest),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", COUPLED)
def test_a_model_that_couples_rows_is_refused_or_run_so_that_nobody_moves(tmp_path, name, path):
    torch.manual_seed(0)
    try:
        sums, losses = after_training(tmp_path, COUPLED[name](PATHS[path]()))
    except GuaranteeError:
        return
    assert moved_others(sums) < ROUNDING
    assert moved_losses(losses) < 1e-6
    assert reach(sums) < 1 + ROUNDING


@pytest.mark.parametrize("path", PATHS)
def test_a_gate_that_couples_nobody_is_trained(tmp_path, path):
    torch.manual_seed(0)
    model = Chain(Gated("two", None), PATHS[path]())
    sums, _ = after_training(tmp_path, model)
    assert float(model.layers[0].first.weight.detach().norm()) > 0.1
    assert moved_others(sums) < ROUNDING
