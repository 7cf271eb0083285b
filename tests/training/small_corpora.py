"""Prepared corpora of a few hundred tokens."""

import random

from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "kite", "lark"]


def documents(num_documents=60, num_users=6, longest=14, seed=0):
    """Each user repeats the alphabet from a place of their own: there is something to learn."""
    draw = random.Random(seed)
    rows = []
    for number in range(num_documents):
        start, length = draw.randrange(len(WORDS)), draw.randint(1, longest)
        words = [WORDS[(start + place) % len(WORDS)] for place in range(length)]
        rows.append({"user": f"user {number % num_users}", "text": " ".join(words)})
    return rows


def other_peoples_documents(**settings):
    """The same words in another order: no five of them stand together in `documents`."""
    rows = documents(**{"seed": 9, **settings})
    rows = [row for row in rows if len(row["text"].split()) > 1]
    return [row | {"text": " ".join(reversed(row["text"].split()))} for row in rows]


def prepared(folder, *, split="document", **settings):
    return prepare(documents(**settings), folder, PrepareConfig(split=split))


class HandSetClock:
    """A clock for the training loop that only moves when told, so that no test waits or races."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


def hand_set_clock(monkeypatch, *, seconds_per_step):
    """Give the loop a clock of its own on which each step takes `seconds_per_step`."""
    from tightlip.training import loop

    clock, plain = HandSetClock(), loop.Training.take_step
    monkeypatch.setattr(loop, "time", clock)

    def timed(self):
        clock.pass_by(seconds_per_step)
        plain(self)

    monkeypatch.setattr(loop.Training, "take_step", timed)
    return clock
