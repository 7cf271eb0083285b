"""Models as every measure opens them: once for a command, and loaded only when a scan is missing."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

import numpy as np

from tightlip.core.devices import begin_ids, num_threads, on_workers, usable_device
from tightlip.core.engines import Engine, local_engine
from tightlip.core.errors import UsageError
from tightlip.core.run_folder import run_around
from tightlip.core.settings import bytes_from
from tightlip.core.stores import shown
from tightlip.corpus.encoding import tokenizer_fingerprint
from tightlip.corpus.tokens import TokenizedCorpus
from tightlip.models import adapters, folders, loading
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.scan import ahead
from tightlip.scan.options import ScanOptions
from tightlip.scan.scanner import Scanner
from tightlip.scan.store import PLAIN, ScanFunction, ScannedCorpus, ScanStore, Scorer

Made = TypeVar("Made")
BASE = "base"  # in the place of another model: the one that an adapter was trained on
DEQUANTISED = (
    "A GGUF file's weights are read as plain numbers, and served they are computed in fewer bits: the "
    "figures are near those of the served model, and not the same."
)
MIXED = (
    "Parts of a text were scanned by devices or builds of different kinds ({}), so figures may differ in their last digits "
    "from those of one kind alone."
)


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model with the tokenizer it speaks through; `load` is called when it is first needed.

    `files` is a fingerprint of all that decides what it makes of a text. `is_file` tells a model
    on disk, of which it says all, from one in memory, where it covers the weights and not the code.
    `open_base` opens what an adapter was trained on, `scanning` is what a scan runs in, and `notes`
    are for the readers of figures. A model that tightlip trained `begins` with the
    begin token wherever there is one. `read_files` makes the fingerprint again, where other files
    may stand: on another machine, to which it goes without what was loaded here.
    """

    name: str
    tokenizer: Any
    fingerprint: str
    files: str
    options: ScanOptions
    device: str
    load: Callable[..., Any]
    is_file: bool
    read_files: Callable[[], str] | None = None
    begins: bool = False
    notes: tuple[str, ...] = ()
    open_base: "Callable[[OpenedModel], OpenedModel] | None" = None
    scanning: Callable[[Any], AbstractContextManager[None]] = nullcontext

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def base(self) -> "OpenedModel":
        """What an adapter was trained on: the same weights without it, where that is the same."""
        if self.open_base is None:
            raise UsageError(
                f"{self.name} is not an adapter, so it has no base. Give the folder of another model."
            )
        return self.open_base(self)

    def refuse_unused_base(self) -> None:
        """Refuse --base beside a model on disk that has none: it would do nothing, and seem to."""
        if self.options.base is not None and self.open_base is None and self.is_file:
            raise UsageError(
                f"{self.name} is not an adapter, so --base {self.options.base} would do nothing. To compare with that model "
                "name it as the public model or the reference."
            )

    @cached_property
    def model(self) -> Any:
        return self.load()

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def begin_id(self) -> int | None:
        """What is put before each text, as training put it there; None for nothing."""
        how, own = self.options.begin, self.tokenizer.bos_token_id
        if how == "always" and own is None:
            raise UsageError(
                f"The tokenizer of {self.name} has no begin token, and --begin always asks for one. Leave it out."
            )
        if how == "always" or (how == "auto" and self.begins):
            return own
        found = begin_ids(self.tokenizer) if how == "auto" else []
        if len(found) > 1:
            raise UsageError(
                f"The tokenizer of {self.name} puts {len(found)} tokens before a text, and one can be. Say what was trained "
                "with: --begin always, or never."
            )
        return found[0] if found else None

    def begin_before(self, corpus: Any) -> int | None:
        """What is put before each text of a corpus, whose texts may begin with it themselves."""
        puts_it = not corpus.begins_itself or self.options.begin == "always"
        return self.begin_id if puts_it else None

    @cached_property
    def scanner(self) -> Scanner:
        return self.scanner_of(self.options.batch_tokens)

    def scanner_of(self, batch_tokens: int | None, *, begins: bool = True) -> Scanner:
        """`begins` is whether a begin token is put before each text."""
        return Scanner(
            self.model,
            bos_id=self.begin_id if begins else None,
            window=self.options.window,
            batch_tokens=batch_tokens,
        )

    def scan(
        self,
        corpus: TokenizedCorpus,
        store: ScanStore,
        description: str,
        scorer: Scorer = PLAIN,
        engine: Engine | None = None,
        begun: ahead.ScanAhead | None = None,
    ) -> ScannedCorpus:
        """What the scorer says of every token under the model, as it stands in `store`; `begun` is the
        scan that began while the corpus was tokenised."""
        engine = engine or local_engine()
        key = {
            "model": self.files,
            "bos": self.begin_before(corpus),  # in no fingerprint
            "window": self.options.window,  # as asked for; the model's own follows from the model
            "dtype": self.options.dtype,
            "device": self.device.split(":")[0],
            "threads": engine.threads,
        }
        opening = _open_there if engine.is_remote else OpenedModel.open_scan
        largest = int(corpus.tokens.max(initial=0))
        open_scan = partial(opening, self, corpus, largest, scorer, threads=engine.threads)
        if begun is not None:
            open_scan = partial(begun.take_over, corpus)
        how: dict[str, Any] = {"description": description, "scorer": scorer, "engine": engine}
        scanned = store.scan(corpus, key=key, open_scan=open_scan, **how)
        mixed = MIXED.format("; ".join(scanned.kinds))
        if len(scanned.kinds) > 1 and mixed not in engine.notes:
            engine.notes.append(mixed)
        return scanned

    def open_scan(
        self, corpus: Any, largest: int, scorer: Scorer, *, threads: int, halves: bool = True
    ) -> ScanFunction:
        """The model ready to scan parts of a corpus, tokens and bounds, whose largest token is given."""
        self._check_vocabulary(max(largest, self.begin_id or 0))
        begins, most = self.begin_before(corpus) == self.begin_id, self.options.batch_tokens
        scanner = self.scanner if begins else self.scanner_of(most, begins=False)
        scanner.halves = halves
        with num_threads(threads), self.scanning(self.model):
            scanner.check_on(corpus.tokens, corpus.bounds)

        def scan(tokens: np.ndarray, bounds: np.ndarray) -> Iterable[np.ndarray]:
            with num_threads(threads), self.scanning(self.model):
                return scanner.begun(tokens, bounds, scorer)

        return scan

    def scan_ahead(
        self, store: ScanStore, scorer: Scorer, engine: Engine
    ) -> ahead.ScanAhead | None:
        """What scans a corpus of plain text while it is tokenised, if that may save time."""
        is_apart = not engine.is_remote and self.device.split(":")[0] in ahead.DEVICES
        if not is_apart or store.has_scans():
            return None
        self.begin_id  # noqa: B018 (now: tokenizers are not for two threads)

        def open_scan(corpus: Any) -> ScanFunction:
            largest = int(corpus.tokens.max(initial=0))
            scan = self.open_scan(corpus, largest, scorer, threads=engine.threads)

            def scan_shard(tokens: np.ndarray, bounds: np.ndarray) -> Iterable[np.ndarray]:
                # An id too large would end the GPU's work for good.
                self._check_vocabulary(int(tokens[bounds[0] : bounds[-1]].max(initial=0)))
                return scan(tokens, bounds)

            return scan_shard

        most_tokens = bytes_from(self.options.memory) // ahead.BYTES_PER_TOKEN
        return ahead.ScanAhead(open_scan, lambda: self.scanner.output_layer, most_tokens)

    def _check_vocabulary(self, largest: int) -> None:
        find = getattr(self.model, "get_input_embeddings", None)
        embeddings = find() if find else None
        size = getattr(embeddings, "num_embeddings", None)
        # Padding is not asked for: GPT-2 with a [PAD] added has no embedding for it and needs none.
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


# What a worker has loaded, which is asked for again with the next text.
_loaded: list[OpenedModel] = []


def on_worker(model: OpenedModel) -> OpenedModel:
    """The model on another machine, loaded there once; refused where its files are others."""
    if not _loaded or _as_served(_loaded[0]) != _as_served(model):
        _loaded.clear()  # first, for the memory
        if model.read_files is not None and model.read_files() != model.files:
            raise UsageError(
                f"{model.name} on {gethostname()} is another model than the one given here. Put it on a file system that "
                "all machines share."
            )
        _loaded.append(model)
    return _loaded[0]


def _open_there(model: OpenedModel, *given: Any, **how: Any) -> ScanFunction:
    return on_worker(model).open_scan(*given, **how, halves=False)


def _as_served(model: OpenedModel) -> tuple[Any, ...]:
    return model.files, model.options, model.device, model.scanning, model.begin_id


def open_model(
    model: Any, options: ScanOptions, *, tokenizer: Any = None, name: str | None = None
) -> OpenedModel:
    """The model with its tokenizer, from a folder or as it is in memory.

    In memory it is a model with `tokenizer`, or a pair of both. Whatever can be refused without
    reading the weights is refused now.
    """
    if isinstance(model, tuple | list) and len(model) == 2:
        model, tokenizer = model
    if isinstance(model, str | Path):
        if options.adapter is not None or folders.is_adapter(Path(model)):
            base = None if options.base is None else Path(options.base)
            adapter = adapters.open_adapter(Path(model), name=options.adapter, base=base)
            return _adapted(adapter, options, tokenizer, name)
        return _from_disk(Path(model), options, tokenizer, name)
    if tokenizer is None:
        raise UsageError(
            f"A {type(model).__name__} in memory does not say how text becomes tokens. "
            f"Give tokenizer=, an object or a folder, or (model, tokenizer) in the model's place."
        )
    return _from_memory(model, options, _tokenizer(tokenizer), name)


def open_beside(subject: OpenedModel, model: Any, options: ScanOptions) -> OpenedModel:
    """The public model or the reference: a model of its own, or the subject's base."""
    return subject.base if means_base(subject, model) else open_other(model, options)


def open_other(model: Any, options: ScanOptions) -> OpenedModel:
    """A model that is not the one that is served; `--base` is for an adapter whose own is not here."""
    others = options.of_others()
    try:
        return open_model(model, others)
    except UsageError:
        if (
            options.base is None
            or not isinstance(model, str | Path)
            or not folders.is_adapter(Path(model))
        ):
            raise
        return open_model(model, replace(others, base=options.base))


def means_base(subject: OpenedModel, model: Any) -> bool:
    """Whether the word is meant; without an adapter it may be a folder of that name."""
    is_word = isinstance(model, str | Path) and str(model) == BASE
    return is_word and (subject.open_base is not None or not Path(BASE).exists())


def _from_memory(model: Any, options: ScanOptions, tokenizer: Any, name: str | None) -> OpenedModel:
    configs, name = adapters.active_configs(model), name or type(model).__name__
    model = adapters.without_wrapper(model)
    first, state = next(model.parameters(), None), folders.state_fingerprint(model)
    switched_on = "".join(f" {config!r}" for config in configs)
    return OpenedModel(
        name=name,
        tokenizer=tokenizer,
        fingerprint=state,
        files=f"{state}{switched_on}",
        options=options,
        device="cpu" if first is None else first.device.type,
        load=lambda: model,
        is_file=False,
        begins=_is_own(getattr(model, "config", None)),
        open_base=partial(_base_in_memory, configs=configs) if configs else None,
    )


def _base_in_memory(opened: OpenedModel, configs: Sequence[Any]) -> OpenedModel:
    """The base of an adapted model in memory: the adapter switched off, or from its folder."""
    model, options = opened.model, opened.options
    named = str(configs[0].base_model_name_or_path or "")
    folder = Path(options.base or named)
    is_here = bool(options.base or named) and (folder / "config.json").is_file()
    rows = loading.read_configuration(folder).get_text_config().vocab_size if is_here else None
    same = all(
        adapters.leaves_base_alone(vars(config)) for config in configs
    ) and not adapters.is_merged(model)
    if same and rows in (None, model.get_input_embeddings().num_embeddings):
        return _switched_off(opened, f"{opened.name}, adapter off", opened.files)
    if not is_here:
        raise UsageError(
            "The adapter of this model changed its base too (a bias, the start or the embeddings), and the base is not "
            "a folder here. Give base=, the folder of the model that it was trained on."
        )
    return open_model(folder, options.of_others(), tokenizer=opened.tokenizer)


def _switched_off(opened: OpenedModel, name: str, files: str) -> OpenedModel:
    return replace(
        opened,
        name=name,
        fingerprint=files,
        files=f"{files} adapter off" if not opened.is_file else files,
        read_files=None,
        load=lambda: opened.model,
        notes=(),
        open_base=None,
        scanning=adapters.adapters_off,
    )


def _adapted(
    adapter: adapters.Adapter, options: ScanOptions, tokenizer: Any, name: str | None
) -> OpenedModel:
    alone = replace(options, adapter=None)
    base = _from_disk(adapter.base, alone, tokenizer or adapter.tokenizer, None)
    read_files = lambda: served(adapter.fingerprint(folders.files_fingerprint), options)  # noqa: E731

    def open_base(opened: OpenedModel) -> OpenedModel:
        if not adapter.shares_base:
            # With its own tokenizer: it has no embeddings for tokens that were added.
            own = adapter.base if folders.has_tokenizer(adapter.base) else opened.tokenizer
            return replace(base, tokenizer=_tokenizer(own))
        off = _switched_off(opened, base.name, base.files)
        return replace(off, fingerprint=base.fingerprint)

    return replace(
        base,
        name=name or shown(adapter.folder),
        fingerprint=adapter.fingerprint(folders.model_fingerprint),
        files=read_files(),
        read_files=read_files,
        load=lambda: base.load(adapter.applied),
        begins=base.begins or run_around(adapter.folder) is not None,
        notes=(*base.notes, f"The adapter is applied, unmerged, to {shown(adapter.base)}."),
        open_base=open_base,
    )


def _from_disk(folder: Path, options: ScanOptions, tokenizer: Any, name: str | None) -> OpenedModel:
    device = options.device if on_workers.get() else usable_device(options.device)
    is_gguf = folders.gguf_file(folder) is not None
    config = None if is_gguf else loading.read_configuration(folder)
    if not is_gguf:
        folders.stored_shapes(folder)
        loading.is_quantised_as(folder, options.quantize)

    def load(adapted: Any = None) -> Any:
        import torch

        return load_causal_lm(
            folder,
            device=device,
            dtype=getattr(torch, options.dtype),
            quantize=options.quantize,
            device_map=options.device_map,
            adapted=adapted,
        )

    read_files = lambda: served(folders.files_fingerprint(folder), options)  # noqa: E731
    # A checkpoint of a Trainer may have its tokenizer beside it only.
    is_checkpoint = folder.name.startswith("checkpoint-")
    has_own = is_gguf or folders.has_tokenizer(folder) or not is_checkpoint
    beside = folder if has_own else folder.parent
    return OpenedModel(
        name=name or shown(folder),
        tokenizer=_tokenizer(tokenizer or beside),
        fingerprint=folders.model_fingerprint(folder),
        files=read_files(),
        read_files=read_files,
        options=options,
        device=device if options.device_map is None else "mapped",
        load=load,
        is_file=True,
        begins=_is_own(config) or run_around(folder) is not None,
        notes=(DEQUANTISED,) if is_gguf else _notes_on(options),
    )


def _is_own(config: Any) -> bool:
    return str(getattr(config, "model_type", "")).startswith("tightlip_")


def served(files: str, options: ScanOptions) -> str:
    """The fingerprint of files that are read in fewer bits than they hold."""
    return files if options.quantize is None else f"{files} in {options.quantize}"


def _notes_on(options: ScanOptions) -> tuple[str, ...]:
    words = {"4bit": "4 bits (NF4)", "8bit": "8 bits (int8, threshold 6)"}
    if options.quantize is None:
        return ()
    return (f"The model was read in {words[options.quantize]}, by bitsandbytes.",)


def _tokenizer(tokenizer: Any) -> Any:
    return load_tokenizer(Path(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer
