"""`tightlip audit`, `audit-text` and `extract`: what a model, or generated text, gives away of whose."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import tightlip
from tightlip.audit.settings import ExtractionConfig, LeakageConfig, SyntheticConfig
from tightlip.cli import Gate, GateSettings, page_words, print_estimate, print_lines, since_start
from tightlip.cli.flags import (
    Corpus,
    DryRun,
    KeptScan,
    Model,
    argument,
    path_flag,
    switch,
    with_settings,
)
from tightlip.core.engines import EngineSettings
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.progress import log, logged_to, shown_progress
from tightlip.core.resampling import ResamplingSettings
from tightlip.core.run_folder import is_run
from tightlip.core.settings import names_in
from tightlip.core.stores import shown
from tightlip.corpus.prepare_config import ColumnSettings, TextSettings
from tightlip.scan.options import Decoding, ScanOptions


@with_settings(
    *(KeptScan, LeakageConfig, ScanOptions, TextSettings, EngineSettings, GateSettings),
    public_model=path_flag(
        "MODEL",
        "A model that never saw the text; 'base' of an adapter, the default there, or 'none'; 'leave-out': retrain a run without the owners of what leaked.",
        ["leave-out", "base", "none"],
    ),
    validation=path_flag("CORPUS", "Held-out text, for perplexity and accuracy."),
    snapshots=switch("--snapshots", "Audit every snapshot of a run, or checkpoint of a Trainer."),
)
def audit(
    model: Model,
    corpus: Corpus = None,
    out: Annotated[
        Path | None, typer.Option(help="The report's folder. For a run: RUN/audit.")
    ] = None,
    *,
    given: dict[str, Any],
    dry_run: DryRun = False,
) -> None:
    """Audit, print the headline figures, and judge them."""
    from tightlip.audit.leakage.summary import known_figures

    known = known_figures(given.get("thresholds", LeakageConfig.thresholds))
    same = ("corpus_fingerprint", "top_k", "read_as")
    gate = Gate("audit", given, known, _judged, record="summary.json", same=same)
    folder = _folder(model, out, "audit")
    if dry_run:
        import_module("tightlip.audit.leakage.dry_run")  # with all that an audit imports
        start_up = since_start()
        with shown_progress():
            expected = tightlip.estimate_audit(model, corpus, out=folder, **given)
        print_estimate(expected, start_up, as_json=gate.settings.json)
        return
    with shown_progress(), logged_to(folder / "log.txt"):
        report = tightlip.audit(model, corpus, out=folder, **given)
    record = report.summary if (all_ := _snapshots(report)) is None else all_
    gate.judge(record, lambda: show(report))


@with_settings(
    *(SyntheticConfig, ResamplingSettings, ColumnSettings, GateSettings),
    control=path_flag("CORPUS", "Text like it, of people who were not in: what chance repeats."),
)
def audit_text(
    synthetic: Annotated[
        str, argument("SYNTHETIC", "The generated text; it needs no user column.")
    ],
    corpus: Annotated[str, argument("CORPUS", "The text it was made from.")],
    out: Annotated[Path, typer.Option(help="The report's folder.")],
    *,
    given: dict[str, Any],
    engine: Annotated[str, typer.Option(help="Where the counting runs.")] = "local",
) -> None:
    """Look for people's text, print what was found, and judge it."""
    from tightlip.audit.synthetic.audit import FIGURES
    from tightlip.report.synthetic import terminal_lines

    same = ("corpus_fingerprint", "min_words", "near")
    only = lambda record: {"": record | {"copies": record["copies"]}}  # noqa: E731
    gate = Gate("audit-text", given, FIGURES, only, record="summary.json", same=same)
    with shown_progress(), logged_to(out / "log.txt"):
        report = tightlip.audit_text(synthetic, corpus, out=out, engine=engine, **given)
    where = f"The report: {shown(report.folder / 'report.html')}"
    gate.judge(report.summary, lambda: print_lines([*terminal_lines(report.summary), where]))


def _folder(model: str, out: Path | None, name: str) -> Path:
    """Where the report goes: `out`, or within the run."""
    if out is None and not is_run(Path(model)):
        raise UsageError("Where should the report go? Give --out DIR.")
    return out or Path(model) / name


def _snapshots(report: Any) -> dict[str, Any] | None:
    path = report.folder / "snapshots.json"
    return read_json(path) if path.exists() else None


def _judged(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a gate looks at: the summary, or each snapshot's where snapshots were audited."""
    if "snapshots" not in record:
        return {"": record | {"leaks": record["leaks"]}}  # of another kind, it has none
    return {row["name"]: row["summary"] for row in record["snapshots"]}


def show(report: Any) -> None:
    """The headline figures and the way to the page."""
    from tightlip.report.leakage.words import contexts_table, snapshots_table, terminal_table

    snapshots = _snapshots(report)
    tables = [] if snapshots is None else [snapshots_table(snapshots)]
    where = f"The report: {shown(report.folder / 'report.html')}"
    behind = contexts_table(report.summary)
    others = [] if behind is None else ["", "What is left of the leaks:", behind.printed()]
    print_lines([*tables, terminal_table(report.summary), *others, where])
    log.info("Report written to %s", shown(report.folder))


@with_settings(
    *(KeptScan, ExtractionConfig, Decoding, ScanOptions, TextSettings, EngineSettings),
    GateSettings,
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
    from tightlip.report.extraction import terminal_lines

    known = known_figures(given.get("lengths", ExtractionConfig.lengths))
    same = ("corpus_fingerprint", "reference_fingerprint", *names_in(Decoding), "read_as")
    only = lambda record: {"": gated(record)}  # noqa: E731
    gate = Gate("extract", given, known, only, record="summary.json", same=same)
    folder = _folder(model, out, "extraction")
    with shown_progress(), logged_to(folder / "log.txt"):
        report = tightlip.extract(model, corpus, out=folder, **given)
    where = page_words(report.folder / "report.html")
    gate.judge(report.summary, lambda: print_lines([*terminal_lines(report.summary), where]))
