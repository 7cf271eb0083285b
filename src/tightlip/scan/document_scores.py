"""What a scan says of each document: its loss, and that of its least likely tokens."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.scan.store import ScannedCorpus, ScanShard

# min-k% looks at one token in so many, the least likely ones (Shi et al. 2024: 20%).
LOWEST_SHARE = 5
# A smaller deviation counts as this much: that of an even distribution is 0, and rounding alone
# would decide what is divided by it.
LEAST_DEVIATION = 0.01


class Columns:
    """Figures of each document, that of several documents together being their sum."""

    def each(self, change: Callable[[np.ndarray], np.ndarray]) -> Self:
        """The same with every column that is there changed."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return type(self)(
            **{name: None if one is None else change(one) for name, one in columns.items()}
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentScores(Columns):
    """Each document's loss, over how many tokens; and that of its least likely fifth.

    `lowest_deviations`, of scans with moments, is the sum over the fifth that is lowest of
    (log p - mean) / deviation, both under the model's own distribution (min-k%++).

    A token that nothing stands before, not even a BOS, is predicted by nobody and not counted.
    Counts are floats, as sums over owners are.
    """

    loss_nats: np.ndarray
    num_tokens: np.ndarray
    lowest_nats: np.ndarray
    num_lowest: np.ndarray
    lowest_deviations: np.ndarray | None = None


def document_scores(scanned: ScannedCorpus, *, counted: np.ndarray | None = None) -> DocumentScores:
    """Scores of every document, in their order; with `counted`, of those of its tokens only.

    Holds:
        naive: the same as scoring each document by itself and adding up.
        streamed: the log-probabilities of one shard are held at a time.
    """
    num_columns = 5 if "means" in scanned.scorer.columns else 4
    names = [field.name for field in fields(DocumentScores)][:num_columns]
    parts = [np.zeros((num_columns, 0))]
    for shard in scanned.shards():
        bounds = scanned.corpus.bounds[shard.first : shard.end + 1]
        parts.append(_reduced(shard, bounds, counted))
    return DocumentScores(**dict(zip(names, np.concatenate(parts, axis=1), strict=True)))


def counted_places(
    log_probs: np.ndarray, bounds: np.ndarray, counted: np.ndarray | None
) -> np.ndarray:
    """Where in a shard tokens stand that were predicted and count; refused if one is impossible."""
    scored = ~np.isnan(log_probs)
    if counted is not None:
        scored &= counted[bounds[0] : bounds[-1]]
    if not np.isfinite(log_probs[scored]).all():
        raise UsageError(
            "The model holds a token of this text for impossible (probability 0), so its loss is infinite and no "
            "mean of losses means anything. Measure the model without whatever masks its logits."
        )
    return np.flatnonzero(scored)


def documents_of(bounds: np.ndarray) -> np.ndarray:
    """The document of each token of a shard, the first being 0."""
    lengths = np.diff(bounds)
    return np.repeat(np.arange(len(lengths)), lengths)


def _reduced(shard: ScanShard, bounds: np.ndarray, counted: np.ndarray | None) -> np.ndarray:
    """A row for each column of DocumentScores, a column for each document."""
    num_documents = len(bounds) - 1
    places = counted_places(shard.log_probs, bounds, counted)
    documents = documents_of(bounds)[places]
    log_probs = shard.log_probs[places].astype(np.float64)
    num_tokens = np.bincount(documents, minlength=num_documents)
    num_lowest = np.maximum(num_tokens // LOWEST_SHARE, num_tokens > 0)

    def lowest(values: np.ndarray) -> np.ndarray:
        order = np.lexsort((values, documents))
        place = np.arange(len(order)) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
        chosen = order[place < num_lowest[documents[order]]]
        return np.bincount(documents[chosen], values[chosen], num_documents)

    rows = [
        np.bincount(documents, -log_probs, num_documents),
        num_tokens,
        -lowest(log_probs),
        num_lowest,
    ]
    if "means" in shard.columns:
        spread = np.maximum(shard.columns["deviations"][places], LEAST_DEVIATION)
        rows.append(lowest((log_probs - shard.columns["means"][places]) / spread))
    return np.array(rows, dtype=np.float64)
