"""Held-out text of a private run, told with noise: how often at most, and what each unit's loss is."""

import math
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.privacy.ledger import Ledger
from tightlip.privacy.noisy_loss import NoisyLoss
from tightlip.training.batches import Rows
from tightlip.training.config import TrainConfig
from tightlip.training.losses import losses_by_unit
from tightlip.training.mitigations import CorpusFacts, RunContext
from tightlip.training.plan import Plan


def noisy_loss(config: TrainConfig, steps_per_epoch: int) -> NoisyLoss | None:
    """What a private run will tell of its held-out text, at most; None where it tells nothing."""
    settings: Any = config.mitigation
    if not settings.tells_validation:
        return None
    plan = Plan(config=config, steps_per_epoch=steps_per_epoch)
    return NoisyLoss(noise_multiplier=settings.noisy_validation, num_planned=plan.num_recorded)


def check_held_out(config: TrainConfig, corpus: CorpusFacts) -> None:
    """Refuse to tell of held-out text that is not these units' own, each by itself."""
    settings: Any = config.mitigation
    if settings.tells_validation and corpus.has_co_owners:
        raise UsageError(
            "noisy_validation hides what each writer holds out, and texts here have other owners too. Use --public-validation FILE."
        )
    split = corpus.settings.get("split")
    if settings.tells_validation and split not in ("text", "document"):
        raise UsageError(
            f"noisy_validation={settings.noisy_validation:g} tells of what each {settings.unit} of this corpus holds out, and "
            f"split={split!r} holds out nothing of the kind. Prepare it with --split text, or use --public-validation FILE."
        )


def told_loss(
    noisy: NoisyLoss | None,
    context: RunContext,
    ledger: Ledger,
    held_out: Rows,
    unit_of_row: np.ndarray,
) -> float | None:
    """The mean loss of `held_out` as it may be told, in nats; put on record in the ledger."""
    if noisy is None:
        return None
    settings: Any = context.config.mitigation
    vocabulary = context.model.config.get_text_config().vocab_size
    return noisy.told(
        ledger,
        lambda: losses_by_unit(context.forward, held_out, unit_of_row),
        bound=settings.noisy_validation_bound or math.log(vocabulary),
        insecure_seed=settings.insecure_seed,
    )
