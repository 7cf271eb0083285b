"""What a model would write behind a line that somebody types.

`Completer` turns typed text into ghost text: the model's greedy top-1 continuation, cut where a
person would stop reading. Shapes: V vocabulary.
"""

import inspect
import math
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightlip.audit.settings import TabConfig
from tightlip.core.devices import device_of, full_precision
from tightlip.core.errors import UsageError
from tightlip.corpus.encoding import Encoder, special_ids
from tightlip.scan.scanner import checked_window, evaluating

SENTENCE_END = (".", "!", "?", "…")
# The line as it was a few words ago, for whoever goes back and types on.
LINES_KEPT = 4
# Enough for whatever a decoder looks back at: the longest thing it joins is a number or an emoji.
_CONTEXT_TOKENS = 16
_BROKEN = "\ufffd"  # what half of a character decodes to


@dataclass(frozen=True, kw_only=True)
class Ghost:
    """What the model would write: `text` goes behind the typed text as it stands.

    `log_probs` are those of `token_ids`; that of a word somebody began is taken among the words
    that begin so. `exact` says whether typed text and ghost together encode to what was predicted.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    exact: bool = True

    @property
    def perplexity(self) -> float | None:
        return math.exp(-sum(self.log_probs) / len(self.log_probs)) if self.log_probs else None

    @property
    def confidence(self) -> float | None:
        """The probability of the least certain token."""
        return math.exp(min(self.log_probs)) if self.log_probs else None


class Completer:
    """Ghost text of a model for any typed text.

    A last word without a space behind it may be half of one: the vocabulary entries that begin
    with it compete, itself among them, and the model goes on from the most likely.

    Holds:
        greedy: the ids are those of a model asked from scratch for each of them.
        behind: typed text and ghost encode to what was predicted, or `exact` is false.
        stops: before a token without text, after a sentence's end, below the confidence asked for.
    """

    def __init__(
        self, model: Any, tokenizer: Any, config: TabConfig | None = None, *, begin_id: int | None
    ) -> None:
        self.config = config or TabConfig()
        self._encoder = Encoder(tokenizer, with_spans=True)
        self._backend = tokenizer.backend_tokenizer
        self._lock = Lock()
        self._num_rows = int(model.get_input_embeddings().num_embeddings)
        self._words = Words(tokenizer, self._decode, min(len(tokenizer), self._num_rows))
        self._memory = Memory(model, bos_id=begin_id, room=self.config.tokens + 1)

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of `text`, and of each the first and last-plus-one character."""
        # Half a character, as a terminal in another encoding sends it, becomes a question mark.
        text = text.encode("utf-8", "replace").decode("utf-8")
        # A tokenizer refuses to be used while another thread sets it up, as our encoder does.
        with self._lock:
            ids, spans = self._encoder.encode([text])
        assert spans is not None
        return ids[0], spans[0]

    def _decode(self, rows: list[list[int]]) -> list[str]:
        with self._lock:
            return self._backend.decode_batch(rows, skip_special_tokens=False)

    def complete(
        self, text: str, *, whole: bool = False, wanted: Callable[[], bool] = lambda: True
    ) -> Ghost:
        """What the model writes behind `text`; nothing where it would not write.

        `whole` takes the last word as whole unless the vocabulary lacks it. As soon as
        `wanted()` is false the work is dropped and what there is comes back.
        """
        ids, spans = self.encode(text)
        if len(ids) and ids.max() >= self._num_rows:
            raise UsageError(
                f"The tokenizer gives token {ids.max()}, but the model has embeddings for "
                f"{self._num_rows} tokens only. Use the tokenizer the model was trained with."
            )
        kept, begun = self._begun_word(text, ids, spans, whole)
        stem = ids[:kept].tolist()
        new, log_probs = self._greedy(stem, begun, wanted)
        while new and _BROKEN in self._decode([new])[0][-1:]:
            new, log_probs = new[:-1], log_probs[:-1]
        return self._ghost(text, stem, begun, new, log_probs)

    def _begun_word(
        self, text: str, ids: np.ndarray, spans: np.ndarray, whole: bool
    ) -> tuple[int, str]:
        """How many tokens are settled, and the text behind them that a longer entry may replace."""
        is_open = text[-1:].isspace() or not (len(ids) and self._words.text_of(int(ids[-1])))
        if not len(ids) or (whole and not is_open):
            return len(ids), ""
        if text[-1:].isspace() and (spans[-1, 1] < len(text) or text[-1] == "\n"):
            # The tokenizer drops spaces, so this one ends the word; a line does.
            return len(ids), ""
        longest = len(ids), ""
        for kept in range(len(ids) - 1, -1, -1):
            begun = self._words.as_written(text, int(spans[kept, 0]), int(ids[kept]))
            if re.search(r"\S\s", begun):
                break
            if self._words.beginning_with(begun).size:
                longest = kept, begun
        return longest

    def _greedy(
        self, stem: list[int], begun: str, wanted: Callable[[], bool]
    ) -> tuple[list[int], list[float]]:
        """The tokens from `stem` on, the first of them one that begins with `begun`."""
        reading = self._memory.begin(stem)
        new: list[int] = []
        log_probs: list[float] = []
        # A word typed to its end is no part of the ghost, and does not count as one.
        num_typed = 0
        while reading and reading.logits_V is not None and wanted():
            allowed = self._words.beginning_with(begun) if begun and not new else None
            token, log_prob = best_of(reading.logits_V, allowed)
            if self._ends_before(token, log_prob):
                break
            num_typed += allowed is not None and self._words.text_of(token) == begun
            new.append(token)
            log_probs.append(log_prob)
            num_shown = len(new) - num_typed
            ends = self._words.text_of(token).rstrip().endswith(SENTENCE_END)
            if num_shown and (ends or num_shown == self.config.tokens):
                break
            reading.go_on(token)
        return new, log_probs

    def _ends_before(self, token: int, log_prob: float) -> bool:
        text = self._words.text_of(token)
        return not text or "\n" in text or math.exp(log_prob) < self.config.min_confidence

    def _ghost(
        self, typed: str, stem: list[int], begun: str, new: list[int], log_probs: list[float]
    ) -> Ghost:
        """Spell the new tokens so that they stand right behind what was typed."""
        tails = [tail for tail in self._tails(stem, new) if self._words.fits(tail, begun)]
        if not new or not tails:
            return Ghost()
        texts = [self._words.behind(typed, tail, begun) for tail in tails]
        expected = [*stem, *new]
        exact = [text for text in texts if self.encode(typed + text)[0].tolist() == expected]
        text = (exact or texts)[0]
        if not text.strip():
            return Ghost()
        if begun and self._words.text_of(new[0]) == begun:
            new, log_probs = new[1:], log_probs[1:]  # typed out: nothing of it is the model's
        return Ghost(text=text, token_ids=tuple(new), log_probs=tuple(log_probs), exact=bool(exact))

    def _tails(self, stem: list[int], new: list[int]) -> list[str]:
        """Spellings of `new` behind `stem`, the decoder's own first."""
        before = stem[-_CONTEXT_TOKENS:]
        with_context, context, alone = self._decode([[*before, *new], before, new])
        spelled = [with_context[len(context) :]] if with_context.startswith(context) else []
        return list(dict.fromkeys([*spelled, f" {alone}", alone]))


def best_of(logits_V: torch.Tensor, allowed: np.ndarray | None) -> tuple[int, float]:
    """The most likely token, of equals the first, and its log-probability; among `allowed` if given."""
    if allowed is None:
        token = int(logits_V.argmax())
        return token, float(logits_V.log_softmax(-1)[token])
    chosen = torch.from_numpy(allowed).to(logits_V.device)
    among = logits_V[chosen]
    place = int(among.argmax())
    return int(allowed[place]), float(among.log_softmax(-1)[place])


class Words:
    """The vocabulary by how its entries are written, so that those with a beginning are found at once."""

    def __init__(
        self, tokenizer: Any, decode: Callable[[list[list[int]]], list[str]], size: int
    ) -> None:
        self._texts = spellings(decode, size, special_ids(tokenizer))
        # Word tokenizers drop the spaces between words; BPE has them in its tokens. A space before
        # the first word tells nothing: some put one there themselves.
        call = {"add_special_tokens": False}
        self._drops_spaces = tokenizer.encode("a", **call) == tokenizer.encode("a ", **call)
        if self._drops_spaces:
            self._texts = [text.strip() for text in self._texts]
        order = sorted(number for number, text in enumerate(self._texts) if text)
        order.sort(key=self._texts.__getitem__)
        self._ids = np.array(order, np.int64)
        self._sorted = [self._texts[number] for number in order]

    def text_of(self, token: int) -> str:
        return self._texts[token] if token < len(self._texts) else ""

    def beginning_with(self, begun: str) -> np.ndarray:
        """Ids of the entries that begin with `begun`, the smallest first."""
        first = bisect_left(self._sorted, begun)
        return np.sort(self._ids[first : bisect_left(self._sorted, begun + chr(0x10FFFF))])

    def as_written(self, text: str, start: int, token: int) -> str:
        """`text` from `start` on, with the space that the token starting there holds before it."""
        if self.text_of(token).startswith(" ") and not text[start].isspace():
            return " " + text[start:]
        return text[start:]

    def fits(self, tail: str, begun: str) -> bool:
        return (tail.lstrip() if self._drops_spaces else tail).startswith(begun)

    def behind(self, typed: str, tail: str, begun: str) -> str:
        """`tail` without what is typed already."""
        if begun:
            return (tail.lstrip() if self._drops_spaces else tail)[len(begun) :]
        if self._drops_spaces and (not typed or typed[-1].isspace()):
            return tail.lstrip()
        return tail


def spellings(
    decode: Callable[[list[list[int]]], list[str]], size: int, special: set[int]
) -> list[str]:
    """How each entry is written behind another word, its space included; "" where it has no text.

    Decoded alone, a token may lose the space it begins with.
    """
    usable = [number for number in range(size) if number not in special]
    alone = decode([[number] for number in usable])
    anchor = next((n for n, text in zip(usable, alone, strict=True) if text.isalpha()), None)
    texts = [""] * size
    if anchor is None:
        return texts
    (before,) = decode([[anchor]])
    pairs = decode([[anchor, number] for number in usable])
    for number, text in zip(usable, pairs, strict=True):
        if text.startswith(before) and _BROKEN not in text:
            texts[number] = text[len(before) :]
    return texts


# A model that has read some tokens: its state, and its logits for the next.
_Read = tuple[Any, Tensor]


class Memory:
    """Next-token logits behind any line of ids, reading only what is new.

    A line that does not fit the model's window is read from a later start, half a window on at a
    time, so that the start stays put while somebody types.

    Holds:
        as_recomputed: the logits are those of reading the line, or its window, from nothing.
    """

    def __init__(self, model: Any, *, bos_id: int | None, room: int) -> None:
        self._model, self._bos_id, self._room = model, bos_id, room
        self._device = device_of(model)
        carries_state = bool(getattr(model.config, "is_recurrent", False))
        self._window = None if carries_state else checked_window(None, model.config)
        takes_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if takes_last else {}
        self._lines: OrderedDict[tuple[int, ...], _Read] = OrderedDict()

    def begin(self, ids: list[int]) -> "Reading | None":
        """A reading that stands behind `ids`; None where there is nothing to predict from."""
        if not (inputs := self._inputs(ids)):
            return None
        state, logits_V = self._read_line(tuple(inputs))
        return Reading(self, inputs, deepcopy(state), logits_V)

    def _inputs(self, ids: list[int]) -> list[int]:
        inputs = ids if self._bos_id is None else [self._bos_id, *ids]
        if self._window is None or len(inputs) + self._room <= self._window:
            return list(inputs)
        half = max(1, self._window // 2)
        over = len(inputs) + self._room - self._window
        start = -(-over // half) * half
        return inputs[min(start, len(inputs) - 1) :]

    def _read_line(self, line: tuple[int, ...]) -> _Read:
        if line in self._lines:
            self._lines.move_to_end(line)
            return self._lines[line]
        known = max((k for k in self._lines if line[: len(k)] == k), key=len, default=())
        state = deepcopy(self._lines[known][0]) if known else None
        self._lines[line] = self.read(list(line), len(known), state)
        if len(self._lines) > LINES_KEPT:
            self._lines.popitem(last=False)
        return self._lines[line]

    def read(self, inputs: list[int], num_known: int, state: Any) -> _Read:
        """Read on behind `num_known` tokens; a model without a state reads everything again."""
        fresh = inputs if state is None else inputs[num_known:]
        ids_1T = torch.tensor([fresh], device=self._device)
        with torch.inference_mode(), full_precision(), evaluating(self._model):
            output = self._model(
                input_ids=ids_1T, past_key_values=state, use_cache=True, **self._last_only
            )
        logits_V = output.logits[0, -1].float()
        if torch.isnan(logits_V).any():
            raise UsageError(
                "The model's predictions are NaN, so there is nothing to show. Take an earlier "
                "snapshot, or train again with a lower rate."
            )
        return getattr(output, "past_key_values", None), logits_V

    def is_full(self, num_inputs: int) -> bool:
        return self._window is not None and num_inputs >= self._window


class Reading:
    """A line being written: the logits for its next token, None once the window is full."""

    def __init__(self, memory: Memory, inputs: list[int], state: Any, logits_V: Tensor) -> None:
        self._memory, self._inputs, self._state = memory, inputs, state
        self.logits_V: Tensor | None = logits_V

    def go_on(self, token: int) -> None:
        """Write `token`."""
        if self._memory.is_full(len(self._inputs)):
            self.logits_V = None
            return
        self._inputs.append(token)
        num_known = len(self._inputs) - 1
        self._state, self.logits_V = self._memory.read(self._inputs, num_known, self._state)
