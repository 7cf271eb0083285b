"""The log-probability of many texts that differ only in a template's places.

Where every value is one token, candidates are the leaves of a tree and each of its inner nodes
is read once: a million six-digit numbers cost 111,111 steps of the model, not six million.
Other tokenizers (byte pairs that join digits) have every text scored by itself.

Shapes: B rows, K values of a place, T positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightlip.audit.prefixes import PrefixReader
from tightlip.audit.scan import Scanner, evaluating, full_precision
from tightlip.audit.scoring import score_logits
from tightlip.core.errors import UsageError
from tightlip.core.progress import task
from tightlip.corpus.canary_templates import Slot, Template
from tightlip.corpus.encoding import Encoder

TEXTS_AT_ONCE = 50_000
_TEXTS_COMPARED = 2_000


@dataclass(frozen=True, eq=False)
class Candidates:
    """All ways to fill a template, numbered as if places were the digits of a number."""

    template: Template
    pools: tuple[tuple[str, ...], ...]  # of each place

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(pool) for pool in self.pools)

    def places_of(self, numbers: np.ndarray) -> np.ndarray:
        """Of each candidate, which value stands in each place."""
        return np.stack(np.unravel_index(numbers, self.shape), axis=1)

    def holds(self, values: Sequence[str]) -> bool:
        """Whether each value can stand in its place."""
        return all(value in pool for pool, value in zip(self.pools, values, strict=True))

    def number_of(self, values: Sequence[str]) -> int:
        where = [pool.index(value) for pool, value in zip(self.pools, values, strict=True)]
        return int(np.ravel_multi_index(where, self.shape))

    def texts(self, places: np.ndarray) -> list[str]:
        fill = self.template.filled
        return [
            fill([pool[at] for pool, at in zip(self.pools, row, strict=True)])
            for row in places.tolist()
        ]

    def drawn(self, num: int, draw: np.random.Generator) -> np.ndarray:
        """Places of `num` candidates, uniform over all, with repeats."""
        return np.stack([draw.integers(0, size, num) for size in self.shape], axis=1)


class CandidateScorer:
    """One model and tokenizer, asked for the log-probability of whole texts from BOS on.

    Holds:
        same_either_way: the tree gives what scoring every text by itself gives.
        known: text with a word outside the vocabulary is refused.
    """

    def __init__(self, scanner: Scanner, tokenizer: Any) -> None:
        self.scanner = scanner
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._unknown = tokenizer.unk_token_id

    def ids_of(self, texts: list[str]) -> list[np.ndarray]:
        """Each text's ids; a text that the vocabulary cannot spell is refused."""
        ids = self._encoder.encode(texts)[0]
        if self._unknown is not None:
            for text, row in zip(texts, ids, strict=True):
                if self._unknown in row:
                    raise UsageError(
                        f"{text!r} holds a word outside the model's vocabulary, and one unknown word looks like another. "
                        "Plant canaries from words that the model knows (--words FILE), and train on them."
                    )
        return ids

    def spelt(self, texts: list[str]) -> list[bool]:
        """Whether the vocabulary has every word of each text."""
        ids = self._encoder.encode(texts)[0]
        return [self._unknown is None or self._unknown not in row for row in ids]

    def prompt_of(self, text: str, num_tokens: int) -> str:
        """A text's first tokens, as somebody would type them."""
        return str(self._tokenizer.decode(self._encoder.encode([text])[0][0][:num_tokens]))

    def score_texts(self, texts: list[str]) -> np.ndarray:
        """Total log-probability of each text, scored by itself."""
        parts = []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            log_probs, bounds, _ = self.scanned(texts[start : start + TEXTS_AT_ONCE])
            # NaN is the first token of a model without BOS: it is given, not predicted.
            parts.append(np.add.reduceat(np.nan_to_num(log_probs.astype(np.float64)), bounds[:-1]))
        return _finite(np.concatenate(parts))

    def scanned(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every token's log-probability, where each text begins, and every token's rank."""
        ids = self.ids_of(texts)
        bounds = np.cumsum([0, *map(len, ids)])
        ranks, log_probs = self.scanner.scan(np.concatenate(ids), bounds)
        return log_probs, bounds, ranks

    def score_all(self, candidates: Candidates) -> np.ndarray:
        """Total log-probability of every candidate, by number."""
        total = int(np.prod(candidates.shape))
        steps = self._single_tokens(candidates)
        with task("Scoring candidates", total) as bar:
            parts = []
            for part in self._by_text(candidates) if steps is None else self._by_tree(steps):
                parts.append(part)
                bar.advance(len(part))
        return _finite(np.concatenate(parts))

    def check_known(self, candidates: Candidates) -> None:
        """Refuse a template with a value, or words around them, that the vocabulary lacks."""
        literals = [part for part in candidates.template.parts if isinstance(part, str)]
        values = [value for pool in dict.fromkeys(candidates.pools) for value in pool]
        self.ids_of([*literals, *values])

    def _by_text(self, candidates: Candidates) -> Iterator[np.ndarray]:
        total = int(np.prod(candidates.shape))
        for start in range(0, total, TEXTS_AT_ONCE):
            numbers = np.arange(start, min(start + TEXTS_AT_ONCE, total))
            yield self.score_texts(candidates.texts(candidates.places_of(numbers)))

    def _by_tree(self, steps: list[np.ndarray]) -> Iterator[np.ndarray]:
        with torch.inference_mode(), full_precision(), evaluating(self.scanner.model):
            yield from _Tree(self.scanner, steps).scores()

    def _single_tokens(self, candidates: Candidates) -> list[np.ndarray] | None:
        """The tokens possible at each position; None where values are not tokens of their own.

        Compared with the tokenizer's own reading of 2,000 texts: in these every pair of
        neighbouring digits comes up some hundred times.
        """
        places = candidates.drawn(_TEXTS_COMPARED, np.random.default_rng(0))
        steps: list[np.ndarray] = []
        expected: list[np.ndarray] = []
        left = iter(zip(candidates.pools, places.T, strict=True))
        for part in candidates.template.parts:
            if isinstance(part, Slot):
                pool, chosen = next(left)
                ids = self.ids_of(list(pool))
                if any(len(row) != 1 for row in ids):
                    return None
                steps.append(np.concatenate(ids))
                expected.append(steps[-1][chosen])
            else:
                literal = self.ids_of([part])[0]
                steps += [token[None] for token in literal]
                expected += [np.repeat(token, len(places)) for token in literal]
        read = self.ids_of(candidates.texts(places))
        rows = np.stack(expected, axis=1)
        same = all(np.array_equal(one, other) for one, other in zip(read, rows, strict=True))
        return steps if same else None


class _Tree:
    """Reads every prefix that candidates share once, a bounded number of rows at a time."""

    def __init__(self, scanner: Scanner, steps: list[np.ndarray]) -> None:
        self.reader, self.device, self.bos = PrefixReader(scanner), scanner.device, scanner.bos_id
        self.steps = [torch.from_numpy(step.astype(np.int64)).to(self.device) for step in steps]

    def scores(self) -> Iterator[np.ndarray]:
        if self.bos is not None:
            first, level = torch.tensor([self.bos], device=self.device), 0
        else:  # the first token is given, not predicted
            first, level = self.steps[0], 1
        nothing = torch.zeros(len(first), dtype=torch.float64, device=self.device)
        if level == len(self.steps):
            yield nothing.cpu().numpy()
            return
        if len(self.steps) - level > 1:  # else nothing is read twice
            self.reader.choose_way(torch.stack([first[0], self.steps[level][0]]))
        yield from self._grow(None, first, nothing, level)

    def _grow(
        self, memory: Any, tokens_B: Tensor, scores_B: Tensor, level: int
    ) -> Iterator[np.ndarray]:
        """Scores of all candidates that go on from these rows, in order."""
        logits_BV, memory = self.reader.read(memory, tokens_B)
        step = self.steps[level]
        known_BK = _log_probs(logits_BV, step)
        scores = (scores_B[:, None] + known_BK).reshape(-1)
        if level + 1 == len(self.steps):
            yield scores.cpu().numpy()
            return
        position = level + (self.bos is not None)
        rows = self.reader.rows_at_once(memory, logits_BV.shape[1], position, len(self.steps))
        del logits_BV, known_BK
        for part in torch.arange(len(scores), device=self.device).split(rows):
            chosen = self.reader.select(memory, part // len(step))
            yield from self._grow(chosen, step[part % len(step)], scores[part], level + 1)


def _log_probs(logits_BV: Tensor, step_K: Tensor) -> Tensor:
    """Log-probabilities of a step's tokens.

    One token's comes from the scan's own pass, three times as fast as torch's logsumexp on a
    CPU; the others differ from it by their logits.
    """
    logits_BK = logits_BV[:, step_K].double()
    _, first_B = score_logits(logits_BV, step_K[:1].expand(len(logits_BV)).contiguous())
    return logits_BK - logits_BK[:, :1] + first_B.double()[:, None]


def _finite(scores: np.ndarray) -> np.ndarray:
    if np.isnan(scores).any():
        raise UsageError(
            "The model gives probabilities that are no numbers, so nothing can be ranked. Train again."
        )
    return scores
