"""Processes that torchrun started: joined for a while, and apart again."""

import subprocess
import sys

import pytest

SCRIPT = """
import os
from tightlip.core.processes import joined_processes

with joined_processes("cpu") as processes:
    import torch._dynamo  # as a private step does
    everybody = processes.all_gathered(processes.rank)
threads = {open(f"/proc/self/task/{one}/comm").read().strip() for one in os.listdir("/proc/self/task")}
open(f"told-{processes.rank}", "w").write(f"{everybody} {[each for each in threads if 'gloo' in each]}")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_thread_of_the_group_is_left_to_die_with_the_interpreter(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert told == ["[0, 1] []"] * 2
