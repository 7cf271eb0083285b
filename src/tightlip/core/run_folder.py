"""What a training run leaves behind, and how to read it.

config.toml         the resolved settings, the corpus and its fingerprints
model/              the model as training ended, a Hugging Face folder; with --lora an adapter
merged/             with --merge: the same with the adapter in its weights
snapshots/epoch-N/  the model on its way; step-N inside an epoch, epoch-0.25 early in the first
metrics.jsonl       one line per epoch and snapshot
private.jsonl       under DP: the same lines with losses, which no guarantee covers
ledger.json         what the run may promise; it says when the run is finished
log.txt             what was said on the way
checkpoint/         only while the run is under way
trials/             only while `--trials` are under way: how many, of what, and the best so far; private
dp_check.json       the key of planted texts, where there are any: what they read, who was in
_private_dp_check.json  canaries inside the engine: who was in, and what the noise let through
dp_check_result.json  what `tightlip dp-check RUN` found
noise_scales.jsonl  adaptive-dp, mode scale: the noise of each charged step, public by its proof
private_noise.bin   adaptive-dp, mode as-published: how often each noise was used; private
membership.json, groups.json  what `tightlip membership RUN` and `tightlip groups RUN` found
measures/           what `tightlip compare` measured, by model
scan/               ranks and log-probabilities that its measures are read from; private
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tightlip.core import files
from tightlip.core.checksums import checked, checked_whole
from tightlip.core.errors import DamagedError, GuaranteeError, UsageError
from tightlip.core.files import read_json, write_json
from tightlip.core.register import as_it_stands
from tightlip.core.settings import read_toml, toml_text

CONFIG, METRICS, LEDGER, LOG = "config.toml", "metrics.jsonl", "ledger.json", "log.txt"
PRIVATE_METRICS = "private.jsonl"
LEDGER_LOCK = f"_{LEDGER}.lock"
MODEL, MERGED, SNAPSHOTS, CHECKPOINT = "model", "merged", "snapshots", "checkpoint"
DP_CHECK, DP_CHECK_RESULT = "dp_check.json", "dp_check_result.json"
ENGINE_CHECK = "_private_dp_check.json"
# Of a checkpoint: no pickle, so nothing in it can run.
TENSORS, STATE = "tensors.safetensors", "state.json"
_ASIDE = "damaged-"
# Whoever reads these says what is to be done about damage in them.
_MADE_AGAIN = (CHECKPOINT, "scan", "measures")
# A raw corpus is prepared inside the run, and canaries are drawn, before training claims the folder.
_MAY_STAND_BEFORE = {"corpus", LOG, LEDGER_LOCK, DP_CHECK}

Progress = TypeVar("Progress")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The model as it was after `step` steps, which is `epoch` epochs."""

    name: str
    step: int
    epoch: float
    folder: Path


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as later stages see it; snapshots and metrics in training order."""

    folder: Path
    config: dict[str, Any]
    corpus_folder: Path
    model_folder: Path
    snapshots: list[Snapshot]
    metrics: list[dict[str, Any]]
    guarantee: dict[str, Any]
    finished: bool

    @property
    def stop(self) -> str | None:
        """Why training ended; None while it has not."""
        return self.metrics[-1].get("stop") if self.metrics else None

    @property
    def mitigation(self) -> str:
        return str(self.config.get("train", {}).get("mitigation", "none"))

    @property
    def is_mitigated(self) -> bool:
        return self.mitigation != "none"

    @property
    def where_learning_shows(self) -> str:
        """In which file its owner reads whether a private run learnt anything, and who else may."""
        file, last = self.folder / PRIVATE_METRICS, (self.metrics or [{}])[-1]
        if "validation_perplexity_at_start" not in last:
            return f"Its losses stand in {file}, which is private; without held-out text they do not tell whether it learnt anything."
        where, told = f"{file}, which is private as the text is", ""
        if last["validation_perplexity_at_start"] is not None:
            where = f"{self.folder / METRICS}, which may be told (by frequency: in {file}, which is private)"
        elif "noisy_validation_perplexity" in last:
            told = f"noisy_validation_perplexity in {self.folder / METRICS} may be told. "
        return (
            f"{told}Whether it learnt anything stands in {where}: it did where the last "
            "validation_perplexity is below validation_perplexity_at_start and validation_perplexity_by_frequency."
        )

    @property
    def is_private(self) -> bool:
        """Whether it promises an ε, or at least keeps its losses to itself."""
        return self.guarantee.get("epsilon") is not None or (self.folder / PRIVATE_METRICS).exists()


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def run_around(folder: Path) -> "RunRecord | None":
    """The run that a model's or a tokenizer's folder is, or stands in; None where there is none.

    A config.toml further up may be anybody's, so one that is no run's is passed over.
    """
    for above in (folder.resolve(), *folder.resolve().parents[:2]):
        if is_run(above):
            try:
                return open_run(above)
            except DamagedError:
                raise  # it was a run, and what it learnt from must not be passed over
            except (KeyError, TypeError, UsageError):
                continue
    return None


def is_finished(folder: Path) -> bool:
    """Whether training ended. A private run has a ledger from its first step on."""
    if not (folder / LEDGER).is_file() or not (folder / MODEL).is_dir():
        return False
    return bool(read_ledger_file(folder / LEDGER)[0].get("finished", True))


def open_run(folder: Path) -> RunRecord:
    """The run in `folder`, finished or not."""
    folder = Path(folder)
    if not is_run(folder):
        raise UsageError(
            f"{folder} is not a tightlip run (no {CONFIG}). Run: tightlip train CORPUS --out {folder}"
        )
    config = read_toml(folder / CONFIG)
    _check_language_model(folder, config)
    metrics = _read_metrics(folder / METRICS)
    return RunRecord(
        folder=folder,
        config=config,
        corpus_folder=folder / config["corpus"]["folder"],
        model_folder=folder / MODEL,
        snapshots=_snapshots(folder, metrics),
        metrics=metrics,
        guarantee=_guarantee(
            folder / LEDGER, must_have_seal="tightlip" in config.get("versions", {})
        ),
        finished=is_finished(folder),
    )


def _check_language_model(folder: Path, config: dict[str, Any]) -> None:
    if "represent" in config:
        raise UsageError(
            f"{folder} is a run of `tightlip represent train`: it holds an encoder's two halves and no language model. What "
            f"it promises is in {folder / 'device' / 'guarantee.json'}; to test it, run: tightlip represent attack {folder}"
        )
    if "folder" not in config.get("corpus", {}):
        raise UsageError(
            f"{folder / CONFIG} is not a run's: it names no corpus. Run: tightlip train CORPUS --out {folder}"
        )


def _guarantee(path: Path, *, must_have_seal: bool) -> dict[str, Any]:
    """What the run promises so far; nothing before its ledger is there."""
    if not path.is_file():
        return {}
    record, has_seal = read_ledger_file(path)
    if must_have_seal and not has_seal:
        raise damaged_ledger(path)
    return as_it_stands(record)


def read_ledger_file(path: Path) -> tuple[dict[str, Any], bool]:
    """A ledger's record, and whether its checksum was there and right; version 0.1 wrote none."""
    try:
        return files.read_sealed(path)
    except DamagedError as error:
        raise damaged_ledger(path) from error


def damaged_ledger(path: Path) -> GuaranteeError:
    return GuaranteeError(
        f"{path} is damaged, so nobody knows what the run has spent. Put a whole copy back, or train again with "
        "another --out."
    )


def _snapshots(folder: Path, metrics: list[dict[str, Any]]) -> list[Snapshot]:
    """Those that are there. A name out of a file is a name, and never leads out of the folder."""
    for line in metrics:
        if line.get("snapshot") and not is_snapshot_name(line["snapshot"]):
            raise UsageError(
                f"{folder / METRICS} names a snapshot {line['snapshot']!r}, which is not a name that tightlip gives. "
                "The run was changed by somebody. Train it again, or take a copy that is whole."
            )
    if (folder / SNAPSHOTS).is_symlink():
        return []
    named = [
        Snapshot(
            name=line["snapshot"],
            step=line["step"],
            epoch=line["epoch"],
            folder=snapshot_folder(folder, line["snapshot"]),
        )
        for line in metrics
        if line.get("snapshot")
    ]
    return [one for one in named if one.folder.is_dir() and not one.folder.is_symlink()]


def is_snapshot_name(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"(epoch|step)-[0-9.e+]+", name) is not None


def snapshot_folder(folder: Path, name: str) -> Path:
    return folder / SNAPSHOTS / name


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    try:
        lines = files.read_text(path).splitlines() if path.is_file() else []
        metrics = [json.loads(line) for line in lines]
    except ValueError:
        metrics = [None]
    if not all(isinstance(line, dict) and {"step", "epoch"} <= line.keys() for line in metrics):
        raise DamagedError(
            f"{path} is damaged: a line of it is not a record of a step. Put a whole copy back, or train again."
        )
    return metrics


def write_metrics(
    folder: Path, metrics: list[dict[str, Any]], *, private: tuple[str, ...] = ()
) -> None:
    """All lines anew: they are few, and so no reader ever sees half of one.

    Figures whose names begin as `private` has it, which no guarantee covers, go into a file of their
    own, each line marked private.
    """
    _write_lines(folder / METRICS, [without_private(line, private) for line in metrics])
    if private:
        _write_lines(folder / PRIVATE_METRICS, [{"private": True, **line} for line in metrics])


def _write_lines(path: Path, values: list[dict[str, Any]]) -> None:
    lines = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in values]
    files.write_text(path, "".join(f"{line}\n" for line in lines))


def without_private(line: dict[str, Any], private: tuple[str, ...]) -> dict[str, Any]:
    """A line of metrics without the figures whose names begin so."""
    return {name: None if name.startswith(private) else value for name, value in line.items()}


def write_ledger(folder: Path, guarantee: dict[str, Any]) -> None:
    files.write_sealed(folder / LEDGER, guarantee)


def begin_run(folder: Path, config: dict[str, Any]) -> None:
    """Keep the settings with the run."""
    files.write_text(folder / CONFIG, toml_text(config))


def abandon_run(folder: Path, *, made_it: bool = False) -> None:
    """Take back what `begin_run` did, and a ledger that has charged nothing yet; the folder too
    where the run made it and nothing else is in it."""
    for name in (CONFIG, LEDGER):
        (folder / name).unlink(missing_ok=True)
    if made_it and files.names_in(folder) <= {LOG, LEDGER_LOCK}:
        shutil.rmtree(folder)


def check_may_train(
    folder: Path, config: dict[str, Any], *, same: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuse a folder that is neither free nor holds this very run.

    `same` names the tables of the tree that must agree and, for each, the settings in it
    that may differ all the same.

    Holds:
        same_settings: a run with any other setting in those tables is a usage error naming it.
        version: an unfinished run of tightlip 0.1 is a usage error naming that version.
        foreign: a folder that holds something else is a usage error.
        damaged: so is a run with a file that is not what was written.
    """
    if is_run(folder):
        checked_whole(folder, but=_MADE_AGAIN)
        there = read_toml(folder / CONFIG)
        _check_version(folder, there, config)
        _check_same(folder, there, config, same)
    else:
        check_is_free(folder)


def check_is_free(folder: Path) -> None:
    """Refuse a folder, not yet a run's, that holds somebody's other files."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file. Give --out a folder.")
    if is_run(folder) or not folder.exists():
        return
    names = {name for name in files.names_in(folder) if not name.startswith(".")}
    if foreign := sorted(names - _MAY_STAND_BEFORE):
        raise UsageError(
            f"{folder} holds {foreign[0]} and no run. Choose another --out, or empty it first."
        )


def _check_version(folder: Path, there: dict[str, Any], given: dict[str, Any]) -> None:
    """A run under way is gone on with by a version that knows its settings and its checkpoint."""
    writes_version = "tightlip" in given.get("versions", {})
    if writes_version and "tightlip" not in there.get("versions", {}) and not is_finished(folder):
        raise UsageError(
            f"{folder} holds an unfinished run of tightlip 0.1, which this version cannot go on with. "
            "Finish it with tightlip 0.1, or choose another --out."
        )


def _check_same(
    folder: Path, there: dict[str, Any], given: dict[str, Any], same: Mapping[str, tuple[str, ...]]
) -> None:
    differing = []
    for table, free in same.items():
        old, new = _flat(there.get(table, {})), _flat(given.get(table, {}))
        names = sorted({*old, *new} - {*free})
        differing += [name for name in names if old.get(name, []) != new.get(name, [])]
    if differing:
        raise UsageError(
            f"{folder} holds a run with other settings ({', '.join(differing)}). Choose another --out."
        )


def _flat(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Every value under its own name, whichever table inside `table` holds it.

    A name may stand in several of them, and none of its values must hide another.
    """
    values: dict[str, list[Any]] = {}
    # Tables last, as TOML has them.
    for name, value in sorted(table.items(), key=lambda one: (isinstance(one[1], Mapping), one[0])):
        inner = _flat(value) if isinstance(value, Mapping) else {name: [value]}
        for each, some in inner.items():
            values.setdefault(each, []).extend(one for one in some if one is not None)
    return values


def go_back_to(
    folder: Path, metrics: list[dict[str, Any]], *, private: tuple[str, ...] = ()
) -> None:
    """Make the folder what it was when these were its metrics: later snapshots go."""
    kept = {line.get("snapshot") for line in metrics}
    if (folder / SNAPSHOTS).is_dir() and not (folder / SNAPSHOTS).is_symlink():
        for path in (folder / SNAPSHOTS).iterdir():
            # What has another name, or lies elsewhere, is not ours to take away.
            is_ours = is_snapshot_name(path.name) and path.is_dir() and not path.is_symlink()
            if is_ours and path.name not in kept:
                shutil.rmtree(path)
    write_metrics(folder, metrics, private=private)


@dataclass(kw_only=True)
class Moment:
    """How far a training is. Loss and seconds run over the epoch under way."""

    step: int = 0
    loss_nats: float = 0.0
    seconds: float = 0.0


def write_moment(folder: Path, tensors: dict[str, Any], progress: Any) -> None:
    """Keep, whole or not at all, what a killed training goes on from; `progress` is a dataclass."""
    from safetensors.torch import save_file

    with files.folder_written_whole(folder) as beside:
        save_file(tensors, beside / TENSORS)
        write_json(beside / STATE, asdict(progress))


def moments_in(
    folder: Path, progress_of: Callable[..., Progress], *, start_over: bool = True
) -> dict[Path, Progress]:
    """How far a training was at each moment kept in `folder`. A damaged one is set aside, or, where
    to `start_over` would charge for the same steps twice, refused."""
    moments, damaged = {}, []
    for path in sorted(folder.glob("step-*"), key=_step_of):
        try:
            moments[path] = progress_of(**read_json(checked(path) / STATE))
        except (DamagedError, FileNotFoundError, TypeError):
            damaged.append(path)
    # One that a later moment has replaced is nobody's loss.
    lost = [path for path in damaged if _step_of(path) > max(map(_step_of, moments), default=-1)]
    if lost and not start_over:
        raise GuaranteeError(
            f"{lost[-1]} is damaged, and the steps that it held are charged: to take them again would cost more than the run "
            "was planned for. Put a whole copy back, or train again with another --out."
        )
    for path in damaged:
        set_aside(path)
    return moments


def _step_of(moment: Path) -> int:
    return int(moment.name.split("-")[1])


def set_aside(moment: Path) -> None:
    """Keep a damaged moment where nobody goes on from it, until the training is finished."""
    aside = moment.with_name(f"{_ASIDE}{moment.name}")
    shutil.rmtree(aside, ignore_errors=True)
    moment.rename(aside)
    log.warning("%s was damaged. It is set aside as %s; the work is done again.", moment, aside)


def keep_only(folder: Path, *moments: Path) -> None:
    """Take earlier moments away, but for those that were set aside."""
    for other in folder.iterdir():
        if other not in moments and not other.name.startswith(_ASIDE):
            shutil.rmtree(other)


def optimizer_tensors(optimizer: Any) -> dict[str, Any]:
    """What a torch optimizer remembers of each parameter, by the parameter's number."""
    from torch import Tensor

    return {
        f"{number}.{name}": value
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(optimizer: Any, tensors: dict[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def prefixed(prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors as they can be written, on the CPU, each name behind a prefix."""
    return {
        f"{prefix}.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()
    }


def part_of(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The tensors behind a prefix, without it."""
    start = f"{prefix}."
    return {name[len(start) :]: value for name, value in tensors.items() if name.startswith(start)}
