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

from tightlip.audit.leaks import Fit, Leaks, find_leaks, fit_of
from tightlip.audit.public import PublicView, public_perplexities
from tightlip.audit.scan import Scanner
from tightlip.audit.scanned import ScannedCorpus, scan_corpus
from tightlip.audit.summary import summarise
from tightlip.audit.tables import ratio_of_sequence, write_sequences, write_users
from tightlip.core.engine import Engine
from tightlip.core.errors import UsageError
from tightlip.core.files import write_json
from tightlip.core.sizes import bytes_from
from tightlip.corpus.tokens import TokenizedCorpus


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


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """What changes speed and memory, not the report (beyond float rounding)."""

    device: str = "auto"
    dtype: str = "float32"
    window: int | None = None
    batch_tokens: int | None = None
    memory: str = "4GB"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise UsageError(
                f"dtype={self.dtype!r} is not known. Use float32, bfloat16 or float16."
            )
        if self.window is not None and self.window < 2:
            raise UsageError(f"window={self.window} leaves no context. Use 2 or more.")
        bytes_from(self.memory)


@dataclass(frozen=True, kw_only=True)
class AuditedModel:
    """A model in memory with the tokenizer it speaks through."""

    model: Any
    tokenizer: Any
    fingerprint: str
    name: str


def scan_model(
    audited: AuditedModel,
    corpus: TokenizedCorpus,
    folder: Path,
    *,
    options: ScanOptions,
    description: str,
) -> ScannedCorpus:
    """Every token's rank and log-probability under the model, kept under `folder`."""
    check_vocabulary(audited, corpus)
    scanner = Scanner(
        audited.model,
        bos_id=audited.tokenizer.bos_token_id,
        window=options.window,
        batch_tokens=options.batch_tokens,
    )
    key = {
        "model": audited.fingerprint,
        "corpus": corpus.corpus_fingerprint,
        "tokenizer": corpus.tokenizer_fingerprint,
        "bos": scanner.bos_id,  # named in tokenizer_config.json, which no fingerprint covers
        "window": scanner.window,
        "dtype": options.dtype,
        "device": scanner.device.type,
    }
    return scan_corpus(scanner.scan, corpus, folder, key=key, description=description)


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


def check_vocabulary(audited: AuditedModel, corpus: TokenizedCorpus) -> None:
    find = getattr(audited.model, "get_input_embeddings", None)
    embeddings = find() if find else None
    size = getattr(embeddings, "num_embeddings", None)
    # Padding is not asked for: GPT-2 with a [PAD] added has no embedding for it and needs none.
    largest = max(int(corpus.tokens.max(initial=0)), audited.tokenizer.bos_token_id or 0)
    if size is not None and largest >= size:
        raise UsageError(
            f"The tokenizer gives token {largest}, but {audited.name} has embeddings for {size} "
            f"tokens only. Use the tokenizer the model was trained with."
        )
