"""Causal language models in GGUF files: one file with weights, configuration and tokenizer.

The file is data: numbers, names and a chat template that is never rendered. Its weights are
usually rounded to a few bits each; they are read as what they were rounded to.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError

SUFFIX = ".gguf"
NEEDED = ("gguf", "accelerate")
_BEGINS_WITH_BOS = "tokenizer.ggml.add_bos_token"


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is, or is a folder of; None where it is something else.

    A folder with a config.json is a Hugging Face model, whatever else lies there.
    """
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(each for each in path.iterdir() if each.suffix.lower() == SUFFIX)
    if len(found) > 1:
        named = ", ".join(each.name for each in found[:4])
        raise UsageError(
            f"{path} holds {len(found)} GGUF files ({named}), and each is a model of its own. Give the path of one."
        )
    return found[0] if found else None


def check_readable(file: Path) -> None:
    """Refuse what is no GGUF file, and say what is missing to read one."""
    if not file.is_file():
        raise UsageError(f"{file} does not exist. Models are read from disk only: give its path.")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UsageError(f"{file} is no GGUF file. Copy or download the model again.")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{file} is a GGUF file, and reading it needs {' and '.join(missing)}. "
            "Run: pip install 'tightlip[gguf]'"
        )


def begins_with_bos(file: Path) -> bool:
    """Whether the model was shown its texts after a BOS token, as the file says; unsaid, it was."""
    from gguf import GGUFReader

    field = GGUFReader(str(file)).fields.get(_BEGINS_WITH_BOS)
    return True if field is None else bool(field.contents())


def place_of(file: Path) -> dict[str, Any]:
    """How transformers is told which file to read."""
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
