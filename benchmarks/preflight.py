"""What --dry-run expects, beside what the command then takes: estimate / truth.

    python benchmarks/preflight.py [--corpus FILE ...] [--train-steps 300] [--device cpu] [--clock cpu]

For the bundled corpus, and each FILE (a corpus with columns user and text), a small LSTM is trained
and audited by the command line, each time after its dry run. Seconds are those of the whole command,
by the clock or, on a machine that has other work, of the CPU (--clock cpu, with OMP_NUM_THREADS=1);
memory is the largest resident size that the operating system saw, disk what the folder holds
afterwards. Asked for: each ratio within 30% of 1.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

import tightlip

# Runs a command with its own clock replaced by the CPU's, where that is asked for.
COMMAND = "import sys, time; sys.argv[0] = 'tightlip'; time.perf_counter = getattr(time, sys.argv.pop(1)); from tightlip.cli.main import main; main()"
# Starts one command, and prints its seconds by the clock and of the CPU, and its largest memory.
WATCH = "import resource, subprocess, sys, time; start = time.perf_counter(); subprocess.run(sys.argv[1:], check=True, stdout=2); used = resource.getrusage(resource.RUSAGE_CHILDREN); print(time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)"
CLOCKS = {"wall": "perf_counter", "cpu": "process_time"}


def ran(code, *words):
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def compare(name, words, out, clock):
    """One row: the dry run's figures over those of the run."""
    start = time.perf_counter()
    expected = json.loads(ran(COMMAND, CLOCKS[clock], *words, "--out", out, "--dry-run", "--json"))
    took = time.perf_counter() - start
    assert not out.exists(), f"the dry run left {out}"
    watched = ran(WATCH, sys.executable, "-m", "tightlip", *words, "--out", out)
    wall, cpu, memory = map(float, watched.split())
    seconds = {"wall": wall, "cpu": cpu}[clock]
    print(
        f"| {name} | {expected['corpus']['tokens']:,} | {took:.0f} s | {expected['seconds']:.1f} s | {seconds:.1f} s | "
        f"**{expected['seconds'] / seconds:.2f}** | {expected['memory_bytes'] / memory:.2f} | {expected['disk_bytes'] / size_of(out):.2f} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", action="append", default=[])
    parser.add_argument("--train-steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clock", choices=[*CLOCKS], default="wall")
    arguments = parser.parse_args()
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor()
    print(f"{where}, {arguments.device}, torch {torch.__version__}, tightlip {tightlip.__version__}, {datetime.now(UTC):%Y-%m-%d}\n")  # fmt: skip
    print("| | tokens | dry run | expected | truth | time | memory | disk |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        bundled = Path(tightlip.__file__).parent / "data" / "shakespeare.parquet"
        corpora = {"bundled": bundled} | {Path(each).name: each for each in arguments.corpus}
        for number, (name, corpus) in enumerate(corpora.items()):
            run, device = folder / f"run-{number}", ["--device", arguments.device]
            training = ["train", corpus, "--steps", arguments.train_steps, *device]
            compare(f"train, {name}", training, run, arguments.clock)
            compare(
                f"audit, {name}",
                ["audit", run, *device],
                folder / f"audit-{number}",
                arguments.clock,
            )
        private = ["--mitigation", "dp", "--epsilon", 8, "--unit", "example", "--allow-unproved"]
        compare("train dp, bundled", [*training[:1], corpora["bundled"], "--steps", 60, *private, *device], folder / "dp", arguments.clock)  # fmt: skip


if __name__ == "__main__":
    main()
