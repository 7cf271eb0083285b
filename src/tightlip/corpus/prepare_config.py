"""Everything that decides what a prepared corpus holds, checked before any text is read."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.settings import Settings, setting

BadRows = Literal["error", "skip"]
TrainedOn = Literal["auto", "all", "assistant", "completion", "labels"]
SplitBy = Literal["document", "user", "text", "none"]
FORMATS = ("text", "messages", "prompt-completion", "preference", "sharegpt", "alpaca", "tokens")

_vocabulary = partial(setting, panel="The vocabulary")


@dataclass(frozen=True, kw_only=True)
class ColumnSettings(Settings):
    """Where a corpus has its text, and what of it may be unusable."""

    panel: ClassVar[str | None] = "The text"

    user_column: str = setting("user", "The column that says who wrote a document.")
    text_column: str = setting("text", "The column that holds the text.")
    bad_rows: BadRows = setting(
        "error", "A row without user or text, or not UTF-8; skipped ones are counted."
    )


@dataclass(frozen=True, kw_only=True)
class TextSettings(ColumnSettings):
    """As above, and how rows of chats became the text that a model was trained on."""

    format: str = setting(
        "auto", "What a row is, where its columns do not tell.", choices=("auto", *FORMATS)
    )
    chat_template: str | None = setting(
        None, "A file with the template of chats.", default_words="the tokenizer's own"
    )
    template_date: str = setting("2026-01-01", "The day that a template is told, where it asks.")
    trained_on: TrainedOn = setting("auto", "Which tokens of a row were trained on.")
    max_length: int | None = setting(
        None, "Tokens of a row that training kept, from its start.", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            date.fromisoformat(self.template_date)
        except ValueError:
            raise UsageError(
                f"template_date={self.template_date!r} is no day. Write it like 2026-01-01."
            ) from None


@dataclass(frozen=True, kw_only=True)
class VocabularyRelease:
    """What a private vocabulary promises: noise over a user's weight, δ, and words a user gives."""

    noise_multiplier: float
    words_per_user: int = 1000
    delta: float = 1e-7

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise UsageError(
                f"vocabulary_noise={self.noise_multiplier} is no noise to hide a user in. "
                "Use a number above 0, such as 2, or leave it out for exact counts."
            )
        if self.words_per_user < 1:
            raise UsageError(
                f"vocabulary_words_per_user={self.words_per_user} lets nobody give a word. Use 1 or more."
            )
        if not 0 < self.delta < 1:
            raise UsageError(
                f"vocabulary_delta={self.delta} is no probability between 0 and 1. "
                "Use one far below 1 over the number of users, such as 1e-7."
            )

    def record(self) -> dict[str, Any]:
        """What a ledger needs to charge it."""
        return {
            "name": "vocabulary",
            "mechanism": "Gaussian histogram of words with a threshold",
            "noise_multiplier": self.noise_multiplier,
            "example_noise_multiplier": self.noise_multiplier / math.sqrt(2),
            "delta": self.delta,
            "unit": "user",
            "words_per_user": self.words_per_user,
            "note": "The words of the vocabulary were chosen by noisy counts of who wrote them.",
        }


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(TextSettings):
    """Everything that decides what a prepared corpus holds.

    `validation` is a file of held-out text; nothing is then split off the corpus. With
    `public_validation` it is the same file, and may be told of.
    """

    split: SplitBy | None = setting(
        None,
        "Hold out by document within each user, by user, by each text itself, or nothing.",
        default_words="document, or none beside --validation",
    )
    holdout: float = setting(0.2, "The share held out for validation.")
    validation: str | None = setting(
        None, "Held-out text as a file of its own; nothing is then split off.", path="CORPUS"
    )
    public_validation: str | None = setting(
        None,
        "The same, of text that you declare public: private training may stop by it.",
        path="CORPUS",
    )
    deduplicate: Literal["none", "sentences", "documents"] = setting(
        "none", "Remove what is repeated."
    )
    scrub: bool = setting(False, "Replace e-mails, phones, URLs, card and account numbers, IPs.")
    names: bool = setting(False, "With --scrub: people's names too, through Presidio.")
    seed: int = setting(0, "Decides what is held out.")
    people: str | None = setting(
        None,
        "A prepared corpus of the same people, whose private runs count in any case.",
        path="CORPUS",
    )
    other_people: bool = setting(
        False,
        "You declare that nobody here is in a corpus registered before: their private runs do not count for these people.",
        flag="--other-people",
    )
    tokenizer: str | None = _vocabulary(
        None, "A model folder whose tokenizer to use.", path="MODEL"
    )
    vocabulary: Literal["words", "bpe"] = _vocabulary("words", "Otherwise build one.")
    vocabulary_size: int | None = _vocabulary(10_000, "Most tokens in it.", at_most=10_000_000)
    min_users: int | None = _vocabulary(None, "Only words that at least this many users wrote.")
    vocabulary_noise: float | None = _vocabulary(
        None, "Release the words with this noise multiplier, private for each user."
    )
    vocabulary_words_per_user: int = _vocabulary(
        VocabularyRelease.words_per_user, "With noise: most words that one user gives.", hidden=True
    )
    vocabulary_delta: float = _vocabulary(
        VocabularyRelease.delta,
        "With noise: the chance that a user's own word gets out.",
        hidden=True,
    )

    def __post_init__(self) -> None:
        self._resolve_held_out()
        if self.people is not None:
            object.__setattr__(self, "people", str(self.people))
        super().__post_init__()
        if self.split != "none" and not 0 < self.holdout < 1:
            raise UsageError(
                f"holdout={self.holdout} is not a share between 0 and 1. Use 0.2, or --split none to hold out nothing."
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
        self._resolve_public()
        if self.validation is None:
            object.__setattr__(self, "split", self.split or "document")
            return
        if not isinstance(self.validation, str | Path):
            raise UsageError(
                f"validation cannot be a {type(self.validation).__name__}. Write the held-out text to a file, and give "
                "its path."
            )
        if self.split not in (None, "none") or self.holdout != PrepareConfig.holdout:
            given = f"split={self.split!r}"
            if self.split in (None, "none"):
                given = f"holdout={self.holdout}"
            raise UsageError(
                f"validation={str(self.validation)!r} brings the held-out text, so nothing is split off the corpus and "
                f"{given} would do nothing. Leave one of them out."
            )
        object.__setattr__(self, "validation", str(self.validation))
        object.__setattr__(self, "split", "none")

    def _resolve_public(self) -> None:
        public = None if self.public_validation is None else str(self.public_validation)
        if public is not None and str(self.validation or public) != public:
            raise UsageError(
                f"validation={str(self.validation)!r} and public_validation={public!r} are both held-out text. Give one of them."
            )
        object.__setattr__(self, "public_validation", public)
        object.__setattr__(self, "validation", public or self.validation)

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
        for name in ("vocabulary_words_per_user", "vocabulary_delta"):
            if (value := getattr(self, name)) != getattr(PrepareConfig, name):
                raise UsageError(
                    f"{name}={value} shapes a vocabulary with noise, which is off. "
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


def check_owners(has_co_owners: bool, config: PrepareConfig) -> None:
    """Refuse to hold out whole people where a text may belong to one on either side."""
    if has_co_owners and config.split == "user":
        raise UsageError(
            "split='user' holds out people with all their texts, and some texts here have several owners, who may fall on both "
            "sides. Use --split document or none."
        )


def check_split(
    num_kept: int, num_held: int, documents_per_user: Counter[str], config: PrepareConfig
) -> None:
    """Refuse a split that leaves one of its sides empty."""
    if not num_kept:
        raise UsageError(
            f"holdout={config.holdout} by {config.split} leaves nothing to train on. Use a smaller --holdout."
        )
    if config.split != "none" and not num_held:
        raise UsageError(
            f"holdout={config.holdout} by {config.split} holds out nothing: {len(documents_per_user)} users with "
            f"at most {max(documents_per_user.values())} documents each. Use a larger --holdout, split by "
            f"{'user' if config.split == 'document' else 'document'}, or --split none."
        )


# Which documents are held out of training: some of each user, whole users, or by their own text


def held_out_documents(user: str, num_documents: int, *, holdout: float, seed: int) -> np.ndarray:
    """True for each of a user's documents that is held out.

    Holds:
        exact: round(holdout · num_documents) are, but every user keeps one to train on.
    """
    num_held = min(round(holdout * num_documents), num_documents - 1)
    places = [_place(seed, user, index) for index in range(num_documents if num_held else 0)]
    held = np.zeros(num_documents, bool)
    held[sorted(range(len(places)), key=places.__getitem__)[:num_held]] = True
    return held


def held_out_users(users: Iterable[str], *, holdout: float, seed: int) -> set[str]:
    """round(holdout · users) of the users; somebody is left to train on."""
    distinct = set(users)
    num_held = min(round(holdout * len(distinct)), len(distinct) - 1)
    return set(sorted(distinct, key=lambda user: (_place(seed, user, None), user))[:num_held])


def held_out_text(user: str, text: str, *, holdout: float, seed: int) -> bool:
    """Whether a document is held out, by its own user and text and nothing else.

    Holds:
        alone: no other document, one more or one less, makes a difference.
        together: documents of a user that read the same are on the same side.
    """
    return int.from_bytes(_place(seed, user, text), "big") < holdout * 2**128


class Splitter:
    """Says of one document after the other, in corpus order, whether it is held out."""

    def __init__(
        self, documents_per_user: dict[str, int], *, split: SplitBy, holdout: float, seed: int
    ) -> None:
        self._documents_per_user = documents_per_user
        self._split, self._holdout, self._seed = split, holdout, seed
        self._held: dict[str, Iterator[bool]] = {}
        self._held_users: set[str] = set()
        if split == "user":
            self._held_users = held_out_users(documents_per_user, holdout=holdout, seed=seed)

    def is_held_out(self, user: str, text: str) -> bool:
        if self._split == "text":
            return held_out_text(user, text, holdout=self._holdout, seed=self._seed)
        if self._split != "document":
            return user in self._held_users
        if user not in self._held:
            num_documents = self._documents_per_user[user]
            held = held_out_documents(user, num_documents, holdout=self._holdout, seed=self._seed)
            self._held[user] = iter(held.tolist())
        return next(self._held[user])


def splitter_for(documents_per_user: dict[str, int], config: PrepareConfig) -> Splitter:
    """Who says what the settings hold out; one has asked for every document once."""
    split = cast(SplitBy, config.split)
    return Splitter(documents_per_user, split=split, holdout=config.holdout, seed=config.seed)


def _place(seed: int, user: str, what: int | str | None) -> bytes:
    message = f"{'user' if what is None else what}\0{user}".encode()
    return blake2b(message, digest_size=16, key=str(seed).encode()).digest()
