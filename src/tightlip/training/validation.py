"""How well a model predicts text it was not trained on."""

import math

import numpy as np
import torch

from tightlip.training.batches import Rows, gather
from tightlip.training.losses import Forward, Scores, is_ours

POSITIONS = {"cpu": 8192, "cuda": 131_072}  # in one batch
FOREIGN_LOGITS = {"cpu": 2**25, "cuda": 2**29}  # of a model that makes all its logits at once


def validation_scores(forward: Forward, rows: Rows) -> Scores:
    """Scores over every target of `rows`, the model in evaluation mode meanwhile.

    Holds:
        naive: the same as scoring each row by itself.
    """
    model = forward.model
    was_training = model.training
    model.eval()
    try:
        parts = [
            forward.scores(gather(rows, chosen).to(model.device))
            for chosen in like_lengths(rows, _positions_per_batch(forward))
        ]
    finally:
        model.train(was_training)
    return Scores(
        loss_nats=math.fsum(part.loss_nats for part in parts),
        num_first=sum(part.num_first for part in parts),
        num_targets=sum(part.num_targets for part in parts),
    )


def _positions_per_batch(forward: Forward) -> int:
    kind = "cuda" if forward.model.device.type == "cuda" else "cpu"
    if is_ours(forward.model):
        return POSITIONS[kind]
    vocabulary = forward.model.config.get_text_config().vocab_size
    return min(POSITIONS[kind], FOREIGN_LOGITS[kind] // vocabulary)


def like_lengths(rows: Rows, num_positions: int) -> list[np.ndarray]:
    """All rows, shortest first, in batches of about `num_positions` with padding."""
    order = np.argsort(rows.num_targets, kind="stable")
    widths = rows.num_targets[order]
    batches, start = [], 0
    while start < len(order):
        # Widths only grow, so a batch is as wide as its last row.
        candidates = widths[start : start + num_positions]
        sizes = candidates * np.arange(1, len(candidates) + 1)
        end = start + max(1, int(np.searchsorted(sizes, num_positions, side="right")))
        batches.append(order[start:end])
        start = end
    return batches


def perplexity(loss_nats: float, num_targets: int) -> float | None:
    """exp of the mean loss; None where there is none or it is too large for a number."""
    if not num_targets:
        return None
    mean = loss_nats / num_targets
    return math.exp(mean) if mean < 700 else None


def is_finite(model: torch.nn.Module) -> bool:
    """Whether every weight is a number."""
    finite = [parameter.isfinite().all() for parameter in model.parameters()]
    return bool(torch.stack(finite).all())
