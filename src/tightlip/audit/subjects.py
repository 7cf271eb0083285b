"""A model with the text that it learnt and text that it never saw: what every measure is given."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tightlip
from tightlip.audit.leakage.findings import WORK, report_folder
from tightlip.core.engines import Engine, local_engine
from tightlip.core.errors import UsageError
from tightlip.core.files import claimed
from tightlip.core.run_folder import RunRecord, is_run, run_around
from tightlip.corpus import opening
from tightlip.corpus.history import origin_of
from tightlip.corpus.opening import CorpusSource, check_reference, finished_run, tokenised_for
from tightlip.corpus.prepare import PreparedCorpus, is_prepared, open_prepared
from tightlip.corpus.prepare_config import TextSettings
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.models import OpenedModel, means_base
from tightlip.scan.options import ScanOptions
from tightlip.scan.scans import AUDIT, Scans, scans_of_run
from tightlip.scan.store import SCAN, ScanStore, scan_store


@dataclass(frozen=True, kw_only=True)
class Subject:
    """`model` is a folder, or a (model, tokenizer) pair in memory.

    `members` were trained on and `held_out` was not, None where nobody said; a run says both.
    """

    model: Any
    members: CorpusSource | None = None
    held_out: CorpusSource | None = None
    run: RunRecord | None = None

    @property
    def is_file(self) -> bool:
        return isinstance(self.model, str | Path)

    @property
    def name(self) -> str:
        if self.run is not None:
            return str(self.run.folder)
        return str(self.model) if self.is_file else "The model in memory"

    @property
    def prepared(self) -> PreparedCorpus | None:
        """The prepared corpus whose training part the members are."""
        path = None if self.members is None else self.members.path
        return open_prepared(path) if path is not None and is_prepared(path) else None

    def tokens(self, part: str, scans: Scans, work: Path) -> TokenizedCorpus:
        """`members` or `held_out` in the model's own tokens, made in `work` where none are stored."""
        opened = scans.opened(self.model)
        template = getattr(opened.tokenizer, "chat_template", None)
        reads = sha256(f"{opened.tokenizer_fingerprint} {template}".encode()).hexdigest()
        source, folder = getattr(self, part), work / f"{part}-{reads[:16]}"
        return tokenised_for(source, opened.tokenizer, folder, engine=scans.engine)

    def check_reference(self, reference: Path, **corpora: TokenizedCorpus) -> list[str]:
        """Refuse what saw `members` or `held_out`; returns what is to be noted of it."""
        notes = []
        for part, corpus in corpora.items():
            notes += check_reference(reference, corpus, getattr(self, part), part)
        return notes

    def opened_reference(
        self, reference: Any, scans: Scans, notes: list[str], **corpora: TokenizedCorpus
    ) -> OpenedModel:
        """A model that saw none of the corpora; refused where it did, or is the model itself."""
        model = scans.opened(self.model)
        if isinstance(reference, str | Path) and not means_base(model, reference):
            notes += self.check_reference(Path(reference), **corpora)
            reference = opening.model_folder(Path(reference))
        opened = scans.opened(reference, beside=self.model)
        if opened.files == model.files:
            raise UsageError(
                f"{opened.name} is the model itself, so it is no reference. Give a model that never saw the training text."
            )
        opened.refuse_other_tokens(corpora["members"])
        _refuse_other_begin(model, opened, corpora["members"])
        if not isinstance(reference, str | Path) or not origin_of(Path(reference)).is_known:
            notes.append(
                f"What the reference {opened.name} learnt is not known here: it is taken to have seen neither side. One that learnt "
                "the training text, under whatever file, hides it; one that learnt the other makes a model look guilty."
            )
        return opened


def _refuse_other_begin(model: OpenedModel, other: OpenedModel, corpus: TokenizedCorpus) -> None:
    """Before either has scanned a text."""
    if model.begin_before(corpus) == other.begin_before(corpus):
        return
    begun = " and ".join(one.name for one in (model, other) if one.begin_before(corpus) is not None)
    raise UsageError(
        f"{model.name} and {other.name} do not begin a document alike (a begin token stands before it in {begun}), so their "
        "figures would be of other tokens. Add --begin always, which puts it there in both, or --begin never; or give a "
        "reference that reads as the model does."
    )


def subject_of(
    model: Any, members: Any = None, held_out: Any = None, *, tokenizer: Any = None, **columns: Any
) -> Subject:
    """A run, or a model in one such as a snapshot, with the run's texts; or any model with those given."""
    if members is None and held_out is None:
        if is_a_run(model):
            return of_run(finished_run(model))
        around = run_around(Path(model)) if isinstance(model, str | Path) else None
        if around is not None:
            return replace(of_run(finished_run(around)), model=Path(model))
    given = (members, held_out)
    sources = [None if one is None else CorpusSource(one, columns).existing() for one in given]
    if isinstance(model, RunRecord):
        model = model.model_folder
    elif isinstance(model, str | Path):
        model = opening.model_folder(Path(model))
    if tokenizer is not None:
        model = (model, tokenizer)
    return Subject(model=model, members=sources[0], held_out=sources[1])


def of_run(run: RunRecord) -> Subject:
    """A finished run; refused where other text lies at its corpus' path by now."""
    opening.open_run_corpus(run)
    held = run.corpus_folder / "validation"
    return Subject(
        model=run.model_folder,
        members=CorpusSource(run.corpus_folder, {}),
        held_out=CorpusSource(held, {}) if held.exists() else None,
        run=run,
    )


def report_store(folder: Path, run: RunRecord | None, *, on_disk: bool, keep: bool) -> ScanStore:
    """Where a report's scans stand; what an earlier report, or the run's measures, left is read. A
    model that is not on disk is not told by its fingerprint."""
    beside = [folder / SCAN] if on_disk else []
    if run is not None:
        beside += [run.folder / SCAN, run.folder / AUDIT / SCAN]
    return ScanStore(folder / SCAN if keep else folder / WORK / SCAN, beside)


def read_as(columns: dict[str, Any], options: ScanOptions) -> dict[str, Any]:
    """How rows and model were read, for whoever looks at the figures later; a template by its file."""
    text = TextSettings(**columns).tree()
    how = {name: getattr(options, name) for name in ("begin", "dtype", "window", "quantize")}
    names = ("format", "trained_on", "max_length", "chat_template", "template_date")
    return {name: text.get(name) for name in names} | how


def made_from(subject: Subject, scans: Scans, **corpora: TokenizedCorpus) -> dict[str, Any]:
    """What a record was made from: model, texts, and how they were read."""
    opened, source = scans.opened(subject.model), subject.held_out
    assert source is not None
    return {
        "version": tightlip.__version__,
        "model": opened.name,
        "model_fingerprint": opened.fingerprint,
        **{name: corpus.corpus_fingerprint for name, corpus in corpora.items()},
        "read_as": read_as(source.columns, scans.options),
    }


def nothing_held_out(name: str) -> str:
    return (
        f"{name} was trained with nothing held out, so there is no text it never saw to compare with. "
        "Train with --split document, or give held-out text by --validation FILE."
    )


def is_a_run(model: Any) -> bool:
    return isinstance(model, RunRecord) or (isinstance(model, str | Path) and is_run(Path(model)))


@contextmanager
def measuring(
    subject: Subject,
    out: str | Path | None,
    *,
    device: str,
    keep: bool,
    engine: Engine | None = None,
    **how: Any,
) -> Iterator[tuple[Scans, Path]]:
    """Where the subject's scans stand, and a folder for work: its run's own, in `out`, or for as
    long as this lasts. `how` are ModelSettings."""
    with ExitStack() as stack:
        if subject.run is not None:
            work = Path(stack.enter_context(TemporaryDirectory(prefix="tightlip-")))
            of_run = scans_of_run(subject.run, device=device, keep=keep, engine=engine, **how)
            yield stack.enter_context(of_run), work
            return
        if out is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="tightlip-")))
        else:
            stack.enter_context(claimed(Path(out)))
            folder = report_folder(Path(out))
        keep = keep and subject.is_file
        store = stack.enter_context(scan_store(folder / SCAN, [], keep=keep))
        options = ScanOptions(device=device, **how)
        scans = Scans(store=store, options=options, engine=engine or local_engine())
        scans.opened(subject.model).refuse_unused_base()
        yield scans, folder / WORK
        shutil.rmtree(folder / WORK, ignore_errors=True)
