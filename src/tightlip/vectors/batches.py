"""Which texts make up each training step, as tensors in time; and how well the label is told from
vectors as they would be released."""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tightlip.vectors.data import Examples
from tightlip.vectors.extractors import Extractor, pinned
from tightlip.vectors.guarantees import VectorMechanism
from tightlip.vectors.halves import Classifier
from tightlip.vectors.masking import masked_texts
from tightlip.vectors.release import normalised, training_noise

_BATCHES_SORTED_TOGETHER = 32
_AHEAD = 2  # batches made before they are asked for
_NUMBERS = "numbers"
_ORDER, _WORDS, _SCORING = 0, 1, 2  # what a seed's streams are for
# Of one draw of strong noise, the loss says more about the draw than about the weights.
NUM_DRAWS = 4


@dataclass(frozen=True)
class Batch:
    """One step's texts: their places among the training texts, and their tokens."""

    places: np.ndarray
    tokens: dict[str, Tensor]
    numbers: Tensor  # the places, from where the training's device copies them


class Batches:
    """Training batches as a function of the seed and the step alone.

    Texts of like length share a batch, so that little is padding. Where words are masked, each
    step draws its own, and the next batch is made while the step runs.

    Holds:
        whole_epochs: every text comes once an epoch.
        any_start: the batches from a step on are those of a run that came there by itself.
    """

    def __init__(
        self,
        extractor: Extractor,
        examples: Examples,
        *,
        batch_size: int,
        dropout: float,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        # A device masks before it tokenises, which leaves one space between two words.
        self._extractor, self._texts = extractor, [" ".join(t.split()) for t in examples.texts]
        self._batch_size, self._dropout, self._seed = batch_size, dropout, seed
        self._device = device
        self._ids = extractor.token_ids(self._texts)
        self._lengths = np.array([len(row) for row in self._ids])
        self.steps_per_epoch = math.ceil(len(examples) / batch_size)

    def from_step(self, first: int, end: int) -> Iterator[Batch]:
        """The batches of steps `first` up to `end`; some are made while a step runs."""
        with ThreadPoolExecutor(1) as maker:
            coming: deque[Future[Batch]] = deque()
            for step, places in self._steps(first, end):
                coming.append(maker.submit(self._batch, places, step))
                if len(coming) > _AHEAD:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()

    def _steps(self, first: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Each step with the places of its texts."""
        order, epoch = np.empty((0,)), -1
        for step in range(first, end):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self._order(epoch)
            yield step, order[step % self.steps_per_epoch]

    def _order(self, epoch: int) -> np.ndarray:
        """The places of each batch of an epoch, an array of arrays."""
        draw = np.random.default_rng([self._seed, _ORDER, epoch])
        shuffled = draw.permutation(len(self._texts))
        pool = _BATCHES_SORTED_TOGETHER * self._batch_size
        batches = []
        for start in range(0, len(shuffled), pool):
            chosen = shuffled[start : start + pool]
            chosen = chosen[np.argsort(self._lengths[chosen], kind="stable")]
            batches += [
                chosen[first : first + self._batch_size]
                for first in range(0, len(chosen), self._batch_size)
            ]
        shuffled_batches = np.empty(len(batches), object)
        for place, number in enumerate(draw.permutation(len(batches))):
            shuffled_batches[place] = batches[number]
        return shuffled_batches

    def _batch(self, places: np.ndarray, step: int) -> Batch:
        tokens = pinned({**self._tokens(places, step), _NUMBERS: torch.from_numpy(places)}, self._device)  # fmt: skip
        return Batch(places, numbers=tokens.pop(_NUMBERS), tokens=tokens)

    def _tokens(self, places: np.ndarray, step: int) -> dict[str, Tensor]:
        if not self._dropout:
            return self._extractor.padded([self._ids[place] for place in places])
        draw = np.random.default_rng([self._seed, _WORDS, step])
        texts = masked_texts(
            [self._texts[place] for place in places],
            mask_word=self._extractor.mask_word,
            dropout=self._dropout,
            generator=draw,
        )
        return self._extractor.tokenize(texts)


@dataclass(frozen=True)
class Scores:
    """Mean loss and accuracy, and of each text the share of draws in which it was told right."""

    loss_nats: float
    accuracy: float
    share_right: np.ndarray


@torch.no_grad()
def scores_of(
    extractor: Extractor,
    classifier: Classifier,
    mechanism: VectorMechanism,
    examples: Examples,
    *,
    seed: int,
) -> Scores:
    """Scores over a few draws of masks and noise, the same at every call with one seed."""
    device = classifier.center.device
    was_training = classifier.training
    classifier.eval()
    truth = torch.from_numpy(examples.label_ids).to(device)
    losses, right = [], []
    raw = None
    num_draws = NUM_DRAWS if mechanism.noise_scale or mechanism.dropout else 1
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for draw in range(num_draws):
            if raw is None or mechanism.dropout:
                raw = _raw(extractor, examples.texts, mechanism.dropout, (seed, draw)).to(device)
            vectors = normalised(raw, mechanism)
            logits = classifier(vectors + training_noise(vectors, mechanism))
            losses.append(functional.cross_entropy(logits, truth).item())
            right.append((logits.argmax(dim=1) == truth).cpu().numpy())
    classifier.train(was_training)
    share_right = np.mean(right, axis=0)
    return Scores(float(np.mean(losses)), float(share_right.mean()), share_right)


def _raw(
    extractor: Extractor, texts: list[str], dropout: float, stream: tuple[int, int]
) -> torch.Tensor:
    texts = masked_texts(
        texts,
        mask_word=extractor.mask_word,
        dropout=dropout,
        generator=np.random.default_rng([_SCORING, *stream]),
    )
    return torch.from_numpy(extractor.encode(texts, batch_size=64))
