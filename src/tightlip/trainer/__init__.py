"""Where people train: callbacks and trainers for transformers and TRL."""

from importlib import import_module
from typing import Any

# Loaded on first use: not everybody has TRL, and transformers' Trainer takes seconds.
_NAMES = {
    "LeakageCallback": "tightlip.trainer.leakage_callback",
    "PrivateTrainer": "tightlip.trainer.private_trainer",
    "PrivateSFTTrainer": "tightlip.trainer.private_sft_trainer",
    "PrivacySpec": "tightlip.privacy.plans",
    "CorrectedAdam": "tightlip.privacy.releasing",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_NAMES)
