"""Adam without the noise's share of its second moment: the paper's formula, by hand."""

import math

import numpy as np
import pytest
import torch

from privacy.test_adaptive import adaptive
from privacy.test_private_training import lstm, private
from tightlip.core.errors import UsageError
from tightlip.core.run_folder import load_optimizer_tensors, optimizer_tensors
from tightlip.privacy import CorrectedAdam
from tightlip.privacy.private_training import PrivateTraining

SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def gradients(steps, size=7, seed=0):
    """Some small, some large: some second moments end below the floor, some above it."""
    scale = np.geomspace(0.05, 5, size)
    return np.random.default_rng(seed).normal(size=(steps, size)) * scale


def weights_by_hand(start, gradients, variance, floor, *, decoupled):
    """Oracle: one weight after another in plain floats, the floor from the very weights of squares."""
    (beta1, beta2), rate, decay = SETTINGS["betas"], SETTINGS["lr"], SETTINGS["weight_decay"]
    found, at_floor = [], 0
    for place, weight in enumerate(start):
        first = second = 0.0
        for t, row in enumerate(gradients, start=1):
            gradient = row[place]
            if decoupled:
                weight -= rate * decay * weight
            else:
                gradient += decay * weight
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
            shares = [(1 - beta2) * beta2 ** (t - s) / (1 - beta2**t) for s in range(1, t + 1)]
            least = floor * variance * math.sqrt(2 * sum(share**2 for share in shares))
            signal = second / (1 - beta2**t) - variance
            at_floor += signal < least
            below = math.sqrt(max(signal, least)) + SETTINGS["eps"]
            weight -= rate * first / (1 - beta1**t) / below
        found.append(weight)
    return found, at_floor


def stepped(optimizer, parameters, rows):
    for row in rows:
        for place, parameter in enumerate(parameters):
            parameter.grad = torch.tensor(row[3 * place : 3 * place + parameter.numel()])
        optimizer.step()
    return torch.cat([each.detach() for each in parameters]).tolist()


def two_tensors():
    start = torch.linspace(-1, 1, 7, dtype=torch.float64)
    return start.tolist(), [torch.nn.Parameter(start[:3].clone()), torch.nn.Parameter(start[3:].clone())]  # fmt: skip


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("floor", [0.5, 2.0])
def test_a_step_is_the_papers_formula_weight_by_weight(decoupled, floor):
    start, parameters = two_tensors()
    rows = gradients(steps=30)
    optimizer = CorrectedAdam(parameters, floor=floor, decoupled=decoupled, **SETTINGS)
    optimizer.noise_variance = 0.3
    expected, at_floor = weights_by_hand(start, rows, 0.3, floor, decoupled=decoupled)
    assert stepped(optimizer, parameters, rows) == pytest.approx(expected, rel=1e-9)
    assert 30 < at_floor < 180  # both sides of the maximum are there


@pytest.mark.parametrize(
    ("decoupled", "theirs"), [(False, torch.optim.Adam), (True, torch.optim.AdamW)]
)
def test_without_noise_it_is_torchs_own(decoupled, theirs):
    rows = gradients(steps=20)
    (_, ours), (_, plain) = two_tensors(), two_tensors()
    optimizer = CorrectedAdam(ours, decoupled=decoupled, **SETTINGS)
    optimizer.noise_variance = 0.0
    found = stepped(optimizer, ours, rows)
    assert found == pytest.approx(stepped(theirs(plain, **SETTINGS), plain, rows), rel=1e-9)


def test_a_weight_without_a_gradient_stays_where_it_is():
    start, parameters = two_tensors()
    optimizer = CorrectedAdam(parameters)
    optimizer.noise_variance = 1.0
    parameters[0].grad = torch.ones(3, dtype=torch.float64)
    optimizer.step()
    assert parameters[1].tolist() == start[3:]
    assert parameters[0].tolist() != start[:3]


def test_it_goes_on_from_a_checkpoint_as_though_nothing_had_happened():
    rows = gradients(steps=12)
    (_, whole), (_, cut) = two_tensors(), two_tensors()
    optimizers = [CorrectedAdam(whole), CorrectedAdam(cut)]
    for each in optimizers:
        each.noise_variance = 0.3
    stepped(optimizers[1], cut, rows[:5])
    resumed = CorrectedAdam(cut)
    resumed.noise_variance = 0.3
    load_optimizer_tensors(resumed, optimizer_tensors(optimizers[1]))
    assert stepped(resumed, cut, rows[5:]) == stepped(optimizers[0], whole, rows)


@pytest.mark.slow
def test_the_variance_that_it_is_told_is_that_of_the_noise_on_gradients(tmp_path):
    """Documents of one id predict nothing, so gradients are noise and nothing else."""
    model = lstm()
    optimizer = CorrectedAdam(model.parameters(), lr=0.1)
    texts = [torch.zeros(1, dtype=torch.long) for _ in range(60)]
    training = private(
        tmp_path, model, optimizer, texts, noise_multiplier=1.5, clip_norm=0.2, expected_batch=12
    )
    found = []
    for _ in range(6):
        training.step()
        found += [float(value) for each in model.parameters() for value in each.grad.flatten()]
    # 6 · 602 squares: their mean is within 8% of the variance, and 1.5 times it is not.
    assert optimizer.noise_variance == pytest.approx(np.mean(np.square(found)), rel=0.08)
    assert optimizer.noise_variance == pytest.approx((1.5 * 0.2 / 12) ** 2)


@pytest.mark.slow
def test_it_is_told_of_no_noise_where_nothing_is_clipped(tmp_path):
    model = lstm()
    optimizer = CorrectedAdam(model.parameters())
    private(tmp_path, model, optimizer, noise_multiplier=0.0, clip_norm=math.inf)
    assert optimizer.noise_variance == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["scale", "as-published"])
def test_noise_that_varies_is_refused_before_anything_is_charged(mode, tmp_path):
    model = lstm()
    with pytest.raises(UsageError, match=f"adaptive='{mode}' changes the noise"):
        adaptive(tmp_path, mode, model=model, optimizer=CorrectedAdam(model.parameters()))
    assert not (tmp_path / "ledger.json").exists()


def test_a_step_without_knowing_the_noise_is_refused():
    _, parameters = two_tensors()
    with pytest.raises(UsageError, match="does not know how much noise"):
        CorrectedAdam(parameters).step()


def test_a_floor_of_nothing_is_refused():
    with pytest.raises(UsageError, match="floor=0 would divide by next to nothing"):
        CorrectedAdam(two_tensors()[1], floor=0)


def test_the_engine_that_tells_it_is_the_one_that_people_import():
    from tightlip import privacy, trainer

    assert trainer.CorrectedAdam is privacy.CorrectedAdam is CorrectedAdam
    assert privacy.PrivateTraining is PrivateTraining
