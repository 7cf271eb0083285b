"""Eavesdroppers who learn to read a private attribute from vectors.

Each is trained on vectors of texts whose attribute it knows, makes its choices on development
vectors, and then says for each test vector how likely each value is. `mlp` is the paper's; the
others are stronger in one way each: `logistic` needs few examples to see through much noise,
`averaged` is the same on means of several releases of each text, `trees` finds what is no line.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tightlip.core.errors import UsageError
from tightlip.vectors.halves import needed
from tightlip.vectors.settings import check_attacker

HIDDEN = 512
LEARNING_RATES = (1e-3, 1e-4)
MOST_EPOCHS, PATIENCE, BATCH = 40, 5, 128
# Inverse strengths of the penalty, the strongest first: each fit starts from the one before.
PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
TREES, LEAVES = 100, 15

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parts(Generic[T]):
    """The same of each part of a split."""

    train: T
    dev: T
    test: T

    def map(self, change: Callable[..., Any], *others: "Parts[Any]") -> "Parts[Any]":
        """What `change` makes of each part, and of the same part of `others`."""
        names = ("train", "dev", "test")
        return Parts(**{n: change(*(getattr(each, n) for each in (self, *others))) for n in names})


Arrays = Parts[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Releases:
    """What an eavesdropper has: one release of each text, and means of several.

    It owns the extractor, which every device carries, so of its own training texts it can
    always make several releases; of somebody else's only where the device answers again.
    """

    single: Arrays
    averaged: Arrays


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one attacker makes of the test vectors: [rows, values], each row summing to 1."""

    dev: np.ndarray
    test: np.ndarray
    chosen: dict[str, Any]  # what it settled on by the development part


def read_attribute(
    attacker: str,
    releases: Releases,
    values: Arrays,
    *,
    num_values: int,
    name: str = "the attribute",
    seed: int,
    device: str = "cpu",
) -> Reading:
    """How likely `attacker` holds each value for each vector; `values` are codes from 0.

    Holds:
        finds: on vectors that spell the attribute out it is nearly always right.
        silent: on pure noise it is no better than the majority, within its interval.
        unseen: nothing of the test part but its vectors is looked at.
    """
    check_attacker(attacker)
    if len(np.unique(values.train)) < 2 or not len(values.dev):
        raise UsageError(
            f"The training part has fewer than two values of {name!r}, or the development part none, so no attacker can "
            "learn it. Choose another attribute, or give more texts."
        )
    offers = {
        "mlp": lambda: _networks(releases.single, values, num_values, seed, device),
        "logistic": lambda: _lines(releases, values, num_values),
        "averaged": lambda: _lines_on(releases.averaged, releases.averaged, values, num_values),
        "trees": lambda: _trees(releases.single, values, num_values, seed),
    }[attacker]()
    return best_on_dev(offers, values.dev)


def best_on_dev(offers: Iterable[Reading], truth: np.ndarray) -> Reading:
    """The offer most often right on the development part; of equals the least surprised."""
    return max(offers, key=lambda offer: _merit(offer.dev, truth))


def _merit(scores: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    right = float((scores.argmax(axis=1) == truth).mean())
    return right, float(np.log(np.maximum(scores[np.arange(len(truth)), truth], 1e-12)).mean())


def scaled_by_train(vectors: Arrays) -> Arrays:
    """Coordinates with mean 0 and deviation 1 on the training part."""
    mean, spread = vectors.train.mean(axis=0), vectors.train.std(axis=0)
    spread = np.where(spread > 0, spread, 1)
    return vectors.map(lambda part: ((part - mean) / spread).astype(np.float32))


# Logistic regression
def _lines(releases: Releases, values: Arrays, num_values: int) -> Iterator[Reading]:
    """Trained on single releases or on means of its own texts' releases; tried on single ones."""
    yield from _lines_on(releases.single, releases.single, values, num_values, "one release")
    yield from _lines_on(releases.averaged, releases.single, values, num_values, "averages")


def _lines_on(
    learn: Arrays, judge: Arrays, values: Arrays, num_values: int, trained_on: str = "averages"
) -> Iterator[Reading]:
    vectors = scaled_by_train(Parts(train=learn.train, dev=judge.dev, test=judge.test))
    line = sklearn_part("linear_model").LogisticRegression(max_iter=300, warm_start=True)
    for penalty in PENALTIES:
        line.set_params(C=penalty)
        with warnings.catch_warnings():
            # A fit stopped early is one more offer; the development part judges it.
            warnings.simplefilter("ignore", sklearn_part("exceptions").ConvergenceWarning)
            line.fit(vectors.train, values.train)
        scores = [line.predict_proba(part) for part in (vectors.dev, vectors.test)]
        yield _reading(scores, line.classes_, num_values, penalty=penalty, trained_on=trained_on)


# Gradient-boosted trees
def _trees(vectors: Arrays, values: Arrays, num_values: int, seed: int) -> Iterator[Reading]:
    """One forest, offered at every tenth of its growth."""
    forest = sklearn_part("ensemble").HistGradientBoostingClassifier(
        max_iter=TREES, max_leaf_nodes=LEAVES, early_stopping=False, random_state=seed
    )
    forest.fit(vectors.train, values.train)
    stages = [forest.staged_predict_proba(part) for part in (vectors.dev, vectors.test)]
    for num_trees, scores in enumerate(zip(*stages, strict=True), 1):
        if num_trees % (TREES // 10) == 0:
            yield _reading(scores, forest.classes_, num_values, trees=num_trees)


# The paper's network: two hidden layers of 512, ReLU
def _networks(
    vectors: Arrays, values: Arrays, num_values: int, seed: int, device: str
) -> Iterator[Reading]:
    vectors = scaled_by_train(vectors)
    tensors = vectors.map(lambda part: torch.from_numpy(part).to(device))
    truth = torch.from_numpy(values.train.astype(np.int64)).to(device)
    for rate in LEARNING_RATES:
        torch.manual_seed(seed)
        network = nn.Sequential(
            *(nn.Linear(vectors.train.shape[1], HIDDEN), nn.ReLU()),
            *(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, num_values)),
        ).to(device)
        yield from _until_worse(_epochs(network, tensors, truth, rate, seed), values.dev, rate)


def _epochs(
    network: nn.Module, tensors: Parts[Tensor], truth: Tensor, rate: float, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Scores on development and test vectors after each epoch."""
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(MOST_EPOCHS):
        for rows in torch.randperm(len(truth), generator=shuffle).to(truth.device).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(network(tensors.train[rows]), truth[rows]).backward()
            optimizer.step()
        with torch.inference_mode():
            judged = (tensors.dev, tensors.test)
            dev, test = (network(part).float().softmax(dim=1).cpu().numpy() for part in judged)
        yield dev, test


def _until_worse(
    epochs: Iterator[tuple[np.ndarray, np.ndarray]], truth: np.ndarray, rate: float
) -> Iterator[Reading]:
    """Epochs until neither hits nor surprise on the development part have improved for a while."""
    best, since = [-np.inf, -np.inf], 0
    for epoch, (dev, test) in enumerate(epochs, 1):
        yield Reading(dev=dev, test=test, chosen={"learning_rate": rate, "epochs": epoch})
        merit = _merit(dev, truth)
        better = [one > other for one, other in zip(merit, best, strict=True)]
        since = 0 if any(better) else since + 1
        best = [max(pair) for pair in zip(merit, best, strict=True)]
        if since >= PATIENCE:
            return


# scikit-learn
def sklearn_part(name: str) -> Any:
    """A part of scikit-learn; without it, the line that installs it."""
    return needed(
        f"sklearn.{name}", "Attacking vectors needs scikit-learn, which is not installed."
    )


def _reading(
    scores: Sequence[np.ndarray], classes: Sequence[int], num_values: int, **chosen: Any
) -> Reading:
    """Development and test scores, with columns for values that the training part does not have,
    where they are never guessed."""
    dev, test = (np.zeros((len(part), num_values)) for part in scores)
    for spread, part in zip((dev, test), scores, strict=True):
        spread[:, np.asarray(classes)] = part
    return Reading(dev=dev, test=test, chosen=chosen)
