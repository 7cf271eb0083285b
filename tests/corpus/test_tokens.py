"""Tokens on disk agree with encoding each document by itself."""

import hashlib
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tightlip.core.errors import UsageError
from tightlip.corpus import encoding
from tightlip.corpus.encoding import Encoder, cuts_at_spaces, pieces, tokenizer_fingerprint
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tables import DocumentBatch
from tightlip.corpus.tokens import open_tokenized, tokenize_documents
from tightlip.corpus.vocabulary import build_tokenizer

DOCUMENTS = [
    ("bob", "Thank you, very much."),
    ("ann", ""),
    ("bob", "Very odd 👩‍👩‍👧 e\u0301 12"),
    ("cyd", "thank  you\n\nall"),
]
WORDS = build_tokenizer(open_corpus(DOCUMENTS))
PAIRS = build_tokenizer(open_corpus(DOCUMENTS), kind="bpe", size=300)


class Slow:
    """A tokenizer written in Python: one token for each character."""

    is_fast = False

    def __call__(self, texts, *, add_special_tokens, truncation, padding, verbose):
        assert {add_special_tokens, truncation, padding, verbose} == {False}
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    def get_vocab(self):
        return {"a": 97}


def one_by_one(tokenizer, text):
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)


def from_first_visible(text, start, end):
    """A span without the space before its word; one of nothing but space stays."""
    blank = len(text[start:end]) - len(text[start:end].lstrip())
    return (start + blank if blank < end - start else start, end)


@pytest.mark.parametrize("tokenizer", [WORDS, PAIRS], ids=["words", "bpe"])
def test_each_document_is_what_encoding_it_alone_gives(tmp_path, tokenizer):
    corpus = tokenize_documents(
        open_corpus(DOCUMENTS).batches(), tokenizer, tmp_path / "t", with_spans=True
    )
    for index, (user, text) in enumerate(DOCUMENTS):
        alone = one_by_one(tokenizer, text)
        assert corpus.document(index).tolist() == alone.ids
        spans = corpus.spans[corpus.bounds[index] : corpus.bounds[index + 1]]
        seen = [from_first_visible(text, *span) for span in alone.offsets]
        assert [tuple(span) for span in spans.tolist()] == seen
        assert corpus.user_names[corpus.users[index]] == user
    assert corpus.user_names == ["bob", "ann", "cyd"]


def test_a_words_span_is_its_characters(tmp_path):
    corpus = tokenize_documents(
        open_corpus(DOCUMENTS).batches(), WORDS, tmp_path / "t", with_spans=True
    )
    for index, (_, text) in enumerate(DOCUMENTS):
        first, last = corpus.bounds[index : index + 2]
        covered = [text[start:end] for start, end in corpus.spans[first:last]]
        assert covered == WORDS.convert_ids_to_tokens(corpus.document(index).tolist())


def test_the_files_are_plain_arrays_of_the_promised_types(tmp_path):
    tokenize_documents(open_corpus(DOCUMENTS).batches(), WORDS, tmp_path / "t", with_spans=True)
    kinds = {path.stem: np.load(path).dtype for path in (tmp_path / "t").glob("*.npy")}
    assert kinds == {"tokens": np.int32, "bounds": np.int64, "users": np.int32, "spans": np.int32}
    assert not (tmp_path / ".t.partial").exists()


def test_documents_of_no_tokens_are_documents(tmp_path):
    corpus = tokenize_documents(
        open_corpus([("a", ""), ("b", "  ")]).batches(), WORDS, tmp_path / "t", with_spans=True
    )
    assert (corpus.num_tokens, corpus.num_documents, corpus.spans.shape) == (0, 2, (0, 2))
    assert open_tokenized(tmp_path / "t").bounds.tolist() == [0, 0, 0]


def test_the_corpus_fingerprint_is_of_users_and_texts_in_order(tmp_path):
    digest = hashlib.sha256()
    for row in DOCUMENTS:
        for part in row:
            digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    corpus = tokenize_documents(open_corpus(DOCUMENTS).batches(), WORDS, tmp_path / "t")
    assert corpus.corpus_fingerprint == digest.hexdigest()
    halves = (DocumentBatch(users=[user], texts=[text]) for user, text in DOCUMENTS)
    assert (
        tokenize_documents(halves, PAIRS, tmp_path / "u").corpus_fingerprint == digest.hexdigest()
    )


def test_saved_truncation_and_padding_are_overruled_and_come_back(tmp_path, caplog):
    WORDS.save_pretrained(tmp_path / "saved")
    short = AutoTokenizer.from_pretrained(tmp_path / "saved", model_max_length=3)
    short.backend_tokenizer.enable_truncation(2)
    short.backend_tokenizer.enable_padding(length=50)
    with caplog.at_level(logging.WARNING):
        corpus = tokenize_documents(open_corpus(DOCUMENTS).batches(), short, tmp_path / "t")
    assert corpus.document(0).tolist() == one_by_one(WORDS, DOCUMENTS[0][1]).ids
    assert short.backend_tokenizer.truncation["max_length"] == 2
    assert short.backend_tokenizer.padding["length"] == 50
    assert not caplog.records


def test_nothing_is_left_when_reading_fails(tmp_path):
    with pytest.raises(UsageError, match="row 5 has null"):
        tokenize_documents(open_corpus([*DOCUMENTS, (None, "x")]).batches(), WORDS, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_slow_tokenizer_encodes_but_has_no_spans(tmp_path):
    corpus = tokenize_documents(open_corpus(DOCUMENTS).batches(), Slow(), tmp_path / "t")
    assert "".join(map(chr, corpus.tokens)) == "".join(text for _, text in DOCUMENTS)
    with pytest.raises(UsageError, match="Slow is not a fast tokenizer"):
        tokenize_documents(
            open_corpus(DOCUMENTS).batches(), Slow(), tmp_path / "u", with_spans=True
        )


@pytest.mark.parametrize("tokenizer", [WORDS, PAIRS], ids=["words", "bpe"])
def test_a_fingerprint_survives_saving_and_use(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    copy = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(tokenizer)
    copy(["a b"], truncation=True, max_length=1, padding="max_length")
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(tokenizer)


def test_different_tokenizers_have_different_fingerprints():
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in (WORDS, PAIRS, Slow())}) == 3


characters = st.sampled_from("ab'’ \n\t1,.\u0301\u200d👍 <unk>\u00a0é漢")


@settings(max_examples=100, deadline=None)
@given(text=st.text(characters, max_size=80), size=st.integers(1, 9))
@pytest.mark.parametrize("tokenizer", [WORDS, PAIRS], ids=["words", "bpe"])
def test_cutting_a_long_text_changes_no_id_and_no_span(tokenizer, text, size):
    whole = one_by_one(tokenizer, text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoding, "PIECE_CHARACTERS", size)
        patched.setattr(encoding, "GROUP_CHARACTERS", 3 * size)
        assert "".join(pieces(text)) == text
        ids, spans = Encoder(tokenizer, with_spans=True).encode([text, "b", text])
    assert [part.tolist() for part in ids] == [whole.ids, one_by_one(tokenizer, "b").ids, whole.ids]
    assert [tuple(span) for span in spans[2].tolist()] == whole.offsets


def test_a_tokenizer_that_may_look_across_spaces_is_never_cut():
    assert cuts_at_spaces(WORDS.backend_tokenizer)
    assert cuts_at_spaces(PAIRS.backend_tokenizer)
    lowering = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    lowering.pre_tokenizer = WORDS.backend_tokenizer.pre_tokenizer
    lowering.normalizer = normalizers.NFKC()
    assert not cuts_at_spaces(lowering)
    whole = Tokenizer(models.WordLevel({"<unk>": 0, "a b": 1}, unk_token="<unk>"))
    assert not cuts_at_spaces(whole)
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not cuts_at_spaces(whole)


def test_a_foreign_tokenizer_is_used_as_it_is(tmp_path):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "thank": 1, "you": 2}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    foreign = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    corpus = tokenize_documents(open_corpus(DOCUMENTS).batches(), foreign, tmp_path / "t")
    assert corpus.document(0).tolist() == [1, 2, 0, 0, 0, 0]
