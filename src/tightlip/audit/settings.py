"""The settings of the audits: what changes figures. Light, for the command line builds flags of it."""

from dataclasses import dataclass

from tightlip.core.errors import UsageError
from tightlip.core.registry import unknown
from tightlip.core.resampling import ResamplingSettings as ResamplingSettings
from tightlip.core.settings import Settings, bytes_from, separated, setting
from tightlip.corpus.prepare_config import FORMATS


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


CONTEXTS = ("training", "short", "start", "template", "other")


@dataclass(frozen=True, kw_only=True)
class LeakageConfig(Settings):
    """What changes a leakage report's figures or its contents."""

    top_k: int = setting(1, "How many next-token suggestions the deployment shows.", at_least=1)
    redact: bool = setting(False, "No text and no names in the report.")
    occurrences: int | None = setting(
        8, "Occurrences kept per sequence: a number or 'all'.", at_least=1, parse=_occurrences
    )
    fewer_than: int = setting(5, "The p of fewer_than_p.", at_least=1)
    thresholds: tuple[float, ...] = setting(
        (1.5, 2.0, 3.0, 5.0, 10.0),
        "Ratios t at which unique sequences are counted.",
        flag="--curated-at",
        parse=_thresholds,
        default_words="1.5,2,3,5,10",
    )
    contexts: tuple[str, ...] = setting(
        CONTEXTS[:1],
        f"Also ask for what leaks behind other words: {', '.join(CONTEXTS[1:])}.",
        parse=separated(str),
        default_words="training",
    )
    short_prefix: int = setting(
        8, "Tokens of the contexts short, start and other.", at_least=1, at_most=100_000
    )
    context_template: str = setting("{user}:", "What the context template says, of each owner.")
    near: float | None = setting(
        None,
        "Also count windows that the model continues within this edit distance, a share of their characters: 0.1.",
        above=0,
        below=1,
    )
    near_sample: int = setting(
        200, "Windows in which it is looked for, drawn at random.", at_least=1, at_most=10_000_000
    )
    near_tokens: int = setting(20, "Tokens of such a window.", at_least=2, at_most=10_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.contexts:
            if name not in CONTEXTS:
                raise UsageError(unknown("context", name, list(CONTEXTS)))
        if "{user}" not in self.context_template:
            raise UsageError(
                f"context_template={self.context_template!r} does not say where the owner's name goes. Write {{user}} there."
            )


@dataclass(frozen=True, kw_only=True)
class ExtractionConfig(Settings):
    """Which windows are looked for, and what of them is written."""

    lengths: tuple[int, ...] = setting(
        (10, 20, 50), "Tokens of a window; each length is reported apart.", parse=separated(int)
    )
    redact: bool = setting(False, "No text and no names in the report.")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Shared beginnings are counted in 16 bits; nobody draws out longer windows.
        if not self.lengths or not all(1 <= length <= 10_000 for length in self.lengths):
            raise UsageError(
                f"lengths={','.join(map(str, self.lengths))} is out of range. Give numbers of tokens from 1 to 10,000, like 10,20,50."
            )
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))


@dataclass(frozen=True, kw_only=True)
class MembershipSettings(ResamplingSettings):
    """What decides the figures of a membership measure."""

    choose: bool = setting(
        False,
        "Choose the leading score on one half of the users and report on the other half; otherwise it is named "
        "beforehand: EZ with a reference, min-k% without.",
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


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig(Settings):
    """What counts as a copy in generated text, and what a report of it holds."""

    min_words: int = setting(8, "Words that a stretch has at least.", at_least=2, at_most=1000)
    near: float = setting(
        0.1,
        "The share of a stretch's words that may be changed; 0: none.",
        at_least=0,
        at_most=0.25,
    )
    redact: bool = setting(False, "No text and no names in the report.")
    format: str = setting(
        "auto",
        "What a row is, where its columns do not tell.",
        choices=("auto", *FORMATS),
        panel="The text",
    )
    memory: str = setting("4GB", "Most memory the counting may take.")

    def __post_init__(self) -> None:
        super().__post_init__()
        bytes_from(self.memory)
