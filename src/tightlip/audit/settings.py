"""The settings of the audits: what changes figures. Light, for the command line builds flags of it."""

from dataclasses import dataclass

from tightlip.core.errors import UsageError
from tightlip.core.resampling import ResamplingSettings as ResamplingSettings
from tightlip.core.settings import Settings, setting


def _occurrences(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit():
        raise UsageError(f"--occurrences {text!r} is neither a number nor 'all'.")
    return int(text)


def _thresholds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"--curated-at {text!r} is not a list of numbers like 1.5,2,3.") from None


@dataclass(frozen=True, kw_only=True)
class LeakageConfig(Settings):
    """What changes a leakage report's figures or its contents."""

    top_k: int = setting(1, "How many next-token suggestions the deployment shows.", at_least=1)
    redact: bool = setting(False, "No text and no names in the report.")
    occurrences: int | None = setting(
        8,
        "Occurrences kept per sequence: a number or 'all'.",
        at_least=1,
        parse=_occurrences,
    )
    fewer_than: int = setting(5, "The p of fewer_than_p.", at_least=1)
    thresholds: tuple[float, ...] = setting(
        (1.5, 2.0, 3.0, 5.0, 10.0),
        "Ratios t at which unique sequences are counted.",
        flag="--curated-at",
        parse=_thresholds,
        default_words="1.5,2,3,5,10",
    )


@dataclass(frozen=True, kw_only=True)
class ExposureConfig(Settings):
    """How far to enumerate, how many to sample beyond that, and what the tab attack types.

    `num_samples` is the least: with many canaries more are drawn, up to a million, so that a
    canary known by heart passes the bar.
    """

    enumerate_up_to: int = setting(1_000_000, "Score every candidate where there are no more.")
    num_samples: int = setting(
        20_000,
        "Otherwise score at least so many, and 95 for each canary, and estimate.",
        at_least=100,
        at_most=100_000_000,
    )
    prompt_tokens: int = setting(
        1, "Tokens that the tab attack types before it accepts.", at_least=1
    )
    seed: int = setting(0, "Decides the decoys sampled.")


@dataclass(frozen=True, kw_only=True)
class ChoiceConfig(Settings):
    """Which documents may be chosen as real canaries: behind a first token something must be left
    to guess."""

    min_tokens: int = setting(5, "Only documents of at least so many tokens.", at_least=2)


@dataclass(frozen=True, kw_only=True)
class Matching(Settings):
    """When two runs count as equally useful: perplexities no further apart than this share."""

    at_perplexity: float | None = setting(
        None,
        "Compare each run's first snapshot with this validation perplexity, or a better one.",
        above=1,
    )
    tolerance: float = setting(
        0.05, "How far apart perplexities may be and still match.", above=0, below=1
    )


@dataclass(frozen=True, kw_only=True)
class TabConfig(Settings):
    """How much ghost text is shown."""

    tokens: int = setting(12, "Most tokens shown behind the cursor.", at_least=1)
    min_confidence: float = setting(
        0.0, "Stop before a token that is less probable.", at_least=0, below=1
    )
