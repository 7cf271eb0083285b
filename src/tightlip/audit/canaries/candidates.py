"""The log-probability of many texts that differ only in a template's places.

Candidates are a tree of tokens, and each of its inner nodes is read once (`tries`): a million
six-digit numbers cost 111,111 steps of the model where every digit is a token, not six million.
Where every value is one token the tree is known from the values alone. A tokenizer may join what
stands in neighbouring places ("20" and "24"), so that it is asked about every value, every pair of
neighbours and the secrets, and its entries that could reach over the edge of a place are looked for;
if any does, every text is encoded.

Shapes: N texts, P places.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tightlip.audit.canaries.tries import IdsOf, Trie, TrieReader, token_rows
from tightlip.core.devices import full_precision
from tightlip.core.errors import UsageError
from tightlip.core.progress import log, task
from tightlip.corpus.canary_templates import Readings, Slot, Template
from tightlip.corpus.encoding import Encoder
from tightlip.scan.scanner import Scanner, evaluating

TEXTS_AT_ONCE = 50_000
_SCORES_COMPARED = 100
# What float32 sums in another order may differ by; tokens read otherwise are off by whole nats.
_NEAR_NATS, _NEAR_SHARE = 1e-3, 1e-4
TEXTS_COMPARED = 2_000
MOST_PAIRS = 10_000
_MARKS = "▁Ġ#"  # put before an entry that begins, or goes on with, a word
Places = set[tuple[int, ...]]  # of some candidates
# Of each part: whether it is a place, and the tokens possible at each of its positions.
_Steps = list[tuple[bool, list[np.ndarray]]]


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

    def texts_of(self, numbers: np.ndarray) -> list[str]:
        return self.texts(self.places_of(numbers))

    def number_of(self, values: Sequence[str]) -> int:
        where = [pool.index(value) for pool, value in zip(self.pools, values, strict=True)]
        return int(np.ravel_multi_index(where, self.shape))

    @cached_property
    def readings(self) -> Readings:
        return Readings(self.template, self.pools)

    def first_of_each_text(self) -> np.ndarray:
        """Whether a candidate, by number, is the first that reads as it does."""
        numbers = np.arange(int(np.prod(self.shape)))
        first = np.ones(len(numbers), bool)
        if not self.readings.plain:
            by_text: dict[str, int] = {}
            for number, text in enumerate(self.texts_of(numbers)):
                first[number] = by_text.setdefault(text, number) == number
        return first

    def texts(self, places: np.ndarray) -> list[str]:
        fill = self.template.filled
        return [
            fill([pool[at] for pool, at in zip(self.pools, row, strict=True)])
            for row in places.tolist()
        ]

    def options(self) -> list[list[str]]:
        """What each part of the template may read, literal text included, in small letters."""
        left = iter(self.pools)
        parts = [next(left) if isinstance(p, Slot) else [p] for p in self.template.parts]
        return [[text.casefold() for text in texts] for texts in parts]

    def drawn(self, num: int, draw: np.random.Generator) -> np.ndarray:
        """Places of `num` candidates, uniform over all, with repeats."""
        return np.stack([draw.integers(0, size, num) for size in self.shape], axis=1)

    def drawn_texts(
        self, num: int, draw: np.random.Generator, without: Set[tuple[int, ...]] = frozenset()
    ) -> list[str]:
        """About `num` texts, uniform over all but those with the places in `without`.

        A text with two readings is no likelier than others.
        """
        rows = [row for row in map(tuple, self.drawn(num, draw).tolist()) if row not in without]
        texts = self.texts(np.array(rows, np.int64).reshape(-1, len(self.shape)))
        if self.readings.plain:
            return texts
        return [text for text in texts if draw.random() < 1 / len(self.readings.of(text))]


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
                        "Plant canaries from words and names that the model's vocabulary has (--words, --names), "
                        "in a template of such words."
                    )
        return ids

    def spelt(self, texts: list[str]) -> list[bool]:
        """Whether the vocabulary has every word of each text."""
        ids = self._encoder.encode(texts)[0]
        return [self._unknown is None or self._unknown not in row for row in ids]

    def tokens_of(self, text: str) -> list[int]:
        """A text's ids, whether or not the vocabulary can spell it."""
        return list(self._encoder.encode([text])[0][0].tolist())

    def prompt_of(self, text: str, num_tokens: int) -> str:
        """A text's first tokens, as somebody would type them."""
        ids = self.tokens_of(text)[:num_tokens]
        typed = str(self._tokenizer.decode(ids))
        if "\ufffd" in typed:  # half a character: other halves decode to the same
            return " ".join(self._tokenizer.convert_ids_to_tokens(ids))
        return typed

    def places_reading(self, candidates: Candidates, texts: list[str]) -> Places:
        """Places of the candidates that read as one of `texts`, to us or to the model.

        Word tokenizers drop spaces, so that "12 34" and "1234" are the same to it.
        """
        rows = [_as_characters(row) for row in self._encoder.encode(texts)[0]]
        by_tokens = self._token_readings(candidates)
        return {
            places
            for text, row in zip(texts, rows, strict=True)
            for places in [*candidates.readings.of(text), *by_tokens.of(row)]
        }

    def _token_readings(self, candidates: Candidates) -> Readings:
        """The template and its lists with a character for each token."""

        def characters(texts: Sequence[str]) -> list[str]:
            return [_as_characters(row) for row in self.ids_of(list(texts))]

        template = candidates.template
        parts = tuple(p if isinstance(p, Slot) else characters([p])[0] for p in template.parts)
        pools = {pool: characters(pool) for pool in dict.fromkeys(candidates.pools)}
        return Readings(Template(template.text, parts), [pools[p] for p in candidates.pools])

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

    def score_all(self, candidates: Candidates, secrets: Sequence[int] = ()) -> np.ndarray:
        """Total log-probability of every candidate, by number.

        Of `secrets` and some others it is looked up whether the tree gives what the text by
        itself gives; otherwise every text is scored by itself.
        """
        scores = self._by_trie(self._trie(candidates, secrets), candidates)
        if self._agree(scores, candidates, secrets):
            return scores
        log.warning(
            "Sharing beginnings gives other scores than reading %r text by text. Going on text by text, which is slower.",
            candidates.template.text,
        )
        parts = []
        with task("Scoring candidates", len(scores)) as bar:
            cuts = range(TEXTS_AT_ONCE, len(scores), TEXTS_AT_ONCE)
            for numbers in np.split(np.arange(len(scores)), cuts):
                parts.append(self.score_texts(candidates.texts_of(numbers)))
                bar.advance(len(numbers))
        return np.concatenate(parts)

    def _trie(self, candidates: Candidates, secrets: Sequence[int]) -> Trie:
        """All candidates as tokens: by value where each is one, else every text is encoded."""
        steps = self._single_tokens(candidates, secrets)
        device = self.scanner.device
        if steps is not None:
            return Trie.of_steps([torch.from_numpy(each.astype(np.int64)).to(device) for each in steps])  # fmt: skip
        asked = (candidates.template, candidates.pools, self.ids_of)
        rows_NL = token_rows(*asked, may_cut=self._encoder.may_cut)
        return Trie.of_rows(torch.from_numpy(rows_NL).to(device))

    def _agree(self, scores: np.ndarray, candidates: Candidates, secrets: Sequence[int]) -> bool:
        some = np.random.default_rng(0).integers(0, len(scores), _SCORES_COMPARED)
        numbers = np.unique([*secrets, *some])
        alone = self.score_texts(candidates.texts_of(numbers))
        return bool(np.isclose(scores[numbers], alone, rtol=_NEAR_SHARE, atol=_NEAR_NATS).all())

    def check_known(self, candidates: Candidates) -> None:
        """Refuse a template with a value, or words around them, that the vocabulary lacks."""
        literals = [part for part in candidates.template.parts if isinstance(part, str)]
        values = [value for pool in dict.fromkeys(candidates.pools) for value in pool]
        self.ids_of([*literals, *values])

    def _by_trie(self, trie: Trie, candidates: Candidates) -> np.ndarray:
        reader = TrieReader(self.scanner, trie)
        with (
            torch.inference_mode(),
            full_precision(),
            evaluating(self.scanner.model),
            task("Scoring candidates", int(np.prod(candidates.shape))) as bar,
        ):
            for num_done in reader.read():
                bar.advance(num_done)
            return _finite(reader.scores())

    def _single_tokens(
        self, candidates: Candidates, secrets: Sequence[int] = ()
    ) -> list[np.ndarray] | None:
        """The tokens possible at each position; None where values are not tokens of their own."""
        places = candidates.places_of(np.array(secrets, np.int64))
        return single_tokens(candidates, self.ids_of, joining_entries(self._tokenizer), places)


def single_tokens(
    candidates: Candidates, ids_of: IdsOf, entries: Iterable[str], secrets_NP: np.ndarray
) -> list[np.ndarray] | None:
    """The tokens possible at each position; None where values are not tokens of their own."""
    if (steps := _tokens_alone(candidates, ids_of)) is None:
        return None
    for places_NP in _compared(candidates, secrets_NP):
        rows = np.stack(list(_expected(steps, places_NP)), axis=1)
        read = ids_of(candidates.texts(places_NP))
        if not all(np.array_equal(one, other) for one, other in zip(read, rows, strict=True)):
            return None
    options = candidates.options()
    if any(spelt_across(options, entry.casefold()) for entry in entries):
        return None
    return [token for _, tokens in steps for token in tokens]


def joining_entries(tokenizer: Any) -> list[str]:
    """What a tokenizer may read as one where our texts have several values: entries that were
    added to its vocabulary, and numbers of two digits or more."""
    added = [str(token.content) for token in tokenizer.added_tokens_decoder.values()]
    bare = (entry.lstrip(_MARKS) for entry in tokenizer.get_vocab())
    return [*added, *(entry for entry in bare if len(entry) > 1 and entry.isdecimal())]


def spelt_across(options: Sequence[Sequence[str]], entry: str) -> bool:
    """Whether `entry` can stand over an edge between parts, given what each part may read.

    >>> spelt_across([["id "], ["2", "4"], ["0", "1"]], "41")
    True
    >>> spelt_across([["id "], ["2", "4"], ["0", "1"]], "14")
    False
    """
    return any(
        entry.startswith(text[start:])
        and len(entry) > len(text) - start
        and _goes_on(options[number + 1 :], entry[len(text) - start :])
        for number, texts in enumerate(options)
        for text in texts
        for start in range(len(text))
    )


def _goes_on(options: Sequence[Sequence[str]], rest: str) -> bool:
    return bool(options) and any(
        text.startswith(rest)
        or (rest.startswith(text) and _goes_on(options[1:], rest[len(text) :]))
        for text in options[0]
    )


def _tokens_alone(candidates: Candidates, ids_of: IdsOf) -> _Steps | None:
    """Each part encoded by itself; None where some value has not exactly one token."""
    steps: _Steps = []
    left = iter(candidates.pools)
    for part in candidates.template.parts:
        if not isinstance(part, Slot):
            steps.append((False, [token[None] for token in ids_of([part])[0]]))
            continue
        ids = ids_of(list(next(left)))
        if any(len(row) != 1 for row in ids):
            return None
        steps.append((True, [np.concatenate(ids)]))
    return steps


def _expected(steps: _Steps, places_NP: np.ndarray) -> Iterator[np.ndarray]:
    """The token at each position of the texts with these places, value by value."""
    place = 0
    for is_place, tokens in steps:
        for token in tokens:
            yield token[places_NP[:, place]] if is_place else np.repeat(token, len(places_NP))
        place += is_place


def _compared(candidates: Candidates, secrets_NP: np.ndarray) -> Iterator[np.ndarray]:
    """The texts to ask the tokenizer about: the secrets, some at random, every value in every
    place, and all pairs of neighbours where they are few."""
    draw = np.random.default_rng(0)
    sizes = [len(pool) for pool in candidates.pools]
    if len(secrets_NP):
        yield secrets_NP
    yield candidates.drawn(TEXTS_COMPARED, draw)
    for place, size in enumerate(sizes):
        places_NP = candidates.drawn(size, draw)
        places_NP[:, place] = np.arange(size)
        yield places_NP
    for place, (size, after) in enumerate(pairwise(sizes)):
        if size * after <= MOST_PAIRS:
            places_NP = candidates.drawn(size * after, draw)
            places_NP[:, place], places_NP[:, place + 1] = np.divmod(np.arange(size * after), after)
            yield places_NP


def _as_characters(ids: np.ndarray) -> str:
    return "".join(map(chr, ids.tolist()))


def _finite(scores: np.ndarray) -> np.ndarray:
    if np.isnan(scores).any():
        raise UsageError(
            "The model gives probabilities that are no numbers, so nothing can be ranked. Train again."
        )
    return scores
