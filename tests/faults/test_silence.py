"""Nothing is sent and nothing is written but what was asked for: whole processes, traced."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest

from faults.cases import CASES, write_place
from faults.harm import ALL, HANGS_AFTER, LONG, SHORT, sample
from killable import Commands

pytestmark = pytest.mark.slow
STRACE = shutil.which("strace")
# From its first instruction on, each in a process of its own; the others as forks of one process.
WHOLE = SHORT if ALL else ("represent export",)
ENCODE = ("represent", "encode", "vectors/device", "corpus.parquet", "--out", "sent.parquet")
EXTRAS = ("datasets", "pandas", "presidio_analyzer", "peft", "gguf", "accelerate", "sklearn",
          "onnx", "onnxscript", "onnxruntime")  # fmt: skip


def tracing(trace):
    """What to run a program within, so that `trace` tells the addresses it asks for."""
    how = ("-f", "--seccomp-bpf", "-qq", "-e", "trace=connect,sendto", "-o", str(trace))
    return [STRACE, *how] if STRACE else []


def addresses(trace):
    return re.findall(r"sa_family=AF_INET6?\b.*", trace.read_text()) if STRACE else []


def empty_home(folder):
    """A home with nothing in it, and the variables that say so; it may not be told to be silent."""
    home = folder / "home"
    home.mkdir()
    told = ("TELEMETRY", "TIGHTLIP_REGISTER", "XDG_STATE_HOME")
    environment = {
        name: value for name, value in os.environ.items() if not any(each in name for each in told)
    }
    return home, environment | {"HOME": str(home), "XDG_CACHE_HOME": "", "NUMBA_CACHE_DIR": ""}


def left_in(home):
    """All files there but the register, which is where it is said to be."""
    files = {path for path in home.rglob("*") if path.is_file()}
    return sorted(files - {home / ".local/state/tightlip/register.jsonl"})


def run_python(words, place, trace, environment):
    """Run Python in a process of its own; the addresses it asked for."""
    done = subprocess.run(
        [*tracing(trace), sys.executable, *words],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return addresses(trace)


@pytest.mark.parametrize("name", WHOLE)
def test_a_command_asks_for_no_address_and_leaves_the_home_folder_alone(
    name, shared, tmp_path, tally
):
    place = shutil.copytree(shared("faults", write_place), tmp_path / "place")
    home, environment = empty_home(tmp_path)
    asked = run_python(
        ("-m", "tightlip", *CASES[name].arguments), place, tmp_path / "trace", environment
    )
    if name == "represent export":
        encode = ("-m", "tightlip", *ENCODE, "--runtime", "onnx")
        asked += run_python(encode, place, tmp_path / "trace", environment)
    left = left_in(home)
    tally("traced processes", not asked and not left)
    assert (asked, left) == ([], [])


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Commands as forks of one traced process, with the file of the trace and the empty home."""
    folder = tmp_path_factory.mktemp("traced")
    home, environment = empty_home(folder)
    (folder / "lives").mkdir()
    trace = folder / "trace"
    commands = Commands(folder / "lives", within=tracing(trace), env=environment)
    yield commands, trace, home
    commands.close()


@pytest.mark.parametrize("name", sample(list(CASES), 6))
def test_no_command_asks_for_an_address_or_writes_to_the_home_folder(
    name, traced, shared, tmp_path, tally
):
    """The demo and the experiments for their first seconds: then they do what others do."""
    commands, trace, home = traced
    place = shutil.copytree(shared("faults", write_place), tmp_path / "place")
    ran = commands(
        *CASES[name].arguments,
        place=place,
        kill_after=(60 if ALL else 3) if name in LONG else HANGS_AFTER,
    )
    assert ran.status == 0 or name in LONG, ran.err
    asked, left = addresses(trace), left_in(home)
    tally("traced commands", not asked and not left)
    assert (asked, left) == ([], [])


def test_no_extra_asks_for_an_address_when_imported_after_us(tmp_path, tally):
    """Each that is installed, after tightlip, as our commands import them."""
    _, environment = empty_home(tmp_path)
    there = [name for name in EXTRAS if importlib.util.find_spec(name)]
    imports = f"import tightlip, {', '.join(there)}"
    asked = run_python(("-c", imports), tmp_path, tmp_path / "trace", environment)
    tally("traced processes", not asked)
    assert asked == []
