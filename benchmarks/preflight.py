"""What --dry-run expects, beside what the command then takes: estimate / truth.

    python benchmarks/preflight.py [--corpus FILE ...] [--train-steps 300] [--device cpu]

For the bundled corpus, and each FILE (a corpus with columns user and text), a small LSTM is trained
and audited by the command line, each time after its dry run. Seconds are those of the whole command
by the clock, memory the largest resident size that the operating system saw, disk what the folder
holds afterwards. Asked for: each ratio within 30% of 1.
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


def command(*words):
    """A command of tightlip in a process of its own: what it printed, its seconds and its memory."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "tightlip", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # fmt: skip
        out, errors = process.communicate()
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(errors.decode()[-2000:])
    return out.decode(), seconds


def most_memory_of(*words):
    """The largest resident size of a command, by a process that starts nothing else."""
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=-3, stderr=-3); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, sys.executable, "-m", "tightlip", *map(str, words)], capture_output=True, check=True)  # fmt: skip
    return int(done.stdout.split()[-1]) * 1024, time.perf_counter() - start


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def compare(name, words, out):
    """One row: the dry run's figures over those of the run."""
    told, took = command(*words, "--out", out, "--dry-run", "--json")
    assert not out.exists(), f"the dry run left {out}"
    expected = json.loads(told)
    memory, seconds = most_memory_of(*words, "--out", out)
    disk = size_of(out)
    print(
        f"| {name} | {expected['corpus']['tokens']:,} | {took:.0f} s | {expected['seconds']:.1f} s | {seconds:.1f} s | "
        f"**{expected['seconds'] / seconds:.2f}** | {expected['memory_bytes'] / memory:.2f} | {expected['disk_bytes'] / disk:.2f} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", action="append", default=[])
    parser.add_argument("--train-steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
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
            compare(f"train, {name}", training, run)
            compare(f"audit, {name}", ["audit", run, *device], folder / f"audit-{number}")
        private = ["--mitigation", "dp", "--epsilon", 8, "--unit", "example", "--allow-unproved"]
        compare("train dp, bundled", [*training[:1], corpora["bundled"], "--steps", 60, *private, *device], folder / "dp")  # fmt: skip


if __name__ == "__main__":
    main()
