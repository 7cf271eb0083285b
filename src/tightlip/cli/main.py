"""The `tightlip` command."""

import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from tightlip.cli import audit, canaries, compare, experiments, ledger, prepare, tab, train
from tightlip.cli.represent import represent_commands
from tightlip.core.errors import GuaranteeError, TightlipError

# Read when torch and numba start their threads. Otherwise these spin while they wait for each
# other, and beside one other busy process the demo took ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(
    name="tightlip",
    help="Which of people's words does a language model give away, and whose were they?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _refusals_in_a_line(command: Callable[..., None]) -> Callable[..., None]:
    """A refusal is one line and exit code 2, an interruption 130 with the way on."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            _say("stopped. Give the same command again to go on.")
            raise typer.Exit(130) from None
        except GuaranteeError as error:
            _say(str(error))
            raise typer.Exit(3) from None
        except TightlipError as error:
            _say(str(error))
            raise typer.Exit(2) from None
        except OSError as error:
            # A full disk, a missing permission: the file and the reason, not our stack.
            _say(f"{error}")
            raise typer.Exit(2) from None

    return run


def _say(line: str) -> None:
    print(f"tightlip: {line}", file=sys.stderr)


app.command("demo")(_refusals_in_a_line(experiments.demo))
app.command("prepare")(_refusals_in_a_line(prepare.prepare))
app.command("train")(_refusals_in_a_line(train.train))
app.command("audit")(_refusals_in_a_line(audit.audit))
app.command("canaries")(_refusals_in_a_line(canaries.canaries))
app.command("tab")(_refusals_in_a_line(tab.tab))
app.command("compare")(_refusals_in_a_line(compare.compare))
app.add_typer(represent_commands(_refusals_in_a_line), name="represent")
app.command("ledger")(_refusals_in_a_line(ledger.ledger))
app.command("reproduce")(_refusals_in_a_line(experiments.reproduce))


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
    # A library that sets up logging for the whole process must not say everything twice.
    logger.propagate = False
    # Their progress bars and advice speak of their API, not of our commands.
    logging.getLogger("transformers").setLevel(logging.ERROR)


def main() -> None:
    """The console script."""
    app()
