"""`tightlip extract`: how many tries draw somebody's text out of a model."""

from pathlib import Path
from typing import Annotated, Any

import typer

import tightlip
from tightlip.audit.settings import ExtractionConfig
from tightlip.cli import name_page, print_lines
from tightlip.cli.flags import Corpus, KeptScan, Model, path_flag, with_settings
from tightlip.cli.gates import Gate, GateSettings
from tightlip.core.engines import EngineSettings
from tightlip.core.errors import UsageError
from tightlip.core.progress import logged_to, shown_progress, terminal
from tightlip.core.run_folder import is_run
from tightlip.corpus.prepare_config import TextSettings
from tightlip.scan.options import Decoding, ScanOptions

SAME = ("corpus_fingerprint", "reference_fingerprint", "temperature", "top_k", "top_p", "read_as")


@with_settings(
    *(
        KeptScan,
        ExtractionConfig,
        Decoding,
        ScanOptions,
        TextSettings,
        EngineSettings,
        GateSettings,
    ),
    reference=path_flag(
        "MODEL",
        "A model that never saw the text: what it draws as easily does not count; 'base' of an adapter, the default there, or 'none'.",
        ["base", "none"],
    ),
    held_out=path_flag("CORPUS", "Text of people who were not trained on. A run knows its own."),
)
def extract(
    model: Model,
    corpus: Corpus = None,
    out: Annotated[
        Path | None, typer.Option(help="The report's folder. For a run: RUN/extraction.")
    ] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Search, print what it takes, and judge it."""
    from tightlip.audit.extraction.report import gated, known_figures

    lengths = given.get("lengths", ExtractionConfig.lengths)
    gate = Gate(
        *("extract", given, known_figures(lengths), lambda record: {"": gated(record)}),
        record="summary.json",
        same=SAME,
    )
    if out is None and not is_run(Path(model)):
        raise UsageError("Where should the report go? Give --out DIR.")
    folder = out or Path(model) / "extraction"
    with shown_progress(), logged_to(folder / "log.txt"):
        report = tightlip.extract(model, corpus, out=folder, **given)
    gate.judge(report.summary, lambda: _show(report))


def _show(report: Any) -> None:
    from tightlip.report.extraction import terminal_lines

    print_lines(terminal_lines(report.summary))
    name_page(report.folder / "report.html", terminal())
