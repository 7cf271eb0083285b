"""`tightlip represent train` and `export` as calls."""

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tightlip.core import run_folder
from tightlip.core.devices import one_thread, usable_device
from tightlip.core.errors import UsageError
from tightlip.core.files import claimed, read_json, write_json
from tightlip.core.progress import log, logged_to
from tightlip.core.settings import split_settings, takes
from tightlip.corpus.prepare_config import ColumnSettings
from tightlip.models.folders import model_fingerprint
from tightlip.vectors.data import CORPUS, Examples, Source, open_source, read_examples, write_corpus
from tightlip.vectors.extractors import checked_folder
from tightlip.vectors.halves import DEVICE, SERVER, export_onnx, read_half
from tightlip.vectors.learning import METRICS, Training
from tightlip.vectors.settings import RepresentOptions, RepresentSettings

SUMMARY = "summary.json"
_SUMMED_UP = (
    *("dev_accuracy", "dev_loss_nats", "test_accuracy", "test_loss_nats", "majority_accuracy"),
    *("test_accuracy_unseen", "best_epoch", "seconds"),
)
# Where the corpus lies may change; what it says may not.
_SAME_RUN = {"represent": ("extractor",), "start": (), "corpus": ("path",)}


@dataclass(frozen=True, kw_only=True)
class RepresentRun:
    """A finished training: its folder, its metrics, and what a vector of it may promise."""

    folder: Path
    metrics: dict[str, Any]
    guarantee: dict[str, Any]

    @property
    def device(self) -> Path:
        return self.folder / DEVICE

    @property
    def server(self) -> Path:
        return self.folder / SERVER


@dataclass(frozen=True, kw_only=True)
class RepresentRuns:
    """Several trainings that differ in their seed alone, with mean and spread of their metrics."""

    folder: Path
    runs: list[RepresentRun]
    summary: dict[str, Any]


@takes(RepresentSettings, ColumnSettings)
def represent_train(
    corpus: Any,
    out: str | Path,
    *,
    seeds: int | None = None,
    options: RepresentOptions | None = None,
    **settings: Any,
) -> RepresentRun | RepresentRuns:
    """Train vectors that tell a label and hide the writer.

    With `seeds`, that many runs OUT/seed-0, OUT/seed-1, ..., and their mean and spread. A run that
    was stopped goes on; a finished one is returned as it is.
    """
    chosen, columns = split_settings(settings, RepresentSettings, ColumnSettings)
    options, out = options or RepresentOptions(), Path(out)
    if not chosen.is_new:
        chosen = replace(chosen, extractor=str(checked_folder(chosen.extractor).resolve()))
    source = open_source(corpus, **columns.tree())
    with claimed(out):
        _check_seeds(out, seeds)
        if seeds is None:
            return _train_one(source, out, chosen, options)
        each = [replace(chosen, seed=chosen.seed + number) for number in range(seeds)]
        runs = [_train_one(source, out / f"seed-{n}", one, options) for n, one in enumerate(each)]
        summary = _summary(runs, [one.seed for one in each])
        write_json(out / SUMMARY, summary)
    return RepresentRuns(folder=out, runs=runs, summary=summary)


def _check_seeds(out: Path, seeds: int | None) -> None:
    if seeds is None and ((out / SUMMARY).exists() or (out / "seed-0").exists()):
        raise UsageError(
            f"{out} holds runs of several seeds. Choose another --out, or add --seeds."
        )
    if seeds is not None and seeds < 2:
        raise UsageError(f"seeds={seeds} has no spread. Use 2 or more, or leave it out.")
    if seeds is not None and run_folder.is_run(out):
        raise UsageError(
            f"{out} holds a run of one seed. Choose another --out for {seeds} of them."
        )


def _train_one(
    source: Source, out: Path, settings: RepresentSettings, options: RepresentOptions
) -> RepresentRun:
    tree = {
        "represent": settings.tree(),
        "start": _start(settings),
        "corpus": source.tree,
        "options": options.tree(),
    }
    run_folder.check_may_train(out, tree, same=_SAME_RUN)
    if not (out / METRICS).is_file():
        # Before the folder is claimed: a refusal leaves nothing behind.
        examples = read_examples(source, settings)
        with claimed(out):
            run_folder.check_may_train(out, tree, same=_SAME_RUN)
            if begins := not run_folder.is_run(out):
                run_folder.begin_run(out, tree)
            try:
                _train_in(out, source, examples, settings, options)
            except UsageError:
                if begins and not (out / run_folder.CHECKPOINT).exists():
                    run_folder.abandon_run(out)
                raise
    guarantee = read_half(out / DEVICE, DEVICE)["guarantee"]
    return RepresentRun(folder=out, metrics=read_json(out / METRICS), guarantee=guarantee)


def _start(settings: RepresentSettings) -> dict[str, str]:
    """What identifies the extractor that training starts from, wherever it lies."""
    if settings.is_new:
        return {"extractor": settings.extractor}
    folder = Path(settings.extractor)
    inner = folder / "extractor"
    return {"fingerprint": model_fingerprint(inner if inner.is_dir() else folder)}


def _train_in(
    out: Path,
    source: Source,
    examples: Examples,
    settings: RepresentSettings,
    options: RepresentOptions,
) -> None:
    device = torch.device(usable_device(options.device, bf16=options.bf16))
    own_randomness = torch.random.fork_rng([device] if device.type == "cuda" else [])
    # A new extractor is small: it trains no faster on many threads, and beside other work slower.
    threads = one_thread() if settings.is_new else nullcontext()
    with logged_to(out / run_folder.LOG), own_randomness, threads:
        training = Training(examples, settings, options, out)
        if source.tree["path"] is None and not (out / CORPUS).exists():
            write_corpus(out / CORPUS, source)
        if num := examples.num_dropped:
            log.info("%d rows are left out: no label, no private attribute, or in no bin.", num)
        training.run()


def _summary(runs: list[RepresentRun], seeds: list[int]) -> dict[str, Any]:
    """Each figure over the seeds."""
    values = {name: [run.metrics[name] for run in runs] for name in _SUMMED_UP}
    figures = {name: {**over_seeds(own), "values": own} for name, own in values.items()}
    return {"seeds": seeds, "runs": [run.folder.name for run in runs], **figures}


def over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and spread (the standard deviation between seeds); null where a seed has no figure."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"mean": None, "spread": None}
    spread = statistics.stdev(known) if len(known) > 1 else None
    return {"mean": statistics.fmean(known), "spread": spread}


@takes()
def represent_export(device: str | Path, *, out: str | Path | None = None) -> Path:
    """Write the device's extractor as ONNX, for ONNX Runtime; into the device's folder by default."""
    return export_onnx(Path(device), None if out is None else Path(out))
