"""What a model may not be: run by foreign code, larger than its weights, incomplete, seeing ahead.

It may be in few bits, as models are served: saved so, or made so while it is loaded. Only methods
whose code is installed beside tightlip are read. transformers knows others that fetch their kernels,
which are code, from the hub.
"""

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import initialization
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from tightlip.core.devices import device_of, looks_ahead, rounding_tolerance
from tightlip.core.errors import TightlipError, UsageError

FROM_THE_FOLDER_ONLY = {"local_files_only": True, "trust_remote_code": False}
# More than any model has: GPT-3 has 96 layers, Llama 4 ten million positions.
MAX_LAYERS = 10_000
MAX_POSITIONS = 2**24
# Numbers that a model may hold beyond those stored: small ones whole, and what is computed at its
# start. The masks of GPT-Neo with 8,192 positions are half of the latter.
ALWAYS_HELD = 50_000_000
MOST_COMPUTED = 1_000_000_000
# Settings that lead transformers to other files.
NAMES_FILES = {
    "configuration_files": "other files that transformers would read in its place (configuration_files), and none of its "
    "settings could be checked",
    "transformers_weights": "its own weight file in transformers_weights, which may be a pickle",
}
# Ways of computing that come with torch and transformers themselves.
OUR_KERNELS = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
# The package that reads each method. GPTQ and AWQ are not tested here.
PACKAGES = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "compressed-tensors": "compressed_tensors",
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
}
# Activations in eight bits round to one part in 127, and LLM.int8 lets the largest of all rows
# decide what is kept whole. A model that looks ahead is off by far more.
ROUNDING = 0.05
SERVED_THRESHOLD = 6.0  # of LLM.int8, as it is usually served


def check_no_foreign_code(folder: Path, written: dict[str, Any]) -> None:
    """Refuse what only the folder's own code, or code from the hub, could run."""
    model_type = written.get("model_type")
    if "auto_map" in written and model_type not in CONFIG_MAPPING:
        raise UsageError(
            f"{folder} holds a model of type {model_type!r} that runs only with the Python files beside it. "
            "tightlip never executes code from a model folder. Convert it to an architecture that transformers has."
        )
    for key, what in NAMES_FILES.items():
        if key in written:
            raise UsageError(
                f"{folder}/config.json names {what}. Load it where you trust it and write it again with save_pretrained."
            )
    for key, value in settings_in(written):
        asks = key.endswith(("attn_implementation", "experts_implementation"))
        if asks and value not in OUR_KERNELS:
            raise UsageError(
                f"{folder}/config.json asks for {key}={value!r}, which transformers may fetch from the hub: a kernel, that "
                "is code. tightlip never executes such code. Remove the setting from config.json."
            )


def check_counts(place: str, written: dict[str, Any]) -> None:
    """Refuse numbers that transformers counts to while it reads a configuration, or a model runs."""
    for key, value in settings_in(written):
        counts_layers = key.endswith(("num_labels", "attention_types", "block_count")) or (
            "layer" in key and "size" not in key
        )
        counts_positions = key.endswith(("n_ctx", "context_length")) or (
            "position" in key or "seq" in key
        )
        if key in ("n_layer", "num_layers", "num_hidden_layers") and value in (0, -1):
            raise UsageError(f"{place} says {key}={value}. Save or download the model again.")
        most = MAX_LAYERS if counts_layers else MAX_POSITIONS if counts_positions else None
        if most is not None and (largest := max(_whole_numbers(value), default=0)) > most:
            raise UsageError(
                f"{place} says {key}={largest:.3g}, and no model has more than {most:,}. "
                "Save or download the model again."
            )


def _whole_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for one in value:
            yield from _whole_numbers(one)
    elif isinstance(value, int):
        yield min(value, 1e300)  # of which the rest of Python can speak


def settings_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of a configuration, however deep."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key), inner
            yield from settings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from settings_in(inner)


def check_size(
    place: Path, auto_class: Any, config: PreTrainedConfig, shapes: list[list[int]]
) -> None:
    """Refuse a configuration that asks for far more than the weight files hold.

    transformers makes room for what is missing before it says so. The model is built without
    memory, on torch's meta device, and given up as soon as it has too many numbers or tensors.
    """
    stored = sum(math.prod(shape) for shape in shapes)
    config = deepcopy(config)
    # A tied matrix is stored once; of quantised weights up to sixteen stand in one number.
    is_packed = vars(config).pop("quantization_config", None) is not None
    most = ALWAYS_HELD + stored * (16 if is_packed else 3)
    held = {"numbers": 0, "tensors": 0, "computed": 0}

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        size = 0 if tensor is None else tensor.numel()
        held["numbers" if isinstance(tensor, nn.Parameter) else "computed"] += size
        held["tensors"] += 1
        too_many = held["tensors"] > 1_000 + 16 * len(shapes)
        if held["numbers"] > most or held["computed"] > MOST_COMPUTED or too_many:
            raise UsageError(
                f"{place} describes a model of over {held['numbers'] + held['computed']:,} numbers in {held['tensors']:,} tensors, and its "
                f"weights are {stored:,} numbers in {len(shapes):,}. Configuration and weights are not of one model: save "
                "both together with save_pretrained."
            )

    hooks = (
        torch_module.register_module_parameter_registration_hook(count),
        torch_module.register_module_buffer_registration_hook(count),
    )
    try:
        with without_memory(), usage_errors(place):
            auto_class.from_config(config, trust_remote_code=False)
    finally:
        for hook in hooks:
            hook.remove()


def check_room(model_class: Any, config: PreTrainedConfig) -> None:
    """Refuse a new model whose weights alone are more than the machine's memory."""
    with without_memory():
        num_bytes = sum(4 * weight.numel() for weight in model_class(config).parameters())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > there:
        raise UsageError(
            f"A model of these sizes takes {num_bytes / 1e9:,.0f} GB, and this machine has {there / 1e9:,.0f} GB. "
            "Use a smaller hidden_size, embedding_size, num_layers or vocabulary, or dimensions of an extractor."
        )


@contextmanager
def without_memory() -> Iterator[None]:
    """Models made here have shapes and no numbers, as transformers itself begins to load one."""
    with (
        torch.device("meta"),
        initialization.meta_device_safe_creation_ops(),
        initialization.no_init_weights(),
        initialization.no_tie_weights(),
    ):
        yield


def check_all_weights_came(folder: Path, info: dict[str, Any]) -> None:
    """Refuse a checkpoint that transformers had to complete with random numbers."""
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    for keys, what in ((info["missing_keys"], "lacks"), (mismatched, "has in another shape")):
        if keys:
            raise UsageError(
                f"The checkpoint in {folder} {what} weights that its config.json asks for: {first_of(keys)}. They would be random "
                "numbers, and so would every result. Save model and configuration together with save_pretrained."
            )


def first_of(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_causal(folder: Path, model: PreTrainedModel) -> None:
    """Refuse a model whose earlier predictions change with a later token."""
    ids_1T = torch.tensor([[1, 2, 3, 4]], device=device_of(model))
    ids_1T %= model.config.get_text_config().vocab_size

    def logits_of(ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits.float()

    with torch.inference_mode():
        if logits_of(ids_1T).isnan().any():
            return  # broken, which whoever reads it will say; it need not look ahead
        least = rounding_of(model)
        if ids_1T.device.type == "cuda":
            # cuDNN's recurrent layers take TF32 unless told otherwise, and rows of other lengths round
            # otherwise. A scan asks again, in full precision.
            least = max(least, 16 * 2.0**-10)
        tolerance = rounding_tolerance(model.dtype, least=least)
        ahead = looks_ahead(logits_of, ids_1T, tolerance=tolerance)
    if ahead:
        raise UsageError(
            f"{folder} holds a '{model.config.model_type}' model that looks at later tokens when it predicts earlier ones, "
            "as encoders do. Give a decoder-only language model such as GPT-2, Llama or one that tightlip trained."
        )


@contextmanager
def usage_errors(
    folder: Path, advice: str = "Check that it was written by save_pretrained and copied whole."
) -> Iterator[None]:
    """Whatever transformers says about the folder, said as a usage error with the folder's name."""
    try:
        yield
    except TightlipError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(f"{folder} cannot be loaded: {reason} {advice}") from error


@contextmanager
def without_progress_bar(*, reports: bool = True) -> Iterator[None]:
    """Keep transformers' bar for every load, however small, off the terminal.

    Without `reports` also what it says at length of weights that are checked here or not used.
    """
    was_on, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if not reports:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_on:
            logging.enable_progress_bar()


# Models in few bits


def method_of(folder: Path, written: dict[str, Any]) -> str | None:
    """How the folder's weights are quantised; None where they are not.

    Holds:
        nothing_fetched: a method whose code is not here is a usage error.
    """
    if (asked := written.get("quantization_config")) is None:
        return None
    if not isinstance(asked, dict):
        raise UsageError(f"{folder}/config.json has a quantization_config that is not a table.")
    of_bits = "bitsandbytes" if asked.get("load_in_4bit") or asked.get("load_in_8bit") else None
    method = str(asked.get("quant_method") or of_bits).removesuffix("_4bit").removesuffix("_8bit")
    if method not in PACKAGES:
        raise UsageError(
            f"{folder} is quantised by {method!r}, whose code transformers may fetch from the hub. tightlip reads "
            f"{', '.join(PACKAGES)}. Save the model unquantised, and audit it with --quantize 4bit or 8bit."
        )
    check_installed(method, str(folder))
    return method


def check_installed(method: str, what: str) -> None:
    package = PACKAGES[method]
    missing = [name for name in (package, "accelerate") if find_spec(name) is None]
    if missing:
        how = "gptqmodel" if package == "gptqmodel" else "'tightlip[quantised]'"
        raise UsageError(
            f"{what} needs {' and '.join(missing)} ({method}), which is not installed. Run: pip install {how}"
        )


def quantisation(
    bits: str, folder: Path, dtype: torch.dtype | None, *, threshold: float = SERVED_THRESHOLD
) -> Any:
    """What `--quantize` asks of transformers: NF4, or int8 with columns beyond 6 kept whole."""
    from transformers import BitsAndBytesConfig

    check_installed("bitsandbytes", f"--quantize {bits} of {folder}")
    if bits == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype or torch.bfloat16
    )


@contextmanager
def without_fetched_kernels() -> Iterator[None]:
    """bitsandbytes fetches a kernel from the hub when it is imported, where `kernels` is installed."""
    absent = object()
    before = sys.modules.get("kernels", absent)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is absent:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = before  # type: ignore[assignment]


def is_quantised(model: nn.Module) -> bool:
    return getattr(model, "quantization_method", None) is not None


def rounding_of(model: nn.Module) -> float:
    """How far apart, in parts of the largest logit, two readings of one text may be by rounding."""
    return ROUNDING if is_quantised(model) else 1e-4
