"""`tightlip compare`: several models in one table and on one page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import tightlip
from tightlip.audit.settings import Matching, ResamplingSettings
from tightlip.cli import name_page
from tightlip.cli.flags import Device, KeepScan, Keys, existing, with_settings
from tightlip.cli.gates import Gate, GateSettings
from tightlip.core.files import read_json
from tightlip.core.progress import shown_progress, terminal
from tightlip.corpus.prepare_config import TextSettings
from tightlip.scan.options import ModelSettings

if TYPE_CHECKING:
    from tightlip.commands import Comparison


@with_settings(Matching, ResamplingSettings, ModelSettings, GateSettings, TextSettings)
def compare(
    models: Annotated[
        list[Path],
        existing(typer.Argument, "MODEL", "Runs of tightlip train, other models, or reports."),
    ],
    given: dict[str, Any],
    corpus: Annotated[
        str | None,
        existing(typer.Option, "CORPUS", "The text that models were trained on; a run knows it."),
    ] = None,
    held_out: Annotated[
        str | None, existing(typer.Option, "CORPUS", "Text that they were not trained on.")
    ] = None,
    key: Keys = None,
    reference: Annotated[
        str | None,
        existing(
            typer.Option, "MODEL", "A model that never saw the text: for ε_l and for membership."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for comparison.html, .csv and .json.")] = Path(
        "comparison"
    ),
    device: Device = "auto",
    keep_scan: KeepScan = True,
) -> None:
    """Utility, leakage, cost and guarantee of several models, and which may be compared."""
    from tightlip.audit.compared import FIGURES, gated
    from tightlip.commands import JSON

    gate = Gate("compare", given, FIGURES, lambda record: gated(record["runs"]), record=JSON)
    with shown_progress():
        made = tightlip.compare(
            models,
            corpus=corpus,
            held_out=held_out,
            key=key,
            reference=reference,
            out=out,
            device=device,
            keep_scan=keep_scan,
            **given,
        )
    gate.judge(read_json(made.folder / JSON), lambda: show(made, terminal()))


def show(made: "Comparison", console: Console) -> None:
    """The table, the verdicts below it, and the way to the page."""
    from tightlip.report.comparison.table import terminal_tables
    from tightlip.report.comparison.words import headline, missing, tolerance_words, uncounted

    sentence, weighing = headline(made.rows)
    console.print(Text(sentence, style="bold"))
    for line in (weighing, *made.notes):
        console.print(Text(line))
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
    tolerance = tolerance_words(made.matching.tolerance)
    for reason in (tolerance, *uncounted(made.rows), *missing(made.rows)):
        console.print(Text(reason, style="dim"))
    name_page(made.page, console, "measure")
