"""Processes that train together, without importing torch for each: forks of one that has."""

import gc
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
from torch import distributed

from killable import import_everything


def begin(size: int, work: Callable[[Path], None], folder: Path) -> list[int]:
    """So many processes that do the same `work` in `folder`; one alone has no group to join."""
    folder.mkdir(parents=True)
    _prepare()
    return [_fork(rank, size, work, folder) for rank in range(size)]


@cache
def _prepare() -> None:
    """Have here what each of them would import again, or go through for what is no longer used."""
    import peft  # noqa: F401
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    import_everything()
    gc.freeze()


def end(pids: list[int]) -> list[int]:
    """Wait for them: each one's exit code, minus the signal if it was killed."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _fork(rank: int, size: int, work: Callable[[Path], None], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        if size > 1:
            distributed.init_process_group(
                "gloo",
                init_method=f"file://{folder}/.store",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=60),
            )
        work(folder)
        status = 0
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
    os._exit(status)
