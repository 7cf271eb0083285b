"""Audits of a model while transformers' Trainer, or TRL's, trains it."""

import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from tightlip.audit.canaries.exposure import ExposureConfig, exposures_in, gated, read_keys
from tightlip.audit.leakage.summary import LeakageReport, known_figures
from tightlip.audit.settings import LeakageConfig
from tightlip.commands import audit
from tightlip.core.engines import EngineSettings
from tightlip.core.errors import UsageError
from tightlip.core.gates import parsed_condition
from tightlip.core.settings import names_in, split_settings
from tightlip.corpus.opening import CorpusSource
from tightlip.corpus.prepare_config import TextSettings
from tightlip.corpus.readers import open_corpus
from tightlip.scan.models import open_model
from tightlip.scan.options import ScanOptions

log = logging.getLogger("tightlip")
READING = ("user_column", "text_column", "bad_rows", "format")
# Of an audit, beside its settings.
ARGUMENTS = ("tokenizer", "public_model", "validation", "keep_scan", *names_in(EngineSettings))
OUT = "_leakage"  # in the trainer's output_dir; what begins so is not pushed
# What loggers are told, by its name in a report.
LOGGED = {"unique": "unique_by_text", "people": "people_affected", "leaks": "leaks"}


class LeakageCallback(TrainerCallback):
    """Audits the model as it trains, tells the trainer's loggers, and stops where a gate fails.

    Arguments:
        corpus: what the model is trained on: all that `tightlip.audit` takes.
        every: 'epoch', 'save', or a number of steps.
        sample: audit so many of its rows, drawn once. Who wrote what is then counted among them
            alone, so that more seems to be one person's only.
        fail_on: conditions like 'leaks>0'; where one holds, training stops.
        canaries: a key of planted canaries, or several, whose exposure is measured too.
        out: the folder of the reports, one for each audit. Default: `_leakage` in output_dir.
        public: say that nobody in the corpus is to be protected. A private trainer has others stop nothing,
            and lets them leave their reports only.
        settings: those of `tightlip.audit`, such as user_column, public_model or redact.

    `stopped_by` says which gates failed; empty where none did.
    """

    def __init__(
        self,
        corpus: Any,
        *,
        every: str | int = "epoch",
        sample: int | None = None,
        fail_on: str | Sequence[str] = (),
        canaries: Any = None,
        out: str | Path | None = None,
        public: bool = False,
        **settings: Any,
    ) -> None:
        self.every, self.out, self.settings = _checked(every), out, settings
        self.public, self.tells = public, True  # whether loggers and trainer_state.json are told
        self.fail_on = [fail_on] if isinstance(fail_on, str) else list(fail_on)
        thresholds = settings.get("thresholds")
        known = known_figures(*([thresholds] if thresholds else []))
        for condition in self.fail_on:
            parsed_condition(condition, known)  # wrong ones are refused before hours of training
        _check_as_audits_do([corpus, settings.get("validation")], settings)
        self.keys = [] if canaries is None else read_keys(canaries)
        self.corpus = corpus if sample is None else _sampled(corpus, sample, settings)
        self.stopped_by: list[str] = []
        self.reports: list[LeakageReport] = []
        self._handler: CallbackHandler | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise UsageError(
                "LeakageCallback reads the whole model in one process, and FSDP or DeepSpeed spreads it over several. "
                "Audit the checkpoints instead: tightlip audit OUT CORPUS --snapshots"
            )
        if self.out is not None:
            _refuse_pushed(Path(self.out), Path(args.output_dir))
        # A callback is not told its trainer, and what it finds is for the trainer's loggers: they
        # hang on the handler that calls us.
        handler = sys._getframe(1).f_locals.get("self")
        self._handler = handler if isinstance(handler, CallbackHandler) else None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every == "epoch":
            self._audit(args, state, control, kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every == "save":
            self._audit(args, state, control, kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._audit(args, state, control, kwargs)

    def _audit(self, args: Any, state: Any, control: Any, kwargs: dict[str, Any]) -> None:
        if not state.is_world_process_zero:
            return  # one audit is enough; the others wait at their next step
        model = kwargs["model"]
        if (tokenizer := self.settings.get("tokenizer") or kwargs["processing_class"]) is None:
            raise UsageError(
                "The trainer has no processing_class, so nobody knows how text becomes tokens. Give it one, or "
                "LeakageCallback(…, tokenizer=…)."
            )
        folder = Path(self.out or Path(args.output_dir) / OUT) / f"step-{state.global_step:08d}"
        given = {name: each for name, each in self.settings.items() if name != "tokenizer"}
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            report = audit((model, tokenizer), self.corpus, out=folder, **given)
            figures = {name: report.summary[key] for name, key in LOGGED.items()}
            figures["exposure"] = self._exposure(model, tokenizer)
        finally:
            for module, mode in modes.items():
                module.training = mode
        self.reports.append(report)
        if self.tells:
            self._tell(args, state, control, figures)
        self._judge(report, control)

    def _exposure(self, model: Any, tokenizer: Any) -> float | None:
        """The bits of the best known canary."""
        if not self.keys:
            return None
        opened = open_model((model, tokenizer), ScanOptions())
        return gated(exposures_in(opened, self.keys, ExposureConfig()))["highest_bits"]

    def _tell(self, args: Any, state: Any, control: Any, figures: dict[str, Any]) -> None:
        logs = {f"leakage/{name}": each for name, each in figures.items() if each is not None}
        state.log_history.append({**logs, "epoch": state.epoch, "step": state.global_step})
        if self._handler is None:
            log.warning("The trainer's loggers were not found; %s", logs)
            return
        should_log = control.should_log  # the trainer's own line, which is still to come
        self._handler.on_log(args, state, control, logs)
        control.should_log = should_log

    def _judge(self, report: LeakageReport, control: Any) -> None:
        self.stopped_by = report.failed(*self.fail_on)
        if self.stopped_by:
            control.should_training_stop = True
            log.error("Training stops: %s. See %s", "; ".join(self.stopped_by), report.folder)


def _checked(every: str | int) -> str | int:
    if every in ("epoch", "save") or (
        isinstance(every, int) and not isinstance(every, bool) and every > 0
    ):
        return every
    raise UsageError(f"every={every!r} is neither 'epoch', 'save' nor a number of steps above 0.")


def _check_as_audits_do(corpora: list[Any], settings: dict[str, Any]) -> None:
    """Refuse now what would end the training at its first audit."""
    own = {name: each for name, each in settings.items() if name not in ARGUMENTS}
    *_, columns = split_settings(own, LeakageConfig, ScanOptions, TextSettings)
    for each in corpora:
        if each is not None:
            CorpusSource(each, columns.tree()).existing().documents()


def _refuse_pushed(out: Path, output_dir: Path) -> None:
    """Reports quote private text, and push_to_hub sends all of output_dir but what begins with _."""
    inside, whole = out.resolve(), output_dir.resolve()
    if inside.is_relative_to(whole) and not inside.relative_to(whole).as_posix().startswith("_"):
        raise UsageError(
            f"out={str(out)!r} lies in {output_dir}, and push_to_hub would publish the reports, which quote private text. Leave it "
            f"out, and they go to {output_dir / OUT}, which is not pushed; or give a folder elsewhere."
        )


def _sampled(corpus: Any, size: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """So many rows, each as likely as any other, and the same ones at every audit."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"sample={size!r} is not a number of rows above 0.")
    columns = {name: settings[name] for name in READING if name in settings}
    draw, kept = random.Random(0), list[dict[str, Any]]()
    for number, row in enumerate(open_corpus(corpus, **{"format": "auto", **columns}).rows()):
        if number < size:
            kept.append(row)
        elif (place := draw.randrange(number + 1)) < size:
            kept[place] = row
    return kept
