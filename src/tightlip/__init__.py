"""tightlip: which words a language model gives away, and whose they were."""

from importlib import import_module
from typing import Any

from tightlip.models.registration import register_when_transformers_loads

__version__ = "0.1.0"

# Loaded on first use, so that `tightlip --help` needs no torch.
_CALLS = {
    "prepare": "tightlip.api.prepare",
    "weigh": "tightlip.api.privacy_weights",
    "train": "tightlip.api.train",
    "compare": "tightlip.api.compare",
    "ledger": "tightlip.api.ledger",
    "plant_canaries": "tightlip.api.canaries",
    "choose_canaries": "tightlip.api.canaries",
    "measure_canaries": "tightlip.api.canaries",
    "measure_membership": "tightlip.api.membership",
    "measure_groups": "tightlip.api.groups",
    "complete": "tightlip.api.tab",
    "open_tab": "tightlip.api.tab",
    "open_report": "tightlip.api.audit",
    "run_demo": "tightlip.api.demo",
    "reproduce_adaptive": "tightlip.api.reproduce_adaptive",
    "reproduce_representation": "tightlip.api.reproduce_representation",
    "represent_train": "tightlip.api.represent_train",
    "represent_export": "tightlip.api.represent_train",
    "represent_encode": "tightlip.api.represent_vectors",
    "represent_classify": "tightlip.api.represent_vectors",
    "represent_guarantee": "tightlip.api.represent_vectors",
    "represent_attack": "tightlip.api.represent_attack",
    "LeakageReport": "tightlip.audit.report",
}

# Hugging Face's Auto classes know our models from here on, without loading them now.
register_when_transformers_loads()


def __getattr__(name: str) -> Any:
    if name in _CALLS:
        return getattr(import_module(_CALLS[name]), name)
    if name == "audit":
        return import_module("tightlip.audit")
    raise AttributeError(f"module 'tightlip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_CALLS, "audit"])
