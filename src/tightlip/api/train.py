"""`tightlip train` as one call."""

from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.run_folder import RunRecord
from tightlip.corpus.prepare import PrepareConfig, PreparedCorpus, is_prepared, open_prepared
from tightlip.corpus.prepare import prepare as prepare_corpus
from tightlip.training.config import BUILT_IN_MODELS, RunOptions, TrainConfig
from tightlip.training.loop import train as train_model


def train(
    corpus: Any,
    out: str | Path,
    *,
    prepare: dict[str, Any] | None = None,
    options: RunOptions | None = None,
    **settings: Any,
) -> RunRecord:
    """Train a language model; `settings` are those of TrainConfig.

    A corpus that is not prepared yet is prepared inside the run, by the settings in `prepare`
    (those of PrepareConfig).
    """
    config = TrainConfig(**settings)
    ready = _prepared(corpus, Path(out), config, prepare or {})
    return train_model(ready, Path(out), config, options or RunOptions())


def _prepared(
    corpus: Any, out: Path, config: TrainConfig, settings: dict[str, Any]
) -> PreparedCorpus:
    if isinstance(corpus, PreparedCorpus):
        return corpus
    settings = {"seed": config.seed, **settings}
    if isinstance(corpus, str | Path) and is_prepared(Path(corpus)):
        extra = sorted(settings.keys() - {"seed"})
        if extra:
            raise UsageError(
                f"{corpus} is already prepared, so {', '.join(extra)} would do nothing. "
                f"Leave it out, or give the raw corpus."
            )
        return open_prepared(Path(corpus))
    if config.model not in BUILT_IN_MODELS:
        # A model that goes on training speaks through the tokenizer it came with.
        settings.setdefault("tokenizer", config.model)
    return prepare_corpus(corpus, out / "corpus", PrepareConfig(**settings))


def retrain_without(run: RunRecord, users: frozenset[int], out: Path) -> RunRecord:
    """The run's recipe and options on its own corpus, without any document of these users."""
    config = TrainConfig.from_tree(run.config["train"], str(run.folder))
    options = RunOptions.from_tree(run.config.get("options", {}), str(run.folder))
    return train_model(open_prepared(run.corpus_folder), out, config, options, without_users=users)
