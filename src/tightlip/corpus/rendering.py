"""Chats as the text that a model was shown, by the tokenizer's own template, in a child process.

A template is a program that came with somebody's model. It runs where it can do no harm: in a
sandbox of Jinja's, in one child process with little memory, which is killed when it takes too long.
An alarm in our own process would not do: it let `'a' * 2e9` run for 8 seconds and take 3.9 GB.
"""

import atexit
import json
import os
import resource
import select
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from tightlip.core.children import answers_to_parent, begin_child
from tightlip.core.errors import UsageError

MOST_SECONDS = 10.0  # for a row
MOST_BYTES = 16_000_000  # of its text
MOST_MEMORY = 1_000_000_000  # beyond what the child has when it begins
_START_SECONDS = 120.0  # on a cold disk; transformers is imported
_ENDED = (TimeoutError, EOFError, BrokenPipeError, ValueError)  # what `_receive` and `_send` raise
# A child that nobody needs at the moment, and the process whose it is: importing takes it longer than
# most corpora do.
_spare: list[tuple[int, subprocess.Popen[bytes]]] = []


class TemplateError(UsageError):
    """A template did not make a text of a chat."""


class Renderer:
    """A child process that renders one chat after the other; a new one is begun after a death.

    One that has answered all that it was asked serves this process' next Renderer too.

    Holds:
        bounded: no template takes more than MOST_SECONDS, MOST_BYTES of output or MOST_MEMORY.
        same_every_day: what a template asks the clock for is `date`, whenever it runs.
    """

    def __init__(self, template: str, *, date: str, values: dict[str, Any]) -> None:
        """`values` are what a template may ask for beside the chat: bos_token and the like."""
        self._begin = {"template": template, "date": date, "values": values}
        self._child: subprocess.Popen[bytes] | None = None
        self._has_answered = False  # the last that it was asked, and well

    def __enter__(self) -> "Renderer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None and self._has_answered and not _spare:
            _spare.append((os.getpid(), self._child))
            self._child = None
        self._end()

    def render(self, messages: list[dict[str, Any]], **how: Any) -> tuple[str, list[list[int]]]:
        """The chat as text, and where its template says that a model would write.

        `how` may hold `tools`, `add_generation_prompt` and `generated` (whether to ask where).
        """
        if self._child is None:
            self._start()
        self._has_answered = False
        try:
            answer = self._answer({"messages": messages, **how})
        except _ENDED as error:
            raise TemplateError(f"makes the chat template {_why(error)}") from error
        if "error" in answer:
            raise TemplateError(f"makes the chat template fail ({answer['error']})")
        self._has_answered = True
        return answer["text"], answer["generated"]

    def _start(self) -> None:
        spare = _take_spare()
        self._child = spare or begin_child(__name__)
        try:
            if spare is None:
                self._answer(None, _START_SECONDS)  # it has imported what it needs
            answer = self._answer(self._begin)
        except _ENDED as error:
            raise UsageError(f"The chat template cannot be read: it {_why(error)}.") from error
        if "error" in answer:
            self._end()
            raise UsageError(
                f"The chat template cannot be read ({answer['error']}). Give another: --chat-template FILE"
            )

    def _answer(self, message: Any, seconds: float | None = None) -> Any:
        """What the child says to a message, if there is one; a child that fails to say it is ended."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            if message is not None:
                _send(self._child.stdin, message)
            return _receive(self._child.stdout, seconds or MOST_SECONDS)
        except _ENDED:
            self._end()
            raise

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def _take_spare() -> subprocess.Popen[bytes] | None:
    """This process' own: a fork must not talk to its parent's."""
    while _spare:
        owner, child = _spare.pop()
        if owner == os.getpid() and child.poll() is None:
            return child
    return None


@atexit.register
def _end_spare() -> None:
    if child := _take_spare():
        child.kill()
        child.communicate()


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"run for more than {MOST_SECONDS:g} seconds"
    if isinstance(error, ValueError):
        return f"write more than {MOST_BYTES:,} bytes"
    return "end its process, as one that takes too much memory does"


def _send(stream: IO[bytes], message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")  # which JSON holds nowhere itself
    stream.flush()


def _receive(stream: IO[bytes], seconds: float) -> Any:
    """A message of the child's; TimeoutError, EOFError, or ValueError where it is too long."""
    data, end = bytearray(), time.monotonic() + seconds
    while not data.endswith(b"\n"):
        if not select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError
        if not (part := os.read(stream.fileno(), 1 << 20)):
            raise EOFError
        data += part
        if len(data) > 2 * MOST_BYTES:  # JSON may take more than the text that it holds
            raise ValueError("too long")
    return json.loads(data)


# The child


def _serve() -> None:
    import transformers.utils.chat_template_utils  # noqa: F401 - before memory is counted

    answers = answers_to_parent()
    if sys.platform == "linux":  # elsewhere the clock alone holds it
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _send(answers, {})
    template = ""
    for request in map(json.loads, sys.stdin.buffer):
        try:
            if "template" in request:  # of another Renderer
                template, answer = request["template"], {}
                render = _renderer(request)  # Jinja works out what is constant as it compiles
            else:
                text, generated = render(**request)
                if len(text) > MOST_BYTES:
                    raise ValueError(f"it writes more than {MOST_BYTES:,} bytes")
                answer = {"text": text, "generated": generated}
        except Exception as error:
            answer = {"error": _in_a_line(error, template)}
        _send(answers, answer)


def _in_a_line(error: Exception, template: str) -> str:
    """What kind of error; and its words where the template itself holds them, or before any chat was
    shown: others may quote one."""
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError) or (str(error) and str(error) in template):
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return type(error).__name__


def _renderer(begin: dict[str, Any]) -> Any:
    from transformers.utils import chat_template_utils as templates

    day = datetime.fromisoformat(begin["date"])

    class FixedClock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return day

    templates.datetime = FixedClock  # type: ignore[attr-defined]  # what strftime_now asks
    templates._compile_jinja_template(begin["template"])

    def render(
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        generated: bool = False,
    ) -> tuple[str, list[list[int]]]:
        texts, places = templates.render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=begin["template"],
            return_assistant_tokens_mask=generated,
            add_generation_prompt=add_generation_prompt,
            **begin["values"],
        )
        return texts[0], [list(place) for place in places[0]] if generated else []

    return render


if __name__ == "__main__":
    _serve()
