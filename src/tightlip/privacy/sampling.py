"""Who is in a step: units drawn by Poisson sampling, and the rows that speak for each.

The accounting assumes that each unit is in each step by a coin of its own. Shuffled batches
of fixed size are not that, and the ε printed for them would be another mechanism's.
"""

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
