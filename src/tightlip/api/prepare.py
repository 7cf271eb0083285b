"""`tightlip prepare` as one call."""

from pathlib import Path
from typing import Any

from tightlip.corpus.prepare import PrepareConfig, PreparedCorpus
from tightlip.corpus.prepare import prepare as prepare_corpus


def prepare(corpus: Any, out: str | Path, **settings: Any) -> PreparedCorpus:
    """Read, check, clean, split and tokenise a corpus; `settings` are those of PrepareConfig."""
    return prepare_corpus(corpus, Path(out), PrepareConfig(**settings))
