"""What a comparison must know of one model, measured once and kept with its run.

    RUN/measures/<model>/leakage.json         the leakage report's summary
    RUN/measures/<model>/exposures.json       what it knows of planted canaries
    RUN/measures/<model>/real-<key>.json      what it knows of the real canaries in a key
    RUN/measures/<model>/groups.json          per-user perplexity, against the baseline
    RUN/measures/<model>/membership.json      membership inference
    RUN/measures/<model>/perplexity.json      on held-out text, of a snapshot that was only looked at

Each file says what it was made from and is measured anew when that differs.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tightlip
from tightlip.core.errors import UsageError
from tightlip.core.files import make_private_folder, read_json, write_json
from tightlip.core.run_folder import RunRecord
from tightlip.corpus.canaries import read_canary_key
from tightlip.corpus.opening import fingerprints, open_run_corpus
from tightlip.models.loading import model_fingerprint

log = logging.getLogger("tightlip")
MEASURES = "measures"


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of canaries: its file, and what a comparison must know of it."""

    path: Path
    digest: str
    planted_texts: frozenset[str]
    chosen_by: frozenset[str]  # fingerprints of the models that real canaries were chosen with


def open_key(path: Path) -> Key:
    key = read_canary_key(path)
    return Key(
        path=path,
        digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        planted_texts=frozenset(canary.text for canary in key.of_planted),
        chosen_by=frozenset(filter(None, [key.model_fingerprint, *key.snapshot_fingerprints])),
    )


def planted_texts(paths: Iterable[Path]) -> frozenset[str]:
    """What the keys say was planted; a key of real canaries alone, which are people's own text, is refused."""
    found = frozenset[str]()
    for path in paths:
        texts = open_key(path).planted_texts
        if not texts:
            raise UsageError(
                f"{path} holds no planted canaries, so there is nothing to leave out. Give the key that tightlip "
                "canaries plant wrote."
            )
        found |= texts
    return found


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How to measure, the same for every run."""

    keys: tuple[Key, ...]
    reference: Path | None  # a model's folder, or a run: who refuses a run must know it is one
    reference_fingerprint: str | None
    device: str
    seed: int
    num_bootstraps: int

    @property
    def planted_texts(self) -> frozenset[str]:
        return frozenset().union(*(key.planted_texts for key in self.keys))


class ModelMeasures:
    """The measures of one model of a run, from the cache or made now.

    Holds:
        once: what was measured before, from the same things, is not measured again.
        stale: another key, corpus, reference or version is measured anew.
        the_same: other text than the run's own is refused and never kept as the run's.
        whole: a measure is in the cache whole or not at all.
    """

    def __init__(self, run: RunRecord, model: Path, measuring: Measuring) -> None:
        self.run, self.model, self.measuring = run, model, measuring
        self.fingerprint = model_fingerprint(model)
        self.folder = run.folder / MEASURES / self.fingerprint[:16]
        self._made_from = {
            "version": tightlip.__version__,
            "model": self.fingerprint,
            **fingerprints(open_run_corpus(run)),  # of what is read, not of what was recorded
        }

    @property
    def held_out(self) -> Path | None:
        """The run's held-out text, where it has any."""
        folder = self.run.corpus_folder / "validation"
        return folder if folder.exists() else None

    @property
    def _resampling(self) -> dict[str, Any]:
        return {
            "seed": self.measuring.seed,
            "num_bootstraps": self.measuring.num_bootstraps,
        }

    @property
    def _keys(self) -> list[str]:
        return [key.digest for key in self.measuring.keys]

    def leakage(self) -> dict[str, Any]:
        """The summary of a leakage report; the report itself, which holds text, is not kept."""
        report = self.folder / "audit"
        found: dict[str, Any] = self._kept(
            "leakage",
            {"reference": self.measuring.reference_fingerprint},
            lambda: self._audit(report),
        )
        shutil.rmtree(report, ignore_errors=True)
        return found

    def _audit(self, report: Path) -> dict[str, Any]:
        from tightlip.audit.leakage.audit import audit_model
        from tightlip.corpus.opening import model_folder

        reference = self.measuring.reference
        return audit_model(
            self.model,
            self.run.corpus_folder,
            out=report,
            validation=self.held_out,
            public_model=None if reference is None else model_folder(reference),
            redact=True,
            occurrences=1,
            device=self.measuring.device,
        ).summary

    def exposures(self) -> list[dict[str, Any]]:
        """What the model knows of every planted canary; all keys at once, for what one of them
        planted is no decoy for another."""
        return self._canaries(
            "exposures", [key for key in self.measuring.keys if key.planted_texts]
        )

    def real(self, key: Key) -> list[dict[str, Any]]:
        """What the model knows of the real canaries in a key."""
        return self._canaries(f"real-{key.digest[:8]}", [key])

    def _canaries(self, name: str, keys: list[Key]) -> list[dict[str, Any]]:
        from tightlip.audit.canaries.exposure import measure_canaries

        seed = self.measuring.seed
        found: list[dict[str, Any]] = self._kept(
            name,
            {"keys": [key.digest for key in keys], "seed": seed},
            lambda: measure_canaries(
                self.model, [key.path for key in keys], device=self.measuring.device, seed=seed
            ),
        )
        return found

    def groups(self, against: "ModelMeasures | None") -> dict[str, Any]:
        """Perplexity on held-out text, user by user, and how it changed against another model."""
        from tightlip.audit.groups import measure_groups

        found: dict[str, Any] = self._kept(
            "groups",
            {
                "against": None if against is None else against.fingerprint,
                "keys": self._keys,
                **self._resampling,
            },
            lambda: measure_groups(
                self.run.folder,
                against=None if against is None else against.run.folder,
                model=self.model,
                against_model=None if against is None else against.model,
                without_texts=self.measuring.planted_texts,
                device=self.measuring.device,
                **self._resampling,
            ),
        )
        return found

    def membership(self) -> dict[str, Any]:
        """How well documents and users that were trained on are told from others."""
        from tightlip.audit.membership import measure_membership

        found: dict[str, Any] = self._kept(
            "membership",
            {
                "reference": self.measuring.reference_fingerprint,
                "keys": self._keys,
                **self._resampling,
            },
            lambda: measure_membership(
                self.run.folder,
                reference=self.measuring.reference,
                without_texts=self.measuring.planted_texts,
                model=self.model,
                device=self.measuring.device,
                **self._resampling,
            ),
        )
        return found

    def perplexity(self) -> float | None:
        """On held-out text; None where that is no number."""
        found: float | None = self._kept("perplexity", {}, self._perplexity)
        return found

    def _perplexity(self) -> float | None:
        from tightlip.audit.leakage.findings import LeakageConfig, validation_fit
        from tightlip.audit.leakage.summary import finite
        from tightlip.corpus.opening import CorpusSource, tokenised_for
        from tightlip.scan.models import ScanOptions, loaded

        options = ScanOptions(device=self.measuring.device)
        audited = loaded(self.model, None, options)
        work = make_private_folder(self.folder / "scan")
        try:
            corpus = tokenised_for(
                CorpusSource(self.held_out, {}), audited.tokenizer, work / "tokens"
            )
            fit = validation_fit(audited, corpus, work, config=LeakageConfig(), options=options)
            return finite(fit.perplexity)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _kept(self, name: str, further: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """What the file of that name holds, if it was made from the same; otherwise measured now."""
        path = self.folder / f"{name}.json"
        made_from = json.loads(json.dumps(self._made_from | further))
        there = _read(path)
        if there.get("made_from") != made_from:
            make_private_folder(self.folder)
            for half in self.folder.glob(".*.partial"):  # of a killed predecessor
                half.unlink(missing_ok=True)
            write_json(path, {"made_from": made_from, "found": measure()})
            there = read_json(path)  # as it will be read next time
        return there["found"]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) and "found" in found else {}


def measured_or_reason(
    what: str, of: str, measure: Callable[[], Any]
) -> tuple[Any | None, str | None]:
    """A measure, or why there is none.

    A refusal may quote a canary or name a user, so it goes to the log and not into the page.
    """
    try:
        return measure(), None
    except UsageError as error:
        log.warning("%s of %s was not measured: %s", what, of, error)
        return None, "It cannot be measured under this model; the command says why."
