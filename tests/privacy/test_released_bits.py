"""Bits of a released step that tell what noise should hide, read by whoever knows all but one thing.

The adversary knows weights, texts and settings and sees what a step leaves behind. For each sum
that the step may hide it asks: is there a float32 noise that leads to exactly these bits? Of a
wrong sum some entry has none (Mironov 2012). A release that is a function of a cell of a public
grid, METHODS.md 7.1, answers the same whatever the sum is.
"""

import copy
import json
import math
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from scipy import stats
from torch import nn
from typer.testing import CliRunner

from privacy.draws import (
    DRAWS,
    EXPECTED,
    UNITS,
    documents,
    engine,
    noiseless,
    sums_of_draws,
    trainable,
)
from tightlip.cli.main import app
from tightlip.models.configurations import TransformerConfig
from tightlip.models.transformer import TransformerForCausalLM
from tightlip.privacy import PrivateTraining
from training.small_corpora import documents as short_texts

VOCABULARY, WIDTH = 24, 16
SIGMA, CLIP = 48.0, 1.0  # of one step ε is below 0.1 at δ = 1e-3
SCALE, SHARE = SIGMA * CLIP, 1 / EXPECTED
GRID = 2.0 ** math.floor(math.log2(SCALE / 256))
RATE = 0.1
ULPS = range(-2, 3)  # how far rounding can take the adversary's first guess at the noise
STEPS, FEW = 20, 10
LONGEST = 2 ** (UNITS - 1)
# Of an honest release: one test in 1,000 fails by bad luck, and seeds are fixed.
LUCK = 1e-3
pytestmark = pytest.mark.slow


class Bigrams(nn.Module):
    """The next word from the last one alone, its weights as small as GPT-2's."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, ids):
        return self.head(self.embed(ids))


def adapted():
    model = TransformerForCausalLM(
        TransformerConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_heads=2, num_layers=1,
            max_position_embeddings=16,
        )
    )  # fmt: skip
    config = LoraConfig(r=1, lora_alpha=2, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def half_adapted():
    """Only the second factor of each adapter is trained: then the merged weights show it."""
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    return model


class Weights:
    """Sees the weights after a step of SGD."""

    optimizer = partial(torch.optim.SGD, lr=RATE)

    def __init__(self, model):
        self.model = model
        self.before = [each.detach().clone() for each in trainable(model)]

    def seen(self, parameters, optimizer):
        return [[each.detach().clone()] for each in parameters]

    def released(self, optimizer, folder):
        return self.seen(trainable(self.model), optimizer)

    def undone(self, seen):
        """The gradients, but for rounding."""
        return [
            (before.double() - after.double()) / RATE
            for before, (after,) in zip(self.before, seen, strict=True)
        ]


class AdamState(Weights):
    """Sees Adam's state after its first step."""

    optimizer = partial(torch.optim.Adam, lr=1e-3)

    def seen(self, parameters, optimizer):
        states = [optimizer.state[each] for each in parameters]
        return [[state["exp_avg"].clone(), state["exp_avg_sq"].clone()] for state in states]

    def undone(self, seen):
        return [mean.double() / 0.1 for mean, _ in seen]


class Merged(Weights):
    """Sees the weights that adapters were merged into, as saved on a disk."""

    def __init__(self, model):
        super().__init__(model)
        self.layers = {
            name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_B")
        }

    def seen(self, parameters, optimizer):
        return [
            [layer.base_layer.weight + (second @ self._first(layer)) * 2.0]
            for layer, second in zip(self.layers.values(), parameters, strict=True)
        ]

    def released(self, optimizer, folder):
        copy.deepcopy(self.model).merge_and_unload().save_pretrained(folder / "merged")
        saved = load_file(folder / "merged" / "model.safetensors")
        named = {name.removeprefix("base_model.model."): name for name in self.layers}
        return [[saved[f"{name}.weight"]] for name in named]

    def undone(self, seen):
        gradients = []
        for layer, (after,) in zip(self.layers.values(), seen, strict=True):
            first = self._first(layer).double()
            moved = (after.double() - layer.base_layer.weight.double()) / 2.0
            gradients.append(-(moved @ first.T) / first.square().sum() / RATE)
        return gradients

    @staticmethod
    def _first(layer):
        return layer.lora_A["default"].weight.detach()


@dataclass
class Case:
    make: object
    view: type = Weights
    settings: dict = field(default_factory=dict)


CASES = {
    "SGD": Case(Bigrams),
    "Adam": Case(Bigrams, AdamState),
    "bf16": Case(Bigrams, settings={"bf16": True}),
    "float64": Case(lambda: Bigrams().double()),
    "LoRA": Case(adapted),
    "merged LoRA": Case(half_adapted, Merged),
}


class FloatNoise:
    """Noise as it was: Box and Muller (1958) in float32, added in the precision of the weights."""

    def __init__(self, dtype, seed=0):
        self.dtype, self._stream = dtype, np.random.Philox(key=seed)

    def add(self, tensors, *, scale, share):
        for tensor in tensors:
            noise = torch.from_numpy(self.draw(tensor.numel())).view(tensor.shape)
            tensor.copy_(tensor.to(self.dtype).add(noise, alpha=scale).mul_(share))

    def draw(self, size):
        half = -(-size // 2)
        radius = self._stream.random_raw(half).astype(np.float32)
        radius += np.float32(0.5)
        radius *= np.float32(2.0**-64)
        radius = np.sqrt(np.float32(-2) * np.log(np.minimum(radius, 1)))
        angle = self._stream.random_raw(-(-half // 2)).view(np.uint32)[:half].astype(np.float32)
        angle *= np.float32(2 * math.pi * 2.0**-32)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


class Adversary:
    """One kind of training, the sum of every draw, and steps that are always the first."""

    def __init__(self, name, folder, noise):
        case = CASES[name]
        torch.manual_seed(0)
        model, texts = case.make(), documents(VOCABULARY)
        self.view = case.view(model)
        (folder / "noiseless").mkdir()
        twin = noiseless(folder / "noiseless", model, texts, clip_norm=CLIP, **case.settings)
        self.sums, _ = sums_of_draws(twin)
        self.optimizer = self.view.optimizer(trainable(model))
        self.training = engine(
            folder, model, texts, self.optimizer, noise_multiplier=SIGMA, clip_norm=CLIP,
            **case.settings,
        )  # fmt: skip
        if noise == "float32":
            self.training._noise = FloatNoise(self.view.before[0].dtype)
        self.folder = folder

    def step(self):
        """The truth, and what is seen, of one step from the same weights."""
        with torch.no_grad():
            for parameter, before in zip(trainable(self.view.model), self.view.before, strict=True):
                parameter.copy_(before)
        self.optimizer.state.clear()
        drawn = self.training.step().num_targets
        gradients = [each.grad.clone() for each in trainable(self.view.model)]
        return Seen(drawn, self.view.released(self.optimizer, self.folder), gradients)

    def guess(self, step, draws):
        """The draw whose sum leaves the fewest entries without a noise that explains them."""
        return min(draws, key=lambda draw: self.unexplained(step.traces, self.sums[draw]))

    def unexplained(self, seen, sums):
        first = [
            ((gradient / SHARE - total) / SCALE).float()
            for gradient, total in zip(self.view.undone(seen), sums, strict=True)
        ]
        explained = [torch.zeros_like(each, dtype=torch.bool) for each in first]
        for ulps in ULPS:
            noise = [(each.view(torch.int32) + ulps).view(torch.float32) for each in first]
            replayed = self.replayed(sums, noise)
            for found, ours, theirs in zip(explained, replayed, seen, strict=True):
                found |= all_alike(ours, theirs, found.shape)
        return sum(int((~each).sum()) for each in explained)

    def replayed(self, sums, noise):
        """What would be seen of a step of these sums and this noise."""
        parameters = [nn.Parameter(each.clone()) for each in self.view.before]
        for parameter, total, own in zip(parameters, sums, noise, strict=True):
            parameter.grad = total.add(own, alpha=SCALE).mul_(SHARE)
        optimizer = self.view.optimizer(parameters)
        optimizer.step()
        with torch.no_grad():
            return self.view.seen(parameters, optimizer)


def all_alike(ours, theirs, shape):
    """Where all that is seen of an entry is the same, a whole row of merged weights included."""
    same = torch.ones(shape, dtype=torch.bool)
    for one, other in zip(ours, theirs, strict=True):
        alike = one == other
        same &= alike if alike.shape == shape else alike.all(-1, keepdim=True)
    return same


@dataclass
class Seen:
    drawn: int
    traces: list
    gradients: list


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """An adversary and the steps it watched, made once for all tests."""

    @cache
    def made(name, noise):
        adversary = Adversary(name, tmp_path_factory.mktemp("run"), noise)
        return adversary, [adversary.step() for _ in range(STEPS)]

    return made


def one_unit_guessed(watched, name, noise):
    """How often it is told whether the longest text was drawn, where all others are known."""
    adversary, steps = watched(name, noise)
    return sum(
        adversary.guess(step, [step.drawn & ~LONGEST, step.drawn | LONGEST]) == step.drawn
        for step in steps
    )


def whole_draws_guessed(watched, name, noise):
    adversary, steps = watched(name, noise)
    return sum(adversary.guess(step, DRAWS) == step.drawn for step in steps[:FEW])


def most_right(chance, guesses):
    """The most right guesses that chance explains."""
    return int(stats.binom.isf(LUCK, guesses, chance))


@pytest.mark.parametrize("name", CASES)
def test_no_bit_of_a_step_tells_whether_one_unit_was_drawn(watched, name):
    # Of two normal laws whose means are C apart, σC the deviation, nobody tells more.
    most = most_right(stats.norm.cdf(1 / (2 * SIGMA)), STEPS)
    assert one_unit_guessed(watched, name, "engine") <= most


@pytest.mark.parametrize("name", CASES)
def test_no_bit_of_a_step_tells_who_was_drawn(watched, name):
    # All draws are equally likely before, and their sums at most UNITS · C apart.
    most = most_right(1 / len(DRAWS) + 2 * stats.norm.cdf(UNITS / (2 * SIGMA)) - 1, FEW)
    assert whole_draws_guessed(watched, name, "engine") <= most


@pytest.mark.parametrize("name", CASES)
def test_float32_noise_gives_everybody_away(watched, name):
    assert one_unit_guessed(watched, name, "float32") == STEPS
    assert whole_draws_guessed(watched, name, "float32") == FEW


@pytest.mark.parametrize("name", CASES)
def test_every_released_gradient_is_a_whole_number_of_grid_steps(watched, name):
    _, steps = watched(name, "engine")
    cells = np.concatenate([flat(step.gradients) for step in steps]) / (SHARE * GRID)
    assert np.array_equal(cells, np.rint(cells))
    assert len(np.unique(cells)) > 500


@pytest.mark.parametrize("name", CASES)
def test_what_a_step_leaves_behind_is_on_the_grid_up_to_rounding(watched, name):
    adversary, steps = watched(name, "engine")
    cells = np.concatenate([flat(adversary.view.undone(step.traces)) for step in steps])
    cells /= SHARE * GRID
    assert np.abs(cells - np.rint(cells)).max() < 0.02


@pytest.mark.parametrize("expected_batch", [1.7, EXPECTED, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_entries_of_one_cell_are_released_alike_to_the_last_bit(
    tmp_path, expected_batch, dtype
):
    """Also where the share is no power of two; and a zero has one sign."""
    model = Bigrams().to(dtype)
    training = PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=RATE), documents(VOCABULARY),
        ledger=tmp_path / "ledger.json", noise_multiplier=SIGMA, clip_norm=CLIP, delta=1e-3,
        expected_batch=expected_batch, insecure_seed=5,
    )  # fmt: skip
    released = []
    for _ in range(STEPS):
        training.step()
        released.append(np.concatenate([each.grad.numpy().ravel() for each in trainable(model)]))
    released = np.concatenate(released)
    cells = np.rint(released.astype(np.float64) * expected_batch / GRID)
    assert np.count_nonzero(cells == 0) > 5
    assert len(np.unique(released.view(f"u{released.itemsize}"))) == len(np.unique(cells))


@pytest.mark.parametrize("name", ["SGD", "float64"])
@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (0.9, False), (1.1, False)])
def test_the_release_less_its_sum_follows_the_normal_law(watched, name, factor, fits):
    adversary, steps = watched(name, "engine")
    noise = np.concatenate(
        [flat(step.gradients) / SHARE - flat(adversary.sums[step.drawn]) for step in steps]
    )
    assert (stats.kstest(noise / (factor * SCALE), "norm").pvalue > 1e-3) == fits


@pytest.mark.parametrize("name", ["SGD", "float64"])
def test_neighbouring_cells_are_equally_likely(watched, name):
    """A deviation is 384 cells here, so that what remains of cells modulo 16 is uniform."""
    _, steps = watched(name, "engine")
    cells = np.rint(np.concatenate([flat(step.gradients) for step in steps]) / (SHARE * GRID))
    assert stats.chisquare(np.bincount(np.mod(cells, 16).astype(int), minlength=16)).pvalue > 1e-3


@pytest.mark.parametrize("unit", ["user", "example"])
def test_what_tightlip_train_saves_of_a_step_is_on_the_grid_up_to_rounding(tmp_path, unit):
    """Between two snapshots of SGD lies one step; weights are of noise by then."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in short_texts(num_users=16)))
    words = ["train", corpus, "--out", tmp_path / "run", "--mitigation", "dp", "--unit", unit]
    words += ["--noise-multiplier", SIGMA, "--optimizer", "sgd", "--learning-rate", 1]
    words += ["--batch-size", 2, "--steps", 2, "--snapshot-steps", 1, "--insecure-seed", 5]
    words += ["--hidden-size", 8, "--embedding-size", 8, "--num-layers", 1, "--allow-unproved"]
    shown = CliRunner().invoke(app, [str(word) for word in words])
    assert shown.exit_code == 0, shown.output
    first, second = (
        load_file(tmp_path / "run" / "snapshots" / f"step-{step}" / "model.safetensors")
        for step in (1, 2)
    )
    updates = [first[name].double() - second[name].double() for name in first]
    cells = flat(updates) / (GRID / 2)
    assert np.abs(cells - np.rint(cells)).max() < 0.02
    assert np.std(cells) == pytest.approx(SCALE / GRID, rel=0.1)


def flat(tensors):
    return torch.cat([each.double().flatten() for each in tensors]).numpy()
