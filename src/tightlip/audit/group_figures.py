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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tightlip.core.resampling import interval, times_drawn
from tightlip.scan.document_scores import DocumentScores

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


def perplexities(loss_nats: Any, num_tokens: Any) -> Any:
    """exp of the mean loss; beyond e^700 it stays there, for there are no such numbers."""
    return np.exp(np.minimum(loss_nats / num_tokens, _LARGEST))


class GroupFigures:
    """Everything that is said of groups of users, with intervals from one stream of draws."""

    def __init__(self, text: HeldText, rng: np.random.Generator, num_bootstraps: int) -> None:
        self.text, self._rng, self._num_bootstraps = text, rng, num_bootstraps

    def of(self, chosen: np.ndarray | slice = slice(None)) -> dict[str, Any]:
        """Perplexity of the chosen documents, and its change, over users drawn again."""
        sums = self.text.by_user(chosen)
        num_users = sums.shape[1]
        everybody = [np.arange(num_users)]
        times = (times_drawn(self._rng, everybody, num_users) for _ in range(self._num_bootstraps))
        drawn = np.transpose([sums @ each for each in times])
        values, again = _with_change(sums.sum(1)), _with_change(drawn)
        pairs = zip(values, again, strict=True)
        figures = [interval(float(value), each, num_users=num_users) for value, each in pairs]
        has_baseline = self.text.baseline_nats is not None
        return {"perplexity": figures[0], "change": figures[1] if has_baseline else None}

    def gap(self) -> dict[str, Any]:
        """(low five minus top five) of (this run minus the other), as it is and in logs.

        Holds:
            signed: positive where those with little text lose more.
            nothing: the same losses in both runs give 0, interval and all.
        """
        num_users = self.text.num_users
        low = self._documents_of(range(num_users - GROUP_SIZE, num_users))
        top = self._documents_of(range(GROUP_SIZE))
        drawn = [
            _mean_change(self._redrawn(low)) - _mean_change(self._redrawn(top))
            for _ in range(self._num_bootstraps)
        ]
        values = _mean_change(low) - _mean_change(top)
        plain, log = (
            interval(value, again, num_users=2 * GROUP_SIZE, num_groups=2)
            for value, again in zip(values, np.transpose(drawn), strict=True)
        )
        return {"perplexity": plain, "log": log}

    def _documents_of(self, users: range) -> list[np.ndarray]:
        """For each user the loss, other loss and tokens of every document: a row each."""
        columns = np.array(self.text.columns())
        return [columns[:, self.text.owners == user] for user in users]

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


def user_rows(text: HeldText, *, knows_members: bool = True) -> list[dict[str, Any]]:
    """One entry for each user, those with the most training documents first."""
    losses, baselines, tokens = text.by_user()
    num_documents = np.bincount(text.owners, minlength=text.num_users)
    after, before = perplexities(losses, tokens), perplexities(baselines, tokens)
    known = text.baseline_nats is not None
    return [
        {
            "user": name,
            "num_samples": int(text.num_samples[user]) if knows_members else None,
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
    return [
        {
            "num_samples_from": first,
            "num_samples_to": last,
            "num_users": int(((text.num_samples >= first) & (text.num_samples <= last)).sum()),
            **figures.of((per_document >= first) & (per_document <= last)),
        }
        for first, last in sample_bins(text.num_samples)
    ]


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
    columns: Iterable[dict[str, Any]], scored: np.ndarray, text: HeldText, figures: GroupFigures
) -> tuple[dict[str, Any], list[str]]:
    """The same figures by each further column of the held-out documents, and what has none.

    `scored` says which of the rows are the documents of `text`. A row without a value is in no
    group.
    """
    kept = [row for row, is_scored in zip(columns, scored, strict=True) if is_scored]
    groups: dict[str, Any] = {}
    notes: list[str] = []
    for name in dict.fromkeys(name for row in kept for name in row):
        column = np.array([_spelled(row.get(name)) for row in kept], dtype=object)
        distinct = sorted({value for value in column if value is not None})
        if len(distinct) > MOST_VALUES:
            notes.append(
                f"Column {name!r} has {len(distinct):,} values in the held-out text, more than {MOST_VALUES}: no groups."
            )
        elif distinct:
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
