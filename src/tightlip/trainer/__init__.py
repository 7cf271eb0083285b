"""Where people train: callbacks and trainers for transformers and TRL."""

from importlib import import_module
from typing import Any

_NAMES = {"LeakageCallback": "tightlip.trainer.leakage_callback"}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'tightlip.trainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_NAMES)
