"""`tightlip audit`: the leakage report."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import tightlip
from tightlip.audit.settings import LeakageConfig
from tightlip.cli.flags import KeepScan, Model, existing, parsed, switch, with_settings
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.progress import harmless, logged_to, shown_progress, terminal
from tightlip.core.run_folder import is_run
from tightlip.corpus.prepare_config import TextSettings
from tightlip.scan.options import ScanOptions

_KINDS = (LeakageConfig, ScanOptions, TextSettings)


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
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit 1 when this holds: 'leaks>0', 'leakage_epsilon>2', 'curated[2]>0'.",
            metavar="CONDITION",
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="Where the counting runs.")] = "local",
    keep_scan: KeepScan = True,
    dp_check: Annotated[bool, switch("--dp-check", text="tightlip dp-check", hidden=True)] = False,
    membership: Annotated[
        bool, switch("--membership", text="tightlip membership", hidden=True)
    ] = False,
    groups: Annotated[bool, switch("--groups", text="tightlip groups", hidden=True)] = False,
    reference: Annotated[
        str | None, existing(typer.Option, "MODEL", "A model.", hidden=True)
    ] = None,
    against: Annotated[str | None, existing(typer.Option, "RUN", "A run.", hidden=True)] = None,
    key: Annotated[list[Path] | None, existing(typer.Option, "KEY", "Keys.", hidden=True)] = None,
) -> None:
    """Audit, print the headline figures, and judge them by `fail_on`."""
    from tightlip.audit.leakage.summary import failed_conditions

    measures = {"membership": membership, "groups": groups, "dp-check": dp_check}
    asked = [name for name, wanted in measures.items() if wanted]
    flags = {"--reference": reference, "--against": against, "--key": key}
    if asked or any(flags.values()):
        of_reports = {
            "CORPUS": corpus,
            "--out": out,
            "--public-model": public_model,
            "--validation": validation,
            "--snapshots": snapshots,
            "--fail-on": fail_on,
            "--engine": engine != "local",
            **{f"--{name.replace('_', '-')}": value for name, value in given.items()},
        }
        how = {"device": str(of_reports.pop("--device", "auto")), "keep_scan": keep_scan}
        _as_spelt_before(model, how, asked, flags, of_reports)
        return
    settings = parsed(_KINDS, given)
    _check_gate(fail_on or [], settings)
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
    show(report)
    failed = [
        f"{name}{line}"
        for name, summary in _judged(report)
        for line in failed_conditions(summary, fail_on or [])
    ]
    for line in failed:
        print(f"tightlip: failed on {harmless(line)}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _as_spelt_before(
    run: str, how: dict[str, Any], asked: list[str], flags: dict[str, Any], rest: dict[str, Any]
) -> None:
    """What --membership, --groups and --dp-check were in 0.1, before they became commands."""
    from tightlip.cli import measures

    if not asked:
        flag = next(flag for flag, value in flags.items() if value)
        command = "groups" if flag == "--against" else "membership"
        raise UsageError(f"{flag} does nothing here. Run: tightlip {command} {run} {flag} PATH")
    if len(asked) > 1:
        raise UsageError(f"--{asked[0]} and --{asked[1]} are two audits. Run one, then the other.")
    (command,) = asked
    takes = {"membership": ("reference", "key"), "groups": ("against", "key"), "dp-check": ()}
    own = {name: flags.pop(f"--{name}") for name in takes[command]}
    if command == "dp-check" and not how.pop("keep_scan"):
        flags["--no-keep-scan"] = True
    if not_here := [flag for flag, value in (rest | flags).items() if value]:
        raise UsageError(
            f"--{command} is a command of its own, and {not_here[0]} does not go with it. Run: tightlip {command} {run}"
        )
    getattr(measures, command.replace("-", "_"))(run=run, **own, **how)
    logging.getLogger("tightlip").warning(
        "audit --%s is now: tightlip %s %s. The old spelling goes with the next version.",
        *(command, command, run),
    )


def _check_gate(conditions: list[str], settings: dict[str, Any]) -> None:
    """A gate with a typo must not wait for the audit to say so."""
    from tightlip.audit.leakage.summary import check_threshold, parsed_condition

    thresholds = settings.get("thresholds", LeakageConfig.thresholds)
    for condition in conditions:
        check_threshold(parsed_condition(condition)[0], condition, list(thresholds))


def _snapshots(report: Any) -> dict[str, Any] | None:
    path = report.folder / "snapshots.json"
    return read_json(path) if path.exists() else None


def _judged(report: Any) -> list[tuple[str, dict[str, Any]]]:
    """What a gate looks at: the report, or each snapshot's where snapshots were audited."""
    if (snapshots := _snapshots(report)) is None:
        return [("", report.summary)]
    return [(f"{row['name']}: ", row["summary"]) for row in snapshots["snapshots"]]


def show(report: Any) -> None:
    """The headline figures and the way to the page."""
    from tightlip.report.leakage.table import snapshots_table, terminal_table

    console = terminal()
    if (snapshots := _snapshots(report)) is not None:
        console.print(snapshots_table(snapshots))
    console.print(terminal_table(report.summary))
    console.print(f"The report: {report.folder / 'report.html'}", soft_wrap=True)
    logging.getLogger("tightlip").info("Report written to %s", report.folder)
