"""Text that stands in two corpora is found whole, cut up or slightly changed, from either side."""

import random

import pytest

from tightlip.corpus import shared_text as module
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.shared_text import RUN, Several, shared_text

VOCABULARY = [f"w{number}" for number in range(400)]


def texts(number, seed, *, lines=4, words=9):
    draw = random.Random(seed)
    return [
        "\n".join(" ".join(draw.choices(VOCABULARY, k=words)) for _ in range(lines))
        for _ in range(number)
    ]


def corpus(found):
    return open_corpus([(f"u{place % 7}", text) for place, text in enumerate(found)])


def by_sets(here, there):
    """Oracle: documents of at least eight words, half of whose runs of words stand over there."""

    def runs(text):
        words = text.lower().replace(".", " ").split()
        return [tuple(words[place : place + RUN]) for place in range(len(words) - RUN + 1)]

    known = {run for text in there for run in runs(text)}
    long = [found for text in here if len(found := runs(text)) >= 4]
    return sum(2 * sum(run in known for run in found) >= len(found) for found in long), len(long)


OWN = texts(200, 1)
CHANGED = {
    "whole": OWN,
    "cut into lines": [line for text in OWN for line in text.split("\n")],
    "a full stop more": [f"{text} ." for text in OWN],
    "in other letters": [text.upper().replace("\n", "  ") for text in OWN],
    "put together": [" ".join(OWN[start : start + 5]) for start in range(0, 200, 5)],
    "a word in ten changed": [
        " ".join("other" if place % 10 == 9 else word for place, word in enumerate(text.split()))
        for text in OWN
    ],
    "a small part": OWN[:20],
    "among much else": [*OWN[:30], *texts(2000, 5)],
}


@pytest.mark.parametrize("how", CHANGED)
def test_a_copy_is_found_however_it_was_changed(how):
    found = shared_text(corpus(OWN), corpus(CHANGED[how]))
    assert found.is_too_much()
    assert (found.here.copied, found.here.long) == by_sets(OWN, CHANGED[how])
    assert (found.there.copied, found.there.long) == by_sets(CHANGED[how], OWN)
    assert " stand in " in found.words("other.parquet")


def test_the_share_counts_from_both_sides():
    """Ten of 2,000 documents are few, unless they are all that the other corpus holds."""
    large = texts(2000, 6)
    for one, other in ((large, large[:10]), (large[:10], large)):
        assert shared_text(corpus(one), corpus(other)).is_too_much()
    among = [*large[:10], *texts(2000, 7)]
    assert not shared_text(corpus(large), corpus(among)).is_too_much()


def test_other_text_shares_nothing_and_a_few_common_texts_are_let_pass():
    other = texts(300, 2)
    found = shared_text(corpus(OWN), corpus(other))
    assert not found.any()
    few = shared_text(corpus([*OWN, "Thanks!", "ok"]), corpus([*other, OWN[3], " THANKS! ", "Ok"]))
    assert few.any()
    assert not few.is_too_much()
    assert (few.here.whole, few.there.whole, few.there.copied) == (3, 3, 1)


def test_short_documents_are_compared_whole():
    short = [f"{word} ok" for word in VOCABULARY[:50]]
    found = shared_text(corpus(short), corpus([*short[:30], "other words"]))
    assert (found.there.whole, found.there.documents, found.there.long) == (30, 31, 0)
    assert found.is_too_much()
    assert not shared_text(corpus(short), corpus(["nothing", "here"])).any()


def test_of_many_documents_a_sample_stands_for_all(monkeypatch):
    monkeypatch.setattr(module, "MOST_LOOKED_AT", 60)
    monkeypatch.setattr(module, "MOST_RUNS", 8)
    half = [*OWN[:100], *texts(300, 3)]
    found = shared_text(corpus(OWN), corpus(half))
    assert 0 < found.here.long <= 60
    assert 0.25 < found.here.copied / found.here.long < 0.75
    assert found.is_too_much()
    assert not shared_text(corpus(OWN), corpus(texts(400, 4))).any()


def test_several_corpora_are_one_and_named_texts_can_be_left_out():
    both = corpus(OWN[:50]), corpus(OWN[50:])
    assert shared_text(Several(*both), corpus(OWN)).here.documents == 200
    rest = Several(*both, without={OWN[0], *OWN[60:]})
    found = shared_text(rest, corpus(OWN[60:]))
    assert (found.here.documents, found.any()) == (59, False)
