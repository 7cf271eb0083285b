"""What a prepared corpus holds, in numbers."""

from typing import Any

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.corpus.cleaning import Cleaner
from tightlip.corpus.tokens import TokenizedCorpus

_CHUNK = 4_000_000


def describe_source(cleaner: Cleaner, num_skipped: int) -> dict[str, Any]:
    """What was read, found and removed."""
    return {
        "documents_read": cleaner.num_read,
        "skipped_rows": num_skipped,
        "duplicate_documents": cleaner.documents.num_duplicates,
        "duplicate_sentences": cleaner.sentences.num_duplicates,
        "scrubbed": dict(sorted(cleaner.scrubbed.items())),
        "removed": cleaner.removed(),
        "documents": sum(cleaner.documents_per_user.values()),
        "users": len(cleaner.documents_per_user),
        "documents_per_user": _spread(np.array([*cleaner.documents_per_user.values()])),
    }


def describe_tokens(corpus: TokenizedCorpus, tokenizer: Any) -> dict[str, Any]:
    """Documents, users and tokens of one split."""
    num_unknown = 0
    if tokenizer.unk_token_id is not None:
        for start in range(0, corpus.num_tokens, _CHUNK):
            chunk = corpus.tokens[start : start + _CHUNK]
            num_unknown += int((chunk == tokenizer.unk_token_id).sum())
    return {
        "documents": corpus.num_documents,
        "users": corpus.num_users,
        "tokens": corpus.num_tokens,
        "unknown_tokens": num_unknown,
        "unknown_share": num_unknown / max(corpus.num_tokens, 1),
        "documents_per_user": _spread(np.bincount(corpus.users, minlength=corpus.num_users)),
        "corpus_fingerprint": corpus.corpus_fingerprint,
        "tokenizer_fingerprint": corpus.tokenizer_fingerprint,
    }


def total_tokens(splits: dict[str, Any]) -> dict[str, Any]:
    """Tokens of all splits together."""
    known = [splits[name] for name in ("train", "validation") if name in splits]
    num_tokens = sum(split["tokens"] for split in known)
    num_unknown = sum(split["unknown_tokens"] for split in known)
    return {"tokens": num_tokens, "unknown_share": num_unknown / max(num_tokens, 1)}


def check_unknown(
    split: str, described: dict[str, Any], tokenizer: Any, given: str | None
) -> list[str]:
    """Warnings about tokens the tokenizer does not know; none known in training is an error."""
    share = described["unknown_share"]
    advice = (
        f"tokenizer={given!r} does not fit this text; choose the model's own or build one here"
        if given
        else "the vocabulary is too small for this text; raise --vocabulary-size or lower --min-users"
    )
    if split == "train" and described["tokens"] == described["unknown_tokens"] > 0:
        raise UsageError(
            f"All {described['tokens']} tokens of {split} are {tokenizer.unk_token}: {advice}."
        )
    if not described["tokens"]:
        return [f"{split} holds no tokens: every document is empty."]
    return (
        [f"{share:.0%} of {split}'s tokens are {tokenizer.unk_token}: {advice}."]
        if share > 0.5
        else []
    )


def _spread(counts: np.ndarray) -> dict[str, float]:
    if not len(counts):
        return {"min": 0, "median": 0, "max": 0}
    return {
        "min": int(counts.min()),
        "median": float(np.median(counts)),
        "max": int(counts.max()),
    }
