"""`tightlip compare` as one call: measure what is missing of each model, line them up."""

import shutil
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tightlip.audit.canaries.exposure import missing_copies
from tightlip.audit.compared import NOT_KNOWN, Matching, Row, RunMeasures, baseline_place, compared
from tightlip.audit.leakage.findings import WORK
from tightlip.audit.leakage.summary import LeakageReport
from tightlip.audit.measures import Key, Measuring, ModelMeasures, measured_or_reason, open_key
from tightlip.audit.settings import LeakageConfig
from tightlip.audit.subjects import Subject, is_a_run, of_run
from tightlip.core.devices import usable_device
from tightlip.core.errors import UsageError
from tightlip.core.progress import Task, task
from tightlip.core.register import as_it_stands, guarantee_of
from tightlip.core.resampling import ResamplingSettings
from tightlip.core.run_folder import RunRecord
from tightlip.corpus.canaries import exposed_above_bits, read_canary_key
from tightlip.corpus.opening import CorpusSource, finished_run, model_folder
from tightlip.scan.models import OpenedModel, open_other
from tightlip.scan.options import ScanOptions
from tightlip.scan.scans import AUDIT, Scans, claimed_to_write, run_store
from tightlip.scan.store import MOMENTS, PLAIN

STEPS_PER_RUN = 4
NOTHING_HELD_OUT = "There is no held-out text. Prepare with --holdout 0.2, or give --held-out FILE."
NOT_TRAINED_HERE = "It was not trained by tightlip."
ONLY_A_REPORT = "A report does not tell: give the model itself in its place."
NO_KEY = "No key of canaries was given (--key FILE)."
NO_REFERENCE = "No reference model was given (--reference DIR)."
PRIVATE_TIME = "A private run does not tell: time shows how much text was drawn."
CHOSEN_BY_THIS = "They were chosen with this very run, and the choice would flatter it."
CHOSEN_BY_TEXT = (
    "The snapshot was chosen by its perplexity on held-out text, which this ε does not cover."
)

# Runs and other models with their text, and finished reports.
Given = Subject | LeakageReport
# Fields of RunMeasures, and of each figure that is None the reason.
Measured = tuple[dict[str, Any], dict[str, str]]


def compare_models(
    models: Sequence[Any],
    matching: Matching,
    resampling: ResamplingSettings,
    *,
    folder: Path,
    corpus: Any = None,
    held_out: Any = None,
    columns: dict[str, Any],
    key: str | Path | Sequence[str | Path] | None,
    reference: str | Path | None,
    device: str,
    keep_scan: bool,
    **how: Any,
) -> list[Row]:
    """A row for each run, model or report; what is not yet measured is measured now and kept, with
    the run or else in `folder`.

    `columns` are TextSettings, and `how` are ModelSettings.

    Holds:
        once: each model is loaded once at most, and reads each text once.
    """
    given = _opened(models, corpus, held_out, columns)
    options = ScanOptions(device=usable_device(device), **how)
    measuring = _measuring(key, reference, options, resampling)
    with ExitStack() as stack:
        for one in given:
            if isinstance(one, Subject) and one.run is not None:
                stack.enter_context(claimed_to_write(one.run.folder))
        scans = _scans(given, folder, options, stack, keep=keep_scan)
        _refuse_what_saw_the_text(measuring.reference, given, scans, folder)
        open_one = partial(_compared, folder, measuring, matching)
        measured = _measured(given, scans, open_one)
        shutil.rmtree(folder / WORK, ignore_errors=True)
    return compared(measured, matching)


def _measured(
    given: Sequence[Given], scans: Sequence[Scans], open_one: Callable[..., Any]
) -> list[RunMeasures]:
    asked = [*zip(given, labels([place_of(one) for one in given]), scans, strict=True)]
    place = baseline_place([isinstance(one, Subject) and is_mitigated(one) for one in given])
    base = open_one(*asked[place])
    measures = []
    with task("Comparing", STEPS_PER_RUN * len(given)) as bar:
        for number in range(len(given)):
            one = base if number == place else open_one(*asked[number])
            if isinstance(one, RunMeasures):
                measures.append(one)
                bar.advance(STEPS_PER_RUN)
                continue
            measures.append(_gathered(one, base, bar))
            if one is not base and one.measures is not None:
                one.measures.release()  # the baseline's is needed to the end
    return measures


def _scans(
    given: Sequence[Given], folder: Path, options: ScanOptions, stack: ExitStack, *, keep: bool
) -> list[Scans]:
    """Each run's own scans, and those in `folder` of other models; what one holds the others read."""
    runs = [one.run if isinstance(one, Subject) else None for one in given]
    places = [folder if run is None else run.folder for run in runs]
    beside = [each for place in dict.fromkeys(places) for each in (place, place / AUDIT)]
    models: dict[tuple[Path | int, bool], OpenedModel] = {}
    opened = partial(run_store, beside=beside, keep=keep)
    stores = {place: stack.enter_context(opened(place)) for place in places}
    # Membership reads the moments too, and whoever reads without them reads the same scan.
    has_held_out = any(isinstance(one, Subject) and one.held_out is not None for one in given)
    scorer = MOMENTS if has_held_out else PLAIN
    scans_in = partial(Scans, options=options, models=models, scorer=scorer)
    return [scans_in(store=stores[place]) for place in places]


def _opened(
    models: Sequence[Any], corpus: Any, held_out: Any, columns: dict[str, Any]
) -> list[Given]:
    """Runs with their own text, reports, and other models with the text given or the first run's."""
    places = [
        one.folder if isinstance(one, RunRecord | LeakageReport) else _path(one) for one in models
    ]
    runs = [of_run(finished_run(one)) if is_a_run(one) else None for one in models]
    if len({place.resolve() for place in places}) < max(2, len(places)):
        what = "One model was given" if len(places) == 1 else "The same model was given twice"
        raise UsageError(
            f"{what if places else 'No model was given'}, and a comparison needs different ones. "
            "Run: tightlip compare MODEL MODEL..."
        )
    first = next((run for run in runs if run is not None), None)
    if corpus is None and first is not None:
        texts = {"members": first.members, "held_out": first.held_out}
    else:
        texts = {
            name: None if text is None else CorpusSource(text, columns).existing()
            for name, text in (("members", corpus), ("held_out", held_out))
        }
    each = zip(runs, models, places, strict=True)
    return [_other(one, place, texts) if run is None else run for run, one, place in each]


def _path(one: Any) -> Path:
    if not isinstance(one, str | Path):
        raise UsageError(
            f"A {type(one).__name__} in memory cannot be compared: what is measured is kept by its files. Save it first."
        )
    return Path(one)


def _other(one: Any, place: Path, texts: dict[str, CorpusSource | None]) -> Given:
    if isinstance(one, LeakageReport):
        return one
    if (place / "summary.json").is_file():
        return LeakageReport(place)
    if texts["members"] is None:
        raise UsageError(
            f"{place} was not trained by tightlip, so what it was trained on is not known. Give --corpus FILE, and "
            "--held-out FILE for perplexity and membership."
        )
    guarantee_of(place, None)  # refused before anything is measured
    return Subject(model=place, members=texts["members"], held_out=texts["held_out"])


def place_of(one: Given) -> Path:
    if isinstance(one, LeakageReport):
        return one.folder
    return Path(one.model) if one.run is None else one.run.folder


def is_mitigated(one: Subject) -> bool:
    return one.run is not None and one.run.is_mitigated


def _measuring(
    key: Any, reference: str | Path | None, options: ScanOptions, resampling: ResamplingSettings
) -> Measuring:
    """How to measure; whatever cannot work is refused here, before the long work."""
    paths = [] if key is None else [key] if isinstance(key, str | Path) else list(key)
    given = None if reference is None else Path(reference)
    opened = None if given is None else open_other(model_folder(given), options)
    return Measuring(
        keys=tuple(open_key(Path(path)) for path in paths),
        reference=given,
        # What it makes of a text hangs on what stands before it, too.
        reference_fingerprint=None if opened is None else f"{opened.files} after {opened.begin_id}",
        seed=resampling.seed,
        num_bootstraps=resampling.num_bootstraps,
    )


def _refuse_what_saw_the_text(
    reference: Path | None, given: Sequence[Given], scans: Sequence[Scans], folder: Path
) -> None:
    """Before anything kept is looked at: it may have been measured when nobody could tell."""
    if reference is None:
        return
    for one, of in zip(given, scans, strict=True):
        if isinstance(one, Subject):
            parts = [part for part in ("members", "held_out") if getattr(one, part) is not None]
            corpora = {part: one.tokens(part, of, folder / WORK) for part in parts}
            one.check_reference(reference, **corpora)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run or a model, and of a run the model that is compared: none where no snapshot is good enough."""

    subject: Subject
    name: str
    model: str | None
    measures: ModelMeasures | None
    texts: dict[str, str | None]
    best_perplexity: float | None = None
    was_chosen: bool = False  # by looking at held-out text


def _compared(
    folder: Path, measuring: Measuring, matching: Matching, one: Given, name: str, scans: Scans
) -> Compared | RunMeasures:
    """The last model, or the first on its way whose held-out perplexity is as low as asked; or what
    a report tells."""
    if isinstance(one, LeakageReport):
        return reported(one, name)
    folder = folder if one.run is None else one.run.folder

    made = partial(Compared, subject=one, name=name)
    if matching.at_perplexity is None:
        measures = ModelMeasures(one, folder, measuring, scans)
        return made(model="final", measures=measures, texts=measures.texts)
    best = None
    for model, place, known in _on_the_way(one):
        measures = ModelMeasures(replace(one, model=place), folder, measuring, scans)
        perplexity = known
        if known is None and one.held_out is not None:
            perplexity = measures.perplexity()  # a private run does not publish it
        if perplexity is not None and perplexity <= matching.at_perplexity:
            return made(model=model, measures=measures, texts=measures.texts, was_chosen=True)
        measures.release()
        best = min((value for value in (best, perplexity) if value is not None), default=None)
    return made(model=None, measures=None, texts=measures.texts, best_perplexity=best)


def reported(report: LeakageReport, name: str) -> RunMeasures:
    """What a report tells of its model: what leaked, and nothing that takes the model itself."""
    summary = report.summary
    if summary["top_k"] != LeakageConfig.top_k:
        raise UsageError(
            f"{report.folder} counts what a deployment with {summary['top_k']} suggestions gives away, and a comparison what one "
            "with a single suggestion does. Audit again with --top-k 1."
        )
    figures = ("exposure", "tab", "gap, low-5 to top-5", "membership AUC", "seconds per epoch")
    not_known = dict.fromkeys(figures, ONLY_A_REPORT)
    if summary["leakage_epsilon"] is None:
        not_known["leakage ε_l"] = "The report was made without a public model."
    if summary["validation_perplexity"] is None:
        not_known["perplexity"] = "The report was made without held-out text."
    return RunMeasures(
        name=name,
        mitigation=NOT_KNOWN,
        is_mitigated=False,
        is_private=False,
        model="report",
        train_text=None if (text := summary["corpus_fingerprint"]) is None else f"{text} without 0",
        held_out_text=summary.get("validation_fingerprint"),
        tokenizer=f"{summary.get('tokenizer_fingerprint')} after {summary.get('begin')}",
        guarantee=as_it_stands(summary.get("guarantee") or {}) or None,
        leakage=summary,
        not_known=not_known,
    )


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


def _on_the_way(subject: Subject) -> list[tuple[str, Path, float | None]]:
    """Every model of a run in training order, with its perplexity where the metrics have it."""
    if (run := subject.run) is None:
        return [("final", Path(subject.model), None)]
    known = {line.get("snapshot"): line.get("validation_perplexity") for line in run.metrics}
    last = run.metrics[-1] if run.metrics else {}
    snapshots = [(one.name, one.folder, known[one.name]) for one in run.snapshots]
    return [*snapshots, ("final", run.model_folder, last.get("validation_perplexity"))]


def _gathered(one: Compared, base: Compared | RunMeasures, bar: Task) -> RunMeasures:
    bar.note(one.name)
    run = one.subject.run
    seconds, why = (None, NOT_TRAINED_HERE) if run is None else seconds_per_epoch(run)
    figures: dict[str, Any] = {}
    not_known = {} if why is None else {"seconds per epoch": why}
    if one.measures is None:
        bar.advance(STEPS_PER_RUN)
        if one.texts["validation_fingerprint"] is None:
            not_known["perplexity"] = NOTHING_HELD_OUT
    else:
        for measure in (_leakage, _exposures, _groups, _membership):
            measured, reasons = measure(one.name, one.measures, base)
            figures |= measured
            not_known |= reasons
            bar.advance()
    left_out = 0 if run is None else run.config["corpus"].get("num_users_left_out", 0)
    return RunMeasures(
        name=one.name,
        mitigation=NOT_KNOWN if run is None else run.mitigation,
        is_mitigated=is_mitigated(one.subject),
        is_private=run is not None and run.is_private,
        model=one.model,
        train_text=f"{one.texts['corpus_fingerprint']} without {left_out}",
        held_out_text=one.texts["validation_fingerprint"],
        tokenizer=str(one.texts["tokenizer_fingerprint"]),
        guarantee=promised(one),
        best_perplexity=one.best_perplexity,
        seconds_per_epoch=seconds,
        not_known=not_known,
        **figures,
    )


def _leakage(name: str, of: ModelMeasures, base: Compared | RunMeasures) -> Measured:
    names = ("unique sequences", "leakage ε_l")
    leakage, reasons = measured_or_reason("The leakage report", name, of.leakage, *names)
    if leakage is not None and leakage["leakage_epsilon"] is None:
        reasons["leakage ε_l"] = "No unique sequence has a finite ratio."
        if of.audited.measuring.reference is None:
            reasons["leakage ε_l"] = NO_REFERENCE
    return {"leakage": leakage}, reasons


def _exposures(name: str, of: ModelMeasures, base: Compared | RunMeasures) -> Measured:
    if not (keys := of.audited.measuring.keys):
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
        "canary_note": missing_copies(
            of.audited.subject.run, [read_canary_key(key.path) for key in keys]
        ),
    }, reasons


def _real(name: str, of: ModelMeasures, key: Key) -> tuple[Any, dict[str, str]]:
    """The real canaries in a key, or why they are not measured."""
    if key.planted_texts:
        return None, {}
    if of.fingerprint in key.chosen_by:
        return None, {"tab of real canaries": CHOSEN_BY_THIS}
    return measured_or_reason("Tab", name, lambda: of.real(key), "tab of real canaries")


def _groups(name: str, of: ModelMeasures, base: Compared | RunMeasures) -> Measured:
    gap = "gap, low-5 to top-5"
    if of.audited.subject.held_out is None:
        return {}, dict.fromkeys(("perplexity", gap), NOTHING_HELD_OUT)
    against = base.measures if isinstance(base, Compared) else None
    is_base = of is against
    same = ("validation_fingerprint", "tokenizer_fingerprint")
    if is_base or against is None or any(of.texts[name] != against.texts[name] for name in same):
        against = None
    groups, reasons = measured_or_reason("Groups", name, lambda: of.groups(against), gap)
    if not reasons and not is_base and groups.get("gap") is None:
        reasons[gap] = (
            f"It needs the same held-out text and tokenizer as {base.name}, and no report in its place."
            if against is None
            else "Too few users have held-out text, or all have equally much of it."
        )
    return {"groups": groups}, reasons


def _membership(name: str, of: ModelMeasures, base: Compared | RunMeasures) -> Measured:
    if of.audited.subject.held_out is None:
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


def promised(one: Compared) -> dict[str, Any] | None:
    """What a run promises; less where the model was picked by looking at private text."""
    record = guarantee_of(one.subject.model, one.subject.run)
    if record is None or not one.was_chosen or record.get("epsilon") is None:
        return record
    before = record["because"] if record["standing"] == "as published" else ""
    return record | {"standing": "as published", "because": f"{before} {CHOSEN_BY_TEXT}".strip()}
