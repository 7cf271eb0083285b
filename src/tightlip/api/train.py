"""`tightlip train` as one call."""

from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.run_folder import RunRecord
from tightlip.corpus.prepare import PrepareConfig, PreparedCorpus, is_prepared, open_prepared
from tightlip.corpus.prepare import prepare as prepare_corpus
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.loop import train as train_model

BUILT_IN = ("lstm", "gru", "transformer")


def train(
    corpus: Any,
    out: str | Path,
    *,
    prepare: PrepareConfig | None = None,
    options: RunOptions | None = None,
    **settings: Any,
) -> RunRecord:
    """Train a language model; `settings` are those of TrainConfig.

    A corpus that is not prepared yet is prepared inside the run, by `prepare`.
    """
    config = TrainConfig(**settings)
    ready = _prepared(corpus, Path(out), config, prepare)
    return train_model(ready, Path(out), config, options or RunOptions())


def _prepared(
    corpus: Any, out: Path, config: TrainConfig, prepare: PrepareConfig | None
) -> PreparedCorpus:
    if isinstance(corpus, PreparedCorpus):
        return corpus
    own_tokenizer = None if config.model in BUILT_IN else config.model
    if isinstance(corpus, str | Path) and is_prepared(Path(corpus)):
        if prepare is not None and prepare != PrepareConfig():
            raise UsageError(
                f"{corpus} is already prepared, so flags that prepare a corpus do nothing. "
                f"Leave them out, or give the raw corpus."
            )
        return open_prepared(Path(corpus))
    prepare = prepare or PrepareConfig(tokenizer=own_tokenizer)
    return prepare_corpus(corpus, out / "corpus", prepare)


def retrain_without(run: RunRecord, users: frozenset[int], out: Path) -> RunRecord:
    """The run's recipe on its own corpus, without any document of these users."""
    names = TrainConfig.__dataclass_fields__
    config = TrainConfig(**{k: v for k, v in run.config["train"].items() if k in names})
    return train_model(open_prepared(run.corpus_folder), out, config, without_users=users)
