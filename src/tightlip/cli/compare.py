"""`tightlip compare`: several runs in one table and on one page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightlip.cli.flags import Device

if TYPE_CHECKING:
    from rich.console import Console

    from tightlip.commands import Comparison


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Runs of tightlip train.", metavar="RUN")],
    key: Annotated[
        list[Path] | None,
        typer.Option(help="A key.json of canaries. May be given again."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="A model that never saw the text: for ε_l and for membership."),
    ] = None,
    at_perplexity: Annotated[
        float | None,
        typer.Option(
            help="Compare each run's first snapshot with this validation perplexity, or a better one."
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="How far apart perplexities may be and still match.")
    ] = 0.05,
    out: Annotated[Path, typer.Option(help="A folder for comparison.html, .csv and .json.")] = Path(
        "comparison"
    ),
    seed: Annotated[int, typer.Option(help="Decides what is resampled.")] = 0,
    num_bootstraps: Annotated[int, typer.Option(help="Resamples behind each interval.")] = 1000,
    device: Device = "auto",
) -> None:
    """Utility, leakage, cost and guarantee of several runs, and which may be compared."""
    from rich.console import Console

    import tightlip
    from tightlip.core.progress import shown_progress

    with shown_progress():
        made = tightlip.compare(
            runs,
            key=key,
            reference=reference,
            at_perplexity=at_perplexity,
            tolerance=tolerance,
            out=out,
            seed=seed,
            num_bootstraps=num_bootstraps,
            device=device,
        )
    show(made, Console())


def show(made: "Comparison", console: "Console") -> None:
    """The table, the verdicts below it, and the way to the page."""
    from rich.text import Text

    from tightlip.report.comparison.table import terminal_tables
    from tightlip.report.comparison.words import headline, missing, tolerance_words, uncounted

    sentence, weighing = headline(made.rows)
    console.print(Text(sentence, style="bold"))
    console.print(Text(weighing))
    for note in made.notes:
        console.print(Text(note))
    for part in terminal_tables(made.rows, console.width):
        console.print()
        console.print(part)
    console.print()
    for row in made.rows:
        words = " ".join(row["verdicts"])
        if words:
            console.print(Text.assemble((row["name"], "bold"), ": ", words))
        if row["guarantee"]["insecure"]:
            console.print(Text(f"{row['name']}: {row['guarantee']['insecure']}", style="bold red"))
    console.print(Text(tolerance_words(made.matching.tolerance), style="dim"))
    for reason in [*uncounted(made.rows), *missing(made.rows)]:
        console.print(Text(reason, style="dim"))
    console.print(
        f"The page, which says what each measure means: {made.page}",
        highlight=False,
        soft_wrap=True,
    )
