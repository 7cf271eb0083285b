"""How far one `tightlip` command reaches: files entered, packages crossed, models, tokens.

    .venv/bin/python tools/trace_command.py audit model corpus.parquet --out report

A file counts when one of its functions is called. A crossing is a pair of files in different
packages of which one calls the other, counted once. Tokens are those given to `Scanner.scan`.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tightlip

ROOT = str(Path(tightlip.__file__).parent) + "/"


class Trace:
    """A profiler that keeps who called whom, and what the two costly calls were given."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.crossings: set[tuple[str, str]] = set()
        self.num_loads = self.num_tokens = self.num_pages = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        here = frame.f_code.co_filename.removeprefix(ROOT)
        name, callers = frame.f_code.co_qualname, list(_callers(frame))
        if any(code.co_name == "<module>" for code in (frame.f_code, *callers)):
            return  # a module being imported
        self.files.add(here)
        if callers:
            there = callers[0].co_filename.removeprefix(ROOT)
            if _package(there) != _package(here):
                self.crossings.add((there, here))
        self.num_loads += name == "load_causal_lm"
        self.num_pages += name in ("write_page", "render_comparison")
        if name == "Scanner.scan":
            bounds = frame.f_locals["bounds"]
            self.num_tokens += int(bounds[-1] - bounds[0])


def _callers(frame: FrameType) -> Iterator[CodeType]:
    """Our own code that a call came through, the nearest first."""
    above = frame.f_back
    while above is not None:
        if above.f_code.co_filename.startswith(ROOT):
            yield above.f_code
        above = above.f_back


def _package(file: str) -> str:
    return file.split("/")[0]


def main() -> None:
    from tightlip.cli.main import app

    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        app(sys.argv[1:], standalone_mode=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    print(f"files entered          {len(trace.files)}")
    print(f"packages crossed       {len(trace.crossings)}")
    print(f"models loaded          {trace.num_loads}")
    print(f"tokens scanned         {trace.num_tokens:,}")
    print(f"pages rendered         {trace.num_pages}")


main()
