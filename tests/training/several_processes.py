"""Run by torchrun in every process: trainings one after the other, as a file of jobs has them.

Each process writes how each job ended for it. Importing torch takes longer than the trainings.
"""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path

import tightlip
from tightlip.cli.main import app
from tightlip.core.processes import joined_processes
from tightlip.training.config import RunOptions
from tightlip.training.loop import Training

RANK = int(os.environ["RANK"])


def stopped_in(step: int | None, rank: int) -> None:
    """Have one process hear a Ctrl-C in a step, or none."""

    def take_step(self: Training) -> None:
        plain_step(self)
        if self.progress.step == step and RANK == rank:
            os.kill(os.getpid(), signal.SIGINT)

    Training.take_step = take_step


plain_step = Training.take_step


def trained(job: dict) -> dict:
    stopped_in(job.get("stop_in_step"), job.get("stop_rank", 0))
    options = RunOptions(device="cpu", **job.get("options", {}))
    try:
        run = tightlip.train(
            job["corpus"],
            job["out"],
            options=options,
            prepare=job.get("prepare"),
            **job["settings"],
        )
    except KeyboardInterrupt:
        return {"stopped": True}
    return {"step": run.metrics[-1]["step"]}


def commanded(job: dict) -> dict:
    """How a command ended, and what it said."""
    stopped_in(None, 0)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            app([str(word) for word in job["command"]], standalone_mode=True)
            code = 0
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "said": said.getvalue()}


def main(file: Path) -> None:
    answers = {}
    with joined_processes("cpu"):
        for name, job in json.loads(file.read_text()).items():
            answers[name] = commanded(job) if "command" in job else trained(job)
    file.with_name(f"answers-{RANK}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
