"""`tightlip represent`: vectors to send instead of text."""

from collections.abc import Callable
from typing import Any

import typer

from tightlip.cli import represent_attack, represent_guarantee, represent_train, represent_vectors


def represent_commands(guarded: Callable[..., Any]) -> typer.Typer:
    """The commands of `tightlip represent`, each with refusals in a line by `guarded`."""
    commands = typer.Typer(
        help="Send a private vector instead of the text: train, encode, classify, attack.",
        no_args_is_help=True,
        rich_markup_mode="rich",
    )
    commands.command("train")(guarded(represent_train.train))
    commands.command("export")(guarded(represent_train.export))
    commands.command("encode")(guarded(represent_vectors.encode))
    commands.command("classify")(guarded(represent_vectors.classify))
    commands.command("guarantee")(guarded(represent_guarantee.guarantee))
    commands.command("attack")(guarded(represent_attack.attack))
    return commands
