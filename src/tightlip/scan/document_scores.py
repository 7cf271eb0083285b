"""What a scan says of each document: its loss, and that of its least likely tokens."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.scan.store import ScannedCorpus

# min-k% looks at one token in so many, the least likely ones (Shi et al. 2024: 20%).
LOWEST_SHARE = 5


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

    def each(self, change: Callable[[np.ndarray], np.ndarray]) -> "DocumentScores":
        """The same with every column changed."""
        return DocumentScores(
            **{field.name: change(getattr(self, field.name)) for field in fields(self)}
        )


def document_scores(scanned: ScannedCorpus, *, counted: np.ndarray | None = None) -> DocumentScores:
    """Scores of every document, in their order; with `counted`, of those of its tokens only.

    Holds:
        naive: the same as scoring each document by itself and adding up.
        streamed: the log-probabilities of one shard are held at a time.
    """
    parts = []
    for shard in scanned.shards():
        bounds = scanned.corpus.bounds[shard.first : shard.end + 1]
        log_probs = shard.log_probs
        if counted is not None:
            log_probs[~counted[bounds[0] : bounds[-1]]] = np.nan
        parts.append(_reduced(log_probs, np.diff(bounds)))
    columns = np.concatenate(parts, axis=1) if parts else np.zeros((4, 0))
    names = [field.name for field in fields(DocumentScores)]
    return DocumentScores(**dict(zip(names, columns, strict=True)))


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
