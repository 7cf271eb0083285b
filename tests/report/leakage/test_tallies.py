"""One streaming pass: histograms against plain counting, and the rows it picks."""

import math
from collections import Counter
from itertools import chain, repeat

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report.leakage.folders import row, sample_rows, sample_snapshots, write_folder, write_sequences
from tightlip.report.leakage.plots import grouped_lengths, thinned
from tightlip.report.leakage.tallies import (
    LENGTH_STARTS,
    Chooser,
    LengthHistogram,
    LogHistogram,
    tally_and_choose,
)

FLOATS = st.floats(min_value=0, allow_infinity=True) | st.just(math.nan)


@given(st.lists(FLOATS, max_size=60), st.integers(1, 40))
def test_nothing_lost_and_few_bars(values, most):
    histogram = LogHistogram()
    histogram.add(np.array(values, dtype=float))
    bars = histogram.bars(most)
    assert sum(count for _, _, count in bars) + histogram.not_finite == len(values)
    assert len(bars) <= most


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40))
def test_a_value_lies_in_the_bar_that_counts_it(values):
    histogram = LogHistogram()
    histogram.add(np.array(values))
    for low, high, count in histogram.bars(34):
        inside = sum(low * (1 - 1e-7) <= value < high * (1 - 1e-7) for value in values)
        surely = sum(low * (1 + 1e-7) <= value < high * (1 - 1e-7) for value in values)
        assert (
            surely
            <= count
            <= inside + sum(math.isclose(value, high, rel_tol=1e-6) for value in values)
        )


@given(st.lists(st.integers(1, 3000), max_size=60))
def test_lengths_agree_with_a_linear_search(lengths):
    histogram = LengthHistogram()
    histogram.add(np.array(lengths, dtype=np.int64))
    expected = Counter(
        max(start for start in LENGTH_STARTS if start <= length) for length in lengths
    )
    assert histogram.counts.tolist() == [expected[start] for start in LENGTH_STARTS]


@pytest.mark.parametrize("row_group", [7, 10_000])
def test_the_tally_agrees_with_counting_rows_one_by_one(tmp_path, row_group):
    rows = sample_rows(700, seed=5)
    tally, _ = tally_and_choose(write_folder(tmp_path / "r", rows, row_group=row_group), [])
    unique = [r for r in rows if r["users_in_d"] == 1]
    assert (tally.num_rows, tally.num_unique) == (len(rows), len(unique))
    assert tally.num_copied == sum(r["copied"] for r in unique)
    assert dict(tally.lengths.bars()) == {
        str(length): sum(r["num_tokens"] == length for r in unique)
        for length in range(1, 1 + max(r["num_tokens"] for r in unique))
    }
    assert tally.own_ratios.counts.sum() == sum(not r["copied"] for r in unique)
    assert tally.perplexities.counts.sum() == len(unique)


def test_odd_numbers_and_empty_lists_are_counted_not_drawn(tmp_path):
    rows = [
        row(perplexities=[math.inf], ratio=math.nan),
        row(perplexities=[math.nan], ratio=math.inf),
        row(perplexities=[], ratio=None),
        row(
            perplexities=None,
            public_perplexities=None,
            contexts=None,
            context_tokens=None,
            ratio=None,
        ),
        row(perplexities=[0.9999999], ratio=0.0),
    ]
    tally, chosen = tally_and_choose(write_folder(tmp_path / "r", rows), [])
    assert tally.perplexities.not_finite == 2
    assert tally.perplexities.bars(10)[0][0] == pytest.approx(1.0)
    assert tally.ratios.not_finite == 2
    assert sorted(chosen) == [0, 1, 2, 3, 4]


def whose(batch):
    return pa.chunked_array([pa.array([[name] for name in batch.column("owner").to_pylist()])])


def test_the_chosen_rows_are_the_worst_the_longest_and_some_of_each_owner():
    lengths = [3] * 90 + [50, 60] + [2] * 8
    owners = ["Viola"] * 95 + ["Feste"] * 5
    rows = [row(num_tokens=n, owner=who) for n, who in zip(lengths, owners, strict=True)]
    batch = pa.RecordBatch.from_pylist(rows)
    chooser = Chooser(owners=["Feste"], num_worst=10, num_longest=2, num_shared=3, num_each_owner=2)
    for start in range(0, 100, 9):
        part = batch.slice(start, 9)
        chooser.add(part, whose(part), start)
    assert sorted(chooser.in_order_of_worth()) == [*range(10), 90, 91, 95, 96]


def test_sequences_several_people_wrote_are_chosen_too():
    batch = pa.RecordBatch.from_pylist([row(users_in_d=n, owner="x") for n in (3, 1, 2, 4, 1, 5)])
    chooser = Chooser(owners=[], num_shared=2)
    chooser.add(batch, whose(batch), 0)
    assert chooser.in_order_of_worth() == [1, 4, 0, 2]


def test_memory_stays_flat_however_many_rows(tmp_path):
    base = sample_rows(500, seed=2)
    peaks = []
    for num in (20_000, 200_000):
        folder = tmp_path / str(num)
        folder.mkdir()
        write_sequences(folder, chain.from_iterable(repeat(base, num // 500)), 500)
        plain, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
        pa.set_memory_pool(pool)
        try:
            tally, _ = tally_and_choose(folder, ["Viola"])
        finally:
            pa.set_memory_pool(plain)
        assert tally.num_rows == num
        peaks.append(pool.max_memory())
    assert peaks[1] < 2 * peaks[0]  # ten times the rows


@settings(max_examples=25)
@given(
    st.lists(
        st.dictionaries(st.integers(1, 1500).map(str), st.integers(0, 90), max_size=8),
        min_size=1,
        max_size=5,
    )
)
def test_nothing_lost_when_lengths_are_grouped(found):
    labels, counts = grouped_lengths([{"unique_lengths": lengths} for lengths in found])
    assert counts.shape == (len(found), len(labels))
    assert counts.sum(axis=1).tolist() == [sum(lengths.values()) for lengths in found]


def test_ends_stay_when_snapshots_are_thinned():
    snapshots = sample_snapshots(90)
    names = [one["name"] for one in thinned(snapshots, 12)]
    assert len(names) <= 12
    assert {"epoch-1", "epoch-90", snapshots["best_validation"]} <= set(names)
