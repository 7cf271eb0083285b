"""Every draw that a few units can make, and its sum, read from what the engine itself does.

Unit k has 2^k times as many targets as the shortest, so that the number of targets of a step says
who was drawn: its binary digits. Half of the units are drawn on average.
"""

import torch

from tightlip.privacy import PrivateTraining

UNITS = 4
EXPECTED = UNITS // 2  # a power of two: dividing by it loses no bit
DRAWS = range(2**UNITS)


def documents(vocabulary, *, shortest=1):
    """Texts without the word 0, which is what rows are padded with."""
    draw = torch.Generator().manual_seed(0)
    sizes = [shortest * 2**unit + 1 for unit in range(UNITS)]
    return [torch.randint(1, vocabulary, (size,), generator=draw) for size in sizes]


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


def catch_sums(training):
    """A list that always holds the last step's sum, as it was before noise."""
    caught, add = [], training._noise.add

    def caught_first(tensors, **options):
        caught[:] = [tensor.clone() for tensor in tensors]
        add(tensors, **options)

    training._noise.add = caught_first
    return caught


def sums_of_draws(training, *, shortest=1, caught=None, most=400):
    """By draw: the clipped sum and the drawn units' losses together. Weights must stay put."""
    sums, losses = {}, {}
    for _ in range(most):
        step = training.step()
        drawn = step.num_targets // shortest
        released = [EXPECTED * each.grad for each in trainable(training.model)]
        sums[drawn] = list(caught) if caught else released
        losses[drawn] = float(step.loss) * drawn.bit_count()
        if len(sums) == len(DRAWS):
            return sums, losses
    raise AssertionError(f"only {sorted(sums)} were drawn in {most} steps")
