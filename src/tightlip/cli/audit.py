"""`tightlip audit`: the leakage report."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

import tightlip
from tightlip.audit.settings import LeakageConfig
from tightlip.cli.flags import KeepScan, Model, existing, parsed, switch, with_settings
from tightlip.cli.gates import Gate, GateSettings
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.progress import logged_to, shown_progress, terminal
from tightlip.core.run_folder import is_run
from tightlip.corpus.prepare_config import TextSettings
from tightlip.scan.options import ScanOptions

_KINDS = (LeakageConfig, ScanOptions, TextSettings, GateSettings)


@with_settings(*_KINDS)
def audit(
    model: Model,
    given: dict[str, Any],
    corpus: Annotated[
        str | None,
        existing(typer.Argument, "CORPUS", "The text it was trained on. A run knows its own."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The report's folder. For a run: RUN/audit.")
    ] = None,
    public_model: Annotated[
        str | None,
        existing(
            typer.Option,
            "MODEL",
            "A model that never saw the text; 'base' of an adapter, the default there, or 'none'; 'leave-out': retrain a run without the owners of what leaked.",
            words=["leave-out", "base", "none"],
        ),
    ] = None,
    validation: Annotated[
        str | None,
        existing(typer.Option, "CORPUS", "Held-out text, for perplexity and accuracy."),
    ] = None,
    snapshots: Annotated[
        bool,
        switch("--snapshots", text="Audit every snapshot of a run, or checkpoint of a Trainer."),
    ] = False,
    engine: Annotated[str, typer.Option(help="Where the counting runs.")] = "local",
    keep_scan: KeepScan = True,
) -> None:
    """Audit, print the headline figures, and judge them."""
    from tightlip.audit.leakage.summary import known_figures

    settings = parsed(_KINDS, given)
    known = known_figures(settings.get("thresholds", LeakageConfig.thresholds))
    same = ("corpus_fingerprint", "top_k", "read_as")
    gate = Gate("audit", settings, known, _judged, record="summary.json", same=same)
    if out is None and not is_run(Path(model)):
        raise UsageError("Where should the report go? Give --out DIR.")
    folder = out or Path(model) / "audit"
    with shown_progress(), logged_to(folder / "log.txt"):
        report = tightlip.audit(
            model,
            corpus,
            out=folder,
            public_model=public_model,
            validation=validation,
            snapshots=snapshots,
            engine=engine,
            keep_scan=keep_scan,
            **settings,
        )
    record = report.summary if (all_ := _snapshots(report)) is None else all_
    gate.judge(record, lambda: show(report))


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
    from tightlip.report.leakage.table import snapshots_table, terminal_table

    console = terminal()
    if (snapshots := _snapshots(report)) is not None:
        console.print(snapshots_table(snapshots))
    console.print(terminal_table(report.summary))
    console.print(f"The report: {report.folder / 'report.html'}", soft_wrap=True)
    logging.getLogger("tightlip").info("Report written to %s", report.folder)
