"""`tightlip reproduce`: a paper's experiment on your own text."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tightlip.cli.flags import Device

EXPERIMENTS = ("adaptive", "representation")
# What only one experiment uses; anything else is for both.
_ONLY = {
    **dict.fromkeys(("public_model", "public_corpus", "unit"), "adaptive"),
    **dict.fromkeys(("extractor", "bf16"), "representation"),
}
_ADAPTIVE, _REPRESENTATION = "With adaptive", "With representation"


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


def reproduce(
    experiment: Annotated[
        str, typer.Argument(help="'adaptive' or 'representation'.", metavar="EXPERIMENT")
    ],
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            help="adaptive: a file with text, or user and text. representation: the paper's ag_data.txt, or Parquet with "
            "text, and age or gender. By default the bundled plays. May be given again."
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (minutes on a CPU), small (a GPU), or paper.")
    ] = "smoke",
    out: Annotated[Path | None, typer.Option(help="Where runs and results go.")] = None,
    device: Device = "auto",
    public_model: Annotated[
        Path | None,
        _option(
            "The large public model, a folder or a .gguf file; by default a small LSTM is trained on the public text.",
            _ADAPTIVE,
        ),
    ] = None,
    public_corpus: Annotated[
        Path | None, _option("Public text: for the tokenizer, and for what is ordinary.", _ADAPTIVE)
    ] = None,
    unit: Annotated[
        str | None,
        _option("Whom to protect: user, example, or auto (user from 1,000 users on).", _ADAPTIVE),
    ] = None,
    extractor: Annotated[
        str | None,
        _option("A Hugging Face encoder's folder, lstm, or bag (default).", _REPRESENTATION),
    ] = None,
    bf16: Annotated[
        bool | None, _option("Train the encoder in bf16.", _REPRESENTATION, "--bf16")
    ] = None,
) -> None:
    """A paper's experiment, step by step by our own commands, with its own figures beside ours."""
    from tightlip.core.progress import shown_progress

    given = {
        "public_model": public_model,
        "public_corpus": public_corpus,
        "unit": unit,
        "extractor": extractor,
        "bf16": bf16,
    }
    options = _options(experiment, given)
    out = out or Path(f"reproduce-{experiment}")
    import tightlip

    call = getattr(tightlip, f"reproduce_{experiment}")
    with shown_progress():
        made = call(corpus or (), scale=scale, out=out, device=device, **options)
    _show_adaptive(made) if experiment == "adaptive" else _show_representation(made)


def _options(experiment: str, given: dict[str, Any]) -> dict[str, Any]:
    """The flags given, if they are for this experiment."""
    from tightlip.core.errors import UsageError
    from tightlip.core.registry import unknown

    if experiment in ("leakage", "regularization"):
        raise UsageError(
            f"The experiment {experiment!r} is not there yet. Available: {', '.join(EXPERIMENTS)}."
        )
    if experiment not in EXPERIMENTS:
        raise UsageError(unknown("experiment", experiment, list(EXPERIMENTS)))
    set_here = {name: value for name, value in given.items() if value is not None}
    for name in set_here:
        if _ONLY[name] != experiment:
            raise UsageError(
                f"--{name.replace('_', '-')} is for the experiment {_ONLY[name]!r} and means nothing to {experiment!r}. "
                "Leave it out."
            )
    return set_here


def _show_adaptive(made: Any) -> None:
    from rich.console import Console

    from tightlip.experiments.adaptive_page import about, terminal_tables
    from tightlip.experiments.adaptive_tables import PAPER_NOTE, findings, headline, stopped_early

    console = Console()
    console.print(headline(made.result), style="bold", highlight=False)
    for table in terminal_tables(made.result):
        console.print(table)
    console.print(PAPER_NOTE, style="dim", highlight=False)
    for section in made.result["corpora"]:
        console.print(f"\n[bold]{section['name']}[/]: {about(section)}", highlight=False)
        for sentence in findings(section):
            console.print(f"  {sentence}", highlight=False)
        for sentence in stopped_early(section):
            console.print(f"  [yellow]†[/] {sentence}", highlight=False)
    _name_page(console, made.page)


def _show_representation(made: Any) -> None:
    from rich.console import Console

    from tightlip.experiments.vectors_page import (
        PAPER_NOTE,
        about,
        certainty,
        findings,
        headline,
        terminal_tables,
    )

    console = Console()
    console.print(headline(made.result), style="bold", highlight=False)
    console.print(certainty(made.result), highlight=False)
    for section in made.result["corpora"]:
        console.print(f"\n[bold]{section['name']}[/]: {about(section)}", highlight=False)
        for table in terminal_tables(section):
            console.print(table)
            console.print()
        for sentence in findings(section):
            console.print(f"  {sentence}", highlight=False)
    console.print(PAPER_NOTE, style="dim", highlight=False)
    _name_page(console, made.page)


def _name_page(console: Any, page: Path) -> None:
    console.print(
        f"The page, which says what each figure means: {page}", highlight=False, soft_wrap=True
    )


# `tightlip demo`: the whole story on the bundled corpus


def demo(
    out: Annotated[Path, typer.Option(help="Where the demo's files go.")] = Path("tightlip-demo"),
) -> None:
    """Train small models on Shakespeare's speakers: whose words they give away, and which less."""
    from rich.console import Console

    from tightlip.core.progress import shown_progress

    console = Console()
    console.print(
        "[bold]tightlip demo[/]: 110 of Shakespeare's speakers are the users. An LSTM learns their "
        "lines, far past the point where it should stop: it overfits on purpose, so that there is "
        "something to see. Five secrets are planted among the lines.\n"
    )
    from tightlip.cli.compare import show
    from tightlip.experiments.demo import CANARIES, run_comparison, run_demo
    from tightlip.report.kit.table import printed_table
    from tightlip.report.leakage.table import snapshots_table

    with shown_progress():
        result = run_demo(out)
    console.print(snapshots_table(result.snapshots))
    rows = [
        [
            canary.secret,
            canary.user,
            f"{result.times_trained[canary.secret]}×",
            result.first_told[canary.secret] or "never",
        ]
        for canary in CANARIES
    ]
    headings = ["secret", "speaker", "in training", "first told whole"]
    console.print(printed_table(headings, rows, num_left=4, title="\nPlanted secrets"))
    report, best = result.report, result.snapshots["best_validation"]
    by_name = {row["name"]: row["summary"] for row in result.snapshots["snapshots"]}
    console.print(
        f"Validation would have stopped at [bold]{best}[/], with {by_name[best]['unique']:,} sequences "
        f"that one speaker alone wrote. Trained on, the model completes [bold]{report.unique:,}[/], "
        f"of {report.users_with_unique} of {report.num_users} speakers."
    )
    console.print(f"The report: [bold]{report.folder / 'report.html'}[/]", soft_wrap=True)
    console.print(
        "\n[bold]Second act[/]: the same lines, with 18 made-up secrets among them, learnt in four ways: as "
        "they are, with two privacy regularisers, and with differential privacy; and a control.\n"
    )
    with shown_progress():
        made = run_comparison(out)
    show(made, console)
