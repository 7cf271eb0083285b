"""Commands in processes of their own that can be killed, without importing torch for each of them.

One process imports everything and starts nothing; each command runs in a fork of it, its life. A
life can kill itself (SIGKILL) just before its nth rename, or be killed from outside: after some
time, or once it has done something.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightlip.core.settings import toml_text


@dataclass(frozen=True)
class Finished:
    """How a command ended: its exit code (minus the signal if killed), what it said and did."""

    status: int
    out: str
    err: str
    scans: list[list[int]]
    renames: int
    seconds: float

    @property
    def refusal(self) -> str:
        """The one line that says why; progress bars do not count."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("tightlip: ")]
        return line


class Life:
    """A command under way."""

    def __init__(self, folder: Path, pid: int, ending: Any) -> None:
        self._folder, self._pid, self._ending = folder, pid, ending

    def events(self, kind: str) -> list[Any]:
        """What it did so far: the scans, renames or steps."""
        whole = [line for line in self._read("events").splitlines(True) if line.endswith("\n")]
        return [event[kind] for event in map(json.loads, whole) if kind in event]

    def kill_once(self, happened: Callable[[], bool], *, seconds_later: float = 0) -> Finished:
        """Kill it when something has happened, unless it was over before."""
        while not happened() and not (self._folder / "over").exists():
            time.sleep(0.002)
        time.sleep(seconds_later)
        return self.kill()

    def kill(self) -> Finished:
        with contextlib.suppress(ProcessLookupError):  # it was over by itself
            os.kill(self._pid, signal.SIGKILL)
        return self.end()

    def end(self) -> Finished:
        """Wait for its end, and tell it."""
        answer = json.loads(self._ending.readline())
        return Finished(
            status=answer["status"],
            out=self._read("out"),
            err=self._read("err"),
            scans=self.events("scan"),
            renames=len(self.events("rename")),
            seconds=answer["seconds"],
        )

    def _read(self, name: str) -> str:
        path = self._folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""


class Commands:
    """Runs `tightlip ...`, each call in a fresh fork, one at a time."""

    def __init__(
        self, folder: Path, *, within: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        """`within` is a program that runs others, such as unshare; `env` what they see."""
        self._folder, self._num_lives = folder, 0
        env = os.environ if env is None else env
        self._process = subprocess.Popen(
            [*within, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**env, "COLUMNS": "200", "TOKENIZERS_PARALLELISM": "false"},
        )

    @property
    def pid(self) -> int:
        """The process that all commands are forks of."""
        return self._process.pid

    def __call__(self, *arguments, kill_after=None, **how) -> Finished:
        life = self.begin(*arguments, **how)
        if kill_after is None:
            return life.end()
        end = time.monotonic() + kill_after
        return life.kill_once(lambda: time.monotonic() > end)

    def begin(
        self,
        *arguments,
        shard_tokens=None,
        die_before_rename=None,
        place=None,
        same_noise=False,
    ) -> Life:
        self._num_lives += 1
        folder = self._folder / str(self._num_lives)
        folder.mkdir()
        request = {
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder),
            "shard_tokens": shard_tokens,
            "die_before_rename": die_before_rename,
            "place": None if place is None else str(place),  # where to stand; here by default
            "same_noise": same_noise,  # of the operating system's randomness
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        return Life(folder, pid, self._process.stdout)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def begin_training(command: Commands, corpus, folder: Path, config) -> Life:
    """Train, or go on training, into FOLDER/run, with a checkpoint after every step."""
    file = folder / "killed.toml"
    tables = {"train": config.tree(), "options": {"checkpoint_seconds": 0}}
    file.write_text(toml_text(tables), encoding="utf-8")
    return command.begin("train", corpus.folder, "--out", folder / "run", "--config", file)


def train_and_kill(command: Commands, corpus, folder: Path, config, num_kills: int) -> Iterator:
    """Train into FOLDER/run and kill it; after each death, how many updates were applied in all."""
    applied, moments = 0, random.Random(0)
    for kill in range(num_kills):
        life = begin_training(command, corpus, folder, config)
        ended = life.kill_once(
            lambda life=life, least=1 + kill % 3: len(life.events("step")) >= least,
            # Somewhere in a later step, or in what follows it.
            seconds_later=moments.random() * 0.05,
        )
        assert ended.status == -signal.SIGKILL, ended.err
        applied += len(life.events("step"))
        yield applied


# The process that the commands are forks of


_same_noise = False


def _noise(num_bytes: int, plain: Callable[[int], bytes] = os.urandom) -> bytes:
    """What the system would draw, or the same at every call: threads come in any order."""
    return random.Random(num_bytes).randbytes(num_bytes) if _same_noise else plain(num_bytes)


def import_everything() -> None:
    """What each fork would import and load again; nothing here may start a thread."""
    import dp_accounting.pld
    import dp_accounting.rdp  # noqa: F401
    import numpy as np
    import rich.progress  # noqa: F401
    import torch

    import remembered
    import tightlip
    from tightlip.audit.leakage.counting import Sequences, Shard, count_in_shard

    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(tightlip.__path__, "tightlip."):
        if module.name != "tightlip.__main__":
            with contextlib.suppress(ImportError):  # triton is there with a GPU only
                importlib.import_module(module.name)
    remembered.install()
    one, ends = np.zeros(1, np.int32), np.array([0, 1])
    shard = Shard(tokens=one, bounds=ends, users=one, starts=one)
    count_in_shard(shard, Sequences(tokens=one, offsets=ends))  # loads numba's own modules
    _make_what_is_made_once(Path(tightlip.__path__[0]))


def _make_what_is_made_once(package: Path) -> None:
    """What a process makes when it first reads a flag, a model's weights or a page's template."""
    from tightlip.report.kit import _template

    with contextlib.suppress(ImportError):  # where another version has these elsewhere
        import typer._adapters  # noqa: F401
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")
    kit = [f"report/kit/{name}.html.jinja" for name in ("shell", "parts")]
    for page in package.glob("report/*/page.html.jinja"):
        environment = _template(str(page.relative_to(package))).environment
        for name in kit:
            environment.get_template(name)


def serve() -> None:
    os.urandom = random._urandom = _noise  # the second is where `secrets` has it from
    import_everything()
    gc.freeze()  # the forks share what nothing goes through
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.monotonic()
        life = os.fork()
        if life == 0:
            _become_command(request)
        print(life, flush=True)
        _, status = os.waitpid(life, 0)
        answer = {
            "status": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - begin,
        }
        (Path(request["folder"]) / "over").touch()
        print(json.dumps(answer), flush=True)


def _become_command(request: dict) -> None:
    from tightlip.cli.main import main
    from tightlip.scan import store as scanned

    folder = Path(request["folder"])
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY, 0o600), descriptor)
    events = os.open(folder / "events", os.O_CREAT | os.O_WRONLY, 0o600)
    global _same_noise
    _same_noise = request["same_noise"]
    if request["shard_tokens"] is not None:
        scanned.SHARD_TOKENS = request["shard_tokens"]

    def note(event: dict) -> None:
        os.write(events, (json.dumps(event) + "\n").encode())

    _note_scans_and_steps(note)
    _note_renames(note, request["die_before_rename"])
    if request["place"] is not None:
        os.chdir(request["place"])
    sys.argv = ["tightlip", *request["arguments"]]
    status = 70
    try:
        main()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _note_scans_and_steps(note: Callable[[dict], None]) -> None:
    from tightlip.scan.scanner import Scanner
    from tightlip.training.loop import Training

    plain_scan, plain_step = Scanner.begun, Training.take_step

    def scan(self, tokens, bounds, *scorer):
        note({"scan": [int(bounds[0]), int(bounds[-1])]})
        return plain_scan(self, tokens, bounds, *scorer)

    def take_step(self):
        plain_step(self)
        note({"step": self.progress.step})

    Scanner.begun, Training.take_step = scan, take_step


def _note_renames(note: Callable[[dict], None], die_before: int | None) -> None:
    """Note every rename, and die before the one asked for."""
    seen = 0

    def dying(plain):
        def rename(source, target, **others):
            nonlocal seen
            if "__pycache__" in str(target):  # Python's and numba's own, where they are not warm
                return plain(source, target, **others)
            seen += 1
            if seen == die_before:
                os.kill(os.getpid(), signal.SIGKILL)
            note({"rename": str(target)})
            return plain(source, target, **others)

        return rename

    os.replace, os.rename = dying(os.replace), dying(os.rename)


if __name__ == "__main__":
    serve()
