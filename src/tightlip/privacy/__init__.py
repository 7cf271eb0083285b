"""What a guarantee rests on: sampling, clipping, noise, accounting, the ledger."""

from importlib import import_module
from typing import Any

# Loaded on first use: accounting and the ledger need no torch.
_NAMES = {
    "clipped_gradients": "tightlip.privacy.per_unit",
    "ClippedGradients": "tightlip.privacy.clipping",
    "CorrectedAdam": "tightlip.privacy.releasing",
    "PrivateTraining": "tightlip.privacy.private_training",
    "PrivacySpec": "tightlip.privacy.plans",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
