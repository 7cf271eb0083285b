"""`tightlip audit`: the leakage report, and what is asked for in its place."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tightlip.cli.options import BadRows, Device, TextColumn, UserColumn


def audit(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face model folder, or a run of tightlip train.")
    ],
    corpus: Annotated[
        str | None, typer.Argument(help="The text it was trained on. A run knows its own.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The report's folder. For a run: RUN/audit.")
    ] = None,
    top_k: Annotated[
        int, typer.Option(help="How many next-token suggestions the deployment shows.")
    ] = 1,
    public_model: Annotated[
        str | None,
        typer.Option(
            help="A folder or a .gguf file, or 'leave-out': retrain a run without the owners of what leaked."
        ),
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Held-out text, for perplexity and accuracy.")
    ] = None,
    snapshots: Annotated[
        bool, typer.Option("--snapshots", help="Audit every snapshot of a run.")
    ] = False,
    dp_check: Annotated[
        bool,
        typer.Option(
            "--dp-check", help="Instead: guess a run's planted canaries; what ε they show."
        ),
    ] = False,
    membership: Annotated[
        bool,
        typer.Option("--membership", help="Instead: can one tell what a run was trained on?"),
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option(help="With --membership: a model, or a run, that never saw that text."),
    ] = None,
    groups: Annotated[
        bool,
        typer.Option("--groups", help="Instead: whose held-out text a run predicts worse."),
    ] = False,
    against: Annotated[
        str | None, typer.Option(help="With --groups: the unmitigated run, to see who lost.")
    ] = None,
    key: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --membership or --groups: a key.json of canaries, which are left out. May be given again."
        ),
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="No text and no names in the report.")
    ] = False,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit 1 when this holds: 'unique>0', 'leakage_epsilon>2', 'curated[2]>0'."
        ),
    ] = None,
    occurrences: Annotated[
        str, typer.Option(help="Occurrences kept per sequence: a number or 'all'.")
    ] = "8",
    fewer_than: Annotated[int, typer.Option(help="The p of fewer_than_p.")] = 5,
    curated_at: Annotated[
        str, typer.Option(help="Ratios t at which unique sequences are counted.")
    ] = "1.5,2,3,5,10",
    user_column: UserColumn = "user",
    text_column: TextColumn = "text",
    bad_rows: BadRows = "error",
    memory: Annotated[str, typer.Option(help="Most memory the counting may take.")] = "4GB",
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    window: Annotated[
        int | None, typer.Option(help="Most tokens shown to the model at once.")
    ] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens per batch of the scan.")] = None,
    engine: Annotated[str, typer.Option(help="Where the counting runs.")] = "local",
) -> None:
    """Which words of CORPUS the model gives away, and whose they are."""
    from tightlip.audit.leakage.summary import check_threshold, failed_conditions, parsed_condition
    from tightlip.core.errors import UsageError
    from tightlip.core.logs import logged_to
    from tightlip.core.progress import shown_progress
    from tightlip.core.run_folder import is_run

    of_reports = {
        "CORPUS": corpus,
        "--out": out,
        "--public-model": public_model,
        "--validation": validation,
        "--snapshots": snapshots,
        "--redact": redact,
        "--fail-on": fail_on,
    }
    asked = {
        "--dp-check": dp_check,
        "--membership": membership,
        "--groups": groups,
        "--reference": reference,
        "--against": against,
        "--key": key,
    }
    if any(asked.values()):
        _instead(model, device, asked, of_reports)
        return
    conditions = fail_on or []
    thresholds = _numbers(curated_at)
    for condition in conditions:  # a gate with a typo must not wait for the audit to say so
        check_threshold(parsed_condition(condition)[0], condition, thresholds)
    if out is None:
        if not is_run(Path(model)):
            raise UsageError("Where should the report go? Give --out DIR.")
        out = Path(model) / "audit"
    import tightlip

    with shown_progress(), logged_to(out / "log.txt"):
        report = tightlip.audit(
            model,
            corpus,
            out=out,
            top_k=top_k,
            public_model=public_model,
            validation=validation,
            snapshots=snapshots,
            redact=redact,
            occurrences=_occurrences(occurrences),
            fewer_than=fewer_than,
            thresholds=thresholds,
            user_column=user_column,
            text_column=text_column,
            bad_rows=bad_rows,
            memory=memory,
            device=device,
            dtype=dtype,
            window=window,
            batch_tokens=batch_tokens,
            engine=engine,
        )
    show(report)
    failed = [
        f"{name}{line}"
        for name, summary in _judged(report)
        for line in failed_conditions(summary, conditions)
    ]
    for line in failed:
        print(f"tightlip: failed on {line}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _instead(run: str, device: str, asked: dict[str, Any], of_reports: dict[str, Any]) -> None:
    """What is asked for in place of a leakage report; each by itself."""
    from tightlip.core.errors import UsageError

    for flag, of in (("--reference", "--membership"), ("--against", "--groups")):
        if asked[flag] is not None and not asked[of]:
            raise UsageError(
                f"{flag} {asked[flag]} is for {of}, which is not asked for. Run: tightlip audit {run} {of} {flag} "
                f"{asked[flag]}"
            )
    if asked["--key"] and not (asked["--membership"] or asked["--groups"]):
        raise UsageError(
            f"--key {asked['--key'][0]} is for --membership or --groups, which is not asked for. To measure the canaries "
            f"themselves: tightlip canaries measure {run} --key {asked['--key'][0]}"
        )
    chosen, *more = [flag for flag in ("--dp-check", "--membership", "--groups") if asked[flag]]
    if more:
        raise UsageError(f"{chosen} and {more[0]} are two audits. Run one, then the other.")
    if chosen == "--dp-check":
        from tightlip.cli.measures import dp_check

        dp_check(run, device, of_reports)
    elif chosen == "--membership":
        from tightlip.cli.measures import membership

        membership(run, device, asked["--reference"], asked["--key"], of_reports)
    else:
        from tightlip.cli.measures import groups

        groups(run, device, asked["--against"], asked["--key"], of_reports)


def _judged(report: Any) -> list[tuple[str, dict[str, Any]]]:
    """What a gate looks at: the report, or each snapshot's where snapshots were audited."""
    from tightlip.core.files import read_json

    snapshots = report.folder / "snapshots.json"
    if not snapshots.exists():
        return [("", report.summary)]
    return [(f"{row['name']}: ", row["summary"]) for row in read_json(snapshots)["snapshots"]]


def show(report: Any) -> None:
    """The headline figures and the way to the page."""
    from rich.console import Console

    from tightlip.core.files import read_json
    from tightlip.report.leakage.table import snapshots_table, terminal_table

    console = Console()
    snapshots = report.folder / "snapshots.json"
    if snapshots.exists():
        console.print(snapshots_table(read_json(snapshots)))
    console.print(terminal_table(report.summary))
    console.print(f"The report: {report.folder / 'report.html'}", soft_wrap=True)
    logging.getLogger("tightlip").info("Report written to %s", report.folder)


def _occurrences(text: str) -> int | None:
    from tightlip.core.errors import UsageError

    if text == "all":
        return None
    if not text.isdigit():
        raise UsageError(f"--occurrences {text!r} is neither a number nor 'all'.")
    return int(text)


def _numbers(text: str) -> list[float]:
    from tightlip.core.errors import UsageError

    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--curated-at {text!r} is no list of numbers like 1.5,2,3.") from None
