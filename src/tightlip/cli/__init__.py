"""Flags to one call, and what several commands print alike.

Nothing heavy is imported before a command runs.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from tightlip.core.progress import terminal
from tightlip.core.stores import shown

_BEGAN = time.perf_counter()


def print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))


def print_lines(lines: Iterable[Any], console: Any = None) -> None:
    """Tables, and sentences that the terminal may break."""
    for line in lines:
        (console or terminal()).print(line, soft_wrap=isinstance(line, str))


def since_start() -> float:
    """Seconds that this command has taken so far, most of them for imports."""
    return time.perf_counter() - _BEGAN


def print_estimate(expected: Any, start_up: float, *, as_json: bool) -> None:
    """What --dry-run found, and what any command takes before it begins."""
    expected = replace(expected, stages={"Start-up": start_up, **expected.stages})
    print_json(expected.record()) if as_json else print_lines(expected.lines())


def say(line: str) -> None:
    print_lines([line])


def print_overview(
    console: Any, headline: str, sentences: Iterable[str], tables: Iterable[Any]
) -> None:
    """A headline in bold, what it comes down to, and tables with room around each."""
    console.print(Text(headline, style="bold"))
    for sentence in sentences:
        console.print(Text(sentence))
    for table in tables:
        console.print()
        console.print(table)
    console.print()


def name_page(page: Path, console: Any, what: str = "figure") -> None:
    print_lines([f"The page, which says what each {what} means: {shown(page)}"], console)
