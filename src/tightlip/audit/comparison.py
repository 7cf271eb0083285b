"""`tightlip compare` as one call: measure what is missing of each run, line the runs up."""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightlip.audit.canaries.exposure import missing_copies
from tightlip.audit.compared import Matching, Row, RunMeasures, baseline_place, compared
from tightlip.audit.measures import Key, Measuring, ModelMeasures, measured_or_reason, open_key
from tightlip.core.devices import usable_device
from tightlip.core.errors import UsageError
from tightlip.core.progress import Task, task
from tightlip.core.resampling import ResamplingSettings
from tightlip.core.run_folder import RunRecord, open_run
from tightlip.corpus.canaries import exposed_above_bits, read_canary_key
from tightlip.corpus.opening import check_reference, finished_run, model_folder, open_run_corpus
from tightlip.scan.models import (
    AUDIT,
    OpenedModel,
    Scans,
    claimed_to_write,
    open_model,
    run_store,
)
from tightlip.scan.options import ScanOptions

STEPS_PER_RUN = 4
NOTHING_HELD_OUT = "The run holds out no text. Prepare with --holdout 0.2, or --validation FILE."
NO_KEY = "No key of canaries was given (--key FILE)."
NO_REFERENCE = "No reference model was given (--reference DIR)."
PRIVATE_TIME = "A private run does not tell: time shows how much text was drawn."
CHOSEN_BY_THIS = "They were chosen with this very run, and the choice would flatter it."
CHOSEN_BY_TEXT = (
    "The snapshot was chosen by its perplexity on held-out text, which this ε does not cover."
)

# Fields of RunMeasures, and of each figure that is None the reason.
Measured = tuple[dict[str, Any], dict[str, str]]


def compare_runs(
    runs: Sequence[str | Path | RunRecord],
    matching: Matching,
    resampling: ResamplingSettings,
    *,
    key: str | Path | Sequence[str | Path] | None,
    reference: str | Path | None,
    device: str,
    keep_scan: bool,
    **how: Any,
) -> list[Row]:
    """A row for each run; what is not yet measured is measured now and kept with the run.

    `how` are ModelSettings.

    Holds:
        once: each model is loaded once at most, and reads each text once.
    """
    records = _opened(runs)
    options = ScanOptions(device=usable_device(device), **how)
    measuring = _measuring(key, reference, options, resampling)
    _refuse_what_saw_the_text(measuring.reference, records)
    with ExitStack() as stack:
        for record in records:
            stack.enter_context(claimed_to_write(record.folder))
        scans = _scans(records, options, stack, keep=keep_scan)
        return compared(_measured(records, scans, measuring, matching.at_perplexity), matching)


def _measured(
    records: Sequence[RunRecord],
    scans: Sequence[Scans],
    measuring: Measuring,
    at_perplexity: float | None,
) -> list[RunMeasures]:
    names = labels([record.folder for record in records])
    place = baseline_place([record.is_mitigated for record in records])

    def subject_at(number: int) -> Subject:
        run, name = records[number], names[number]
        return _subject(run, name, scans[number], measuring, at_perplexity)

    base = subject_at(place)
    measures = []
    with task("Comparing", STEPS_PER_RUN * len(records)) as bar:
        for number in range(len(records)):
            subject = base if number == place else subject_at(number)
            measures.append(_gathered(subject, base, bar))
            if subject is not base and subject.measures is not None:
                subject.measures.release()  # the baseline's is needed to the end
    return measures


def _scans(
    records: Sequence[RunRecord], options: ScanOptions, stack: ExitStack, *, keep: bool
) -> list[Scans]:
    """Each run's own scans, all of the same models; what one holds the others read."""
    folders = [folder for run in records for folder in (run.folder, run.folder / AUDIT)]
    models: dict[Path | int, OpenedModel] = {}
    stores = [
        stack.enter_context(run_store(run.folder, beside=folders, keep=keep)) for run in records
    ]
    return [Scans(store=store, options=options, models=models) for store in stores]


def _opened(runs: Sequence[str | Path | RunRecord]) -> list[RunRecord]:
    records = [run if isinstance(run, RunRecord) else open_run(Path(run)) for run in runs]
    if len({record.folder.resolve() for record in records}) < max(2, len(records)):
        what = "One run was given" if len(records) == 1 else "The same run was given twice"
        raise UsageError(
            f"{what if records else 'No run was given'}, and a comparison needs different ones. "
            "Run: tightlip compare RUN RUN..."
        )
    return [finished_run(record) for record in records]


def _measuring(
    key: Any, reference: str | Path | None, options: ScanOptions, resampling: ResamplingSettings
) -> Measuring:
    """How to measure; whatever cannot work is refused here, before the long work."""
    paths = [] if key is None else [key] if isinstance(key, str | Path) else list(key)
    given = None if reference is None else Path(reference)
    others = options.of_others()
    return Measuring(
        keys=tuple(open_key(Path(path)) for path in paths),
        reference=given,
        reference_fingerprint=None
        if given is None
        else open_model(model_folder(given), others).files,
        seed=resampling.seed,
        num_bootstraps=resampling.num_bootstraps,
    )


def _refuse_what_saw_the_text(reference: Path | None, records: Sequence[RunRecord]) -> None:
    """Before anything kept is looked at: it may have been measured when nobody could tell."""
    for record in records:
        corpus = open_run_corpus(record)
        if reference is not None:
            check_reference(reference, corpus)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One run and its model that is compared, None where no snapshot is good enough."""

    run: RunRecord
    name: str
    model: str | None
    measures: ModelMeasures | None
    best_perplexity: float | None = None
    was_chosen: bool = False  # by looking at held-out text


def _subject(
    run: RunRecord, name: str, scans: Scans, measuring: Measuring, at_perplexity: float | None
) -> Subject:
    """The run's last model, or the first on its way whose held-out perplexity is as low as asked."""
    if at_perplexity is None:
        measures = ModelMeasures(run, run.model_folder, measuring, scans)
        return Subject(run=run, name=name, model="final", measures=measures)
    best = None
    for model, folder, known in _on_the_way(run):
        measures = ModelMeasures(run, folder, measuring, scans)
        perplexity = known
        if known is None and measures.audited.held_out is not None:
            perplexity = measures.perplexity()  # a private run does not publish it
        if perplexity is not None and perplexity <= at_perplexity:
            return Subject(run=run, name=name, model=model, measures=measures, was_chosen=True)
        measures.release()
        best = min((value for value in (best, perplexity) if value is not None), default=None)
    return Subject(run=run, name=name, model=None, measures=None, best_perplexity=best)


def labels(folders: Sequence[Path]) -> list[str]:
    """The end of each path, as much of it as tells them apart.

    >>> labels([Path("/a/dp/run"), Path("/a/none/run")])
    ['dp/run', 'none/run']
    """
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _on_the_way(run: RunRecord) -> list[tuple[str, Path, float | None]]:
    """Every model of a run in training order, with its perplexity where the metrics have it."""
    known = {line.get("snapshot"): line.get("validation_perplexity") for line in run.metrics}
    last = run.metrics[-1] if run.metrics else {}
    snapshots = [(one.name, one.folder, known[one.name]) for one in run.snapshots]
    return [*snapshots, ("final", run.model_folder, last.get("validation_perplexity"))]


def _gathered(subject: Subject, base: Subject, bar: Task) -> RunMeasures:
    corpus = subject.run.config["corpus"]
    bar.note(subject.name)
    seconds, why = seconds_per_epoch(subject.run)
    figures: dict[str, Any] = {}
    not_known = {} if why is None else {"seconds per epoch": why}
    if subject.measures is None:
        bar.advance(STEPS_PER_RUN)
        if corpus.get("validation_fingerprint") is None:
            not_known["perplexity"] = NOTHING_HELD_OUT
    else:
        for measure in (_leakage, _exposures, _groups, _membership):
            measured, reasons = measure(subject.name, subject.measures, base)
            figures |= measured
            not_known |= reasons
            bar.advance()
    return RunMeasures(
        name=subject.name,
        mitigation=subject.run.mitigation,
        is_mitigated=subject.run.is_mitigated,
        is_private=subject.run.is_private,
        model=subject.model,
        train_text=f"{corpus['corpus_fingerprint']} without {corpus.get('num_users_left_out', 0)}",
        held_out_text=corpus.get("validation_fingerprint"),
        tokenizer=corpus["tokenizer_fingerprint"],
        guarantee=promised(subject),
        best_perplexity=subject.best_perplexity,
        seconds_per_epoch=seconds,
        not_known=not_known,
        **figures,
    )


def _leakage(name: str, of: ModelMeasures, base: Subject) -> Measured:
    names = ("unique sequences", "leakage ε_l")
    leakage, reasons = measured_or_reason("The leakage report", name, of.leakage, *names)
    if leakage is not None and leakage["leakage_epsilon"] is None:
        reasons["leakage ε_l"] = (
            NO_REFERENCE
            if of.audited.measuring.reference is None
            else "No unique sequence has a finite ratio."
        )
    return {"leakage": leakage}, reasons


def _exposures(name: str, of: ModelMeasures, base: Subject) -> Measured:
    keys = of.audited.measuring.keys
    if not keys:
        return {}, {"exposure": NO_KEY, "tab": NO_KEY}
    reasons = {"exposure": "No key holds planted canaries, and only these have an exposure."}
    planted = None
    if any(key.planted_texts for key in keys):
        names = ("exposure", "tab of planted canaries")
        planted, reasons = measured_or_reason("Exposure", name, of.exposures, *names)
    exposures = list(planted or [])
    for key in keys:
        real, why = _real(name, of, key)
        exposures += real or []
        reasons |= why
    num_planted = sum(one["exposure_bits"] is not None for one in exposures)
    return {
        "exposures": exposures,
        "exposed_above_bits": exposed_above_bits(num_planted) if num_planted else None,
        "canary_note": missing_copies(of.audited.run, [read_canary_key(key.path) for key in keys]),
    }, reasons


def _real(name: str, of: ModelMeasures, key: Key) -> tuple[Any, dict[str, str]]:
    """The real canaries in a key, or why they are not measured."""
    if key.planted_texts:
        return None, {}
    if of.fingerprint in key.chosen_by:
        return None, {"tab of real canaries": CHOSEN_BY_THIS}
    return measured_or_reason("Tab", name, lambda: of.real(key), "tab of real canaries")


def _groups(name: str, of: ModelMeasures, base: Subject) -> Measured:
    gap = "gap, low-5 to top-5"
    if of.audited.held_out is None:
        return {}, dict.fromkeys(("perplexity", gap), NOTHING_HELD_OUT)
    is_base = of is base.measures
    against = None if is_base or not _same_held_out(of, base) else base.measures
    groups, reasons = measured_or_reason("Groups", name, lambda: of.groups(against), gap)
    if not reasons and not is_base and groups.get("gap") is None:
        reasons[gap] = (
            f"It needs the same held-out text and tokenizer as {base.name}."
            if against is None
            else "Too few users have held-out text, or all have equally much of it."
        )
    return {"groups": groups}, reasons


def _same_held_out(of: ModelMeasures, base: Subject) -> bool:
    if base.measures is None:
        return False
    mine, theirs = of.audited.run.config["corpus"], base.run.config["corpus"]
    names = ("validation_fingerprint", "tokenizer_fingerprint")
    return all(mine.get(name) == theirs.get(name) for name in names)


def _membership(name: str, of: ModelMeasures, base: Subject) -> Measured:
    if of.audited.held_out is None:
        return {}, {"membership AUC": NOTHING_HELD_OUT}
    measured, reasons = measured_or_reason("Membership", name, of.membership, "membership AUC")
    return {"membership": measured}, reasons


def seconds_per_epoch(run: RunRecord) -> tuple[float | None, str | None]:
    """The median over whole epochs, or why there is none."""
    ends = [line for line in run.metrics if line["epoch"] > 0 and float(line["epoch"]).is_integer()]
    seconds = [line["seconds"] for line in ends if line.get("seconds") is not None]
    if seconds:
        return statistics.median(seconds), None
    return None, PRIVATE_TIME if ends else "No whole epoch was trained."


def promised(subject: Subject) -> dict[str, Any] | None:
    """What the run promises; less where the model was picked by looking at private text."""
    record = subject.run.guarantee or None
    if record is None or not subject.was_chosen or record.get("epsilon") is None:
        return record
    before = record["because"] if record["standing"] == "as published" else ""
    return record | {"standing": "as published", "because": f"{before} {CHOSEN_BY_TEXT}".strip()}
