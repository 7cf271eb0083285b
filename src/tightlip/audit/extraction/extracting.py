"""How many tries it takes to draw somebody's text out of a model, as one call."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tightlip
from tightlip.audit.extraction import report, windows
from tightlip.audit.leakage import findings
from tightlip.audit.leakage.summary import finite
from tightlip.audit.settings import ExtractionConfig
from tightlip.audit.subjects import Subject, read_as, report_store, subject_of
from tightlip.core.engines import Engine
from tightlip.core.errors import UsageError
from tightlip.core.figures import count
from tightlip.core.files import make_private_folder, write_json
from tightlip.core.progress import task
from tightlip.core.register import guarantee_of
from tightlip.core.settings import bytes_from, split_settings
from tightlip.corpus.opening import CorpusSource
from tightlip.corpus.prepare_config import TextSettings
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.decoding import scorer_of
from tightlip.scan.models import BASE, OpenedModel
from tightlip.scan.options import Decoding, ScanOptions
from tightlip.scan.scans import Scans, on_engine
from tightlip.scan.store import SCAN

NAMES = {*report.FILES, "report.html", "log.txt", SCAN, findings.WORK, findings.REDACTED}
NO_REFERENCE = "none"
NOT_COMPARED = (
    "No reference was given, so every window counts, also one that anybody's model would say. Give --reference MODEL, one "
    f"that never saw the text: then windows count that it draws at least {windows.TIMES_DEARER} times as seldom."
)
BASE_IS_REFERENCE = "No reference was named, so the adapter's own base stands for it. Leave it out with --reference none."
NO_FIRST_TOKEN = (
    "No begin token stands before a text, so no window begins with a document's first token."
)
LOWER_BOUND = (
    "A window is looked for by its tokens. The same text cut into other tokens is not counted, so the text itself comes out "
    "a little sooner than is said here."
)


@on_engine(ExtractionConfig, Decoding, ScanOptions, TextSettings)
def extract_text(
    model: Any,
    corpus: Any = None,
    *,
    engine: Engine,
    out: str | Path | None = None,
    tokenizer: Any = None,
    reference: Any = None,
    held_out: Any = None,
    keep_scan: bool = True,
    write_page: Callable[[Path], object],
    **settings: Any,
) -> report.ExtractionReport:
    """What `tightlip.extract` says it does; `write_page` draws the report once its figures stand."""
    kinds = (ExtractionConfig, Decoding, ScanOptions, TextSettings)
    config, decoding, options, columns = split_settings(settings, *kinds)
    subject = _subject(model, corpus, held_out, tokenizer, columns.tree())
    folder, keep_alive = findings.folder_for(out)
    on_disk = subject.is_file and (reference is None or isinstance(reference, str | Path))
    is_kept = keep_scan and not config.redact and on_disk
    store = report_store(folder, subject.run, on_disk=subject.is_file, keep=is_kept)
    scans = Scans(store=store, options=options, engine=engine)
    job = _Job(subject=subject, scans=scans, config=config, decoding=decoding, folder=folder)
    how = {"redact": config.redact, "names": NAMES, "keeps_scan": is_kept}
    with findings.writing_report(folder, write_page, **how):
        job.write(reference)
    return report.ExtractionReport(folder, keep_alive)


def _subject(
    model: Any, corpus: Any, held_out: Any, tokenizer: Any, columns: dict[str, Any]
) -> Subject:
    if corpus is not None:
        return subject_of(model, corpus, held_out, tokenizer=tokenizer, **columns)
    subject = subject_of(model, tokenizer=tokenizer, **columns)
    if subject.members is None:
        raise UsageError(
            f"{subject.name} was not trained by tightlip, so its corpus is not known. Run: tightlip extract MODEL CORPUS"
        )
    if held_out is None:
        return subject
    beside = subject_of(model, None, held_out, tokenizer=tokenizer, **columns)
    return replace(subject, held_out=beside.held_out)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The text that was trained on, or that was held out: as tokens, as words, and what was found."""

    corpus: TokenizedCorpus
    words: windows.WordPlaces | None
    found: list[windows.Searched]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One extraction under way: everything its steps share."""

    subject: Subject
    scans: Scans
    config: ExtractionConfig
    decoding: Decoding
    folder: Path
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)  # of the words of both sides

    @property
    def model(self) -> OpenedModel:
        return self.scans.opened(self.subject.model)

    def write(self, reference: Any) -> None:
        """The tables, then summary.json, whose presence says that the report is whole."""
        self.model.refuse_unused_base()
        is_beside = self.subject.held_out is not None
        corpus = self._tokens("members")
        if is_beside:  # is sorted behind it: here, for the scan may take hours
            self._check_memory(corpus.num_tokens + self._tokens("held_out").num_tokens)
        other = self._reference(corpus, reference)
        side = self._side("members", other)
        held = self._side("held_out", other, side) if is_beside else None
        self._note(side, held)
        folder = make_private_folder(self.folder)
        (folder / report.SUMMARY).unlink(missing_ok=True)
        decode = findings.decoder_of(self.model.tokenizer)
        report.write_tables(folder, side.found, corpus, decode, redact=self.config.redact)
        write_json(folder / report.SUMMARY, self._summary(other, side, held))

    def _tokens(self, part: str) -> TokenizedCorpus:
        work = make_private_folder(self.folder / findings.WORK)
        corpus = self.subject.tokens(part, self.scans, work)
        self._check_memory(corpus.num_tokens)
        return corpus

    def _check_memory(self, num_tokens: int) -> None:
        """Words are sorted like tokens, and are fewer."""
        windows.check_memory(num_tokens, bytes_from(self.scans.options.memory))

    def _reference(self, corpus: TokenizedCorpus, reference: Any) -> OpenedModel | None:
        model = self.model
        if reference is None and model.open_base is not None:
            reference = BASE
            self.notes.append(BASE_IS_REFERENCE)
        if reference is None or (isinstance(reference, str) and reference == NO_REFERENCE):
            self.notes.append(NOT_COMPARED)
            return None
        return self.subject.opened_reference(reference, self.scans, self.notes, members=corpus)

    def _side(self, part: str, other: OpenedModel | None, before: _Side | None = None) -> _Side:
        """The reference first: where it is refused, nobody has waited for the model. What stands in
        the text `before` is nobody's own here."""
        corpus, scorer, model = self._tokens(part), scorer_of(self.decoding), self.model
        of = "held-out text" if part == "held_out" else "the text"
        reference = None
        if other is not None:
            reference = self.scans.scan(other, corpus, f"Scanning {of}, reference", scorer)
        scanned = self.scans.scan(model, corpus, f"Scanning {of}", scorer)
        source: CorpusSource = getattr(self.subject, part)
        shown, words = source.shown_to(model.tokenizer), None
        if model.tokenizer.is_fast and shown is not None:
            words = windows.read_words(
                corpus, shown, model.tokenizer, self.numbers, self.scans.engine
            )
        with task("Looking for windows", None):
            found = windows.search_windows(
                scanned,
                reference,
                _owned(corpus, words, before, max(self.config.lengths)),
                lengths=self.config.lengths,
                carries_text=findings.tokens_with_text(model.tokenizer, corpus),
            )
        return _Side(corpus=corpus, words=words, found=found)

    def _note(self, side: _Side, held: _Side | None) -> None:
        is_first_missing = self.model.begin_id is None and not side.corpus.begins_itself
        self.notes.extend(
            [
                *self.model.notes,
                *self.scans.engine.notes,
                *([] if side.words is not None else [findings.ONLY_TOKENS]),
                *_too_short(side, "people"),
                *(_too_short(held, "held-out people") if held is not None else []),
                *([NO_FIRST_TOKEN] if is_first_missing else []),
                LOWER_BOUND,
            ]
        )

    def _summary(
        self, other: OpenedModel | None, side: _Side, held: _Side | None
    ) -> report.Figures:
        corpus, run, redact = side.corpus, self.subject.run, self.config.redact
        assert self.subject.members is not None
        summary = {
            "version": tightlip.__version__,
            "model": self.model.name,
            "model_fingerprint": self.model.fingerprint,
            "reference": None if other is None else other.name,
            "reference_fingerprint": None if other is None else other.fingerprint,
            # A hash of the text lets whoever knows all of it but a PIN try every PIN.
            "corpus_fingerprint": None if redact else corpus.corpus_fingerprint,
            "redacted": redact,
            "read_as": read_as(self.subject.members.columns, self.scans.options),
            "guarantee": guarantee_of(self.subject.model, run),
            **asdict(self.decoding),
            "lengths": list(self.config.lengths),
            **_figures(side),
            "num_documents": corpus.num_documents,
            "num_tokens": corpus.num_tokens,
            "by_role": report.figures_by_role(side.found, corpus),
            "held_out": None if held is None else _figures(held),
            "notes": self.notes,
        }
        cheapest = ("cheapest_queries", "cheapest_queries_90")
        return summary | {name: finite(report.gated(summary)[name]) for name in cheapest}


def _figures(side: _Side) -> report.Figures:
    by_length = report.figures_by_length(side.found, side.corpus)
    return {"num_users": side.corpus.num_users, "by_length": by_length}


def _too_short(side: _Side, people: str) -> Iterator[str]:
    """How many have no window of a length, and so were not searched."""
    lengths = _figures(side)["by_length"].items()
    numbers = {length: one["users_without_window"] for length, one in lengths}
    if told := [f"{count(n)} at {length} tokens" for length, n in numbers.items() if n]:
        yield (
            f"Of {count(side.corpus.num_users)} {people} these have no window of the length, as no text of theirs has so "
            f"many tokens in a row, and were not searched: {', '.join(told)}."
        )


def _owned(
    corpus: TokenizedCorpus, words: windows.WordPlaces | None, before: _Side | None, most: int
) -> windows.Owned:
    by_tokens = windows.longest_elsewhere(corpus, most, None if before is None else before.corpus)
    if words is None:
        return windows.Owned(by_tokens=by_tokens, by_words=None)
    theirs = None if before is None or before.words is None else before.words.corpus
    elsewhere = windows.longest_elsewhere(words.corpus, min(words.most_in(most), 65_535), theirs)
    return windows.Owned(by_tokens=by_tokens, by_words=(words, elsewhere))
