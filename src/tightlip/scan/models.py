"""`tightlip audit` as one call: find the model and the corpus, audit, write the report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightlip.core.devices import usable_device
from tightlip.core.errors import UsageError
from tightlip.core.settings import bytes_from
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.models.loading import (
    load_causal_lm,
    load_tokenizer,
    model_fingerprint,
    state_fingerprint,
)
from tightlip.scan.scanner import Scanner
from tightlip.scan.store import ScannedCorpus, scan_corpus


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


def loaded(model: Any, tokenizer: Any, options: ScanOptions) -> AuditedModel:
    """The model with its tokenizer, from a folder or as it is in memory."""
    import torch

    if isinstance(model, str | Path):
        folder = Path(model)
        dtype = getattr(torch, options.dtype)
        return AuditedModel(
            model=load_causal_lm(folder, device=usable_device(options.device), dtype=dtype),
            tokenizer=_tokenizer(tokenizer or folder),
            fingerprint=model_fingerprint(folder),
            name=str(folder),
        )
    if tokenizer is None:
        raise UsageError(
            f"A {type(model).__name__} in memory does not say how text becomes tokens. "
            f"Give tokenizer=, an object or a folder."
        )
    return AuditedModel(
        model=model,
        tokenizer=_tokenizer(tokenizer),
        fingerprint=state_fingerprint(model),
        name=type(model).__name__,
    )


def _tokenizer(tokenizer: Any) -> Any:
    return load_tokenizer(Path(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer
