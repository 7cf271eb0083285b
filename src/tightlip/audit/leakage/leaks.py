"""From a scan to what leaked: S, its distinct sequences, their six features, who owns them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from tightlip.audit.leakage import counting
from tightlip.audit.leakage import runs as all_runs
from tightlip.audit.leakage.runs import DistinctSequences, Runs
from tightlip.audit.leakage.spill import IN_MEMORY, RUN_BYTES, Gathered, Room
from tightlip.core.engines import Engine
from tightlip.core.progress import task
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.store import NOT_SCORED, ScannedCorpus


def perplexities(log_prob_sums: np.ndarray | float, lengths: np.ndarray | int) -> np.ndarray:
    """exp of minus the mean log-probability; infinite where a token was held impossible."""
    with np.errstate(over="ignore"):
        return np.exp(-log_prob_sums / lengths)


def _perplexity(log_prob_sum: float, num_scored: int) -> float | None:
    return float(perplexities(log_prob_sum, num_scored)) if num_scored else None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well the model predicts the corpus: over all tokens that were scored."""

    num_scored: int = 0
    num_hits: int = 0
    log_prob_sum: float = 0.0
    num_trained: int = 0  # of those scored; 0 where nobody said which were trained on
    trained_log_prob_sum: float = 0.0
    corpus_fingerprint: str | None = None

    def __add__(self, other: "Fit") -> "Fit":
        names = [field.name for field in fields(self) if field.name != "corpus_fingerprint"]
        return Fit(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def perplexity(self) -> float | None:
        return _perplexity(self.log_prob_sum, self.num_scored)

    @property
    def trained_perplexity(self) -> float | None:
        """Over what was trained on alone."""
        return _perplexity(self.trained_log_prob_sum, self.num_trained)

    @property
    def accuracy(self) -> float | None:
        return self.num_hits / self.num_scored if self.num_scored else None


@dataclass(frozen=True, kw_only=True)
class Leaks:
    """S and its distinct sequences. Arrays named `…_of_run` follow runs, the others sequences.

    All of them are in `room`, and are worked on in its parts.
    """

    room: Room
    corpus: TokenizedCorpus
    runs: Runs
    perplexity_of_run: np.ndarray
    copied_of_run: np.ndarray
    distinct: DistinctSequences
    lengths: np.ndarray
    total_in_s: np.ndarray
    users_in_s: np.ndarray
    total_in_d: np.ndarray
    users_in_d: np.ndarray
    first_in_d: np.ndarray  # where in the corpus a unique one first stands
    owned: np.ndarray  # a column (sequence, user) for each owner of a unique one
    fit: Fit

    @cached_property
    def unique(self) -> np.ndarray:
        """Sequences that one user alone wrote, anywhere in the corpus; where texts have several
        owners, those of which somebody owns every document that they stand in."""
        return has_owner(self.owned, len(self.distinct))

    def of_every_run(self, of_run: np.ndarray) -> np.ndarray:
        """Which sequences have all of their runs among these."""
        mask = np.ones(len(self.distinct), dtype=bool)
        for part in self.room.parts(len(self.runs)):
            mask[self.distinct.number_of_run[part][~of_run[part]]] = False
        return mask

    def over_runs(
        self, combine: np.ufunc, start: float, of_runs: Callable[[slice], np.ndarray]
    ) -> np.ndarray:
        """Of each sequence the figures of its runs, which `of_runs` gives in parts, combined."""
        figures = self.room.full(len(self.distinct), start, np.float64)
        for part in self.room.parts(len(self.runs)):
            combine.at(figures, self.distinct.number_of_run[part], of_runs(part))
        return figures

    @property
    def num_written(self) -> np.ndarray:
        """Tokens of each document that people wrote: of chats not those of the template."""
        bounds, roles = self.corpus.bounds, self.corpus.roles
        if roles is None:
            return np.diff(bounds)
        return np.diff(np.concatenate([[0], np.cumsum(np.asarray(roles) > 0)])[bounds])

    @property
    def role_names(self) -> list[str]:
        return self.corpus.role_names or []

    @property
    def roles(self) -> np.ndarray:
        """The number of each sequence's role, where the model first completes it; of chats only."""
        assert self.corpus.roles is not None
        return self.corpus.roles[self.runs.starts[self.distinct.first_run]]


def has_owner(owned: np.ndarray, num_sequences: int) -> np.ndarray:
    """Which sequences are in a column of `owned`."""
    mask = np.zeros(num_sequences, dtype=bool)
    mask[owned[0]] = True
    return mask


def find_leaks(
    scanned: ScannedCorpus,
    *,
    top_k: int,
    carries_text: np.ndarray,
    engine: Engine,
    memory_bytes: int,
    work: Path | None = None,
) -> Leaks:
    """Everything the report says about the model alone. Runs that do not fit `memory_bytes` are kept
    in files of `work`."""
    corpus = scanned.corpus
    kinds = [np.int64, np.int64, np.int64, np.float64, bool]
    most, fit = memory_bytes // RUN_BYTES, Fit()
    gathered = Gathered(kinds, work, most)
    for inside, sums, fit_inside in _runs_by_shard(scanned, top_k, carries_text):
        copied = all_runs.copied_runs(corpus.tokens, corpus.bounds, inside)
        perplexity = perplexities(sums, inside.lengths)
        gathered.add(inside.starts, inside.lengths, inside.documents, perplexity, copied)
        fit += fit_inside
    starts, lengths, documents, perplexity_of_run, copied_of_run = gathered.columns()
    runs = Runs(starts=starts, lengths=lengths, documents=documents)
    room = IN_MEMORY
    if work is not None and len(runs) > most:
        # Half is for what is counted meanwhile, and workers share the rest.
        room = Room(folder=work, at_once=max(1, most // 2 // engine.workers))
    distinct = all_runs.distinct_in(room, corpus.tokens, runs)
    first, number = distinct.first_run, distinct.number_of_run
    lengths = room.kept(runs.lengths[first])
    sequences = counting.sequences_in(room, corpus.tokens, runs.starts[first], lengths)
    in_d = count_in_corpus(corpus, sequences, engine, memory_bytes)
    assert in_d.owned is not None
    return Leaks(
        room=room,
        corpus=corpus,
        runs=runs,
        perplexity_of_run=perplexity_of_run,
        copied_of_run=copied_of_run,
        distinct=distinct,
        lengths=lengths,
        total_in_s=room.kept(np.bincount(number, minlength=len(distinct))),
        users_in_s=_users_in_s(corpus, documents, distinct, room),
        total_in_d=in_d.totals,
        users_in_d=in_d.users,
        first_in_d=in_d.first,
        owned=in_d.owned,
        fit=fit,
    )


def fit_of(scanned: ScannedCorpus, top_k: int, carries_text: np.ndarray) -> Fit:
    """How well the model predicts the scanned corpus."""
    fit = sum((one for _, _, one in _runs_by_shard(scanned, top_k, carries_text)), Fit())
    return replace(fit, corpus_fingerprint=scanned.corpus.corpus_fingerprint)


def count_in_corpus(
    corpus: TokenizedCorpus,
    sequences: counting.Sequences,
    engine: Engine,
    memory_bytes: int,
    description: str = "Counting in the corpus",
) -> counting.Counts:
    """Occurrences and distinct users of every sequence, and who owns all its documents, shard by shard."""
    count, room = partial(counting.count_in_shard, sequences=sequences), sequences.room
    with task(description, corpus.num_tokens) as bar:

        def watched() -> Any:
            shards = counting.over_shards(engine, count, corpus, memory_bytes, room=room)
            for part, counts in shards:
                bar.advance(part.num_tokens)
                yield part, counts

        counts = counting.added_up(watched(), len(sequences), room)
    if corpus.owners is not None:
        return _by_owner(corpus, sequences, counts, engine, memory_bytes)
    sole = np.flatnonzero(counts.users == 1)
    document = np.searchsorted(corpus.bounds, counts.first[sole], side="right") - 1
    return replace(counts, owned=room.stacked([sole, corpus.users[document]]))


def _by_owner(
    corpus: TokenizedCorpus,
    sequences: counting.Sequences,
    counts: counting.Counts,
    engine: Engine,
    memory_bytes: int,
) -> counting.Counts:
    """The counts with everybody in the place of writers who owns a document: each document is read
    once for every owner, so that what is known of an owner adds up."""
    zeros = partial(sequences.room.full, len(sequences), 0, np.int64)
    users, owned = zeros(), [np.zeros((2, 0), np.int64)]
    count = partial(counting.owners_in_shard, sequences=sequences, totals=counts.totals)
    with task("Counting owners", len(corpus.owned()[0])) as bar:
        shards = partial(counting.over_shards, engine, count, corpus, memory_bytes)
        parts = shards(room=sequences.room, by_owner=True)
        # The pieces of a large owner follow each other: of one at a time all is known.
        for user, pieces in groupby(parts, lambda piece: piece[0].sole_user):
            of_user = users if user is None else zeros()
            for part, ((numbers, found, here), all_of) in pieces:
                of_user[numbers] += here if user is None else found
                if user is None:
                    owned.append(all_of)
                bar.advance(len(part.users))
            if user is not None:
                users += of_user > 0
                whole = np.flatnonzero((of_user == counts.totals) & (of_user > 0))
                owned.append(np.stack([whole, np.full(len(whole), user)]))
    every = np.concatenate(owned, axis=1)
    return replace(counts, users=users, owned=every[:, np.lexsort(every[::-1])])


def _runs_by_shard(
    scanned: ScannedCorpus, top_k: int, carries_text: np.ndarray
) -> Iterator[tuple[Runs, np.ndarray, Fit]]:
    """Of each shard the runs, their summed log-probabilities, and how well the model predicts it."""
    corpus = scanned.corpus
    for shard in scanned.shards():
        bounds = corpus.bounds[shard.first : shard.end + 1]
        ranks = shard.ranks
        if corpus.roles is not None:  # what a template wrote ends a run, and is in none
            ranks = np.where(corpus.roles[bounds[0] : bounds[-1]] == 0, NOT_SCORED, ranks)
        runs = all_runs.collect_runs(corpus.tokens, bounds, ranks, carries_text, top_k)
        if corpus.roles is not None:
            changes = np.diff(corpus.roles[bounds[0] : bounds[-1]]) != 0
            runs = cut_at(runs, np.flatnonzero(changes) + 1 + bounds[0])
        scored = ranks >= 0
        fit = Fit(
            num_scored=int(scored.sum()),
            num_hits=int(runs.lengths.sum()),
            log_prob_sum=float(shard.log_probs[scored].sum(dtype=np.float64)),
        )
        if corpus.trained is not None:
            scored &= np.asarray(corpus.trained[bounds[0] : bounds[-1]]) > 0
            trained_sum = float(shard.log_probs[scored].sum(dtype=np.float64))
            fit = replace(fit, num_trained=int(scored.sum()), trained_log_prob_sum=trained_sum)
        sums = all_runs.sums_over_runs(shard.log_probs, runs, int(bounds[0]))
        yield replace(runs, documents=runs.documents + shard.first), sums, fit


def cut_at(runs: Runs, places: np.ndarray) -> Runs:
    """The runs, each cut where one of `places` lies inside it: there somebody else speaks.

    >>> cut = cut_at(Runs(starts=np.array([2, 9]), lengths=np.array([4, 3]), documents=np.array([0, 1])), np.array([2, 4, 8]))
    >>> cut.starts.tolist(), cut.lengths.tolist(), cut.documents.tolist()
    ([2, 4, 9], [2, 2, 3], [0, 0, 1])
    """
    ends = runs.starts + runs.lengths
    run = np.searchsorted(runs.starts, places, side="left") - 1
    is_inside = (run >= 0) & (places < ends[run]) if len(runs) else np.zeros(len(places), bool)
    inner, whose = places[is_inside], run[is_inside]
    starts = np.sort(np.concatenate([runs.starts, inner]))
    documents = np.sort(np.concatenate([runs.documents, runs.documents[whose]]))
    lengths = np.sort(np.concatenate([ends, inner])) - starts
    return Runs(starts=starts, lengths=lengths, documents=documents)


def _users_in_s(
    corpus: TokenizedCorpus, documents: np.ndarray, distinct: DistinctSequences, room: Room
) -> np.ndarray:
    users = room.full(len(distinct), 0, np.int64)
    for bucket in distinct.buckets:
        pairs = np.zeros(0, np.int64)
        for runs in (bucket[part] for part in room.parts(len(bucket))):
            of_run, owners = corpus.owned(documents[runs])
            inside = distinct.number_of_run[runs][of_run] * corpus.num_users + owners
            pairs = np.unique(np.append(pairs, inside))
        np.add.at(users, pairs // corpus.num_users, 1)
    return users


@dataclass(frozen=True, kw_only=True)
class PublicView:
    """What the public model says of the same text: how surprised it is by what leaked."""

    name: str
    perplexity_of_run: np.ndarray
    completes_of_run: np.ndarray  # whether it would say all of the run itself
    cross_tokenizer: bool
    unique: int | None

    def prior(self, leaks: Leaks) -> np.ndarray:
        """How probable it holds each sequence, the least over its occurrences; NaN if not known."""
        lengths = leaks.runs.lengths
        with np.errstate(over="ignore"):
            return leaks.over_runs(
                np.fmin, np.nan, lambda part: self.perplexity_of_run[part] ** (-1.0 * lengths[part])
            )

    def beyond(self, leaks: Leaks) -> np.ndarray:
        """Which sequences anybody would not say: it does not complete every occurrence in S."""
        return ~leaks.of_every_run(self.completes_of_run)


def public_perplexities(
    leaks: Leaks, public: ScannedCorpus, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """PP_public of every run, NaN where the public model did not score it; and whether each of its
    tokens is among the public model's top k."""
    corpus, runs = leaks.corpus, leaks.runs
    same_tokens = public.corpus.tokenizer_fingerprint == corpus.tokenizer_fingerprint
    sums = [leaks.room.full(len(runs), np.nan, np.float64) for _ in range(2)]
    for shard in public.shards():
        part = slice(*np.searchsorted(runs.documents, [shard.first, shard.end]))
        inside, base = runs.part(part), int(public.corpus.bounds[shard.first])
        misses = ((shard.ranks < 0) | (shard.ranks >= top_k)).astype(np.float32)
        for row, values in enumerate((shard.log_probs, misses)):
            if same_tokens:
                sums[row][part] = all_runs.sums_over_runs(values, inside, base)
            else:
                sums[row][part] = sums_over_characters(corpus, public.corpus, values, base, inside)
    for part in leaks.room.parts(len(runs)):
        sums[0][part] = perplexities(sums[0][part], runs.lengths[part])
    return sums[0], leaks.room.made(len(runs), bool, lambda part: sums[1][part] == 0)


def sums_over_characters(
    audited: TokenizedCorpus, public: TokenizedCorpus, values: np.ndarray, base: int, runs: Runs
) -> np.ndarray:
    """Sums over the public tokens that start inside each run's characters; values[0] is of token
    `base`."""
    assert audited.spans is not None
    assert public.spans is not None
    begins = audited.spans[runs.starts, 0]
    ends = audited.spans[runs.starts + runs.lengths - 1, 1]
    bounds, spans = public.bounds, public.spans
    return _sums_in_spans(begins, ends, runs.documents, bounds, spans, values, base)


@njit(cache=True, nogil=True)
def _sums_in_spans(begins, ends, documents, bounds, spans, values, base):  # type: ignore[no-untyped-def]
    sums = np.zeros(len(begins), dtype=np.float64)
    for run in range(len(begins)):
        low, high = bounds[documents[run]], bounds[documents[run] + 1]
        last = high
        while low < high:  # the first public token that starts at or after the run
            middle = (low + high) >> 1
            if spans[middle, 0] < begins[run]:
                low = middle + 1
            else:
                high = middle
        if low == last or spans[low, 0] >= ends[run]:
            sums[run] = np.nan  # not 0, which would pass for certainty
        while low < last and spans[low, 0] < ends[run]:
            sums[run] += values[low - base]
            low += 1
    return sums
