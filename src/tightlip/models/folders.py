"""What lies in a model folder: its configuration, weight files, checkpoints and adapters."""

import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json

INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
# Pickles that a Trainer leaves beside the weights. They are never opened.
OF_TRAINING = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?)\.(bin|pth?)")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


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
