"""Processes of ours beside this one, spoken to through pipes.

Python runs one thread at a time. Reading words, or handing strings to a tokenizer and making arrays of
its answers, keeps everything else waiting, such as a scan; children do it side by side.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import IO, Any, TypeVar

from tightlip.core.progress import log

Item = TypeVar("Item")
Result = TypeVar("Result")

# Of memory that one takes at most, by and large: its items are up to 8 MB.
CHILD_BYTES = 220_000_000
ALONE_SECONDS = 2.0  # of work, for which beginning them does not pay
_WAITING = 2  # items for each child, so that it need not wait for the next


def begin_child(module: str, **environment: str) -> subprocess.Popen[bytes]:
    """This Python, running a module of ours.

    It ends when its input does, so it need not hear of Ctrl-C. What it answers, to
    `answers_to_parent`, is read from its `stdout`; what anything prints there goes nowhere.

    Holds:
        same_modules: it imports what this process would, and nothing from the folder that somebody
            stands in. That may be a model's, and its `jinja2.py` would be run.
    """
    # An empty entry, which interactive Python has, is the folder one stands in.
    folders = os.pathsep.join(filter(None, sys.path))
    answers, given = os.pipe()
    stream = os.fdopen(answers, "rb")
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(given,),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": folders, **environment},
        )
    except BaseException:
        stream.close()
        raise
    finally:
        os.close(given)
    child.stdout = stream
    return child


def answers_to_parent() -> IO[bytes]:
    """In a child: where its answers go."""
    return os.fdopen(int(sys.argv[1]), "wb")


def pickled(function: Callable[..., Any]) -> bytes | None:
    """As another process can read it; None of what must stay in this one."""
    try:
        return pickle.dumps(function)
    except Exception:  # whatever a library raises for what it cannot hand on
        return None


def map_in_children(
    function: Callable[[Item], Result], given: bytes, items: Iterable[Item], num_children: int
) -> Iterator[tuple[Item, Result]]:
    """Each item with what the function makes of it, in order; `given` is the function, pickled.

    Holds:
        same: results and errors are those of this process, also where a child dies or cannot be begun.
        bounded: a few items for each child are in memory.
    """
    children: list[_Child] = []
    waiting = deque[tuple[Item, Future[Result]]]()

    def next_result() -> tuple[Item, Result]:
        item, result = waiting.popleft()
        try:
            return item, result.result()
        except _NotDone:
            return item, function(item)

    with ExitStack() as stack:
        for number, item in enumerate(items):
            if number < num_children:
                with suppress(OSError, RuntimeError):  # as many as the system has room for
                    children.append(stack.enter_context(_Child(given)))
            if not children:
                yield item, function(item)
                continue
            waiting.append((item, children[number % len(children)].apply(item)))
            if len(waiting) >= _WAITING * len(children):
                yield next_result()
        while waiting:
            yield next_result()


class _NotDone(Exception):
    """The child is gone, as where memory ran out, or the function raised an error there."""


class _Child:
    """A process that applies a function to one item after the other, and a thread that waits for it."""

    def __init__(self, given: bytes) -> None:
        # One thread of a tokenizer's: the children are several.
        self._process = begin_child(__name__, TOKENIZERS_PARALLELISM="false")
        self._thread = ThreadPoolExecutor(1)
        self._begun = self._thread.submit(self._send, given)
        self._has_ended = False

    def apply(self, item: Any) -> Future[Any]:
        return self._thread.submit(self._result, item)

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended = True  # as it should
        self._process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._process.communicate()

    def _result(self, item: Any) -> Any:
        assert self._process.stdout is not None
        if self._has_ended:
            raise _NotDone
        try:
            self._begun.result()
            self._send(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
            is_done, result = pickle.load(self._process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            if not self._has_ended:
                log.warning("A process that read texts has ended. Its part is done in this one.")
            self._has_ended = True
            raise _NotDone from error
        if not is_done:
            raise _NotDone
        return result

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()


def _serve() -> None:
    asked, answers = sys.stdin.buffer, answers_to_parent()
    function: Any = pickle.load(asked)
    while True:
        try:
            item = pickle.load(asked)
        except EOFError:  # whoever asked is gone
            return
        try:
            answer = True, function(item)
        except Exception:  # whoever asked meets it too
            answer = False, None
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    _serve()
