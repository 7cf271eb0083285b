"""Everything a killed run needs to go on as if nothing had happened.

`checkpoint/step-N/` holds tensors.safetensors and state.json: no pickle, so nothing in it can
run. A new one is written whole before the old one goes. No random state is kept: shuffling
and dropout are functions of the seed and the step.
"""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from tightlip.core import run_folder
from tightlip.core.errors import UsageError
from tightlip.core.processes import Processes
from tightlip.core.progress import bytes_in_words, free_disk, size_of
from tightlip.privacy.shards import is_shard
from tightlip.training.lora import adapter_tensors, has_adapters
from tightlip.training.mitigations import Mitigation
from tightlip.training.plan import Plan
from tightlip.training.recipe import Recipe
from tightlip.training.together import split_as, whole_tensors


class AveragedWeights:
    """An exponential average of all that is trained; one more copy of it in memory.

    Not a mean over the last steps of the plan: a snapshot inside a run, and a private run that its
    budget ends, would have none. Early on the average forgets faster, as though every step were
    among ten (De et al. 2022, from TensorFlow's): otherwise random weights would stay in it.

    Under DP it follows from what was released, and so costs nothing. Without a decay it is empty, and
    the model itself is what is left.

    Holds:
        closed_form: after t steps it is the weighted sum of t + 1 weights that the decays give.
        given_back: inside `in_place` the model is the average, and afterwards to the bit itself.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.decay = decay
        trained = [each for each in model.parameters() if each.requires_grad]
        self.weights = trained if decay is not None else []
        self.average = [each.detach().clone() for each in self.weights]

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Take up the weights after `step` steps, counted from 1."""
        if self.decay is not None:
            decay = min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.average, self.weights, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # Where they lie: captured passes read the same memory each time.
        for weight, average in zip(self.weights, self.average, strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

    def state_dict(self) -> dict[str, Tensor]:
        return {str(number): each for number, each in enumerate(self.average)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, each in self.state_dict().items():
            each.copy_(state[name])


BEGINS_ANEW = "No checkpoint is there. Training begins anew, and the %d steps that %s has charged stay charged."
ENDED_BY_BUDGET = "The privacy budget ended training after step %d of %d. More noise, or a larger epsilon, goes further."


@dataclass(kw_only=True)
class Progress(run_folder.Moment):
    """How far a run is."""

    recorded_step: int = 0
    num_targets: int = 0
    best_perplexity: float | None = None
    best_step: int = 0
    epochs_since_best: int = 0
    stop: str | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)


class Kept(NamedTuple):
    """What a checkpoint holds of a run under way."""

    model: nn.Module
    optimizer: Optimizer
    mitigation: Mitigation
    average: AveragedWeights


def save_checkpoint(folder: Path, progress: Progress, kept: Kept) -> None:
    """Make `folder` hold this moment and no other; the first process writes it."""
    tensors = {
        **run_folder.prefixed("model", model_tensors(kept.model)),
        **run_folder.prefixed("optimizer", run_folder.optimizer_tensors(kept.optimizer)),
        **run_folder.prefixed("mitigation", kept.mitigation.state_dict()),
        **run_folder.prefixed("average", kept.average.state_dict()),
    }
    whole = whole_tensors(tensors)
    Processes.here().told(lambda: _write_only(folder, whole, progress))


def _write_only(folder: Path, tensors: dict[str, Tensor], progress: Progress) -> None:
    now = folder / f"step-{progress.step}"
    if now.exists():  # the step is the same, what was recorded since is not
        now = folder / f"step-{progress.step}-recorded"
    run_folder.write_moment(now, tensors, progress)
    run_folder.keep_only(folder, now)


def load_checkpoint(folder: Path, kept: Kept, *, start_over: bool = True) -> Progress | None:
    """Bring everything back to the last moment saved; None where none was, or only a damaged one
    that it may `start_over` from."""
    found = Processes.here().told(lambda: _latest(folder, start_over=start_over))
    if found is None:
        return None
    (latest, progress), (model, optimizer, mitigation, average) = found, kept
    tensors = load_file(latest / run_folder.TENSORS)
    weights, there = run_folder.part_of(tensors, "model"), model_tensors(model)
    if {*there} != {*weights}:
        raise UsageError(f"{latest} was saved from a model of another shape. Choose another --out.")
    weights = {name: split_as(weights[name], tensor) for name, tensor in there.items()}
    if has_adapters(model):
        for name, tensor in there.items():
            tensor.copy_(weights[name])
    else:
        model.load_state_dict(weights, strict=False)
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    remembered = {
        name: split_as(tensor, trained[int(name.partition(".")[0])])
        for name, tensor in run_folder.part_of(tensors, "optimizer").items()
    }
    run_folder.load_optimizer_tensors(optimizer, remembered)
    mitigation.load_state_dict(run_folder.part_of(tensors, "mitigation"))
    averages = run_folder.part_of(tensors, "average")
    held = average.state_dict()
    average.load_state_dict({name: split_as(each, held[name]) for name, each in averages.items()})
    return progress


def _latest(folder: Path, *, start_over: bool) -> tuple[Path, Progress] | None:
    if not (states := run_folder.moments_in(folder, Progress, start_over=start_over)):
        return None
    latest = max(states, key=lambda path: (states[path].step, states[path].recorded_step))
    return latest, states[latest]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, tied ones once: safetensors refuses shared memory. Of a model with
    adapters only these, since nothing else changes."""
    if has_adapters(model):
        return adapter_tensors(model)
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        where = (id(tensor) if is_shard(tensor) else tensor.data_ptr(), tensor.shape)
        if where not in seen or not tensor.numel():
            kept[name] = tensor.detach()
            seen.add(where)
    return kept


def keep_last(folder: Path, metrics: list[dict[str, Any]], number: int) -> None:
    """Take away the snapshots that these metrics name, but for the last so many."""
    names = list(dict.fromkeys(line["snapshot"] for line in metrics if line.get("snapshot")))
    there = folder / run_folder.SNAPSHOTS
    for path in [there / name for name in names[:-number]]:
        # What lies elsewhere is not ours to take away.
        if path.is_dir() and not path.is_symlink() and not there.is_symlink():
            shutil.rmtree(path)


def check_disk(out: Path, model: nn.Module, plan: Plan, recipe: Recipe) -> None:
    """Refuse a run that will not find room for its snapshots, before anything is charged for it."""
    weights = sum(each.nbytes for each in model_tensors(model).values())
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    one = weights + size_of(Path(recipe.tokenizer.name_or_path), "*")
    keep = recipe.options.keep_snapshots
    # A new one is whole before the first of those kept goes.
    planned = plan.num_snapshots if keep is None else min(plan.num_snapshots, keep + 1)
    left = max(0, planned - len([*(out / run_folder.SNAPSHOTS).glob("*-*")]))
    copies = 2 + (recipe.config.average_weights is not None)  # of what is trained, in a checkpoint
    needed = one * (left + 1) + 2 * (weights + copies * trained)  # and the model, two checkpoints
    if recipe.options.merge:
        needed += size_of(Path(recipe.config.model), "*.safetensors")
    free = free_disk(out)
    if needed > free:
        raise UsageError(
            f"{out} has {bytes_in_words(free)} free, and the run would need {bytes_in_words(needed)}: {left:,} snapshots of "
            f"{bytes_in_words(one)} each, the model and what a stopped run goes on from. Keep fewer (--keep-snapshots 2, "
            "--snapshot none), train adapters (--lora 16), or give a folder on a larger disk (--out)."
        )


class RunningLoss:
    """Losses on their way into the epoch's sum, looked at some at a time; one that is no number
    raises the alarm."""

    def __init__(self, progress: Progress, *, together: int) -> None:
        self.progress, self._together = progress, together
        self._waiting: list[tuple[Tensor, int]] = []

    def add(self, loss: Tensor, num_targets: int) -> None:
        self._waiting.append((loss, num_targets))
        if len(self._waiting) >= self._together:
            self.look()

    def look(self) -> None:
        """Add what waits to the sum; a loss that is no number raises FloatingPointError."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        values = torch.stack([loss for loss, _ in waiting]).tolist()
        for late, (value, (_, num_targets)) in enumerate(zip(values, waiting, strict=True)):
            if not math.isfinite(value):
                step = self.progress.step - len(waiting) + late + 1
                raise FloatingPointError(f"The loss at step {step} is {value}")
            self.progress.loss_nats += value * num_targets
            self.progress.num_targets += num_targets


class Diverged(UsageError):
    """Training came to losses or weights that are no numbers."""


def in_words(line: dict[str, Any]) -> str:
    seconds = "" if line["seconds"] is None else f", {line['seconds']:.1f} s"
    return f"Epoch {line['epoch']:g}, step {line['step']}: {in_short(line)}{seconds}."


def in_short(line: dict[str, Any]) -> str:
    train, held = line["train_perplexity"], line["validation_perplexity"]
    words = f"perplexity {train or math.inf:.1f}"
    if line["train_loss_nats"] is None:
        words, held = "losses are private", held or line.get("noisy_validation_perplexity")
    return words if held is None else f"{words}, validation {held:.1f}"
