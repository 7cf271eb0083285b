"""Opening any causal language model, in a folder or a GGUF file, or saying why not.

Nothing in the folder is ever executed: no Python files, no pickles, no kernels fetched on a
configuration's say-so. And nothing is made up: transformers fills weights that a checkpoint
lacks with random numbers, and an audit of random numbers would look like good news.
"""

import io
import weakref
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tightlip.core.checksums import checked
from tightlip.core.devices import begin_ids, check_token_ids
from tightlip.core.errors import UsageError
from tightlip.models import checks, folders, register_configurations
from tightlip.models.checks import usage_errors, without_fetched_kernels, without_progress_bar

NEEDED_FOR_GGUF = ("gguf", "accelerate")


def load_causal_lm(
    folder: Path | str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    int8_threshold: float = checks.SERVED_THRESHOLD,
    device_map: str | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    adapted: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """The language model in `folder`, ready to be asked (evaluation mode).

    `folder` may also be a GGUF file, or hold one and nothing else of a model. `dtype` is the one
    the weights were saved in unless given; of a GGUF file float32. `quantize` is 4bit or 8bit, and
    of 8bit columns beyond `int8_threshold` anywhere in a batch are kept whole, with 0 none.
    With `device_map="auto"` layers go where there is room, `max_memory` at most: GPUs, then
    memory, then disk. `adapted` puts an adapter on it.

    Holds:
        nothing_executed: code and pickles in the folder are never run.
        nothing_made_up: a weight missing from the checkpoint is a usage error.
        causal: a model whose predictions look ahead is a usage error.
    """
    folder = Path(folder)
    register_configurations()
    if (file := folders.gguf_file(folder)) is None:
        how = quantize, int8_threshold, device_map, max_memory
        model, info = _from_folder(folder, dtype, device, *how)
    else:
        check_plain(f"{folder} is a GGUF file", quantize, device_map)
        model, info = load_gguf(file, dtype)
    checks.check_all_weights_came(folder, info)
    is_placed = getattr(model, "hf_device_map", None) is not None
    model = model if is_placed else model.to(device)
    # Before it is first asked: then bitsandbytes packs weights anew for some CPUs, and whoever
    # asks for state_dict() afterwards, as PEFT does, gets and leaves other numbers.
    model = (model if adapted is None else adapted(model)).eval()
    checks.check_causal(folder, model)
    return model


def is_quantised_as(folder: Path, quantize: str | None) -> bool:
    """Whether the folder's model will be quantised; refused where it already is and is asked to be."""
    method = None
    if folders.gguf_file(folder) is None:
        method = checks.method_of(folder, folders.read_config(folder))
    if method is not None:
        check_plain(f"{folder} is quantised already ({method})", quantize, None)
    return (method or quantize) is not None


def check_plain(what: str, quantize: str | None, device_map: str | None) -> None:
    for flag, value in (("quantize", quantize), ("device-map", device_map)):
        if value is not None:
            raise UsageError(f"{what}, which --{flag} {value} does not go with. Leave it out.")


def _from_folder(
    folder: Path,
    dtype: torch.dtype | None,
    device: str | torch.device,
    quantize: str | None,
    int8_threshold: float,
    device_map: str | None,
    max_memory: dict[int | str, int | str] | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    placing: dict[str, Any] = {}
    if quantize is not None:
        bits = checks.quantisation(quantize, folder, dtype, threshold=int8_threshold)
        placing["quantization_config"] = bits
    config = read_configuration(folder)
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"{folder} holds a '{config.model_type}' model, which does not predict the next token from those before. "
            "Give a decoder-only language model such as GPT-2, Llama or one that tightlip trained."
        )
    if is_quantised_as(folder, quantize):
        placing["device_map"] = {"": device}  # such weights cannot all be moved afterwards
    offloaded = None
    if device_map is not None:
        if find_spec("accelerate") is None:
            raise UsageError("--device-map needs accelerate. Run: pip install accelerate")
        offloaded = TemporaryDirectory(prefix="tightlip-")  # for its owner only
        there = {"offload_folder": offloaded.name, "max_memory": max_memory}
        placing |= {"device_map": device_map, **there}
    model, info = read_weights(AutoModelForCausalLM, folder, config, dtype or "auto", **placing)
    if offloaded is not None:
        weakref.finalize(model, offloaded.cleanup)
    return model, info


def read_weights(
    auto_class: Any,
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    **placing: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of this configuration with the folder's weights, and which of them were missing."""
    checks.check_size(folder, auto_class, config, folders.stored_shapes(folder))
    with without_progress_bar(), without_fetched_kernels(), usage_errors(folder):
        return auto_class.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported later, with the missing ones
            output_loading_info=True,
            **placing,
            **checks.FROM_THE_FOLDER_ONLY,
        )


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`; one with only a tokenizer.json has no special tokens named.

    That of a GGUF file has a BOS only where the file says that texts begin with it.
    """
    folder = Path(folder)
    register_configurations()
    if (file := folders.gguf_file(folder)) is not None:
        return tokenizer_of_gguf(file)
    if folders.is_adapter(folder):
        checked(folder)
    else:  # ONNX Runtime reads weights of its own
        folders.check_folder(folder, may_lack=".safetensors")
    if not folders.has_tokenizer(folder):
        raise UsageError(
            f"{folder} has no tokenizer: neither tokenizer.json nor tokenizer_config.json is there. "
            "Save it beside the model: tokenizer.save_pretrained(folder)."
        )
    with usage_errors(folder):
        described, alone = (folder / name for name in folders.TOKENIZER_FILES)
        if alone.is_file() and not described.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(alone))
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), use_fast=True, **checks.FROM_THE_FOLDER_ONLY
            )
        check_token_ids(f"The tokenizer in {folder}", tokenizer)
    return tokenizer


def read_configuration(folder: Path) -> PreTrainedConfig:
    """The folder's configuration, if it is one of a model that needs no code of its own."""
    register_configurations()
    folders.check_folder(folder)
    written = folders.read_config(folder)
    checks.check_no_foreign_code(folder, written)
    checks.check_counts(f"{folder}/config.json", written)
    checks.method_of(folder, written)
    with usage_errors(folder):
        return AutoConfig.from_pretrained(str(folder), **checks.FROM_THE_FOLDER_ONLY)


# GGUF files


def load_gguf(file: Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, dict[str, Any]]:
    check_readable(file)
    # The bar over its tensors has no switch.
    silent = redirect_stderr(io.StringIO())
    with without_progress_bar(), silent, usage_errors(file, "Copy or download the file again."):
        check_gguf(file)
        model, info = AutoModelForCausalLM.from_pretrained(
            **place_of(file),
            dtype=dtype or torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **checks.FROM_THE_FOLDER_ONLY,
        )
    # Its weights are plain numbers by now, and it can be moved, trained and saved as any other.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)
    return model, info


def tokenizer_of_gguf(file: Path) -> PreTrainedTokenizerBase:
    check_readable(file)
    with usage_errors(file, "Copy or download the file again."):
        tokenizer = AutoTokenizer.from_pretrained(**place_of(file), **checks.FROM_THE_FOLDER_ONLY)
        if not begins_with_bos(file):
            # SmolLM2-Instruct's opens a turn of a chat, and after it no text is ordinary.
            tokenizer.bos_token = None
        elif tokenizer.bos_token is not None and not begin_ids(tokenizer):
            begin = (tokenizer.bos_token, tokenizer.bos_token_id)
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{begin[0]} $A", special_tokens=[begin]
            )
        check_token_ids(f"The tokenizer in {file}", tokenizer)
    return tokenizer


def check_readable(file: Path) -> None:
    """Refuse what is no GGUF file, and say what is missing to read one."""
    if not file.is_file():
        raise UsageError(f"{file} does not exist. Models are read from disk only: give its path.")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UsageError(f"{file} is no GGUF file. Copy or download the model again.")
    missing = [name for name in NEEDED_FOR_GGUF if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{file} is a GGUF file, and reading it needs {' and '.join(missing)}. "
            "Run: pip install 'tightlip[gguf]'"
        )


def check_gguf(file: Path) -> None:
    """What `check_counts` and `check_size` ask of a folder, asked of a GGUF file."""
    from gguf import GGUFReader

    reader = GGUFReader(str(file))
    plain = {name: field for name, field in reader.fields.items() if len(field.types) == 1}
    checks.check_counts(str(file), {name: field.contents() for name, field in plain.items()})
    config = AutoConfig.from_pretrained(**place_of(file), **checks.FROM_THE_FOLDER_ONLY)
    shapes = [tensor.shape.tolist() for tensor in reader.tensors]
    checks.check_size(file, AutoModelForCausalLM, config, shapes)


def begins_with_bos(file: Path) -> bool:
    """Whether the model was shown its texts after a BOS token, as the file says; unsaid, it was."""
    from gguf import GGUFReader

    field = GGUFReader(str(file)).fields.get("tokenizer.ggml.add_bos_token")
    return True if field is None else bool(field.contents())


def place_of(file: Path) -> dict[str, Any]:
    """How transformers is told which file to read."""
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
