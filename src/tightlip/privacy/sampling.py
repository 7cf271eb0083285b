"""Who is in a step: units drawn by Poisson sampling, and the rows that speak for each.

The accounting assumes that each unit is in each step by a coin of its own. Shuffled batches
of fixed size are not that, and the ε printed for them would be another mechanism's.

Of texts with several owners only a few documents of each owner are ever drawn: fixed-graph
differential privacy (Ganesh et al. 2025, arXiv 2503.03622). Neighbours differ in what one owner's
texts say; who owns what is fixed and public. Documents are sampled and clipped, and one owner moves
a step by at most as many clip norms as documents of theirs are drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError


class PoissonSampler:
    """Draws the units of a step, each independently with probability `sampling_rate`.

    Holds:
        independent: every unit is in a draw with the same probability, whoever else is.
        law: the size of a draw is binomial; it may be 0, and is never cut to a batch size.
    """

    def __init__(self, num_units: int, expected_batch: float, generator: np.random.Generator):
        if num_units < 1:
            raise UsageError("There is no unit to sample: the corpus has no rows to train on.")
        if not 0 < expected_batch <= num_units:
            raise UsageError(
                f"An expected batch of {expected_batch:g} cannot be drawn from {num_units} units. "
                f"Use a batch size between 1 and {num_units}."
            )
        self.num_units = num_units
        self.expected_batch = expected_batch
        self._generator = generator

    @property
    def sampling_rate(self) -> float:
        return self.expected_batch / self.num_units

    def draw(self) -> np.ndarray:
        """The step's units, sorted; perhaps none."""
        # A coin for each of ten million units takes 80 ms. Given how many coins fall heads, every
        # set of that many units is equally likely, so drawing the number and then the set is the
        # same law.
        size = self._generator.binomial(self.num_units, self.sampling_rate)
        return np.sort(self._generator.choice(self.num_units, size, replace=False, shuffle=False))


def choose_rows(rows_of_unit: np.ndarray, most: int, generator: np.random.Generator) -> np.ndarray:
    """At most `most` of a unit's rows, each set of that size equally likely, in their order."""
    if len(rows_of_unit) <= most:
        return rows_of_unit
    kept = generator.choice(len(rows_of_unit), most, replace=False, shuffle=False)
    return rows_of_unit[np.sort(kept)]


class UnitRows:
    """The rows of each unit. Units are numbered from 0 in the order of their ids: of all that have
    rows, or of those given, of which some may have none.

    Holds:
        partition: every row of these units belongs to exactly one of them.
    """

    def __init__(self, unit_of_row: np.ndarray, ids: np.ndarray | None = None) -> None:
        self._order = np.argsort(unit_of_row, kind="stable")
        self.ids = np.unique(unit_of_row) if ids is None else ids
        in_order = unit_of_row[self._order]
        self._starts = np.searchsorted(in_order, self.ids, "left")
        self._ends = np.searchsorted(in_order, self.ids, "right")

    @property
    def num_units(self) -> int:
        return len(self.ids)

    def rows(self, unit: int, most: int, generator: np.random.Generator) -> np.ndarray:
        """Rows that speak for a unit in one step: all, or `most` of them at random."""
        of_unit = self._order[self._starts[unit] : self._ends[unit]]
        return choose_rows(of_unit, most, generator)


# With twice the documents of each owner there is up to twice the text, of which a step draws half
# the share. σ for ε = 8 over 1,000 steps at δ = 1e-5, k documents drawn at 0.01/k each: k = 1, 2, 4, 8
# need 0.586, 0.606, 0.618, 0.627. But where few owners have as many, and k draws no further text,
# everybody is charged for it: at 0.01 each 0.586, 0.751, 1.05, 1.72.
PER_OWNER = 4
NOT_PROTECTED = "who wrote to whom, and how often: the owners of every text count as public"
# Only the order hangs on it, so that nobody gains by where their texts stand. It need not be secret,
# since who owns what is public, and being always the same it takes the same documents when a run
# goes on.
_KEY = b"tightlip: documents in turn"
_SEVERAL = (list, tuple, np.ndarray)


@dataclass(frozen=True, eq=False)
class Ownership:
    """Who owns each document, and nothing of what it says: owners[bounds[i] : bounds[i + 1]]."""

    owners: np.ndarray
    bounds: np.ndarray

    @property
    def num_owners(self) -> int:
        return len(np.unique(self.owners))

    def taken(self, most: int) -> np.ndarray:
        """The documents that may be drawn: each in its turn, where all its owners have fewer than
        `most`.

        A choice by the draw ("no owner twice in a batch") would prove nothing: one text more or less
        would change which others are in. Nor may it ask what a document says, not even whether
        anything: an empty one takes its place.

        Holds:
            few: nobody owns more than `most` of them.
            greedy: a document that is left out has an owner who had `most` before its turn.
            blind: it hangs on who owns what alone.
        """
        bounds, owners = self.bounds.tolist(), self.owners.tolist()
        counts: dict[int, int] = {}
        chosen = []
        for document in sorted(range(len(bounds) - 1), key=_turn):
            own = owners[bounds[document] : bounds[document + 1]]
            if all(counts.get(owner, 0) < most for owner in own):
                chosen.append(document)
                counts.update((owner, counts.get(owner, 0) + 1) for owner in own)
        return np.sort(np.array(chosen, dtype=np.int64))


def _turn(document: int) -> bytes:
    return blake2b(document.to_bytes(8, "little"), digest_size=16, key=_KEY).digest()


def ownership_of(users: Sequence[Any] | None) -> Ownership | None:
    """Who owns each document, by lists of names, or one name where there is one owner; None where no
    document is given a list."""
    if users is None:
        return None
    lists = [_owners(each, place) for place, each in enumerate(users)]
    if not any(isinstance(each, _SEVERAL) for each in users):
        return None
    numbers: dict[str, int] = {}
    owners = [numbers.setdefault(name, len(numbers)) for own in lists for name in own]
    return Ownership(np.array(owners), np.cumsum([0, *map(len, lists)]))


def _owners(given: Any, place: int) -> list[str]:
    """The names of a document's owners. What names nobody, or might name several as though they were
    one, is refused: the printed ε would be of nobody's texts."""
    own = list(given) if isinstance(given, _SEVERAL) else [given]
    names = [str(name) for name in own if isinstance(name, str | int | np.integer)]
    if not names or len({*names}) < len(own) or "" in names:
        raise UsageError(
            f"Document {place} has the owners {own!r}. Name each of them, once, by a text or a whole number, or several in a "
            "list; a text of nobody's cannot be protected."
        )
    return names
