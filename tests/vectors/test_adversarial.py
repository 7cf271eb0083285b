"""Adversarial training: a new reader finds less, where plain training leaves everything."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from tightlip.vectors.data import load_examples
from tightlip.vectors.halves import load_extractor
from tightlip.vectors.learning import Readers, frequencies_of
from tightlip.vectors.release import unit_range
from tightlip.vectors.run import represent_train
from vectors.toy_corpora import toy_corpus


def read_by_a_stranger(run, column):
    """Test accuracy of a reader trained afterwards on what the device gives out."""
    examples = load_examples(run.folder)
    vectors = unit_range(load_extractor(run.device).encode(examples.texts))
    truth, train = examples.private[column].ids, examples.parts == "train"
    reader = LogisticRegression(C=100.0, max_iter=2000).fit(vectors[train], truth[train])
    return reader.score(vectors[~train], truth[~train])


def test_a_new_reader_finds_less_and_the_label_is_still_told(tmp_path):
    shape = {
        "label": "topic",
        "private": ("age",),
        "extractor": "bag",
        "dimensions": 16,
        "epochs": 8,
    }
    plain, hiding = (
        represent_train(toy_corpus(1000), tmp_path / method, method=method, **shape)
        for method in ("none", "adversarial")
    )
    assert read_by_a_stranger(plain, "age") > 0.85
    assert read_by_a_stranger(hiding, "age") < 0.7
    assert hiding.metrics["test_accuracy"] > 0.9


def test_readers_learn_what_the_vectors_tell():
    torch.manual_seed(0)
    readers, truth = Readers(4, [2], hidden=16), torch.arange(40) % 2
    vectors = torch.rand(40, 4)
    vectors[:, 0] = truth
    optimizer = torch.optim.AdamW(readers.parameters(), lr=1e-2)
    readers.learn(vectors, [truth], optimizer, 200)
    (logits,) = readers.logits(vectors)
    assert torch.equal(logits.argmax(dim=1), truth)


def test_doubt_costs_nothing_and_certainty_either_way_does():
    """Closed form: the divergence of the reading from the frequencies."""
    frequencies = frequencies_of(torch.tensor([0] * 29 + [1] * 9), 2)
    assert frequencies.tolist() == pytest.approx([0.75, 0.25])
    readers = Readers(3, [2], hidden=4)
    for parameter in readers.parameters():
        torch.nn.init.zeros_(parameter)
    last = readers.each[0][-1]
    for reading, wanted in [((0.75, 0.25), 0.0), ((0.5, 0.5), 0.1308), ((0.99, 0.01), 0.5965)]:
        last.bias.data = torch.tensor(reading).log()
        found = readers.certainty(torch.rand(5, 3), [frequencies])
        assert found.item() == pytest.approx(wanted, abs=1e-3)


def test_the_extractor_is_pushed_and_the_readers_learning_leaves_it_alone():
    readers = Readers(3, [2], hidden=4)
    vectors = torch.rand(5, 3, requires_grad=True)
    optimizer = torch.optim.AdamW(readers.parameters(), lr=1e-2)
    readers.learn(vectors, [torch.tensor([0, 1, 0, 1, 1])], optimizer, 1)
    assert vectors.grad is None
    readers.certainty(vectors, [torch.tensor([0.5, 0.5])]).backward()
    assert float(vectors.grad.abs().sum()) > 0
