"""Stretches of a text in people's documents, against every stretch tried one by one."""

import random
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightlip.audit.leakage.counting import edges_of, least_memory
from tightlip.audit.synthetic.overlap import END_WORDS, Search, core_words, most_changes
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.engines.local import LocalEngine


def corpus_of(documents):
    """Documents as (owners, words), the words being numbers."""
    names = sorted({name for owners, _ in documents for name in owners})
    owners = [[names.index(name) for name in owners] for owners, _ in documents]
    several = any(len(one) > 1 for one in owners)
    return TokenizedCorpus(
        tokens=np.array([word for _, words in documents for word in words], np.int32),
        bounds=edges_of(np.array([len(words) for _, words in documents], np.int64)),
        users=np.array([one[0] for one in owners], np.int32),
        user_names=names,
        corpus_fingerprint="",
        tokenizer_fingerprint="",
        owners=np.array([one for each in owners for one in each], np.int32) if several else None,
        owner_bounds=edges_of(np.array([len(one) for one in owners])) if several else None,
    )


def found_in(texts, documents, other=None, *, least=3, near=0.0, memory=10**9, workers=1):
    """What is one person's, as (owner, document, start, end, changes, what they wrote, others)."""
    synthetic = corpus_of([(("",), text) for text in texts])
    corpus = corpus_of(documents)
    engine = LocalEngine(workers)
    memory = max(memory, workers * least_memory(corpus))
    search = Search(synthetic=synthetic, min_words=least, near=near, engine=engine, memory_bytes=memory)  # fmt: skip
    overlap = search.overlap_with(corpus, None if other is None else corpus_of(other))
    own, rows = overlap.own, set()
    for one in own:
        text = int(np.searchsorted(synthetic.bounds, one["starts"], "right")) - 1
        begin, place = synthetic.bounds[text], int(one["places"])
        written = tuple(corpus.tokens[place : place + one["num_written"]].tolist())
        rows.add((
            corpus.user_names[one["owners"]], text, int(one["starts"] - begin), int(one["ends"] - begin),
            int(one["changes"]), written, int(one["others"]),
        ))  # fmt: skip
    assert len(rows) == len(own)
    return rows, overlap


def windows(words, size):
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def owners_alone(stretch, documents):
    """Oracle: who owns every document that has these words."""
    having = [{*owners} for owners, words in documents if stretch in windows(words, len(stretch))]
    return set.intersection(*having) if having else set()


def exact_by_hand(texts, documents, least):
    """Oracle: every stretch of every text, those that a longer one holds left out."""
    own = set()
    for number, text in enumerate(texts):
        pairs = [(i, j) for i in range(len(text)) for j in range(i + least, len(text) + 1)]
        standing = {
            (i, j) for i, j in pairs if any(tuple(text[i:j]) in windows(words, j - i) for _, words in documents)
        }  # fmt: skip
        for i, j in standing:
            if not any(a <= i and j <= b and (a, b) != (i, j) for a, b in standing):
                own |= {(name, number, i, j) for name in owners_alone(tuple(text[i:j]), documents)}
    return own


@cache
def distance(one, other):
    """Oracle: the least number of words to put in, leave out or change."""
    if not one or not other:
        return len(one) + len(other)
    if one[-1] == other[-1]:
        return distance(one[:-1], other[:-1])
    return 1 + min(
        distance(one[:-1], other), distance(one, other[:-1]), distance(one[:-1], other[:-1])
    )


def changed_by_hand(text, documents, least, near, *, whole):
    """Oracle: (owner, start, end) of every stretch that is near something with a core of theirs.

    With `whole`, only those where all words beside the core that agree with each other are taken to
    do so; what lies beyond is aligned in any way whose three outermost words agree.
    """
    core, near_ones = core_words(least, near), set()
    for (owners, words), i in product(documents, range(len(text))):
        for j, p in product(range(i + least, len(text) + 1), range(len(words))):
            most = most_changes(j - i, near)
            for q in range(max(p + core, p + j - i - most), min(len(words), p + j - i + most) + 1):
                for a, b in product(range(i, j - core + 1), range(p, q - core + 1)):
                    middle = tuple(text[a : a + core])
                    if middle != tuple(words[b : b + core]):
                        continue
                    before = beside(text[i:a][::-1], text[:a][::-1], words[p:b][::-1], words[:b][::-1], whole)  # fmt: skip
                    c, d = a + core, b + core
                    behind = beside(text[c:j], text[c:], words[d:q], words[d:], whole)
                    if before + behind <= most:
                        near_ones |= {
                            (name, i, j) for name in owners_alone(middle, documents) & {*owners}
                        }
    return near_ones


def beside(own, all_own, there, all_there, whole):
    """Changes from the one to the other, on one side of a core, the three outermost words agreeing."""
    if own == there:
        return 0
    if not whole:
        return distance(tuple(own), tuple(there)) if ends_alike(own, there) else 1000
    run = 0
    while run < min(len(all_own), len(all_there)) and all_own[run] == all_there[run]:
        run += 1
    own, there = own[run:], there[run:]
    return distance(tuple(own), tuple(there)) if ends_alike(own, there) else 1000


def ends_alike(own, there):
    return min(len(own), len(there)) >= END_WORDS and own[-END_WORDS:] == there[-END_WORDS:]


few_words = st.lists(st.integers(1, 4), max_size=14)
some_texts = st.lists(few_words, min_size=1, max_size=3)
one_owner = st.sampled_from([("ann",), ("bob",), ("cid",)])
any_owners = one_owner | st.sampled_from([("ann", "bob"), ("bob", "cid"), ("cid", "ann", "bob")])


def some_documents(owners):
    return st.lists(st.tuples(owners, few_words), min_size=1, max_size=6)


@pytest.mark.parametrize("owners", [one_owner, any_owners], ids=["one", "several"])
def test_word_for_word_it_agrees_with_trying_every_stretch(owners):
    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(texts=some_texts, documents=some_documents(owners), least=st.integers(1, 5))
    def agrees(texts, documents, least):
        found, _ = found_in(texts, documents, least=least)
        assert {row[:4] for row in found} == exact_by_hand(texts, documents, least)
        assert all(row[4] == 0 and row[5] == tuple(texts[row[1]][row[2] : row[3]]) for row in found)

    agrees()


def edited(draw, words):
    """The words with one or two of them changed, left out or put in."""
    words = list(words)
    for _ in range(draw.randint(1, 2)):
        place = draw.randrange(len(words))
        words[place : place + 1] = draw.choice([[], [draw.randint(1, 5)], [words[place], 1]])
    return words


@pytest.mark.parametrize("several", [False, True], ids=["one owner", "several"])
def test_with_changes_it_finds_all_that_trying_finds_and_nothing_else(several):
    num_changed = 0
    for seed in range(60):
        draw = random.Random(seed)
        names = [["ann"], ["bob"], ["cid"], *([["ann", "bob"], ["cid", "bob"]] if several else [])]
        documents = [
            (draw.choice(names), [draw.randint(1, 5) for _ in range(draw.randint(5, 9))])
            for _ in range(draw.randint(1, 4))
        ]
        text, least, near = edited(draw, documents[0][1]), draw.randint(4, 6), draw.choice([0.17, 0.25])  # fmt: skip
        rows, _ = found_in([text], documents, least=least, near=near)
        for owner, start, end in changed_by_hand(text, documents, least, near, whole=True):
            assert any(row[0] == owner and row[2] <= start and end <= row[3] for row in rows)
        true = changed_by_hand(text, documents, least, near, whole=False)
        for owner, _, start, end, changes, written, _ in rows:
            if changes:
                assert (owner, start, end) in true
                assert distance(tuple(text[start:end]), written) <= changes
                assert changes <= most_changes(end - start, near)
                num_changed += 1
        assert {row[:4] for row in rows if not row[4]} == exact_by_hand([text], documents, least)
    assert num_changed > 10  # there was something to find


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(texts=some_texts, documents=some_documents(any_owners), memory=st.sampled_from([1, 500, 1000]))  # fmt: skip
def test_it_is_the_same_however_the_corpus_is_cut(texts, documents, memory):
    whole, one = found_in(texts, documents, near=0.25, least=4)
    cut, several = found_in(texts, documents, near=0.25, least=4, memory=memory, workers=2)
    # Of two places of one person that are equally near either may be shown.
    assert {row[:5] for row in whole} == {row[:5] for row in cut}
    assert one.num_distinct == several.num_distinct


@pytest.mark.parametrize("near", [0.05, 0.1, 0.2, 0.25])
@pytest.mark.parametrize("least", [4, 8, 20])
def test_every_stretch_with_so_many_changes_has_a_core(least, near):
    """Oracle: changes spread as evenly as can be, at every length up to 300."""
    core = core_words(least, near)
    for words in range(least, 300):
        changes = most_changes(words, near)
        pieces = np.array_split(np.arange(words - changes), changes + 1)
        assert max(map(len, pieces)) >= core


SECRET = list(range(100, 130))


def planted(*, owner, edits):
    """Thirty words of one person among others, and the same with so many words changed in a text."""
    draw = np.random.default_rng(edits)
    noise = [draw.integers(1, 50, 60).tolist() for _ in range(20)]
    documents = [((f"u{number % 7}",), words) for number, words in enumerate(noise)]
    documents.append(((owner,), [1, 2, *SECRET, 3]))
    copy, places = list(SECRET), draw.choice(np.arange(3, 27), edits, replace=False)
    for kind, place in enumerate(sorted(places.tolist(), reverse=True)):
        copy[place : place + 1] = [[999], [], [copy[place], 999]][kind % 3]
    return [[51, *copy, 52]], documents, copy


@pytest.mark.parametrize("edits", [0, 1, 2, 3])
def test_a_planted_copy_is_found_with_its_owner_and_its_changes(edits):
    texts, documents, copy = planted(owner="eve", edits=edits)
    rows, _ = found_in(texts, documents, least=8, near=0.12)
    longest = max(rows, key=lambda row: row[3] - row[2])
    assert longest == ("eve", 0, 1, 1 + len(copy), edits, tuple(SECRET), 0)
    assert {row[0] for row in rows} == {"eve"}


def test_more_changes_than_the_share_are_found_in_part_only():
    texts, documents, copy = planted(owner="eve", edits=9)
    rows, _ = found_in(texts, documents, least=8, near=0.12)
    assert all(row[3] - row[2] < len(copy) for row in rows)
    assert all(row[4] <= 0.12 * (row[3] - row[2]) for row in rows)


def test_what_the_control_wrote_too_is_told():
    phrase, secret = list(range(1, 10)), list(range(20, 30))
    documents, other = [(("ann",), [90, *phrase, 91, *secret])], [(("dan",), [80, *phrase, 81])]
    rows, _ = found_in([[70, *phrase, 71], secret], documents, other, least=8)
    assert {(row[1], row[6]) for row in rows} == {(0, 1), (1, 0)}


def test_a_text_that_repeats_itself_is_done_soon():
    """Every place of it is the start of a longest stretch, all of them the same one."""
    rows, overlap = found_in([[1] * 20_000], [(("ann",), [1] * 300)], least=8)
    assert overlap.num_distinct == 1
    assert len(rows) == 20_000 - 300 + 1


def test_a_core_at_very_many_places_is_said_to_be_tried_at_some_only():
    documents = [(("ann",), [1, 2, 3, 4, 5, number + 10]) for number in range(1001)]
    _, overlap = found_in([[9, 1, 2, 3, 4, 5, 8]], documents, least=8, near=0.1)
    assert overlap.num_untried == 1
