"""tightlip: which words a language model gives away, and whose they were."""

import os
from importlib import import_module
from typing import Any

from tightlip.models import register_when_transformers_loads

# ONNX Runtime starts a telemetry client when it is imported, and the hub's library tells who uses
# it: read by them before their first call, so set before anything of ours imports them.
os.environ |= {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}

__version__ = "0.2.0"

# Loaded on first use, so that `tightlip --help` needs no torch.
_CALLS = {
    "audit": "tightlip.audit",
    "audit_text": "tightlip.commands",
    "prepare": "tightlip.corpus.prepare",
    "weigh": "tightlip.commands",
    "train": "tightlip.training.run",
    "compare": "tightlip.commands",
    "estimate_audit": "tightlip.audit",
    "estimate_train": "tightlip.training.run",
    "extract": "tightlip.commands",
    "ledger": "tightlip.privacy.composition",
    "plant_canaries": "tightlip.corpus.canaries",
    "choose_canaries": "tightlip.audit.canaries.real",
    "measure_canaries": "tightlip.audit.canaries.exposure",
    "measure_membership": "tightlip.audit.membership",
    "measure_groups": "tightlip.audit.groups",
    "complete": "tightlip.audit.tab",
    "open_tab": "tightlip.audit.tab",
    "open_report": "tightlip.audit.leakage.audit",
    "run_demo": "tightlip.experiments.demo",
    "reproduce_adaptive": "tightlip.experiments.adaptive_paper",
    "reproduce_representation": "tightlip.experiments.vectors",
    "represent_train": "tightlip.vectors.run",
    "represent_export": "tightlip.vectors.run",
    "represent_encode": "tightlip.vectors.encode",
    "represent_classify": "tightlip.vectors.server",
    "represent_guarantee": "tightlip.vectors.guarantees",
    "represent_attack": "tightlip.commands",
    "LeakageReport": "tightlip.audit.leakage.summary",
}

# Hugging Face's Auto classes know our models from here on, without loading them now.
register_when_transformers_loads()


def __getattr__(name: str) -> Any:
    if name in _CALLS:
        return getattr(import_module(_CALLS[name]), name)
    raise AttributeError(f"module 'tightlip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_CALLS, "__version__"])
