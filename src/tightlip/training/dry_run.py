"""What a training run would take: some of its own steps in a temporary folder, thrown away."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from tightlip.core.checksums import LIST
from tightlip.core.errors import UsageError
from tightlip.core.processes import Processes
from tightlip.core.progress import (
    Estimate,
    free_disk,
    most_gpu_memory,
    most_memory,
    size_of,
    task,
    unseen,
)
from tightlip.core.register import kept_in
from tightlip.core.registry import look_up, names_of
from tightlip.core.run_folder import CHECKPOINT, MODEL, begin_run, check_is_free
from tightlip.core.settings import takes
from tightlip.corpus.prepare import PreparedCorpus, is_prepared
from tightlip.training.checkpoints import save_checkpoint
from tightlip.training.config import RunOptions, TrainConfig, mitigation_config
from tightlip.training.loop import Training
from tightlip.training.losses import validation_scores
from tightlip.training.plan import own_randomness
from tightlip.training.recipe import Recipe, recipe_for, with_canaries
from tightlip.training.run import CORPUS, config_of, prepared_for
from tightlip.training.together import own_device

WARM_UP, MOST_STEPS, ENOUGH_SECONDS = 2, 50, 8.0
MOST_VALIDATED = 512  # rows of held-out text, which are scored once
MOST_PREPARED = 300_000_000  # bytes of a raw corpus that are prepared only to be thrown away


@takes(
    TrainConfig,
    *map(mitigation_config, names_of("mitigation")),
    tables=names_of("mitigation"),
)
def estimate_train(
    corpus: Any,
    out: str | Path,
    *,
    mitigation: Any = "none",
    prepare: dict[str, Any] | None = None,
    options: RunOptions | None = None,
    **settings: Any,
) -> Estimate:
    """What `tightlip.train` would take with the same arguments: seconds, memory and disk.

    A few steps are taken in a temporary folder, private ones too, and forgotten. Nothing is written
    to `out` or to the corpus, nothing is registered, and no ledger is charged. A corpus that is not
    prepared yet is prepared there, too.

    Holds:
        forgotten: the folder, the corpus and the register are as they were.
    """
    config, options = config_of(mitigation, settings), options or RunOptions()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError("--dry-run takes its steps in one process. Start it without torchrun.")
    check_is_free(Path(out))
    with (
        TemporaryDirectory(prefix="tightlip-") as folder,
        kept_in(Path(folder)),
        task("Trying some steps", None),
        unseen(),
    ):
        run = Path(folder) / "run"
        start = time.perf_counter()
        ready = prepared_for(_set_aside(corpus, Path(folder)), run, config, prepare or {})
        preparing = time.perf_counter() - start
        start = time.perf_counter()
        recipe = _recipe(ready, run, config, options)
        device = own_device(options, Processes.here())
        with own_randomness(device, config.seed):
            training = Training(recipe, run, device)
            trial = _Trial(training)
            for _ in range(min(WARM_UP, training.plan.num_steps)):
                trial.seconds(training.take_step)
            starting = time.perf_counter() - start
            stages = {"Preparing": preparing, "Starting": starting, **trial.stages()}
        is_inside = ready.folder.is_relative_to(run)
        return Estimate(
            corpus={
                **{
                    name: ready.statistics["train"][name]
                    for name in ("documents", "users", "tokens")
                },
                "rows": len(recipe.rows),
                "steps": training.plan.num_steps,
                "parameters": sum(each.numel() for each in training.model.parameters()),
            },
            stages=stages,
            memory_bytes=most_memory(),
            gpu_memory_bytes=most_gpu_memory(device),
            disk_bytes=trial.kept_bytes() + (size_of(run / CORPUS) if is_inside else 0),
            passing_disk_bytes=2 * size_of(run / CHECKPOINT),
            free_disk_bytes=free_disk(Path(out)),
            notes=_notes(config, trial.num_timed),
        )


def _set_aside(corpus: Any, folder: Path) -> Any:
    """A prepared corpus by links, so that what a private run writes beside it goes elsewhere; a raw
    one itself, unless it is so large that it should be prepared for good."""
    if isinstance(corpus, PreparedCorpus):
        corpus = corpus.folder
    if not isinstance(corpus, str | Path):
        return corpus
    if is_prepared(Path(corpus)):
        linked = folder / "prepared"
        linked.mkdir()
        for path in Path(corpus).resolve().iterdir():
            if path.suffix in (".json", Path(LIST).suffix):  # what may be written anew
                shutil.copyfile(path, linked / path.name)
            else:
                (linked / path.name).symlink_to(path)
        return linked
    path = Path(corpus)
    if (size_of(path) if path.is_dir() else path.stat().st_size) > MOST_PREPARED:
        raise UsageError(
            f"{corpus} is not prepared, and to try a step it would have to be, which takes long and would be thrown away. Run: "
            "tightlip prepare CORPUS --out DIR, then tightlip train DIR --dry-run"
        )
    return corpus


def _recipe(ready: PreparedCorpus, run: Path, config: TrainConfig, options: RunOptions) -> Recipe:
    """The run's own recipe, of nobody: what is tried here is spent on no one."""
    recipe = recipe_for(ready, run, config, options, frozenset())
    look_up("mitigation", config.mitigation.name)().check(config, recipe.corpus)
    recipe = replace(recipe, corpus=replace(recipe.corpus, people=(), is_trial=True))
    begin_run(run, recipe.tree)
    return with_canaries(recipe, run)


class _Trial:
    """Some steps of a run, and each thing that follows steps once."""

    def __init__(self, training: Training) -> None:
        self.training, self.plan = training, training.plan
        self.num_timed = 0

    def seconds(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        if self.training.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def stages(self) -> dict[str, float]:
        """Seconds of steps, of looking at held-out text and of saving, over the whole run."""
        training, plan = self.training, self.plan
        left = plan.num_steps - training.progress.step
        taken = 0.0
        while self.num_timed < min(left, MOST_STEPS) and taken < ENOUGH_SECONDS:
            taken += self.seconds(training.take_step)
            self.num_timed += 1
        steps = left * taken / max(1, self.num_timed)
        model = self.seconds(lambda: training.save_model(training.out / MODEL))
        checkpoint = self.seconds(
            lambda: save_checkpoint(training.out / CHECKPOINT, training.progress, training.kept)
        )
        num_epochs = max(1, plan.num_steps // plan.steps_per_epoch)
        num_checkpoints = max(num_epochs, steps / max(1.0, training.options.checkpoint_seconds))
        return {
            "Training": steps,
            "Measuring": plan.num_recorded * self._validating(),
            "Saving": (plan.num_snapshots + 1) * model + num_checkpoints * checkpoint,
        }

    def _validating(self) -> float:
        """Seconds of one look at all held-out text."""
        rows = self.training.recipe.validation
        if rows is None:
            return 0.0
        order = np.argsort(rows.num_inputs)
        chosen = order[np.linspace(0, len(order) - 1, min(len(order), MOST_VALIDATED)).astype(int)]
        some = rows.only(chosen)
        forward = self.training.forward
        self.seconds(lambda: validation_scores(forward, rows.only(chosen[-1:])))
        took = self.seconds(lambda: validation_scores(forward, some))
        return took * float(rows.num_inputs.sum() / some.num_inputs.sum())

    def kept_bytes(self) -> int:
        """What the run leaves: the model, and as many snapshots as are kept."""
        keep, planned = self.training.options.keep_snapshots, self.plan.num_snapshots
        num_kept = planned if keep is None else min(planned, keep)
        return (num_kept + 1) * size_of(self.training.out / MODEL)


def _notes(config: TrainConfig, num_timed: int) -> list[str]:
    notes = [f"Seconds are those of {num_timed} steps of the run, in proportion."]
    if config.early_stop or config.until_perplexity or config.mitigation.is_private:
        notes.append("The run may stop earlier, by its own rules or by its privacy budget.")
    if config.trials is not None:
        notes.append("This is one training; how many are tried is drawn, and not known beforehand.")
    return notes
