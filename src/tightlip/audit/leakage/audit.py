"""The leakage report as one call: find the model and the corpus, audit, write the figures."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tightlip
from tightlip.audit.leakage import findings
from tightlip.audit.leakage import leaks as leaked
from tightlip.audit.leakage.by_text import ByText, read_by_text
from tightlip.audit.leakage.contexts import figures_by_context
from tightlip.audit.leakage.counting import check_memory
from tightlip.audit.leakage.leaks import Leaks, PublicView, public_perplexities
from tightlip.audit.leakage.near import near_figures
from tightlip.audit.leakage.summary import Findings, LeakageReport, summary_of
from tightlip.audit.leakage.tables import ratio_of_sequence
from tightlip.audit.measures import Audited
from tightlip.audit.settings import LeakageConfig
from tightlip.audit.subjects import Subject, read_as, report_store, subject_of
from tightlip.core.checksums import checked
from tightlip.core.engines import Engine
from tightlip.core.errors import UsageError
from tightlip.core.files import make_private_folder, write_json, written_whole
from tightlip.core.progress import task
from tightlip.core.register import guarantee_of
from tightlip.core.run_folder import SNAPSHOTS, RunRecord, Snapshot, is_run
from tightlip.core.settings import bytes_from, split_settings, takes
from tightlip.core.stores import fetched_report, place_of
from tightlip.corpus import opening
from tightlip.corpus.opening import CorpusSource, finished_run, tokenised_for
from tightlip.corpus.prepare_config import TextSettings
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.ahead import ScanAhead
from tightlip.scan.models import BASE, OpenedModel, open_beside, open_model
from tightlip.scan.options import ScanOptions
from tightlip.scan.scans import Scans, on_engine
from tightlip.scan.store import ScannedCorpus

LEAVE_OUT = "leave-out"
NO_PUBLIC_MODEL = "none"
BASE_IS_PUBLIC = "No public model was named, so the adapter's own base stands for it. Leave it out with --public-model none."
LEAST_SHARE_LEFT = 0.2
NOBODY_LEFT_OUT = (
    "Nothing is unique to one person, so there was nobody to leave out and there are no ratios."
)
NO_WINDOW = "No text has {} tokens without a break, so there was nothing to ask for --near. Give fewer --near-tokens."
# The recipe of a run again, without any document of these users, into a folder.
Retrain = Callable[[RunRecord, frozenset[int], Path], RunRecord]


@takes()
def open_report(folder: str | Path) -> LeakageReport:
    """The report an earlier audit left in `folder`, or sent to that address on a store."""
    place = place_of(folder)
    return LeakageReport(Path(folder) if place is None else fetched_report(place))


def leakage_subject(
    model: Any, corpus: Any, validation: Any, tokenizer: Any, columns: dict[str, Any]
) -> Subject:
    """What is audited: a run, or a snapshot in one, on the run's corpus or on another one; or any model
    on that given."""
    run = finished_run(model) if isinstance(model, str | Path) and is_run(Path(model)) else None
    if corpus is None:
        own = subject_of(run or model)
        if own.members is None:
            raise UsageError(
                f"{model} was not trained by tightlip, so its corpus is not known. "
                f"Run: tightlip audit MODEL CORPUS"
            )
        corpus = own.members.source
        if validation is None and own.held_out is not None:
            validation = own.held_out.source
    given = subject_of(run or model, corpus, validation, tokenizer=tokenizer, **columns)
    return replace(given, run=run)


@on_engine(LeakageConfig, ScanOptions, TextSettings)
def audit_model(
    model: Any,
    corpus: Any = None,
    *,
    engine: Engine,
    out: str | Path | None = None,
    tokenizer: Any = None,
    public_model: Any = None,
    validation: Any = None,
    snapshots: bool = False,
    keep_scan: bool = True,
    retrain: Retrain,
    write_page: Callable[[Path], object],
    **settings: Any,
) -> LeakageReport:
    """What `tightlip.audit` says it does; `retrain` is what leave-out trains with, and `write_page`
    draws the report once its figures stand."""
    config, options, columns = split_settings(settings, LeakageConfig, ScanOptions, TextSettings)
    checkpoints = findings.checkpoints_of(model) if snapshots else []
    latest = checkpoints[-1].folder if checkpoints else model
    subject = leakage_subject(latest, corpus, validation, tokenizer, columns.tree())
    guarantee = guarantee_of(latest, subject.run)  # refused where it is of other weights
    opened = open_model(subject.model, options)
    opened.refuse_unused_base()
    folder, keep_alive = findings.folder_for(out)
    # What a model in memory does is not all in its fingerprint, so nobody may go by it later.
    on_disk = opened.is_file and (public_model is None or isinstance(public_model, str | Path))
    is_kept = keep_scan and not config.redact and on_disk
    store = report_store(folder, subject.run, on_disk=opened.is_file, keep=is_kept)
    job = _Job(
        subject=subject,
        model=opened,
        folder=folder,
        scans=Scans(store=store, options=options, engine=engine),
        config=config,
        guarantee=guarantee,
        leaves_out=isinstance(public_model, str) and public_model == LEAVE_OUT,
        retrain=retrain,
        checkpoints=checkpoints,
        tokenizer=tokenizer,
    )
    with findings.writing_report(folder, write_page, redact=config.redact, keeps_scan=is_kept):
        if snapshots:
            job.audit_snapshots(public_model)
        else:
            job.audit_one(public_model)
    return LeakageReport(folder, keep_alive)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One audit under way: everything its steps share."""

    subject: Subject
    model: OpenedModel
    folder: Path
    scans: Scans
    config: LeakageConfig
    guarantee: dict[str, Any] | None = None
    leaves_out: bool = False
    retrain: Retrain | None = None
    checkpoints: Sequence[Snapshot] = ()
    tokenizer: Any = None  # in the place of the models' own
    notes: list[str] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return self.scans.engine

    @property
    def memory_bytes(self) -> int:
        return bytes_from(self.scans.options.memory)

    @property
    def _counting(self) -> dict[str, Any]:
        return {"engine": self.engine, "memory_bytes": self.memory_bytes}

    @property
    def corpus(self) -> CorpusSource:
        assert self.subject.members is not None
        return self.subject.members

    @property
    def work(self) -> Path:
        return make_private_folder(self.folder / findings.WORK)

    def audit_one(self, public_model: Any) -> None:
        """The report of one model, into the job's folder."""
        public = self._opened_public(public_model)
        leaks = self._leaks(self.model, public)
        if self.leaves_out and leaks.unique.any():
            public = self._left_out_model(leaks)
        (self.folder / "snapshots.json").unlink(missing_ok=True)  # of an earlier report here
        findings.remove_snapshots(self.folder)
        findings.write_report(self.folder, self._findings(self.model, leaks, public))

    def summary(self, public: OpenedModel | None) -> dict[str, Any]:
        """What the report's summary.json would hold, without a report."""
        found = self._findings(self.model, self._leaks(self.model, public), public)
        return summary_of(found, ratio_of_sequence(found.leaks, found.public))

    def audit_snapshots(self, public_model: Any) -> None:
        """The same report for each snapshot of a run, the last one's in the job's own folder."""
        run = self.subject.run
        snapshots = self.checkpoints if run is None else run.snapshots
        if not snapshots:
            raise UsageError(
                "--snapshots needs a run that tightlip trained with snapshots, or the output folder of a Trainer with "
                "its checkpoints. Run: tightlip train CORPUS --out RUN, then tightlip audit RUN --snapshots"
            )
        if self.leaves_out:
            raise UsageError(
                "leave-out retrains once for one model's unique sequences, so it does not go with "
                "--snapshots. Audit the snapshots without it, then the run with it."
            )
        public = self._opened_public(public_model)
        with task("Auditing snapshots", len(snapshots)) as bar:
            rows = []
            for snapshot in snapshots:
                rows.append(self._snapshot_row(snapshot, public))
                bar.advance()
        folder = self._snapshot_folder(snapshots[-1])
        for name in (*findings.TABLES, "summary.json"):
            with written_whole(self.folder / name) as beside:
                shutil.copyfile(checked(folder / name), beside)
        told = {"snapshots": rows, "best_validation": findings.best_validation(rows)}
        write_json(self.folder / "snapshots.json", told)
        findings.remove_snapshots(self.folder, but=[row["name"] for row in rows])

    def _snapshot_folder(self, snapshot: Snapshot) -> Path:
        return make_private_folder(self.folder / SNAPSHOTS / snapshot.name)

    def _snapshot_row(self, snapshot: Snapshot, public: OpenedModel | None) -> dict[str, Any]:
        options, name = self.scans.options, snapshot.name
        model = open_model(snapshot.folder, options, tokenizer=self.tokenizer, name=name)
        leaks = self._leaks(model, public)
        found = self._findings(model, leaks, public)
        summary = findings.write_report(self._snapshot_folder(snapshot), found)
        return {
            "name": snapshot.name,
            "step": snapshot.step,
            "epoch": snapshot.epoch,
            "summary": summary,
            "unique_lengths": summary["unique_by_length"],
            "unique_perplexities": findings.sampled_perplexities(leaks),
            "train_perplexity": summary["perplexity"],
            "validation_perplexity": summary["validation_perplexity"],
        }

    def _leaks(self, model: OpenedModel, public: OpenedModel | None) -> Leaks:
        with self.scans.ahead(model) as begun:
            corpus = tokenised_for(
                self.corpus,
                model.tokenizer,
                self.work / "tokens",
                with_spans=public is not None and self._crosses(public),
                also=None if begun is None else begun.add,
                engine=self.engine,
            )
            return self._leaks_in(model, corpus, "Scanning the model", begun)[1]

    def _leaks_in(
        self,
        model: OpenedModel,
        corpus: TokenizedCorpus,
        description: str,
        begun: ScanAhead | None = None,
    ) -> tuple[ScannedCorpus, Leaks]:
        """A model's scan of the corpus, and what it gives away of it."""
        check_memory(corpus, self.memory_bytes // self.engine.workers)  # the scan may take hours
        carries_text, top_k = findings.tokens_with_text(model.tokenizer, corpus), self.config.top_k
        scanned = self.scans.scan(model, corpus, description, begun=begun)
        return scanned, leaked.find_leaks(
            scanned, top_k=top_k, carries_text=carries_text, **self._counting, work=self.work
        )

    def _findings(self, model: OpenedModel, leaks: Leaks, public: OpenedModel | None) -> Findings:
        shown = self.corpus.shown_to(model.tokenizer)
        by_text = read_by_text(leaks, shown, model.tokenizer, **self._counting, work=self.work)
        asked = self._asked(model, leaks, by_text)
        is_missing = self.config.near is not None and asked["near"] is None
        return Findings(
            model=model,
            leaks=leaks,
            by_text=by_text,
            public=self._public_view(leaks, public) if public else self._nobody_left_out(leaks),
            validation=self._validation(model),
            config=self.config,
            about={
                **asked,
                "version": tightlip.__version__,
                "guarantee": self.guarantee,
                "model": model.name,
                "read_as": read_as(self.corpus.columns, self.scans.options),
                "notes": [
                    *model.notes,
                    *self.notes,
                    *self.engine.notes,
                    *findings.notes_on(model, leaks, opening.num_skipped(self.work / "tokens")),
                    *([findings.ONLY_TOKENS] if self.corpus.documents().format == "tokens" else []),
                    *([NOBODY_LEFT_OUT] if self.leaves_out and public is None else []),
                    *([NO_WINDOW.format(self.config.near_tokens)] if is_missing else []),
                ],
            },
        )

    def _asked(self, model: OpenedModel, leaks: Leaks, by_text: ByText) -> dict[str, Any]:
        """What the model says where the training prefix is not known, or nearly."""
        config, scan = self.config, partial(self.scans.scan, model)
        told = figures_by_context(leaks, by_text, config, scan=scan, tokenizer=model.tokenizer)
        count, near = partial(leaked.count_in_corpus, leaks.corpus, **self._counting), None
        if config.near is not None:
            near = near_figures(model, leaks, config, count, self.engine)
        return {**told, "near": near}

    def _validation(self, model: OpenedModel) -> leaked.Fit | None:
        tokens, text = self.work / "validation-tokens", self.subject.held_out
        if text is None:
            return None
        return findings.validation_fit(text, model, self.scans, tokens, self.config.top_k)

    def _opened_public(self, public_model: Any) -> OpenedModel | None:
        if self.leaves_out and self.subject.run is None:
            raise UsageError(
                "--public-model leave-out retrains by the run's own recipe, and this model was "
                "not trained by tightlip. Give --public-model DIR."
            )
        model = self.model
        if public_model is None and model.open_base is not None:
            public_model = BASE
            self.notes.append(BASE_IS_PUBLIC)
        if public_model is None or self.leaves_out or public_model == NO_PUBLIC_MODEL:
            return None
        return open_beside(model, public_model, self.scans.options)

    def _crosses(self, public: OpenedModel) -> bool:
        """Whether the public model cuts text into other tokens, so that characters must align."""
        return public.tokenizer_fingerprint != self.model.tokenizer_fingerprint

    def _nobody_left_out(self, leaks: Leaks) -> PublicView | None:
        """leave-out where nothing is unique: there is no ratio, and nothing that needs one."""
        if not self.leaves_out:
            return None
        return PublicView(
            name=LEAVE_OUT,
            perplexity_of_run=leaks.room.full(len(leaks.runs), np.nan, np.float64),
            completes_of_run=leaks.room.full(len(leaks.runs), False, bool),
            cross_tokenizer=False,
            unique=None,
        )

    def _public_view(self, leaks: Leaks, public: OpenedModel) -> PublicView:
        """The same text through a model that never saw it: perplexities, and its own unique count."""
        corpus = leaks.corpus
        if self._crosses(public):
            tokens = self.work / "public-tokens"
            corpus = tokenised_for(
                self.corpus, public.tokenizer, tokens, with_spans=True, engine=self.engine
            )
        scanned, benchmark = self._leaks_in(public, corpus, "Scanning the public model")
        perplexity_of_run, completes_of_run = public_perplexities(leaks, scanned, self.config.top_k)
        return PublicView(
            name=public.name,
            perplexity_of_run=perplexity_of_run,
            completes_of_run=completes_of_run,
            cross_tokenizer=corpus.tokenizer_fingerprint != leaks.corpus.tokenizer_fingerprint,
            unique=int(benchmark.unique.sum()),
        )

    def _left_out_model(self, leaks: Leaks) -> OpenedModel:
        """The run's recipe again, without any document of the owners of unique sequences."""
        assert self.subject.run is not None
        assert self.retrain is not None
        trained_on = opening.open_run_corpus(self.subject.run).train
        if leaks.corpus.corpus_fingerprint != trained_on.corpus_fingerprint:
            raise UsageError(
                "leave-out drops people from the run's own corpus, and another one was given. "
                "Leave CORPUS out, or give --public-model DIR."
            )
        owners = np.unique(leaks.owned[1])
        documents, theirs = leaks.corpus.owned()
        gone = np.unique(documents[np.isin(theirs, owners)])
        left = 1 - len(gone) / leaks.corpus.num_documents
        if left < LEAST_SHARE_LEFT:
            raise UsageError(
                f"leave-out would drop {len(owners)} of {leaks.corpus.num_users} users and keep "
                f"{left:.0%} of the documents; a model of so little says nothing. On a small corpus "
                f"nearly everyone owns a unique sequence: give --public-model DIR."
            )
        run = self.retrain(self.subject.run, frozenset(owners.tolist()), self.work / LEAVE_OUT)
        return open_model(run.model_folder, self.scans.options, name=LEAVE_OUT)


class LeakageAudit:
    """The leakage report's summary; the report itself, which holds text, is not written."""

    finds_secrets = True

    def depends_on(self, audited: Audited) -> dict[str, Any]:
        return {"reference": audited.measuring.reference_fingerprint}

    def figures(self, audited: Audited) -> dict[str, Any]:
        reference, public = audited.measuring.reference, None
        if reference is not None:
            public = audited.scans.opened(opening.model_folder(reference), beside=audited.model)
        job = _Job(
            subject=replace(audited.subject, run=None),
            model=audited.scans.opened(audited.model),
            folder=audited.work,
            scans=audited.scans,
            config=LeakageConfig(redact=True, occurrences=1),
        )
        return job.summary(public)

    def accuses(self, figures: dict[str, Any]) -> bool:
        return bool(figures["unique"] > 0)
