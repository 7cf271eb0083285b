"""`tightlip train` as one call."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tightlip.core.errors import TightlipError, UsageError
from tightlip.core.files import claimed, names_in
from tightlip.core.processes import Processes, joined_processes
from tightlip.core.progress import log
from tightlip.core.registry import look_up, names_of
from tightlip.core.run_folder import LOG, MERGED, MODEL, RunRecord, check_is_free, is_run
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
from tightlip.models.folders import is_adapter
from tightlip.training.config import BUILT_IN_MODELS, RunOptions, TrainConfig, mitigation_config
from tightlip.training.loop import train_model
from tightlip.training.mitigations import CorpusFacts
from tightlip.training.together import by_first, one_voice
from tightlip.training.trials import choose

CORPUS = "corpus"  # prepared inside the run where a raw one was given


@takes(TrainConfig, *map(mitigation_config, names_of("mitigation")), tables=names_of("mitigation"))
def train(
    corpus: Any,
    out: str | Path,
    *,
    mitigation: Any = "none",
    prepare: dict[str, Any] | None = None,
    options: RunOptions | None = None,
    **settings: Any,
) -> RunRecord:
    """Train a language model, by plain training or with a mitigation against leakage.

    `mitigation` is its name, with its own settings beside the run's, or an object such as
    DPConfig(epsilon=8). A corpus that is not prepared yet is prepared inside the run, by the
    settings in `prepare` (those of PrepareConfig). Called in each of the processes that torchrun
    started, all train together.
    """
    config = config_of(mitigation, settings)
    out, options = Path(out), options or RunOptions()
    with (
        joined_processes(options.device) as processes,
        one_voice(processes),
        by_first(processes, claimed(out)),
        by_first(processes, _nothing_left_of_a_refusal(out)),
    ):
        # Or private text would be prepared in somebody's folder.
        processes.told(lambda: check_is_free(out))
        ready = _by_first(processes, lambda: prepared_for(corpus, out, config, prepare or {}))
        if config.trials is not None:
            return choose(ready, out, config, options)
        return train_model(ready, out, config, options)


def config_of(mitigation: Any, settings: dict[str, Any]) -> TrainConfig:
    """The settings of a run; a model that is itself a run stands for what that trained."""
    model = settings.get("model", BUILT_IN_MODELS[0])
    if model not in BUILT_IN_MODELS and is_run(Path(model)):
        settings = {**settings, "model": str(_model_of(Path(model)))}
    return TrainConfig.of(mitigation=mitigation, **settings)


def _model_of(run: Path) -> Path:
    """The model that a run stands for: the one it trained, of adapters merged."""
    if not is_adapter(run / MODEL):
        return run / MODEL
    if not (run / MERGED).is_dir():
        raise UsageError(
            f"{run} trained adapters, and training goes on from a whole model. Give its train command again with merge=True, "
            f"which writes {run / MERGED}."
        )
    return run / MERGED


@contextmanager
def _nothing_left_of_a_refusal(out: Path) -> Iterator[None]:
    """Take away the corpus that was prepared for a run that never began."""
    had_run, had_corpus, was_there = is_run(out), (out / CORPUS).exists(), out.exists()
    try:
        yield
    except TightlipError:
        if had_run or not is_run(out):
            if not had_corpus:
                shutil.rmtree(out / CORPUS, ignore_errors=True)
            if not was_there and out.exists() and not names_in(out) - {LOG}:
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
        log.warning("%s", warning)
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


def retrain_without(run: RunRecord, users: frozenset[int], out: Path) -> RunRecord:
    """The run's recipe and options on its own corpus, without any document of these users."""
    config = TrainConfig.from_tree(run.config["train"], str(run.folder))
    options = RunOptions.from_tree(run.config.get("options", {}), str(run.folder))
    options = replace(options, merge=False)
    return train_model(open_prepared(run.corpus_folder), out, config, options, without_users=users)
