"""Duplicates: the first stays, later ones go, nothing else changes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tightlip.corpus.cleaning import DuplicateDocuments, DuplicateSentences, sentences


def test_a_repeated_sentence_goes_whoever_wrote_it():
    duplicates = DuplicateSentences()
    assert duplicates.without("Who is there? Nay, answer me.") == "Who is there? Nay, answer me."
    assert (
        duplicates.without("Stand. nay,  ANSWER me. And unfold yourself!")
        == "Stand. And unfold yourself!"
    )
    assert duplicates.without("Who is there?\nIt is I, Bernardo.") == "It is I, Bernardo."
    assert duplicates.num_duplicates == 2


def test_short_sentences_may_repeat():
    duplicates = DuplicateSentences()
    assert [duplicates.without("Good night. Yes!") for _ in range(3)] == ["Good night. Yes!"] * 3
    assert duplicates.num_duplicates == 0


def test_a_text_without_repeats_keeps_its_every_space():
    text = "  One two three.   Four five six! \n\n\t Seven eight nine  "
    assert DuplicateSentences().without(text) == text


@given(st.text(st.sampled_from("ab .!?\n”)3"), max_size=40))
def test_sentences_joined_are_the_text(text):
    assert "".join(sentence + space for sentence, space in sentences(text)) == text


sentence_words = st.lists(st.sampled_from(["a", "B", "b", "c"]), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(sentence_words, max_size=5), max_size=6))
def test_what_is_left_agrees_with_remembering_every_sentence(documents):
    """Oracle: a list of all that was said, searched from the start each time."""
    duplicates, said, num_removed = DuplicateSentences(), [], 0
    for document in documents:
        kept = []
        for words in document:
            spoken = [word.lower() for word in words]
            if len(words) < 3 or spoken not in said:
                kept.append(" ".join(words) + ".")
            else:
                num_removed += 1
            said.append(spoken)
        text = " ".join(" ".join(words) + "." for words in document)
        assert duplicates.without(text) == " ".join(kept)
    assert duplicates.num_duplicates == num_removed


def test_repeated_documents_are_told_but_empty_ones_repeat_nothing():
    duplicates = DuplicateDocuments()
    texts = ["Good night.", "", "good  night.\n", "", " ", "Good night!"]
    assert [duplicates.is_duplicate(text) for text in texts] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert duplicates.num_duplicates == 1


def test_a_long_run_of_spaces_takes_no_long_time():
    DuplicateSentences().without("a b c." + " " * 500_000 + "d")


def test_a_title_ends_no_sentence_and_a_line_keeps_its_end():
    duplicates = DuplicateSentences()
    text = "Mr. Smith went to Washington.\nline two is here\nline two is here\nthe end"
    assert duplicates.without(text) == "Mr. Smith went to Washington.\nline two is here\nthe end"
    assert duplicates.without("Dr. No met Mr. Smith went to Washington.") != ""
    assert (
        duplicates.without("Mr. Smith went to Washington. Mr. Jones stayed.") == "Mr. Jones stayed."
    )
