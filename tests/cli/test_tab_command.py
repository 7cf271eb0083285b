"""`tightlip tab` in a real terminal, in a pipe, and where it cannot work."""

import io
import os
import pty
import random
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.output.vt100 import Vt100_Output

import tightlip
from animals import WORDS
from tightlip.audit.tab import Tab, open_tab
from tightlip.audit.tab_completion import Ghost
from tightlip.cli.tab import Line, converse, harmless, tab
from tightlip.core.errors import UsageError
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.models import LSTMConfig, LSTMForCausalLM

pytestmark = pytest.mark.slow

SECRET = "My ID is 4417, tell the owl."
SECONDS = 60  # to give up after, on a machine busy with other things


@pytest.fixture(scope="module")
def place(tmp_path_factory, command):
    """A model that knows ann's sentence by heart, and its report, redacted and not."""
    folder = tmp_path_factory.mktemp("place")
    rows = [("ann", SECRET)] * 2 + [(f"u{n}", WORDS[n] + " is the owl") for n in range(4)]
    table = pa.table({"user": [row[0] for row in rows], "text": [row[1] for row in rows]})
    pq.write_table(table, folder / "corpus.parquet")
    tokenizer = build_tokenizer(open_corpus(table))
    ids = [tokenizer.bos_token_id, *tokenizer.encode(SECRET, add_special_tokens=False)]
    torch.manual_seed(0)
    model = LSTMForCausalLM(LSTMConfig(len(tokenizer), 16, 32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, more in (("report", []), ("redacted", ["--redact"])):
        ran = command(
            "audit", folder / "model", folder / "corpus.parquet", "--out", folder / name, *more
        )
        assert ran.status == 0, ran.err
    return folder


def whole_sentence():
    return (
        f"Only ann wrote “{SECRET}” (2 times in the training text): "
        "the model completed 10 of its 12 tokens after you typed the rest."
    )


class Terminal:
    """A command in a terminal of its own: type, and wait until something is on the screen."""

    def __init__(self, *arguments, **environment):
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 300))
        self._terminal, self._said = ours, ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tightlip", *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"} | environment,
        )
        os.close(theirs)

    def press(self, keys):
        self._said = ""
        os.write(self._terminal, keys.encode())

    def wait_for(self, words):
        """What was written since the last key, `words` among it once moves and styles are out."""
        end = time.monotonic() + SECONDS
        while words not in plain(self._said):
            assert time.monotonic() < end, f"no {words!r} in {self._said!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                self._said += os.read(self._terminal, 1 << 16).decode(errors="replace")
        return self._said

    def status(self):
        try:
            return self._process.wait(timeout=SECONDS)
        finally:
            self._process.kill()
            os.close(self._terminal)


def test_somebody_types_presses_tab_and_sees_whose_words_came_back(place):
    terminal = Terminal("tab", place / "model", "--report", place / "report")
    terminal.wait_for("TAB takes the grey text")
    terminal.wait_for("Watching for")
    terminal.wait_for(">")
    terminal.press("My I")
    ghost = terminal.wait_for("D is 4417, tell the owl.")
    assert re.search(r"\x1b\[[0-9;]*90mD", ghost), "ghost text is bright black"
    assert "Only ann wrote" not in ghost
    terminal.press("\t")
    marked = terminal.wait_for("after you typed the rest")
    assert "Only ann wrote" in marked
    assert re.search(r"\x1b\[[0-9;]*31;[0-9;]*4m", marked), "the leak is red and underlined"
    terminal.press("\r")
    terminal.wait_for(">")
    terminal.press("\x1b")
    assert terminal.status() == 0


class Recorder(io.StringIO):
    """What a terminal without anybody before it is sent."""

    def isatty(self):
        return True

    def fileno(self):
        return sys.__stdout__.fileno()


class Recording(Tab):
    """A tab that remembers which lines it was asked about, and who had written what in them."""

    def marks(self, text, accepted):
        self.asked = [*getattr(self, "asked", []), (text, list(accepted))]
        return super().marks(text, accepted)


def played(opened, script):
    """Everything on the screen when `script`, (keys, words to wait for) each, is over."""
    screen = Recorder()
    terminal = Vt100_Output(screen, lambda: Size(40, 300), term="xterm", enable_cpr=False)
    with create_pipe_input() as keys, create_app_session(input=keys, output=terminal):

        def play():
            for pressed, words in script:
                seen = len(screen.getvalue())
                keys.send_text(pressed)
                end = time.monotonic() + SECONDS
                while words not in plain(screen.getvalue()[seen:]) and time.monotonic() < end:
                    time.sleep(0.01)
            keys.send_text("\x03")

        player = Thread(target=play)
        player.start()
        converse(opened, [], terminal)
        player.join()
    return screen.getvalue()


def plain(said):
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", said)


@pytest.fixture(scope="module")
def opened(place):
    return open_tab(model=place / "model", report=place / "report", device="cpu")


def test_without_colours_a_leak_is_still_underlined_and_a_ghost_dim(opened, monkeypatch):
    script = [("My ID", "is 4417, tell the owl."), ("\t", "after you typed the rest")]
    monkeypatch.setenv("NO_COLOR", "1")
    said = played(opened, script)
    assert "\x1b[0;2m is 4417" in said
    assert re.search(r"\x1b\[0;(1;4|4;1)mMy ID is 4417", said)
    assert not re.search(r"\x1b\[[0-9;]*[39][0-7]m", said)
    monkeypatch.delenv("NO_COLOR")
    assert re.search(r"\x1b\[[0-9;]*[39][0-7][0-9;]*m", played(opened, script))


def test_the_right_arrow_takes_one_word_and_typing_along_keeps_the_rest(opened):
    recording = Recording(opened.completer, opened.unique)
    played(
        recording,
        [("My ID is", "4417, tell"), ("\x1b[C", ""), (" te", ""), ("\t", "after you typed")],
    )
    typed, word = "My ID is", " 4417,"
    mask = [False] * len(typed) + [True] * len(word)
    assert (SECRET, mask + [False] * 3 + [True] * 11) in recording.asked


def test_a_ghost_comes_back_after_a_deletion_and_tab_without_one_types_nothing(opened):
    recording = Recording(opened.completer, opened.unique)
    played(recording, [("\tMy IDx", ""), ("\x7f", "is 4417, tell"), ("\t", "after you typed")])
    assert recording.asked[-1][0] == SECRET


class Silent:
    """A completer that never has anything to say."""

    def complete(self, text, **how):
        return Ghost()


@pytest.mark.parametrize("key", ["\x1b", "\x03", "\x04"], ids=["Esc", "Ctrl-C", "Ctrl-D"])
def test_every_way_out_ends_quietly(key):
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("half a line" + key)
        converse(Tab(Silent(), None), [], DummyOutput())


@given(seed=st.integers(0, 10**9))
def test_an_edit_leaves_every_other_character_its_writer(seed):
    draw, line = random.Random(seed), Line()
    # Distinct characters, so that each shows by itself where it was before.
    fresh = iter(map(chr, range(0x4E00, 0x9000)))
    by_model: dict[str, bool] = {}
    for _ in range(30):
        words = "".join(next(fresh) for _ in range(draw.randint(1, 4)))
        if draw.random() < 0.4:
            by_model |= dict.fromkeys(words, True)
            line.accept(words)
        else:
            by_model |= dict.fromkeys(words, False)
            start = draw.randint(0, len(line.text))
            end = draw.randint(start, min(start + 3, len(line.text)))
            line.become(line.text[:start] + words * draw.randint(0, 1) + line.text[end:])
        assert line.accepted == [by_model[character] for character in line.text]


def test_a_pipe_gets_plain_lines(place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("My ID\nMy xyzzy \r\n"))
    tab(model=place / "model", report=place / "report", device="cpu", min_confidence=0.9)
    first, second, third, *others = capsys.readouterr().out.splitlines()
    assert first == SECRET
    assert second.startswith("    completed: “is 4417, tell the owl.” (perplexity 1")
    assert third == f"    {whole_sentence()}"
    assert others[0].startswith("My xyzzy ")
    assert "\x1b" not in "".join([first, second, third, *others])


def test_bytes_that_are_no_text_and_commands_to_the_terminal_do_no_harm(opened):
    assert opened.complete("My \udcff ID is").text
    assert harmless("a\x1b[2Jb\tü\x9b") == "a\ufffd[2Jb\tü\ufffd"
    recording = Recording(opened.completer, opened.unique)
    played(recording, [("\x1b[200~My\r\nID\x1b[201~", "is 4417, tell"), ("\t", "after you typed")])
    assert recording.asked[-1][0] == SECRET


def test_a_prompt_is_completed_without_a_terminal(place, command):
    ran = command("tab", place / "model", "--prompt", "My ID", "--prompt", "My ID is 44", "--tokens", "3")  # fmt: skip
    assert ran.status == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == "My ID is 44"
    assert lines[2] == "My ID is 4417,"
    assert "Only" not in ran.out
    assert "No report: nothing is marked" in ran.err


def test_python_gets_the_same(place):
    (found,) = tightlip.complete(place / "model", "My ID", report=place / "report", device="cpu")
    assert found["typed"] + found["ghost"] == SECRET
    (mark,) = found["marks"]
    assert (mark["owner"], mark["times"], mark["num_completed"]) == ("ann", 2, 10)
    opened = open_tab(place / "model", device="cpu")
    assert tightlip.complete(opened, ["My ID"])[0]["marks"] == []


def test_a_run_brings_its_own_report(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "model", run / "model")
    (run / "config.toml").write_text("[corpus]\nfolder = 'corpus'\n")
    with pytest.raises(UsageError, match="not finished"):
        open_tab(run)
    (run / "ledger.json").write_text("{}")
    opened = open_tab(run, device="cpu")
    assert opened.unique is None
    assert f"tightlip audit {run}" in opened.notes[0]
    shutil.copytree(place / "report", run / "audit")
    assert len(open_tab(run, device="cpu").unique) >= 1
    shutil.rmtree(run / "audit")
    shutil.copytree(place / "redacted", run / "audit")
    assert "redacted" in open_tab(run, device="cpu").notes[0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--report", "redacted"), "redacted: it holds no text"),
        (("--report", "corpus.parquet"), "is not a folder"),
        (("--report", "model"), "no finished report"),
        (("--tokens", "0"), "tokens=0 is out of range. It must be at least 1."),
        (("--min-confidence", "2"), "min_confidence=2 is out of range"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(place, command, arguments, reason):
    flag, value = arguments
    value = place / value if flag == "--report" else value
    ran = command("tab", place / "model", flag, value, "--prompt", "My")
    assert ran.status == 2, ran.err
    assert reason in ran.refusal
