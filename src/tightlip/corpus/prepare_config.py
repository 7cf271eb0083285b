"""Everything that decides what a prepared corpus holds, checked before any text is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.registry import unknown
from tightlip.corpus.private_vocabulary import VocabularyRelease
from tightlip.corpus.readers import BadRows
from tightlip.corpus.split import SplitBy

_CHOICES = {
    "bad_rows": ("error", "skip"),
    "split": ("document", "user", "text", "none"),
    "deduplicate": ("none", "sentences", "documents"),
    "vocabulary": ("words", "bpe"),
}


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Everything that decides what a prepared corpus holds.

    `validation` is a file of held-out text; nothing is then split off the corpus.
    """

    user_column: str = "user"
    text_column: str = "text"
    bad_rows: BadRows = "error"
    split: SplitBy | None = None  # document, or none beside a file of held-out text
    holdout: float = 0.2
    validation: str | None = None
    deduplicate: Literal["none", "sentences", "documents"] = "none"
    scrub: bool = False
    names: bool = False
    tokenizer: str | None = None
    vocabulary: Literal["words", "bpe"] = "words"
    vocabulary_size: int | None = 10_000
    min_users: int | None = None
    vocabulary_noise: float | None = None
    vocabulary_words_per_user: int = VocabularyRelease.words_per_user
    vocabulary_delta: float = VocabularyRelease.delta
    seed: int = 0

    def __post_init__(self) -> None:
        self._resolve_held_out()
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(unknown(name, str(getattr(self, name)), list(allowed)))
        if self.split != "none" and not 0 < self.holdout < 1:
            raise UsageError(
                f"holdout={self.holdout} is no share between 0 and 1. Use 0.2, or --split none to hold out nothing."
            )
        if self.vocabulary == "bpe" and self.min_users is not None:
            raise UsageError(
                f"min_users={self.min_users} counts who wrote a word, and bpe learns pieces of words. "
                "Use --vocabulary words, or leave it out."
            )
        if self.names and not self.scrub:
            raise UsageError("names=True is part of scrubbing, which is off. Add --scrub.")
        if self.tokenizer is not None and self.min_users is not None:
            raise UsageError(
                f"min_users={self.min_users} shapes a vocabulary built here, but tokenizer={self.tokenizer!r} "
                "brings its own. Leave one of them out."
            )
        if self.vocabulary_noise is None:
            self._check_nothing_of_a_release()
        else:
            self._check_release(self.vocabulary_noise)

    def _resolve_held_out(self) -> None:
        """`split` as it is meant: later stages read it from the settings on file."""
        if self.validation is None:
            object.__setattr__(self, "split", self.split or "document")
            return
        if not isinstance(self.validation, str | Path):
            raise UsageError(
                f"validation cannot be a {type(self.validation).__name__}. Write the held-out text to a file, and give "
                "its path."
            )
        if self.split not in (None, "none") or self.holdout != PrepareConfig.holdout:
            given = (
                f"holdout={self.holdout}"
                if self.split in (None, "none")
                else f"split={self.split!r}"
            )
            raise UsageError(
                f"validation={str(self.validation)!r} brings the held-out text, so nothing is split off the corpus and "
                f"{given} would do nothing. Leave one of them out."
            )
        object.__setattr__(self, "validation", str(self.validation))
        object.__setattr__(self, "split", "none")

    def release(self) -> VocabularyRelease | None:
        """How the vocabulary is to be released, where it is to be private."""
        if self.vocabulary_noise is None:
            return None
        return VocabularyRelease(
            noise_multiplier=self.vocabulary_noise,
            words_per_user=self.vocabulary_words_per_user,
            delta=self.vocabulary_delta,
        )

    def _check_nothing_of_a_release(self) -> None:
        for name in ("words_per_user", "delta"):
            value = getattr(self, f"vocabulary_{name}")
            if value != getattr(VocabularyRelease, name):
                raise UsageError(
                    f"vocabulary_{name}={value} shapes a vocabulary with noise, which is off. "
                    "Add --vocabulary-noise, or leave it out."
                )

    def _check_release(self, noise: float) -> None:
        self.release()
        if self.tokenizer is not None:
            raise UsageError(
                f"vocabulary_noise={noise} hides users in a vocabulary built here, but "
                f"tokenizer={self.tokenizer!r} brings its own. Leave one of them out."
            )
        if self.vocabulary == "bpe":
            raise UsageError(
                f"vocabulary_noise={noise} is added to sums of words, and bpe learns pieces of words "
                "from exact counts. Use --vocabulary words."
            )
        if self.min_users is not None:
            raise UsageError(
                f"min_users={self.min_users} counts exactly who wrote a word, which "
                f"vocabulary_noise={noise} is there to hide; its threshold does the same work. "
                "Leave --min-users out."
            )
        if self.deduplicate != "none":
            raise GuaranteeError(
                f"deduplicate={self.deduplicate!r} lets one user's text decide what is left of another's, "
                f"so vocabulary_noise={noise} would hide less than it says. Use --deduplicate none, "
                "or deduplicate within each user before."
            )
