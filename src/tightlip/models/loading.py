"""Opening any causal language model, in a folder or a GGUF file, or saying why not; which it is.

Nothing in the folder is ever executed: no Python files, no pickles, no kernels fetched on a
configuration's say-so. And nothing is made up: transformers fills weights that a checkpoint
lacks with random numbers, and an audit of random numbers would look like good news.
"""

import hashlib
import io
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    initialization,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from tightlip.core.checksums import checked
from tightlip.core.devices import device_of, looks_ahead, rounding_tolerance
from tightlip.core.errors import TightlipError, UsageError
from tightlip.core.files import digest_of_files, read_json
from tightlip.core.token_ids import check_token_ids
from tightlip.models import register_configurations
from tightlip.models.quantised import (
    method_of,
    quantisation,
    rounding_of,
    without_fetched_kernels,
)

INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
# Pickles that a Trainer leaves beside the weights. They are never opened.
OF_TRAINING = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?)\.(bin|pth?)")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
FROM_THE_FOLDER_ONLY = {"local_files_only": True, "trust_remote_code": False}
GGUF_SUFFIX = ".gguf"
NEEDED_FOR_GGUF = ("gguf", "accelerate")
# More than any model has: GPT-3 has 96 layers, Llama 4 ten million positions.
MAX_LAYERS = 10_000
MAX_POSITIONS = 2**24
# Numbers that a model may hold beyond those stored: small ones whole, and what is computed at its
# start. The masks of GPT-Neo with 8,192 positions are half of the latter.
ALWAYS_HELD = 50_000_000
MOST_COMPUTED = 1_000_000_000


def load_causal_lm(
    folder: Path | str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    device_map: str | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    adapted: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """The language model in `folder`, ready to be asked (evaluation mode).

    `folder` may also be a GGUF file, or hold one and nothing else of a model. `dtype` is the one
    the weights were saved in unless given; of a GGUF file float32. `quantize` is 4bit or 8bit.
    With `device_map="auto"` layers go where there is room, `max_memory` at most: GPUs, then
    memory, then disk. `adapted` puts an adapter on it.

    Holds:
        nothing_executed: code and pickles in the folder are never run.
        nothing_made_up: a weight missing from the checkpoint is a usage error.
        causal: a model whose predictions look ahead is a usage error.
    """
    folder = Path(folder)
    register_configurations()
    if (file := gguf_file(folder)) is None:
        model, info = _from_folder(folder, dtype, device, quantize, device_map, max_memory)
    else:
        check_plain(f"{folder} is a GGUF file", quantize, device_map)
        model, info = _from_gguf(file, dtype)
    check_all_weights_came(folder, info)
    is_placed = getattr(model, "hf_device_map", None) is not None
    model = model if is_placed else model.to(device)
    # Before it is first asked: then bitsandbytes packs weights anew for some CPUs, and whoever
    # asks for state_dict() afterwards, as PEFT does, gets and leaves other numbers.
    model = (model if adapted is None else adapted(model)).eval()
    check_causal(folder, model)
    return model


def is_quantised_as(folder: Path, quantize: str | None) -> bool:
    """Whether the folder's model will be quantised; refused where it already is and is asked to be."""
    method = None if gguf_file(folder) is not None else method_of(folder, read_config(folder))
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
    device_map: str | None,
    max_memory: dict[int | str, int | str] | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = read_configuration(folder)
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"{folder} holds a '{config.model_type}' model, which does not predict the next token from those before. "
            "Give a decoder-only language model such as GPT-2, Llama or one that tightlip trained."
        )
    placing: dict[str, Any] = {}
    if is_quantised_as(folder, quantize):
        placing["device_map"] = {"": device}  # such weights cannot all be moved afterwards
    if quantize is not None:
        placing["quantization_config"] = quantisation(quantize, folder, dtype)
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
    check_weight_files(folder)
    check_size(folder, auto_class, config, stored_shapes(folder))
    with without_progress_bar(), without_fetched_kernels(), usage_errors(folder):
        return auto_class.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported later, with the missing ones
            output_loading_info=True,
            **placing,
            **FROM_THE_FOLDER_ONLY,
        )


def _from_gguf(file: Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, dict[str, Any]]:
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
            **FROM_THE_FOLDER_ONLY,
        )
    _forget_quantisation(model)
    return model, info


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Its weights are plain numbers by now, and it can be moved, trained and saved as any other."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`; one with only a tokenizer.json has no special tokens named.

    That of a GGUF file has a BOS only where the file says that texts begin with it.
    """
    folder = Path(folder)
    register_configurations()
    if (file := gguf_file(folder)) is not None:
        return _tokenizer_of_gguf(file)
    if is_adapter(folder):
        checked(folder)
    else:
        check_folder(folder, may_lack=".safetensors")  # ONNX Runtime reads weights of its own
    if not has_tokenizer(folder):
        raise UsageError(
            f"{folder} has no tokenizer: neither tokenizer.json nor tokenizer_config.json is there. "
            "Save it beside the model: tokenizer.save_pretrained(folder)."
        )
    with usage_errors(folder):
        described, alone = (folder / name for name in TOKENIZER_FILES)
        if alone.is_file() and not described.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(alone))
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), use_fast=True, **FROM_THE_FOLDER_ONLY
            )
        check_token_ids(f"The tokenizer in {folder}", tokenizer)
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    names = (*TOKENIZER_FILES, "tokenizer.model", "vocab.json")
    return any((folder / name).is_file() for name in names)


def _tokenizer_of_gguf(file: Path) -> PreTrainedTokenizerBase:
    check_readable(file)
    with usage_errors(file, "Copy or download the file again."):
        tokenizer = AutoTokenizer.from_pretrained(**place_of(file), **FROM_THE_FOLDER_ONLY)
        if not begins_with_bos(file):
            # SmolLM2-Instruct's opens a turn of a chat, and after it no text is ordinary.
            tokenizer.bos_token = None
        check_token_ids(f"The tokenizer in {file}", tokenizer)
    return tokenizer


def read_configuration(folder: Path) -> PreTrainedConfig:
    """The folder's configuration, if it is one of a model that needs no code of its own."""
    register_configurations()
    check_folder(folder)
    written = read_config(folder)
    check_no_foreign_code(folder, written)
    check_counts(f"{folder}/config.json", written)
    method_of(folder, written)
    with usage_errors(folder):
        return AutoConfig.from_pretrained(str(folder), **FROM_THE_FOLDER_ONLY)


def check_folder(folder: Path, *, may_lack: str | None = None) -> None:
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder. Models are read from disk only: give the path of a folder written by "
            "save_pretrained or of a .gguf file, or download the model first."
        )
    # transformers would follow it to another model than the one in this folder.
    if is_adapter(folder):
        raise UsageError(
            f"{folder} holds a PEFT adapter, which is only the difference to another model, and a whole model is needed "
            "here. Merge it first: PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)."
        )
    for path in folder.iterdir():
        if not path.is_file() and not path.is_dir():  # a pipe would never end
            raise UsageError(
                f"{path} is neither a file nor a folder: a link that leads nowhere, a pipe or a device. Remove it, or copy the "
                "model again."
            )
    checked(folder, may_lack=may_lack)


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints that transformers' Trainer left in its output folder, the earliest first."""
    there = folder.glob("checkpoint-*") if folder.is_dir() else ()
    return sorted(
        (path for path in there if re.fullmatch(r"checkpoint-[0-9]{1,15}", path.name)),
        key=lambda path: int(path.name.partition("-")[2]),
    )


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        _refuse_what_holds_models(folder)
        raise UsageError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder. "
            "Give a folder written by save_pretrained."
        )
    written = read_json(path)
    if not isinstance(written, dict):
        raise UsageError(f"{path} is not a JSON object. Save or download the model again.")
    return written


def _refuse_what_holds_models(folder: Path) -> None:
    """A folder of checkpoints or of adapters is no model, but one can tell which to give."""
    if checkpoints := checkpoints_in(folder):
        raise UsageError(
            f"{folder} holds {len(checkpoints)} checkpoints of a Trainer and no model of its own. Give one, such as "
            f"{checkpoints[-1]}, or audit all of them: --snapshots"
        )
    if names := adapters_in(folder):
        raise UsageError(
            f"{folder} holds {len(names)} adapters in sub-folders. Say which: --adapter {names[0]}"
        )


def adapters_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if is_adapter(path))


# Ways of computing that come with torch and transformers themselves.
OUR_KERNELS = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")


def check_no_foreign_code(folder: Path, written: dict[str, Any]) -> None:
    """Refuse what only the folder's own code, or code from the hub, could run."""
    model_type = written.get("model_type")
    if "auto_map" in written and model_type not in CONFIG_MAPPING:
        raise UsageError(
            f"{folder} holds a model of type {model_type!r} that runs only with the Python files beside it. "
            "tightlip never executes code from a model folder. Convert it to an architecture that transformers has."
        )
    if "configuration_files" in written:
        raise UsageError(
            f"{folder}/config.json names other files that transformers would read in its place (configuration_files), "
            "and none of its settings could be checked. Load it where you trust it and write it again with save_pretrained."
        )
    if "transformers_weights" in written:
        raise UsageError(
            f"{folder}/config.json names its own weight file in transformers_weights, which may be a pickle. "
            "Load it where you trust it and write it again with save_pretrained."
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


def check_weight_files(folder: Path) -> None:
    """Every weight file is there, is safetensors and is whole."""
    for name in weight_file_names(folder):
        path = folder / name
        if not path.is_file():
            raise UsageError(
                f"{folder}/{INDEX} names {name}, which is missing. Copy or download the model again."
            )
        try:
            with safe_open(str(path), framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"{path} is not a whole safetensors file ({error}). Copy or download the model again."
            ) from error


def stored_shapes(folder: Path) -> list[list[int]]:
    """The shape of every weight, by the headers of the files alone."""
    shapes = []
    for name in weight_file_names(folder):
        with safe_open(str(folder / name), framework="pt") as file:
            shapes += [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118
    return shapes


def check_gguf(file: Path) -> None:
    """What `check_counts` and `check_size` ask of a folder, asked of a GGUF file."""
    from gguf import GGUFReader

    reader = GGUFReader(str(file))
    plain = {name: field for name, field in reader.fields.items() if len(field.types) == 1}
    check_counts(str(file), {name: field.contents() for name, field in plain.items()})
    config = AutoConfig.from_pretrained(**place_of(file), **FROM_THE_FOLDER_ONLY)
    shapes = [tensor.shape.tolist() for tensor in reader.tensors]
    check_size(file, AutoModelForCausalLM, config, shapes)


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


def weight_file_names(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if (folder / INDEX).is_file():
        names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        # Any other name would be unpickled, or read from outside the folder.
        odd = [
            name for name in names if Path(name).name != name or not name.endswith(".safetensors")
        ]
        if odd or not names:
            raise UsageError(
                f"{folder}/{INDEX} names {odd[0] if odd else 'no file'!r} where a .safetensors file of this folder "
                "belongs. Save the model again with save_pretrained."
            )
        return names
    suffixes = (".bin", ".pt", ".pth", ".ckpt")
    pickles = sorted(
        path.name
        for path in folder.iterdir()
        if path.name.endswith(suffixes) and not OF_TRAINING.fullmatch(path.name)
    )
    if pickles:
        raise UsageError(
            f"{folder} has its weights in {pickles[0]}, a pickle, and unpickling can execute any code. Where you trust "
            "it, convert it: AutoModelForCausalLM.from_pretrained(old).save_pretrained(new) writes safetensors."
        )
    raise UsageError(f"{folder} has no model.safetensors. Save the model with save_pretrained.")


def check_all_weights_came(folder: Path, info: dict[str, Any]) -> None:
    """Refuse a checkpoint that transformers had to complete with random numbers."""
    missing = sorted(info["missing_keys"])
    mismatched = sorted(entry[0] for entry in info["mismatched_keys"])
    for keys, what in ((missing, "lacks"), (mismatched, "has in another shape")):
        if keys:
            shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise UsageError(
                f"The checkpoint in {folder} {what} weights that its config.json asks for: {shown}. They would be random "
                "numbers, and so would every result. Save model and configuration together with save_pretrained."
            )


def check_causal(folder: Path, model: PreTrainedModel) -> None:
    """Refuse a model whose earlier predictions change with a later token."""
    ids_1T = torch.tensor([[1, 2, 3, 4]], device=device_of(model))
    ids_1T %= model.config.get_text_config().vocab_size

    def logits_of(ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits.float()

    with torch.inference_mode():
        if logits_of(ids_1T).isnan().any():
            return  # broken, which whoever reads it will say; it need not look ahead
        tolerance = rounding_tolerance(model.dtype, least=rounding_of(model))
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


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is, or is a folder of; None where it is something else.

    A folder with a config.json is a Hugging Face model, whatever else lies there.
    """
    if path.suffix.lower() == GGUF_SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(each for each in path.iterdir() if each.suffix.lower() == GGUF_SUFFIX)
    if len(files) > 1:
        named = ", ".join(each.name for each in files[:4])
        raise UsageError(
            f"{path} holds {len(files)} GGUF files ({named}), and each is a model of its own. Give the path of one."
        )
    return files[0] if files else None


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


def begins_with_bos(file: Path) -> bool:
    """Whether the model was shown its texts after a BOS token, as the file says; unsaid, it was."""
    from gguf import GGUFReader

    field = GGUFReader(str(file)).fields.get("tokenizer.ggml.add_bos_token")
    return True if field is None else bool(field.contents())


def place_of(file: Path) -> dict[str, Any]:
    """How transformers is told which file to read."""
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def model_fingerprint(folder: Path) -> str:
    """SHA-256 over a model folder's configuration, weights and tokenizer, or over a GGUF file.

    Holds:
        same_files_same_print: a copy of the folder has the same fingerprint.
        weights_count: another weight file gives another fingerprint.
    """
    folder = Path(folder)
    if (file := gguf_file(folder)) is not None:
        return digest_of_files([file], name=lambda _: "gguf")
    named = [folder / name for name in ("config.json", "tokenizer.json", ADAPTER_CONFIG)]
    files = [*folder.glob("*.safetensors"), *(path for path in named if path.is_file())]
    if not files:
        raise UsageError(
            f"{folder} has no config.json and no .safetensors file, so there is no model to fingerprint. "
            "Give a folder written by save_pretrained."
        )
    return digest_of_files(sorted(files, key=lambda path: path.name))


def files_fingerprint(folder: Path) -> str:
    """SHA-256 over all that decides what a model makes of a text: as `model_fingerprint`, and the
    begin token, the merges, which weight stands in which file.

    Apart from that one, which tells where weights came from and must not change with any of these.
    """
    own = model_fingerprint(folder)
    if gguf_file(Path(folder)) is not None:
        return own
    read = [path for path in Path(folder).iterdir() if path.suffix in (".json", ".txt", ".model")]
    others = digest_of_files(sorted(path for path in read if path.is_file()))
    return hashlib.sha256(f"{own} {others}".encode()).hexdigest()


def state_fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of a model's weights.

    Holds:
        device_free: the same weights on another device have the same fingerprint.
        one_bit_counts: changing any weight changes the fingerprint.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_weights_of(model)):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        # As bytes: numpy knows no bfloat16.
        for part in _plain_parts(tensor.detach()):
            flat = part.cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if getattr(model, "quantization_method", None) is None:
        yield from model.state_dict().items()
        return
    # Their state_dict() is no mere reading: see load_causal_lm.
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        yield name, weight
        if (scales := getattr(getattr(weight, "quant_state", None), "absmax", None)) is not None:
            yield f"{name}.absmax", scales


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or those that a quantised one is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_parts(getattr(tensor, name))
