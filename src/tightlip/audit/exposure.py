"""Exposure: by how many bits a model prefers a planted secret to what it might have been.

Carlini et al. 2019: log2 |R| - log2 rank, where R holds the secret and everything that its
template could have read, ranked by the log-probability of the whole text. A model that never
saw the secret ranks it anywhere, so its exposure is not 0: P(exposure > b) = 2^-b, and the mean
is 1.44 bits.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tightlip.audit.candidates import Candidates, CandidateScorer
from tightlip.audit.scan import Scanner
from tightlip.core.errors import UsageError
from tightlip.corpus.canaries import Canary, Planted
from tightlip.corpus.canary_templates import Pools, read_template

# float32 logits differ by about so much with the rows that share a batch: no preference.
SAME_NATS = 2e-6
# One-sided each, so that the interval misses at most 7.5 times in 100.
LOW_CONFIDENCE, HIGH_CONFIDENCE = 0.95, 0.975


@dataclass(frozen=True, kw_only=True)
class ExposureConfig:
    """How far to enumerate, how many to sample beyond that, and what the tab attack types."""

    enumerate_up_to: int = 1_000_000
    num_samples: int = 20_000
    prompt_tokens: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 100:
            raise UsageError(
                f"num_samples={self.num_samples} shows less than 6 bits at most. Use 20000 or more."
            )
        if self.prompt_tokens < 1:
            raise UsageError(f"prompt_tokens={self.prompt_tokens} types nothing. Use 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An exposure with its interval; `fit_ks` is the tail's misfit, None where none was needed."""

    exposure_bits: float
    low: float
    high: float
    exact: bool
    space: int
    rank: int
    fit_ks: float | None


@dataclass(frozen=True, kw_only=True)
class CanaryExposure:
    """What a model knows of one canary; `prompt` is what the tab attack typed.

    Nobody knows what else a real canary could have read, so it has no exposure. `perplexity` is
    that of the whole text; None where the model lacks a word of it, which only a real one's may.
    """

    text: str
    user: str
    repetitions: int
    kind: str
    exposure_bits: float | None = None
    low: float | None = None
    high: float | None = None
    exact: bool = False
    space: int | None = None
    rank: int | None = None
    tab: bool
    prompt: str
    perplexity: float | None
    fit_ks: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def exposure_of(secret: float, decoys: np.ndarray) -> Estimate:
    """The exact exposure among all decoys, by log-probability.

    A decoy as likely as the secret is placed ahead of it, so a model that cannot tell them
    apart is never accused.

    Holds:
        silent: equal log-probabilities everywhere give 0.
        bounded: the result lies between 0 and log2(len(decoys) + 1).

    >>> exposure_of(-1.0, np.array([-2.0, -3.0, -4.0])).exposure_bits
    2.0
    """
    rank = 1 + int((decoys >= secret - SAME_NATS).sum())
    space = len(decoys) + 1
    bits = math.log2(space) - math.log2(rank)
    return Estimate(
        exposure_bits=bits, low=bits, high=bits, exact=True, space=space, rank=rank, fit_ks=None
    )


def estimated_exposure(secret: float, sample: np.ndarray, space: int, tail: "Tail") -> Estimate:
    """The exposure in a space too large to enumerate, from decoys drawn uniformly from it.

    The interval is Clopper and Pearson's for the share of decoys ahead; with none of n ahead,
    `low` is about log2(n/3). The estimate inside it is the tail of a skew normal.

    Holds:
        inside: low <= exposure_bits <= high <= log2(space).
        covers: the true exposure is in the interval at least 92.5 times in 100.
    """
    cap = math.log2(space)
    ahead = int((sample >= secret - SAME_NATS).sum())
    low, high = (min(max(bits, 0.0), cap) for bits in share_limits_bits(ahead, len(sample)))
    bits = min(max(tail.bits_beyond(secret), low), high)
    rank = min(max(round(space * 2.0**-bits), 1), space)
    return Estimate(
        exposure_bits=bits, low=low, high=high, exact=False, space=space, rank=rank, fit_ks=tail.ks
    )


def share_limits_bits(ahead: int, num: int) -> tuple[float, float]:
    """-log2 of the upper and of the lower limit of a share, `ahead` of `num` seen."""
    from scipy.special import betaincinv

    upper = 1.0 if ahead == num else float(betaincinv(ahead + 1, num - ahead, LOW_CONFIDENCE))
    lower = 0.0 if ahead == 0 else float(betaincinv(ahead, num - ahead + 1, 1 - HIGH_CONFIDENCE))
    return -math.log2(upper), math.inf if lower == 0 else -math.log2(lower)


@dataclass(frozen=True)
class Tail:
    """A skew normal with a sample's mean, spread and skew; `ks` is its Kolmogorov-Smirnov
    distance from the sample."""

    shape: float
    place: float
    scale: float
    ks: float

    def bits_beyond(self, secret: float) -> float:
        """-log2 of the share that lies beyond `secret`."""
        if self.scale == 0:
            return 0.0 if secret <= self.place + SAME_NATS else math.inf
        from scipy.stats import skewnorm

        share = float(skewnorm.sf(secret, self.shape, self.place, self.scale))
        return -math.log2(share) if share > 0 else math.inf


def fitted_tail(sample: np.ndarray) -> Tail:
    """The skew normal with the moments of `sample`."""
    from scipy.stats import kstest, skewnorm

    mean, spread = float(sample.mean()), float(sample.std())
    if spread < SAME_NATS:  # the model tells no two decoys apart: nothing to fit
        return Tail(0.0, mean, 0.0, 0.0)
    # Beyond 0.995 no skew normal is as skew.
    skew = float(np.clip((((sample - mean) / spread) ** 3).mean(), -0.99, 0.99))
    part = abs(skew) ** (2 / 3)
    size = math.sqrt(math.pi / 2 * part / (part + ((4 - math.pi) / 2) ** (2 / 3)))
    delta = math.copysign(size, skew)
    shape = delta / math.sqrt(1 - delta**2)
    scale = spread / math.sqrt(1 - 2 * delta**2 / math.pi)
    place = mean - scale * delta * math.sqrt(2 / math.pi)
    ks = float(kstest(sample, skewnorm(shape, place, scale).cdf).statistic)
    return Tail(shape, place, scale, ks)


def exposed_above_bits(num_canaries: int, alpha: float = 0.05) -> float:
    """The bits that none of so many canaries passes by chance, but for `alpha` of all models.

    >>> exposed_above_bits(1, alpha=0.25)
    2.0
    """
    return math.log2(num_canaries / alpha)


def measure_exposures(
    scanner: Scanner,
    tokenizer: Any,
    key: Planted,
    config: ExposureConfig | None = None,
    others: Sequence[Canary] = (),
) -> list[CanaryExposure]:
    """What the model knows of each canary, in the key's order.

    Other planted canaries, those of further keys (`others`) too, are dropped from R: the model
    may know these as well.
    """
    config = config or ExposureConfig()
    scorer = CandidateScorer(scanner, tokenizer)
    estimates: dict[str, Estimate] = {}
    planted = key.of_planted
    for name in dict.fromkeys(canary.template for canary in planted):
        group = [canary for canary in planted if canary.template == name]
        also = [canary for canary in others if canary.template == name]
        estimates |= _estimates(scorer, group, also, key.pools, config)
    attacks = _attacked(scorer, key.canaries, config.prompt_tokens)
    return [
        CanaryExposure(
            text=canary.text,
            user=canary.user,
            repetitions=canary.repetitions,
            kind=canary.kind,
            **asdict(attack),
            **(asdict(estimates[canary.text]) if canary.kind == "planted" else {}),
        )
        for canary, attack in zip(key.canaries, attacks, strict=True)
    ]


def _estimates(
    scorer: CandidateScorer,
    group: Sequence[Canary],
    others: Sequence[Canary],
    pools: Pools,
    config: ExposureConfig,
) -> dict[str, Estimate]:
    """The exposure of every canary of one template, by text."""
    template = read_template(str(group[0].template))
    candidates = Candidates(template, tuple(tuple(pools[name]) for name in template.places))
    scorer.check_known(candidates)
    # Another key's lists may hold other values, and what those fill is no candidate here.
    among = [canary for canary in others if candidates.holds(canary.values)]
    if template.num_candidates(pools) <= config.enumerate_up_to:
        scores = scorer.score_all(candidates)
        numbers = [candidates.number_of(canary.values) for canary in [*group, *among]]
        decoys = np.delete(scores, numbers)
        return {
            canary.text: exposure_of(scores[number], decoys)
            for canary, number in zip(group, numbers, strict=False)
        }
    texts = [canary.text for canary in group]
    return _sampled(scorer, candidates, texts, {canary.text for canary in among}, config)


def _sampled(
    scorer: CandidateScorer,
    candidates: Candidates,
    secrets: list[str],
    others: set[str],
    config: ExposureConfig,
) -> dict[str, Estimate]:
    planted = {*secrets, *others}
    draw = np.random.default_rng(config.seed)
    drawn = candidates.texts(candidates.drawn(config.num_samples, draw))
    scores = scorer.score_texts([*secrets, *(text for text in drawn if text not in planted)])
    sample = scores[len(secrets) :]
    space = math.prod(candidates.shape) - len(planted) + 1
    tail = fitted_tail(sample)
    return {
        secret: estimated_exposure(float(score), sample, space, tail)
        for secret, score in zip(secrets, scores, strict=False)
    }


@dataclass(frozen=True, kw_only=True)
class Attack:
    """The tab attack on one text: what was typed, whether all came, how likely the whole is."""

    tab: bool
    prompt: str
    perplexity: float | None


def _attacked(
    scorer: CandidateScorer, canaries: Sequence[Canary], prompt_tokens: int
) -> list[Attack]:
    """A real canary with a word that the model lacks cannot come back, and is not scored."""
    texts = [canary.text for canary in canaries]
    known = [
        spelt or canary.kind == "planted"
        for spelt, canary in zip(scorer.spelt(texts), canaries, strict=True)
    ]
    spelt_texts = [text for text, can in zip(texts, known, strict=True) if can]
    found = iter(_attacks(scorer, spelt_texts, prompt_tokens) if spelt_texts else [])
    return [
        next(found)
        if can
        else Attack(tab=False, prompt=scorer.prompt_of(text, prompt_tokens), perplexity=None)
        for text, can in zip(texts, known, strict=True)
    ]


def _attacks(scorer: CandidateScorer, texts: list[str], prompt_tokens: int) -> list[Attack]:
    log_probs, bounds, ranks = scorer.scanned(texts)
    attacks = []
    for text, (begin, end) in zip(texts, pairwise(bounds), strict=True):
        if end - begin <= prompt_tokens:
            raise UsageError(
                f"{text!r} has {end - begin} tokens, so a prompt of {prompt_tokens} leaves nothing to guess. "
                "Use fewer --prompt-tokens."
            )
        attacks.append(
            Attack(
                tab=bool((ranks[begin + prompt_tokens : end] == 0).all()),
                prompt=scorer.prompt_of(text, prompt_tokens),
                perplexity=_perplexity(log_probs[begin:end]),
            )
        )
    return attacks


def _perplexity(log_probs: np.ndarray) -> float:
    """Over the predicted tokens: without a BOS the first one is given."""
    return math.exp(min(-float(np.nanmean(log_probs.astype(np.float64))), 700.0))


def tab_successes(scorer: CandidateScorer, texts: list[str], prompt_tokens: int) -> list[bool]:
    """Whether someone who types a text's first tokens and then accepts each suggestion gets it all.

    Greedy continuation and teacher forcing agree as long as every token is the top one, so one
    pass over the texts tells.
    """
    return [attack.tab for attack in _attacks(scorer, texts, prompt_tokens)]
