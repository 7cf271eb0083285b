"""Vocabularies: what a token is, which are kept, and text that comes back readable."""

import unicodedata
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tightlip.core.errors import UsageError
from tightlip.corpus.encoding import tokenizer_fingerprint
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import DIGITS, SPECIAL_TOKENS, build_tokenizer, word_tokenizer

DOCUMENTS = [
    ("ann", "Thank you, very much. Thank you!"),
    ("bob", "very much, I don't know 7 of them; very odd"),
    ("cyd", "much ado: very much"),
]


def words_one_by_one(text):
    """Oracle: walk the characters; a word is letters, then marks, then apostrophe and letter again."""
    words, at = [], 0
    while at < len(text):
        end = at + 1
        if text.startswith("<unk>", at):
            end = at + 5
        elif _is(text[at], "L"):
            while end < len(text) and (
                _is(text[end], "LM")
                or (text[end] in "'’\u200c\u200d" and _is(text[end + 1 : end + 2], "L"))
            ):
                end += 1
        if not _is_space(text[at]):
            words.append(text[at:end])
        at = end
    return words


def _is(character, classes):
    return bool(character) and unicodedata.category(character)[0] in classes


def _is_space(character):
    return character in "\t\n\v\f\r \x85" or unicodedata.category(character)[0] == "Z"


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_words_digits_and_marks_are_tokens():
    text = "I don't know — it’s 42: rock'n'roll, 'tis cafe\u0301!"
    tokenizer = build_tokenizer(open_corpus([("a", text)]))
    assert tokenizer.convert_ids_to_tokens(ids_of(tokenizer, text)) == (
        [
            "I",
            "don't",
            "know",
            "—",
            "it’s",
            "4",
            "2",
            ":",
            "rock'n'roll",
            ",",
            "'",
            "tis",
            "café",
            "!",
        ]
    )


# Characters that every Unicode version in use classes alike.
characters = st.one_of(
    st.sampled_from("aB'’é\u0301नमस्ते\u200d\u200c 7٣,.-<>\n\t👍🏽🏳️🇩🇪漢_@/()\u00a0\u3000"),
    st.characters(max_codepoint=0x24F, exclude_categories=["Cs"]),
)
texts = st.text(characters, max_size=40) | st.sampled_from(
    ["<unk>", "a <unk>b", "<s> </s> <pad>", "1️⃣"]
)


@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_splitting_agrees_with_walking_the_characters(text):
    words = words_one_by_one(text)
    known = sorted(set(words) - {"<unk>"})
    tokenizer = word_tokenizer(known)
    assert tokenizer.convert_ids_to_tokens(ids_of(tokenizer, text)) == words


@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_decoded_words_encode_to_the_same_ids(text):
    tokenizer = word_tokenizer(sorted(set(words_one_by_one(text)) - {"<unk>"}))
    ids = ids_of(tokenizer, text)
    assert ids_of(tokenizer, tokenizer.decode(ids)) == ids


READABLE = [
    "Thank you, very much.",
    "It's 1995; don't (really) go!",
    "Well-known: 3.14 of 1,000,000 at 10:30?",
    "“Yes,” she said — ‘no’… 5% of $20",
    "👩‍👩‍👧 👍🏽 🏳️‍🌈 1️⃣ 🇩🇪",
    "Mail <EMAIL> or <PHONE>, not <URL>.",
    "My ID is 955320",
]


@pytest.mark.parametrize("text", READABLE)
def test_a_saved_vocabulary_decodes_readably_without_our_code(tmp_path, text):
    build_tokenizer(open_corpus([("a", text)])).save_pretrained(tmp_path)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    assert stock.decode(ids_of(stock, text)) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_byte_pairs_give_any_text_back_exactly(text):
    assert PAIRS.decode(ids_of(PAIRS, text)) == text


PAIRS = build_tokenizer(open_corpus(DOCUMENTS), kind="bpe", size=300)


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_specials_come_first_and_are_never_read_from_text(kind):
    tokenizer = build_tokenizer(open_corpus(DOCUMENTS), kind=kind, size=300)
    assert tokenizer.convert_ids_to_tokens(range(4)) == SPECIAL_TOKENS
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (0, 1)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 3)
    assert not {0, 2, 3} & set(ids_of(tokenizer, "<s> a </s><pad>"))
    assert tokenizer("very")["input_ids"] == [2, *ids_of(tokenizer, "very")]


def test_any_ids_decode():
    tokenizer = build_tokenizer(open_corpus(DOCUMENTS))
    assert tokenizer.decode([]) == ""
    thank, you = ids_of(tokenizer, "Thank you")
    assert tokenizer.decode([2, thank, 1, you, 3, 0]) == "<s> Thank <unk> you </s> <pad>"
    assert tokenizer.decode([2, thank, you, 3], skip_special_tokens=True) == "Thank you"


def test_a_corpus_with_struck_out_words_keeps_them_unknown():
    tokenizer = build_tokenizer(open_corpus([("a", "the <unk> of <unk>")]))
    assert ids_of(tokenizer, "the <unk> of") == [
        tokenizer.get_vocab()["the"],
        1,
        tokenizer.get_vocab()["of"],
    ]


def most_frequent(documents, size, min_users=1):
    """Oracle: count everything in a dictionary and sort."""
    counts, users = Counter(), defaultdict(set)
    for user, text in documents:
        counts.update(words_one_by_one(text))
        for word in words_one_by_one(text):
            users[word].add(user)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return [word for word in ranked if len(users[word]) >= min_users][:size]


def random_documents(draw_from, num_users):
    words = st.lists(st.sampled_from(draw_from), max_size=30).map(" ".join)
    return st.lists(
        st.tuples(st.sampled_from([str(n) for n in range(num_users)]), words),
        min_size=1,
        max_size=12,
    )


@settings(max_examples=40, deadline=None)
@given(documents=random_documents([*"abcdefghijklmnopqrs", "don't"], 4), size=st.integers(15, 40))
def test_the_most_frequent_tokens_are_kept_and_ties_go_by_the_token(documents, size):
    tokenizer = build_tokenizer(open_corpus(documents), size=size)
    expected = most_frequent(documents, size - len(SPECIAL_TOKENS) - len(DIGITS))
    assert (
        tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == SPECIAL_TOKENS + expected + DIGITS
    )


@settings(max_examples=40, deadline=None)
@given(documents=random_documents([*"abcdefghij", ",", "7"], 5), min_users=st.integers(1, 4))
def test_min_users_keeps_what_so_many_users_wrote(documents, min_users):
    tokenizer = build_tokenizer(open_corpus(documents), size=None, min_users=min_users)
    kept = set(tokenizer.get_vocab()) - set(SPECIAL_TOKENS)
    assert kept == set(most_frequent(documents, None, min_users)) | set(DIGITS)


def test_min_users_counts_alike_when_pairs_are_sorted_often(monkeypatch):
    documents = [(str(n % 7), f"{chr(97 + n % 5)} {chr(97 + n % 11)} z") for n in range(60)]
    whole = build_tokenizer(open_corpus(documents), min_users=3).get_vocab()
    monkeypatch.setattr("tightlip.corpus.vocabulary._DistinctUsers._UNSORTED", 4)
    assert build_tokenizer(open_corpus(documents), min_users=3).get_vocab() == whole


def test_digits_are_kept_however_rare():
    documents = [("a", " ".join(f"{chr(97 + n)} " * 3 for n in range(26)) + " 5 5 5 5 5")]
    tokenizer = build_tokenizer(open_corpus(documents), size=16)
    assert len(tokenizer) == 16
    assert set(DIGITS) <= set(tokenizer.get_vocab())
    assert tokenizer.convert_ids_to_tokens([4, 5, 6]) == ["5", "a", "b"]


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_the_same_corpus_gives_the_same_vocabulary(tmp_path, kind):
    documents = [
        (str(n % 9), f"{n * 7919} words of {chr(97 + n % 26)}{chr(97 + n % 7)}") for n in range(300)
    ]
    prints = {
        tokenizer_fingerprint(build_tokenizer(open_corpus(documents), kind=kind, size=350))
        for _ in range(3)
    }
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"size": 14}, "Use 15 or more"),
        ({"kind": "bpe", "size": 200}, "Use 260 or more"),
        ({"min_users": 0}, "Use 2 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        build_tokenizer(open_corpus(DOCUMENTS), **settings)


def test_a_bad_row_met_while_counting_is_reported_as_such():
    with pytest.raises(UsageError, match="row 2 has null"):
        build_tokenizer(open_corpus([("a", "x"), (None, "y")]))
