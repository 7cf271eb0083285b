"""The one training loop. Mitigations decide what a step is, the plan what follows it."""

import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tightlip.core import run_folder
from tightlip.core.errors import TightlipError
from tightlip.core.files import claimed
from tightlip.core.processes import Processes
from tightlip.core.progress import Task, held_interrupts, log, logged_to, stopped_after, task
from tightlip.core.registry import look_up
from tightlip.corpus.prepare import PreparedCorpus
from tightlip.training import checkpoints, losses, plan, starting, together
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.lora import check_mergeable
from tightlip.training.mitigations import Mitigation, RunContext
from tightlip.training.recipe import SAME_RUN, Recipe, recipe_for, with_canaries

BUDGET = "privacy budget"  # why a run stopped
LOOKED_AT_TOGETHER = 32  # losses; on a GPU each look waits for it


def train_model(
    corpus: PreparedCorpus,
    out: Path,
    config: TrainConfig,
    options: RunOptions | None = None,
    *,
    without_users: frozenset[int] = frozenset(),
    is_trial: bool = False,
) -> run_folder.RunRecord:
    """Train a language model on `corpus` into the run folder `out`; go on where one stopped.

    Documents of `without_users`, by number, are left out. A trial is registered by who chooses.

    Holds:
        deterministic: on the CPU, the same settings give the same weights bit for bit.
        resumed: so does a run that was killed, however often, and started again.
        untouched: a finished run with the same settings is returned as it is.
        together: several processes train what one would; only the first writes.
    """
    out, options, processes = Path(out), options or RunOptions(), Processes.here()
    if options.merge:
        check_mergeable(config)
    device = together.own_device(options, processes)
    mitigation: Mitigation = look_up("mitigation", config.mitigation.name)()
    recipe = together.in_turn(
        processes, lambda: recipe_for(corpus, out, config, options, without_users)
    )
    processes.told(lambda: mitigation.check(config, recipe.corpus))
    if is_trial:
        recipe = replace(recipe, corpus=replace(recipe.corpus, people=(), is_trial=True))
    processes.told(lambda: run_folder.check_may_train(out, recipe.tree, same=SAME_RUN))
    if processes.told(lambda: run_folder.is_finished(out)):
        return processes.told(lambda: _finished_run(out, options))
    is_new = not out.exists()
    with together.by_first(processes, claimed(out)):
        processes.told(lambda: run_folder.check_may_train(out, recipe.tree, same=SAME_RUN))
        if not without_users:
            recipe = together.in_turn(processes, lambda: with_canaries(recipe, out))
        begins = processes.told(lambda: not run_folder.is_run(out))
        if begins:
            processes.told(lambda: run_folder.begin_run(out, recipe.tree))
        with (
            together.by_first(processes, logged_to(out / run_folder.LOG)),
            plan.own_randomness(device, config.seed),
        ):
            try:
                training = Training(recipe, out, device)
            except TightlipError:
                if begins and processes.is_first:
                    # Nothing was trained: the folder is free for a better try.
                    run_folder.abandon_run(out, made_it=is_new)
                raise
            training.run()
    return processes.told(lambda: run_folder.open_run(out))


def _finished_run(out: Path, options: RunOptions) -> run_folder.RunRecord:
    run = run_folder.open_run(out)
    # Of a run killed at its very end.
    shutil.rmtree(out / run_folder.CHECKPOINT, ignore_errors=True)
    if options.merge and not (out / run_folder.MERGED).exists():
        with claimed(out):
            starting.save_merged(out)
    return run


class Training:
    """One run under way."""

    def __init__(self, recipe: Recipe, out: Path, device: torch.device) -> None:
        self.recipe, self.out, self.device = recipe, out, device
        self.config, self.options = recipe.config, recipe.options
        self.processes = Processes.here()
        self.mitigation: Mitigation = look_up("mitigation", self.config.mitigation.name)()
        self.plan = plan.Plan(
            config=self.config,
            steps_per_epoch=self.mitigation.steps_per_epoch(recipe.rows, self.config),
        )
        largest_id = int(recipe.rows.tokens.max())
        self.model = starting.model_to_train(
            recipe.config, recipe.options, recipe.tokenizer, device, largest_id
        )
        self.processes.told(lambda: checkpoints.check_disk(out, self.model, self.plan, recipe))
        self.model.train()
        whole = self.config.mitigation.takes_whole_batches and not losses.is_recurrent(self.model)
        own_rows = len(together.Part.of(self.config.batch_size, self.processes).run)
        self.forward = losses.Forward(
            self.model,
            bf16=self.options.bf16,
            compiled_rows=own_rows if self.options.compile and whole else None,
        )
        self.optimizer = plan.build_optimizer(self.model, self.config)
        self.average = checkpoints.AveragedWeights(self.model, self.config.average_weights)
        self.kept = checkpoints.Kept(self.model, self.optimizer, self.mitigation, self.average)
        self.mitigation.prepare(self._context())
        self.progress = checkpoints.Progress()
        self.losses = checkpoints.RunningLoss(
            self.progress, together=1 if device.type == "cpu" else LOOKED_AT_TOGETHER
        )
        self.clock = self.saved_at = time.monotonic()
        self.saved = (0, 0)
        self.to_beat: dict[str, float | None] = {}

    def run(self) -> None:
        # Before a checkpoint is loaded: here the weights are those that training starts from.
        if self.config.mitigation.is_private and self.recipe.validation is not None:
            self.to_beat = losses.perplexities_to_beat(
                self.forward, self.recipe.rows, self.recipe.validation
            )
        self.go_back()
        try:
            self.take_steps()
        except FloatingPointError as error:
            raise self.diverged(str(error)) from error
        self.finish()

    def take_steps(self) -> None:
        """All steps that are left; FloatingPointError where a loss or a weight is no number."""
        # What starts several processes passes a Ctrl-C on that the terminal has sent them already.
        held = held_interrupts(second_raises=not self.processes.are_several)
        with task("Training", self.plan.num_steps) as bar, held as interruption:
            bar.advance(self.progress.step)
            self.record_if_due(bar)
            while self.progress.stop is None:
                if not self.mitigation.may_go_on():
                    self.record_if_due(bar, stop=BUDGET)
                    bar.note("the privacy budget is spent")
                    bar.end_here()
                    break
                self.take_step()
                bar.advance()
                bar.note(self.mitigation.progress_words())
                self.record_if_due(bar)
                due = time.monotonic() - self.saved_at >= self.options.checkpoint_seconds
                if together.any_wants(self.processes, due and self.processes.is_first):
                    self.save()
                if together.any_wants(self.processes, interruption.wanted):
                    self.save()
                    raise stopped_after(self.progress.step, self.plan.num_steps)

    def take_step(self) -> None:
        plan.seed_step(self.config.seed, self.progress.step, self.processes.rank)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate(self.progress.step)
        loss, num_targets = self.mitigation.step(self.progress.step)
        self.progress.step += 1
        self.average.add(self.progress.step)
        self.losses.add(loss, num_targets)

    def record_if_due(self, bar: Task, *, stop: str | None = None) -> None:
        """Measure, decide whether to stop, keep a snapshot and a line of metrics."""
        progress, step = self.progress, self.progress.step
        if stop is None and (step == progress.recorded_step or not self.plan.is_recorded(step)):
            return
        self.catch_up()
        if tells := self.config.mitigation.tells_validation:
            self.save()  # first: whoever goes on from here has the weights that something was told of
        line = self.measure()
        progress.stop = stop or self.reason_to_stop(line)
        if (name := self.plan.snapshot_name(step)) is not None:
            self.save_model(run_folder.snapshot_folder(self.out, name))
        line |= {"snapshot": name} if name else {}
        line |= {"stop": progress.stop} if progress.stop else {}
        progress.metrics.append(line)
        private = self.recipe.private_figures
        self.processes.told(
            lambda: run_folder.write_metrics(self.out, progress.metrics, private=private)
        )
        progress.recorded_step = step
        log.info(checkpoints.in_words(run_folder.without_private(line, private)))
        bar.note(self.mitigation.progress_words() if private else checkpoints.in_short(line))
        self.clock = time.monotonic()  # what was done since the step is not training
        if self.plan.ends_epoch(step):
            progress.loss_nats, progress.num_targets, progress.seconds = 0.0, 0, 0.0
        if tells or self.plan.ends_epoch(step):
            self.save()
        self.drop_old_snapshots()

    def drop_old_snapshots(self) -> None:
        if (num := self.options.keep_snapshots) is not None:
            self.save()  # first: no resumption goes back to before what is taken away
            self.processes.told(lambda: checkpoints.keep_last(self.out, self.progress.metrics, num))

    def measure(self) -> dict[str, Any]:
        """A line of metrics. Training loss and seconds run from the epoch's start."""
        progress = self.progress
        if not losses.is_finite(self.model):
            raise FloatingPointError(f"The weights after step {progress.step} are not all numbers")
        line: dict[str, Any] = {
            "step": progress.step,
            "epoch": self.plan.epoch(progress.step),
            "train_loss_nats": progress.loss_nats / max(1, progress.num_targets),
            "train_perplexity": losses.perplexity(progress.loss_nats, progress.num_targets),
            "validation_loss_nats": None,
            "validation_perplexity": None,
            "validation_accuracy": None,
            **self.to_beat,
            "learning_rate": self.plan.learning_rate(max(0, progress.step - 1)),
            "seconds": round(progress.seconds, 3),
        }
        private = self.config.mitigation.is_private
        if progress.num_targets and line["train_perplexity"] is None and not private:
            raise FloatingPointError(
                f"The loss before step {progress.step} is {line['train_loss_nats']:.3g} nats a token"
            )
        if self.recipe.validation is None:
            return line
        with self.average.in_place():
            if self.config.mitigation.tells_validation:
                nats = self.mitigation.told_loss(self.recipe.validation)
                line["noisy_validation_perplexity"] = None if nats is None else math.exp(nats)
            scores = losses.validation_scores(self.forward, self.recipe.validation)
        if not math.isfinite(scores.loss_nats):
            if private:
                return line  # a run that ended here would tell of somebody's text
            raise FloatingPointError(
                f"The validation loss after step {progress.step} is {scores.loss_nats}"
            )
        return line | {
            "validation_loss_nats": scores.loss_nats / scores.num_targets,
            "validation_perplexity": losses.perplexity(scores.loss_nats, scores.num_targets),
            "validation_accuracy": scores.num_first / scores.num_targets,
        }

    def reason_to_stop(self, line: dict[str, Any]) -> str | None:
        told = "noisy_" if self.config.mitigation.tells_validation else ""
        progress, validation = self.progress, line.get(f"{told}validation_perplexity")
        if validation is not None and validation <= (self.config.until_perplexity or 0):
            return "target perplexity"
        if self.plan.ends_epoch(progress.step) and self.recipe.validation is not None:
            progress.epochs_since_best += 1
            if validation is not None and validation < (progress.best_perplexity or math.inf):
                progress.best_perplexity, progress.best_step = validation, progress.step
                progress.epochs_since_best = 0
            if progress.epochs_since_best >= (self.config.early_stop or math.inf):
                return "early stop"
        if progress.step >= self.plan.num_steps:
            return "steps" if self.config.steps is not None else "epochs"
        return None

    def save(self) -> None:
        self.catch_up()
        moment = (self.progress.step, self.progress.recorded_step)
        if moment != self.saved:
            self.mitigation.settle()
            checkpoints.save_checkpoint(self.out / run_folder.CHECKPOINT, self.progress, self.kept)
        self.saved = moment
        self.clock = self.saved_at = time.monotonic()

    def catch_up(self) -> None:
        """Bring the sums and seconds of the epoch up to the last step."""
        self.losses.look()
        now = time.monotonic()
        self.progress.seconds += now - self.clock
        self.clock = now

    def go_back(self) -> None:
        """Start where the last checkpoint stands, or at the beginning; forget what came later."""
        private = self.config.mitigation.is_private
        saved = checkpoints.load_checkpoint(
            self.out / run_folder.CHECKPOINT, self.kept, start_over=not private
        )
        if saved is not None:
            log.info("Going on after step %d.", saved.step)
            self.progress = self.losses.progress = saved
        else:
            log.info(self.described())
            self.warn_of_lost_steps()
        metrics, figures = self.progress.metrics, self.recipe.private_figures
        self.processes.told(lambda: run_folder.go_back_to(self.out, metrics, private=figures))
        self.clock = self.saved_at = time.monotonic()

    def warn_of_lost_steps(self) -> None:
        """A private run without its checkpoint begins anew, and what it charged stays charged."""
        ledger = self.out / run_folder.LEDGER
        if ledger.is_file() and (steps := run_folder.read_ledger_file(ledger)[0].get("steps")):
            log.warning(checkpoints.BEGINS_ANEW, steps, ledger)

    def finish(self) -> None:
        """Leave the model and what may be said of it; the ledger comes last and marks the end."""
        progress = self.progress
        self.drop_old_snapshots()  # a killed run may have been about to
        self.save_model(self.out / run_folder.MODEL)
        if self.options.merge:
            self.processes.told(lambda: starting.save_merged(self.out))
        if self.config.until_perplexity is not None and progress.stop != "target perplexity":
            log.warning("until_perplexity=%g was not reached.", self.config.until_perplexity)
        if progress.stop == BUDGET:
            log.warning(checkpoints.ENDED_BY_BUDGET, progress.step, self.plan.num_steps)
        log.info("Done after step %d (%s).%s", progress.step, progress.stop, self.best_in_words())
        record = self.mitigation.guarantee(progress.step) | {"finished": True}
        self.processes.told(lambda: self.write_ledger(record))
        if self.processes.is_first:
            shutil.rmtree(self.out / run_folder.CHECKPOINT, ignore_errors=True)

    def write_ledger(self, record: dict[str, Any]) -> None:
        if record.get("epsilon") is None:  # snapshots were told of before it was lost
            starting.tell_beside_models(run_folder.open_run(self.out), record)
        run_folder.write_ledger(self.out, record)

    def save_model(self, folder: Path) -> None:
        """Leave the weights as they are now, or their average, and on their card what may be said."""
        self.mitigation.settle()
        ended = self.progress.stop is not None
        card = self.mitigation.guarantee(self.progress.step, ended=ended)
        tokenizer, corpus = self.recipe.tokenizer, self.out / self.recipe.tree["corpus"]["folder"]
        with self.average.in_place():
            tensors = starting.saved_tensors(self.model)
            self.processes.told(
                lambda: starting.save_model(
                    folder,
                    self.model,
                    tokenizer,
                    card | starting.origin_told(self.config, corpus, card),
                    tensors,
                )
            )

    def best_in_words(self) -> str:
        best, step = self.progress.best_perplexity, self.progress.best_step
        if best is None or step == self.progress.step or self.config.mitigation.is_private:
            return ""
        return f" Validation perplexity was best after step {step}: {best:.2f}."

    def diverged(self, what: str) -> checkpoints.Diverged:
        snapshots = [line["snapshot"] for line in self.progress.metrics if "snapshot" in line]
        good = run_folder.snapshot_folder(self.out, snapshots[-1]) if snapshots else None
        kept = f" The last good snapshot is {good}." if good else ""
        clips = self.config.mitigation.is_private or self.config.gradient_clip
        clip = "" if clips else ", or add gradient_clip=1.0"
        error = checkpoints.Diverged(
            f"{what}: training diverged. Use a learning_rate below {self.config.learning_rate:g}{clip}, "
            f"and another --out.{kept}"
        )
        log.error(str(error))
        return error

    def described(self) -> str:
        trained = [each.numel() for each in self.model.parameters() if each.requires_grad]
        rows, size = self.recipe.rows, ""
        if not self.config.mitigation.is_private:  # else exact counts of private text
            size = f"{len(rows):,} rows, {int(rows.num_targets.sum()):,} targets, "
        return (
            f"Training {self.config.model} ({sum(trained):,} parameters, mitigation {self.config.mitigation.in_words()}) on "
            f"{self.device}: {size}{self.plan.steps_per_epoch:,} steps an epoch, {self.plan.num_steps:,} in all."
        )

    def _context(self) -> RunContext:
        return RunContext(
            model=self.model,
            forward=self.forward,
            optimizer=self.optimizer,
            rows=self.recipe.rows,
            config=self.config,
            options=self.options,
            device=self.device,
            folder=self.out,
            corpus=self.recipe.corpus,
            steps_per_epoch=self.plan.steps_per_epoch,
            num_steps=self.plan.num_steps,
            processes=self.processes,
        )
