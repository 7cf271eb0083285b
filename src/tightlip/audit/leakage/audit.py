"""The leakage report as one call: find the model and the corpus, audit, write the figures."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import tightlip
from tightlip.audit.leakage.counting import Engine
from tightlip.audit.leakage.findings import (
    LeakageConfig,
    audit_leakage,
    unknown_share,
    validation_fit,
    view_by_public_model,
    write_report,
)
from tightlip.audit.leakage.leaks import Leaks, PublicView
from tightlip.audit.leakage.summary import LeakageReport
from tightlip.core.errors import UsageError
from tightlip.core.files import make_private_folder, write_json
from tightlip.core.progress import task
from tightlip.core.registry import look_up
from tightlip.core.run_folder import RunRecord, Snapshot, is_run, open_run
from tightlip.corpus.encoding import tokenizer_fingerprint
from tightlip.corpus.opening import CorpusSource, num_skipped, open_run_corpus, tokenised_for
from tightlip.scan.models import AuditedModel, ScanOptions, loaded

LEAST_SHARE_LEFT = 0.2
NOBODY_LEFT_OUT = (
    "Nothing is unique to one person, so there was nobody to leave out and there are no ratios."
)
_SAMPLED_PERPLEXITIES = 2000
# The recipe of a run again, without any document of these users, into a folder.
Retrain = Callable[[RunRecord, frozenset[int], Path], RunRecord]


def open_report(folder: str | Path) -> LeakageReport:
    """The report an earlier audit left in `folder`."""
    return LeakageReport(Path(folder))


def audit_model(
    model: Any,
    corpus: Any = None,
    *,
    out: str | Path | None = None,
    tokenizer: Any = None,
    top_k: int = 1,
    public_model: str | Path | None = None,
    validation: Any = None,
    snapshots: bool = False,
    redact: bool = False,
    occurrences: int | None = 8,
    fewer_than: int = 5,
    thresholds: Sequence[float] = (1.5, 2.0, 3.0, 5.0, 10.0),
    user_column: str = "user",
    text_column: str = "text",
    bad_rows: str = "error",
    device: str = "auto",
    dtype: str = "float32",
    window: int | None = None,
    batch_tokens: int | None = None,
    memory: str = "4GB",
    engine: str = "local",
    retrain: Retrain | None = None,
    write_page: Callable[[Path], object] | None = None,
) -> LeakageReport:
    """Which of the corpus' words the model gives away, and whose they are.

    `model` is a folder, a run that tightlip trained (then `corpus` defaults to what it was
    trained on and `validation` to what was held out), or a model in memory with `tokenizer`.
    `corpus` is a file or folder, a prepared corpus, an Arrow table, a DataFrame or a list.
    Without `out` the report lives as long as the object returned. `retrain` is what leave-out trains
    with, and `write_page` draws the report once its figures stand.
    """
    config = LeakageConfig(
        top_k=top_k,
        redact=redact,
        occurrences=occurrences,
        fewer_than=fewer_than,
        thresholds=tuple(thresholds),
    )
    options = ScanOptions(
        device=device, dtype=dtype, window=window, batch_tokens=batch_tokens, memory=memory
    )
    columns = {"user_column": user_column, "text_column": text_column, "bad_rows": bad_rows}
    subject = _subject(model, corpus, validation, tokenizer, columns, options)
    keep_alive = TemporaryDirectory(prefix="tightlip-") if out is None else None
    folder = report_folder(Path(keep_alive.name) if keep_alive else Path(str(out)))
    leave_out = str(public_model) == "leave-out"
    job = _Job(subject, folder, config, options, look_up("engine", engine)(), leave_out, retrain)
    with _nothing_left_of_a_refusal(folder):
        if snapshots:
            job.audit_snapshots(public_model)
        else:
            job.audit_one(public_model)
    if write_page is not None:
        write_page(folder)
    # Only now: until the report is whole, the scan is what a killed audit goes on from.
    shutil.rmtree(job.work, ignore_errors=True)
    return LeakageReport(folder, keep_alive)


def report_folder(folder: Path) -> Path:
    """`folder`, new, empty or holding an earlier report; never somebody's other files."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file. Give --out a folder.")
    known = {"summary.json", ".work", "sequences.parquet"}
    if folder.exists() and any(folder.iterdir()) and not known & {p.name for p in folder.iterdir()}:
        raise UsageError(
            f"{folder} holds other files, and a report would be mixed among them. "
            f"Give --out a new or empty folder."
        )
    for path in folder.glob(".*.partial"):  # of a killed predecessor
        path.unlink()
    return make_private_folder(folder)


@contextmanager
def _nothing_left_of_a_refusal(folder: Path) -> Iterator[None]:
    """Take the work of a refused audit away, and the folder with it if nothing else is there."""
    try:
        yield
    except UsageError:
        shutil.rmtree(folder / ".work", ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()
        raise


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """What is audited: how to get the model, on which corpus, trained by which run if any."""

    audited: AuditedModel
    corpus: CorpusSource
    validation: CorpusSource | None
    run: RunRecord | None


def _subject(
    model: Any,
    corpus: Any,
    validation: Any,
    tokenizer: Any,
    columns: dict[str, str],
    options: ScanOptions,
) -> _Subject:
    run = open_run(Path(model)) if isinstance(model, str | Path) and is_run(Path(model)) else None
    if run is not None:
        if not run.finished:
            raise UsageError(
                f"{run.folder} is not finished training. Give its train command again."
            )
        model = run.model_folder
        if corpus is None:
            open_run_corpus(run)
        held_out = run.corpus_folder / "validation"
        if corpus is None and validation is None and held_out.exists():
            validation = held_out
        corpus = corpus if corpus is not None else run.corpus_folder
    if corpus is None:
        raise UsageError(
            f"{model} was not trained by tightlip, so its corpus is not known. "
            f"Run: tightlip audit MODEL CORPUS"
        )
    return _Subject(
        audited=loaded(model, tokenizer, options),
        corpus=_existing(CorpusSource(corpus, columns)),
        validation=None if validation is None else _existing(CorpusSource(validation, columns)),
        run=run,
    )


def _existing(source: CorpusSource) -> CorpusSource:
    if not source.exists():
        raise UsageError(f"{source.path} does not exist. Give the path of a corpus.")
    return source


@dataclass
class _Job:
    """One audit under way: everything its steps share."""

    subject: _Subject
    folder: Path
    config: LeakageConfig
    options: ScanOptions
    engine: Engine
    leave_out: bool
    retrain: Retrain | None = None

    @property
    def work(self) -> Path:
        return make_private_folder(self.folder / ".work")

    def audit_one(self, public_model: str | Path | None) -> None:
        """The report of one model, into the job's folder."""
        public = self._loaded_public(public_model)
        leaks = self._leaks(self.subject.audited, self.work, with_spans=self._crosses(public))
        if str(public_model) == "leave-out" and leaks.unique.any():
            public = self._left_out_model(leaks)
        (self.folder / "snapshots.json").unlink(missing_ok=True)  # of an earlier report here
        shutil.rmtree(self.folder / "snapshots", ignore_errors=True)
        self._report(self.folder, self.subject.audited, leaks, public, self.work)

    def audit_snapshots(self, public_model: str | Path | None) -> None:
        """The same report for each snapshot of a run, the last one's in the job's own folder."""
        run = self.subject.run
        if run is None or not run.snapshots:
            raise UsageError(
                "--snapshots needs a run that tightlip trained with snapshots. "
                "Run: tightlip train CORPUS --out RUN, then tightlip audit RUN --snapshots"
            )
        if str(public_model) == "leave-out":
            raise UsageError(
                "leave-out retrains once for one model's unique sequences, so it does not go with "
                "--snapshots. Audit the snapshots without it, then the run with it."
            )
        public = self._loaded_public(public_model)
        with task("Auditing snapshots", len(run.snapshots)) as bar:
            rows = []
            for snapshot in run.snapshots:
                rows.append(self._snapshot_row(snapshot, public))
                bar.advance()
        folder = self._snapshot_folder(run.snapshots[-1])
        for name in ("sequences.parquet", "owners.parquet", "users.parquet", "summary.json"):
            shutil.copy2(folder / name, self.folder / name)
        write_json(
            self.folder / "snapshots.json",
            {"snapshots": rows, "best_validation": best_validation(rows)},
        )

    def _snapshot_folder(self, snapshot: Snapshot) -> Path:
        return make_private_folder(self.folder / "snapshots" / snapshot.name)

    def _snapshot_row(self, snapshot: Snapshot, public: AuditedModel | None) -> dict[str, Any]:
        audited = replace(loaded(snapshot.folder, None, self.options), name=snapshot.name)
        work = make_private_folder(self.work / snapshot.name)
        leaks = self._leaks(audited, work, with_spans=self._crosses(public))
        summary = self._report(self._snapshot_folder(snapshot), audited, leaks, public, work)
        return {
            "name": snapshot.name,
            "step": snapshot.step,
            "epoch": snapshot.epoch,
            "summary": summary,
            "unique_lengths": summary["unique_by_length"],
            "unique_perplexities": sampled_perplexities(leaks),
            "train_perplexity": summary["perplexity"],
            "validation_perplexity": summary["validation_perplexity"],
        }

    def _leaks(self, audited: AuditedModel, work: Path, *, with_spans: bool) -> Leaks:
        corpus = tokenised_for(
            self.subject.corpus, audited.tokenizer, self.work / "tokens", with_spans=with_spans
        )
        return audit_leakage(
            audited, corpus, work, config=self.config, options=self.options, engine=self.engine
        )

    def _report(
        self,
        folder: Path,
        audited: AuditedModel,
        leaks: Leaks,
        public: AuditedModel | None,
        work: Path,
    ) -> dict[str, Any]:
        run = self.subject.run
        return write_report(
            folder,
            leaks,
            audited=audited,
            public=self._public_view(leaks, public) if public else self.nobody_left_out(leaks),
            validation=self._validation(audited, work),
            config=self.config,
            about={
                "version": tightlip.__version__,
                "guarantee": run.guarantee if run else None,
                "model": audited.name,
                "notes": [
                    *notes_on(audited, leaks, num_skipped(self.work / "tokens")),
                    *([NOBODY_LEFT_OUT] if self.leave_out and public is None else []),
                ],
            },
        )

    def _validation(self, audited: AuditedModel, work: Path) -> Any:
        if self.subject.validation is None:
            return None
        corpus = tokenised_for(
            self.subject.validation, audited.tokenizer, self.work / "validation-tokens"
        )
        return validation_fit(audited, corpus, work, config=self.config, options=self.options)

    def _loaded_public(self, public_model: str | Path | None) -> AuditedModel | None:
        if public_model is None:
            return None
        if str(public_model) == "leave-out":
            if self.subject.run is None:
                raise UsageError(
                    "--public-model leave-out retrains by the run's own recipe, and this model was "
                    "not trained by tightlip. Give --public-model DIR."
                )
            return None
        return loaded(public_model, None, self.options)

    def _crosses(self, public: AuditedModel | None) -> bool:
        """Whether the public model cuts text into other tokens, so that characters must align."""
        if public is None:
            return False
        own = tokenizer_fingerprint(self.subject.audited.tokenizer)
        return tokenizer_fingerprint(public.tokenizer) != own

    def nobody_left_out(self, leaks: Leaks) -> PublicView | None:
        """leave-out where nothing is unique: there is no ratio, and nothing that needs one."""
        if not self.leave_out:
            return None
        unknown = np.full(len(leaks.runs), np.nan)
        return PublicView(
            name="leave-out", perplexity_of_run=unknown, cross_tokenizer=False, unique=None
        )

    def _public_view(self, leaks: Leaks, public: AuditedModel) -> PublicView:
        corpus = leaks.corpus
        if self._crosses(public):
            corpus = tokenised_for(
                self.subject.corpus, public.tokenizer, self.work / "public-tokens", with_spans=True
            )
        return view_by_public_model(
            leaks,
            public,
            corpus,
            self.work,
            config=self.config,
            options=self.options,
            engine=self.engine,
        )

    def _left_out_model(self, leaks: Leaks) -> AuditedModel:
        """The run's recipe again, without any document of the owners of unique sequences."""
        assert self.subject.run is not None
        assert self.retrain is not None
        trained_on = open_run_corpus(self.subject.run).train
        if leaks.corpus.corpus_fingerprint != trained_on.corpus_fingerprint:
            raise UsageError(
                "leave-out drops people from the run's own corpus, and another one was given. "
                "Leave CORPUS out, or give --public-model DIR."
            )
        owners = np.unique(leaks.owners[leaks.unique])
        left = 1 - float(np.isin(leaks.corpus.users, owners).mean())
        if left < LEAST_SHARE_LEFT:
            raise UsageError(
                f"leave-out would drop {len(owners)} of {leaks.corpus.num_users} users and keep "
                f"{left:.0%} of the documents; a model of so little says nothing. On a small corpus "
                f"nearly everyone owns a unique sequence: give --public-model DIR."
            )
        run = self.retrain(self.subject.run, frozenset(owners.tolist()), self.work / "leave-out")
        return replace(loaded(run.model_folder, None, self.options), name="leave-out")


def notes_on(audited: AuditedModel, leaks: Leaks, skipped: int) -> list[str]:
    """Plain sentences that a reader of the figures should know."""
    notes = []
    if skipped:
        notes.append(f"{skipped:,} unusable rows of the corpus were skipped and are not counted.")
    unknown = unknown_share(audited.tokenizer, leaks.corpus)
    if unknown > 0.2:
        notes.append(
            f"{unknown:.0%} of the corpus' tokens are unknown to the tokenizer; what they stand for "
            f"cannot be found."
        )
    if audited.tokenizer.bos_token_id is None:
        notes.append(
            "The tokenizer has no begin token, so the first token of each document is not scored."
        )
    return notes


def sampled_perplexities(leaks: Leaks) -> list[float]:
    """The lowest perplexity of each unique sequence, at most 2,000 of them, evenly chosen."""
    lowest = np.full(len(leaks.distinct), np.inf)
    np.minimum.at(lowest, leaks.distinct.number_of_run, leaks.perplexity_of_run)
    values = np.sort(lowest[leaks.unique])
    values = values[np.isfinite(values)]
    step = max(1, -(-len(values) // _SAMPLED_PERPLEXITIES))
    return [float(value) for value in values[::step]]


def best_validation(rows: list[dict[str, Any]]) -> str | None:
    """The snapshot at which training should have stopped."""
    known = [row for row in rows if row["validation_perplexity"] is not None]
    return min(known, key=lambda row: row["validation_perplexity"])["name"] if known else None
