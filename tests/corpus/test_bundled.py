"""The demo corpus is there and is what its docstring says."""

from tightlip.corpus.bundled import demo_corpus
from tightlip.corpus.readers import open_corpus


def test_the_demo_corpus_has_the_speeches_and_speakers_it_claims():
    table = demo_corpus()
    assert table.column_names == ["user", "text"]
    assert (table.num_rows, len(table["user"].unique())) == (7_097, 299)
    assert all(
        speech.strip() and speech == speech.strip("\n") for speech in table["text"].to_pylist()
    )
    assert table["user"][0].as_py() == "First Citizen"
    assert table["text"][0].as_py() == "Before we proceed any further, hear me speak."


def test_the_demo_corpus_reads_as_a_corpus():
    assert sum(len(batch) for batch in open_corpus(demo_corpus()).batches()) == 7_097
