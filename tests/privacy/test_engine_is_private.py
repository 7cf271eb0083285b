"""The engine's own ε, put to the test from inside.

Canaries of the engine are units of known gradient on coordinates of their own, half of them in by
fair coins; whoever sees every noised sum guesses which. An honest engine leaves no more to see than
its noise allows, and one that is broken in a way that a training curve never shows is caught. They
see nothing of a model's own layers: for those, canaries that read words of their own lie among the
units, and what each adds is worked out beside.
"""

import numpy as np
import pytest
import torch
from torch import nn

from tightlip.audit.dp_check import Claim, check_guesses
from tightlip.core.errors import UsageError
from tightlip.core.files import read_sealed
from tightlip.privacy import promised
from tightlip.privacy.engine_canaries import EngineCanaries
from tightlip.privacy.noise_schedules import CPUNoise
from tightlip.privacy.passes import Passes
from tightlip.privacy.per_unit import clipped_gradients
from tightlip.privacy.private_training import PrivateTraining
from tightlip.privacy.sampling import PoissonSampler

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
    claim = Claim(epsilon=record["epsilon"], delta=record["delta"])
    return check_guesses(scores, included, claim)


def clipped_sum(model, canary):
    """What one canary adds to the sum, clipped, as its owner can work out."""
    row = canary[None]
    return flat(clipped_gradients(model, row, row, clip_norm=CLIP).gradients.values())


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def few_steps(folder, *, noise=None, **settings):
    """A small training with canaries in the engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))
    documents = list(torch.randint(0, WORDS, (100, 5)))
    chosen = {"epsilon": 2.0, "expected_batch": 10, "steps": 40, "check_canaries": 1000} | settings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return PrivateTraining(model, optimizer, documents, ledger=folder / "ledger.json", **chosen)


def seen_in(folder):
    there, _ = read_sealed(folder / "_private_dp_check.json")
    return np.array(there["scores"]), np.array(there["included"], bool)


def engine_check(folder, **settings):
    engine = few_steps(folder, **settings)
    while engine.has_budget():
        engine.step()
    record = engine.guarantee()
    engine.close()
    return check_guesses(*seen_in(folder), Claim.of(record), independent=True)


def with_noise(monkeypatch, share):
    honest = CPUNoise.add

    def quieter(self, tensors, *, scale, **amounts):
        honest(self, tensors, scale=scale * share, **amounts)

    monkeypatch.setattr(CPUNoise, "add", quieter)


def test_the_honest_engine_shows_what_its_noise_allows(tmp_path):
    found = engine_check(tmp_path)
    assert found.p_value > 1e-3
    assert found.num_correct > 0.55 * found.num_guesses  # or nothing was seen


@pytest.mark.parametrize("exact_sums", [False, True])
def test_half_the_noise_is_caught(tmp_path, monkeypatch, exact_sums):
    with_noise(monkeypatch, 0.5)
    assert engine_check(tmp_path, exact_sums=exact_sums).verdict == "contradicted"


def test_canaries_that_are_not_clipped_are_caught(tmp_path, monkeypatch):
    honest = EngineCanaries.clipped_sum
    monkeypatch.setattr(
        EngineCanaries, "clipped_sum", lambda *given, **like: 2 * honest(*given, **like)
    )
    assert engine_check(tmp_path).verdict == "contradicted"


def test_canaries_drawn_more_often_than_the_ledger_says_are_caught(tmp_path, monkeypatch):
    honest = PoissonSampler.draw

    def twice(self):
        return np.union1d(honest(self), honest(self))

    monkeypatch.setattr(PoissonSampler, "draw", twice)
    assert engine_check(tmp_path).verdict == "contradicted"


def test_a_drawn_canary_adds_one_clip_norm_and_nobody_else_anything(tmp_path):
    engine = few_steps(tmp_path, clip_norm=0.3)
    canaries, (_, included) = engine.canaries, seen_in(tmp_path)
    drawn = np.array([3, 500, 999])
    like = torch.zeros(1, dtype=torch.float64)
    found = canaries.clipped_sum(drawn, 1.0, like=like).flatten().numpy()
    expected = np.zeros(1000)
    expected[drawn] = -0.3 * included[drawn]
    assert found == pytest.approx(expected, rel=1e-3)
    assert not canaries.clipped_sum(np.array([], int), 1.0, like=like).any()


def test_the_model_is_the_same_with_and_without_canaries_in_the_engine(tmp_path):
    weights = []
    for name, number in (("with", 50), ("without", None)):
        (tmp_path / name).mkdir()
        settings = {"check_canaries": number, "insecure_seed": 5, "expected_batch": 100, "steps": 3}
        engine = few_steps(tmp_path / name, **settings)
        while engine.has_budget():
            engine.step()
        weights.append(flat(engine.model.parameters()))
        assert engine.guarantee()["sampling_rate"] == 1.0
        engine.close()
    assert torch.equal(*weights)


def test_a_resumed_training_goes_on_with_the_same_canaries(tmp_path):
    first = few_steps(tmp_path)
    first.step()
    first.settle()
    first.close()
    before, included = seen_in(tmp_path)
    again = few_steps(tmp_path)
    assert (seen_in(tmp_path)[0] == before).all()
    again.step()
    again.settle()
    again.close()
    assert (seen_in(tmp_path)[1] == included).all()
    assert (seen_in(tmp_path)[0] != before).any()
    with pytest.raises(UsageError, match="1,000 canaries, and 10"):
        few_steps(tmp_path, check_canaries=10)


def test_a_layer_left_unclipped_is_caught(tmp_path, monkeypatch):
    honest = Passes.__call__

    def all_but_the_embedding(self, batch):
        clipped, bare = honest(self, batch), honest(Passes(self.model, None), batch)
        clipped.gradients["embed.weight"] = bare.gradients["embed.weight"]
        return clipped

    monkeypatch.setattr(Passes, "__call__", all_but_the_embedding)
    # Its rounding would give it away before anything is trained.
    monkeypatch.setattr(promised, "rounded_together", lambda *given: 1e-6)
    found = white_box_check(tmp_path, seed=0)
    assert found.verdict == "contradicted"
    assert found.epsilon_lower_bound > CLAIMED
