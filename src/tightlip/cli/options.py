"""Flags that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

UserColumn = Annotated[str, typer.Option(help="The column that says who wrote a document.")]
TextColumn = Annotated[str, typer.Option(help="The column that holds the text.")]
BadRows = Annotated[
    str, typer.Option(help="A row without user or text, or not UTF-8: 'error' or 'skip' (counted).")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Config = Annotated[
    Path | None, typer.Option("--config", help="A TOML file with the same names; flags win.")
]
