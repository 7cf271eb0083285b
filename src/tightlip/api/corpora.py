"""Whatever the caller named as corpus, as tokens of one tokenizer."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json, write_json
from tightlip.corpus.prepare import is_prepared, open_prepared
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tokens import (
    TokenizedCorpus,
    open_tokenized,
    tokenize_documents,
    tokenizer_fingerprint,
)


@dataclass(frozen=True)
class CorpusSource:
    """A path, table, frame or list, and how to read it. `FOLDER/validation` of a prepared
    corpus is its held-out part."""

    source: Any
    columns: dict[str, Any]

    @property
    def path(self) -> Path | None:
        return Path(self.source) if isinstance(self.source, str | Path) else None

    @property
    def _is_held_out_part(self) -> bool:
        return (
            self.path is not None
            and self.path.name == "validation"
            and is_prepared(self.path.parent)
        )

    def exists(self) -> bool:
        return self.path is None or self.path.exists()

    def prepared(self) -> TokenizedCorpus | None:
        """The tokens stored with a prepared corpus."""
        if self._is_held_out_part:
            assert self.path is not None
            return open_prepared(self.path.parent).validation
        if self.path is not None and is_prepared(self.path):
            return open_prepared(self.path).train
        return None

    def documents(self) -> Any:
        if self._is_held_out_part:
            assert self.path is not None
            return open_corpus(self.path.with_suffix(".parquet"))
        if self.path is not None and is_prepared(self.path):
            return open_corpus(self.path / "train.parquet")
        return open_corpus(self.source, **self.columns)

    def identity(self) -> Any:
        """Enough to notice that a file changed between a killed audit and its resumption."""
        if self.path is None:
            return None
        files = (
            sorted(p for p in self.path.rglob("*") if p.is_file())
            if self.path.is_dir()
            else [self.path]
        )
        stats = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files if p.exists()]
        return [[list(entry) for entry in stats], self.columns]


def tokenised_for(
    source: CorpusSource, tokenizer: Any, folder: Path, *, with_spans: bool = False
) -> TokenizedCorpus:
    """The corpus in the tokenizer's tokens: stored ones where they fit, made under `folder` else."""
    fingerprint = tokenizer_fingerprint(tokenizer)
    stored = source.prepared()
    if stored is not None and stored.tokenizer_fingerprint == fingerprint and not with_spans:
        return stored
    key = {"tokenizer": fingerprint, "source": source.identity(), "spans": with_spans}
    key_file = folder.with_suffix(".json")
    if folder.exists():
        known = read_json(key_file) if key_file.exists() else {}
        if key["source"] is not None and known.get("key") == key:
            return open_tokenized(folder)
        key_file.unlink(missing_ok=True)  # first: it must never stand beside other tokens
        shutil.rmtree(folder)
    if not source.exists():
        raise UsageError(f"{source.path} does not exist. Give the path of the corpus.")
    documents = source.documents()
    corpus = tokenize_documents(documents.batches(), tokenizer, folder, with_spans=with_spans)
    write_json(key_file, {"key": key, "num_skipped": documents.num_skipped})
    return corpus


def num_skipped(folder: Path) -> int:
    """Unusable rows left out when the tokens in `folder` were made."""
    key_file = folder.with_suffix(".json")
    return read_json(key_file)["num_skipped"] if key_file.exists() else 0
