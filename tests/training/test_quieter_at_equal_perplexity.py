"""The whole story of the regularisers: plant, train to one perplexity, measure.

Copies of a canary lie among one user's few documents, as in the paper. What is shown is what
`--mitigation adversarial` and `triplet` do as people get them, batches by user included; how
much of it the batches do alone is in docs/regularisers.md.
"""

import random
from itertools import product

import pytest
import torch

import tightlip
from tightlip.training.config import RunOptions

pytestmark = pytest.mark.slow

WORDS = ["".join(parts) for parts in product(("ba", "da", "ga", "ka", "la", "ma", "na", "ra"), ("ton", "sel", "rim", "dax", "pol", "fen", "wug", "zib"))]  # fmt: skip
NUM_USERS, DOCUMENTS_EACH = 75, 8
PERPLEXITY = 12.0
REPETITIONS = [1] * 6 + [16] * 6
SHAPE = {"embedding_size": 32, "hidden_size": 32, "num_layers": 1, "batch_size": 16}
SHAPE |= {"sequence_length": 16, "learning_rate": 5e-3, "epochs": 12.0, "snapshot": "none"}
METHODS = {
    "none": {},
    "adversarial": {"privacy_weight": 1.0, "discriminator_size": 64},
    "triplet": {"privacy_weight": 0.03},
}


def walked():
    """Everybody walks through one web of words, each with a habit of their own at every word."""
    draw = random.Random(0)
    web = {word: draw.sample(WORDS, 4) for word in WORDS}
    rows = []
    for user in range(NUM_USERS):
        own = random.Random(user)
        habit = {word: own.choice(web[word]) for word in WORDS}
        for _ in range(DOCUMENTS_EACH):
            text = [own.choice(WORDS)]
            for _ in range(own.randint(5, 9)):
                text.append(habit[text[-1]] if own.random() < 0.5 else own.choice(web[text[-1]]))
            rows.append({"user": f"user {user}", "text": " ".join(text)})
    return rows


@pytest.fixture(scope="module", params=[0, 1, 2])
def measured(request, tmp_path_factory):
    """Of each method: the perplexity it stopped at, and mean exposure by repetitions."""
    folder, seed = tmp_path_factory.mktemp("story"), request.param
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    split = tightlip.prepare(walked(), folder / "split", holdout=0.3)
    planted = folder / "planted"
    tightlip.plant_canaries(
        split.folder / "train.parquet", planted, templates=["{words:4}"], seed=seed, repetitions=REPETITIONS
    )  # fmt: skip
    held_out = {
        "validation": str(split.folder / "validation.parquet"),
        "tokenizer": str(split.tokenizer_folder),
    }
    found = {}
    for name, settings in METHODS.items():
        run = tightlip.train(
            planted / "corpus.parquet", folder / name, prepare=held_out, options=RunOptions(device="cpu"),
            mitigation=name, seed=seed, until_perplexity=PERPLEXITY, snapshot_steps=10, **SHAPE, **settings,
        )  # fmt: skip
        exposures = tightlip.measure_canaries(
            run.folder, planted / "key.json", device="cpu", enumerate_up_to=1000, num_samples=2000
        )
        assert run.stop == "target perplexity"
        found[name] = (
            run.metrics[-1]["validation_perplexity"],
            {times: mean_bits(exposures, times) for times in set(REPETITIONS)},
        )
    torch.set_num_threads(threads)
    return found


def mean_bits(exposures, times):
    bits = [one["exposure_bits"] for one in exposures if one["repetitions"] == times]
    return sum(bits) / len(bits)


@pytest.mark.parametrize("mitigation", ["adversarial", "triplet"])
def test_a_regularised_model_of_the_same_perplexity_knows_repeated_canaries_less(
    mitigation, measured
):
    plain_perplexity, plain_bits = measured["none"]
    perplexity, bits = measured[mitigation]
    assert perplexity == pytest.approx(plain_perplexity, rel=0.05)
    assert bits[16] < plain_bits[16]


def test_plain_training_tells_repeated_canaries_from_single_ones(measured):
    _, bits = measured["none"]
    assert bits[16] > bits[1] + 5
