"""Everything a killed training of vectors needs to go on as if nothing had happened.

`checkpoint/step-N/` holds tensors.safetensors and state.json, `checkpoint/best-N/` the weights of
the best epoch so far: no pickle, so nothing in them can run. No random state is kept: order,
masks, noise and dropout are functions of the seed and the step.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from tightlip.core.files import folder_written_whole, read_json, write_json

_TENSORS, _STATE = "tensors.safetensors", "state.json"


@dataclass(kw_only=True)
class Progress:
    """How far a training is. Loss and seconds run over the epoch under way."""

    step: int = 0
    loss_nats: float = 0.0
    num_texts: int = 0
    seconds: float = 0.0
    best_epoch: int = 0
    best_loss_nats: float | None = None
    epochs: list[dict[str, Any]] = field(default_factory=list)


def save_progress(
    folder: Path,
    progress: Progress,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
) -> None:
    """Make `folder` hold this moment, the best epoch's weights, and nothing else."""
    now = folder / f"step-{progress.step}-{len(progress.epochs)}"
    best = folder / f"best-{progress.best_epoch}"
    if not now.exists():
        tensors = tensors_of(modules)
        for name, optimizer in optimizers.items():
            tensors |= optimizer_tensors(f"optimizer.{name}", optimizer)
        with folder_written_whole(now) as beside:
            save_file(tensors, beside / _TENSORS)
            write_json(beside / _STATE, asdict(progress))
    for other in folder.iterdir():
        if other not in (now, best):
            shutil.rmtree(other)


def load_progress(
    folder: Path, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> Progress:
    """Bring everything back to the last moment saved; to the start where none was."""
    written = [path for path in folder.glob("step-*") if (path / _STATE).is_file()]
    states = {path: Progress(**read_json(path / _STATE)) for path in written}
    if not states:
        return Progress()
    last = max(states, key=lambda path: (states[path].step, len(states[path].epochs)))
    tensors = load_file(last / _TENSORS)
    load_modules(modules, tensors)
    for name, optimizer in optimizers.items():
        load_optimizer(f"optimizer.{name}", optimizer, tensors)
    return states[last]


def save_best(folder: Path, epoch: int, modules: Mapping[str, nn.Module]) -> None:
    """Keep the weights as they are after `epoch`; the ones before go with the next progress saved."""
    place = folder / f"best-{epoch}"
    shutil.rmtree(place, ignore_errors=True)
    with folder_written_whole(place) as beside:
        save_file(tensors_of(modules), beside / _TENSORS)


def load_best(folder: Path, epoch: int, modules: Mapping[str, nn.Module]) -> None:
    load_modules(modules, load_file(folder / f"best-{epoch}" / _TENSORS))


def tensors_of(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": tensor.detach().cpu().clone()
        for name, module in modules.items()
        for key, tensor in module.state_dict().items()
    }


def load_modules(modules: Mapping[str, nn.Module], tensors: dict[str, Tensor]) -> None:
    for name, module in modules.items():
        start = f"{name}."
        module.load_state_dict(
            {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
        )


def optimizer_tensors(name: str, optimizer: Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers of each parameter, by the parameter's number."""
    return {
        f"{name}.{number}.{key}": value.detach().cpu().clone()
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def load_optimizer(name: str, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(f"{name}."):
            number, _, what = key.removeprefix(f"{name}.").partition(".")
            state.setdefault(int(number), {})[what] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
