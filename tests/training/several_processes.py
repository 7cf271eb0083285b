"""Groups of processes that train, as FOLDER/NAME.json says: how many they are, and one job after the other.

Each process writes how each job ended for it, and every step it took. All are forks of this one:
to import torch takes longer than to train.
"""

import contextlib
import io
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

import tightlip
from forked import begin, end
from tightlip.cli.main import app
from tightlip.core.errors import UsageError
from tightlip.training import together
from tightlip.training.config import RunOptions
from tightlip.training.loop import Training

plain_step = Training.take_step


def own_steps(file: Path, job: dict[str, Any]) -> None:
    """Note every step; in the one that the job names, have the rank that it names go wrong."""

    def take_step(self: Training) -> None:
        plain_step(self)
        with file.open("a") as events:
            events.write(f"{job['out']} {self.progress.step}\n")
        here = [distributed.get_rank(), self.progress.step]
        if here == job.get("interrupted"):
            os.kill(os.getpid(), signal.SIGINT)
        if here == job.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if here == job.get("failing"):
            raise UsageError("This process alone cannot go on. Look at it.")

    Training.take_step = take_step  # type: ignore[method-assign]


def trained(job: dict[str, Any]) -> dict[str, Any]:
    options = RunOptions(device="cpu", **job["options"])
    try:
        run = tightlip.train(job["corpus"], job["out"], options=options, **job["settings"])
    except KeyboardInterrupt:
        return {"stopped": True}
    except UsageError as error:
        return {"refused": str(error)}
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


def work(folder: Path) -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    # As torchrun has it.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    answers = {}
    for name, job in json.loads(folder.with_suffix(".json").read_text())["jobs"].items():
        own_steps(folder / f"events-{rank}", job)
        if "failing" in job:  # the first one does not refuse, however long it is waited for
            together._LONGEST_REFUSAL = timedelta(seconds=1)
        answers[name] = commanded(job["command"]) if "command" in job else trained(job)
    (folder / f"answers-{rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        codes = end(begin(json.loads(file.read_text())["size"], work, file.with_suffix("")))
        (file.with_suffix("") / "codes.json").write_text(json.dumps(codes))
