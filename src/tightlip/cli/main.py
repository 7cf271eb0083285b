"""The `tightlip` command: what there is. Each command is imported when it is called."""

import atexit
import gc
import logging
import os
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer

from tightlip.cli.flags import NO_VALUE, Command, Group, command_of, refusals_in_a_line
from tightlip.core.progress import HarmlessLines, harmless

# Read when torch and numba start their threads. Otherwise these spin while they wait for each
# other, and beside one other busy process the demo took ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# bitsandbytes would have a kernel fetched from the hub where the library for that is installed.
os.environ["HF_HUB_OFFLINE"] = "1"

OUR_MISTAKE = 70  # what sysexits.h calls an internal software error
# Where each command is, and what it is for.
_COMMANDS = {
    "demo": ("experiments:demo", "The whole story on the bundled corpus, in a few minutes."),
    "prepare": ("prepare:prepare", "Check a corpus and make it ready for training."),
    "train": ("train:train", "Train a language model; the same command goes on where it stopped."),
    "audit": ("audit:audit", "Which words of CORPUS the model gives away, and whose they are."),
    "extract": ("audit:extract", "How many tries draw somebody's text out of a model?"),
    "audit-text": ("audit:audit_text", "Whose words stand in generated text, copied or nearly so."),
    "membership": ("measures:membership", "Can one tell what a model was trained on?"),
    "groups": ("measures:groups", "Whose held-out text a model predicts worse, and who lost."),
    "dp-check": ("measures:dp_check", "What a run's planted canaries say about its ε."),
    "tab": ("tab:tab", "Type, press TAB, and see whose words the model completes."),
    "compare": ("measures:compare", "Utility, leakage, cost and guarantee of several models."),
    "ledger": ("train:ledger", "What a run promises so far, and what more steps would cost."),
    "reproduce": (
        "experiments:reproduce",
        "A paper's experiment, with its own figures beside ours.",
    ),
}
_ROOMS = {
    "canaries": (
        "Plant made-up secrets in a corpus, or choose real ones, and measure what a model keeps.",
        {
            "plant": ("canaries:plant", "Plant made-up secrets in a corpus."),
            "choose": ("canaries:choose", "Choose real secrets: what surprises a run most."),
            "measure": ("canaries:measure", "What a model keeps of the secrets in a key."),
        },
    ),
    "represent": (
        "Send a private vector instead of the text: train, encode, classify, attack.",
        {
            "train": ("represent:train", "Train the device's half and the server's."),
            "export": ("represent:export", "The device's half as ONNX."),
            "encode": ("represent:encode", "Texts to private vectors: what runs on the device."),
            "classify": ("represent:classify", "Vectors to labels: what runs on the server."),
            "guarantee": ("represent:guarantee", "What noise on a vector is worth."),
            "attack": ("represent:attack", "What eavesdroppers read from a run's vectors."),
        },
    ),
}


class CommandWhenCalled(Command):
    """Stands in the list of commands; what does the work is imported when it is called."""

    path: str

    def imported(self, args: list[str]) -> Any:
        """The command itself, with the flags that its arguments ask for."""
        module, _, name = self.path.partition(":")
        with refusals_in_a_line():
            called = getattr(import_module(f"tightlip.cli.{module}"), name)
            if hasattr(called, "with_flags_for"):
                called = called.with_flags_for(args)
        return command_of(called, self.help)

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        return self.imported(args).make_context(info_name, args, parent, **extra)


def _add(app: typer.Typer, commands: dict[str, tuple[str, str]]) -> None:
    for name, (path, what_for) in commands.items():
        kind = type("Called", (CommandWhenCalled,), {"path": path})
        app.command(name, cls=kind, help=what_for)(lambda: None)


def _typer(help: str) -> typer.Typer:
    return typer.Typer(
        cls=Group,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )


app = _typer("Which of people's words does a language model give away, and whose were they?")
_add(app, _COMMANDS)
for _name, (_what_for, _commands) in _ROOMS.items():
    _room = _typer(_what_for)
    _add(_room, _commands)
    app.add_typer(_room, name=_name)


def _show_version(wanted: bool) -> None:
    if wanted:
        from tightlip import __version__

        typer.echo(f"tightlip {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version.",
            metavar=NO_VALUE,
        ),
    ] = False,
) -> None:
    logger = logging.getLogger("tightlip")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(HarmlessLines("tightlip: %(message)s"))
    logger.handlers[:] = [handler]
    # A library that sets up logging for the whole process must not say everything twice.
    logger.propagate = False
    # Their progress bars and advice speak of their API, not of our commands.
    logging.getLogger("transformers").setLevel(logging.ERROR)


def main() -> None:
    """The console script. An exit code of 1 says that a gate failed, and nothing else does."""
    # Importing torch and transformers makes a million lasting objects, which the collector would
    # look through thousands of times: a tenth of a start-up.
    gc.set_threshold(100_000, 20, 20)
    # torchao and bitsandbytes, which are imported wherever they are, tell at length what they lack.
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        app()
    except SystemExit as end:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and isinstance(end.code, int):
            # Sharded weights keep threads of torch, which would die with the interpreter, at times with an abort.
            atexit._run_exitfuncs()
            with suppress(OSError):  # whoever reads may be gone; that is no failed gate
                print(end="", flush=True)
            os._exit(end.code)
        raise
    except Exception:
        print(harmless(traceback.format_exc(), on_one_line=False), file=sys.stderr)
        sys.exit(OUR_MISTAKE)
