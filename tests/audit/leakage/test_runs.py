"""S and which of its runs are equal or copied, against the naive ways."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from tightlip.audit.leakage.counting import end_to_end
from tightlip.audit.leakage.runs import (
    Runs,
    collect_runs,
    copied_runs,
    distinct_sequences,
    sums_over_runs,
)

NUM_TOKENS = 6


def flat(documents):
    bounds = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    tokens = np.array([token for ids in documents for token in ids], dtype=np.int32)
    return tokens, bounds


def runs_by_walking(documents, ranks, textless, top_k, first_place=0):
    """Oracle: Algorithm 1 of the paper with the last run flushed; (document, start, ids)."""
    found, place = [], first_place
    for number, ids in enumerate(documents):
        run = []
        for token in ids:
            rank = ranks[place - first_place]
            if 0 <= rank < top_k and token not in textless:
                run.append(token)
            elif run:
                found.append((number, place - len(run), run))
                run = []
            place += 1
        if run:
            found.append((number, place - len(run), run))
    return found


def as_runs(entries):
    return Runs(
        starts=np.array([start for _, start, _ in entries], dtype=np.int64),
        lengths=np.array([len(ids) for _, _, ids in entries], dtype=np.int64),
        documents=np.array([number for number, _, _ in entries], dtype=np.int64),
    )


@st.composite
def scanned_corpora(draw_from):
    draw = draw_from(st.randoms(use_true_random=False))
    alphabet = draw.randint(1, NUM_TOKENS)
    documents = [
        [draw.randrange(alphabet) for _ in range(draw.choice([0, 1, 4, 25]))]
        for _ in range(draw.randint(0, 8))
    ]
    documents += draw.choices(documents, k=2) if documents else []
    ranks = [draw.choice([-1, 0, 0, 0, 1, 2, 9]) for ids in documents for _ in ids]
    textless = set(draw.sample(range(NUM_TOKENS), draw.randint(0, 2)))
    return documents, ranks, textless, draw.randint(1, 4)


def collected(documents, ranks, textless, top_k):
    tokens, bounds = flat(documents)
    carries_text = np.array([token not in textless for token in range(NUM_TOKENS)])
    runs = collect_runs(tokens, bounds, np.array(ranks, dtype=np.int32), carries_text, top_k)
    return tokens, bounds, runs


@given(scanned_corpora())
@settings(max_examples=120, deadline=None)
def test_runs_are_those_of_the_papers_walk_with_the_last_one_kept(drawn):
    documents, ranks, textless, top_k = drawn
    tokens, _, runs = collected(*drawn)
    got = [
        (int(number), int(start), tokens[start : start + length].tolist())
        for number, start, length in zip(runs.documents, runs.starts, runs.lengths, strict=True)
    ]
    assert got == runs_by_walking(documents, ranks, textless, top_k)


@given(scanned_corpora(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_part_of_the_corpus_gives_the_runs_of_that_part(drawn, first):
    documents, ranks, textless, top_k = drawn
    first = min(first, len(documents))
    tokens, bounds = flat(documents)
    base = int(bounds[first])
    carries_text = np.array([token not in textless for token in range(NUM_TOKENS)])
    part = np.array(ranks[base:], dtype=np.int32)
    runs = collect_runs(tokens, bounds[first:], part, carries_text, top_k)
    want = runs_by_walking(documents[first:], ranks[base:], textless, top_k, base)
    assert runs.starts.tolist() == [start for _, start, _ in want]
    assert runs.documents.tolist() == [number for number, _, _ in want]
    values = np.arange(base, base + len(part), dtype=np.float32)
    sums = [sum(range(start, start + len(ids))) for _, start, ids in want]
    assert sums_over_runs(values, runs, base).tolist() == sums


@given(scanned_corpora())
@settings(max_examples=120, deadline=None)
def test_equal_runs_share_a_number_and_numbers_ascend_with_the_ids(drawn):
    documents, ranks, textless, top_k = drawn
    tokens, _, runs = collected(*drawn)
    ids = [tuple(run) for _, _, run in runs_by_walking(documents, ranks, textless, top_k)]
    want = sorted(set(ids))
    distinct = distinct_sequences(tokens, runs)
    assert distinct.number_of_run.tolist() == [want.index(run) for run in ids]
    assert distinct.first_run.tolist() == [ids.index(run) for run in want]
    first = distinct.first_run
    sequences = end_to_end(tokens, runs.starts[first], runs.lengths[first])
    cut = [
        tuple(sequences.tokens[begin:end].tolist())
        for begin, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)
    ]
    assert cut == want


@given(scanned_corpora())
@settings(max_examples=120, deadline=None)
def test_a_run_is_copied_when_it_stands_whole_before_itself(drawn):
    documents, ranks, textless, top_k = drawn
    tokens, bounds, runs = collected(*drawn)
    entries = runs_by_walking(documents, ranks, textless, top_k)
    want = [
        oracle.occurrences(run, documents[number][: start - int(bounds[number])]) > 0
        for number, start, run in entries
    ]
    assert copied_runs(tokens, bounds, runs).tolist() == want


def repeated_stretches(seed):
    """Long documents made of a few long stretches, cut into runs at odd places."""
    draw = random.Random(seed)
    stretches = [[draw.randrange(4) for _ in range(draw.randint(50, 400))] for _ in range(3)]
    documents, entries, place = [], [], 0
    for number in range(4):
        ids = [token for stretch in draw.choices(stretches, k=4) for token in stretch]
        begin = 0
        while begin < len(ids):
            length = draw.choice([1, 30, 100, 400])
            entries.append((number, place + begin, ids[begin : begin + length]))
            begin += length + draw.randint(1, 3)
        documents.append(ids)
        place += len(ids)
    return documents, entries


@pytest.mark.parametrize("seed", range(10))
def test_long_repeated_runs_are_told_apart_and_found_in_their_contexts(seed):
    documents, entries = repeated_stretches(seed)
    tokens, bounds = flat(documents)
    runs = as_runs(entries)
    ids = [tuple(run) for _, _, run in entries]
    want = sorted(set(ids))
    assert distinct_sequences(tokens, runs).number_of_run.tolist() == [
        want.index(run) for run in ids
    ]
    copied = [
        oracle.occurrences(run, documents[number][: start - int(bounds[number])]) > 0
        for number, start, run in entries
    ]
    assert any(copied)
    assert not all(copied)
    assert copied_runs(tokens, bounds, runs).tolist() == copied


def test_two_runs_of_ten_thousand_tokens_that_differ_in_the_last_are_two_sequences():
    long = [token % 5 for token in range(10_000)]
    documents = [[*long, 1], [*long, 2], [*long, 1], long]
    tokens, bounds = flat(documents)
    runs = as_runs([(i, int(bounds[i]), ids) for i, ids in enumerate(documents)])
    distinct = distinct_sequences(tokens, runs)
    assert distinct.number_of_run.tolist() == [1, 2, 1, 0]  # the shorter one comes first
    assert distinct.first_run.tolist() == [3, 0, 1]


def test_a_run_beside_its_copy_counts_and_one_that_overlaps_it_does_not():
    tokens, bounds = flat([[1, 2, 1, 2, 1, 2, 1]])
    beside = as_runs([(0, 2, [1, 2])])
    overlapping = as_runs([(0, 2, [1, 2, 1])])
    assert copied_runs(tokens, bounds, beside).tolist() == [True]
    assert copied_runs(tokens, bounds, overlapping).tolist() == [False]
    apart = as_runs([(0, 4, [1, 2, 1])])
    assert copied_runs(tokens, bounds, apart).tolist() == [True]


def test_a_text_of_one_word_over_and_over_is_looked_through_once():
    # Every place matches: comparing each to its end would be 4e10 steps.
    half = 400_000
    tokens, bounds = flat([[7] * half + [8] + [7] * half])
    runs = as_runs([(0, 1, [7] * (half // 2)), (0, half + 1, [7] * (half // 2))])
    assert copied_runs(tokens, bounds, runs).tolist() == [False, True]


def test_what_stands_in_another_document_is_no_context():
    tokens, bounds = flat([[1, 2, 3], [4, 1, 2, 3]])
    assert copied_runs(tokens, bounds, as_runs([(1, 4, [1, 2, 3])])).tolist() == [False]


def test_no_runs_are_no_sequences():
    tokens, bounds = flat([[1, 2, 3]])
    none = as_runs([])
    assert len(distinct_sequences(tokens, none)) == 0
    assert copied_runs(tokens, bounds, none).tolist() == []
    assert len(end_to_end(tokens, none.starts, none.lengths)) == 0


def test_sums_are_taken_in_float64_over_each_run_alone():
    values = np.full(3_000, 1e8, dtype=np.float32)
    values[1000:1003] = [-0.25, -0.5, -1e-7]
    runs = as_runs([(0, 1000, [0] * 3), (0, 0, [0] * 1000)])
    assert sums_over_runs(values, runs, 0).tolist() == [
        -0.25 - 0.5 - float(np.float32(1e-7)),
        1e11,
    ]
