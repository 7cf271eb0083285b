"""`tightlip represent attack`: what eavesdroppers read from a run's vectors."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightlip.cli.options import Device

if TYPE_CHECKING:
    from rich.console import Console

    from tightlip.api.represent_attack import AttackReport


def attack(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Runs of tightlip represent train, or folders of seeds.", metavar="RUN"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for attack.json and report.html; RUN itself, or attacks for several runs."
        ),
    ] = None,
    attackers: Annotated[
        str | None,
        typer.Option(help="Some of mlp, logistic, averaged, trees, with commas between; all."),
    ] = None,
    copies: Annotated[
        int, typer.Option(help="Releases of each text that the averaging attacker hears.")
    ] = 16,
    attributes: Annotated[
        str | None,
        typer.Option(help="Columns to read, with commas between; the run's private ones."),
    ] = None,
    entities: Annotated[
        str | None,
        typer.Option(
            help="Names in the texts: a file with a name a line, auto (NLTK or spaCy), or column:NAME with lists of ids."
        ),
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Draw the vectors by t-SNE.")] = True,
    again: Annotated[
        bool, typer.Option("--again", help="Measure anew what RUN/attack.json already answers.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Decides attackers and resampling; noise is always fresh.")
    ] = 0,
    num_bootstraps: Annotated[int, typer.Option(help="Resamples behind each interval.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Texts that are encoded at a time.")] = 32,
    device: Device = "auto",
) -> None:
    """Train attackers on a run's vectors and tell what they read, against guessing."""
    from rich.console import Console

    import tightlip
    from tightlip.core.progress import shown_progress

    with shown_progress():
        report = tightlip.represent_attack(
            runs,
            out=out,
            attackers=_listed(attackers),
            copies=copies,
            attributes=_listed(attributes),
            entities=entities,
            pictures=pictures,
            again=again,
            seed=seed,
            num_bootstraps=num_bootstraps,
            batch_size=batch_size,
            device=device,
        )
    show(report, Console())


def _listed(words: str | None) -> list[str] | None:
    return None if words is None else [word.strip() for word in words.split(",") if word.strip()]


def show(report: "AttackReport", console: "Console") -> None:
    """The headline, what was found in each run, the table, and the way to the page."""
    from rich.text import Text

    from tightlip.report.representation import columns_of, findings, headline, notes_of
    from tightlip.report.representation_table import terminal_tables

    columns = columns_of(report.results)
    console.print(Text(headline(report.results), style="bold"))
    for column in columns:
        for sentence in findings(column.first):
            prefix = f"{column.name}: " if len(columns) > 1 else ""
            console.print(Text(prefix + sentence))
    for table in terminal_tables(columns, console.width):
        console.print()
        console.print(table)
    console.print()
    for note in notes_of(report.results):
        console.print(Text(note, style="dim"))
    if report.num_kept:
        console.print(
            Text(
                f"{report.num_kept} of {len(report.results)} runs were measured before; --again measures them anew.",
                style="dim",
            )
        )
    console.print(
        f"The page, which says what each figure means: {report.page}",
        highlight=False,
        soft_wrap=True,
    )
