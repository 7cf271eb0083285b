"""Models in GGUF files: which file, what is needed to read it, its weights and tokenizer."""

import io
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tightlip.core.devices import begin_ids, check_token_ids
from tightlip.core.errors import UsageError
from tightlip.models.checks import (
    FROM_THE_FOLDER_ONLY,
    check_counts,
    check_size,
    usage_errors,
    without_progress_bar,
)

GGUF_SUFFIX = ".gguf"
NEEDED_FOR_GGUF = ("gguf", "accelerate")


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
            **FROM_THE_FOLDER_ONLY,
        )
    _forget_quantisation(model)
    return model, info


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Its weights are plain numbers by now, and it can be moved, trained and saved as any other."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)


def tokenizer_of_gguf(file: Path) -> PreTrainedTokenizerBase:
    check_readable(file)
    with usage_errors(file, "Copy or download the file again."):
        tokenizer = AutoTokenizer.from_pretrained(**place_of(file), **FROM_THE_FOLDER_ONLY)
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
    check_counts(str(file), {name: field.contents() for name, field in plain.items()})
    config = AutoConfig.from_pretrained(**place_of(file), **FROM_THE_FOLDER_ONLY)
    shapes = [tensor.shape.tolist() for tensor in reader.tensors]
    check_size(file, AutoModelForCausalLM, config, shapes)


def begins_with_bos(file: Path) -> bool:
    """Whether the model was shown its texts after a BOS token, as the file says; unsaid, it was."""
    from gguf import GGUFReader

    field = GGUFReader(str(file)).fields.get("tokenizer.ggml.add_bos_token")
    return True if field is None else bool(field.contents())


def place_of(file: Path) -> dict[str, Any]:
    """How transformers is told which file to read."""
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
