"""Tokens by which members and non-members may be compared where the vocabulary came from training.

A word vocabulary is built on the training part, so a rare word of a training document is in it
because of that document, while a held-out document's rare words are <unk>. Rare words are hard to
predict and <unk> is easy: the members look unknown to a model that never saw either. On half of the
bundled plays such a model had an AUC of 0.368 (0.349 to 0.388) where chance is 0.5, which hides as
much leakage. So a token counts only if its word would be in the vocabulary without all that its user
wrote in training, and <unk> never does. With this the same model had 0.500 (0.480 to 0.522); where
whole users were held out, it was 0.278 (0.191 to 0.380) for users without and 0.494 (0.384 to 0.600)
with it.

The user is left out on both sides, though a held-out document brought no word in itself. Leaving out
the document alone turns the error round: of three documents a user a member's word was looked for in
one other, a held-out document's in two, and a model that saw nothing had an AUC of 0.59 to 0.63.

What does not count is what one user alone wrote, the most private text. A reference model does not
bring it back: two models that never saw a word agree on it only if they were trained alike (see the
log), so its score is over the same tokens.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit.subjects import Subject
from tightlip.core.errors import UsageError
from tightlip.corpus.opening import standing_in_both
from tightlip.corpus.rendered import SPOKEN
from tightlip.corpus.shared_text import A_FEW, MOST_COPIED, shared_text
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.corpus.vocabulary import DIGITS
from tightlip.scan import document_scores as by_document
from tightlip.scan.document_scores import BesideReferences, DocumentScores
from tightlip.scan.models import OpenedModel
from tightlip.scan.scans import Scans
from tightlip.scan.store import MOMENTS, PLAIN, ScannedCorpus, Scorer

_NONE = 2**40
_TOGETHER = 1_000_000  # tokens looked at in one go

# Where some users' tokens stand, and the user of each.
Places = tuple[np.ndarray, np.ndarray]


def fair_tokens(
    train: TokenizedCorpus,
    held: TokenizedCorpus,
    *,
    leaves_out_rare: bool,
    min_users: int = 1,
    always: Collection[int],
    never: Collection[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of training and of held-out text count: one bool each.

    `always` are in the vocabulary whoever writes them (digits), `never` are no words,
    `leaves_out_rare` tells whether the rarest words of the training text were cut off, and
    `min_users` is how many users a word of the vocabulary takes.

    Holds:
        left_out: without any training text of the user who wrote it, a counted word would still
            be as frequent, and of as many users, as words had to be.
        same_for_both: of a user's words the same count in training and in held-out text.
    """
    size = 1 + max(int(corpus.tokens.max(initial=0)) for corpus in (train, held))
    totals, num_users = _totals(train, held, size)
    special = np.isin(np.arange(size), [*always, *never])
    needed = 1
    if leaves_out_rare:
        # Of the words as rare as the rarest known, such a vocabulary has some and lacks others.
        needed = 1 + totals[~special & (totals > 0)].min(initial=_NONE)
    masks = np.zeros(train.num_tokens, dtype=bool), np.zeros(held.num_tokens, dtype=bool)
    for sides in _by_user(train, held):
        pairs, times = _pairs(train, sides[0], size)
        for mask, corpus, (places, users) in zip(masks, (train, held), sides, strict=True):
            words = corpus.tokens[places].astype(np.int64)
            own = _looked_up(users * size + words, pairs, times)
            by_others = num_users[words] - (own > 0)
            mask[places] = (totals[words] - own >= needed) & (by_others >= min_users)
    for mask, corpus in zip(masks, (train, held), strict=True):
        mask[np.isin(corpus.tokens, [*always])] = True
        mask[np.isin(corpus.tokens, [*never])] = False
    return masks


def _totals(
    train: TokenizedCorpus, held: TokenizedCorpus, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """How often each word stands in training, and how many users wrote it there."""
    totals, num_users = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for mine, _ in _by_user(train, held):
        pairs, times = _pairs(train, mine, size)
        np.add.at(totals, pairs % size, times)
        num_users += np.bincount(pairs % size, minlength=size)
    return totals, num_users


def _pairs(train: TokenizedCorpus, mine: Places, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Each user with each word of theirs as one number, in order, and how often it stands."""
    places, users = mine
    return np.unique(users * size + train.tokens[places], return_counts=True)


def _looked_up(wanted: np.ndarray, pairs: np.ndarray, times: np.ndarray) -> np.ndarray:
    """How often each of `wanted` stands in training; 0 for those that do not."""
    if not len(pairs):
        return np.zeros(len(wanted), dtype=np.int64)
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    return np.where(pairs[at] == wanted, times[at], 0)


def _by_user(train: TokenizedCorpus, held: TokenizedCorpus) -> Iterator[tuple[Places, Places]]:
    """The places of both corpora, some whole users at a time; a user is known by name."""
    owners = _owners(train, held)
    num_users = 1 + max(int(mine.max(initial=-1)) for mine in owners)
    num_tokens = sum(
        np.bincount(mine, np.diff(corpus.bounds), num_users)
        for mine, corpus in zip(owners, (train, held), strict=True)
    )
    group = (np.cumsum(num_tokens) - num_tokens).astype(np.int64) // _TOGETHER
    orders = [np.argsort(group[mine], kind="stable") for mine in owners]
    for number in np.unique(group):
        parts = []
        for corpus, mine, order in zip((train, held), owners, orders, strict=True):
            ends = np.searchsorted(group[mine[order]], [number, number + 1])
            parts.append(_places(corpus, mine, order[slice(*ends)]))
        yield parts[0], parts[1]


def _owners(train: TokenizedCorpus, held: TokenizedCorpus) -> tuple[np.ndarray, np.ndarray]:
    """Whose each document is: numbers of training's users, then of those who are held out only."""
    names = {name: number for number, name in enumerate(train.user_names)}
    numbers = [names.setdefault(name, len(names)) for name in held.user_names]
    return np.asarray(train.users, np.int64), np.array(numbers, np.int64)[held.users]


def _places(corpus: TokenizedCorpus, owners: np.ndarray, documents: np.ndarray) -> Places:
    """Where the tokens of these documents stand, and whose each is."""
    sizes = np.diff(corpus.bounds)[documents]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(corpus.bounds[documents], sizes) + within, np.repeat(owners[documents], sizes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """Members or non-members: what the models make of each, its compressed size, its user."""

    users: np.ndarray
    model: DocumentScores
    reference: BesideReferences | None
    num_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.users)

    def chosen(self, which: np.ndarray) -> "Side":
        return self._changed(self.users[which], lambda column: column[which])

    def by_user(self) -> "Side":
        """Each user as one long document."""
        users, owners = np.unique(self.users, return_inverse=True)

        def summed(column: np.ndarray) -> np.ndarray:
            sums = np.zeros((len(users), *column.shape[1:]))
            np.add.at(sums, owners, column)
            return sums

        return self._changed(users, summed)

    def _changed(self, users: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> "Side":
        return Side(
            users=users,
            model=self.model.each(change),
            reference=None if self.reference is None else self.reference.each(change),
            num_bytes=change(self.num_bytes),
        )


def compressed_sizes(
    texts: Iterable[str], without_texts: Collection[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Each document's bytes under zlib, and whether its text is one of `without_texts`."""
    told = [(len(zlib.compress(text.encode("utf-8"))), text in without_texts) for text in texts]
    sizes, unwanted = zip(*told, strict=True) if told else ((), ())
    return np.array(sizes, dtype=np.int64), np.array(unwanted, dtype=bool)


@dataclass(kw_only=True)
class Sides:
    """Training and held-out documents on their way to members and non-members.

    What is known of both is a pair, training first.
    """

    subject: Subject
    scans: Scans
    work: Path
    notes: list[str]

    def __post_init__(self) -> None:
        self.tokenizer = self.scans.opened(self.subject.model).tokenizer
        self.model: list[DocumentScores] = []
        self.reference: list[BesideReferences | None] = []
        self.references: list[str] = []  # fingerprints
        self.train = self.subject.tokens("members", self.scans, self.work)
        self.held = self.subject.tokens("held_out", self.scans, self.work)

    def leave_out(self, without_texts: Collection[str]) -> None:
        """Mark what stands on both sides, and what was asked to be left out."""
        subject = self.subject
        sizes = [
            compressed_sizes(texts_of(source, self.tokenizer, corpus), without_texts)
            for source, corpus in ((subject.members, self.train), (subject.held_out, self.held))
        ]
        self.num_bytes, (of_train, of_held) = zip(*sizes, strict=True)
        if num := int(of_train.sum() + of_held.sum()):
            self.notes.append(f"{num:,} documents are left out as asked, planted canaries say.")
        in_train, in_held = standing_in_both(self.train, self.held)
        in_train, in_held = in_train & ~of_train, in_held & ~of_held
        if in_held.any():
            self.notes.append(
                f"{in_held.sum():,} held-out documents stand word for word in training too. They are left out, and so "
                f"are the {in_train.sum():,} training documents that read the same: what many write is easy to "
                "predict, and on one side only it would look like memory."
            )
        self._note_near_copies()
        self.kept = ~(of_train | in_train), ~(of_held | in_held)

    def _note_near_copies(self) -> None:
        """Say it where non-members were trained on but for a word or a sign."""
        sources = (self.subject.members, self.subject.held_out)
        shown: list[Any] = [source and source.shown_to(self.tokenizer) for source in sources]
        if self.train.roles is not None or None in shown:
            return  # a template's words stand in every chat, and tokens have no text
        held = shared_text(*shown).there
        if (num := held.copied - held.whole) > max(A_FEW, MOST_COPIED * held.long):
            self.notes.append(
                f"{num:,} of the {held.long:,} held-out documents of eight words or more stand in training too, slightly changed or "
                "in part. They count as non-members here, which makes the model look quiet: take them out, and measure again."
            )

    def choose_tokens(self) -> None:
        """Leave out words that only their own user made part of the vocabulary, and of chats what
        nobody said or was not trained on."""
        self.counted: tuple[np.ndarray | None, np.ndarray | None] = None, None
        members, others = self.subject.members, self.subject.held_out
        assert members is not None
        assert others is not None
        kinds = [source.documents().format for source in (members, others)]
        if kinds[0] != kinds[1]:
            raise UsageError(
                f"The members are {kinds[0]} and the others {kinds[1]}, so they differ in more than in having been trained on. "
                "Give both in one format."
            )
        if self.train.roles is not None:
            self.counted = _trained(self.train), _trained(self.held)
            return
        prepared = self.subject.prepared
        settings = {} if prepared is None else prepared.settings
        if prepared is None or not _learnt_from_training(settings):
            if prepared is not None and prepared.learnt_vocabulary and settings.get("tokenizer"):
                self.notes.append(
                    "The tokenizer was given, and was itself learnt from this text. Words of held-out text that it lacks are "
                    "easy to predict, so these figures are too low. Prepare with a tokenizer made of other text."
                )
            return
        size = settings.get("vocabulary_size")
        self.counted = fair_tokens(
            self.train,
            self.held,
            leaves_out_rare=size is not None and len(self.tokenizer) >= size,
            min_users=settings.get("min_users") or 1,
            always=self.tokenizer.convert_tokens_to_ids(DIGITS),
            never=self.tokenizer.all_special_ids,
        )

    def score(self, references: Sequence[Any]) -> None:
        """The references first: where one is refused, nobody has waited for the model."""
        used = [self._opened(one) for one in references]
        theirs = [self._scanned(one, "by a reference") for one in used]
        model = self.scans.opened(self.subject.model)
        mine = self._scanned(model, "by the model", MOMENTS)
        for number, (scanned, counted) in enumerate(zip(mine, self.counted, strict=True)):
            scans = [each[number] for each in theirs]
            self.model.append(by_document.document_scores(scanned, counted=counted))
            self.reference.append(
                by_document.beside_references(scanned, scans, counted=counted) if scans else None
            )

    def _opened(self, reference: Any) -> OpenedModel:
        opened = self.subject.opened_reference(
            reference, self.scans, self.notes, members=self.train, held_out=self.held
        )
        if opened.files in self.references:
            raise UsageError(f"The reference {opened.name} was given twice. Give different ones.")
        self.references.append(opened.files)
        return opened

    def _scanned(self, model: OpenedModel, by: str, scorer: Scorer = PLAIN) -> list[ScannedCorpus]:
        parts = (("Members", self.train), ("Non-members", self.held))
        for _, corpus in parts:
            model.refuse_other_tokens(corpus)
        return [self.scans.scan(model, corpus, f"{name} {by}", scorer) for name, corpus in parts]

    def chosen(self) -> tuple[Side, Side]:
        """Members and non-members with something to score; users nobody trained on come last."""
        owners = _owners(self.train, self.held)
        columns = zip(owners, self.model, self.reference, self.num_bytes, strict=True)
        sides = [
            Side(users=users, model=model, reference=reference, num_bytes=num_bytes)
            for users, model, reference, num_bytes in columns
        ]
        kept = list(zip(self.kept, (scores.num_tokens > 0 for scores in self.model), strict=True))
        self._note_uncounted([wanted & ~scored for wanted, scored in kept])
        members, others = (
            side.chosen(wanted & scored) for side, (wanted, scored) in zip(sides, kept, strict=True)
        )
        for side, what in ((members, "training"), (others, "held-out")):
            if not len(side):
                raise UsageError(
                    f"No {what} document is left to compare: all stand on both sides, are left out or are empty. "
                    "Hold out text that is not trained on: prepare with --deduplicate documents, or give it as a file."
                )
        return members, others

    def _note_uncounted(self, dropped: list[np.ndarray]) -> None:
        """Keep, and say, how much of the text the figures are not about."""
        corpora = (self.train, self.held)
        num_documents = num_tokens = 0
        by_side = zip(corpora, self.counted, self.kept, dropped, strict=True)
        for corpus, counted, kept, without in by_side:
            if counted is not None:
                lengths = np.diff(corpus.bounds)
                num_documents += int((without & (lengths > 0)).sum())
                num_tokens += int((~counted & np.repeat(kept, lengths)).sum())
        self.not_counted = {"num_documents": num_documents, "num_tokens": num_tokens}
        if empty := int(sum(one.sum() for one in dropped)) - num_documents:
            self.notes.append(f"{empty:,} documents without a token to predict are left out.")
        if num_tokens and self.train.roles is not None:
            self.notes.append(
                f"{num_documents:,} documents, {num_tokens:,} tokens not counted: what a chat's template says, and what was "
                "not trained on."
            )
        elif num_tokens:
            self.notes.append(
                f"{num_documents:,} documents, {num_tokens:,} tokens not counted: the vocabulary was built on the training "
                "text, so unknown words do not count, nor words that would be unknown without the user who wrote them. "
                "That is the most private text, and these figures do not see it. To count all, prepare with --tokenizer "
                "DIR, made of other text."
            )


def texts_of(source: Any, tokenizer: Any, corpus: TokenizedCorpus) -> Iterator[str]:
    """What each document says, without the words of a chat's template."""
    shown = source.shown_to(tokenizer)
    if shown is None:  # the rows were tokens
        for index in range(corpus.num_documents):
            yield tokenizer.decode(corpus.document(index))
        return
    for batch in shown.batches():
        yield from batch.attributes.get(SPOKEN, batch.texts)


def spoken_tokens(corpus: TokenizedCorpus) -> np.ndarray | None:
    """Which tokens of chats somebody said; None where all are."""
    return None if corpus.roles is None else np.asarray(corpus.roles) > 0


def _trained(corpus: TokenizedCorpus) -> np.ndarray:
    """Which tokens somebody said and a training on such text learns."""
    return (np.asarray(corpus.roles) > 0) & (np.asarray(corpus.trained) > 0)


def _learnt_from_training(settings: dict[str, Any]) -> bool:
    """Whether one document can bring a word into the vocabulary. Noise is there to prevent it."""
    return (
        settings.get("tokenizer") is None
        and settings.get("vocabulary") == "words"
        and settings.get("vocabulary_noise") is None
    )
