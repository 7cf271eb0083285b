"""Language models and encoders as Hugging Face models; loading any causal LM or encoder.

`import tightlip` must be fast, so nothing here imports torch or transformers until someone else
does: names arrive when first used. A finder in front of `sys.meta_path` waits for transformers'
table of configurations and adds ours as soon as it is loaded; our model classes follow when the
first of our configurations is made (see `configurations.fill`).
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CONFIGURATION_TABLE = "transformers.models.auto.configuration_auto"
_CONFIGURATIONS = ("LSTMConfig", "GRUConfig", "TransformerConfig", "WordEncoderConfig")
_NAMES_IN = {
    "configurations": _CONFIGURATIONS,
    "recurrent": ("LSTMModel", "LSTMForCausalLM", "GRUModel", "GRUForCausalLM", "RecurrentState"),
    "transformer": ("TransformerModel", "TransformerForCausalLM"),
    "encoders": ("WordEncoder", "load_encoder"),
    "loading": ("load_causal_lm", "load_tokenizer"),
    "folders": ("model_fingerprint", "state_fingerprint"),
}
MODULE_OF_NAME = {name: module for module, names in _NAMES_IN.items() for name in names}

__all__ = [*MODULE_OF_NAME, "register_when_transformers_loads"]


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULE_OF_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *MODULE_OF_NAME])


def register_when_transformers_loads() -> None:
    """Let the Auto classes know our models, now or when transformers is first imported.

    Holds:
        either_order: it works whether transformers is imported before or after.
        idempotent: calling it again changes nothing.
        light: it imports neither torch nor transformers.
    """
    if is_loaded(CONFIGURATION_TABLE):
        register_configurations()
    elif not any(isinstance(finder, TableWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, TableWatcher())


def is_loaded(name: str) -> bool:
    """Whether a module is imported to its end; one still loading has no table to add to."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


@cache
def register_configurations() -> None:
    """Add our model types to AutoConfig."""
    from transformers.models.auto.configuration_auto import AutoConfig

    from tightlip.models import configurations as ours

    for name in _CONFIGURATIONS:
        config_class = getattr(ours, name)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


@cache
def register_models() -> None:
    """Add our models to AutoModel and AutoModelForCausalLM."""
    from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

    from tightlip.models import encoders, recurrent, transformer

    AutoModel.register(encoders.WordEncoder.config_class, encoders.WordEncoder, exist_ok=True)
    for causal_class in (
        recurrent.LSTMForCausalLM,
        recurrent.GRUForCausalLM,
        transformer.TransformerForCausalLM,
    ):
        config_class = causal_class.config_class
        AutoModel.register(config_class, causal_class.base_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, causal_class, exist_ok=True)


class TableWatcher(importlib.abc.MetaPathFinder):
    """Finds one module the usual way, and has our configurations added once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != CONFIGURATION_TABLE:
            return None
        # Stepping aside first keeps the search below from finding this watcher again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # from here on it is its own again, for reloading too
            loader.exec_module(module)
            register_configurations()

        if loader is not None:
            loader.exec_module = exec_module
        return spec
