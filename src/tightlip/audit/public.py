"""How surprised a public model is by what leaked: the ratio PP_public / PP_lm of each run.

With the same tokenizer the public log-probabilities line up token by token. With another one,
the public tokens that start inside the run's characters are summed and divided by the number
of the audited model's tokens, so that both perplexities are per the same token.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from tightlip.audit.leaks import Leaks, each_run_sum, perplexities
from tightlip.audit.runs import Runs, sums_over_runs
from tightlip.audit.scanned import ScannedCorpus, ScanShard
from tightlip.corpus.tokens import TokenizedCorpus


@dataclass(frozen=True, kw_only=True)
class PublicView:
    """What the public model says of the same text."""

    name: str
    perplexity_of_run: np.ndarray
    cross_tokenizer: bool
    unique: int | None

    def ratio_of_run(self, leaks: Leaks) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.perplexity_of_run / leaks.perplexity_of_run


def public_perplexities(leaks: Leaks, public: ScannedCorpus) -> np.ndarray:
    """PP_public of every run; NaN where the public model scored no token of it."""
    if public.corpus.tokenizer_fingerprint == leaks.corpus.tokenizer_fingerprint:
        bounds = leaks.corpus.bounds

        def sums(shard: ScanShard, runs: Runs) -> np.ndarray:
            return sums_over_runs(shard.log_probs, runs, int(bounds[shard.first]))
    else:

        def sums(shard: ScanShard, runs: Runs) -> np.ndarray:
            return sums_over_characters(leaks.corpus, public.corpus, shard, runs)

    return perplexities(each_run_sum(public, leaks.runs, sums), leaks.runs.lengths)


def sums_over_characters(
    audited: TokenizedCorpus, public: TokenizedCorpus, shard: ScanShard, runs: Runs
) -> np.ndarray:
    """Summed log-probability of the public tokens that start inside each run's characters."""
    assert audited.spans is not None
    assert public.spans is not None
    begins = audited.spans[runs.starts, 0]
    ends = audited.spans[runs.starts + runs.lengths - 1, 1]
    return _sums_in_spans(
        begins,
        ends,
        runs.documents,
        public.bounds,
        public.spans,
        shard.log_probs,
        public.bounds[shard.first],
    )


@njit(cache=True, nogil=True)
def _sums_in_spans(begins, ends, documents, bounds, spans, log_probs, base):  # type: ignore[no-untyped-def]
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
            sums[run] += log_probs[low - base]
            low += 1
    return sums
