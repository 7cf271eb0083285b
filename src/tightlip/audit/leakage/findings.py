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
from tightlip.core.errors import UsageError
from tightlip.core.files import write_json
from tightlip.core.settings import bytes_from
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.models import AuditedModel, ScanOptions, scan_model


@dataclass(frozen=True, kw_only=True)
class LeakageConfig:
    """What changes the report's figures or its contents."""

    top_k: int = 1
    redact: bool = False
    occurrences: int | None = 8
    fewer_than: int = 5
    thresholds: tuple[float, ...] = (1.5, 2.0, 3.0, 5.0, 10.0)

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise UsageError(f"top_k={self.top_k} predicts nothing. Use 1 or more.")
        if self.occurrences is not None and self.occurrences < 1:
            raise UsageError(
                f"occurrences={self.occurrences} keeps nothing. Use 1 or more, or 'all'."
            )
        if self.fewer_than < 1:
            raise UsageError(f"fewer_than={self.fewer_than} counts nothing. Use 2 or more.")


def audit_leakage(
    audited: AuditedModel,
    corpus: TokenizedCorpus,
    work: Path,
    *,
    config: LeakageConfig,
    options: ScanOptions,
    engine: Engine,
) -> Leaks:
    """What the model gives away of the corpus, without regard to any public model."""
    carries_text = tokens_with_text(audited.tokenizer, corpus)
    scanned = scan_model(
        audited, corpus, work / "scan", options=options, description="Scanning the model"
    )
    return find_leaks(
        scanned,
        top_k=config.top_k,
        carries_text=carries_text,
        engine=engine,
        memory_bytes=bytes_from(options.memory),
    )


def view_by_public_model(
    leaks: Leaks,
    public: AuditedModel,
    public_corpus: TokenizedCorpus,
    work: Path,
    *,
    config: LeakageConfig,
    options: ScanOptions,
    engine: Engine,
) -> PublicView:
    """The same text through a model that never saw it: perplexities, and its own unique count."""
    scanned = scan_model(
        public,
        public_corpus,
        work / "public",
        options=options,
        description="Scanning the public model",
    )
    benchmark = find_leaks(
        scanned,
        top_k=config.top_k,
        carries_text=tokens_with_text(public.tokenizer, public_corpus),
        engine=engine,
        memory_bytes=bytes_from(options.memory),
    )
    return PublicView(
        name=public.name,
        perplexity_of_run=public_perplexities(leaks, scanned),
        cross_tokenizer=public_corpus.tokenizer_fingerprint != leaks.corpus.tokenizer_fingerprint,
        unique=int(benchmark.unique.sum()),
    )


def validation_fit(
    audited: AuditedModel,
    corpus: TokenizedCorpus,
    work: Path,
    *,
    config: LeakageConfig,
    options: ScanOptions,
) -> Fit:
    """Perplexity and top-k accuracy on text the model was not trained on."""
    scanned = scan_model(
        audited,
        corpus,
        work / "validation",
        options=options,
        description="Scanning validation text",
    )
    return fit_of(scanned, config.top_k, tokens_with_text(audited.tokenizer, corpus))


def write_report(
    folder: Path,
    leaks: Leaks,
    *,
    audited: AuditedModel,
    public: PublicView | None,
    validation: Fit | None,
    config: LeakageConfig,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Write the tables, then summary.json, whose presence says the report is whole."""
    (folder / "summary.json").unlink(missing_ok=True)
    ratios = ratio_of_sequence(leaks, public.ratio_of_run(leaks) if public else None)
    write_sequences(
        folder,
        leaks,
        decode=decoder_of(audited.tokenizer),
        public_perplexity_of_run=public.perplexity_of_run if public else None,
        ratios=ratios,
        occurrences=config.occurrences,
        redact=config.redact,
    )
    write_users(folder, leaks, ratios, config.redact)
    summary = summarise(
        leaks,
        top_k=config.top_k,
        fewer_than=config.fewer_than,
        thresholds=config.thresholds,
        ratios=ratios,
        public=public,
        validation=validation,
    )
    summary |= {
        "model_fingerprint": audited.fingerprint,
        "corpus_fingerprint": leaks.corpus.corpus_fingerprint,
        "redacted": config.redact,
        **about,
    }
    if np.isinf(ratios[leaks.unique]).any():
        summary["notes"] = [
            *summary["notes"],
            "The public model holds some leaked token impossible, so the largest ratio is infinite "
            "and leakage_epsilon is given as not known.",
        ]
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
