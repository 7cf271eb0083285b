"""Who pays for a mitigation: how well each user's held-out text is predicted, before and after.

A user's perplexity is exp(Σ loss / Σ tokens) over their held-out documents, and so is a group's
over the documents of all in it. The gap is that of Mireshghallah et al. 2021: the mean change of
the five users with the fewest training documents minus that of the five with the most.

What is drawn again. Overall, along the curve and for attributes: whole users, since what one
writes is alike (see resampling.py). For the gap: who is in the top and the low five follows from
the training documents, which are what they are, so nobody changes sides. But the claim is about
users of that kind and not these five, so five are drawn again from each five, and for each of
them documents from their own: with five users a side, what little text a user has weighs as much
as which users there are. In simulations such intervals held the truth in 94 to 99 of 100 cases;
without the widening for few users in resampling.py it was 87 to 97, and by users alone 85 to 88.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit.measures import Audited
from tightlip.audit.membership import NOT_PRIVATE
from tightlip.core.errors import UsageError
from tightlip.core.files import write_json
from tightlip.core.resampling import FEW_USERS, check_num_bootstraps, interval, times_drawn
from tightlip.core.run_folder import RunRecord
from tightlip.corpus.opening import with_held_out
from tightlip.corpus.prepare import PreparedCorpus
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.scan.document_scores import DocumentScores
from tightlip.scan.models import AUDIT, Scans, scans_of_run

GROUP_SIZE = 5
MOST_BINS = 8
MOST_VALUES = 50
_BASES = (2, 4, 10, 100, 1000, 10_000)
_LARGEST = 700.0  # nats: e to more than that is no number any more


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldText:
    """Held-out documents with a scored token: whose each is, its loss, and the other run's.

    Users are numbered from the one with the most training documents down, equal ones by name.
    """

    owners: np.ndarray
    loss_nats: np.ndarray
    baseline_nats: np.ndarray | None
    num_tokens: np.ndarray
    user_names: list[str]
    num_samples: np.ndarray

    @property
    def num_users(self) -> int:
        return len(self.user_names)

    def by_user(self, chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Loss, other loss and tokens of each user with a chosen document: a row each."""
        _, owners = np.unique(self.owners[chosen], return_inverse=True)
        return np.array([np.bincount(owners, column[chosen]) for column in self.columns()])

    def columns(self) -> list[np.ndarray]:
        baseline = self.loss_nats if self.baseline_nats is None else self.baseline_nats
        return [self.loss_nats, baseline, self.num_tokens]


def held_text_of(
    scores: DocumentScores,
    baseline: DocumentScores | None,
    owners: np.ndarray,
    user_names: list[str],
    num_samples: np.ndarray,
    *,
    wanted: np.ndarray | None = None,
) -> HeldText:
    """The documents that were scored, and the users who wrote them, in their fixed order; with
    `wanted`, those of them only."""
    scored = scores.num_tokens > 0
    if wanted is not None:
        scored = scored & wanted
    present = np.unique(owners[scored])
    order = sorted(present, key=lambda user: (-num_samples[user], user_names[user]))
    numbers = np.full(len(user_names), -1)
    numbers[order] = np.arange(len(order))
    return HeldText(
        owners=numbers[owners[scored]],
        loss_nats=scores.loss_nats[scored],
        baseline_nats=None if baseline is None else baseline.loss_nats[scored],
        num_tokens=scores.num_tokens[scored],
        user_names=[user_names[user] for user in order],
        num_samples=num_samples[order],
    )


def reading_as(parquet: Path, texts: Collection[str]) -> np.ndarray:
    """Which documents of a file read, letter for letter, as one of `texts`."""
    found = [text in texts for batch in open_corpus(parquet).batches() for text in batch.texts]
    return np.array(found, dtype=bool)


def perplexities(loss_nats: Any, num_tokens: Any) -> Any:
    """exp of the mean loss; beyond e^700 it stays there, for there are no such numbers."""
    return np.exp(np.minimum(loss_nats / num_tokens, _LARGEST))


class GroupFigures:
    """Everything that is said of groups of users, with intervals from one stream of draws."""

    def __init__(self, text: HeldText, rng: np.random.Generator, num_bootstraps: int) -> None:
        self._text, self._rng, self._num_bootstraps = text, rng, num_bootstraps

    def of(self, chosen: np.ndarray | slice = slice(None)) -> dict[str, Any]:
        """Perplexity of the chosen documents, and its change, over users drawn again."""
        sums = self._text.by_user(chosen)
        num_users = sums.shape[1]
        everybody = [np.arange(num_users)]
        drawn = np.array(
            [
                sums @ times_drawn(self._rng, everybody, num_users)
                for _ in range(self._num_bootstraps)
            ]
        ).T
        values, again = _with_change(sums.sum(1)), _with_change(drawn)
        figures = [
            interval(float(value), drawn_again, num_users=num_users)
            for value, drawn_again in zip(values, again, strict=True)
        ]
        has_baseline = self._text.baseline_nats is not None
        return {"perplexity": figures[0], "change": figures[1] if has_baseline else None}

    def gap(self) -> dict[str, Any]:
        """(low five minus top five) of (this run minus the other), as it is and in logs.

        Holds:
            signed: positive where those with little text lose more.
            nothing: the same losses in both runs give 0, interval and all.
        """
        num_users = self._text.num_users
        low = self._documents_of(range(num_users - GROUP_SIZE, num_users))
        top = self._documents_of(range(GROUP_SIZE))
        drawn = np.array(
            [
                _mean_change(self._redrawn(low)) - _mean_change(self._redrawn(top))
                for _ in range(self._num_bootstraps)
            ]
        )
        values = _mean_change(low) - _mean_change(top)
        plain, log = (
            interval(value, again, num_users=2 * GROUP_SIZE, num_groups=2)
            for value, again in zip(values, drawn.T, strict=True)
        )
        return {"perplexity": plain, "log": log}

    def _documents_of(self, users: range) -> list[np.ndarray]:
        """For each user the loss, other loss and tokens of every document: a row each."""
        columns = np.array(self._text.columns())
        return [columns[:, self._text.owners == user] for user in users]

    def _redrawn(self, documents: list[np.ndarray]) -> list[np.ndarray]:
        """As many users, drawn from these, and as many documents of each, drawn from theirs."""
        chosen = [documents[user] for user in self._rng.integers(0, len(documents), len(documents))]
        return [mine[:, self._rng.integers(0, mine.shape[1], mine.shape[1])] for mine in chosen]


def _mean_change(documents: list[np.ndarray]) -> np.ndarray:
    """The users' mean change in perplexity and in log-perplexity."""
    losses, baselines, tokens = np.array([mine.sum(1) for mine in documents]).T
    plain = perplexities(losses, tokens) - perplexities(baselines, tokens)
    return np.array([plain.mean(), ((losses - baselines) / tokens).mean()])


def _with_change(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    losses, baselines, tokens = sums
    after, before = perplexities(losses, tokens), perplexities(baselines, tokens)
    return after, after - before


def user_rows(text: HeldText) -> list[dict[str, Any]]:
    """One entry for each user, those with the most training documents first."""
    losses, baselines, tokens = text.by_user()
    num_documents = np.bincount(text.owners, minlength=text.num_users)
    after, before = perplexities(losses, tokens), perplexities(baselines, tokens)
    known = text.baseline_nats is not None
    return [
        {
            "user": name,
            "num_samples": int(text.num_samples[user]),
            "num_test_documents": int(num_documents[user]),
            "num_test_tokens": int(tokens[user]),
            "loss_nats": float(losses[user]),
            "perplexity": float(after[user]),
            "baseline_perplexity": float(before[user]) if known else None,
            "change": float(after[user] - before[user]) if known else None,
        }
        for user, name in enumerate(text.user_names)
    ]


def top_and_low(text: HeldText) -> tuple[list[str], list[str]]:
    """The five users with the most training documents and the five with the fewest, the most
    extreme first; with fewer than ten users, half of them each."""
    size = min(GROUP_SIZE, text.num_users // 2)
    return text.user_names[:size], text.user_names[::-1][:size]


def curve(text: HeldText, figures: GroupFigures) -> list[dict[str, Any]]:
    """Perplexity by number of training documents, in bins that users stand in."""
    per_document = text.num_samples[text.owners]
    rows = []
    for first, last in sample_bins(text.num_samples):
        chosen = (per_document >= first) & (per_document <= last)
        within = (text.num_samples >= first) & (text.num_samples <= last)
        rows.append(
            {
                "num_samples_from": first,
                "num_samples_to": last,
                "num_users": int(within.sum()),
                **figures.of(chosen),
            }
        )
    return rows


def sample_bins(num_samples: np.ndarray) -> list[tuple[int, int]]:
    """At most 8 ranges, ends included, from one power to below the next; empty ones are left out.

    >>> sample_bins(np.array([0, 1, 5, 5, 30]))
    [(0, 0), (1, 1), (4, 7), (16, 31)]
    >>> sample_bins(np.array([3 ** n for n in range(12)]))
    [(1, 9), (10, 99), (100, 999), (1000, 9999), (10000, 99999), (100000, 999999)]
    """
    for base in _BASES:
        bins = list(_bins(np.unique(num_samples), base))
        if len(bins) <= MOST_BINS:
            break
    return bins


def _bins(counts: np.ndarray, base: int) -> Iterator[tuple[int, int]]:
    if (counts == 0).any():
        yield 0, 0
    first = 1
    while first <= counts.max(initial=0):
        if ((counts >= first) & (counts < first * base)).any():
            yield first, first * base - 1
        first *= base


def attribute_groups(
    parquet: Path, scored: np.ndarray, text: HeldText, figures: GroupFigures
) -> tuple[dict[str, Any], list[str]]:
    """The same figures by each further column of the held-out documents, and what has none.

    `scored` says which rows of the file are the documents of `text`. A row without a value is in
    no group.
    """
    import pyarrow.parquet as pq

    groups: dict[str, Any] = {}
    notes: list[str] = []
    for name in pq.read_schema(parquet).names:
        if name in ("user", "text"):
            continue
        values = [
            _spelled(value) for value in pq.read_table(parquet, columns=[name])[name].to_pylist()
        ]
        kept = [value for value, is_scored in zip(values, scored, strict=True) if is_scored]
        distinct = sorted({value for value in kept if value is not None})
        if len(distinct) > MOST_VALUES:
            notes.append(
                f"Column {name!r} has {len(distinct):,} values in the held-out text, more than {MOST_VALUES}: no groups."
            )
        elif distinct:
            column = np.array(kept, dtype=object)
            groups[name] = {value: _group(column == value, text, figures) for value in distinct}
    return groups, notes


def _spelled(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _group(chosen: np.ndarray, text: HeldText, figures: GroupFigures) -> dict[str, Any]:
    return {
        "num_users": len(np.unique(text.owners[chosen])),
        "num_documents": int(chosen.sum()),
        **figures.of(chosen),
    }


def measure_groups(
    run: str | Path | RunRecord,
    *,
    against: str | Path | RunRecord | None = None,
    model: str | Path | None = None,
    against_model: str | Path | None = None,
    without_texts: Collection[str] = frozenset(),
    out: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
    num_bootstraps: int = 1000,
    keep_scan: bool = True,
    scans: Scans | None = None,
) -> dict[str, Any]:
    """How well a run's model predicts each user's held-out text, and who lost by it.

    `against` is the unmitigated run on the same text; `model` and `against_model` are folders to
    score in place of the runs' own models, such as snapshots'. Documents that read as one of
    `without_texts`, planted canaries say, are nobody's: neither trained on nor held out. With `out`
    the result is written there, for its owner only. The scans are kept in the run's `scan/` unless
    `keep_scan` is False; `scans` are those of a caller that measures more.
    """
    check_num_bootstraps(num_bootstraps)
    if against is None and against_model is not None:
        raise UsageError(f"against_model={against_model} is of no run. Give against, its run, too.")
    record, prepared, held = with_held_out(run)
    notes: list[str] = []
    other = None if against is None else _comparable(record, prepared, held, against, notes)
    beside = [] if other is None else [other.folder, other.folder / AUDIT]
    baseline = None
    with scans_of_run(record, device=device, keep=keep_scan, beside=beside, given=scans) as opened:
        scores = opened.scores(Path(model or record.model_folder), held, "Held-out text")
        if other is not None:
            folder = Path(against_model or other.model_folder)
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
    figures = GroupFigures(text, np.random.default_rng(seed), num_bootstraps)
    result = _result(text, figures, prepared, wanted & (scores.num_tokens > 0), notes)
    notes += _about(record, text, int((wanted & (scores.num_tokens == 0)).sum()))
    if out is not None:
        write_json(Path(out), result)
    return result


class GroupsAudit:
    """Whose held-out text is predicted worse. It accuses nobody: it tells who pays."""

    finds_secrets = False

    def depends_on(self, audited: Audited) -> dict[str, Any]:
        against = audited.against
        return {
            "against": None if against is None else against.fingerprint,
            "keys": audited.key_digests,
            **audited.measuring.resampling,
        }

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
    """Which documents read as one of `texts`."""
    if not texts:
        return np.zeros(corpus.num_documents, dtype=bool)
    return reading_as(prepared.folder / f"{split}.parquet", texts)


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
