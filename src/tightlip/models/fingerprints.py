"""Which model it is: SHA-256 over its files or its weights."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from tightlip.core.errors import UsageError
from tightlip.core.files import digest_of_files
from tightlip.models.folders import ADAPTER_CONFIG
from tightlip.models.gguf import gguf_file


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
