"""What scans say of each document: its loss, that of its least likely tokens, and what a model makes of
it beside models that never saw it, token by token.

Δ is log p of the true token under the model less that under the reference; of several references
the mean of their log p. Two scores published in 2026 are made of it:

EZ, the error zone (Ilić et al., arXiv 2601.12104), looks where the model's first guess is wrong:
there it has learnt nothing by heart, and what moved the true token up or down is training. WBC, the
window votes (Chen et al., arXiv 2601.02751), lets windows of several sizes vote: many small gains
outvote a few large ones, which are often about what anybody would say.

What differs from the papers is in docs/membership.md.
"""

from collections.abc import Callable, Iterable, Sequence
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
WINDOW_SIZES = (2, 3, 4, 6, 9, 13, 18, 25, 32, 40)
LEAST_ERRORS = 2  # with fewer wrong guesses every token counts
# Windows are compared in whole multiples of this, above the rounding of float32 logits: sums in any order
# are the same, and what two models differ by in rounding alone is a tie.
NATS_PER_STEP = 2.0**-16


class Columns:
    """Figures of each document, that of several documents together being their sum."""

    @classmethod
    def of(cls, columns: Iterable[np.ndarray]) -> Self:
        """Of columns in the order of the fields; the last ones may be left out."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return cls(**dict(zip(names, columns, strict=False)))

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
    parts = [np.zeros((num_columns, 0))]
    for shard in scanned.shards():
        bounds = scanned.corpus.bounds[shard.first : shard.end + 1]
        parts.append(_reduced(shard, bounds, counted))
    return DocumentScores.of(np.concatenate(parts, axis=1))


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


@dataclass(frozen=True, kw_only=True, eq=False)
class BesideReferences(Columns):
    """Of each document: the loss of every reference over the same tokens (a column each); nats that
    the model gained and lost in the error zone; votes for the model and windows, by size."""

    loss_nats: np.ndarray
    gained_nats: np.ndarray
    lost_nats: np.ndarray
    votes: np.ndarray
    num_windows: np.ndarray


def beside_references(
    model: ScannedCorpus, references: Sequence[ScannedCorpus], *, counted: np.ndarray | None = None
) -> BesideReferences:
    """Every document, in their order; with `counted`, by those of its tokens only, which are closed
    up: a window goes over what does not count.

    Holds:
        naive: the same as going through each document by itself.
        streamed: one shard of each scan is held at a time.
    """
    parts = []
    shards = (one.shards() for one in (model, *references))
    for mine, *theirs in zip(*shards, strict=True):
        bounds = model.corpus.bounds[mine.first : mine.end + 1]
        parts.append(_beside(mine, theirs, bounds, counted))
    if not parts:
        none, many = np.zeros(0), np.zeros((0, len(WINDOW_SIZES)))
        parts = [(np.zeros((0, len(references))), none, none, many, many)]
    return BesideReferences.of(map(np.concatenate, zip(*parts, strict=True)))


def _beside(
    mine: ScanShard, theirs: Sequence[ScanShard], bounds: np.ndarray, counted: np.ndarray | None
) -> tuple[np.ndarray, ...]:
    size = len(bounds) - 1
    places = counted_places(mine.log_probs, bounds, counted)
    for one in theirs:
        if not np.array_equal(places, counted_places(one.log_probs, bounds, counted)):
            raise UsageError(
                "The model and a reference do not begin a document alike (one has a beginning-of-text token and the other "
                "none), so their losses are over other tokens. Say how both were trained with --begin, or give a "
                "reference that reads as the model does."
            )
    documents = documents_of(bounds)[places]
    others = np.array([one.log_probs[places] for one in theirs], dtype=np.float64)
    losses = np.array([np.bincount(documents, -one, size) for one in others]).T
    difference = mine.log_probs[places] - others.mean(axis=0)
    firsts = _first_predicted(mine.log_probs, bounds)
    wrong = (mine.ranks[places] > 0) & ~np.isin(places, firsts)
    zone = wrong | (np.bincount(documents[wrong], minlength=size) < LEAST_ERRORS)[documents]
    gained = np.bincount(documents, np.maximum(difference, 0) * zone, size)
    lost = np.bincount(documents, np.maximum(-difference, 0) * zone, size)
    return losses, gained, lost, *window_votes(difference, documents, size)


def _first_predicted(log_probs: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The place in the shard of each document's first token that was predicted."""
    scored = np.flatnonzero(~np.isnan(log_probs))
    _, firsts = np.unique(documents_of(bounds)[scored], return_index=True)
    return scored[firsts]


def window_votes(
    difference: np.ndarray, documents: np.ndarray, num_documents: int
) -> tuple[np.ndarray, np.ndarray]:
    """How many windows of each size sum to more than 0, and how many there are: a row a document.

    A document shorter than a size is one window.
    """
    steps = np.rint(difference / NATS_PER_STEP).astype(np.int64)
    sums = np.concatenate([[0], np.cumsum(steps)])
    lengths = np.bincount(documents, minlength=num_documents)
    ends = np.cumsum(lengths)[documents]
    begins = np.arange(len(documents))
    votes, windows = np.zeros((2, num_documents, len(WINDOW_SIZES)))
    for number, size in enumerate(WINDOW_SIZES):
        stops = begins + np.minimum(size, lengths)[documents]
        fits = stops <= ends
        won = sums[stops[fits]] > sums[begins[fits]]
        votes[:, number] = np.bincount(documents[fits], won, num_documents)
        windows[:, number] = np.bincount(documents[fits], minlength=num_documents)
    return votes, windows
