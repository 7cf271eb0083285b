"""The `tightlip` command."""

import logging
import sys
from typing import Annotated

import typer

from tightlip.cli import audit, demo, prepare, train
from tightlip.core.errors import GuaranteeError, TightlipError

app = typer.Typer(
    name="tightlip",
    help="Which of people's words does a language model give away, and whose were they?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("prepare")(prepare.prepare)
app.command("train")(train.train)
app.command("audit")(audit.audit)


def _show_version(wanted: bool) -> None:
    if wanted:
        from tightlip import __version__

        typer.echo(f"tightlip {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    logger = logging.getLogger("tightlip")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("tightlip: %(message)s"))
    logger.handlers[:] = [handler]
    # Their progress bars and advice speak of their API, not of our commands.
    logging.getLogger("transformers").setLevel(logging.ERROR)


def main() -> None:
    """Run a command; a refusal is one line and exit code 2, an interruption 130."""
    try:
        app()
    except KeyboardInterrupt:
        print("\ntightlip: stopped. The same command goes on from here.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except GuaranteeError as error:
        print(f"tightlip: {error}", file=sys.stderr)
        sys.exit(3)
    except TightlipError as error:
        print(f"tightlip: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        # A full disk, a missing permission: the file and the reason, not our stack.
        print(f"tightlip: {error}. Nothing half-written was left behind.", file=sys.stderr)
        sys.exit(2)
