"""What a comparison must know of one model, measured once and kept.

A run's stand in its own folder, those of other models in the comparison's.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import tightlip
from tightlip.audit.leakage.findings import WORK, validation_fit
from tightlip.audit.leakage.summary import finite
from tightlip.audit.subjects import Subject
from tightlip.core.errors import DamagedError, UsageError
from tightlip.core.files import read_json, write_json
from tightlip.core.registry import look_up
from tightlip.core.resampling import ResamplingSettings
from tightlip.corpus.canaries import read_canary_key
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.scans import Scans

log = logging.getLogger("tightlip")
MEASURES = "measures"
TEXTS = {"corpus_fingerprint": "members", "validation_fingerprint": "held_out"}


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
        chosen_by=key.chosen_by,
    )


def planted_texts(paths: Iterable[Path]) -> frozenset[str]:
    """What the keys say was planted; a key of real canaries alone, which are people's own text, is refused."""
    planted = frozenset[str]()
    for path in paths:
        if not (texts := open_key(path).planted_texts):
            raise UsageError(
                f"{path} holds no planted canaries, so there is nothing to leave out. Give the key that tightlip "
                "canaries plant wrote."
            )
        planted |= texts
    return planted


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How to measure, the same for every run."""

    keys: tuple[Key, ...]
    reference: Path | None  # a model's folder, or a run: who refuses a run must know it is one
    reference_fingerprint: str | None
    seed: int
    num_bootstraps: int

    @property
    def planted_texts(self) -> frozenset[str]:
        return frozenset().union(*(key.planted_texts for key in self.keys))

    @property
    def resampling(self) -> ResamplingSettings:
        return ResamplingSettings(seed=self.seed, num_bootstraps=self.num_bootstraps)


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What an audit is given: a model with its texts, and where scans stand.

    `against` is the model that it is held against, where there is one; `work` is a folder for what
    need not be kept, and `tokens` one for texts that several models read.
    """

    subject: Subject
    measuring: Measuring
    scans: Scans
    work: Path
    tokens: Path
    against: "Audited | None" = None

    @property
    def model(self) -> Path:
        return Path(self.subject.model)

    @cached_property
    def fingerprint(self) -> str:
        return self.scans.opened(self.model).fingerprint

    @property
    def key_digests(self) -> list[str]:
        return [key.digest for key in self.measuring.keys]

    @property
    def sampling(self) -> dict[str, Any]:
        """What decides the intervals over users: whose text is left out, and what is drawn."""
        return {"keys": self.key_digests, **self.measuring.resampling.tree()}


class Audit(Protocol):
    """One way to look at what a model gives away; registered by name in core/registry.py.

    `finds_secrets` is False of an audit that accuses nobody, such as that of groups.
    """

    finds_secrets: bool

    def depends_on(self, audited: Audited) -> dict[str, Any]:
        """What the figures depend on beyond the model and its text, as JSON can hold it."""

    def figures(self, audited: Audited) -> Any:
        """What was found, as JSON can hold it. What cannot be measured is a usage error."""

    def accuses(self, figures: Any) -> bool:
        """Whether the figures show that the model gives something away."""


class ModelMeasures:
    """The measures of one model, from the cache in `folder` or made now.

    Holds:
        once: what was measured before, from the same things, is not measured again.
        stale: another key, corpus, reference or version is measured anew.
        the_same: other text than a run's own is refused and never kept as the run's.
        whole: a measure is in the cache whole or not at all.
    """

    def __init__(self, subject: Subject, folder: Path, measuring: Measuring, scans: Scans) -> None:
        opened = scans.opened(subject.model)
        self.fingerprint = opened.fingerprint
        self.folder = folder / MEASURES / self.fingerprint[:16]
        self.audited = Audited(
            subject=subject,
            measuring=measuring,
            scans=scans,
            work=self.folder / "audit",
            tokens=folder / WORK,
        )
        self.texts = texts_of_subject(subject, scans, folder / WORK)
        prepared = subject.prepared
        self._made_from = {
            "version": tightlip.__version__,
            "model": opened.files,
            "begin": opened.begin_id,
            # How rows are read decides what of them counts.
            "columns": None if subject.members is None else subject.members.columns,
            # The settings tell what was known of the text beforehand.
            "prepared": None if prepared is None else prepared.settings,
            **self.texts,  # of what is read, not of what was recorded
        }

    def release(self) -> None:
        """Give the model's memory back; it is opened again if it is needed once more."""
        self.audited.scans.release(self.audited.model)

    def leakage(self) -> dict[str, Any]:
        """The summary of a leakage report."""
        return self._audit("leakage", "leakage")

    def exposures(self) -> list[dict[str, Any]]:
        """What the model knows of every planted canary; all keys at once, for what one of them
        planted is no decoy for another."""
        keys = self.audited.measuring.keys
        return self._canaries("exposures", [key for key in keys if key.planted_texts])

    def real(self, key: Key) -> list[dict[str, Any]]:
        """What the model knows of the real canaries in a key."""
        return self._canaries(f"real-{key.digest[:8]}", [key])

    def _canaries(self, file: str, keys: Sequence[Key]) -> list[dict[str, Any]]:
        measuring = replace(self.audited.measuring, keys=tuple(keys))
        return self._audit("canaries", file, measuring=measuring)

    def groups(self, against: "ModelMeasures | None") -> dict[str, Any]:
        """Perplexity on held-out text, user by user, and how it changed against another model."""
        other = None if against is None else against.audited
        return self._audit("groups", "groups", against=other)

    def membership(self) -> dict[str, Any]:
        """How well documents and users that were trained on are told from others."""
        return self._audit("membership", "membership")

    def _audit(self, name: str, file: str, **changes: Any) -> Any:
        """What the audit of that name finds, kept in `file`."""
        audit: Audit = look_up("audit", name)()
        audited = replace(self.audited, **changes)
        return self._kept(file, audit.depends_on(audited), lambda: audit.figures(audited))

    def perplexity(self) -> float | None:
        """On held-out text; None where that is no number."""
        audited, text = self.audited, self.audited.subject.held_out
        assert text is not None

        def measured() -> float | None:
            model = audited.scans.opened(audited.model)
            fit = validation_fit(text, model, audited.scans, audited.work / "tokens", top_k=1)
            return finite(fit.perplexity)

        return self._kept("perplexity", {}, measured)

    def _kept(self, name: str, depends_on: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """What the file of that name holds, if it was made from the same; otherwise measured now."""
        path = self.folder / f"{name}.json"
        made_from = json.loads(json.dumps(self._made_from | depends_on))
        there = _read(path)
        if there.get("made_from") != made_from:
            write_json(path, {"made_from": made_from, "found": measure()})
            there = read_json(path)  # as it will be read next time
        shutil.rmtree(self.audited.work, ignore_errors=True)
        return there["found"]


def texts_of_subject(subject: Subject, scans: Scans, work: Path) -> dict[str, str | None]:
    """Fingerprints of the text that a model is measured on, and of the tokens it makes of it."""
    texts: dict[str, str | None] = dict.fromkeys(TEXTS)
    for name, part in TEXTS.items():
        if getattr(subject, part) is not None:
            texts[name] = _fingerprint(subject.tokens(part, scans, work))
    opened = scans.opened(subject.model)
    reads = {"tokenizer_fingerprint": f"{opened.tokenizer_fingerprint} after {opened.begin_id}"}
    return texts | reads


def _fingerprint(corpus: TokenizedCorpus) -> str:
    """Of the text, and of chats whose words count in it."""
    if corpus.roles is None or corpus.trained is None:
        return corpus.corpus_fingerprint
    counted = hashlib.sha256(np.asarray(corpus.roles).tobytes())
    counted.update(np.asarray(corpus.trained).tobytes())
    return f"{corpus.corpus_fingerprint} {counted.hexdigest()}"


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = read_json(path)
    except FileNotFoundError:
        return {}
    except DamagedError:
        shutil.rmtree(path.parent)  # all of it is measured again
        return {}
    return stored if isinstance(stored, dict) and "found" in stored else {}


def measured_or_reason(
    what: str, of: str, measure: Callable[[], Any], *figures: str
) -> tuple[Any, dict[str, str]]:
    """A measure, or of each of its figures why there is none.

    A refusal may quote a canary or name a user, so it goes to the log and not into the page.
    """
    try:
        return measure(), {}
    except DamagedError:
        raise
    except UsageError as error:
        log.warning("%s of %s was not measured: %s", what, of, error)
        reason = "It cannot be measured under this model; the command says why."
        return None, dict.fromkeys(figures, reason)


def written_to(out: str | Path | None, result: Any) -> Any:
    """The result, which is also written to `out` where that is given, for its owner only."""
    if out is not None:
        write_json(Path(out), result, alone=True)
    return result
