"""Whose held-out text does a model predict worse, and who lost by a mitigation?"""

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit import group_figures
from tightlip.audit.measures import Audited, written_to
from tightlip.audit.membership import NOT_PRIVATE
from tightlip.audit.settings import ResamplingSettings
from tightlip.audit.sides import spoken_tokens, texts_of
from tightlip.audit.subjects import Subject, made_from, measuring, nothing_held_out, subject_of
from tightlip.core.errors import UsageError
from tightlip.core.gates import Known
from tightlip.core.resampling import FEW_USERS
from tightlip.core.run_folder import RunRecord
from tightlip.core.settings import split_settings, takes
from tightlip.corpus.prepare_config import TextSettings
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.document_scores import DocumentScores
from tightlip.scan.options import ModelSettings
from tightlip.scan.scans import Scans

NO_MEMBERS = (
    "Nobody said what the model was trained on, so who has much text there and who little is not known: give --members FILE "
    "for that."
)
# What a gate may ask for.
FIGURES: Known = dict.fromkeys(
    ("perplexity", "num_users", "num_documents", "gap", "gap_low", "log_gap", "log_gap_low")
)


def gated(record: dict[str, Any]) -> dict[str, Any]:
    """The figures of a record as gates name them."""
    gap = record["gap"] or {"perplexity": {}, "log": {}}
    return {
        "perplexity": record["perplexity"]["value"],
        **{name: record[name] for name in ("num_users", "num_documents")},
        **{f"gap{end}": gap["perplexity"].get(of) for end, of in (("", "value"), ("_low", "low"))},
        **{f"log_gap{end}": gap["log"].get(of) for end, of in (("", "value"), ("_low", "low"))},
    }


@takes(ResamplingSettings, ModelSettings, TextSettings)
def measure_groups(
    model: Any,
    *,
    held_out: Any = None,
    members: Any = None,
    against: Any = None,
    tokenizer: Any = None,
    without_texts: Collection[str] = frozenset(),
    out: str | Path | None = None,
    device: str = "auto",
    keep_scan: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """How well a model predicts each user's held-out text, and who lost against another.

    `model` is a folder, or a model in memory with `tokenizer`, or a pair of both; `held_out` is text
    that it was not trained on, and `members` what it was trained on, which tells who has much text
    there and who little. A run knows both. `against` is the unmitigated model or run, 'base' for
    what an adapter was trained on, or a pair in memory. Documents that read as one of
    `without_texts`, planted canaries say, are nobody's: neither trained on nor held out. With `out`,
    a folder, the result is written to groups.json there, for its owner only. Scans are kept, in the
    run's `scan/` or in that of `out`, unless `keep_scan` is False or a model is in memory.
    """
    config, how, columns = split_settings(settings, ResamplingSettings, ModelSettings, TextSettings)
    subject = subject_of(model, members, held_out, tokenizer=tokenizer, **columns.tree())
    _check_held_out(subject)
    notes: list[str] = []
    other = None if against is None else _comparable(subject, against, notes)
    where = {"device": device, "keep": keep_scan and (other is None or other.is_file), **how.tree()}
    with ExitStack() as stack:
        scans, work = stack.enter_context(measuring(subject, out, **where))
        theirs = scans
        if other is not None and other.run is not None:  # whose scans are kept with it
            theirs, _ = stack.enter_context(measuring(other, None, **where))
        beside = None if other is None else (other, theirs)
        result = groups_of(subject, scans, work, beside, without_texts, config, notes)
    return written_to(None if out is None else Path(out) / "groups.json", result)


def groups_of(
    subject: Subject,
    scans: Scans,
    work: Path,
    against: tuple[Subject, Scans] | None,
    without_texts: Collection[str],
    config: ResamplingSettings,
    notes: list[str],
) -> dict[str, Any]:
    """The figures of a subject with held-out text, beside another's scores of the same text."""
    baseline, other = None, None
    if against is not None:
        baseline, other = _scored(*against, subject, work), against[0].name
    held = subject.tokens("held_out", scans, work)
    scores = scans.scores(subject.model, held, "Held-out text", counted=spoken_tokens(held))
    if baseline is not None and (scores.num_tokens != baseline.num_tokens).any():
        raise UsageError(
            f"The models of {subject.name} and {other} do not begin a document alike (one has a "
            "beginning-of-text token and the other none), so their perplexities are over other tokens. "
            "Compare models with the same tokenizer files, or say how both were trained: --begin"
        )
    tokenizer = scans.opened(subject.model).tokenizer
    wanted = ~_reading_as(without_texts, subject.held_out, tokenizer, held)
    samples = np.zeros(held.num_users, np.int64)
    if subject.members is not None:
        members = subject.tokens("members", scans, work)
        unwanted = _reading_as(without_texts, subject.members, tokenizer, members)
        samples = _num_samples(members, unwanted, held, notes)
    text = group_figures.held_text_of(
        scores, baseline, np.asarray(held.users), held.user_names, samples, wanted=wanted
    )
    if not text.num_users:
        raise UsageError(
            f"No held-out document of {subject.name} has a token to predict. Hold out longer text."
        )
    draw = np.random.default_rng(config.seed)
    figures = group_figures.GroupFigures(text, draw, config.num_bootstraps)
    result = _result(figures, subject, wanted & (scores.num_tokens > 0), notes)
    notes += _about(subject.run, text, int((wanted & (scores.num_tokens == 0)).sum()))
    return result | {"made_from": made_from(subject, scans, held_out=held) | {"against": other}}


class GroupsAudit:
    """Whose held-out text is predicted worse. It accuses nobody: it tells who pays."""

    finds_secrets = False

    def depends_on(self, audited: Audited) -> dict[str, Any]:
        against = audited.against
        fingerprint = None if against is None else against.fingerprint
        return {"against": fingerprint, **audited.sampling}

    def figures(self, audited: Audited) -> dict[str, Any]:
        subject, against, notes = audited.subject, audited.against, list[str]()
        _check_held_out(subject)
        beside = None
        if against is not None:
            beside = _comparable(subject, against.subject, notes), against.scans
        asked = (audited.measuring.planted_texts, audited.measuring.resampling)
        return groups_of(subject, audited.scans, audited.tokens, beside, *asked, notes)

    def accuses(self, figures: dict[str, Any]) -> bool:
        return False


def _check_held_out(subject: Subject) -> None:
    if subject.held_out is not None:
        return
    if subject.run is not None:
        raise UsageError(nothing_held_out(subject.name))
    raise UsageError(
        f"{subject.name} does not tell what it was not trained on, as a run of tightlip does. Give --held-out FILE"
    )


def _scored(other: Subject, scans: Scans, subject: Subject, work: Path) -> DocumentScores:
    """What the other model makes of the subject's held-out text."""
    held = subject.tokens("held_out", scans, work)
    how = {"counted": spoken_tokens(held), "beside": subject.model}
    return scans.scores(other.model, held, "The model to compare with", **how)


def _comparable(subject: Subject, against: Any, notes: list[str]) -> Subject:
    """The other subject; refused where its perplexities are of something else."""
    other = against if isinstance(against, Subject) else subject_of(against)
    ours, theirs = subject.prepared, other.prepared
    if subject.run is None or other.run is None or ours is None or theirs is None:
        return other  # the same text is read by both
    if ours.validation is None or theirs.validation is None:
        raise UsageError(nothing_held_out(other.name))
    if theirs.train.tokenizer_fingerprint != ours.train.tokenizer_fingerprint:
        raise UsageError(
            f"{subject.name} and {other.name} cut text into different tokens, and perplexity is per token: the same "
            "text has fewer, harder tokens under one than under the other. Train both on one prepared corpus."
        )
    if theirs.validation.corpus_fingerprint != ours.validation.corpus_fingerprint:
        raise UsageError(
            f"{subject.name} and {other.name} held out different text, so a difference in perplexity may be the "
            "text's and not the model's. Train both on one prepared corpus: tightlip prepare CORPUS --out DIR"
        )
    if theirs.train.corpus_fingerprint != ours.train.corpus_fingerprint:
        notes.append(
            f"The two runs were trained on different text, which may be why users' perplexities differ; numbers of "
            f"training documents are those of {subject.name}."
        )
    return other


def _num_samples(
    members: TokenizedCorpus, unwanted: np.ndarray, held: TokenizedCorpus, notes: list[str]
) -> np.ndarray:
    """Training documents of each user in the held-out part."""
    if unwanted.any():
        notes.append(
            f"{unwanted.sum():,} training documents are nobody's, as asked (planted canaries say): they do not decide who has "
            "much text and who little."
        )
    counts = np.bincount(np.asarray(members.users)[~unwanted], minlength=members.num_users)
    by_name = dict(zip(members.user_names, counts.tolist(), strict=True))
    return np.array([by_name.get(name, 0) for name in held.user_names], dtype=np.int64)


def _reading_as(
    texts: Collection[str], source: Any, tokenizer: Any, corpus: TokenizedCorpus
) -> np.ndarray:
    """Which documents read, letter for letter, as one of `texts`."""
    if not texts:
        return np.zeros(corpus.num_documents, dtype=bool)
    return np.array([text in texts for text in texts_of(source, tokenizer, corpus)], bool)


def _result(
    figures: group_figures.GroupFigures, subject: Subject, scored: np.ndarray, notes: list[str]
) -> dict[str, Any]:
    assert subject.held_out is not None
    text = figures.text
    knows_members = subject.members is not None
    top, low = group_figures.top_and_low(text) if knows_members else ([], [])
    no_gap = _why_no_gap(text) if knows_members else NO_MEMBERS
    if no_gap is not None:
        notes.append(no_gap)
    has_gap = no_gap is None and text.baseline_nats is not None
    columns = subject.held_out.documents().columns_beside()
    attributes, skipped = group_figures.attribute_groups(columns, scored, text, figures)
    notes += skipped
    return {
        "perplexity": figures.of()["perplexity"],
        "num_users": text.num_users,
        "num_documents": len(text.owners),
        "users": group_figures.user_rows(text, knows_members=knows_members),
        "top": top,
        "low": low,
        "gap": figures.gap() if has_gap else None,
        "curve": group_figures.curve(text, figures) if knows_members else [],
        "attributes": attributes,
        "notes": notes,
    }


def _why_no_gap(text: group_figures.HeldText) -> str | None:
    if text.num_users < 2 * group_figures.GROUP_SIZE:
        return (
            f"{text.num_users} users have held-out text; a gap between the top {group_figures.GROUP_SIZE} and the low {group_figures.GROUP_SIZE} "
            f"takes {2 * group_figures.GROUP_SIZE}."
        )
    if text.num_samples[0] == text.num_samples[-1]:
        return (
            f"Every user with held-out text has {text.num_samples[0]:,} training documents, so nobody is "
            "under-represented and there is no gap."
        )
    return None


def _about(record: RunRecord | None, text: group_figures.HeldText, num_empty: int) -> list[str]:
    lines = []
    if num_empty:
        lines.append(f"{num_empty:,} held-out documents without a scored token are left out.")
    if 2 <= text.num_users < FEW_USERS:
        lines.append(f"With {text.num_users} users, take the intervals as rough.")
    if record is not None and (number := record.config["corpus"].get("num_users_left_out")):
        lines.append(
            f"The run left {number:,} users of its corpus out and does not say which; they are counted as trained on."
        )
    if record is not None and record.guarantee.get("epsilon") is not None:
        lines.append(NOT_PRIVATE)
    return lines
