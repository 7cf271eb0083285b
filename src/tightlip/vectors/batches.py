"""Which texts make up each training step, as tensors in time; and how well the label is told from
vectors as they would be released."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tightlip.vectors.data import Examples
from tightlip.vectors.extractors import Extractor, made_ahead, pieces, pinned
from tightlip.vectors.guarantees import VectorMechanism
from tightlip.vectors.halves import Classifier
from tightlip.vectors.masking import masked_texts
from tightlip.vectors.release import normalised, training_noise

_BATCHES_SORTED_TOGETHER = 32
_AHEAD = 2  # batches made before they are asked for
_PLACES = "places"
_ORDER, _WORDS, _SCORING = 0, 1, 2  # what a seed's streams are for
# Of one draw of strong noise, the loss says more about the draw than about the weights.
NUM_DRAWS = 4


@dataclass(frozen=True)
class Batch:
    """One step's texts: their places among the training texts, and their tokens."""

    places: Tensor
    tokens: dict[str, Tensor]


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
        calls = (partial(self._batch, places, step) for step, places in self._steps(first, end))
        return made_ahead(calls, _AHEAD)

    def _steps(self, first: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Each step with the places of its texts."""
        for step in range(first, end):
            epoch, place = divmod(step, self.steps_per_epoch)
            if step == first or not place:
                order = self._order(epoch)
            yield step, order[place]

    def _order(self, epoch: int) -> list[np.ndarray]:
        """The places of each batch of an epoch."""
        draw = np.random.default_rng([self._seed, _ORDER, epoch])
        pool = _BATCHES_SORTED_TOGETHER * self._batch_size
        batches: list[np.ndarray] = []
        for chosen in pieces(draw.permutation(len(self._texts)), pool):
            by_length = chosen[np.argsort(self._lengths[chosen], kind="stable")]
            batches += pieces(by_length, self._batch_size)
        return [batches[number] for number in draw.permutation(len(batches))]

    def _batch(self, places: np.ndarray, step: int) -> Batch:
        ids = [self._ids[place] for place in places]
        if self._dropout:
            texts = [self._texts[place] for place in places]
            masked = _masked(self._extractor, texts, self._dropout, self._seed, _WORDS, step)
            ids = self._extractor.token_ids(masked)
        made = self._extractor.padded(ids) | {_PLACES: torch.from_numpy(places)}
        made = pinned(made, self._device)
        return Batch(made.pop(_PLACES), made)


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
    truth = torch.from_numpy(examples.label.ids).to(device)
    losses, right, raw = [], [], None
    num_draws = NUM_DRAWS if mechanism.noise_scale or mechanism.dropout else 1
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for draw in range(num_draws):
            if raw is None or mechanism.dropout:
                texts = _masked(extractor, examples.texts, mechanism.dropout, _SCORING, seed, draw)
                raw = torch.from_numpy(extractor.encode(texts, batch_size=64)).to(device)
            vectors = normalised(raw, mechanism)
            logits = classifier(vectors + training_noise(vectors, mechanism))
            losses.append(functional.cross_entropy(logits, truth).item())
            right.append((logits.argmax(dim=1) == truth).cpu().numpy())
    classifier.train(was_training)
    share_right = np.mean(right, axis=0)
    return Scores(float(np.mean(losses)), float(share_right.mean()), share_right)


def _masked(extractor: Extractor, texts: list[str], dropout: float, *stream: int) -> list[str]:
    """The texts with words masked as a seed's stream decides."""
    draw = np.random.default_rng(stream)
    return masked_texts(texts, mask_word=extractor.mask_word, dropout=dropout, generator=draw)
