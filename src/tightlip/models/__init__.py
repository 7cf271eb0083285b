"""Language models and encoders as Hugging Face models; loading any causal LM or encoder.

Names arrive when first used, so importing this package loads no torch.
"""

import importlib
from typing import Any

MODULE_OF_NAME = {
    "LSTMConfig": "configurations",
    "GRUConfig": "configurations",
    "TransformerConfig": "configurations",
    "WordEncoderConfig": "configurations",
    "LSTMModel": "recurrent",
    "LSTMForCausalLM": "recurrent",
    "GRUModel": "recurrent",
    "GRUForCausalLM": "recurrent",
    "TransformerModel": "transformer",
    "TransformerForCausalLM": "transformer",
    "WordEncoder": "encoders",
    "RecurrentState": "states",
    "load_causal_lm": "loading",
    "load_encoder": "encoders",
    "load_tokenizer": "loading",
    "model_fingerprint": "fingerprints",
    "state_fingerprint": "fingerprints",
    "register_when_transformers_loads": "registration",
}

__all__ = list(MODULE_OF_NAME)


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{MODULE_OF_NAME[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *MODULE_OF_NAME])
