"""`tightlip audit RUN --membership` as one call."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.api.audit import usable_device
from tightlip.api.canaries import model_folder
from tightlip.api.run_corpora import check_reference, open_run_corpus
from tightlip.audit.document_scores import DocumentScores, open_scanner, score_documents
from tightlip.audit.fair_tokens import fair_tokens
from tightlip.audit.membership import (
    Side,
    compressed_sizes,
    measure_level,
    missing_rates,
    standing_in_both,
)
from tightlip.audit.resampling import FEW_USERS, check_num_bootstraps
from tightlip.core.errors import UsageError
from tightlip.core.files import write_json
from tightlip.core.run_folder import RunRecord, open_run
from tightlip.corpus.prepare import PreparedCorpus
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.corpus.vocabulary import DIGITS
from tightlip.models.loading import load_tokenizer

NOT_PRIVATE = "The run's ε does not cover these figures: they are computed from the text itself. Keep them as private as the text."


def measure_membership(
    run: str | Path | RunRecord,
    *,
    reference: str | Path | None = None,
    without_texts: Collection[str] = frozenset(),
    model: str | Path | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
    num_bootstraps: int = 1000,
) -> dict[str, Any]:
    """How well one can tell what a run's model was trained on, by document and by user.

    `reference` is a model or a run that never saw the training text, `model` a folder to score
    in place of the run's own model, such as a snapshot's; documents that read as one of
    `without_texts`, planted canaries say, are on neither side. With `out` the result is written
    there, for its owner only.
    """
    check_num_bootstraps(num_bootstraps)
    record, prepared, held = with_held_out(run)
    _refuse_users_left_out(record)
    notes: list[str] = []
    sides = _Sides(prepared=prepared, held=held, notes=notes)
    sides.leave_out(without_texts)
    sides.choose_tokens()
    sides.score(Path(model or record.model_folder), reference, usable_device(device))
    members, others = sides.chosen()
    rng = np.random.default_rng(seed)
    documents = measure_level(members, others, rng, num_bootstraps)
    notes += [*missing_rates(documents, "documents"), *_about_users(members, others)]
    notes += _about_certainty(documents)
    strangers = others.chosen(others.users >= prepared.train.num_users)
    users = _users_level(members, strangers, notes, rng, num_bootstraps)
    notes += _about_the_text(record, prepared)
    result = {
        "documents": documents,
        "users": users,
        "not_counted": sides.not_counted,
        "notes": notes,
    }
    if out is not None:
        write_json(Path(out), result)
    return result


def with_held_out(
    run: str | Path | RunRecord,
) -> tuple[RunRecord, PreparedCorpus, TokenizedCorpus]:
    """A finished run, its corpus, and what was held out of it."""
    record = run if isinstance(run, RunRecord) else open_run(Path(run))
    if not record.finished:
        raise UsageError(f"{record.folder} is not finished training. Give its train command again.")
    prepared = open_run_corpus(record)
    if prepared.validation is None or not prepared.validation.num_documents:
        raise UsageError(
            f"{record.folder} was trained with nothing held out, so there is no text it never saw to compare with. "
            "Train with --split document, or give held-out text by --validation FILE."
        )
    return record, prepared, prepared.validation


def _refuse_users_left_out(record: RunRecord) -> None:
    if number := record.config["corpus"].get("num_users_left_out"):
        raise UsageError(
            f"{record.folder} was trained without {number:,} users of its corpus and does not say which, so nobody "
            "knows who the members are. Measure the run it was retrained from."
        )


@dataclass(kw_only=True)
class _Sides:
    """Training and held-out documents on their way to members and non-members."""

    prepared: PreparedCorpus
    held: TokenizedCorpus
    notes: list[str]

    def leave_out(self, without_texts: Collection[str]) -> None:
        """Mark what stands on both sides, and what was asked to be left out."""
        self.train_bytes, train_unwanted = self._sizes("train", without_texts)
        self.held_bytes, held_unwanted = self._sizes("validation", without_texts)
        if num := int(train_unwanted.sum() + held_unwanted.sum()):
            self.notes.append(f"{num:,} documents are left out as asked, planted canaries say.")
        in_train, in_held = standing_in_both(self.prepared.train, self.held)
        in_train, in_held = in_train & ~train_unwanted, in_held & ~held_unwanted
        if in_held.any():
            self.notes.append(
                f"{in_held.sum():,} held-out documents stand word for word in training too. They are left out, and so "
                f"are the {in_train.sum():,} training documents that read the same: what many write is easy to "
                "predict, and on one side only it would look like memory."
            )
        self.train_kept = ~(train_unwanted | in_train)
        self.held_kept = ~(held_unwanted | in_held)

    def _sizes(self, split: str, without_texts: Collection[str]) -> tuple[np.ndarray, np.ndarray]:
        return compressed_sizes(self.prepared.folder / f"{split}.parquet", without_texts)

    def choose_tokens(self) -> None:
        """Leave out words that only their own user made part of the vocabulary."""
        self.counted: tuple[np.ndarray | None, np.ndarray | None] = None, None
        settings = self.prepared.settings
        if not _learnt_from_training(settings):
            if self.prepared.learnt_vocabulary and settings.get("tokenizer") is not None:
                self.notes.append(
                    "The tokenizer was given, and was itself learnt from this text. Words of held-out text that it lacks are "
                    "easy to predict, so these figures are too low. Prepare with a tokenizer made of other text."
                )
            return
        tokenizer = load_tokenizer(self.prepared.tokenizer_folder)
        self.counted = fair_tokens(
            self.prepared.train,
            self.held,
            leaves_out_rare=_leaves_out_rare(settings, len(tokenizer)),
            min_users=settings.get("min_users") or 1,
            always=tokenizer.convert_tokens_to_ids(DIGITS),
            never=tokenizer.all_special_ids,
        )

    def score(self, folder: Path, reference: str | Path | None, device: str) -> None:
        """The reference first: where it is refused, nobody has waited for the model."""
        self.reference: tuple[DocumentScores, DocumentScores] | None = None
        if reference is not None:
            self.notes += check_reference(Path(reference), self.prepared)
            self.reference = self._scored(model_folder(Path(reference)), device, "by the reference")
        self.model = self._scored(folder, device, "by the model")
        if (
            self.reference is not None
            and (self.reference[0].num_tokens != self.model[0].num_tokens).any()
        ):
            raise UsageError(
                f"{reference} and {folder} do not begin a document alike (one has a beginning-of-text token and "
                "the other none), so their losses are over other tokens. Give a reference that reads as it does."
            )

    def _scored(self, folder: Path, device: str, by: str) -> tuple[DocumentScores, DocumentScores]:
        scanner = open_scanner(folder, self.prepared.train, device)
        parts = (("Members", self.prepared.train), ("Non-members", self.held))
        members, others = (
            score_documents(scanner, corpus, counted=counted, description=f"{name} {by}")
            for (name, corpus), counted in zip(parts, self.counted, strict=True)
        )
        return members, others

    def chosen(self) -> tuple[Side, Side]:
        """Members and non-members with something to score; users nobody trained on come last."""
        names = {name: number for number, name in enumerate(self.prepared.train.user_names)}
        numbers = [names.setdefault(name, len(names)) for name in self.held.user_names]
        members = self._side(0, np.asarray(self.prepared.train.users), self.train_bytes)
        others = self._side(1, np.array(numbers)[self.held.users], self.held_bytes)
        kept = [
            (members, self.train_kept, members.model.num_tokens > 0),
            (others, self.held_kept, others.model.num_tokens > 0),
        ]
        self._note_uncounted([wanted & ~scored for _, wanted, scored in kept])
        left = [side.chosen(wanted & scored) for side, wanted, scored in kept]
        for side, what in zip(left, ("training", "held-out"), strict=True):
            if not len(side):
                raise UsageError(
                    f"No {what} document is left to compare: all stand on both sides, are left out or are empty. "
                    "Hold out text that is not trained on: prepare with --deduplicate documents, or --validation FILE."
                )
        return left[0], left[1]

    def _note_uncounted(self, dropped: list[np.ndarray]) -> None:
        """Keep, and say, how much of the text the figures are not about."""
        corpora = (self.prepared.train, self.held)
        num_documents = num_tokens = 0
        for corpus, counted, kept, without in zip(
            corpora, self.counted, (self.train_kept, self.held_kept), dropped, strict=True
        ):
            if counted is not None:
                lengths = np.diff(corpus.bounds)
                num_documents += int((without & (lengths > 0)).sum())
                num_tokens += int((~counted & np.repeat(kept, lengths)).sum())
        self.not_counted = {"num_documents": num_documents, "num_tokens": num_tokens}
        if empty := int(sum(one.sum() for one in dropped)) - num_documents:
            self.notes.append(f"{empty:,} documents without a token to predict are left out.")
        if num_tokens:
            self.notes.append(
                f"{num_documents:,} documents, {num_tokens:,} tokens not counted: the vocabulary was built on the training "
                "text, so unknown words do not count, nor words that would be unknown without the user who wrote them. "
                "That is the most private text, and these figures do not see it. To count all, prepare with --tokenizer "
                "DIR, made of other text."
            )

    def _side(self, place: int, users: np.ndarray, num_bytes: np.ndarray) -> Side:
        reference = None if self.reference is None else self.reference[place]
        return Side(users=users, model=self.model[place], reference=reference, num_bytes=num_bytes)


def _learnt_from_training(settings: dict[str, Any]) -> bool:
    """Whether one document can bring a word into the vocabulary. Noise is there to prevent it."""
    return (
        settings.get("tokenizer") is None
        and settings.get("vocabulary") == "words"
        and settings.get("vocabulary_noise") is None
    )


def _leaves_out_rare(settings: dict[str, Any], num_tokens: int) -> bool:
    size = settings.get("vocabulary_size")
    return size is not None and num_tokens >= size


def _users_level(
    members: Side,
    strangers: Side,
    notes: list[str],
    rng: np.random.Generator,
    num_bootstraps: int,
) -> dict[str, Any] | None:
    """The same for people. A non-member is somebody of whom nothing was trained on."""
    if not len(strangers):
        notes.append(
            "Everybody with held-out text was trained on too, so nothing is said about users. "
            "To hold out whole users, prepare with --split user."
        )
        return None
    level = measure_level(members.by_user(), strangers.by_user(), rng, num_bootstraps)
    notes += missing_rates(level, "users")
    return level


def _about_users(members: Side, others: Side) -> list[str]:
    fewest = min(len(np.unique(side.users)) for side in (members, others))
    if fewest >= FEW_USERS:
        return []
    if fewest == 1:
        return ["One user wrote all of one side, so there are no intervals: they need two or more."]
    return [f"Only {fewest} users wrote the documents of one side: take the intervals as rough."]


def _about_certainty(level: dict[str, Any]) -> list[str]:
    areas = [score["auc"] for score in level["scores"].values() if score is not None]
    if not any(area["low"] == area["high"] == 1 for area in areas):
        return []
    return [
        "An interval from 1 to 1 says that these documents show no exception, not that there is none: resampling "
        "cannot draw what was never seen."
    ]


def _about_the_text(record: RunRecord, prepared: PreparedCorpus) -> list[str]:
    lines = []
    if prepared.settings.get("validation"):
        lines.append(
            "The held-out text came as a file of its own. Where it differs from the training text in kind, in time or "
            "in who wrote it, that difference counts as membership here; a reference model takes most of it out."
        )
    if record.guarantee.get("epsilon") is not None:
        lines.append(NOT_PRIVATE)
    return lines
