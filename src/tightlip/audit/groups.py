"""Whose held-out text does a run's model predict worse, and who lost by a mitigation?"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit.group_figures import (
    GROUP_SIZE,
    GroupFigures,
    HeldText,
    attribute_groups,
    curve,
    held_text_of,
    top_and_low,
    user_rows,
)
from tightlip.audit.measures import Audited, written_to
from tightlip.audit.membership import NOT_PRIVATE
from tightlip.audit.settings import ResamplingSettings
from tightlip.core.errors import UsageError
from tightlip.core.resampling import FEW_USERS
from tightlip.core.run_folder import RunRecord
from tightlip.core.settings import split_settings
from tightlip.corpus.opening import with_held_out
from tightlip.corpus.prepare import PreparedCorpus
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.models import DocumentScores, Scans, scans_of_run
from tightlip.scan.options import ModelSettings


def measure_groups(
    run: str | Path | RunRecord,
    *,
    against: str | Path | RunRecord | None = None,
    model: str | Path | None = None,
    against_model: str | Path | None = None,
    without_texts: Collection[str] = frozenset(),
    out: str | Path | None = None,
    device: str = "auto",
    keep_scan: bool = True,
    scans: Scans | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """How well a run's model predicts each user's held-out text, and who lost by it.

    `against` is the unmitigated run on the same text; `model` and `against_model` are folders to
    score in place of the runs' own models, such as snapshots'. Documents that read as one of
    `without_texts`, planted canaries say, are nobody's: neither trained on nor held out. With `out`
    the result is written there, for its owner only. The scans are kept in the run's `scan/` unless
    `keep_scan` is False; `scans` are those of a caller that measures more, and `settings` those of
    ResamplingSettings and ModelSettings.
    """
    config, how = split_settings(settings, ResamplingSettings, ModelSettings)
    if against is None and against_model is not None:
        raise UsageError(f"against_model={against_model} is of no run. Give against, its run, too.")
    record, prepared, held = with_held_out(run)
    notes: list[str] = []
    other = None if against is None else _comparable(record, prepared, held, against, notes)
    with scans_of_run(record, device=device, keep=keep_scan, given=scans, **how.tree()) as opened:
        scores = opened.scores(Path(model or record.model_folder), held, "Held-out text")
    baseline = None
    if other is not None:
        folder = Path(against_model or other.model_folder)
        with scans_of_run(
            other, device=device, keep=keep_scan, given=scans, **how.tree()
        ) as opened:
            baseline = opened.scores(folder, held, "The run to compare with")
        _refuse_other_tokens(scores, baseline, record, other)
    wanted = ~_reading_as(without_texts, prepared, "validation", held)
    text = held_text_of(
        scores,
        baseline,
        np.asarray(held.users),
        held.user_names,
        _num_samples(prepared, held, without_texts, notes),
        wanted=wanted,
    )
    if not text.num_users:
        raise UsageError(
            f"No held-out document of {record.folder} has a token to predict. Hold out longer text."
        )
    figures = GroupFigures(text, np.random.default_rng(config.seed), config.num_bootstraps)
    result = _result(text, figures, prepared, wanted & (scores.num_tokens > 0), notes)
    notes += _about(record, text, int((wanted & (scores.num_tokens == 0)).sum()))
    return written_to(out, result)


class GroupsAudit:
    """Whose held-out text is predicted worse. It accuses nobody: it tells who pays."""

    finds_secrets = False

    def depends_on(self, audited: Audited) -> dict[str, Any]:
        against = audited.against
        fingerprint = None if against is None else against.fingerprint
        return {"against": fingerprint, **audited.sampling}

    def figures(self, audited: Audited) -> dict[str, Any]:
        against = audited.against
        return measure_groups(
            audited.run,
            against=None if against is None else against.run,
            model=audited.model,
            against_model=None if against is None else against.model,
            without_texts=audited.measuring.planted_texts,
            scans=audited.scans,
            **audited.measuring.resampling,
        )

    def accuses(self, figures: dict[str, Any]) -> bool:
        return False


def _comparable(
    record: RunRecord,
    prepared: PreparedCorpus,
    held: TokenizedCorpus,
    against: str | Path | RunRecord,
    notes: list[str],
) -> RunRecord:
    """The other run; refused where its perplexities are of something else."""
    other, theirs, their_held = with_held_out(against)
    if their_held.tokenizer_fingerprint != held.tokenizer_fingerprint:
        raise UsageError(
            f"{record.folder} and {other.folder} cut text into different tokens, and perplexity is per token: the same "
            "text has fewer, harder tokens under one than under the other. Train both on one prepared corpus."
        )
    if their_held.corpus_fingerprint != held.corpus_fingerprint:
        raise UsageError(
            f"{record.folder} and {other.folder} held out different text, so a difference in perplexity may be the "
            "text's and not the model's. Train both on one prepared corpus: tightlip prepare CORPUS --out DIR"
        )
    if theirs.train.corpus_fingerprint != prepared.train.corpus_fingerprint:
        notes.append(
            f"The two runs were trained on different text, which may be why users' perplexities differ; numbers of "
            f"training documents are those of {record.folder}."
        )
    return other


def _refuse_other_tokens(
    scores: DocumentScores, baseline: DocumentScores, record: RunRecord, other: RunRecord
) -> None:
    if (scores.num_tokens != baseline.num_tokens).any():
        raise UsageError(
            f"The models of {record.folder} and {other.folder} do not begin a document alike (one has a "
            "beginning-of-text token and the other none), so their perplexities are over other tokens. "
            "Compare models with the same tokenizer files."
        )


def _num_samples(
    prepared: PreparedCorpus,
    held: TokenizedCorpus,
    without_texts: Collection[str],
    notes: list[str],
) -> np.ndarray:
    """Training documents of each user in the held-out part."""
    train = prepared.train
    unwanted = _reading_as(without_texts, prepared, "train", train)
    if unwanted.any():
        notes.append(
            f"{unwanted.sum():,} training documents are nobody's, as asked (planted canaries say): they do not decide who has "
            "much text and who little."
        )
    counts = np.bincount(np.asarray(train.users)[~unwanted], minlength=train.num_users)
    by_name = dict(zip(train.user_names, counts.tolist(), strict=True))
    return np.array([by_name.get(name, 0) for name in held.user_names], dtype=np.int64)


def _reading_as(
    texts: Collection[str], prepared: PreparedCorpus, split: str, corpus: TokenizedCorpus
) -> np.ndarray:
    """Which documents read, letter for letter, as one of `texts`."""
    if not texts:
        return np.zeros(corpus.num_documents, dtype=bool)
    documents = open_corpus(prepared.folder / f"{split}.parquet")
    return np.array([text in texts for batch in documents.batches() for text in batch.texts], bool)


def _result(
    text: HeldText,
    figures: GroupFigures,
    prepared: PreparedCorpus,
    scored: np.ndarray,
    notes: list[str],
) -> dict[str, Any]:
    top, low = top_and_low(text)
    no_gap = _why_no_gap(text)
    if no_gap is not None:
        notes.append(no_gap)
    has_gap = no_gap is None and text.baseline_nats is not None
    attributes, skipped = attribute_groups(
        prepared.folder / "validation.parquet", scored, text, figures
    )
    notes += skipped
    return {
        "perplexity": figures.of()["perplexity"],
        "num_users": text.num_users,
        "num_documents": len(text.owners),
        "users": user_rows(text),
        "top": top,
        "low": low,
        "gap": figures.gap() if has_gap else None,
        "curve": curve(text, figures),
        "attributes": attributes,
        "notes": notes,
    }


def _why_no_gap(text: HeldText) -> str | None:
    if text.num_users < 2 * GROUP_SIZE:
        return (
            f"{text.num_users} users have held-out text; a gap between the top {GROUP_SIZE} and the low {GROUP_SIZE} "
            f"takes {2 * GROUP_SIZE}."
        )
    if text.num_samples[0] == text.num_samples[-1]:
        return (
            f"Every user with held-out text has {text.num_samples[0]:,} training documents, so nobody is "
            "under-represented and there is no gap."
        )
    return None


def _about(record: RunRecord, text: HeldText, num_empty: int) -> list[str]:
    lines = []
    if num_empty:
        lines.append(f"{num_empty:,} held-out documents without a scored token are left out.")
    if 2 <= text.num_users < FEW_USERS:
        lines.append(f"With {text.num_users} users, take the intervals as rough.")
    if number := record.config["corpus"].get("num_users_left_out"):
        lines.append(
            f"The run left {number:,} users of its corpus out and does not say which; they are counted as trained on."
        )
    if record.guarantee.get("epsilon") is not None:
        lines.append(NOT_PRIVATE)
    return lines
