"""Commands in processes of their own, without importing torch for each of them.

One process imports everything and starts nothing; each command runs in a fork of it. A command
can be told to kill itself (SIGKILL) just before its nth rename, or be killed from outside after
some time.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


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


class Commands:
    """Runs `tightlip ...`, each call in a fresh fork."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "200", "TOKENIZERS_PARALLELISM": "false"},
        )

    def __call__(self, *arguments, shard_tokens=None, die_before_rename=None, kill_after=None):
        request = {
            "arguments": [str(argument) for argument in arguments],
            "folder": str(self._folder),
            "shard_tokens": shard_tokens,
            "die_before_rename": die_before_rename,
            "kill_after": kill_after,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        events = [json.loads(line) for line in self._read("events").splitlines()]
        return Finished(
            status=answer["status"],
            out=self._read("out"),
            err=self._read("err"),
            scans=[event["scan"] for event in events if "scan" in event],
            renames=sum("rename" in event for event in events),
            seconds=answer["seconds"],
        )

    def _read(self, name: str) -> str:
        return (self._folder / name).read_text(encoding="utf-8")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _import_everything() -> None:
    """What each command would import and load again; nothing here may start a thread."""
    import numpy as np
    import rich.progress  # noqa: F401
    import torch

    from tightlip.audit.leakage.counting import Sequences, Shard, count_in_shard

    torch.set_num_threads(1)
    one, ends = np.zeros(1, np.int32), np.array([0, 1])
    shard = Shard(tokens=one, bounds=ends, users=one)
    count_in_shard(shard, Sequences(tokens=one, offsets=ends))  # loads numba's own modules


def serve() -> None:
    _import_everything()
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.monotonic()
        child = os.fork()
        if child == 0:
            _become_command(request)
        if request["kill_after"] is not None:
            time.sleep(request["kill_after"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        answer = {
            "status": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - begin,
        }
        print(json.dumps(answer), flush=True)


def _become_command(request: dict) -> None:
    from tightlip.cli.main import main
    from tightlip.scan import store as scanned

    folder = Path(request["folder"])
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), descriptor)
    events = os.open(folder / "events", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    if request["shard_tokens"] is not None:
        scanned.SHARD_TOKENS = request["shard_tokens"]
    _watch(lambda event: os.write(events, (json.dumps(event) + "\n").encode()), request)
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


def _watch(note, request: dict) -> None:
    """Note every scan of a shard and every rename, and die before the one asked for."""
    from tightlip.scan.scanner import Scanner

    plain_scan = Scanner.scan

    def scan(self, tokens, bounds):
        note({"scan": [int(bounds[0]), int(bounds[-1])]})
        return plain_scan(self, tokens, bounds)

    Scanner.scan = scan
    seen = 0

    def dying(plain):
        def rename(source, target, **others):
            nonlocal seen
            seen += 1
            if seen == request["die_before_rename"]:
                os.kill(os.getpid(), signal.SIGKILL)
            note({"rename": str(target)})
            return plain(source, target, **others)

        return rename

    os.replace, os.rename = dying(os.replace), dying(os.rename)


if __name__ == "__main__":
    serve()
