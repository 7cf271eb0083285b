"""Which texts make up each training step, with words taken out of them, as tensors in time."""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tightlip.representation.data import Examples
from tightlip.representation.extractors import Extractor, pinned
from tightlip.representation.words import masked_texts

_BATCHES_SORTED_TOGETHER = 32
_AHEAD = 2  # batches made before they are asked for
_NUMBERS = "numbers"
_ORDER, _WORDS = 0, 1  # what a seed's streams are for


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
        found = np.empty(len(batches), object)
        for place, number in enumerate(draw.permutation(len(batches))):
            found[place] = batches[number]
        return found

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
