"""Flags to one call, and what several commands print alike.

Nothing heavy is imported before a command runs.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tightlip.core.progress import terminal


def print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))


def print_lines(lines: Iterable[Any], console: Any = None) -> None:
    """Tables, and sentences that the terminal may break."""
    for line in lines:
        (console or terminal()).print(line, soft_wrap=isinstance(line, str))


def say(line: str) -> None:
    print_lines([line])


def name_page(page: Path, console: Any, what: str = "figure") -> None:
    print_lines([f"The page, which says what each {what} means: {page}"], console)
