"""Models as every measure opens them: once for a command, and loaded only when a scan is missing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cached_property
from os import W_OK, access
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.devices import usable_device
from tightlip.core.errors import UsageError
from tightlip.core.files import claimed
from tightlip.core.run_folder import RunRecord
from tightlip.corpus.encoding import tokenizer_fingerprint
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.models.loading import (
    check_weight_files,
    files_fingerprint,
    gguf_file,
    load_causal_lm,
    load_tokenizer,
    model_fingerprint,
    read_configuration,
    state_fingerprint,
)
from tightlip.scan.options import ScanOptions
from tightlip.scan.scanner import Scanner
from tightlip.scan.store import SCAN, ScanFunction, ScannedCorpus, ScanStore, scan_store

# min-k% looks at one token in so many, the least likely ones (Shi et al. 2024: 20%).
LOWEST_SHARE = 5
AUDIT = "audit"  # where a run's report stands unless told otherwise


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentScores:
    """Each document's loss, over how many tokens; and that of its least likely fifth.

    A token that nothing stands before, not even a BOS, is predicted by nobody and not counted.
    Counts are floats, as sums over owners are.
    """

    loss_nats: np.ndarray
    num_tokens: np.ndarray
    lowest_nats: np.ndarray
    num_lowest: np.ndarray

    def each(self, change: Callable[[np.ndarray], np.ndarray]) -> "DocumentScores":
        """The same with every column changed."""
        return DocumentScores(
            **{field.name: change(getattr(self, field.name)) for field in fields(self)}
        )


def document_scores(scanned: ScannedCorpus, *, counted: np.ndarray | None = None) -> DocumentScores:
    """Scores of every document, in their order; with `counted`, of those of its tokens only.

    Holds:
        naive: the same as scoring each document by itself and adding up.
        streamed: the log-probabilities of one shard are held at a time.
    """
    parts = []
    for shard in scanned.shards():
        bounds = scanned.corpus.bounds[shard.first : shard.end + 1]
        log_probs = shard.log_probs
        if counted is not None:
            log_probs[~counted[bounds[0] : bounds[-1]]] = np.nan
        parts.append(_reduced(log_probs, np.diff(bounds)))
    columns = np.concatenate(parts, axis=1) if parts else np.zeros((4, 0))
    names = [field.name for field in fields(DocumentScores)]
    return DocumentScores(**dict(zip(names, columns, strict=True)))


def _reduced(log_probs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Loss, tokens, loss and number of the lowest fifth: a row each, a column a document."""
    num_documents = len(lengths)
    documents = np.repeat(np.arange(num_documents), lengths)
    scored = ~np.isnan(log_probs)
    documents, losses = documents[scored], -log_probs[scored].astype(np.float64)
    if not np.isfinite(losses).all():
        raise UsageError(
            "The model holds a token of this text for impossible (probability 0), so its loss is infinite and no "
            "mean of losses means anything. Measure the model without whatever masks its logits."
        )
    num_tokens = np.bincount(documents, minlength=num_documents)
    num_lowest = np.maximum(num_tokens // LOWEST_SHARE, num_tokens > 0)
    order = np.lexsort((-losses, documents))
    place = np.arange(len(order)) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
    lowest = order[place < num_lowest[documents[order]]]
    return np.array(
        [
            np.bincount(documents, losses, num_documents),
            num_tokens,
            np.bincount(documents[lowest], losses[lowest], num_documents),
            num_lowest,
        ],
        dtype=np.float64,
    )


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model with the tokenizer it speaks through; `load` is called when it is first needed.

    `files` is a fingerprint of all that decides what it makes of a text. `is_file` tells a model
    on disk, of which it says all, from one in memory, where it covers the weights and not the code.
    """

    name: str
    tokenizer: Any
    fingerprint: str
    files: str
    options: ScanOptions
    device: str
    load: Callable[[], Any]
    is_file: bool

    @cached_property
    def model(self) -> Any:
        return self.load()

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def scanner(self) -> Scanner:
        return self.scanner_of(self.options.batch_tokens)

    def scanner_of(self, batch_tokens: int | None, *, begins: bool = True) -> Scanner:
        """`begins` is whether a begin token is put before each text."""
        return Scanner(
            self.model,
            bos_id=self.tokenizer.bos_token_id if begins else None,
            window=self.options.window,
            batch_tokens=batch_tokens,
        )

    def scan(self, corpus: TokenizedCorpus, store: ScanStore, description: str) -> ScannedCorpus:
        """Every token's rank and log-probability under the model, as they stand in `store`."""
        key = {
            "model": self.files,
            "bos": None
            if corpus.begins_itself
            else self.tokenizer.bos_token_id,  # in no fingerprint: tokenizer_config.json names it
            "window": self.options.window,  # as asked for; the model's own follows from the model
            "dtype": self.options.dtype,
            "device": self.device.split(":")[0],
        }

        def open_scan() -> ScanFunction:
            self._check_vocabulary(corpus)
            if corpus.begins_itself:
                return self.scanner_of(self.options.batch_tokens, begins=False).scan
            return self.scanner.scan

        return store.scan(corpus, key=key, open_scan=open_scan, description=description)

    def _check_vocabulary(self, corpus: TokenizedCorpus) -> None:
        find = getattr(self.model, "get_input_embeddings", None)
        embeddings = find() if find else None
        size = getattr(embeddings, "num_embeddings", None)
        # Padding is not asked for: GPT-2 with a [PAD] added has no embedding for it and needs none.
        largest = max(int(corpus.tokens.max(initial=0)), self.tokenizer.bos_token_id or 0)
        if size is not None and largest >= size:
            raise UsageError(
                f"The tokenizer gives token {largest}, but {self.name} has embeddings for {size} "
                f"tokens only. Use the tokenizer the model was trained with."
            )

    def refuse_other_tokens(self, corpus: TokenizedCorpus) -> None:
        """Refuse a model that reads text as other tokens than the corpus holds."""
        if self.tokenizer_fingerprint != corpus.tokenizer_fingerprint:
            raise UsageError(
                f"{self.name} cuts text into other tokens than the run's corpus, and a loss per token of one cannot be set "
                "against that of the other. Give a model with the run's tokenizer: train it with --tokenizer RUN/model."
            )


def open_model(
    model: Any, options: ScanOptions, *, tokenizer: Any = None, name: str | None = None
) -> OpenedModel:
    """The model with its tokenizer, from a folder or as it is in memory.

    Whatever can be refused without reading the weights is refused now.
    """
    if isinstance(model, str | Path):
        return _from_disk(Path(model), options, tokenizer, name)
    if tokenizer is None:
        raise UsageError(
            f"A {type(model).__name__} in memory does not say how text becomes tokens. "
            f"Give tokenizer=, an object or a folder."
        )
    first, state = next(model.parameters(), None), state_fingerprint(model)
    return OpenedModel(
        name=name or type(model).__name__,
        tokenizer=_tokenizer(tokenizer),
        fingerprint=state,
        files=state,
        options=options,
        device="cpu" if first is None else first.device.type,
        load=lambda: model,
        is_file=False,
    )


def _from_disk(folder: Path, options: ScanOptions, tokenizer: Any, name: str | None) -> OpenedModel:
    device = usable_device(options.device)
    if gguf_file(folder) is None:
        read_configuration(folder)
        check_weight_files(folder)

    def load() -> Any:
        import torch

        return load_causal_lm(folder, device=device, dtype=getattr(torch, options.dtype))

    return OpenedModel(
        name=name or str(folder),
        tokenizer=_tokenizer(tokenizer or folder),
        fingerprint=model_fingerprint(folder),
        files=files_fingerprint(folder),
        options=options,
        device=device,
        load=load,
        is_file=True,
    )


def _tokenizer(tokenizer: Any) -> Any:
    return load_tokenizer(Path(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer


@dataclass(frozen=True, kw_only=True)
class Scans:
    """The models of one command, each opened once, and where their scans stand.

    Scans of several runs may share `models`.
    """

    store: ScanStore
    options: ScanOptions = field(default_factory=ScanOptions)
    models: dict[Path, OpenedModel] = field(default_factory=dict)

    def opened(self, folder: Path) -> OpenedModel:
        place = Path(folder).resolve()
        if place not in self.models:
            self.models[place] = open_model(folder, self.options)
        return self.models[place]

    def release(self, folder: Path) -> None:
        """Give the model's memory back."""
        self.models.pop(Path(folder).resolve(), None)

    def scan(self, model: OpenedModel, corpus: TokenizedCorpus, description: str) -> ScannedCorpus:
        return model.scan(corpus, self.store, description)

    def scores(
        self,
        folder: Path,
        corpus: TokenizedCorpus,
        description: str,
        *,
        counted: np.ndarray | None = None,
    ) -> DocumentScores:
        """What the model in `folder` makes of each document; refused if it reads other tokens."""
        model = self.opened(folder)
        model.refuse_other_tokens(corpus)
        return document_scores(self.scan(model, corpus, description), counted=counted)


def run_store(
    run: Path, *, beside: Sequence[Path] = (), keep: bool = True
) -> AbstractContextManager[ScanStore]:
    """Where measures of a run keep their scans; those of its report, and of the runs or reports in
    `beside`, are read too."""
    return scan_store(run / SCAN, [folder / SCAN for folder in (run / AUDIT, *beside)], keep=keep)


def claimed_to_write(run: Path) -> AbstractContextManager[None]:
    """A claim on a run, unless it may only be read: then nothing is kept with it."""
    return claimed(run) if access(run, W_OK) else nullcontext()


@contextmanager
def scans_of_run(
    run: RunRecord, *, device: str, keep: bool, given: Scans | None = None
) -> Iterator[Scans]:
    """`given`, or the run's own, which are dropped afterwards unless they are to be kept."""
    if given is not None:
        yield given
        return
    with claimed_to_write(run.folder), run_store(run.folder, keep=keep) as store:
        yield Scans(store=store, options=ScanOptions(device=device))
