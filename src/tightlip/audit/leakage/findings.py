"""The training data leakage report: which text the model completes, and whose it is.

Scan every document once, collect the correct runs, count each in the corpus, compare with a
public model, write the report. METHODS: Inan et al., "Privacy Analysis in Language Models via
Training Data Leakage Report".
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit.leakage.counting import Engine
from tightlip.audit.leakage.leaks import (
    Fit,
    Leaks,
    PublicView,
    find_leaks,
    fit_of,
    public_perplexities,
)
from tightlip.audit.leakage.summary import summarise
from tightlip.audit.leakage.tables import ratio_of_sequence, write_sequences, write_users
from tightlip.audit.settings import LeakageConfig
from tightlip.core.errors import UsageError
from tightlip.core.files import write_json
from tightlip.core.settings import bytes_from
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.models import OpenedModel, Scans
from tightlip.scan.store import ScannedCorpus

INFINITE_RATIO = (
    "The public model holds some leaked token impossible, so the largest ratio is infinite "
    "and leakage_epsilon is given as not known."
)


@dataclass(frozen=True, kw_only=True)
class Finder:
    """What finds leaks in scanned text: the scans, the settings, and where counting runs."""

    scans: Scans
    config: LeakageConfig
    engine: Engine

    def leaks(self, model: OpenedModel, corpus: TokenizedCorpus) -> Leaks:
        """What the model gives away of the corpus, without regard to any public model."""
        carries_text = tokens_with_text(model.tokenizer, corpus)
        scanned = self.scans.scan(model, corpus, "Scanning the model")
        return self._leaks_in(scanned, carries_text)

    def public_view(
        self, leaks: Leaks, public: OpenedModel, public_corpus: TokenizedCorpus
    ) -> PublicView:
        """The same text through a model that never saw it: perplexities, and its own unique count."""
        scanned = self.scans.scan(public, public_corpus, "Scanning the public model")
        benchmark = self._leaks_in(scanned, tokens_with_text(public.tokenizer, public_corpus))
        own = leaks.corpus.tokenizer_fingerprint
        return PublicView(
            name=public.name,
            perplexity_of_run=public_perplexities(leaks, scanned),
            cross_tokenizer=public_corpus.tokenizer_fingerprint != own,
            unique=int(benchmark.unique.sum()),
        )

    def fit(self, model: OpenedModel, corpus: TokenizedCorpus) -> Fit:
        """Perplexity and top-k accuracy on text the model was not trained on."""
        scanned = self.scans.scan(model, corpus, "Scanning validation text")
        return fit_of(scanned, self.config.top_k, tokens_with_text(model.tokenizer, corpus))

    def _leaks_in(self, scanned: ScannedCorpus, carries_text: np.ndarray) -> Leaks:
        return find_leaks(
            scanned,
            top_k=self.config.top_k,
            carries_text=carries_text,
            engine=self.engine,
            memory_bytes=bytes_from(self.scans.options.memory),
        )


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that a report says: what leaked, how a public model sees it, and whence it comes."""

    model: OpenedModel
    leaks: Leaks
    public: PublicView | None
    validation: Fit | None
    config: LeakageConfig
    about: dict[str, Any]

    def ratios(self) -> np.ndarray:
        """The largest PP_public / PP_lm of each distinct sequence."""
        public = self.public
        return ratio_of_sequence(self.leaks, public.ratio_of_run(self.leaks) if public else None)

    def summary(self, ratios: np.ndarray) -> dict[str, Any]:
        """What summary.json holds."""
        leaks, config = self.leaks, self.config
        found = summarise(
            leaks,
            top_k=config.top_k,
            fewer_than=config.fewer_than,
            thresholds=config.thresholds,
            ratios=ratios,
            public=self.public,
            validation=self.validation,
        )
        found |= {
            "model_fingerprint": self.model.fingerprint,
            "corpus_fingerprint": leaks.corpus.corpus_fingerprint,
            "redacted": config.redact,
            **self.about,
        }
        if np.isinf(ratios[leaks.unique]).any():
            found["notes"] = [*found["notes"], INFINITE_RATIO]
        return found


def write_report(folder: Path, findings: Findings) -> dict[str, Any]:
    """Write the tables, then summary.json, whose presence says the report is whole."""
    (folder / "summary.json").unlink(missing_ok=True)
    leaks, config, public = findings.leaks, findings.config, findings.public
    ratios = findings.ratios()
    write_sequences(
        folder,
        leaks,
        decode=decoder_of(findings.model.tokenizer),
        public_perplexity_of_run=public.perplexity_of_run if public else None,
        ratios=ratios,
        occurrences=config.occurrences,
        redact=config.redact,
    )
    write_users(folder, leaks, ratios, config.redact)
    summary = findings.summary(ratios)
    write_json(folder / "summary.json", summary)
    return summary


def decoder_of(tokenizer: Any) -> Callable[[list[list[int]]], list[str]]:
    """The tokenizer's decoding of many id lists at once."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        # Twice as fast as batch_decode, which adds only the clean-up that is off here.
        return lambda rows: backend.decode_batch(rows, skip_special_tokens=False)
    return lambda rows: [tokenizer.decode(row) for row in rows]


def tokens_with_text(tokenizer: Any, corpus: TokenizedCorpus) -> np.ndarray:
    """Which ids carry text: not unknown, padding, begin, end or any other special token."""
    size = max(len(tokenizer), int(corpus.tokens.max(initial=0)) + 1)
    carries = np.ones(size, dtype=bool)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number for number, token in added.items() if getattr(token, "special", False)}
    special.update(number for number in tokenizer.all_special_ids if number is not None)
    carries[[number for number in special if number < size]] = False
    used = np.unique(corpus.tokens)
    for number, token in zip(used, tokenizer.convert_ids_to_tokens(used.tolist()), strict=True):
        if token == "":
            carries[number] = False
    if corpus.num_tokens and not carries[used].any():
        raise UsageError(
            f"The tokenizer knows none of the corpus' words: all {corpus.num_tokens:,} tokens are "
            f"unknown or special, so nothing could be found whatever the model knows. Give the "
            f"corpus the model was trained on, or the tokenizer that belongs to it."
        )
    return carries


def unknown_share(tokenizer: Any, corpus: TokenizedCorpus) -> float:
    """The share of the corpus that the tokenizer has no word for."""
    if tokenizer.unk_token_id is None or not corpus.num_tokens:
        return 0.0
    return float((corpus.tokens == tokenizer.unk_token_id).mean())
