"""`tightlip represent`: vectors to send instead of text."""

from collections.abc import Callable
from typing import Any

import typer


def represent_commands(guarded: Callable[..., Any]) -> typer.Typer:
    """The commands of `tightlip represent`, each with refusals in a line by `guarded`."""
    commands = typer.Typer(
        help="Send a private vector instead of the text: train, encode, classify, attack.",
        no_args_is_help=True,
        rich_markup_mode="rich",
    )
    return commands
