"""Which model this is, in 64 characters: from its files or from its weights in memory."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from tightlip.core.errors import UsageError
from tightlip.core.files import digest_of_files
from tightlip.models.loading import gguf_file

if TYPE_CHECKING:
    from torch import Tensor, nn


def model_fingerprint(folder: Path) -> str:
    """SHA-256 over a model folder's configuration, weights and tokenizer, or over a GGUF file.

    Holds:
        same_files_same_print: a copy of the folder has the same fingerprint.
        weights_count: another weight file gives another fingerprint.
    """
    folder = Path(folder)
    if (file := gguf_file(folder)) is not None:
        return digest_of_files([file], name=lambda _: "gguf")
    named = (folder / "config.json", folder / "tokenizer.json")
    files = [*folder.glob("*.safetensors"), *(path for path in named if path.is_file())]
    if not files:
        raise UsageError(
            f"{folder} has no config.json and no .safetensors file, so there is no model to fingerprint. "
            "Give a folder written by save_pretrained."
        )
    return digest_of_files(sorted(files, key=lambda path: path.name))


def state_fingerprint(model: "nn.Module") -> str:
    """SHA-256 over the names, types, shapes and bytes of a model's weights.

    Holds:
        device_free: the same weights on another device have the same fingerprint.
        one_bit_counts: changing any weight changes the fingerprint.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: "Tensor") -> memoryview:
    """A tensor's bytes, whatever its type: numpy knows no bfloat16."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
