"""A device and a server small enough to make in a moment, as `represent train` leaves them."""

import torch

from tightlip.vectors.extractors import make_extractor
from tightlip.vectors.guarantees import VectorMechanism
from tightlip.vectors.halves import Classifier, pair_id, write_device, write_server

TEXTS = ["the cat sat on the mat", "a dog ran in the park", "the cat and the dog", "on the mat"] * 3
LABELS = ["cats", "dogs"]


def write_halves(folder, *, seed=0, dimensions=16, kind="bag", **changed):
    """RUN/device and RUN/server with random weights; their mechanism."""
    torch.manual_seed(seed)
    extractor = make_extractor(kind, TEXTS, dimensions=dimensions, max_tokens=12)
    given = {"mechanism": "laplace-as-published", "epsilon": 0.5, "dropout": 0.0} | changed
    mechanism = VectorMechanism(dimensions=dimensions, **given)
    classifier = Classifier(dimensions, LABELS)
    pair = pair_id(extractor, classifier, mechanism.record())
    write_device(folder / "device", extractor, mechanism.record(), pair)
    write_server(folder / "server", classifier, pair)
    return mechanism
