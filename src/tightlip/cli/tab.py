"""`tightlip tab`: type a prefix, press TAB, see whose words come back."""

import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightlip.cli.flags import Device

if TYPE_CHECKING:
    from tightlip.audit.tab import Tab


def tab(
    model: Annotated[
        Path, typer.Argument(help="A Hugging Face model folder, or a run of tightlip train.")
    ],
    report: Annotated[
        Path | None,
        typer.Option(help="The folder of a tightlip audit. For a run: RUN/audit, if there."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Complete this and exit. May be given again."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens shown behind the cursor.")] = 12,
    min_confidence: Annotated[
        float, typer.Option(help="Stop before a token that is less probable.")
    ] = 0.0,
    device: Device = "auto",
) -> None:
    """Type, press TAB, and see whose words the model completes."""
    from tightlip.core.errors import UsageError

    if report is not None and not report.is_dir():
        raise UsageError(f"--report {report} is not a folder. Give one that tightlip audit wrote.")
    is_terminal = prompt is None and in_a_terminal()
    if is_terminal:
        print("Reading the model…", end="\r", file=sys.stderr, flush=True)

    from tightlip.audit.tab import open_tab

    opened = open_tab(
        model, report=report, device=device, tokens=tokens, min_confidence=min_confidence
    )
    if is_terminal:
        from tightlip.cli.tab_terminal import converse

        converse(opened, watched(opened))
        return
    for note in opened.notes:
        print(f"tightlip: {note}", file=sys.stderr)
    for line in prompt if prompt is not None else typed_lines():
        for output in lines_of(opened, line.rstrip("\r\n")):
            print(harmless(output), flush=True)


def in_a_terminal() -> bool:
    """Whether somebody types and sees; a dumb terminal cannot move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def typed_lines() -> Iterator[str]:
    """Standard input line by line, whatever its bytes."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    yield from sys.stdin


def harmless(line: str) -> str:
    """`line` without characters that command a terminal: a corpus may hold any."""
    return re.sub(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", "\ufffd", line)


def watched(opened: "Tab") -> list[str]:
    """What is watched for, or why nothing is."""
    if opened.unique is None:
        return list(opened.notes)
    num, users = len(opened.unique), opened.unique.num_users
    if num == 0:
        return ["The report has no unique sequence: nothing will be marked."]
    return [
        f"Watching for {num:,} unique sequence{'s' * (num != 1)} of {users:,} "
        f"user{'s' * (users != 1)}."
    ]


def lines_of(opened: "Tab", typed: str) -> list[str]:
    """A line as the model completes it, how sure it was, and whose words it holds."""
    ghost, marks = opened.completed(typed)
    if not ghost.text:
        return [typed, "    nothing: the model would stop here"]
    sureness = f"perplexity {ghost.perplexity:.3g}, least certain token {ghost.confidence:.0%}"
    return [
        typed + ghost.text,
        f"    completed: “{ghost.text.strip()}” ({sureness})",
        *(f"    {mark.sentence()}" for mark in marks),
    ]
