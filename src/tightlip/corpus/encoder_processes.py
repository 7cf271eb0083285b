"""Texts encoded in processes of their own, where a machine has cores to spare.

A tokenizer's Rust code runs on every core, but handing it strings and making arrays of its answers
holds Python's lock. Of short documents that takes as long as one core's encoding, and whatever else
this process does meanwhile, such as scanning, waits for it.
"""

import os
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from typing import Any

from tightlip.core.children import begin_child
from tightlip.core.progress import log
from tightlip.corpus.encoding import Encoded, Encoder
from tightlip.corpus.tables import DocumentBatch

FROM_CHARACTERS = 8_000_000  # two seconds of encoding: for less, starting processes does not pay
MOST_PROCESSES = 8
_WAITING = 2  # batches for each process


def encoded_batches(
    batches: Iterable[DocumentBatch], encoder: Encoder
) -> Iterator[tuple[DocumentBatch, Encoded]]:
    """Each batch with the tokens of its texts, in order.

    Holds:
        same: they are what `encoder` makes of the texts here, also where a process dies.
        bounded: a few batches for each process are in memory.
    """
    num_characters, remaining = 0, iter(batches)
    for batch in remaining:
        if num_characters >= FROM_CHARACTERS and num_processes() > 1 and (state := _state(encoder)):
            yield from _encoded_elsewhere(chain([batch], remaining), encoder, state)
            return
        yield batch, encoder.end_to_end(batch.texts)
        num_characters += sum(map(len, batch.texts))


def num_processes() -> int:
    """Half of the cores: the others read, write and scan."""
    return min(MOST_PROCESSES, (os.cpu_count() or 1) // 2)


def _state(encoder: Encoder) -> bytes | None:
    """The encoder as another process can read it; None of one that runs Python code of its own."""
    try:
        return pickle.dumps(encoder) if encoder.is_fast else None
    except Exception:  # tokenizers has no kind of its own for it
        return None


def _encoded_elsewhere(
    batches: Iterable[DocumentBatch], encoder: Encoder, state: bytes
) -> Iterator[tuple[DocumentBatch, Encoded]]:
    processes: list[_EncoderProcess] = []
    waiting = deque[tuple[DocumentBatch, Future[Encoded]]]()

    def next_answer() -> tuple[DocumentBatch, Encoded]:
        batch, answer = waiting.popleft()
        try:
            return batch, answer.result()
        except _Ended:
            return batch, encoder.end_to_end(batch.texts)

    with ExitStack() as stack:
        for number, batch in enumerate(batches):
            if number < num_processes():
                processes.append(stack.enter_context(_EncoderProcess(state)))
            waiting.append((batch, processes[number % len(processes)].encode(batch.texts)))
            if len(waiting) == _WAITING * num_processes():
                yield next_answer()
        while waiting:
            yield next_answer()


class _Ended(Exception):
    """The process is gone: somebody killed it, or memory ran out."""


class _EncoderProcess:
    """A process that encodes one list of texts after the other, and a thread that waits for it."""

    def __init__(self, state: bytes) -> None:
        # Each encodes on one core; they are several.
        self._process = begin_child(__name__, TOKENIZERS_PARALLELISM="false")
        self._thread = ThreadPoolExecutor(1)
        self._begun = self._thread.submit(self._send, state)
        self._has_ended = False

    def encode(self, texts: list[str]) -> Future[Encoded]:
        return self._thread.submit(self._answer, texts)

    def __enter__(self) -> "_EncoderProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._process.communicate()

    def _answer(self, texts: list[str]) -> Encoded:
        assert self._process.stdout is not None
        try:
            self._begun.result()
            self._send(pickle.dumps(texts))
            return Encoded(*pickle.load(self._process.stdout))
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            if not self._has_ended:
                log.warning(
                    "A process that encoded texts has ended. Its texts are encoded in this one."
                )
            self._has_ended = True
            raise _Ended from error

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()


def _serve() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    encoder: Any = pickle.load(requests)
    while True:
        try:
            texts = pickle.load(requests)
        except EOFError:  # whoever asked is gone
            return
        pickle.dump(tuple(encoder.end_to_end(texts)), answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    _serve()
