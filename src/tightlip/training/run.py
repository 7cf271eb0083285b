"""`tightlip train` as one call; and what it would take, by some of its own steps in a temporary
folder, thrown away."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from tightlip.core import progress, run_folder
from tightlip.core.checksums import LIST
from tightlip.core.errors import TightlipError, UsageError
from tightlip.core.files import claimed, names_in
from tightlip.core.processes import Processes, joined_processes
from tightlip.core.register import kept_in
from tightlip.core.registry import look_up, names_of
from tightlip.core.settings import takes
from tightlip.corpus.history import history_of
from tightlip.corpus.prepare import (
    PreparedCorpus,
    held_out_corpus,
    is_prepared,
    open_prepared,
    prepare_corpus,
)
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.corpus.shared_text import spread_out
from tightlip.models.folders import is_adapter
from tightlip.training.checkpoints import save_checkpoint
from tightlip.training.config import BUILT_IN_MODELS, RunOptions, TrainConfig, mitigation_config
from tightlip.training.loop import Training, train_model
from tightlip.training.lora import check_mergeable
from tightlip.training.losses import validation_scores
from tightlip.training.mitigations import CorpusFacts
from tightlip.training.plan import own_randomness
from tightlip.training.recipe import Recipe, recipe_for, with_canaries
from tightlip.training.together import by_first, one_voice, own_device
from tightlip.training.trials import choose

CORPUS = "corpus"  # prepared inside the run where a raw one was given
# Of a dry run.
WARM_UP, MOST_STEPS, ENOUGH_SECONDS = 2, 50, 8.0
MOST_VALIDATED = 512  # rows of held-out text, which are scored once
MOST_PREPARED = 300_000_000  # bytes of a raw corpus that are prepared only to be thrown away


_takes_settings = takes(
    TrainConfig, *map(mitigation_config, names_of("mitigation")), tables=names_of("mitigation")
)


@_takes_settings
def train(
    corpus: Any,
    out: str | Path,
    *,
    mitigation: Any = "none",
    prepare: dict[str, Any] | None = None,
    options: RunOptions | None = None,
    **settings: Any,
) -> run_folder.RunRecord:
    """Train a language model, by plain training or with a mitigation against leakage.

    `mitigation` is its name, with its own settings beside the run's, or an object such as
    DPConfig(epsilon=8). A corpus that is not prepared yet is prepared inside the run, by the
    settings in `prepare` (those of PrepareConfig). Called in each of the processes that torchrun
    started, all train together.
    """
    config = config_of(mitigation, settings)
    out, options = Path(out), options or RunOptions()
    if options.merge and config.trials is None:
        check_mergeable(config)  # before a corpus is prepared
    with (
        joined_processes(options.device) as processes,
        one_voice(processes),
        by_first(processes, claimed(out)),
        by_first(processes, _nothing_left_of_a_refusal(out)),
    ):
        # Or private text would be prepared in somebody's folder.
        processes.told(lambda: run_folder.check_is_free(out))
        ready = _by_first(processes, lambda: prepared_for(corpus, out, config, prepare or {}))
        if config.trials is not None:
            return choose(ready, out, config, options)
        return train_model(ready, out, config, options)


def config_of(mitigation: Any, settings: dict[str, Any]) -> TrainConfig:
    """The settings of a run; a model that is itself a run stands for what that trained."""
    model = settings.get("model", BUILT_IN_MODELS[0])
    if model not in BUILT_IN_MODELS and run_folder.is_run(Path(model)):
        settings = {**settings, "model": str(_model_of(Path(model)))}
    return TrainConfig.of(mitigation=mitigation, **settings)


def _model_of(run: Path) -> Path:
    """The model that a run stands for: the one it trained, of adapters merged."""
    if not is_adapter(run / run_folder.MODEL):
        return run / run_folder.MODEL
    if not (run / run_folder.MERGED).is_dir():
        raise UsageError(
            f"{run} trained adapters, and training goes on from a whole model. Give its train command again with merge=True, "
            f"which writes {run / run_folder.MERGED}."
        )
    return run / run_folder.MERGED


@contextmanager
def _nothing_left_of_a_refusal(out: Path) -> Iterator[None]:
    """Take away the corpus that was prepared for a run that never began."""
    had_run, had_corpus, was_there = run_folder.is_run(out), (out / CORPUS).exists(), out.exists()
    try:
        yield
    except TightlipError:
        if had_run or not run_folder.is_run(out):
            if not had_corpus:
                shutil.rmtree(out / CORPUS, ignore_errors=True)
            if not was_there and out.exists() and not names_in(out) - {run_folder.LOG}:
                shutil.rmtree(out)
        raise


def _by_first(processes: Processes, prepare: Callable[[], PreparedCorpus]) -> PreparedCorpus:
    """What the first process prepares; the others open what it left."""
    ready: list[PreparedCorpus] = []

    def prepared() -> Path:
        ready.append(prepare())
        return Path(ready[0].folder)

    folder = processes.told(prepared)
    return ready[0] if ready else open_prepared(folder)


def prepared_for(
    corpus: Any, out: Path, config: TrainConfig, settings: dict[str, Any]
) -> PreparedCorpus:
    """The corpus as it was prepared, or as it is now, inside the run."""
    if isinstance(corpus, PreparedCorpus):
        return corpus
    if isinstance(corpus, str | Path) and is_prepared(Path(corpus)):
        ready = open_prepared(Path(corpus))
        other = [n for n, v in settings.items() if not _as_prepared(n, v, ready)]
        if other:
            raise UsageError(
                f"{corpus} was prepared with other settings, so {', '.join(sorted(other))} would do "
                f"nothing. Leave it out, or give the raw corpus."
            )
        return ready
    settings = {"seed": config.seed, **settings}
    if (split := config.mitigation.held_out_by_default()) is not None:
        settings = {"split": split, **settings}
    if config.model not in BUILT_IN_MODELS:
        settings = _with_tokenizer_of(config.model, settings)
    chosen = PrepareConfig(**settings)
    _check_promise(config, chosen, history_of(corpus))
    ready = prepare_corpus(corpus, out / CORPUS, chosen)
    for warning in ready.statistics["warnings"]:
        progress.log.warning("%s", warning)
    return ready


def _as_prepared(name: str, value: Any, ready: PreparedCorpus) -> bool:
    """Whether a setting says what the corpus was prepared with; held-out text by its text."""
    if name == "seed":
        return True
    if name not in ("validation", "public_validation") or ready.settings.get(name) is None:
        return bool(ready.settings.get(name) == value)
    public = value if ready.settings.get("public_validation") is not None else None
    other = ready.settings | {"validation": value, "public_validation": public}
    held_out = held_out_corpus(PrepareConfig(**other))
    assert held_out is not None
    return held_out.fingerprint() == ready.validation_fingerprint


def _check_promise(
    config: TrainConfig, chosen: PrepareConfig, history: list[dict[str, Any]]
) -> None:
    """Refuse settings of the corpus that the mitigation's promise cannot bear, before hours of
    preparing it."""
    release = chosen.release()
    facts = CorpusFacts(
        text_fingerprint="",
        name="",
        settings=asdict(chosen),
        releases=[] if release is None else [release.record()],
        learnt_vocabulary=chosen.tokenizer is None and release is None,
        history=history,
    )
    look_up("mitigation", config.mitigation.name)().check(config, facts)


def _with_tokenizer_of(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A model that goes on training speaks through the tokenizer it came with."""
    shaping = {"vocabulary", "vocabulary_size", "min_users", "vocabulary_noise"} & settings.keys()
    if "tokenizer" not in settings and shaping:
        raise UsageError(
            f"{model} brings its own tokenizer, so {', '.join(sorted(shaping))} would do nothing. "
            f"Leave it out."
        )
    return {"tokenizer": model, **settings}


def retrain_without(
    run: run_folder.RunRecord, users: frozenset[int], out: Path
) -> run_folder.RunRecord:
    """The run's recipe and options on its own corpus, without any document of these users."""
    config = TrainConfig.from_tree(run.config["train"], str(run.folder))
    options = RunOptions.from_tree(run.config.get("options", {}), str(run.folder))
    options = replace(options, merge=False)
    return train_model(open_prepared(run.corpus_folder), out, config, options, without_users=users)


@_takes_settings
def estimate_train(
    corpus: Any,
    out: str | Path,
    *,
    mitigation: Any = "none",
    prepare: dict[str, Any] | None = None,
    options: RunOptions | None = None,
    **settings: Any,
) -> progress.Estimate:
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
    run_folder.check_is_free(Path(out))
    with (
        TemporaryDirectory(prefix="tightlip-") as folder,
        kept_in(Path(folder)),
        progress.task("Trying some steps", None),
        progress.unseen(),
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
        return progress.Estimate(
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
            memory_bytes=progress.most_memory(),
            gpu_memory_bytes=progress.most_gpu_memory(device),
            disk_bytes=trial.kept_bytes() + (progress.size_of(run / CORPUS) if is_inside else 0),
            passing_disk_bytes=2 * progress.size_of(run / run_folder.CHECKPOINT),
            free_disk_bytes=progress.free_disk(Path(out)),
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
    if (progress.size_of(path) if path.is_dir() else path.stat().st_size) > MOST_PREPARED:
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
    run_folder.begin_run(run, recipe.tree)
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
        model = self.seconds(lambda: training.save_model(training.out / run_folder.MODEL))
        checkpoint = self.seconds(
            lambda: save_checkpoint(
                training.out / run_folder.CHECKPOINT, training.progress, training.kept
            )
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
        if (rows := self.training.recipe.validation) is None:
            return 0.0
        chosen = spread_out(np.argsort(rows.num_inputs), MOST_VALIDATED)
        some = rows.only(chosen)
        forward = self.training.forward
        self.seconds(lambda: validation_scores(forward, rows.only(chosen[-1:])))
        took = self.seconds(lambda: validation_scores(forward, some))
        return took * float(rows.num_inputs.sum() / some.num_inputs.sum())

    def kept_bytes(self) -> int:
        """What the run leaves: the model, and as many snapshots as are kept."""
        keep, planned = self.training.options.keep_snapshots, self.plan.num_snapshots
        num_kept = planned if keep is None else min(planned, keep)
        return (num_kept + 1) * progress.size_of(self.training.out / run_folder.MODEL)


def _notes(config: TrainConfig, num_timed: int) -> list[str]:
    notes = [f"Seconds are those of {num_timed} steps of the run, in proportion."]
    if config.early_stop or config.until_perplexity or config.mitigation.is_private:
        notes.append("The run may stop earlier, by its own rules or by its privacy budget.")
    if config.trials is not None:
        notes.append("This is one training; how many are tried is drawn, and not known beforehand.")
    return notes
