"""Real canaries: of each user the training document that surprises an unmitigated model most.

Mireshghallah et al. 2021: what a model finds least likely is most likely to be private. Nobody
knows what else such a text could have read, so it has no exposure; only the tab attack is tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tightlip.audit.document_scores import score_documents
from tightlip.audit.scan import Scanner
from tightlip.core.errors import UsageError
from tightlip.corpus.canaries import Canary
from tightlip.corpus.encoding import Encoder
from tightlip.corpus.readers import Corpus
from tightlip.corpus.tokens import TokenizedCorpus


@dataclass(frozen=True, kw_only=True)
class ChoiceConfig:
    """Which documents may be chosen."""

    min_tokens: int = 5

    def __post_init__(self) -> None:
        if self.min_tokens < 2:
            raise UsageError(
                f"min_tokens={self.min_tokens} would choose texts with nothing to guess behind their first token. "
                "Use 2 or more."
            )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The canaries, by user in order of first appearance, and how many users have none."""

    canaries: list[Canary]
    num_users_left_out: int


def choose_real_canaries(
    scanner: Scanner,
    tokenizer: Any,
    tokens: TokenizedCorpus,
    documents: Corpus,
    config: ChoiceConfig,
    planted: Sequence[str] = (),
) -> Choice:
    """Each user's document with the highest perplexity; of equal ones the first.

    `documents` are the texts of `tokens`, in the same order. `planted` texts are made up, and
    surprise a model most: they are passed over.

    Holds:
        surprising: no other usable document of that user has a higher perplexity.
        usable: a document with fewer tokens, or with a word the model lacks, is never chosen.
        as_often: repetitions are the documents of the whole corpus that read the same.
    """
    scores = score_documents(scanner, tokens)
    mean_nats = scores.loss_nats / np.maximum(scores.num_tokens, 1)
    usable = usable_documents(tokens, tokenizer.unk_token_id, config.min_tokens)
    made_up = {ids.astype(np.int32).tobytes() for ids in _encoded(tokenizer, planted)}
    usable[[number for number, _ in _reading(tokens, made_up)]] = False
    mean_nats[~usable] = -np.inf
    chosen = _most_surprising(mean_nats, np.asarray(tokens.users), tokens.num_users)
    if not len(chosen):
        raise UsageError(
            f"No document has min_tokens={config.min_tokens} tokens and only words the model knows, so none can be "
            "chosen. Use a smaller --min-tokens, or train with a larger vocabulary."
        )
    repetitions = _repetitions(tokens, chosen)
    texts = _texts_of(documents, set(chosen.tolist()))
    canaries = [
        Canary(
            text=texts[number],
            user=tokens.user_names[tokens.users[number]],
            repetitions=times,
            kind="real",
        )
        for number, times in zip(chosen.tolist(), repetitions, strict=True)
    ]
    return Choice(canaries=canaries, num_users_left_out=tokens.num_users - len(canaries))


def usable_documents(
    tokens: TokenizedCorpus, unknown_id: int | None, min_tokens: int
) -> np.ndarray:
    """True for each document that is long enough and spelt in words the model knows."""
    bounds = np.asarray(tokens.bounds)
    usable = np.diff(bounds) >= min_tokens
    if unknown_id is not None:
        places = np.flatnonzero(np.asarray(tokens.tokens) == unknown_id)
        usable[np.searchsorted(bounds, places, side="right") - 1] = False
    return usable


def _most_surprising(mean_nats: np.ndarray, users: np.ndarray, num_users: int) -> np.ndarray:
    """Each user's document of the largest value, by number; users without a finite one have none."""
    order = np.lexsort((np.arange(len(users)), -mean_nats, users))
    order = order[np.isfinite(mean_nats[order])]
    _, first = np.unique(users[order], return_index=True)
    return order[first]


def _repetitions(tokens: TokenizedCorpus, chosen: np.ndarray) -> list[int]:
    """How many documents have the very tokens of each chosen one."""
    own = [tokens.document(number).tobytes() for number in chosen]
    counts = dict.fromkeys(own, 0)
    for _, read in _reading(tokens, set(own)):
        counts[read] += 1
    return [counts[each] for each in own]


def _reading(tokens: TokenizedCorpus, wanted: set[bytes]) -> Iterator[tuple[int, bytes]]:
    """The documents whose tokens, as bytes, are among `wanted`."""
    lengths = [len(each) // tokens.tokens.itemsize for each in wanted]
    for number in np.flatnonzero(np.isin(np.diff(tokens.bounds), lengths)).tolist():
        read = tokens.document(number).tobytes()
        if read in wanted:
            yield number, read


def _encoded(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    return Encoder(tokenizer).encode(list(texts))[0] if texts else []


def _texts_of(documents: Corpus, numbers: set[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    start = 0
    for batch in documents.batches():
        here = range(start, start + len(batch))
        found |= {number: batch.texts[number - start] for number in here if number in numbers}
        start = here.stop
    return found
