"""Run by torchrun in every process: trainings one after the other, as a file of jobs has them.

Each process writes how each job ended for it, and every step it took. One launch runs many jobs:
to import torch takes longer than to train.
"""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tightlip
from tightlip.cli.main import app
from tightlip.core.errors import UsageError
from tightlip.core.processes import joined_processes
from tightlip.training.config import RunOptions
from tightlip.training.loop import Training

RANK = int(os.environ["RANK"])


def own_steps(file: Path, job: dict[str, Any]) -> None:
    """Note every step; in the one that the job names, have the rank that it names go wrong."""

    def take_step(self: Training) -> None:
        plain_step(self)
        with file.open("a") as events:
            events.write(f"{job['out']} {self.progress.step}\n")
        if [RANK, self.progress.step] == job.get("interrupted"):
            os.kill(os.getpid(), signal.SIGINT)
        if [RANK, self.progress.step] == job.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if [RANK, self.progress.step] == job.get("failing"):
            raise UsageError("This process alone cannot go on. Look at it.")

    Training.take_step = take_step  # type: ignore[method-assign]


plain_step = Training.take_step


def trained(job: dict[str, Any]) -> dict[str, Any]:
    options = RunOptions(device="cpu", **job["options"])
    try:
        run = tightlip.train(job["corpus"], job["out"], options=options, **job["settings"])
    except KeyboardInterrupt:
        return {"stopped": True}
    return {"step": run.metrics[-1]["step"]}


def commanded(words: list[str]) -> dict[str, Any]:
    """How a command ended, and what it said."""
    code: Any = 0
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            app(words)
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "said": said.getvalue()}


def main(file: Path) -> None:
    answers = {}
    with joined_processes("cpu"):
        for name, job in json.loads(file.read_text()).items():
            own_steps(file.with_name(f"events-{RANK}"), job)
            answers[name] = commanded(job["command"]) if "command" in job else trained(job)
    file.with_name(f"answers-{RANK}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
