"""The terminal of `tightlip tab`: ghost text behind the cursor, marks in the line and below it.

The model works in a thread of its own. A keystroke waits a moment before it asks, so that fast
typing asks once; what was asked for another text is dropped, at the latest after one token.
"""

import asyncio
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from prompt_toolkit.application import Application, get_app
from prompt_toolkit.auto_suggest import Suggestion
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, is_done
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import BufferControl, FormattedTextControl, HSplit, Layout, Window
from prompt_toolkit.layout.processors import AppendAutoSuggestion, BeforeInput, ConditionalProcessor
from prompt_toolkit.lexers import Lexer
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

import tightlip
from tightlip.audit.settings import TabConfig
from tightlip.cli.flags import Model, OnDevice, path_flag, with_settings
from tightlip.core.errors import TightlipError, UsageError
from tightlip.core.figures import counted
from tightlip.core.files import store_address
from tightlip.core.progress import harmless
from tightlip.scan.options import ModelSettings

if TYPE_CHECKING:
    from tightlip.audit.tab import Mark, Tab
    from tightlip.audit.tab_completion import Ghost

KEYS = "TAB takes the grey text, → one word of it. Enter: a new line. Esc: quit."
PROMPT = "> "
PAUSE_SECONDS = 0.03
MOST_MARKS_SHOWN = 4


@with_settings(
    *(OnDevice, TabConfig, ModelSettings),
    report=path_flag("REPORT", "The folder of a tightlip audit. For a run: RUN/audit, if there."),
)
def tab(
    model: Model,
    given: dict[str, Any],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Complete this and exit. May be given again.", metavar="TEXT"),
    ] = None,
) -> None:
    """Type, press TAB, and see whose words the model completes."""
    report = given.get("report")
    if report is not None and store_address(report) is None and not Path(report).is_dir():
        raise UsageError(f"--report {report} is not a folder. Give one that tightlip audit wrote.")
    if is_terminal := prompt is None and in_a_terminal():
        print("Reading the model…", end="\r", file=sys.stderr, flush=True)
    opened = tightlip.open_tab(model, **given)
    if is_terminal:
        converse(opened, watched(opened))
        return
    for note in opened.notes:
        print(f"tightlip: {harmless(note)}", file=sys.stderr)
    for line in prompt if prompt is not None else typed_lines():
        for output in lines_of(opened, line.rstrip("\r\n")):
            print(harmless(output), flush=True)


def in_a_terminal() -> bool:
    """Whether somebody types and sees; a dumb terminal cannot move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def typed_lines() -> Iterator[str]:
    """Standard input line by line, whatever its bytes."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    yield from sys.stdin


def watched(opened: "Tab") -> list[str]:
    """What is watched for, or why nothing is."""
    if opened.unique is None:
        return list(opened.notes)
    if len(opened.unique) == 0:
        return ["The report has no unique sequence: nothing will be marked."]
    num, users = counted(len(opened.unique), "unique sequence"), opened.unique.num_users
    return [f"Watching for {num} of {counted(users, 'user')}."]


def lines_of(opened: "Tab", typed: str) -> list[str]:
    """A line as the model completes it, how sure it was, and whose words it holds."""
    ghost, marks = opened.completed(typed)
    if not ghost.text:
        return [typed, "    nothing: the model would stop here"]
    sureness = f"perplexity {ghost.perplexity:.3g}, least certain token {ghost.confidence:.0%}"
    return [
        typed + ghost.text,
        f"    completed: “{ghost.text.strip()}” ({sureness})",
        *(f"    {mark.sentence()}" for mark in marks),
    ]


class Line:
    """The line's text, and which of its characters the model wrote.

    Holds:
        edits: what is neither inserted nor deleted keeps its writer.
    """

    def __init__(self) -> None:
        self.text = ""
        self.accepted: list[bool] = []

    def accept(self, words: str) -> None:
        """The model's words, put behind the line."""
        self.text += words
        self.accepted += [True] * len(words)

    def become(self, text: str) -> None:
        """The line after an edit: what changed between its ends was typed."""
        before = num_shared(self.text, text)
        room = min(len(self.text), len(text)) - before
        behind = min(room, num_shared(self.text[::-1], text[::-1]))
        tail = self.accepted[len(self.accepted) - behind :]
        typed = [False] * (len(text) - before - behind)
        self.accepted = self.accepted[:before] + typed + tail
        self.text = text


def num_shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


class Conversation(Lexer):
    """One prompt after another: what is typed, suggested, accepted and marked."""

    def __init__(self, tab: "Tab") -> None:
        from tightlip.audit.tab_completion import Ghost  # with torch

        self._tab, self._line, self._nothing = tab, Line(), Ghost()
        self.buffer = Buffer(
            multiline=False,
            history=InMemoryHistory(),
            accept_handler=self._enter,
            on_text_changed=self._changed,
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tab")
        self._shown = ("", self._nothing)
        self._marked: tuple[str, list[bool], list[Mark]] = ("", [], [])
        self._open = True

    def _enter(self, buffer: Buffer) -> bool:
        get_app().exit(result=buffer.text)
        return True  # the text stays until the line is drawn for the last time

    def new_line(self) -> None:
        """Begin anew: a line is a document of its own."""
        self.buffer.reset()
        self._line, self._shown = Line(), ("", self._nothing)

    def _changed(self, buffer: Buffer) -> None:
        """The text is another: forget the ghost, and ask for a new one in a moment."""
        self._line.become(buffer.text)
        buffer.suggestion = None
        if rest := self._rest_of_shown(buffer.text):
            buffer.suggestion = Suggestion(rest)
        elif buffer.text.strip():
            get_app().create_background_task(self._suggest(buffer, buffer.text))

    def _rest_of_shown(self, text: str) -> str:
        """What is left of the ghost when somebody types along with it."""
        typed, ghost = self._shown
        whole = typed + ghost.text
        types_along = typed and text.startswith(typed) and whole.startswith(text)
        return whole[len(text) :] if types_along else ""

    async def _suggest(self, buffer: Buffer, text: str) -> None:
        await asyncio.sleep(PAUSE_SECONDS)
        work = self._pool.submit(self._ghost, text, lambda: self._open and buffer.text == text)
        try:
            ghost = await asyncio.wrap_future(work)
        except TightlipError as error:
            get_app().exit(exception=error)
            return
        if buffer.text == text and ghost.text:
            self._shown = (text, ghost)
            buffer.suggestion = Suggestion(ghost.text)
            get_app().invalidate()

    def _ghost(self, text: str, wanted: Callable[[], bool]) -> "Ghost":
        return self._tab.complete(text, wanted=wanted) if wanted() else self._nothing

    def accept(self, buffer: Buffer, words: str) -> None:
        """Take these words of the ghost."""
        self._line.accept(words)
        buffer.insert_text(words)

    def marks(self) -> list["Mark"]:
        """Whose unique texts the line holds, worked out once for each text."""
        text, accepted, marks = self._marked
        if (text, accepted) != (self._line.text, self._line.accepted):
            marks = self._tab.marks(self._line.text, self._line.accepted)
            self._marked = (self._line.text, list(self._line.accepted), marks)
        return marks

    def lex_document(self, document: Document) -> Callable[[int], StyleAndTextTuples]:
        """The line with its marks; only ever one line."""
        marks = self.marks() if document.text == self._line.text else []
        styles = [""] * len(document.text)
        for mark in marks:
            look = "class:leak" if mark.is_whole else "class:begun"
            styles[mark.start : mark.end] = [look] * (mark.end - mark.start)
        return lambda number: list(zip(styles, document.text, strict=True))

    def below(self) -> StyleAndTextTuples:
        """The line under the prompt: whose words stand above it, or how sure the ghost is."""
        if marks := self.marks():
            return sentences(marks)
        typed, ghost = self._shown
        if not ghost.text or typed != self._line.text or is_done():
            return []
        return [("class:hint", f"  perplexity {ghost.perplexity:.3g} (1: certain)")]

    def close(self) -> None:
        """Stop the work under way; it ends with the token it is at."""
        self._open = False
        self._pool.shutdown(wait=False, cancel_futures=True)


def sentences(marks: list["Mark"]) -> StyleAndTextTuples:
    """Whose words these are, cut into lines between words as the terminal would not."""
    lines = [mark.sentence() for mark in marks[:MOST_MARKS_SHOWN]]
    if len(marks) > MOST_MARKS_SHOWN:
        lines.append(f"And {len(marks) - MOST_MARKS_SHOWN} more.")
    width = max(20, get_app().output.get_size().columns)
    return [("class:whose", "\n".join(textwrap.fill(line, width) for line in lines))]


def keys(conversation: Conversation) -> KeyBindings:
    """TAB, right arrow and the ways out; everything else edits as usual."""
    bindings = KeyBindings()

    @Condition
    def has_ghost() -> bool:
        buffer = get_app().current_buffer
        return bool(buffer.suggestion) and buffer.document.is_cursor_at_the_end

    @bindings.add("tab", filter=has_ghost)
    @bindings.add("c-e", filter=has_ghost)
    def _all(event: KeyPressEvent) -> None:
        assert event.current_buffer.suggestion is not None
        conversation.accept(event.current_buffer, event.current_buffer.suggestion.text)

    @bindings.add("right", filter=has_ghost)
    @bindings.add("c-f", filter=has_ghost)
    def _word(event: KeyPressEvent) -> None:
        assert event.current_buffer.suggestion is not None
        first = re.match(r"\s*\S*", event.current_buffer.suggestion.text)
        conversation.accept(event.current_buffer, first[0] if first else "")

    @bindings.add("tab", filter=~has_ghost)
    def _nothing(event: KeyPressEvent) -> None:
        """No ghost, and a tab in the text would be somebody's slip."""

    @bindings.add(Keys.BracketedPaste)
    def _paste(event: KeyPressEvent) -> None:
        """Several lines at once become one."""
        event.current_buffer.insert_text(re.sub(r"\s*[\r\n]+\s*", " ", event.data))

    @bindings.add("escape", eager=True)
    @bindings.add("c-c")
    @bindings.add("c-d")
    def _quit(event: KeyPressEvent) -> None:
        event.app.exit(exception=EOFError)

    return bindings


def style() -> Style:
    """Grey ghosts, leaks red and underlined; without colours a ghost is dim instead."""
    grey, red = ("dim", "") if os.environ.get("NO_COLOR") else ("ansibrightblack", "ansired")
    looks = {"leak": f"{red} bold underline", "begun": f"{red} underline", "whose": red}
    return Style.from_dict({"auto-suggestion": grey, "hint": grey, **looks})


def screen(conversation: Conversation, terminal: Output) -> Application[str]:
    """The prompt, and what there is to say about its line right below it."""
    ghost = ConditionalProcessor(AppendAutoSuggestion(), ~is_done)
    field = BufferControl(
        conversation.buffer, lexer=conversation, input_processors=[BeforeInput(PROMPT), ghost]
    )
    below = FormattedTextControl(conversation.below)
    parts = [Window(part, wrap_lines=True, dont_extend_height=True) for part in (field, below)]
    application: Application[str] = Application(
        Layout(HSplit(parts)),
        key_bindings=keys(conversation),
        style=style(),
        color_depth=ColorDepth.from_env(),
        output=terminal,
    )
    application.ttimeoutlen = 0.05  # Esc alone; an arrow's escape sequence comes in one go
    return application


def this_terminal() -> Output:
    """This terminal, never asked where its cursor is: some do not answer, and we need not know."""
    terminal = Vt100_Output.from_pty(sys.stdout, term=os.environ.get("TERM"))
    terminal.enable_cpr = False
    return terminal


def converse(tab: "Tab", opening: list[str], terminal: Output | None = None) -> None:
    """Prompt until somebody quits. Nothing that is typed is written to disk."""
    print("\n".join([KEYS, *opening]), flush=True)
    conversation = Conversation(tab)
    try:
        while True:
            screen(conversation, terminal or this_terminal()).run()
            conversation.new_line()
    except EOFError:
        return
    finally:
        conversation.close()
