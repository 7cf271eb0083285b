"""The drawn units as tensors, in shapes that follow from each unit alone.

How a product is rounded depends on its shape. Were a row padded to the longest beside it, or a pass
as large as its draw, one unit more would change everybody's last bits: in bfloat16 by a fifth of the
clip norm. Shapes: U units, M rows of each, B rows, T positions.
"""

import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from tightlip.core.devices import moved
from tightlip.core.processes import Processes
from tightlip.privacy.layers import Layout
from tightlip.privacy.passes import Physical
from tightlip.privacy.row_losses import NO_LABEL
from tightlip.privacy.sources import Source

log = logging.getLogger("tightlip")
USUAL_WIDTH = 32
NARROWEST = 8  # positions: below that a pass costs as much
# A pass is always full. On a CPU, which gains little from more rows at once, it is small; on a GPU
# such that mostly one pass is enough, where so many tokens fit.
ROWS_ON_CPU, TOKENS_ON_GPU = 8, 1 << 14
MOST_TRIED = 4  # sizes of a pass, before units take one each
BESIDE = "the units beside it"  # what changes a unit in no size of a pass


class Shape(NamedTuple):
    """Positions of a row, rows of a unit, and units of a pass."""

    width: int
    rows_per_unit: int
    num_units: int

    @property
    def layout(self) -> Layout:
        return Layout(num_units=self.num_units, rows_per_unit=self.rows_per_unit)


class PhysicalBatches:
    """The drawn units in passes of bounded size, those of one shape together.

    Holds:
        alone: a unit's shape is the same whoever else is drawn, or in the corpus.
        complete: nobody who was drawn is left out.
    """

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        *,
        rows_per_unit: int,
        physical_rows: int | None = None,
        expected_batch: float = math.inf,
        most_units: int | None = None,
        widths: Sequence[int] = (),
    ) -> None:
        self.source, self.device = source, next(model.parameters()).device
        self._on_gpu, self._physical_rows = self.device.type == "cuda", physical_rows
        self._most_units = most_units or sys.maxsize
        self._likely_units = expected_batch + 2 * math.sqrt(expected_batch)
        self._rows_per_unit, self._widths = rows_per_unit, widths
        self._positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        self.one_unit_a_pass, self._most_rows = False, sys.maxsize
        self.share_unless(lambda shape: None)

    def share_unless(self, why_apart: Callable[[Shape], str | None]) -> None:
        """Ask this of every shape there is: why units may not share such a pass.

        A GPU's library gives products of some sizes to its cores in uneven parts, and a row's last
        bits then hang on its place. All are asked now: were one asked when somebody who has it is
        first drawn, the draws would decide with which weights.
        """
        self._why_apart = why_apart
        self._shapes: dict[tuple[int, int], Shape] = {}
        self.apart: set[Shape] = set()  # what was asked, and may not share

    def shape(self, longest: int, num_rows: int) -> Shape:
        """The shape of a unit of so many rows, the longest of so many positions."""
        width, size = self._width(longest), self._room(num_rows)
        if self.one_unit_a_pass:
            return Shape(width, size, 1)
        if (width, size) not in self._shapes:
            self._shapes[width, size] = self._that_holds(width, size)
        return self._shapes[width, size]

    @property
    def chosen(self) -> list[Shape]:
        """Every shape that was asked for, as it was settled."""
        return sorted({*self._shapes.values(), self.usual()})

    def take_at_most(self, rows: int) -> None:
        """Let no pass take more, as far as a unit's own rows allow."""
        self._most_rows = rows

    def shared(self) -> list[Shape]:
        """The shapes, of this text and of `asked`, in which units share a pass."""
        counts = np.bincount(self.source.unit_of_row)[self.source.unit_of_row]
        pairs = np.stack([self.source.lengths, np.minimum(counts, self._rows_per_unit)], 1)
        every = [self.shape(int(longest), int(rows)) for longest, rows in np.unique(pairs, axis=0)]
        every += self.asked()
        return [shape for shape in dict.fromkeys(every) if shape.num_units > 1]

    def _that_holds(self, width: int, size: int) -> Shape:
        reason = None
        for together in itertools.islice(self._numbers(width, size), MOST_TRIED):
            shape = Shape(width, size, together)
            if (reason := self._why_apart(shape)) is None:
                return shape
            if reason.endswith(BESIDE):
                break  # no rounding does: another size would only be less likely to show it
        alone = Shape(width, size, 1)
        if reason is not None:
            is_told = any(each.width == width for each in self.apart)
            self.apart.add(alone)
            log.log(
                logging.DEBUG if is_told else logging.WARNING,
                "Units take a pass each where rows have %d positions, which is sound but slow: where they share one, %s.",
                *(width, reason),
            )
        return alone

    def _numbers(self, width: int, size: int) -> Iterator[int]:
        """How many units of a shape a pass may take, the best first."""
        rows = min(self._physical_rows or self._default_rows(width, size), self._most_rows)
        if rows < 2 * size:
            return
        # Rows by fours: of six or seven a CPU's two threads round some by themselves.
        even = 16 if self._on_gpu and rows >= 32 else 4
        by = even // math.gcd(even, size)
        usual = max(by, min(rows // size, self._most_units) // by * by)
        may_grow = self._on_gpu and not self._physical_rows
        most = min(usual + MOST_TRIED * by, self._most_units) if may_grow else usual
        for number in (*range(usual, most + 1, by), *range(usual - by, 1, -by)):
            # With as many rows as positions a tensor's shape would not tell which of both it counts.
            if number * size != width:
                yield number

    def _default_rows(self, width: int, size: int) -> int:
        if not self._on_gpu:
            return ROWS_ON_CPU
        likely = min(self._likely_units * size, TOKENS_ON_GPU / width)
        return 16 * math.ceil(likely / 16)

    def asked(self) -> list[Shape]:
        """Shapes in which it is asked whether units share a pass without moving each other: from the
        settings and the model alone, since the answer decides for everybody."""
        shortest = self.shape(min(self._widths, default=NARROWEST), 1)
        return list(dict.fromkeys((shortest, self.usual(self._rows_per_unit))))

    def usual(self, num_rows: int = 1) -> Shape:
        """A shape of units of so many rows that nobody's text decides on: the widest given, or one
        that is not too dear to try."""
        width = max(self._widths, default=USUAL_WIDTH)
        return self.shape(min(width, self._positions or width), min(num_rows, self._rows_per_unit))

    def num_passes(self, expected_batch: float) -> int:
        """As many as a step takes at most as a rule, if everybody has all the rows they may."""
        return math.ceil(expected_batch / self.usual(self._rows_per_unit).num_units) + 1

    def of(
        self,
        rows_of: Sequence[np.ndarray],
        shares_U: np.ndarray | None = None,
        processes: Processes | None = None,
    ) -> Iterator[tuple[Physical, int]]:
        """The batches, and how many targets each has. `shares_U` is which part of the clip norm
        bounds each unit; all of it where none is given. Of several `processes` each runs the next
        batch in turn, and as many as the others: the last may be empty."""
        units_of: dict[Shape, list[int]] = {}
        for unit, rows in enumerate(rows_of):
            shape = self.shape(int(self.source.lengths[rows].max()), len(rows))
            units_of.setdefault(shape, []).append(unit)
        parts = [
            (shape, units[start : start + shape.num_units])
            for shape, units in sorted(units_of.items())
            for start in range(0, len(units), shape.num_units)
        ]
        own = processes or Processes()
        while len(parts) % own.size:
            parts.append((parts[-1][0], []))
        for shape, part in parts[own.rank :: own.size]:
            shares = None if shares_U is None else shares_U[part]
            yield self._physical([rows_of[unit] for unit in part], shares, shape)

    def _width(self, longest: int) -> int:
        """The smallest width that is given and fits; else a power of two, where the model has so
        many positions."""
        power = max(NARROWEST, 1 << (longest - 1).bit_length())
        fits = [width for width in self._widths if width >= longest]
        return min(fits, default=max(longest, min(power, self._positions or power)))

    def _room(self, num_rows: int) -> int:
        """1, 4, 16, … or the most: few shapes, and never four times the rows."""
        power = 4 ** -(-(num_rows - 1).bit_length() // 2)
        return min(power, self._rows_per_unit)

    def _physical(
        self, rows_of: list[np.ndarray], shares: np.ndarray | None, shape: Shape
    ) -> tuple[Physical, int]:
        rows_UM = np.full((shape.num_units, shape.rows_per_unit), -1, np.int64)
        for unit, rows in enumerate(rows_of):
            rows_UM[unit, : len(rows)] = rows
        ids_BT, targets_BT = self.source.gather(rows_UM.ravel(), shape.width)
        num_rows_U = torch.from_numpy((rows_UM >= 0).sum(1))
        shares_U = None
        if shares is not None:
            padded = np.concatenate([shares, np.ones(shape.num_units - len(shares))])
            shares_U = moved(torch.from_numpy(padded), self.device)
        batch = Physical.of(
            moved(ids_BT, self.device),
            moved(targets_BT, self.device),
            moved(num_rows_U, self.device),
            shape.layout,
            shares_U,
        )
        return batch, int((targets_BT != NO_LABEL).sum())
