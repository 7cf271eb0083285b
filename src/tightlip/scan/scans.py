"""The models of one command, where their scans stand, and the engine that makes them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from os import W_OK, access
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tightlip.core.engines import Engine, EngineSettings, local_engine
from tightlip.core.errors import UsageError
from tightlip.core.files import claimed
from tightlip.core.run_folder import RunRecord
from tightlip.core.settings import Settings, names_in, split_settings
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan import ahead
from tightlip.scan.document_scores import DocumentScores, document_scores
from tightlip.scan.models import OpenedModel, means_base, open_model, open_other
from tightlip.scan.options import ScanOptions
from tightlip.scan.store import PLAIN, SCAN, ScannedCorpus, ScanStore, Scorer, scan_store

Made = TypeVar("Made")
AUDIT = "audit"  # where a run's report stands unless told otherwise


def on_engine(*kinds: type[Settings]) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """A call with the engine that its settings name as `engine`, open for as long as it lasts. What
    is wrong with settings of these `kinds` is said before: a cluster takes seconds to start."""

    def made(call: Callable[..., Made]) -> Callable[..., Made]:
        @wraps(call)
        def opened(model: Any, *given: Any, **settings: Any) -> Made:
            named = {n: settings.pop(n) for n in names_in(EngineSettings) if n in settings}
            where, own = EngineSettings(**named), names_in(*kinds)
            split_settings({n: each for n, each in settings.items() if n in own}, *kinds)
            if where.engine != "local":
                others = [settings.get(name) for name in ("public_model", "reference")]
                _check_elsewhere(settings.get("device_map"), model, *others)
            with where.opened(settings.get("device", "auto")) as engine:
                if engine.is_remote:
                    settings["device"] = engine.device
                    engine.start()  # workers import while the text is read
                return call(model, *given, engine=engine, **settings)

        return opened

    return made


def _check_elsewhere(device_map: str | None, *models: Any) -> None:
    """Refuse what other machines cannot open: models in memory, or on several GPUs."""
    given = [each for one in models for each in (one if isinstance(one, list) else [one])]
    if not all(isinstance(one, str | Path | RunRecord) for one in given if one is not None):
        raise UsageError(
            "A model in memory is on this machine only, and workers of a cluster open theirs from a path that all of them "
            "see. Save it with its tokenizer by save_pretrained and give that folder, or leave --engine ray out."
        )
    if device_map is not None:
        raise UsageError(
            "Each worker of a cluster has one GPU, and --device-map auto spreads a model over several. Leave --engine ray out."
        )


@dataclass(frozen=True, kw_only=True)
class Scans:
    """The models of one command, each opened once, and where their scans stand.

    Scans of several runs may share `models`. `scorer` is what is kept of a token where nobody asks
    for another: one that all measures can read, so that none has to scan again.
    """

    store: ScanStore
    options: ScanOptions = field(default_factory=ScanOptions)
    models: dict[tuple[Path | int, bool], OpenedModel] = field(default_factory=dict)
    scorer: Scorer = PLAIN
    engine: Engine = field(default_factory=local_engine)

    def opened(self, folder: Any, *, beside: Path | None = None) -> OpenedModel:
        """The model in `folder`; with `beside`, the reference or public model of the one there,
        which may be in memory."""
        if beside is not None and means_base(subject := self.opened(beside), folder):
            return subject.base
        is_other = beside is not None and self.options != self.options.of_others()
        place = Path(folder).resolve() if isinstance(folder, str | Path) else id(folder)
        if (place, is_other) not in self.models:
            opened = open_other if is_other else open_model
            self.models[place, is_other] = opened(folder, self.options)
        return self.models[place, is_other]

    def release(self, folder: Path) -> None:
        """Give the model's memory back."""
        self.models.pop((Path(folder).resolve(), False), None)

    def scan(
        self,
        model: OpenedModel,
        corpus: TokenizedCorpus,
        description: str,
        scorer: Scorer | None = None,
        begun: ahead.ScanAhead | None = None,
    ) -> ScannedCorpus:
        scorer = scorer or self.scorer
        return model.scan(corpus, self.store, description, scorer, self.engine, begun)

    def ahead(self, model: OpenedModel) -> AbstractContextManager[ahead.ScanAhead | None]:
        """What may scan a corpus that is tokenised inside."""
        begun = model.scan_ahead(self.store, self.scorer, self.engine)
        return nullcontext() if begun is None else begun.under_way()

    def scores(
        self,
        folder: Any,
        corpus: TokenizedCorpus,
        description: str,
        *,
        counted: np.ndarray | None = None,
        beside: Path | None = None,
    ) -> DocumentScores:
        """What the model in `folder` makes of each document; refused if it reads other tokens."""
        model = self.opened(folder, beside=beside)
        model.refuse_other_tokens(corpus)
        return document_scores(self.scan(model, corpus, description), counted=counted)


def run_store(
    run: Path, *, beside: Sequence[Path] = (), keep: bool = True
) -> AbstractContextManager[ScanStore]:
    """Where measures of a run keep their scans; those of its report, and of the runs or reports in
    `beside`, are read too."""
    return scan_store(run / SCAN, [folder / SCAN for folder in (run / AUDIT, *beside)], keep=keep)


def claimed_to_write(run: Path) -> AbstractContextManager[None]:
    """A claim on a run, unless it may only be read: then nothing is kept with it."""
    return claimed(run) if access(run, W_OK) else nullcontext()


@contextmanager
def scans_of_run(
    run: RunRecord, *, device: str, keep: bool, engine: Engine | None = None, **how: Any
) -> Iterator[Scans]:
    """The run's own scans, which are dropped afterwards unless they are to be kept.

    `how` are ModelSettings.
    """
    with claimed_to_write(run.folder), run_store(run.folder, keep=keep) as store:
        options = ScanOptions(device=device, **how)
        yield Scans(store=store, options=options, engine=engine or local_engine())
