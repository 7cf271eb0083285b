"""What lies in a model folder, its configuration, weights, checkpoints and adapters, and which model it is."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import digest_of_files, read_json

GGUF_SUFFIX = ".gguf"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
# Pickles that a Trainer leaves beside the weights. They are never opened.
OF_TRAINING = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?)\.(bin|pth?)")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


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
    refuse_odd_files(folder)
    checked(folder, may_lack=may_lack)


def refuse_odd_files(folder: Path) -> None:
    for path in folder.iterdir():
        if not path.is_file() and not path.is_dir():  # a pipe would never end
            raise UsageError(
                f"{path} is neither a file nor a folder: a link that leads nowhere, a pipe or a device. Remove it, or copy the "
                "model again."
            )


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def adapters_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if is_adapter(path))


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints that transformers' Trainer left in its output folder, the earliest first."""
    there = folder.glob("checkpoint-*") if folder.is_dir() else ()
    return sorted(
        (path for path in there if re.fullmatch(r"checkpoint-[0-9]{1,15}", path.name)),
        key=lambda path: int(path.name.partition("-")[2]),
    )


def has_tokenizer(folder: Path) -> bool:
    names = (*TOKENIZER_FILES, "tokenizer.model", "vocab.json")
    return any((folder / name).is_file() for name in names)


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


def stored_shapes(folder: Path) -> list[list[int]]:
    """The shape of every weight; refused where a file is missing, not safetensors or not whole."""
    shapes: list[list[int]] = []
    for name in weight_file_names(folder):
        if not (folder / name).is_file():
            raise UsageError(
                f"{folder}/{INDEX} names {name}, which is missing. Copy or download the model again."
            )
        shapes += shapes_in(folder / name, of="model").values()
    return shapes


def shapes_in(path: Path, *, of: str) -> dict[str, list[int]]:
    """The shape of every tensor in a file, by its header alone."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{path} is not a whole safetensors file ({error}). Copy or download the {of} again."
        ) from error


def weight_file_names(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if (folder / INDEX).is_file():
        names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        # Any other name would be unpickled, or read from outside the folder.
        odd = [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]
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
