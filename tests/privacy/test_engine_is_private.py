"""The engine's own ε, put to the test from inside (Steinke et al. 2023).

Half of the canaries, by fair coins, are among the units. Each reads a word of its own, so its
gradient is large in a row of the embedding that nobody else touches, and its direction is known.
Whoever sees every noisy sum asks each how far it goes in each canary's direction: nobody could
guess better. At ε = 2 an honest engine leaves little to see; one that is broken in a way that a
training curve never shows is caught.
"""

import numpy as np
import pytest
import torch
from torch import nn

from tightlip.audit.dp_check import check_guesses
from tightlip.privacy.noise_schedules import CPUNoise
from tightlip.privacy.passes import Passes
from tightlip.privacy.per_unit import clipped_gradients
from tightlip.privacy.private_training import PrivateTraining

CANARIES, OTHERS, WORDS, WIDTH = 800, 40, 6, 8
CLAIMED, CLIP, STEPS = 2.0, 1.0, 2
# What is tested is the one-pass engine, not its slow fallback.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error:No fast rule")]


class Bigrams(nn.Module):
    """The next word from the last one alone; every word from WORDS on is one canary's own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS + CANARIES, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS + CANARIES)
        nn.init.normal_(self.embed.weight, std=0.1)
        # A large head makes large gradients below it: canaries are clipped to less than a tenth.
        nn.init.normal_(self.head.weight, std=10.0)

    def forward(self, ids):
        return self.head(self.embed(ids))


def white_box_check(folder, seed):
    """Train with the canaries that coins choose; guess them from what the optimizer was given."""
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = Bigrams()
    canaries = torch.stack([torch.arange(CANARIES) + WORDS, torch.zeros(CANARIES).long()], dim=1)
    included = draw.random(CANARIES) < 0.5
    others = torch.from_numpy(draw.integers(0, WORDS, (OTHERS, 5)))
    units = [*others, *canaries[torch.from_numpy(included)]]
    engine = PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        units,
        ledger=folder / "ledger.json",
        epsilon=CLAIMED,
        clip_norm=CLIP,
        expected_batch=len(units),
        steps=STEPS,
        physical_rows=256,
        insecure_seed=seed,
    )
    scores = np.zeros(CANARIES)
    while engine.has_budget():
        directions = [clipped_sum(model, canary) for canary in canaries]
        engine.step()
        update = flat(each.grad for each in model.parameters())
        scores += [float(update @ direction / direction.norm()) for direction in directions]
    record = engine.guarantee()
    assert record["epsilon"] <= CLAIMED
    return check_guesses(scores, included, claimed_epsilon=record["epsilon"], delta=record["delta"])


def clipped_sum(model, canary):
    """What one canary adds to the sum, clipped, as its owner can work out."""
    row = canary[None]
    return flat(clipped_gradients(model, row, row, clip_norm=CLIP).gradients.values())


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("seed", range(2))
def test_the_honest_engine_shows_less_than_it_claims(tmp_path, seed):
    found = white_box_check(tmp_path, seed)
    assert found.verdict == "consistent"
    assert 0.2 < found.epsilon_lower_bound < 1.5  # a Gaussian of this ε shows about 0.7


def test_noise_four_times_too_small_is_caught(tmp_path, monkeypatch):
    honest = CPUNoise.add

    def quieter(self, tensors, *, scale, share):
        honest(self, tensors, scale=scale / 4, share=share)

    monkeypatch.setattr(CPUNoise, "add", quieter)
    found = white_box_check(tmp_path, seed=0)
    assert found.verdict == "contradicted"
    assert found.epsilon_lower_bound > CLAIMED


def test_a_layer_left_unclipped_is_caught(tmp_path, monkeypatch):
    honest = Passes.__call__

    def all_but_the_embedding(self, batch):
        clipped, bare = honest(self, batch), honest(Passes(self.model, None), batch)
        clipped.gradients["embed.weight"] = bare.gradients["embed.weight"]
        return clipped

    monkeypatch.setattr(Passes, "__call__", all_but_the_embedding)
    found = white_box_check(tmp_path, seed=0)
    assert found.verdict == "contradicted"
    assert found.epsilon_lower_bound > CLAIMED
