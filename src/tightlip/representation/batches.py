"""Which texts make up each training step, with words taken out of them, as tensors in time."""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tightlip.representation.data import Examples
from tightlip.representation.extractors import Extractor
from tightlip.representation.words import masked_texts

_BATCHES_SORTED_TOGETHER = 32
_ORDER, _WORDS = 0, 1  # what a seed's streams are for


@dataclass(frozen=True)
class Batch:
    """One step's texts: their places among the training texts, and their tokens."""

    places: np.ndarray
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
    ) -> None:
        # A device masks before it tokenises, which leaves one space between two words.
        self._extractor, self._texts = extractor, [" ".join(t.split()) for t in examples.texts]
        self._batch_size, self._dropout, self._seed = batch_size, dropout, seed
        self._ids = extractor.token_ids(self._texts)
        self._lengths = np.array([len(row) for row in self._ids])
        self.steps_per_epoch = math.ceil(len(examples) / batch_size)

    def from_step(self, first: int, end: int) -> Iterator[Batch]:
        """The batches of steps `first` up to `end`."""
        with ThreadPoolExecutor(1) as maker:
            coming: Future[Batch] | None = None
            order, epoch = np.empty((0,)), -1
            for step in range(first, end + 1):
                ready = coming
                coming = None
                if step < end:
                    if step // self.steps_per_epoch != epoch:
                        epoch = step // self.steps_per_epoch
                        order = self._order(epoch)
                    places = order[step % self.steps_per_epoch]
                    coming = maker.submit(self._batch, places, step)
                if ready is not None:
                    yield ready.result()

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
        found = np.empty(len(batches), object)
        for place, number in enumerate(draw.permutation(len(batches))):
            found[place] = batches[number]
        return found

    def _batch(self, places: np.ndarray, step: int) -> Batch:
        if not self._dropout:
            return Batch(places, self._extractor.padded([self._ids[place] for place in places]))
        draw = np.random.default_rng([self._seed, _WORDS, step])
        texts = masked_texts(
            [self._texts[place] for place in places],
            mask_word=self._extractor.mask_word,
            dropout=self._dropout,
            generator=draw,
        )
        return Batch(places, self._extractor.tokenize(texts))
