"""Ctrl-C between two steps, never within one: half an update must not be saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.wanted = False


@contextmanager
def held_interrupts() -> Iterator[Interruption]:
    """Note the first Ctrl-C instead of raising it; a second one is raised at once.

    Only the main thread hears signals; elsewhere nothing changes.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interruption.wanted:
            raise KeyboardInterrupt
        interruption.wanted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
