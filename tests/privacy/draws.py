"""Every draw that a few units can make, and its sum, read from what the engine itself does.

Unit k has 2^k targets, so that the number of targets of a step says who was drawn: its binary
digits. Documents are of unlike lengths thereby. Half of the units are drawn on average.
"""

import torch

from tightlip.privacy import PrivateTraining

UNITS = 4
EXPECTED = UNITS // 2  # a power of two: dividing by it loses no bit
DRAWS = range(2**UNITS)


def documents(vocabulary, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, vocabulary, (2**unit + 1,), generator=draw, dtype=torch.long)
        for unit in range(UNITS)
    ]


def trainable(model):
    return [each for each in model.parameters() if each.requires_grad]


def engine(folder, model, texts, optimizer, *, noise_multiplier, **settings):
    return PrivateTraining(
        model, optimizer, texts, ledger=folder / "ledger.json", noise_multiplier=noise_multiplier,
        expected_batch=EXPECTED, delta=1e-3, insecure_seed=5, **settings,
    )  # fmt: skip


def noiseless(folder, model, texts, *, learning_rate=0.0, **settings):
    optimizer = torch.optim.SGD(trainable(model), lr=learning_rate)
    return engine(folder, model, texts, optimizer, noise_multiplier=0.0, **settings)


def sums_of_draws(training, *, most=400):
    """By draw: the clipped sum and the drawn units' losses together. Weights must stay put."""
    sums, losses = {}, {}
    for _ in range(most):
        step = training.step()
        drawn = step.num_targets
        sums[drawn] = [EXPECTED * each.grad.detach() for each in trainable(training.model)]
        losses[drawn] = float(step.loss) * drawn.bit_count()
        if len(sums) == len(DRAWS):
            return sums, losses
    raise AssertionError(f"only {sorted(sums)} were drawn in {most} steps")
