"""Whether each value of a template is a token of its own, whatever stands beside it.

Only then are candidates the leaves of a tree. A tokenizer may join what stands in neighbouring
places ("20" and "24"), so that it is asked about every value, every pair of neighbours and the
secrets, and its entries that could reach over the edge of a place are looked for.

Shapes: N texts, P places.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from tightlip.corpus.canary_templates import Slot, Template

TEXTS_COMPARED = 2_000
MOST_PAIRS = 10_000
_MARKS = "▁Ġ#"  # put before an entry that begins, or goes on with, a word


class Filled(Protocol):
    """All ways to fill a template (audit/candidates.py)."""

    @property
    def template(self) -> Template: ...
    @property
    def pools(self) -> tuple[tuple[str, ...], ...]: ...
    def texts(self, places: np.ndarray) -> list[str]: ...
    def drawn(self, num: int, draw: np.random.Generator) -> np.ndarray: ...


def single_tokens(
    candidates: Filled,
    ids_of: Callable[[list[str]], list[np.ndarray]],
    entries: Iterable[str],
    secrets_NP: np.ndarray,
) -> list[np.ndarray] | None:
    """The tokens possible at each position; None where values are not tokens of their own."""
    steps = _tokens_alone(candidates, ids_of)
    if steps is None:
        return None
    for places_NP in _compared(candidates, secrets_NP):
        rows = np.stack(list(_expected(steps, places_NP)), axis=1)
        read = ids_of(candidates.texts(places_NP))
        if not all(np.array_equal(one, other) for one, other in zip(read, rows, strict=True)):
            return None
    options = _options(candidates)
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


def _options(candidates: Filled) -> list[list[str]]:
    left = iter(candidates.pools)
    read = [next(left) if isinstance(p, Slot) else [p] for p in candidates.template.parts]
    return [[text.casefold() for text in texts] for texts in read]


# Of each part: whether it is a place, and the tokens possible at each of its positions.
_Steps = list[tuple[bool, list[np.ndarray]]]


def _tokens_alone(
    candidates: Filled, ids_of: Callable[[list[str]], list[np.ndarray]]
) -> _Steps | None:
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


def _compared(candidates: Filled, secrets_NP: np.ndarray) -> Iterator[np.ndarray]:
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
