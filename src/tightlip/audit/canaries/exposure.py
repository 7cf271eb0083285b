"""Exposure: by how many bits a model prefers a planted secret to what it might have been.

Carlini et al. 2019: log2 |R| - log2 rank, where R holds the secret and everything that its
template could have read, ranked by the log-probability of the whole text. A model that never
saw the secret ranks it anywhere, so its exposure is not 0: P(exposure > b) = 2^-b, and the mean
is 1.44 bits.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit.canaries.candidates import TEXTS_AT_ONCE, Candidates, CandidateScorer, Places
from tightlip.audit.canaries.tab_attack import Attack, attacked
from tightlip.audit.measures import Audited, written_to
from tightlip.audit.settings import ExposureConfig
from tightlip.core.errors import UsageError
from tightlip.core.gates import Known
from tightlip.core.progress import log, task
from tightlip.core.run_folder import RunRecord, is_run, open_run
from tightlip.core.settings import split_settings, takes
from tightlip.corpus.canaries import ALPHA, Canary, Planted, exposed_above_bits, read_canary_key
from tightlip.corpus.canary_templates import Pools, read_template
from tightlip.corpus.opening import model_folder, open_run_corpus
from tightlip.corpus.prepare import is_prepared
from tightlip.corpus.readers import open_corpus
from tightlip.models.folders import model_fingerprint
from tightlip.scan.models import OpenedModel, open_model
from tightlip.scan.options import ModelSettings, ScanOptions
from tightlip.scan.scanner import Scanner

Keys = str | Path | Sequence[str | Path]
# float32 logits differ by about so much with the rows that share a batch: no preference.
SAME_NATS = 2e-6
# One-sided each, so that the interval misses at most 7.5 times in 100.
LOW_CONFIDENCE, HIGH_CONFIDENCE = 0.95, 0.975
# With one of n sampled candidates ahead, the upper limit of their share is below 4.75/n.
_ONE_AHEAD = 4.75
MOST_SAMPLES = 1_000_000  # unless more are asked for: as much work as enumerating


@dataclass(frozen=True)
class Estimate:
    """An exposure with its interval; `fit_ks` is the tail's misfit, None where none was needed."""

    exposure_bits: float
    low: float
    high: float
    _: KW_ONLY
    exact: bool = False
    space: int
    rank: int
    num_samples: int | None = None
    fit_ks: float | None = None


@dataclass(frozen=True, kw_only=True)
class CanaryExposure(Attack):
    """What a model knows of one canary; `prompt` is what the tab attack typed.

    Nobody knows what else a real canary could have read, so it has no exposure. `perplexity` is
    that of the whole text; None where the model lacks a word of it. A template with such a word, in
    it or in its lists, has no exposure either.
    """

    text: str
    user: str
    repetitions: int
    kind: str
    template: str | None
    exposure_bits: float | None = None
    low: float | None = None
    high: float | None = None
    exact: bool = False
    space: int | None = None
    rank: int | None = None
    num_samples: int | None = None
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
    return Estimate(bits, bits, bits, exact=True, space=space, rank=rank)


def estimated_exposure(secret: float, sample: np.ndarray, space: int, tail: "Tail") -> Estimate:
    """The exposure in a space too large to enumerate, from decoys drawn uniformly from it.

    The interval is Clopper and Pearson's for the share of decoys ahead; with none of n ahead,
    `low` is about log2(n/3). The estimate inside it is the tail of a skew normal.

    Holds:
        inside: low <= exposure_bits <= high <= log2(space).
        covers: the true exposure is in the interval at least 92.5 times in 100.
    """
    cap, num = math.log2(space), len(sample)
    ahead = int((sample >= secret - SAME_NATS).sum())
    low, high = (min(max(bits, 0.0), cap) for bits in share_limits_bits(ahead, num))
    bits = min(max(tail.bits_beyond(secret), low), high)
    rank = min(max(round(space * 2.0**-bits), 1), space)
    return Estimate(bits, low, high, space=space, rank=rank, num_samples=num, fit_ks=tail.ks)


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


def samples_needed(num_canaries: int, alpha: float = ALPHA) -> int:
    """So many that of so many canaries one with at most one of them ahead still passes the bar."""
    return math.ceil(_ONE_AHEAD * num_canaries / alpha)


def most_bits(entry: Mapping[str, Any]) -> float:
    """What `low` of a measured canary is if nothing is ahead of it."""
    all_bits = math.log2(entry["space"])
    if not entry.get("num_samples"):
        return all_bits
    # Clopper and Pearson's limit with none ahead: (1 - share)^n = 1 - confidence.
    share = -math.expm1(math.log(1 - LOW_CONFIDENCE) / entry["num_samples"])
    return min(all_bits, -math.log2(share))


def can_be_shown(entry: Mapping[str, Any], bar: float) -> bool:
    """Whether a measured canary could have passed `bar` bits: known by heart, it would.

    Holds:
        by_heart: of a canary ahead of everything it is true just where `low` is above the bar.
    """
    return most_bits(entry) > bar


def measure_exposures(
    scanner: Scanner,
    tokenizer: Any,
    key: Planted,
    config: ExposureConfig | None = None,
    others: Sequence[Canary] = (),
) -> list[CanaryExposure]:
    """What the model knows of each canary, in the key's order.

    Other planted canaries, those of further keys (`others`) too, are dropped from R by what they
    read, to us or to the model, whatever their template: it may know these as well. A text
    counts once in R, in however many ways it can be filled.

    Holds:
        reachable: a canary of a large space that is ahead of every sample passes the bar, for up
            to ten thousand canaries.
    """
    config = config or ExposureConfig()
    scorer = CandidateScorer(scanner, tokenizer)
    measured = _spelt_templates(scorer, key)
    # What takes long comes last: whatever is refused is refused before.
    attacks = attacked(scorer, key.canaries, config.prompt_tokens)
    estimates = _estimates(scorer, key, measured, others, config)
    told = ("text", "user", "repetitions", "kind", "template")
    return [
        CanaryExposure(
            **{name: getattr(canary, name) for name in told},
            **asdict(attack),
            **estimates.get((canary.template, canary.text), {}),
        )
        for canary, attack in zip(key.canaries, attacks, strict=True)
    ]


def _spelt_templates(scorer: CandidateScorer, key: Planted) -> list[str]:
    """The templates that the vocabulary can spell with all their lists; refused where none is."""
    names = list(dict.fromkeys(str(canary.template) for canary in key.of_planted))
    reasons: dict[str, UsageError] = {}
    for name in names:
        try:
            scorer.check_known(_candidates(name, key.pools))
        except UsageError as error:
            reasons[name] = error
    if reasons and len(reasons) == len(names):
        raise next(iter(reasons.values()))
    for name, reason in reasons.items():
        log.warning("Exposure of %r is not measured. %s", name, reason)
    return [name for name in names if name not in reasons]


def _estimates(
    scorer: CandidateScorer,
    key: Planted,
    names: Sequence[str],
    others: Sequence[Canary],
    config: ExposureConfig,
) -> dict[tuple[str | None, str], dict[str, Any]]:
    """The exposure of every planted canary of these templates, by template and text."""
    estimates: dict[tuple[str | None, str], dict[str, Any]] = {}
    everything = [*key.of_planted, *others]
    planted = list(dict.fromkeys(canary.text for canary in everything))
    num_samples = max(config.num_samples, min(samples_needed(len(everything)), MOST_SAMPLES))
    for name in names:
        group = [canary for canary in key.of_planted if canary.template == name]
        candidates = _candidates(name, key.pools)
        asked = (scorer, candidates, group, scorer.places_reading(candidates, planted))
        if math.prod(candidates.shape) <= max(config.enumerate_up_to, num_samples):
            by_text = _enumerated(*asked)
        else:
            by_text = _sampled(*asked, num_samples, np.random.default_rng(config.seed))
        estimates |= {(name, text): asdict(estimate) for text, estimate in by_text.items()}
    return estimates


def _candidates(name: str, pools: Pools) -> Candidates:
    template = read_template(name)
    return Candidates(template, tuple(tuple(pools[place]) for place in template.places))


def _enumerated(
    scorer: CandidateScorer, candidates: Candidates, group: Sequence[Canary], drop: Places
) -> dict[str, Estimate]:
    """The exact exposure of every canary of one template, by text; the places in `drop` are in no R."""
    secrets = {canary.text: candidates.number_of(canary.values) for canary in group}
    scores = scorer.score_all(candidates, list(secrets.values()))
    stays = candidates.first_of_each_text()
    stays[np.ravel_multi_index(np.array(list(drop)).T, candidates.shape)] = False
    decoys = scores[stays]
    return {text: exposure_of(float(scores[number]), decoys) for text, number in secrets.items()}


def _sampled(
    scorer: CandidateScorer,
    candidates: Candidates,
    group: Sequence[Canary],
    drop: Places,
    num_samples: int,
    draw: np.random.Generator,
) -> dict[str, Estimate]:
    """The same from decoys drawn at random, a bounded number of texts at a time."""
    parts = [np.empty(0)]
    with task("Scoring candidates", num_samples) as bar:
        for start in range(0, num_samples, TEXTS_AT_ONCE):
            num = min(TEXTS_AT_ONCE, num_samples - start)
            if texts := candidates.drawn_texts(num, draw, drop):
                parts.append(scorer.score_texts(texts))
            bar.advance(num)
    sample = np.concatenate(parts)
    if not len(sample):
        raise UsageError(
            f"Every sampled candidate of {candidates.template.text!r} is planted itself, so there is nothing to compare with. "
            "Plant fewer canaries, or use larger slots."
        )
    dropped = {*candidates.texts(np.array(list(drop)).reshape(-1, len(candidates.shape)))}
    space, tail = candidates.readings.num_texts() - len(dropped) + 1, fitted_tail(sample)
    secrets = [canary.text for canary in group]
    scored = zip(secrets, scorer.score_texts(secrets), strict=True)
    return {text: estimated_exposure(float(score), sample, space, tail) for text, score in scored}


@takes(ExposureConfig, ModelSettings)
def measure_canaries(
    model: str | Path,
    key: Keys,
    *,
    out: str | Path | None = None,
    device: str = "auto",
    **settings: Any,
) -> list[dict[str, Any]]:
    """What a model, or the one that a run trained, knows of every canary in a key or several.

    With `out` the list is written there, for its owner only.
    """
    config, how = split_settings(settings, ExposureConfig, ModelSettings)
    keys = read_keys(key)
    folder = model_folder(Path(model))
    _refuse_own_choice(folder, keys)
    if is_run(Path(model)) and (warning := missing_copies(open_run(Path(model)), keys)):
        log.warning(warning)
    opened = open_model(folder, ScanOptions(device=device, **how.tree()))
    return written_to(out, exposures_in(opened, keys, config))


def exposures_in(
    model: OpenedModel, keys: Sequence[Planted], config: ExposureConfig
) -> list[dict[str, Any]]:
    """What the model knows of every canary of all keys, as JSON can hold it."""
    entries: list[dict[str, Any]] = []
    for key in keys:
        others = [canary for other in keys if other is not key for canary in other.of_planted]
        measured = measure_exposures(model.scanner, model.tokenizer, key, config, others)
        entries += [entry.to_json() for entry in measured]
    return entries


# What a gate may ask for.
FIGURES: Known = dict.fromkeys(
    ("num_canaries", "num_exposed", "num_tab", "highest_bits", "highest_low_bits")
)


def gated(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a list as gates name them."""
    planted = [one for one in entries if one["exposure_bits"] is not None]
    bar = exposed_above_bits(max(len(planted), 1))
    return {
        "num_canaries": len(entries),
        "num_exposed": sum(one["low"] > bar for one in planted)
        if any(can_be_shown(one, bar) for one in planted)
        else None,
        "num_tab": sum(bool(one["tab"]) for one in entries),
        "highest_bits": max((one["exposure_bits"] for one in planted), default=None),
        "highest_low_bits": max((one["low"] for one in planted), default=None),
    }


class CanaryAudit:
    """What a model knows of the canaries in the keys: exposures, and what TAB completes."""

    finds_secrets = True

    def depends_on(self, audited: Audited) -> dict[str, Any]:
        return {"keys": audited.key_digests, "seed": audited.measuring.seed}

    def figures(self, audited: Audited) -> list[dict[str, Any]]:
        keys = read_keys([key.path for key in audited.measuring.keys])
        _refuse_own_choice(audited.model, keys)
        config = ExposureConfig(seed=audited.measuring.seed)
        return exposures_in(audited.scans.opened(audited.model), keys, config)

    def accuses(self, figures: list[dict[str, Any]]) -> bool:
        return bool(gated(figures)["num_exposed"])


def missing_copies(record: RunRecord | None, keys: Sequence[Planted]) -> str | None:
    """A sentence where planted canaries do not stand in a run's training text as the keys say:
    what is measured is then another model, or another key, than its reader thinks."""
    planted = [canary for key in keys for canary in key.of_planted]
    if not planted or record is None:
        return None
    if not is_prepared(record.corpus_folder):
        return "The run's training text is no longer there, so nobody can tell whether the canaries stood in it."
    wanted = {canary.text for canary in planted}
    open_run_corpus(record)  # refused where other text lies there now
    batches = open_corpus(record.corpus_folder / "train.parquet").batches()
    copies = Counter(text for batch in batches for text in batch.texts if text in wanted)
    if not copies:
        return (
            f"None of the {len(planted):,} planted canaries stands in the run's training text: it never saw them, and that "
            "it knows none says nothing about what it keeps. Is this the key of another corpus?"
        )
    fewer = sum(copies[canary.text] < canary.repetitions for canary in planted)
    if not fewer:
        return None
    return (
        f"{fewer:,} of {len(planted):,} planted canaries stand in the run's training text fewer times than the key says: "
        "some copies were held out, scrubbed or taken for duplicates. Plant after splitting."
    )


def read_keys(given: Keys) -> list[Planted]:
    """The keys, each once; one path stands for itself."""
    paths = [given] if isinstance(given, str | Path) else list(given)
    return [read_canary_key(path) for path in dict.fromkeys(Path(path).resolve() for path in paths)]


def _refuse_own_choice(folder: Path, keys: Sequence[Planted]) -> None:
    choosers = frozenset[str]().union(*(key.chosen_by for key in keys))
    if choosers and model_fingerprint(folder) in choosers:
        raise UsageError(
            f"{folder} comes from the run that chose these real canaries as what surprises it most, so the choice "
            "flatters it. Choose with an unmitigated run of another --seed, and measure all models with that key."
        )
