"""Everything a killed training of vectors needs to go on as if nothing had happened.

`checkpoint/step-N/` holds tensors.safetensors and state.json, `checkpoint/best-N/` the weights of
the best epoch so far: no pickle, so nothing in them can run. No random state is kept: order,
masks, noise and dropout are functions of the seed and the step.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from tightlip.core import run_folder
from tightlip.core.checksums import checked
from tightlip.core.errors import DamagedError
from tightlip.core.files import folder_written_whole

_OPTIMIZER = "optimizer"


@dataclass(kw_only=True)
class Progress(run_folder.Moment):
    """How far a training of vectors is."""

    num_texts: int = 0
    best_epoch: int = 0
    best_loss_nats: float | None = None
    epochs: list[dict[str, Any]] = field(default_factory=list)


def save_progress(
    folder: Path, progress: Progress, modules: nn.Module, optimizers: Mapping[str, Optimizer]
) -> None:
    """Make `folder` hold this moment, the best epoch's weights, and nothing else."""
    now = folder / f"step-{progress.step}-{len(progress.epochs)}"
    best = folder / f"best-{progress.best_epoch}"
    if not now.exists():
        tensors = tensors_of(modules)
        for name, optimizer in optimizers.items():
            tensors |= run_folder.prefixed(
                f"{_OPTIMIZER}.{name}", run_folder.optimizer_tensors(optimizer)
            )
        run_folder.write_moment(now, tensors, progress)
    run_folder.keep_only(folder, now, best)


def load_progress(
    folder: Path, modules: nn.Module, optimizers: Mapping[str, Optimizer]
) -> Progress:
    """Bring everything back to the last moment saved; to the start where none was."""
    states = run_folder.moments_in(folder, Progress)
    if not states:
        return Progress()
    last = max(states, key=lambda path: (states[path].step, len(states[path].epochs)))
    try:
        checked(folder / f"best-{states[last].best_epoch}")
    except DamagedError:
        run_folder.set_aside(last)
        return Progress()
    tensors = load_file(last / run_folder.TENSORS)
    weights = {key: t for key, t in tensors.items() if not key.startswith(f"{_OPTIMIZER}.")}
    modules.load_state_dict(weights)
    for name, optimizer in optimizers.items():
        run_folder.load_optimizer_tensors(
            optimizer, run_folder.part_of(tensors, f"{_OPTIMIZER}.{name}")
        )
    return states[last]


def save_best(folder: Path, epoch: int, modules: nn.Module) -> None:
    """Keep the weights as they are after `epoch`; the ones before go with the next progress saved."""
    place = folder / f"best-{epoch}"
    shutil.rmtree(place, ignore_errors=True)
    with folder_written_whole(place) as beside:
        save_file(tensors_of(modules), beside / run_folder.TENSORS)


def load_best(folder: Path, epoch: int, modules: nn.Module) -> None:
    modules.load_state_dict(load_file(folder / f"best-{epoch}" / run_folder.TENSORS))


def tensors_of(modules: nn.Module) -> dict[str, Tensor]:
    """All weights; copies, since safetensors refuses shared memory."""
    return {name: tensor.detach().cpu().clone() for name, tensor in modules.state_dict().items()}
