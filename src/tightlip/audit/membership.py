"""Can one tell from the model which documents, and whose, it was trained on?

Training documents are the members, held-out ones the others. A score guesses, the higher the
surer of a member; how well it guesses is the area under its curve (AUC: how often a member is
above a non-member, a tie counted half; chance is 0.5) and the share of members found while at
most 1% or 0.1% of non-members are accused (Carlini et al. 2022: the figure that matters, since an
attack that is sure of a few people harms them whatever it does on average).

Scores, of a document or of all of a user's documents together:
    loss       minus the mean loss per token (Yeom et al. 2018)
    reference  the loss of a model that never saw the members, minus this one's, per token
    min_k      minus the mean loss of the least likely fifth of each document (Shi et al. 2024)
    zlib       minus the loss per byte of the text compressed by zlib (Carlini et al. 2021)
"""

import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit.document_scores import DocumentScores
from tightlip.audit.resampling import interval, times_drawn
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tokens import TokenizedCorpus

# One non-member in so many may be accused.
RATES = {"tpr_at_1_percent_fpr": 100, "tpr_at_0_1_percent_fpr": 1000}
# With one accused, the bar is the highest non-member but one, and only 87 of 100 intervals held the
# truth; with two, 95 did.
LEAST_ACCUSED = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """Members or non-members: what the models make of each, its compressed size, its user."""

    users: np.ndarray
    model: DocumentScores
    reference: DocumentScores | None
    num_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.users)

    def chosen(self, which: np.ndarray) -> "Side":
        return Side(
            users=self.users[which],
            model=self.model.chosen(which),
            reference=None if self.reference is None else self.reference.chosen(which),
            num_bytes=self.num_bytes[which],
        )

    def by_user(self) -> "Side":
        """Each user as one long document."""
        users, owners = np.unique(self.users, return_inverse=True)
        return Side(
            users=users,
            model=self.model.summed(owners, len(users)),
            reference=None if self.reference is None else self.reference.summed(owners, len(users)),
            num_bytes=np.bincount(owners, self.num_bytes, len(users)),
        )

    def scores(self) -> dict[str, np.ndarray]:
        """Each score of every unit; `reference` only where there is one."""
        model = self.model
        found = {
            "loss": -model.loss_nats / model.num_tokens,
            "min_k": -model.lowest_nats / model.num_lowest,
            "zlib": -model.loss_nats / self.num_bytes,
        }
        if self.reference is not None:
            found["reference"] = (self.reference.loss_nats - model.loss_nats) / model.num_tokens
        return found


class Ranking:
    """Members and non-members in order of one score.

    Sorted once; what a resample changes is only how much each counts.
    """

    def __init__(self, members: np.ndarray, others: np.ndarray) -> None:
        self._members = np.argsort(-members, kind="stable")
        self._others = np.argsort(-others, kind="stable")
        ascending, line = members[self._members][::-1], others[self._others]
        self._num_above = len(members) - np.searchsorted(ascending, line, side="right")
        self._num_not_below = len(members) - np.searchsorted(ascending, line, side="left")

    def weighed(self, members: np.ndarray, others: np.ndarray) -> "Weighed":
        """The same order where each member and each non-member counts so often."""
        return Weighed(
            found=np.concatenate([[0], np.cumsum(members[self._members])]),
            others=others[self._others],
            num_above=self._num_above,
            num_not_below=self._num_not_below,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighed:
    """Non-members from the highest score down, and how many members are above each.

    `found` is the weight of the n highest members, n from 0 on.
    """

    found: np.ndarray
    others: np.ndarray
    num_above: np.ndarray
    num_not_below: np.ndarray

    def auc(self) -> float:
        """How often a member is above a non-member, a tie counted half.

        Holds:
            pairwise: the same as comparing every pair.
        """
        twice_won = self.others @ (self.found[self.num_above] + self.found[self.num_not_below])
        return float(twice_won / (2 * self.found[-1] * self.others.sum()))

    def true_positive_rate(self, one_in: int) -> float:
        """The share of members above the lowest bar that at most one non-member in `one_in` passes.

        Holds:
            at_most: no more than 1/`one_in` of the non-members are above the bar, ties included.
        """
        accused = np.cumsum(self.others)
        # In whole numbers: 0.01 · 2,900 is a hair below 29. The bar is a non-member's own score.
        bar = int(np.searchsorted(accused * one_in, accused[-1], side="right"))
        return float(self.found[self.num_above[bar]] / self.found[-1])


def measure_level(
    members: Side, others: Side, rng: np.random.Generator, num_bootstraps: int
) -> dict[str, Any]:
    """How well each score tells `members` from `others`, with 95% intervals over users.

    Users are drawn again with all that is theirs, on both sides: a user's member and non-member
    stay together. Those who stand on one side only are drawn by themselves, so that neither side
    runs empty. How far the interval goes into the tails follows from the side with fewer users.

    Holds:
        fair: of scores that know nothing, about 95 in 100 intervals hold 0.5, however alike a
            user's documents are.
    """
    users, units = np.unique(np.concatenate([members.users, others.users]), return_inverse=True)
    member_units, other_units = units[: len(members)], units[len(members) :]
    groups = _groups(member_units, other_units, len(users))
    rankings = _rankings(members, others)
    counted = [name for name, one_in in RATES.items() if len(others) >= LEAST_ACCUSED * one_in]
    ones = np.ones(len(members), np.int64), np.ones(len(others), np.int64)
    drawn = []
    for _ in range(num_bootstraps):
        times = times_drawn(rng, groups, len(users))
        drawn.append(_figures(rankings, counted, times[member_units], times[other_units]))
    num_users = min(len(np.unique(member_units)), len(np.unique(other_units)))
    scores = _with_intervals(_figures(rankings, counted, *ones), drawn, num_users)
    return {
        "num_members": len(members),
        "num_nonmembers": len(others),
        "scores": {name: scores.get(name) for name in ("loss", "reference", "min_k", "zlib")},
    }


def _rankings(members: Side, others: Side) -> dict[str, Ranking]:
    theirs = others.scores()
    return {name: Ranking(values, theirs[name]) for name, values in members.scores().items()}


def _groups(member_units: np.ndarray, other_units: np.ndarray, size: int) -> list[np.ndarray]:
    """Users with members only, with others only, with both; those there are."""
    has_members, has_others = np.zeros(size, bool), np.zeros(size, bool)
    has_members[member_units], has_others[other_units] = True, True
    kinds = (has_members & ~has_others, ~has_members & has_others, has_members & has_others)
    return [np.flatnonzero(kind) for kind in kinds if kind.any()]


def _figures(
    rankings: dict[str, Ranking], counted: list[str], members: np.ndarray, others: np.ndarray
) -> dict[tuple[str, str], float]:
    """Every figure of every score, for members and others that count so much."""
    found = {}
    for name, ranking in rankings.items():
        weighed = ranking.weighed(members, others)
        found[name, "auc"] = weighed.auc()
        for rate in counted:
            found[name, rate] = weighed.true_positive_rate(RATES[rate])
    return found


def _with_intervals(
    values: dict[tuple[str, str], float], drawn: list[dict[tuple[str, str], float]], num_users: int
) -> dict[str, dict[str, Any]]:
    scores: dict[str, dict[str, Any]] = {}
    for (name, figure), value in values.items():
        entry = scores.setdefault(name, {"auc": None} | dict.fromkeys(RATES))
        again = [one[name, figure] for one in drawn]
        entry[figure] = interval(value, again, num_users=num_users)
    return scores


def compressed_sizes(
    parquet: Path, without_texts: Collection[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Each document's bytes under zlib, and whether its text is one of `without_texts`."""
    sizes: list[int] = []
    unwanted: list[bool] = []
    for batch in open_corpus(parquet).batches():
        sizes += [len(zlib.compress(text.encode("utf-8"))) for text in batch.texts]
        unwanted += [text in without_texts for text in batch.texts]
    return np.array(sizes, dtype=np.int64), np.array(unwanted, dtype=bool)


def standing_in_both(one: TokenizedCorpus, other: TokenizedCorpus) -> tuple[np.ndarray, np.ndarray]:
    """Which documents of each corpus stand, token for token, in the other too.

    Digests of `other` alone are held; it should be the smaller one.
    """
    digests = [_digest(other, index) for index in range(other.num_documents)]
    wanted, shared = set(digests), set()
    in_one = np.zeros(one.num_documents, dtype=bool)
    for index in range(one.num_documents):
        digest = _digest(one, index)
        if digest in wanted:
            in_one[index] = True
            shared.add(digest)
    return in_one, np.array([digest in shared for digest in digests], dtype=bool)


def _digest(corpus: TokenizedCorpus, index: int) -> bytes:
    return blake2b(np.ascontiguousarray(corpus.document(index)).data, digest_size=16).digest()


def missing_rates(level: dict[str, Any], what: str) -> Iterable[str]:
    """A sentence for each rate that too few non-members leave unknown."""
    for one_in in RATES.values():
        if level["num_nonmembers"] < LEAST_ACCUSED * one_in:
            yield (
                f"The share of {what} found at {100 / one_in:g}% false accusations takes at least {LEAST_ACCUSED * one_in:,} "
                f"held-out {what}; there are {level['num_nonmembers']:,}."
            )
