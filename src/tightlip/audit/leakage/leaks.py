"""From a scan to what leaked: S, its distinct sequences, their six features, who owns them."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numba import njit

from tightlip.audit.leakage.counting import (
    Counts,
    Sequences,
    added_up,
    count_in_shard,
    end_to_end,
    over_shards,
    owners_in_shard,
)
from tightlip.audit.leakage.runs import (
    DistinctSequences,
    Runs,
    collect_runs,
    copied_runs,
    distinct_sequences,
    sums_over_runs,
)
from tightlip.core.engines import Engine
from tightlip.core.progress import task
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.scorers import NOT_SCORED
from tightlip.scan.store import ScannedCorpus


def _perplexity(log_prob_sum: float, num_scored: int) -> float | None:
    if not num_scored:
        return None
    with np.errstate(over="ignore"):
        return float(np.exp(-log_prob_sum / num_scored))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well the model predicts the corpus: over all tokens that were scored."""

    num_scored: int
    num_hits: int
    log_prob_sum: float
    num_trained: int = 0  # of those scored; 0 where nobody said which were trained on
    trained_log_prob_sum: float = 0.0
    corpus_fingerprint: str | None = None

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
    """S and its distinct sequences. Arrays named `…_of_run` follow runs, the others sequences."""

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
) -> Leaks:
    """Everything the report says about the model alone."""
    corpus = scanned.corpus
    runs, log_prob_sums, fit = _gather_runs(scanned, top_k, carries_text)
    distinct = distinct_sequences(corpus.tokens, runs)
    first, number = distinct.first_run, distinct.number_of_run
    sequences = end_to_end(corpus.tokens, runs.starts[first], runs.lengths[first])
    in_d = count_in_corpus(corpus, sequences, engine, memory_bytes)
    of_run, owners = corpus.owned(runs.documents)
    assert in_d.owned is not None
    return Leaks(
        corpus=corpus,
        runs=runs,
        perplexity_of_run=perplexities(log_prob_sums, runs.lengths),
        copied_of_run=copied_runs(corpus.tokens, corpus.bounds, runs),
        distinct=distinct,
        lengths=runs.lengths[first],
        total_in_s=np.bincount(number, minlength=len(distinct)),
        users_in_s=_distinct_users(number[of_run], owners, len(distinct)),
        total_in_d=in_d.totals,
        users_in_d=in_d.users,
        first_in_d=in_d.first,
        owned=in_d.owned,
        fit=fit,
    )


def fit_of(scanned: ScannedCorpus, top_k: int, carries_text: np.ndarray) -> Fit:
    """How well the model predicts the scanned corpus."""
    fit = _gather_runs(scanned, top_k, carries_text)[2]
    return replace(fit, corpus_fingerprint=scanned.corpus.corpus_fingerprint)


def perplexities(log_prob_sums: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """exp of minus the mean log-probability; infinite where a token was held impossible."""
    with np.errstate(over="ignore"):
        return np.exp(-log_prob_sums / lengths)


def count_in_corpus(
    corpus: TokenizedCorpus,
    sequences: Sequences,
    engine: Engine,
    memory_bytes: int,
    description: str = "Counting in the corpus",
) -> Counts:
    """Occurrences and distinct users of every sequence, and who owns all its documents, shard by shard."""
    count = partial(count_in_shard, sequences=sequences)
    with task(description, corpus.num_tokens) as bar:

        def watched() -> Any:
            for part, counts in over_shards(engine, count, corpus, memory_bytes):
                bar.advance(part.num_tokens)
                yield part, counts

        counts = added_up(watched(), len(sequences))
    if corpus.owners is not None:
        return _by_owner(corpus, sequences, counts, engine, memory_bytes)
    sole = np.flatnonzero(counts.users == 1)
    document = np.searchsorted(corpus.bounds, counts.first[sole], side="right") - 1
    return replace(counts, owned=np.stack([sole, corpus.users[document]]).astype(np.int64))


def _by_owner(
    corpus: TokenizedCorpus, sequences: Sequences, counts: Counts, engine: Engine, memory_bytes: int
) -> Counts:
    """The counts with everybody in the place of writers who owns a document: each document is read
    once for every owner, so that what is known of an owner adds up."""
    users, owned = np.zeros(len(sequences), np.int64), [np.zeros((2, 0), np.int64)]
    large: dict[int, np.ndarray] = {}
    count = partial(owners_in_shard, sequences=sequences, totals=counts.totals)
    with task("Counting owners", len(corpus.owned()[0])) as bar:
        parts = over_shards(engine, count, corpus, memory_bytes, by_owner=True)
        for part, (found, here, all_of) in parts:
            if part.sole_user is None:
                users += here
                owned.append(all_of)
            else:
                large[part.sole_user] = large.get(part.sole_user, 0) + found
            bar.advance(len(part.users))
    for user, found in large.items():
        users += found > 0
        whole = np.flatnonzero((found == counts.totals) & (found > 0))
        owned.append(np.stack([whole, np.full(len(whole), user)]))
    every = np.concatenate(owned, axis=1)
    return replace(counts, users=users, owned=every[:, np.lexsort(every[::-1])])


def _gather_runs(
    scanned: ScannedCorpus, top_k: int, carries_text: np.ndarray
) -> tuple[Runs, np.ndarray, Fit]:
    """Runs of all shards end to end, their summed log-probabilities, and the overall fit."""
    corpus = scanned.corpus
    parts = [np.zeros((3, 0), np.int64)]
    sums = [np.zeros(0)]
    num_scored, num_hits, log_prob_sum = 0, 0, 0.0
    num_trained, trained_sum = 0, 0.0
    for shard in scanned.shards():
        bounds = corpus.bounds[shard.first : shard.end + 1]
        ranks = shard.ranks
        if corpus.roles is not None:  # what a template wrote ends a run, and is in none
            ranks = np.where(corpus.roles[bounds[0] : bounds[-1]] == 0, NOT_SCORED, ranks)
        inside = collect_runs(corpus.tokens, bounds, ranks, carries_text, top_k)
        if corpus.roles is not None:
            changes = np.diff(corpus.roles[bounds[0] : bounds[-1]]) != 0
            inside = cut_at(inside, np.flatnonzero(changes) + 1 + bounds[0])
        parts.append(np.array([inside.starts, inside.lengths, inside.documents + shard.first]))
        sums.append(sums_over_runs(shard.log_probs, inside, int(bounds[0])))
        scored = ranks >= 0
        num_scored += int(scored.sum())
        num_hits += int(inside.lengths.sum())
        log_prob_sum += float(shard.log_probs[scored].sum(dtype=np.float64))
        if corpus.trained is not None:
            scored &= np.asarray(corpus.trained[bounds[0] : bounds[-1]]) > 0
            num_trained += int(scored.sum())
            trained_sum += float(shard.log_probs[scored].sum(dtype=np.float64))
    starts, lengths, documents = np.concatenate(parts, axis=1)
    runs = Runs(starts=starts, lengths=lengths, documents=documents)
    fit = Fit(
        num_scored=num_scored,
        num_hits=num_hits,
        log_prob_sum=log_prob_sum,
        num_trained=num_trained,
        trained_log_prob_sum=trained_sum,
    )
    return runs, np.concatenate(sums), fit


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
    return Runs(
        starts=starts,
        lengths=np.sort(np.concatenate([ends, inner])) - starts,
        documents=documents,
    )


def _distinct_users(numbers: np.ndarray, users: np.ndarray, num_sequences: int) -> np.ndarray:
    num_users = int(users.max(initial=0)) + 1
    pairs = np.unique(numbers * num_users + users)
    return np.bincount(pairs // num_users, minlength=num_sequences)


@dataclass(frozen=True, kw_only=True)
class PublicView:
    """What the public model says of the same text: how surprised it is by what leaked."""

    name: str
    perplexity_of_run: np.ndarray
    completes_of_run: np.ndarray  # whether it would say all of the run itself
    cross_tokenizer: bool
    unique: int | None

    def ratio_of_run(self, leaks: Leaks) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.perplexity_of_run / leaks.perplexity_of_run

    def prior(self, leaks: Leaks) -> np.ndarray:
        """How probable it holds each sequence, the least over its occurrences; NaN if not known."""
        with np.errstate(over="ignore"):
            of_run = self.perplexity_of_run ** -leaks.runs.lengths.astype(np.float64)
        priors = np.full(len(leaks.distinct), np.nan)
        np.fmin.at(priors, leaks.distinct.number_of_run, of_run)
        return priors

    def beyond(self, leaks: Leaks) -> np.ndarray:
        """Which sequences anybody would not say: it does not complete every occurrence in S."""
        number = leaks.distinct.number_of_run
        return np.bincount(number, ~self.completes_of_run, len(leaks.distinct)) > 0


def public_perplexities(
    leaks: Leaks, public: ScannedCorpus, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """PP_public of every run, NaN where the public model did not score it; and whether each of its
    tokens is among the public model's top k."""
    corpus, runs = leaks.corpus, leaks.runs
    same_tokens = public.corpus.tokenizer_fingerprint == corpus.tokenizer_fingerprint
    sums = np.full((2, len(runs)), np.nan)
    for shard in public.shards():
        part = slice(*np.searchsorted(runs.documents, [shard.first, shard.end]))
        inside, base = runs.part(part), int(public.corpus.bounds[shard.first])
        misses = ((shard.ranks < 0) | (shard.ranks >= top_k)).astype(np.float32)
        for row, values in enumerate((shard.log_probs, misses)):
            if same_tokens:
                sums[row, part] = sums_over_runs(values, inside, base)
            else:
                sums[row, part] = sums_over_characters(corpus, public.corpus, values, base, inside)
    return perplexities(sums[0], runs.lengths), sums[1] == 0


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
