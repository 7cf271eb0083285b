"""One pass over sequences.parquet: what to draw, and which rows to show.

The file may hold millions of rows, so it is read in small batches and only counts
and row numbers are kept.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import damage_in_words

BATCH_ROWS = 16_384
BUFFER_BYTES = 1 << 20
_NAMES = ["owner", "owners.list.element"]
_COLUMNS = ("num_tokens", "users_in_d", "perplexities", "ratio", "copied")
# A report of 0.1 has none of them; role and trained_on are null where the corpus holds no chats.
SINCE_0_2 = ("users_by_text", "unique_by_text", "leak", "role", "trained_on", "beyond_prior")

# The last bins of the length plot are ranges: a run of 400 tokens and one of 3 fit on one axis.
LENGTH_STARTS = (*range(1, 21), 21, 31, 51, 101, 201, 501, 1001)


class LogHistogram:
    """Counts of positive numbers in narrow bins of equal width in log10.

    Holds:
        nothing_lost: every value added is in a bin or in `not_finite`.
        few_bars: `bars` never returns more than asked for.
    """

    PER_DECADE, LOWEST, HIGHEST = 40, -6, 12

    def __init__(self) -> None:
        self.counts = np.zeros((self.HIGHEST - self.LOWEST) * self.PER_DECADE, dtype=np.int64)
        self.not_finite = 0

    def add(self, values: np.ndarray) -> None:
        finite = values[np.isfinite(values)]
        self.not_finite += len(values) - len(finite)
        # A value beyond either end is put into the last bin there, not dropped.
        logs = np.log10(np.clip(finite, 10.0**self.LOWEST, 10.0**self.HIGHEST))
        # 1e-9: log10 of an exact edge may land a hair below it.
        bins = ((logs - self.LOWEST) * self.PER_DECADE + 1e-9).astype(np.int64)
        size = len(self.counts)
        self.counts += np.bincount(np.minimum(bins, size - 1), minlength=size)

    def span(self) -> tuple[int, int] | None:
        """First occupied bin and one past the last, or None when empty."""
        occupied = np.flatnonzero(self.counts)
        return (int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else None

    def bars(
        self, most: int, span: tuple[int, int] | None = None
    ) -> list[tuple[float, float, int]]:
        """(low, high, count) over the occupied range, neighbours merged until at most `most` are left."""
        if (span := span or self.span()) is None:
            return []
        first, last = span
        width = math.ceil((last - first) / most)
        starts = range(first, last, width)
        counts = [int(self.counts[start : start + width].sum()) for start in starts]
        edges = [(self._edge(start), self._edge(start + width)) for start in starts]
        return [(low, high, num) for (low, high), num in zip(edges, counts, strict=True)]

    def _edge(self, position: int) -> float:
        return 10.0 ** (self.LOWEST + position / self.PER_DECADE)


class LengthHistogram:
    """Counts of lengths, exact for 1 to 20 tokens, then in widening ranges."""

    def __init__(self) -> None:
        self.counts = np.zeros(len(LENGTH_STARTS), dtype=np.int64)

    def add(self, lengths: np.ndarray, times: np.ndarray | int = 1) -> None:
        bins = np.searchsorted(LENGTH_STARTS, lengths, side="right") - 1
        np.add.at(self.counts, np.maximum(bins, 0), times)

    def bars(self) -> list[tuple[str, int]]:
        """(label, count) up to the last occupied one."""
        last = max(np.flatnonzero(self.counts).tolist(), default=-1)
        return [(length_label(place), int(self.counts[place])) for place in range(last + 1)]


def length_label(place: int) -> str:
    start = LENGTH_STARTS[place]
    if place + 1 == len(LENGTH_STARTS):
        return f"{start}+"
    end = LENGTH_STARTS[place + 1] - 1
    return str(start) if start == end else f"{start}–{end}"


@dataclass(kw_only=True)
class Tally:
    """What one pass learns about the unique sequences; `own` leaves out the copied ones."""

    num_rows: int = 0
    num_unique: int = 0
    num_copied: int = 0
    num_untrained: int = 0
    num_with_ratio: int = 0
    longest: int = 0
    lengths: LengthHistogram = field(default_factory=LengthHistogram)
    own_lengths: LengthHistogram = field(default_factory=LengthHistogram)
    perplexities: LogHistogram = field(default_factory=LogHistogram)
    own_perplexities: LogHistogram = field(default_factory=LogHistogram)
    ratios: LogHistogram = field(default_factory=LogHistogram)
    own_ratios: LogHistogram = field(default_factory=LogHistogram)

    def add(self, batch: pa.RecordBatch) -> None:
        unique = is_unique(batch)
        copied = filled(batch.column("copied"), False).astype(bool)[unique]
        self.num_rows += batch.num_rows
        self.num_unique += int(unique.sum())
        self.num_copied += int(copied.sum())
        if "trained_on" in batch.schema.names:
            self.num_untrained += int((filled(batch.column("trained_on"), True) == 0)[unique].sum())
        lengths = filled(batch.column("num_tokens"), 0)[unique]
        self.lengths.add(lengths)
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.own_lengths.add(lengths[~copied])
        lowest, known = first_of_lists(batch.column("perplexities"))
        # Rounding can leave a certain run a hair below 1, which no perplexity is.
        lowest, known = np.maximum(lowest[unique], 1.0), known[unique]
        self.perplexities.add(lowest[known])
        self.own_perplexities.add(lowest[known & ~copied])
        ratio = batch.column("ratio")
        self.num_with_ratio += len(ratio) - ratio.null_count
        has_ratio = np.asarray(ratio.is_valid())[unique]
        ratios = filled(ratio, 0.0)[unique]
        self.ratios.add(ratios[has_ratio])
        self.own_ratios.add(ratios[has_ratio & ~copied])


def is_unique(batch: pa.RecordBatch) -> np.ndarray:
    """Which sequences one person alone wrote: as text where that was counted, else as tokens."""
    if "unique_by_text" in batch.schema.names:
        return filled(batch.column("unique_by_text"), False).astype(bool)
    return filled(batch.column("users_in_d"), 0) == 1


def heads_of(batch: pa.RecordBatch, start: int) -> np.ndarray:
    """The row by which the leak of each row is called; its own for a row of no leak."""
    own = np.arange(start, start + batch.num_rows)
    if "leak" not in batch.schema.names:
        return own
    leak = filled(batch.column("leak"), -1)
    return np.where(leak >= 0, leak, own)


def filled(column: pa.Array, value: float) -> np.ndarray:
    """A column as numpy, nulls replaced; a column that is all null has no type of its own."""
    if pa.types.is_null(column.type):
        return np.full(len(column), value)
    return pc.fill_null(column, value).to_numpy(zero_copy_only=False)


def first_of_lists(lists: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Each list's first number, and whether it has one."""
    # Of a list of no fixed size pyarrow refuses the first element where there is none.
    first = pc.list_element(pc.list_slice(lists, 0, 1, return_fixed_size_list=True), 0)
    return filled(first, math.nan), np.asarray(first.is_valid())


@dataclass(kw_only=True)
class Chooser:
    """Row numbers worth showing: the worst, the longest, some of every role and of every owner on the page.

    Rows come worst first, so the worst are simply the first ones. The row that a leak is called
    by comes with any other row of it.
    """

    owners: list[str]
    num_worst: int = 1500
    num_longest: int = 250
    num_shared: int = 250
    num_each_owner: int = 3
    num_each_role: int = 50

    def __post_init__(self) -> None:
        self.worst: list[int] = []
        self.shared: list[int] = []
        self.picked: list[int] = []
        self._longest: list[tuple[int, int]] = []
        self._of_role: dict[str, int] = {}
        self._wanted = dict.fromkeys(self.owners, self.num_each_owner)
        self._head_of: dict[int, int] = {}

    def add(self, batch: pa.RecordBatch, owners: pa.ChunkedArray, start: int) -> None:
        unique, heads = is_unique(batch), heads_of(batch, start)
        known = len(self.worst), len(self.picked)
        worst, shared = np.flatnonzero(unique) + start, np.flatnonzero(~unique) + start
        self.worst += worst[: self.num_worst - len(self.worst)].tolist()
        self.shared += shared[: self.num_shared - len(self.shared)].tolist()
        is_head = unique & (heads == np.arange(start, start + len(heads)))
        self._add_longest(np.where(is_head, filled(batch.column("num_tokens"), 0), 0), start)
        self._add_owned(owners, is_head, start)
        if "role" in batch.schema.names:
            self._add_roles(batch.column("role"), is_head, start)
        for place in (*self.worst[known[0] :], *self.picked[known[1] :]):
            self._head_of[place] = int(heads[place - start])

    def _add_longest(self, lengths: np.ndarray, start: int) -> None:
        least = self._longest[0][0] if len(self._longest) == self.num_longest else 0
        for place in np.flatnonzero(lengths > least).tolist():
            heapq.heappush(self._longest, (int(lengths[place]), -(start + place)))
            if len(self._longest) > self.num_longest:
                heapq.heappop(self._longest)

    def _add_owned(self, owners: pa.ChunkedArray, unique: np.ndarray, start: int) -> None:
        names = pc.list_flatten(owners).cast(pa.string())
        rows = np.asarray(pc.list_parent_indices(owners))
        wanted = np.asarray(pc.is_in(names, value_set=pa.array(list(self._wanted), pa.string())))
        for place in np.flatnonzero(wanted & unique[rows]).tolist():
            if (name := names[place].as_py()) in self._wanted:
                self.picked.append(start + int(rows[place]))
                self._wanted[name] -= 1
                if not self._wanted[name]:
                    del self._wanted[name]

    def _add_roles(self, roles: pa.Array, unique: np.ndarray, start: int) -> None:
        for role in roles.unique().drop_null().to_pylist():
            places = np.flatnonzero(filled(pc.equal(roles, role), False).astype(bool) & unique)
            known = self._of_role.get(role, 0)
            self.picked += (places[: self.num_each_role - known] + start).tolist()
            self._of_role[role] = min(known + len(places), self.num_each_role)

    def in_order_of_worth(self) -> list[int]:
        """Row numbers, the ones to keep longest first."""
        longest = [-place for _, place in sorted(self._longest, reverse=True)]
        every = [*self.worst[:200], *longest, *self.picked, *self.worst, *self.shared]
        with_heads = [(self._head_of.get(place, place), place) for place in every]
        return list(dict.fromkeys(chain.from_iterable(with_heads)))


def file_of_report(folder: Path, name: str) -> Path:
    """A file that every leakage report has."""
    if not (folder / name).exists():
        raise UsageError(
            f"{folder} has no {name}, so it is not a leakage report. Make one with: tightlip audit MODEL CORPUS --out {folder}"
        )
    return folder / name


def open_sequences(folder: Path) -> pq.ParquetFile:
    return open_table(file_of_report(folder, "sequences.parquet"))


def open_table(path: Path) -> pq.ParquetFile:
    with damage_in_words(path):
        return pq.ParquetFile(checked(path), buffer_size=BUFFER_BYTES, pre_buffer=False)


def read_owners(folder: Path) -> pa.ChunkedArray:
    """The owners of each row of sequences.parquet, as numbers into the names: a few bytes a row."""
    path = folder / "owners.parquet"
    with open_sequences(folder) as sequences:
        num_rows = sequences.metadata.num_rows
    with damage_in_words(path):
        table = pq.read_table(checked(path), read_dictionary=_NAMES) if path.exists() else None
    if table is None or table.num_rows != num_rows:
        raise UsageError(
            f"{path} is missing or does not belong to the sequences.parquet beside it. Make the report again: tightlip audit"
        )
    if "owners" in table.column_names:
        return table.column("owners")
    one = table.column("owner").combine_chunks()  # a report of 0.1
    edges = np.concatenate([[0], np.cumsum(np.asarray(one.is_valid()))]).astype(np.int32)
    return pa.chunked_array([pa.ListArray.from_arrays(edges, one.drop_null())])


def batches(
    file: pq.ParquetFile, columns: Sequence[str], batch_rows: int = BATCH_ROWS, **which: Any
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Row number of the first row, and the batch."""
    start = 0
    for batch in file.iter_batches(batch_rows, columns=list(columns), use_threads=False, **which):
        yield start, batch
        start += batch.num_rows


def tally_and_choose(folder: Path, owners: list[str]) -> tuple[Tally, list[int]]:
    """Histograms of the unique sequences and the row numbers to show, in one pass."""
    tally, chooser = Tally(), Chooser(owners=owners)
    owners_of_row = read_owners(folder)
    with damage_in_words(folder / "sequences.parquet"), open_sequences(folder) as file:
        later = [name for name in SINCE_0_2 if name in file.schema_arrow.names]
        for start, batch in batches(file, (*_COLUMNS, *later)):
            tally.add(batch)
            chooser.add(batch, owners_of_row.slice(start, batch.num_rows), start)
    return tally, chooser.in_order_of_worth()
