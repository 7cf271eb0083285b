"""Names in texts: from a list, from a column, by NLTK or spaCy where these are installed."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tightlip.core.errors import UsageError
from tightlip.vectors import attack as entities
from tightlip.vectors.attack import (
    frequent_names,
    is_listing,
    listed_presence,
    names_in_file,
    presence,
)

TEXTS = ["Ann Lee met Bob.", "bob and Ann", "Bob's hat; Ann\nLee's dog", "Bobby", ""]


def test_a_name_is_found_as_whole_words_with_its_capitals():
    there = presence(TEXTS, ["Ann Lee", "Bob"])
    assert there.astype(int).tolist() == [[1, 1], [0, 0], [1, 1], [0, 0], [0, 0]]


def test_a_name_with_signs_in_it_is_taken_as_it_stands():
    assert presence(["Dr. No (sr.)", "Dr! No"], ["Dr. No"]).tolist() == [[True], [False]]


def test_no_texts_have_no_names():
    assert presence([], ["Ann", "Bob"]).shape == (0, 2)


def test_a_file_holds_a_name_a_line(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("Ann Lee\n\n  Bob \nAnn Lee\n", encoding="utf-8")
    assert names_in_file(path) == ["Ann Lee", "Bob"]


@pytest.mark.parametrize("content", [b"\n \n", b"\xff\xfe", None])
def test_a_file_without_names_is_refused_by_name(tmp_path, content):
    path = tmp_path / "names.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"names\.txt"):
        names_in_file(path)


def test_a_column_may_list_ids_in_several_ways():
    ids, there = listed_presence([[2, 10], "10;2", np.array([1]), 2, None, ""])
    assert ids == ["1", "2", "10"]
    assert there.sum(axis=0).tolist() == [1, 3, 2]
    assert is_listing([[1], None, []])
    assert not is_listing(["a", None])
    assert not is_listing([None])


# Finders. Neither library is a dependency, so stand-ins play them.


@pytest.fixture
def nothing_installed(monkeypatch):
    for name in ("nltk", "spacy"):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_a_finder_a_list_is_asked_for(nothing_installed):
    with pytest.raises(UsageError, match="entities=FILE"):
        frequent_names(TEXTS)


class Person:
    def __init__(self, words):
        self._words = words

    def label(self):
        return "PERSON"

    def leaves(self):
        return [(word, "NNP") for word in self._words]


def nltk_like(chunk):
    return SimpleNamespace(
        word_tokenize=str.split, pos_tag=lambda words: [(w, "X") for w in words], ne_chunk=chunk
    )


def test_nltk_counts_the_texts_a_name_stands_in(nothing_installed, monkeypatch):
    chunk = lambda tags: [Person([w]) if w[0].isupper() else (w, t) for w, t in tags]  # noqa: E731
    monkeypatch.setitem(sys.modules, "nltk", nltk_like(chunk))
    texts = ["Ann Ann Ann", "Bob met Cid", "Bob", "Cid and Bob"]
    assert frequent_names(texts, most=2) == (["Bob", "Cid"], "NLTK")
    with pytest.raises(UsageError, match="found no person"):
        frequent_names(["nobody"])


def test_nltk_without_its_models_makes_way_for_spacy(nothing_installed, monkeypatch):
    def chunk(tags):
        raise LookupError("maxent_ne_chunker")

    def pipeline(text):
        kinds = [
            SimpleNamespace(text=w, label_="PERSON" if w == "Ann" else "ORG") for w in text.split()
        ]
        return SimpleNamespace(ents=kinds)

    monkeypatch.setitem(sys.modules, "nltk", nltk_like(chunk))
    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=lambda name: pipeline))
    assert frequent_names(["Ann", "IBM"]) == (["Ann"], "spaCy")


def test_spacy_without_a_model_counts_as_not_there(nothing_installed, monkeypatch):
    def load(name):
        raise OSError(name)

    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=load))
    assert entities._spacy_finder() is None
