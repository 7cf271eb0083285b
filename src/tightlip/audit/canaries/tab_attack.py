"""The tab attack on canaries: type a text's first tokens, accept each suggestion, get all of it or not.

A keyboard shows one suggestion. Where several tokens are equally likely it is the one that greedy
generation takes, so of canaries that begin alike only those on one way on can succeed. The
leakage scan's own rule, which counts every token of a tie, is another one.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any

import numpy as np
import torch

from tightlip.audit.canaries.candidates import CandidateScorer
from tightlip.audit.canaries.tries import PrefixReader
from tightlip.core.devices import full_precision
from tightlip.core.errors import UsageError
from tightlip.corpus.canaries import Canary
from tightlip.scan.scanner import Scanner, evaluating

# Rounding differs with the rows of a batch, so that a token of a near tie may come out as second
# or third there and first where it is read alone.
_NEARLY_FIRST = 4


@dataclass(frozen=True, kw_only=True)
class Attack:
    """The tab attack on one text: what was typed, whether all came, how likely the whole is."""

    tab: bool
    prompt: str
    token_ids: list[int]
    num_prompt_tokens: int
    perplexity: float | None


def attacked(
    scorer: CandidateScorer, canaries: Sequence[Canary], prompt_tokens: int
) -> list[Attack]:
    """Whether someone who types a text's first tokens and then accepts each suggestion gets it all.

    A canary with a word that the model lacks cannot come back, and is not scored.

    Holds:
        greedy: a text succeeds where the model's own greedy generation gives it, ties included.
        one_way: behind one prompt all that succeed are beginnings of one text.
    """
    texts = [canary.text for canary in canaries]
    spelt = scorer.spelt(texts)
    found = iter(_completed_and_nats(scorer, list(compress(texts, spelt)), prompt_tokens))
    outcomes = [next(found) if can else (False, None) for can in spelt]
    return [
        Attack(
            tab=tab,
            prompt=scorer.prompt_of(text, prompt_tokens),
            token_ids=scorer.tokens_of(text),
            num_prompt_tokens=prompt_tokens,
            perplexity=perplexity,
        )
        for text, (tab, perplexity) in zip(texts, outcomes, strict=True)
    ]


def _completed_and_nats(
    scorer: CandidateScorer, texts: list[str], prompt_tokens: int
) -> list[tuple[bool, float]]:
    """Of each text whether it all comes, and its perplexity."""
    if not texts:
        return []
    log_probs, bounds, ranks = scorer.scanned(texts)
    near = []
    for begin, end in pairwise(bounds):
        if end - begin <= prompt_tokens:
            raise UsageError(
                f"A canary has {end - begin} tokens, so a prompt of {prompt_tokens} leaves nothing to guess. "
                "Use fewer --prompt-tokens."
            )
        near.append(bool((ranks[begin + prompt_tokens : end] < _NEARLY_FIRST).all()))
    completed = _completed(scorer, texts, near, prompt_tokens)
    return [
        (text in completed, _perplexity(log_probs[begin:end]))
        for text, (begin, end) in zip(texts, pairwise(bounds), strict=True)
    ]


def _completed(
    scorer: CandidateScorer, texts: list[str], near: list[bool], prompt_tokens: int
) -> set[str]:
    """The texts that greedy generation gives, among those `near` to it in the scan."""
    chosen = list(compress(texts, near))
    by_prompt: dict[tuple[int, ...], dict[str, list[int]]] = defaultdict(dict)
    for text, ids in zip(chosen, scorer.ids_of(chosen) if chosen else [], strict=True):
        row = ids.tolist()
        by_prompt[tuple(row[:prompt_tokens])][text] = row[prompt_tokens:]
    greedy = Greedy(scorer.scanner)
    return {text for prompt, rests in by_prompt.items() for text in greedy.completed(prompt, rests)}


class Greedy:
    """A model that writes on behind a prompt, each time the token that it finds most likely.

    One row at a time, as generation reads it. Behind the end of its window the model sees the
    latter half of it, as in the scan.
    """

    def __init__(self, scanner: Scanner) -> None:
        self._bos_id, self._window, self._device = scanner.bos_id, scanner.window, scanner.device
        self._model, self._reader = scanner.model, PrefixReader(scanner)
        self._has_chosen = False

    def completed(self, prompt: Sequence[int], rests: dict[str, list[int]]) -> list[str]:
        """Which texts, given by what is left of them behind `prompt`, are written whole."""
        done: list[str] = []
        left = rests
        with torch.inference_mode(), full_precision(), evaluating(self._model):
            for place, token in enumerate(self._written(prompt)):
                left = {text: rest for text, rest in left.items() if rest[place] == token}
                done += [text for text, rest in left.items() if len(rest) == place + 1]
                left = {text: rest for text, rest in left.items() if len(rest) > place + 1}
                if not left:
                    break
        return done

    def _written(self, prompt: Sequence[int]) -> Iterator[int]:
        inputs = [*([] if self._bos_id is None else [self._bos_id]), *prompt]
        if not self._has_chosen:
            self._reader.choose_way(torch.tensor([inputs[0], inputs[-1]], device=self._device))
            self._has_chosen = True
        memory, unread = None, inputs
        while True:
            if self._window is not None and len(inputs) > self._window:
                memory = None
                inputs = unread = inputs[-((self._window + 1) // 2) :]
            for token in unread:
                token_1 = torch.tensor([token], device=self._device)
                logits_1V, memory = self._reader.read(memory, token_1)
            best = int(logits_1V[0].argmax())
            yield best
            inputs, unread = [*inputs, best], [best]


def _perplexity(log_probs: np.ndarray) -> float:
    """Over the predicted tokens: without a BOS the first one is given."""
    return math.exp(min(-float(np.nanmean(log_probs.astype(np.float64))), 700.0))


def tab_ceiling(entries: Sequence[Mapping[str, Any]]) -> int:
    """The most measured canaries that TAB can complete at once, by their tokens: "ID 12" need not
    begin with those of "ID 1". Records of earlier versions have their texts only."""
    by_text = [(one["prompt"], one["text"]) for one in entries if "token_ids" not in one]
    ids = [(one["token_ids"], one["num_prompt_tokens"]) for one in entries if "token_ids" in one]
    return most_successes([*by_text, *((tuple(row[:num]), tuple(row)) for row, num in ids)])


def most_successes(pairs: Sequence[tuple[Hashable, Sequence[Any]]]) -> int:
    """The most canaries that can succeed at once, each given by its prompt and its text, or tokens.

    Whoever types a prompt and accepts every suggestion gets one text. Of the canaries with that
    prompt it can complete those that are equal to it or begin it, and no other.

    Holds:
        together: the same as the largest set in which no two canaries of one prompt contradict
            each other.

    >>> most_successes([("My", "My ID is 1"), ("My", "My ID is 2"), ("Call", "Call me")])
    2
    >>> most_successes([("My", "My ID is 1"), ("My", "My ID is 1"), ("My", "My ID is 12")])
    3
    """
    by_prompt: dict[Hashable, list[Any]] = defaultdict(list)
    for prompt, text in pairs:
        by_prompt[prompt].append(text)
    return sum(_longest_chain(texts) for texts in by_prompt.values())


def _longest_chain(texts: Sequence[Any]) -> int:
    """How many of `texts` begin, or are, one and the same text."""
    chain: list[Any] = []
    longest = 0
    # Sorted, every text comes after those that begin it, and nothing foreign comes between.
    for text in sorted(texts):
        while chain and text[: len(chain[-1])] != chain[-1]:
            chain.pop()
        chain.append(text)
        longest = max(longest, len(chain))
    return longest
