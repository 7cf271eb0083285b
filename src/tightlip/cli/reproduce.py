"""`tightlip reproduce`: a paper's experiment on your own text."""

from pathlib import Path
from typing import Annotated

import typer

from tightlip.cli.options import Device

EXPERIMENTS = ("adaptive",)


def reproduce(
    experiment: Annotated[
        str, typer.Argument(help="Which experiment: adaptive.", metavar="EXPERIMENT")
    ],
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file with a column text, or user and text; by default the bundled plays. May be given again."
        ),
    ] = None,
    public_model: Annotated[
        Path | None,
        typer.Option(
            help="A folder of the large public model; by default a small LSTM is trained on the public text."
        ),
    ] = None,
    public_corpus: Annotated[
        Path | None,
        typer.Option(help="Public text: for the tokenizer, and for what is ordinary."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (minutes on a CPU), small (a GPU), or paper.")
    ] = "smoke",
    unit: Annotated[
        str,
        typer.Option(help="Whom to protect: user, example, or auto (user from 1,000 users on)."),
    ] = "auto",
    out: Annotated[Path | None, typer.Option(help="Where runs and results go.")] = None,
    device: Device = "auto",
) -> None:
    """A paper's experiment, step by step by our own commands, with its own table beside it."""
    from rich.console import Console

    from tightlip.core.progress import shown_progress

    _check_name(experiment)
    import tightlip

    with shown_progress():
        made = tightlip.reproduce_adaptive(
            corpus or (),
            public_model=public_model,
            public_corpus=public_corpus,
            scale=scale,
            unit=unit,
            out=out or Path(f"reproduce-{experiment}"),
            device=device,
        )
    console = Console()
    from tightlip.report.adaptive import PAPER_NOTE, findings, headline
    from tightlip.report.adaptive_page import about, terminal_tables

    console.print(headline(made.result), style="bold", highlight=False)
    for table in terminal_tables(made.result):
        console.print(table)
    console.print(PAPER_NOTE, style="dim", highlight=False)
    for section in made.result["corpora"]:
        console.print(f"\n[bold]{section['name']}[/]: {about(section)}", highlight=False)
        for sentence in findings(section):
            console.print(f"  {sentence}", highlight=False)
    console.print(
        f"The page, which says what each figure means: {made.page}", highlight=False, soft_wrap=True
    )


def _check_name(experiment: str) -> None:
    from tightlip.core.errors import UsageError
    from tightlip.core.registry import unknown

    if experiment in ("leakage", "regularization", "representation"):
        raise UsageError(
            f"The experiment {experiment!r} is not there yet. Available: {', '.join(EXPERIMENTS)}."
        )
    if experiment not in EXPERIMENTS:
        raise UsageError(unknown("experiment", experiment, list(EXPERIMENTS)))
