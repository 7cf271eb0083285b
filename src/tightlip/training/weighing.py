"""Privacy weights of a prepared corpus as one call: score, normalise, store, draw the page."""

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tightlip
from tightlip.core.checksums import checked
from tightlip.core.errors import UsageError
from tightlip.core.files import claimed, make_private_folder
from tightlip.core.progress import log, task
from tightlip.core.run_folder import is_run
from tightlip.corpus import public_text
from tightlip.corpus.encoding import tokenizer_fingerprint
from tightlip.corpus.history import marks_of, origin_of
from tightlip.corpus.opening import CorpusSource, model_folder, tokenised_for
from tightlip.corpus.prepare import PreparedCorpus, is_prepared, open_prepared
from tightlip.corpus.privacy_weights import (
    FOLDER,
    PUBLIC_LOG_PERPLEXITIES,
    SOUND,
    PrivacyWeights,
    WeightsConfig,
    near_an_edge,
    on_grid,
    read_weights,
    weights_of,
    write_weights,
)
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.shared_text import spread_out
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.models.folders import files_fingerprint, model_fingerprint
from tightlip.models.loading import load_tokenizer
from tightlip.scan.models import OpenedModel, open_model
from tightlip.scan.options import ScanOptions
from tightlip.scan.store import SCAN, ScanStore, scan_store

# Far above what sharing a batch does to a mean in float32, far below the grid.
BATCH_TOLERANCE_NATS = 2e-4
# Scored alone whatever their value, so that a model whose rows influence each other is found out
# where no document happens to be near an edge. All of a tiny corpus.
ALWAYS_ALONE = 16
WORK = ".weighing"  # tokens while they are made
TRAIN = "train.parquet"
MOST_UNKNOWN = 0.01
FEWEST_PUBLIC = 100  # documents, for quantiles that mean something
Shown = dict[str, Any]  # a document as the page shows it
NUM_SHOWN = 20  # documents at either end of the weights
SCANNED_FOR_DISTINCT = 20 * NUM_SHOWN  # texts looked at to find so many different ones


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelScores:
    """A public model, ready to score documents, and where its scans stand."""

    model: OpenedModel
    store: ScanStore

    def log_perplexities(self, corpus: TokenizedCorpus, description: str) -> np.ndarray:
        """Nats a token of every document, on the grid; NaN where no token was scored.

        A batched pass finds nearly all. Documents so close to an edge of the grid that rounding in
        the batch could decide are scored again alone, so that each value is that of the document
        by itself.

        Holds:
            naive: the same as scoring each document by itself and rounding.
            alone: a model that scores a document otherwise in company is refused.
            resumed: shards that stand in the store are not scanned again.
        """
        scanned = self.model.scan(corpus, self.store, description)
        means = [
            _means(shard.log_probs, np.diff(corpus.bounds[shard.first : shard.end + 1]))
            for shard in scanned.shards()
        ]
        nats = np.concatenate(means) if means else np.zeros(0)
        if np.isinf(nats).any():
            raise UsageError(
                f"{self.model.name} holds a token of this text for impossible (probability 0), so no perplexity means "
                "anything. Give the model without whatever masks its logits."
            )
        return on_grid(self._settled(corpus, nats, description))

    def _settled(self, corpus: TokenizedCorpus, nats: np.ndarray, description: str) -> np.ndarray:
        """The same values, those near an edge and a handful of others as the document alone has
        them; for the others that is the same after rounding."""
        others = spread_out(np.flatnonzero(~np.isnan(nats)), ALWAYS_ALONE)
        close = np.union1d(np.flatnonzero(near_an_edge(nats, BATCH_TOLERANCE_NATS)), others)
        alone = self.model.scanner_of(batch_tokens=1)
        settled = nats.copy()
        with task(f"{description}, alone", len(close)) as bar:
            for document in close:
                bounds = corpus.bounds[document : document + 2]
                settled[document] = _means(alone.scan(corpus.tokens, bounds)[1], np.diff(bounds))[0]
                bar.advance()
        if (worst := np.abs(settled - nats)[close].max(initial=0)) > BATCH_TOLERANCE_NATS:
            raise UsageError(
                f"{self.model.name} gives a document another perplexity in company than alone (by {worst:.1e} nats), so one "
                "document's weight would depend on the others. Give a model whose rows do not influence each other."
            )
        return settled


def _means(log_probs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Minus the mean log-probability of each document's scored tokens."""
    documents = np.repeat(np.arange(len(lengths)), lengths)
    scored = ~np.isnan(log_probs)
    sums = np.bincount(documents[scored], -log_probs[scored].astype(np.float64), len(lengths))
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / np.bincount(documents[scored], minlength=len(lengths)))


def weigh_documents(
    prepared: str | Path | PreparedCorpus,
    *,
    render: Callable[..., str],
    device: str = "auto",
    keep_scan: bool = True,
    **settings: Any,
) -> PrivacyWeights:
    """Weigh every training document of a prepared corpus by how rare it is to a public model.

    `settings` are those of WeightsConfig. The weights stand in `weights/` of the corpus' folder,
    with the page that `render` draws, and the public model's scans in `scan/` unless `keep_scan`
    is False.

    Holds:
        kept: weights that stand there, made with the same settings, are returned untouched.
        rest_untouched: nothing but `weights/` and `scan/` changes.
        own_text_only: with `public` and `public-rank` no document moves another's weight.
        public_only: a model or a corpus that is known to hold this text is refused.
    """
    config = WeightsConfig(**settings)
    corpus = prepared if isinstance(prepared, PreparedCorpus) else open_prepared(Path(prepared))
    with claimed(corpus.folder):
        return _Weighing.begun(corpus, config).weighed(render, device, keep_scan)


def refuse_private_model(model: Path, corpus: PreparedCorpus) -> None:
    """A model that learnt this text finds it ordinary, and its weights would tell of all of it.

    Holds:
        chained: it is found through runs that went on from one another, and in a copy.
        words: so is a vocabulary that was learnt from this text.
    """
    origin, marks = origin_of(model), marks_of(corpus.folder)
    if origin.learnt & (marks | {corpus.train.corpus_fingerprint}):
        raise UsageError(
            f"public_model={str(model)!r} was trained on this very corpus or another part of the same text, by itself or "
            "through the model that it went on from. It knows the rarest text by heart. Give a model that never saw it."
        )
    if origin.words & marks and not _is_charged(model, corpus):
        raise UsageError(
            f"The vocabulary of public_model={str(model)!r} was learnt from this very corpus, so every weight would tell "
            "which words are in it. Give a model with a tokenizer of other text."
        )


def _is_charged(model: Path, corpus: PreparedCorpus) -> bool:
    """A noisy vocabulary that this corpus uses itself is a release that its runs pay for."""
    theirs = tokenizer_fingerprint(load_tokenizer(model))
    return bool(corpus.releases) and theirs == corpus.train.tokenizer_fingerprint


class _PublicSource(CorpusSource):
    """The public corpus, with or without users."""

    def documents(self) -> Any:
        assert self.path is not None
        if is_prepared(self.path):
            return super().documents()
        return public_text.open_public(self.path, **self.columns)


@dataclass(frozen=True, kw_only=True)
class _Weighing:
    """What is weighed and by what; `identity` says when weights need not be made again."""

    corpus: PreparedCorpus
    config: WeightsConfig
    model: Path | None
    public: _PublicSource | None
    identity: dict[str, Any]

    @classmethod
    def begun(cls, corpus: PreparedCorpus, config: WeightsConfig) -> "_Weighing":
        """Everything that can be refused without reading the text is refused here."""
        public = _public_source(corpus, config)
        model = None if config.public_model is None else model_folder(Path(config.public_model))
        fingerprint = None if model is None else model_fingerprint(model)
        if model is not None:
            refuse_private_model(model, corpus)
        documents = None if public is None else public.documents()
        if documents is not None:
            public_text.refuse_private_text(documents, corpus)
        identity = {
            "normalisation": config.weights,
            "is_sound": config.weights in SOUND,
            "estimator": "frequency estimate" if model is None else "language model",
            "model": public_text.FREQUENCY_ESTIMATE if model is None else name_of_model(model),
            "model_fingerprint": fingerprint,
            "model_files": None if model is None else files_fingerprint(model),
            "public_corpus": None if public is None else Path(str(config.public_corpus)).name,
            "public_corpus_fingerprint": None if documents is None else documents.fingerprint(),
            "least_weight": config.least_weight,
            "text_fingerprint": corpus.train.corpus_fingerprint,
        }
        return cls(corpus=corpus, config=config, model=model, public=public, identity=identity)

    def weighed(self, render: Callable[..., str], device: str, keep_scan: bool) -> PrivacyWeights:
        """The weights, made or kept, with the page that `render` draws."""
        kept, folder = None, self.corpus.folder
        with suppress(UsageError):  # there are none, or they are of other text
            kept = read_weights(folder)
        if kept is not None and self._agrees(kept, self.identity):
            return kept
        documents = None if self.public is None else self.public.documents()
        shared = public_text.known_overlap(self.corpus, documents, self.model)
        work = make_private_folder(folder / WORK)
        with scan_store(folder / SCAN, keep=keep_scan) as store:
            nats, public = self.scored(work, store, kept, device)
        rho, a, b = weights_of(self.config, nats, public)
        own = {"a": a, "b": b, "shared": shared, "version": tightlip.__version__}
        weights = PrivacyWeights(rho=rho, log_perplexities=nats, info=self.identity | own)
        shown = _shown(folder, weights)
        page = render(info=weights.info, rho=rho, nats=nats, public=public, shown=shown)
        write_weights(folder, weights, public, page)
        shutil.rmtree(work, ignore_errors=True)
        return weights

    def _agrees(self, kept: PrivacyWeights, names: Iterable[str]) -> bool:
        """Weights of version 0.1 do not say what the model's other files were, and are believed."""
        own = self.identity
        return all(kept.info.get(name, own[name]) == own[name] for name in names)

    def scored(
        self, work: Path, store: ScanStore, kept: PrivacyWeights | None, device: str
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Log-perplexities of the training documents and of the public ones, on their grid."""
        nats, public = self._scored_before(kept)
        wants_public = public is None and self.public is not None
        if nats is None or wants_public:
            score = self._by_words() if self.model is None else self._by_model(work, store, device)
            nats = score("train") if nats is None else nats
            public = score("public") if wants_public else public
        if public is not None and (few := int((~np.isnan(public)).sum())) < FEWEST_PUBLIC:
            log.warning(
                "Only %d public documents could be scored; constants from so few mean little.", few
            )
        return nats, public

    def _scored_before(
        self, kept: PrivacyWeights | None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What other weights by the same estimator were made from."""
        same = ["estimator", "model_fingerprint", "model_files"]
        same += ["public_corpus_fingerprint"] if self.model is None else []
        is_same = kept is not None and kept.info["version"] == tightlip.__version__
        if kept is None or not is_same or not self._agrees(kept, same):
            return None, None
        stored = self.corpus.folder / FOLDER / PUBLIC_LOG_PERPLEXITIES
        fingerprint = "public_corpus_fingerprint"
        if not stored.is_file() or kept.info[fingerprint] != self.identity[fingerprint]:
            return kept.log_perplexities, None
        return kept.log_perplexities, np.load(checked(stored))

    def _by_words(self) -> Callable[[str], np.ndarray]:
        assert self.public is not None
        public = self.public.documents()
        counts = public_text.WordFrequencies(
            text for batch in public.batches() for text in batch.texts
        )

        def score(part: str) -> np.ndarray:
            is_public = part == "public"
            documents = public if is_public else open_corpus(self.corpus.folder / TRAIN)
            nats: list[float] = []
            with task(f"Weighing {part}", None) as bar:
                for batch in documents.batches():
                    nats += [
                        counts.log_perplexity(t, without_itself=is_public) for t in batch.texts
                    ]
                    bar.advance(len(batch))
            return on_grid(np.array(nats, np.float64))

        return score

    def _by_model(self, work: Path, store: ScanStore, device: str) -> Callable[[str], np.ndarray]:
        assert self.model is not None
        scores = ModelScores(model=open_model(self.model, ScanOptions(device=device)), store=store)
        return lambda part: scores.log_perplexities(
            self._tokens(part, scores, work), f"Weighing {part}"
        )

    def _tokens(self, part: str, scores: ModelScores, work: Path) -> TokenizedCorpus:
        """The text as the public model's own tokenizer cuts it."""
        if part == "public":
            assert self.public is not None
            return tokenised_for(self.public, scores.model.tokenizer, work / "public")
        tokens = self.corpus.train
        if tokens.tokenizer_fingerprint != scores.model.tokenizer_fingerprint:
            # The file and not the folder, whose other files change while this one is read.
            source = CorpusSource(self.corpus.folder / TRAIN, {})
            tokens = tokenised_for(source, scores.model.tokenizer, work / "train")
        share = tokens.statistics(scores.model.tokenizer.unk_token_id)["unknown_share"]
        if share > MOST_UNKNOWN:
            log.warning(
                "%.1f%% of the training text are unknown words to %s, and however rare, an unknown word is ordinary to "
                "it. Give a model whose tokenizer can spell every text (BPE).",
                *(100 * share, self.model),
            )
        return tokens


def name_of_model(model: Path) -> str:
    """A folder's name; of a run's model, the run's with it."""
    model = model.resolve()
    return f"{model.parent.name}/{model.name}" if is_run(model.parent) else model.name


def _public_source(corpus: PreparedCorpus, config: WeightsConfig) -> _PublicSource | None:
    """The public corpus, read with the columns of the private one; None where nothing is taken from it."""
    is_used = config.weights in SOUND or config.public_model is None
    if config.public_corpus is None or not is_used:
        return None
    columns = {name: corpus.settings[name] for name in ("user_column", "text_column", "bad_rows")}
    return _PublicSource(Path(config.public_corpus), columns)


def _shown(folder: Path, weights: PrivacyWeights) -> tuple[list[Shown], list[Shown]]:
    """The highest- and the lowest-weighted documents, each text once."""
    nats, rho = weights.log_perplexities, weights.rho
    order = np.lexsort((nats, rho))
    order = order[~np.isnan(nats[order])]
    ends = order[::-1][:SCANNED_FOR_DISTINCT], order[:SCANNED_FOR_DISTINCT]
    texts = _texts(folder, {int(each) for end in ends for each in end})

    def shown(n: int) -> Shown:
        user, text = texts[n]
        return {"number": int(n), "user": user, "text": text, "rho": rho[n], "nats": nats[n]}

    highest, lowest = (_distinct([shown(n) for n in end]) for end in ends)
    return highest, lowest


def _texts(folder: Path, wanted: set[int]) -> dict[int, tuple[str, str]]:
    pairs = (
        pair
        for batch in open_corpus(folder / TRAIN).batches()
        for pair in zip(batch.users, batch.texts, strict=True)
    )
    return {number: pair for number, pair in enumerate(pairs) if number in wanted}


def _distinct(documents: list[Shown]) -> list[Shown]:
    by_text = {" ".join(each["text"].split()): each for each in reversed(documents)}
    return sorted(by_text.values(), key=documents.index)[:NUM_SHOWN]
