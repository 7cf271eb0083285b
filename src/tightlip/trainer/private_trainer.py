"""transformers' Trainer, made private: its model, optimizer, schedule, callbacks, loggers and folders,
and our sampling, clipping, noise and ledger.

The trainer's loop goes over empty batches. In each step `PrivateTraining` draws users, charges the
ledger, and puts noisy gradients where the trainer finds them; whatever it does with them costs
nothing more.
"""

import atexit
import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import SaveStrategy, TrainOutput

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.figures import counted
from tightlip.core.processes import Processes, leave_at_exit
from tightlip.core.progress import log
from tightlip.core.register import weights_in
from tightlip.core.run_folder import LEDGER
from tightlip.privacy.asking import refuse_hooks
from tightlip.privacy.ledger import read_ledger
from tightlip.privacy.people import ids_of
from tightlip.privacy.plans import PrivacySpec, Terms, unregistered
from tightlip.privacy.private_training import PrivateTraining
from tightlip.privacy.sources import LabelledRows, sampled_units
from tightlip.trainer import weights
from tightlip.trainer.leakage_callback import LeakageCallback
from tightlip.trainer.refusals import refuse_arguments, refuse_trainer
from tightlip.trainer.rows import labelled_rows, users_left, users_of
from tightlip.training.checkpoints import ENDED_BY_BUDGET
from tightlip.training.mitigations.dp import warn_of_too_few

_LOGGED = ("learning_rate", "grad_norm", "epoch")
_DROPPED = "%s of %s without a token to learn, such as a prompt of max_length tokens, were left out as the dataset was prepared."
_LOST = "Of what is on record %s came after the last checkpoint of a training that ended early. A smaller save_steps loses fewer."

if torch.distributed.is_available():
    import torch.distributed.nn  # or it keeps the group that accelerate makes

if not hasattr(Trainer, "_prepare_for_training"):
    raise UsageError(
        f"transformers {transformers.__version__} has another Trainer than the one that is made private here. Run: pip install -U "
        "transformers"
    )
_Library: Any = Trainer if TYPE_CHECKING else object  # a mixin has no base of its own


class PrivateMixin(_Library):
    """Differentially private training in a trainer of transformers' kind.

    Arguments, beside the trainer's own:
        privacy: the target and what else changes the promise. Batch and steps are the trainer's: a step
            draws per_device_train_batch_size × gradient_accumulation_steps × processes units on average, and
            an epoch is as many steps as draw every unit once on average.
        user_column: the column of train_dataset that says whose each row is; of unit='user' only.
        people: a name of yours for whose text it is, published with the weights: all runs that count for
            the same people are then counted together.
        start: the folder that the weights came from, where the model does not tell: of an adapter that
            was trained before, or 'public' where nothing but public text shaped them.
        public_evaluation: say that nobody in eval_dataset is to be protected.
        exact_sums: add units up as whole numbers, so that none changes how another is rounded.

    Holds:
        charged: a step is in `output_dir`/ledger.json before it changes a weight.
        nothing_measured: logs and trainer_state.json hold learning rate, noisy gradient norm and ε only.
        refused: what would make ε untrue is refused before the first step.
        by_choice: after whatever train() itself sees end, no step is repeated that was planned once.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *others: Any,
        privacy: PrivacySpec | None = None,
        user_column: str | None = None,
        people: str | None = None,
        start: str | Path | None = None,
        public_evaluation: bool = False,
        exact_sums: bool = False,
        **rest: Any,
    ) -> None:
        if not isinstance(privacy, PrivacySpec):
            raise UsageError(
                f"privacy={privacy!r} does not say what to promise. Give privacy=PrivacySpec(epsilon=8, unit='user')."
            )
        _check_unit(privacy.unit, user_column)
        self._users = users_of(train_dataset, user_column)
        self._num_rows = len(train_dataset)
        self.privacy, self.user_column, self.people = privacy, user_column, people
        self.start = start
        self._before: list[dict[str, Any]] | None = None
        self._begun_at = 0
        self.public_evaluation, self.exact_sums = public_evaluation, exact_sums
        self.private: PrivateTraining | None = None
        self._source: LabelledRows | None = None
        self._told: dict[str, Any] = {}
        self._left: weights.Left = []
        self._accumulated = 1
        if args is not None:
            refuse_arguments(args)
            # A step draws all of a batch at once; the caller's arguments stay as they are.
            args = copy.copy(args)
            self._accumulated = args.gradient_accumulation_steps
            args.gradient_accumulation_steps = 1
        given = (model, args, data_collator, train_dataset, *others)
        super().__init__(*given, **rest)
        atexit.register(leave_at_exit)
        refuse_trainer(self, PrivateMixin, public_evaluation)
        # TRL's own preparation drops rows; another one that leaves fewer may have put several into one.
        prepare = getattr(self, "_prepare_dataset", None)
        self._match_rows(may_drop=getattr(prepare, "__module__", "").startswith("trl."))
        self.add_callback(_StopsWithBudget(self))

    @property
    def expected_batch(self) -> int:
        """Units in a step, on average."""
        args = self.args
        return int(args.per_device_train_batch_size * self._accumulated * args.world_size)

    def get_total_train_batch_size(self, args: Any) -> int:
        return self.expected_batch

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **rest: Any) -> Any:
        """Train; or, with a checkpoint of this run, go on. Nothing measured is returned."""
        if trial is not None:
            self.hyperparameter_search()
        refuse_trainer(self, PrivateMixin, self.public_evaluation)
        ledger = self._folder / LEDGER
        if (folder := weights.checkpoint_of(resume_from_checkpoint, self._folder)) is not None:
            Processes.here().told(partial(weights.check_checkpoint, folder, ledger))
        # Of the weights as they were given, not as a checkpoint leaves them.
        self._before = Processes.here().told(
            partial(weights.runs_behind, self.model, self.start, ledger)
        )
        self._match_rows(may_drop=False)
        for each in self.callback_handler.callbacks:
            if isinstance(each, LeakageCallback):
                each.tells = each.public
        self._source = labelled_rows(self.train_dataset, self, self._users)
        self.private, self._told, self._left = None, {}, []
        try:
            done = super().train(folder and str(folder), **rest)
            assert self.private is not None
            self._told = self.private.guarantee()
            if done.global_step < self.state.max_steps and not self.may_step():
                log.warning(ENDED_BY_BUDGET, done.global_step, self.state.max_steps)
                if lost := self.private.ledger.steps - done.global_step:
                    log.warning(_LOST, counted(lost, "step"))
        except BaseException:
            # Whoever sees it end has seen what it gave. On this process alone: others may be gone.
            if self.private is not None and self.private.ledger.steps > self._begun_at:
                self.private.ledger.finish()
            raise
        finally:
            self._left = weights.left_in(self.model)
            if self.private is not None:
                if self.private.ledger.taken_back and self.is_world_process_zero():
                    weights.take_back(self._folder, self.private.ledger.record())
                self.private.close()
        figures = {name: self._told[name] for name in ("epsilon", "delta", "steps")}
        return TrainOutput(done.global_step, 0.0, figures)

    def get_train_dataloader(self) -> DataLoader:
        """An epoch of empty batches: users are drawn inside the step."""
        assert self._source is not None
        num_units = len(sampled_units(self._source, self.privacy.documents_per_owner))
        places = range(math.ceil(num_units / self.expected_batch))
        return DataLoader(
            places,  # type: ignore[arg-type]
            batch_size=1,
            sampler=_WhileThereIsBudget(self, len(places)),
            collate_fn=lambda places: {},
        )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        if self.is_fsdp_enabled:  # weights stay as wide as they are; passes have their own autocast
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = None
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        # Accelerate runs the model in autocast and its logits in float32; passes have their own.
        if (forward := self.model.__dict__.pop("_original_forward", None)) is not None:
            self.model.forward = forward
        path = self._folder / LEDGER
        was_finished = Processes.here().told(
            lambda: path.exists() and read_ledger(path).get("finished")
        )
        self.private = self._private_training(max_steps)
        self._begun_at = self.private.ledger.steps
        # What a kill took, from the last checkpoint on. Who ended a training by themselves has seen what
        # it gave, and may take the steps that were planned.
        self.private.ledger.repeats = not was_finished
        if resume_from_checkpoint is None:
            Processes.here().told(
                partial(weights.refuse_to_begin_anew, self.model, self.private, self._folder)
            )
        warn_of_too_few(self.private)
        return prepared

    def may_step(self) -> bool:
        """Whether the ledger has room for another step."""
        if self.private is None or self.private.ledger.repeats:
            return self.private is None or self.private.may_step()
        return self.private.has_budget()

    def _private_training(self, steps: int) -> PrivateTraining:
        spec, path = _planned(self.privacy, self.expected_batch, steps), self._folder / LEDGER
        try:
            return PrivateTraining(
                self.model,
                getattr(self.optimizer, "optimizer", self.optimizer),  # beneath accelerate's
                self._source,  # type: ignore[arg-type]
                ledger=path,
                terms=self._terms(),
                exact_sums=self.exact_sums,
                bf16=self.args.bf16,
                physical_rows=self.args.per_device_train_batch_size,
                **vars(spec),
            )
        except GuaranteeError as error:
            if " was begun with " in str(error) and not read_ledger(path)["steps"]:
                raise GuaranteeError(
                    f"{error} Or delete {path}: it has no step on record, and training then begins anew."
                ) from error
            raise

    def _terms(self) -> Terms:
        unit = self.privacy.unit
        outside = [
            *Terms().outside,
            f"the number of {unit}s, which counts as public",
            "where tokenizer, starting weights and settings came from: yours to say",
            "when lines were logged and files written, which hangs on how many were drawn",
            "what hooks and callbacks of your own tell, which see private text before any noise",
        ]
        outside.append(unregistered(self.people))
        if self.public_evaluation:
            outside.append("text that you declared public and evaluated on")
        before = self._before or []
        if before and self.people is None:
            raise UsageError(
                "The weights to start from came out of a private run, and both together are what was spent on its people. Give "
                "people='NAME', a name of yours for whose text this is, and they are counted together."
            )
        others = [one for run in before for one in ids_of(run)]
        people = () if self.people is None else tuple(dict.fromkeys([self.people, *others]))
        return Terms(outside=tuple(outside), people=people, before=tuple(before))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Noisy gradients in the place of a backward pass; the loss is private, so it is zero."""
        assert self.private is not None
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self.private.noisy_gradients()
        weights.leave_mark(self.model, self.private.ledger.record())
        return torch.zeros((), device=self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what costs nothing: what was measured on private text is left out."""
        told = {name: value for name, value in logs.items() if self._may_be_told(name)}
        if self.private is not None:
            ledger = self.private.ledger
            figures = {"epsilon": ledger.promised, "epsilon_so_far": ledger.epsilon}
            told |= {name: value for name, value in figures.items() if math.isfinite(value)}
        super().log(told)

    def _may_be_told(self, name: str) -> bool:
        is_evaluated = name.startswith("eval_") and name != "eval_num_tokens"  # of private text
        return name in _LOGGED or (self.public_evaluation and is_evaluated)

    def evaluate(self, *given: Any, **rest: Any) -> Any:
        self._refuse_private_evaluation()
        return super().evaluate(*given, **rest)

    def predict(self, *given: Any, **rest: Any) -> Any:
        self._refuse_private_evaluation()
        return super().predict(*given, **rest)

    def _refuse_private_evaluation(self) -> None:
        if not self.public_evaluation:
            raise GuaranteeError(
                "What is measured on private text is not covered by ε, and this would be logged. Say public_evaluation=True where "
                "nobody in the text is to be protected, or use another trainer."
            )

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        return self.accelerator.autocast()  # of an evaluation, since the model is bare

    def hyperparameter_search(self, *given: Any, **rest: Any) -> Any:
        raise GuaranteeError(
            "Every trial of a search spends on the same people, and the best is chosen by looking at private results. Train once "
            "with settings found on public text."
        )

    def create_model_card(self, *given: Any, **rest: Any) -> None:
        super().create_model_card(*given, **rest)
        self._tell_in(self._folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.private is not None:  # on all processes, before any weights reach the disk
            weights.refuse_if_trained_on(self.model, self._left)
            self._record(self.private)
            self.private.settle()
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.private is not None:
            self.private.ledger.settle()  # before any weights reach the disk
        folder = self._folder if output_dir is None else Path(output_dir)
        if folder == self._folder:
            self._finish_current_push()  # which would send these weights with an earlier guarantee
        before = self._weights_in(folder)
        super()._save(output_dir, state_dict)
        self._tell_in(folder, before)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        before = self._weights_in(Path(output_dir))
        super()._save_optimizer_and_scheduler(output_dir)
        if self.is_fsdp_enabled:  # which writes the weights that it goes on from here
            self._tell_in(Path(output_dir), before)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.private is not None:
            self._record(self.private)  # on all processes
        if not self.is_world_process_zero() or (self._is_pushing and not self.args.hub_always_push):
            return
        self._finish_current_push()
        before = weights_in(self._folder)
        weights.copy_weights(Path(checkpoint_folder), self._folder)
        self._tell_in(self._folder, before)
        super()._push_from_checkpoint(checkpoint_folder)

    @property
    def _is_pushing(self) -> bool:
        """Whether an earlier push still reads what is in the folder."""
        pushing = getattr(self, "push_in_progress", None)
        return pushing is not None and not pushing.is_done()

    def _weights_in(self, folder: Path) -> dict[str, str]:
        return weights_in(folder) if self.is_world_process_zero() else {}

    def _tell_in(self, folder: Path, before: dict[str, str] | None = None) -> None:
        if self.private is not None:
            record = self._record(self.private)
            if self.is_world_process_zero():
                weights.tell(folder, record, before)

    def _record(self, private: PrivateTraining) -> dict[str, Any]:
        """The guarantee as it stands; worked out once a step, since it takes a second."""
        if self._told.get("steps") != private.ledger.steps:
            self._told = private.exact_record()
        return self._told

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir)

    def _match_rows(self, *, may_drop: bool) -> None:
        """See whose the rows are that the prepared dataset holds."""
        before, now = self._num_rows, len(self.train_dataset)
        if now > before or (now < before and not may_drop):
            raise GuaranteeError(
                f"{before} rows were given and there are {now} after the dataset was prepared, so it is not known whose "
                "each is. Give a dataset of which a row stays a row."
            )
        self._users = users_left(self.train_dataset, self.user_column, self._users)
        self._num_rows = now
        if now < before:
            log.warning(_DROPPED, counted(before - now, "row"), before)


class PrivateTrainer(PrivateMixin, Trainer):
    """transformers' Trainer with differential privacy; `PrivateMixin` says what its arguments are."""


class _StopsWithBudget(TrainerCallback):
    """Ends training when no step may follow, and saves what it came to."""

    def __init__(self, trainer: PrivateMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        # After other callbacks, which may have put some on, and before a step is charged.
        refuse_hooks(self._trainer.model.named_parameters())

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if not self._trainer.may_step():
            control.should_training_stop = True
            control.should_save |= args.save_strategy == SaveStrategy.STEPS  # as after max_steps


class _WhileThereIsBudget(Sampler):
    """Places in an epoch, for as long as a step may be taken."""

    def __init__(self, trainer: PrivateMixin, num_places: int) -> None:
        self._trainer, self._num_places = trainer, num_places

    def __len__(self) -> int:
        return self._num_places

    def __iter__(self) -> Iterator[int]:
        for place in range(self._num_places):
            if not self._trainer.may_step():
                return
            yield place


def _check_unit(unit: str, user_column: str | None) -> None:
    if unit == "user" and user_column is None:
        raise UsageError(
            "unit='user' needs the name of the column that says whose each row is: user_column='user'. Where every row is a "
            "person of its own: privacy=PrivacySpec(unit='example', ...)."
        )
    if unit == "example" and user_column is not None:
        raise UsageError(
            f"unit='example' with user_column={user_column!r}: a row, or all rows of a user, is what one person may move. Leave "
            "user_column out, or use unit='user'."
        )


def _planned(spec: PrivacySpec, expected_batch: int, steps: int) -> PrivacySpec:
    """The spec with the trainer's batch and steps; refuse one that names others."""
    own = {"expected_batch": expected_batch, "steps": steps}
    for name, value in own.items():
        if getattr(spec, name) not in (value, getattr(PrivacySpec, name)):
            raise UsageError(
                f"PrivacySpec has {name}={getattr(spec, name)}, and by the trainer's arguments it is {value}. Leave it out; "
                "per_device_train_batch_size × gradient_accumulation_steps and max_steps or num_train_epochs decide."
            )
    return replace(spec, **own)  # type: ignore[arg-type]
