"""TOML both ways: Python reads it, and what our settings need to be written is little."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: Path) -> dict[str, Any]:
    """The tree in `path`, or a usage error that names the file and the place."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}). Give the path of a TOML file."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not TOML: {error}. Write one name = value per line."
        ) from error


def toml_text(tree: Mapping[str, Any]) -> str:
    """`tree` as TOML; a value of None is left out, since TOML has no word for it.

    Holds:
        round_trip: reading the text gives the tree back, without its Nones.

    >>> print(toml_text({"seed": 0, "train": {"model": "lstm", "steps": None}}), end="")
    seed = 0
    <BLANKLINE>
    [train]
    model = "lstm"
    """
    return "\n".join(_table((), tree)).lstrip("\n") + "\n"


def _table(path: tuple[str, ...], tree: Mapping[str, Any]) -> list[str]:
    lines, inner = [], []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            inner += _table((*path, key), value)
        elif value is not None:
            lines.append(f"{_key(key)} = {_value(value)}")
    if path and (lines or not inner):
        lines = ["", f"[{'.'.join(map(_key, path))}]", *lines]
    return lines + inner


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Path):
        return _string(str(value))
    if isinstance(value, int | float):
        # Python writes 1e-05, inf and nan as TOML does.
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise AssertionError(f"no TOML for a {type(value).__name__}")


def _string(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
