"""Each document's log-perplexity under a public model, whatever else is in its batch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.audit.scan import Scanner
from tightlip.audit.scanned import scan_corpus
from tightlip.core.errors import UsageError
from tightlip.core.progress import task
from tightlip.corpus.privacy_weights import near_an_edge, on_grid
from tightlip.corpus.tokens import TokenizedCorpus, tokenizer_fingerprint
from tightlip.models.fingerprints import model_fingerprint
from tightlip.models.loading import load_causal_lm, load_tokenizer

# Far above what sharing a batch does to a mean in float32, far below the grid.
BATCH_TOLERANCE_NATS = 2e-4
# Scored alone whatever their value, so that a model whose rows influence each other is found out
# where no document happens to be near an edge. All of a tiny corpus.
ALWAYS_ALONE = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelScores:
    """A public model with its own tokenizer, ready to score documents."""

    folder: Path
    model: Any
    tokenizer: Any

    @classmethod
    def opened(cls, folder: Path, device: str) -> "ModelScores":
        import torch

        tokenizer = load_tokenizer(folder)
        model = load_causal_lm(folder, device=device, dtype=torch.float32)
        return cls(folder=folder, model=model, tokenizer=tokenizer)

    @property
    def tokenizer_fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)

    def unknown_share(self, corpus: TokenizedCorpus) -> float:
        """The share of tokens that stand for a word the model has no name for."""
        unknown = self.tokenizer.unk_token_id
        return (
            0.0
            if unknown is None
            else float((corpus.tokens == unknown).sum() / max(corpus.num_tokens, 1))
        )

    def log_perplexities(
        self, corpus: TokenizedCorpus, folder: Path, description: str
    ) -> np.ndarray:
        """Nats a token of every document, on the grid; NaN where no token was scored.

        A batched pass finds nearly all. Documents so close to an edge of the grid that rounding in
        the batch could decide are scored again alone, so that each value is that of the document
        by itself.

        Holds:
            naive: the same as scoring each document by itself and rounding.
            alone: a model that scores a document otherwise in company is refused.
            resumed: shards that stand under `folder` are not scanned again.
        """
        scanner = Scanner(self.model, bos_id=self.tokenizer.bos_token_id)
        key = {
            "model": model_fingerprint(self.folder),
            "corpus": corpus.corpus_fingerprint,
            "tokenizer": corpus.tokenizer_fingerprint,
            "bos_id": self.tokenizer.bos_token_id,
        }
        scanned = scan_corpus(scanner.scan, corpus, folder, key=key, description=description)
        means = [
            _means(shard.log_probs, np.diff(corpus.bounds[shard.first : shard.end + 1]))
            for shard in scanned.shards()
        ]
        nats = np.concatenate(means) if means else np.zeros(0)
        _refuse_infinite(nats, self.folder)
        return on_grid(self._settled(corpus, nats, description))

    def _settled(self, corpus: TokenizedCorpus, nats: np.ndarray, description: str) -> np.ndarray:
        """The same values, those near an edge and a handful of others as the document alone has
        them; for the others that is the same after rounding."""
        close = np.union1d(
            np.flatnonzero(near_an_edge(nats, BATCH_TOLERANCE_NATS)), _spread_out(nats)
        )
        alone = Scanner(self.model, bos_id=self.tokenizer.bos_token_id, batch_tokens=1)
        settled = nats.copy()
        with task(f"{description}, alone", len(close)) as bar:
            for document in close:
                bounds = corpus.bounds[document : document + 2]
                settled[document] = _means(alone.scan(corpus.tokens, bounds)[1], np.diff(bounds))[0]
                bar.advance()
        if (worst := np.abs(settled - nats)[close].max(initial=0)) > BATCH_TOLERANCE_NATS:
            raise UsageError(
                f"{self.folder} gives a document another perplexity in company than alone (by {worst:.1e} nats), so one "
                "document's weight would depend on the others. Give a model whose rows do not influence each other."
            )
        return settled


def _spread_out(nats: np.ndarray) -> np.ndarray:
    """A handful of scored documents, from the first to the last."""
    scored = np.flatnonzero(~np.isnan(nats))
    if not len(scored):
        return scored
    places = np.linspace(0, len(scored) - 1, min(ALWAYS_ALONE, len(scored)))
    return np.asarray(scored[places.round().astype(int)])


def _means(log_probs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Minus the mean log-probability of each document's scored tokens."""
    documents = np.repeat(np.arange(len(lengths)), lengths)
    scored = ~np.isnan(log_probs)
    sums = np.bincount(documents[scored], -log_probs[scored].astype(np.float64), len(lengths))
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / np.bincount(documents[scored], minlength=len(lengths)))


def _refuse_infinite(nats: np.ndarray, folder: Path) -> None:
    if np.isinf(nats).any():
        raise UsageError(
            f"{folder} holds a token of this text for impossible (probability 0), so no perplexity means anything. Give "
            "the model without whatever masks its logits."
        )
