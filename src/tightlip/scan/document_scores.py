"""What a model makes of each document: the sums that membership and groups are read from.

Log-probabilities of tokens are reduced shard by shard; four numbers a document are kept.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.progress import task
from tightlip.corpus.encoding import tokenizer_fingerprint
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.scan.scanner import Scanner
from tightlip.scan.store import shard_edges

LOWEST_SHARE = (
    5  # min-k% looks at one token in so many, the least likely ones (Shi et al. 2024: 20%)
)


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentScores:
    """Each document's loss, over how many tokens; and that of its least likely fifth.

    A token that nothing stands before, not even a BOS, is predicted by nobody and not counted.
    Counts are floats, as sums over owners are.
    """

    loss_nats: np.ndarray
    num_tokens: np.ndarray
    lowest_nats: np.ndarray
    num_lowest: np.ndarray

    def chosen(self, which: np.ndarray) -> "DocumentScores":
        return DocumentScores(
            **{field.name: getattr(self, field.name)[which] for field in fields(self)}
        )

    def summed(self, owners: np.ndarray, num_owners: int) -> "DocumentScores":
        """The same for all documents of an owner together."""
        return DocumentScores(
            **{
                field.name: np.bincount(owners, getattr(self, field.name), num_owners)
                for field in fields(self)
            }
        )


def open_scanner(folder: Path, corpus: TokenizedCorpus, device: str) -> Scanner:
    """The model in `folder`, ready to read `corpus`; refused if it reads text as other tokens."""
    import torch

    tokenizer = load_tokenizer(folder)
    if tokenizer_fingerprint(tokenizer) != corpus.tokenizer_fingerprint:
        raise UsageError(
            f"{folder} cuts text into other tokens than the run's corpus, and a loss per token of one cannot be set "
            "against that of the other. Give a model with the run's tokenizer: train it with --tokenizer RUN/model."
        )
    model = load_causal_lm(folder, device=device, dtype=torch.float32)
    return Scanner(model, bos_id=tokenizer.bos_token_id)


def score_documents(
    scanner: Scanner,
    corpus: TokenizedCorpus,
    *,
    counted: np.ndarray | None = None,
    description: str = "Scoring documents",
) -> DocumentScores:
    """Scores of every document, in their order; with `counted`, of those of its tokens only.

    Holds:
        naive: the same as scoring each document by itself and adding up.
        streamed: the log-probabilities of one shard are held at a time.
    """
    parts = []
    edges = shard_edges(corpus.bounds)
    with task(description, corpus.num_tokens) as bar:
        for first, end in pairwise(edges):
            bounds = corpus.bounds[first : end + 1]
            _, log_probs = scanner.scan(corpus.tokens, bounds)
            if counted is not None:
                log_probs[~counted[bounds[0] : bounds[-1]]] = np.nan
            parts.append(_reduced(log_probs, np.diff(bounds)))
            bar.advance(float(bounds[-1] - bounds[0]))
    columns = np.concatenate(parts, axis=1) if parts else np.zeros((4, 0))
    return DocumentScores(
        loss_nats=columns[0],
        num_tokens=columns[1],
        lowest_nats=columns[2],
        num_lowest=columns[3],
    )


def _reduced(log_probs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Loss, tokens, loss and number of the lowest fifth: a row each, a column a document."""
    num_documents = len(lengths)
    documents = np.repeat(np.arange(num_documents), lengths)
    scored = ~np.isnan(log_probs)
    documents, losses = documents[scored], -log_probs[scored].astype(np.float64)
    if not np.isfinite(losses).all():
        raise UsageError(
            "The model holds a token of this text for impossible (probability 0), so its loss is infinite and no "
            "mean of losses means anything. Measure the model without whatever masks its logits."
        )
    num_tokens = np.bincount(documents, minlength=num_documents)
    num_lowest = np.maximum(num_tokens // LOWEST_SHARE, num_tokens > 0)
    order = np.lexsort((-losses, documents))
    place = np.arange(len(order)) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
    lowest = order[place < num_lowest[documents[order]]]
    return np.array(
        [
            np.bincount(documents, losses, num_documents),
            num_tokens,
            np.bincount(documents[lowest], losses[lowest], num_documents),
            num_lowest,
        ],
        dtype=np.float64,
    )
