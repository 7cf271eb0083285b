"""The optimizers by name, and their step size set from outside."""

from typing import Any

import torch
from torch import nn, optim

from tightlip.training.config import TrainConfig

_CLASSES: dict[str, Any] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "adamax": optim.Adamax,
    "sgd": optim.SGD,
}
_NEVER_FUSED = {"adamax"}


def build_optimizer(model: nn.Module, config: TrainConfig) -> optim.Optimizer:
    """The optimizer the settings ask for, over every parameter that may change."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    extra: dict[str, Any] = {}
    if config.optimizer == "sgd":
        extra["momentum"] = config.momentum
    if config.optimizer not in _NEVER_FUSED and parameters[0].device.type in ("cpu", "cuda"):
        extra["fused"] = True
    return _CLASSES[config.optimizer](
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay, **extra
    )


def set_learning_rate(optimizer: optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(model: nn.Module, largest_norm: float | None) -> None:
    """Scale all gradients together so that their joint norm is at most `largest_norm`."""
    if largest_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
