"""Long work: what it would take, told before it starts; bars for whoever watches, lines for its log,
and Ctrl-C only between two steps."""

import logging
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tightlip.core.files import OWNER_FILE, store_address

log = logging.getLogger("tightlip")
# Characters that command a terminal, and those that turn the direction of what follows.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str, *, on_one_line: bool = True) -> str:
    """`text` as it may be shown: a corpus, a name or a path may hold any character.

    >>> harmless("a\\x1b[2Jb")
    'a\ufffd[2Jb'
    """
    shown = _COMMANDS.sub("\ufffd", text)
    return shown.replace("\n", "\ufffd") if on_one_line else shown


def terminal(*, stderr: bool = False) -> Any:
    """A rich console to which what it prints is text: no markup in it, and nothing that commands."""
    from rich.console import Console
    from rich.segment import Segment

    class Terminal(Console):
        def _render_buffer(self, buffer: Any) -> str:
            # The one place that all output passes, tables and bars included; a control is rich's own.
            return super()._render_buffer(
                part
                if part.control
                else Segment(harmless(part.text, on_one_line=False), part.style)
                for part in buffer
            )

    return Terminal(stderr=stderr, markup=False, highlight=False, emoji=False)


class HarmlessLines(logging.Formatter):
    """What is logged, as it may be shown."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record), on_one_line=False)


class Task:
    """One bar: move it on by `amount`, put a few words beside it, leave it as full as it is.

    This one is silent, for work that nobody watches.
    """

    def advance(self, amount: float = 1) -> None: ...
    def note(self, words: str) -> None: ...
    def end_here(self) -> None: ...


class _Bar(Task):
    def __init__(self, progress: Any, task_id: Any) -> None:
        self._progress, self._task_id = progress, task_id
        self.is_whole = True

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task_id, amount)

    def note(self, words: str) -> None:
        self._progress.update(self._task_id, words=words)

    def end_here(self) -> None:
        self.is_whole = False


_shown: ContextVar[Any] = ContextVar("shown_progress", default=None)
_inside: ContextVar[bool] = ContextVar("inside_a_task", default=False)
_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds_of_tasks", default=None)


@contextmanager
def _holding(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Inside, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def shown_progress() -> Iterator[None]:
    """Draw the bars of everything inside on standard error."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<26}", markup=False),
        BarColumn(bar_width=28),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[words]}", style="dim", markup=False),
    )
    progress = Progress(*columns, console=terminal(stderr=True))
    with progress, _holding(_shown, progress):
        yield


@contextmanager
def task(description: str, total: float | None) -> Iterator[Task]:
    """A bar named `description` that is full at `total`. Inside another task it goes when done."""
    is_part, seconds, start = _inside.get(), _seconds.get(), time.perf_counter()
    try:
        with _holding(_inside, True), _bar(description, total, is_part) as bar:
            yield bar
    finally:
        if seconds is not None and not is_part:
            seconds[description] = seconds.get(description, 0) + time.perf_counter() - start


@contextmanager
def _bar(description: str, total: float | None, is_part: bool) -> Iterator[Task]:
    if (progress := _shown.get()) is None:
        yield Task()
        return
    task_id = progress.add_task(("  " if is_part else "") + description, total=total, words="")
    bar = _Bar(progress, task_id)
    try:
        yield bar
        full = total or 1  # how much there is to read is often known only at the end
        if bar.is_whole:
            progress.update(task_id, completed=full, total=full)
        progress.stop_task(task_id)
    finally:
        if is_part:
            progress.remove_task(task_id)


@contextmanager
def timed_tasks() -> Iterator[dict[str, float]]:
    """Seconds of every task inside by its description; what runs inside another counts to that."""
    seconds: dict[str, float] = {}
    with _holding(_seconds, seconds), _holding(_inside, False):
        yield seconds


@contextmanager
def unseen() -> Iterator[None]:
    """Draw no bar and log to nobody but files opened inside: what happens here must not be told."""
    propagates, handlers = log.propagate, log.handlers
    log.propagate, log.handlers = False, [logging.NullHandler()]
    try:
        with _holding(_shown, None):
            yield
    finally:
        log.propagate, log.handlers = propagates, handlers


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Append everything logged inside to `path` (owner only), made when the first line comes; on a
    store there is no log."""
    if store_address(path) is not None:
        yield
        return
    handler = _WhenNeeded(path, encoding="utf-8", delay=True)
    handler.setFormatter(HarmlessLines("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    before = log.level
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
        handler.close()


class _WhenNeeded(logging.FileHandler):
    """A file that is not there before its first line, nor where its folder never came to be."""

    def _open(self):  # type: ignore[no-untyped-def]
        descriptor = os.open(
            self.baseFilename, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NONBLOCK, OWNER_FILE
        )
        return os.fdopen(descriptor, "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        if Path(self.baseFilename).parent.is_dir():
            with suppress(OSError):  # a pipe that nobody reads, in the place of the log
                super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that finds no room is left out: the files that count say that the disk is full."""

    def close(self) -> None:
        with suppress(OSError):  # the same line, tried once more
            super().close()


@dataclass
class Interruption:
    """Whether somebody asked to stop."""

    wanted: bool = False


@contextmanager
def held_interrupts(*, second_raises: bool = True) -> Iterator[Interruption]:
    """Note the first Ctrl-C instead of raising it; a second one is raised at once, if it may.

    Half an update must not be saved, so whoever works looks between two steps. Only the main
    thread hears signals; elsewhere nothing changes.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interruption.wanted and second_raises:
            raise KeyboardInterrupt
        interruption.wanted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def stopped_after(step: int, num_steps: int) -> KeyboardInterrupt:
    """What a training that was asked to stop, and saved itself, logs and ends with."""
    words = f"Stopped after step {step} of {num_steps}. Give the same command again to go on."
    log.info(words)
    return KeyboardInterrupt(words)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds by stage, memory and disk in bytes; None where something cannot be known.

    `disk_bytes` is what stays, `passing_disk_bytes` what is there only while the command runs.
    """

    corpus: dict[str, Any]
    stages: dict[str, float]
    memory_bytes: int | None
    gpu_memory_bytes: int | None
    disk_bytes: int | None
    passing_disk_bytes: int | None
    free_disk_bytes: int
    machines: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    @property
    def machine_hours(self) -> float:
        return self.seconds * self.machines / 3600

    def record(self) -> dict[str, Any]:
        """Everything, as --json prints it."""
        return {
            **asdict(self),
            "stages": {name: round(seconds, 3) for name, seconds in self.stages.items()},
            "seconds": round(self.seconds, 3),
            "machine_hours": self.machine_hours,
        }

    def lines(self) -> Iterator[str]:
        """The same for people."""
        for name, value in self.corpus.items():
            yield f"{name.replace('_', ' '):26} {value:>14,}"
        yield ""
        yield from (f"{name:26} {duration(seconds):>14}" for name, seconds in self.stages.items())
        yield f"{'in all':26} {duration(self.seconds):>14}"
        yield ""
        sizes = {
            "memory, at most": self.memory_bytes,
            "memory of the GPU": self.gpu_memory_bytes,
            "disk, to stay": self.disk_bytes,
            "disk, while it runs": self.passing_disk_bytes,
            "disk, free": self.free_disk_bytes,
        }
        for name, size in sizes.items():
            if size is not None:
                yield f"{name:26} {bytes_in_words(size):>14}"
        if self.machines > 1:
            yield f"{f'hours of {self.machines} machines':26} {self.machine_hours:>14,.2f}"
        yield from ("", *self.notes, "This was a dry run: nothing was written or charged.")


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(0.42), duration(75), duration(7380), duration(200_000)
    ('0.4 s', '75 s', '2 h 3 min', '56 h')
    """
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 1440 else f"{minutes / 60:,.0f} h"


def bytes_in_words(num_bytes: int) -> str:
    """Bytes as people read them.

    >>> bytes_in_words(2_500_000_000), bytes_in_words(4_300_000), bytes_in_words(812)
    ('2.50 GB', '4.30 MB', '0.81 KB')
    """
    unit = next((each for each in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= each[0]), (1e3, "KB"))
    return f"{num_bytes / unit[0]:,.2f} {unit[1]}"


def most_memory() -> int:
    """Bytes that this process has held at most so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def most_gpu_memory(device: Any) -> int | None:
    """Bytes that torch has taken of the GPU at most so far; None without one."""
    import torch

    return torch.cuda.max_memory_reserved() if torch.device(device).type == "cuda" else None


def free_disk(out: Path) -> int:
    """Bytes free where `out` is, or would be."""
    there = next(each for each in (out, *out.resolve().parents) if each.exists())
    return shutil.disk_usage(there).free


def size_of(folder: Path, pattern: str = "**/*") -> int:
    """Bytes of all files under `folder`, or of those that a pattern names."""
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())
