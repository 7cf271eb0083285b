"""Nothing is sent and nothing is written but what was asked for: whole processes, traced."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from faults.cases import write_place

pytestmark = pytest.mark.slow
STRACE = shutil.which("strace")
COMMANDS = {
    "export": ("represent", "export", "vectors/device", "--onnx"),
    "audit": ("audit", "run", "--out", "out"),
}
ENCODE = ("represent", "encode", "vectors/device", "corpus.parquet", "--out", "sent.parquet")


def ran_silently(words, place, home):
    """Run a command in a process of its own with an empty home; the addresses it asked for."""
    trace = home.parent / "trace"
    traced = (
        [STRACE, "-f", "--seccomp-bpf", "-qq", "-e", "trace=connect,sendto", "-o", str(trace)]
        if STRACE
        else []
    )
    environment = {name: value for name, value in os.environ.items() if "TELEMETRY" not in name}
    done = subprocess.run(
        [*traced, sys.executable, "-m", "tightlip", *words],
        cwd=place,
        env=environment | {"HOME": str(home), "XDG_CACHE_HOME": "", "NUMBA_CACHE_DIR": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"sa_family=AF_INET6?\b.*", trace.read_text()) if STRACE else []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_asks_for_no_address_and_leaves_the_home_folder_alone(name, shared, tmp_path):
    place = shutil.copytree(shared("faults", write_place), tmp_path / "place")
    home = tmp_path / "home"
    home.mkdir()
    assert ran_silently(COMMANDS[name], place, home) == []
    if name == "export":
        assert ran_silently((*ENCODE, "--runtime", "onnx"), place, home) == []
    assert list(home.rglob("*")) == []
