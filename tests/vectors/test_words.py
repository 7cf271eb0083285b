import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from tightlip.core.errors import UsageError
from tightlip.vectors.masking import as_read, masked_texts, masking_of


def masked(texts, dropout=0.0, marked=(), seed=0):
    return masked_texts(
        texts,
        mask_word="[MASK]",
        dropout=dropout,
        marked=marked,
        generator=np.random.default_rng(seed),
    )


@pytest.mark.parametrize("dropout", [0.01, 0.1, 0.3, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("num_words", [1, 2, 3, 10, 30, 100])
def test_the_share_really_masked_is_never_below_the_rate(dropout, num_words):
    (text,) = masked([" ".join(f"w{n}" for n in range(num_words))], dropout)
    num_masked = text.split().count("[MASK]")
    assert num_masked >= dropout * num_words * (1 - 1e-12)
    assert num_masked == math.ceil(round(dropout * num_words, 9))
    assert len(text.split()) == num_words


def test_every_choice_of_places_is_as_likely_as_any_other():
    texts = masked(["a b c d e"] * 20_000, dropout=0.4)
    seen = Counter(tuple(n for n, w in enumerate(t.split()) if w == "[MASK]") for t in texts)
    assert set(seen) == set(itertools.combinations(range(5), 2))
    assert stats.chisquare(list(seen.values())).pvalue > 1e-4


def test_places_are_chosen_without_regard_to_the_words():
    one = masked(["a b c d", "e f g"] * 50, dropout=0.5, seed=3)
    other = masked(["p q r s", "t u v"] * 50, dropout=0.5, seed=3)
    places = [[w == "[MASK]" for text in texts for w in text.split()] for texts in (one, other)]
    assert places[0] == places[1]


def test_empty_text_and_one_word():
    assert masked(["", "  \n ", "alone"]) == ["", "", "alone"]
    assert masked(["", "alone"], dropout=0.01) == ["", "[MASK]"]
    assert masked([], dropout=0.5) == []


def test_marked_words_never_stay_whatever_stands_around_them():
    text = "ANNA, Anna's «anna» Anna-Maria (Karenin) Hannah annas O'Brien's Jose\u0301 _Anna_ x@anna.org"
    (found,) = masked([text], marked={"anna", "Karenin!", "o'brien", "José"})
    assert found.split() == [
        *["[MASK]"] * 5,
        "Hannah",
        "annas",
        *["[MASK]"] * 4,
    ]


def test_a_marked_phrase_marks_each_of_its_words():
    assert masked(["in New York or York"], marked=["New York"]) == ["in [MASK] [MASK] or [MASK]"]


def test_marked_words_amplify_nothing_the_rate_is_over_the_rest():
    for seed in range(20):
        (text,) = masked(["Anna met Boris in Paris today"], 0.25, {"anna", "boris"}, seed=seed)
        assert text.split()[0] == text.split()[2] == "[MASK]"
        assert text.split().count("[MASK]") == 3


def test_each_text_can_have_its_own_marks():
    assert masked(["a b", "a b"], marked=[["a"], ("b",)]) == ["[MASK] b", "a [MASK]"]
    assert masked(["a b", "a b"], marked=[[], []]) == ["a b", "a b"]
    with pytest.raises(UsageError, match="for 1 texts, and there are 2"):
        masked(["a", "b"], marked=[["a"]])
    with pytest.raises(UsageError, match="list of words"):
        masked(["a"], marked="anna")


def test_white_space_is_lost_so_that_it_tells_nothing():
    assert masked(["a\t b\n\nc "]) == ["a b c"]


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_a_rate_that_is_none_is_refused(dropout):
    with pytest.raises(UsageError, match="not a share"):
        masked(["a"], dropout)


@pytest.mark.parametrize(
    ("mark", "word"),
    [
        ("O'Brien", "O’Brien"),
        ("O’Brien", "O'Brien's"),
        ("O'Brien", "Oʼbrien"),
        ("O'Brien", "OBRIEN"),
        ("Jean-Luc", "Jean-Luc/Picard"),
        ("Jean-Luc", "Jean\u2011Luc"),
        ("Jean-Luc", "(Jean–Luc)"),
        ("Jean–Luc", "jean-luc."),
        ("Anna", "Anna_Maria"),
        ("Anna_Maria", "Anna-Maria"),
        ("Anna", "An\u00adna"),
        ("Anna", "Anna\u00adMaria"),
        ("Anna", "An\u200bna"),
        ("Anna", "Anna\u200bMaria"),
        ("An\u00adna", "anna"),
        ("Anna", "A\u034fnna\ufe0f"),
        ("Anna", "Anna²"),
        ("Anna", "Anna3"),
        ("anna@x.org", "<anna@x.org>;anna@x.org"),
        ("+44-20", "+44-20-7946"),
        ("+44-20", "+44–20–7946"),
        ("你好", "张三说你好吗"),
        ("สมชาย", "คุณสมชายมา"),
        ("김철수", "김철수는"),
        ("हिन्दी", "(हिन्दी)"),
        ("***", "***"),
        ("--", "a--b"),
        ("😀", "hi😀!"),
        ("José", "Jose"),
        ("istanbul", "İSTANBUL"),
        ("STRASSE", "straße"),
        ("Anna,Boris", "Boris"),
    ],
)
def test_a_marked_word_never_stays_however_it_is_written(mark, word):
    assert masked([f"so {word} went"], marked=[mark]) == ["so [MASK] went"]


@pytest.mark.parametrize(
    ("mark", "word"), [("anna", "hannah"), ("O'Brien", "brien"), ("हिन्दी", "हिन्दू"), ("44", "1445")]
)
def test_another_word_stays(mark, word):
    assert masked([word], marked=[mark]) == [word]


def test_a_mark_that_nobody_can_see_is_refused():
    with pytest.raises(UsageError, match="would mask nothing"):
        masked(["a"], marked=["\u200b\u00ad"])
    assert masked(["a"], marked=["", "  "]) == ["a"]


def test_a_word_of_very_many_pieces_is_searched_in_time_that_grows_with_its_length():
    """Each of 100,000 pieces starts a run; one that is longer than any mark is given up."""
    long = "a." * 100_000
    assert masked([long + "anna", long + "hannah"], marked=["anna"]) == ["[MASK]", long + "hannah"]


def test_marks_found_nowhere_are_counted():
    texts = ["Anna met anna's friend", "Boris", "nobody"]
    told = masking_of(texts, ["anna", "Boris", "Clara"])
    assert (told.num_words, told.num_texts, told.num_nowhere) == (3, 2, 1)
    of_each = masking_of(texts, [["anna", "x"], ["x", "anna"], ["x"]])
    assert (of_each.num_words, of_each.num_texts, of_each.num_nowhere) == (2, 1, 2)
    assert masking_of([], []).num_words == 0


def test_texts_are_the_same_where_white_space_alone_differs():
    assert as_read(" a\tb\n") == masked([" a\tb\n"])[0] == "a b"
