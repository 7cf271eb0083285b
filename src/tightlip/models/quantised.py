"""Models in few bits, as they are served: folders saved so, and folders made so while they load.

Only methods whose code is installed beside tightlip are read. transformers knows others that fetch
their kernels, which are code, from the hub.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightlip.core.errors import UsageError

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


def method_of(folder: Path, written: dict[str, Any]) -> str | None:
    """How the folder's weights are quantised; None where they are not.

    Holds:
        nothing_fetched: a method whose code is not here is a usage error.
    """
    asked = written.get("quantization_config")
    if asked is None:
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
