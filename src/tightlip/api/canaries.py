"""`tightlip canaries plant`, `choose` and `measure` as calls."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightlip.api.run_corpora import open_run_corpus
from tightlip.core.errors import UsageError
from tightlip.core.files import write_json
from tightlip.core.run_folder import RunRecord, is_run, open_run, run_around
from tightlip.corpus.canaries import CanaryConfig, Planted, read_key, write_key
from tightlip.corpus.canaries import plant_canaries as plant
from tightlip.corpus.prepare import is_prepared
from tightlip.corpus.readers import BadRows, open_corpus

log = logging.getLogger("tightlip")
Keys = str | Path | Sequence[str | Path]


def plant_canaries(
    corpus: Any,
    out: str | Path,
    *,
    user_column: str = "user",
    text_column: str = "text",
    bad_rows: BadRows = "error",
    **settings: Any,
) -> Planted:
    """Write OUT/corpus.parquet, a corpus with canaries in it, and OUT/key.json, which says what
    they are; `settings` are those of CanaryConfig."""
    config = CanaryConfig(**settings)
    _refuse_folders_of_ours(corpus)
    documents = open_corpus(
        corpus, user_column=user_column, text_column=text_column, bad_rows=bad_rows
    )
    return plant(documents, Path(out), config)


def _refuse_folders_of_ours(corpus: Any) -> None:
    """A prepared folder holds its held-out text too, which must not be trained on."""
    if not isinstance(corpus, str | Path):
        return
    record = run_around(Path(corpus)) if is_run(Path(corpus)) else None
    if record is not None and record.folder.resolve() == Path(corpus).resolve():
        part = record.corpus_folder / "train.parquet"
        raise UsageError(
            f"{corpus} is a run, and canaries are planted before training. Plant in its text and train anew: "
            f"tightlip canaries plant {part}"
        )
    if is_prepared(Path(corpus)):
        raise UsageError(
            f"{corpus} is a prepared corpus, held-out text included. Plant in what is trained on: "
            f"tightlip canaries plant {Path(corpus) / 'train.parquet'}"
        )


def choose_canaries(
    run: str | Path,
    out: str | Path,
    *,
    key: Keys = (),
    device: str = "auto",
    **settings: Any,
) -> Planted:
    """Write to `out` a key of real canaries: of each user the training document that surprises
    the model of an unmitigated run most; `settings` are those of ChoiceConfig.

    `key` names what was planted in the run's corpus, which is then never chosen.
    """
    from tightlip.audit.document_scores import open_scanner
    from tightlip.audit.real_canaries import ChoiceConfig, choose_real_canaries
    from tightlip.models.fingerprints import model_fingerprint
    from tightlip.models.loading import load_tokenizer

    config, record = ChoiceConfig(**settings), _unmitigated(Path(run))
    if Path(out).exists():
        raise UsageError(f"{out} exists. Give another --out, or delete it first.")
    corpus = open_run_corpus(record)
    choice = choose_real_canaries(
        open_scanner(record.model_folder, corpus.train, _device(device)),
        load_tokenizer(record.model_folder),
        corpus.train,
        open_corpus(record.corpus_folder / "train.parquet"),
        config,
        planted=[canary.text for each in _read_keys(key) for canary in each.of_planted],
    )
    chosen = Planted(
        canaries=choice.canaries,
        pools={},
        model_fingerprint=model_fingerprint(record.model_folder),
        snapshot_fingerprints=tuple(model_fingerprint(each.folder) for each in record.snapshots),
        num_users_left_out=choice.num_users_left_out,
    )
    write_key(Path(out), chosen)
    return chosen


def measure_canaries(
    model: str | Path,
    key: Keys,
    *,
    out: str | Path | None = None,
    device: str = "auto",
    **settings: Any,
) -> list[dict[str, Any]]:
    """What a model, or the one that a run trained, knows of every canary in a key or several.

    `settings` are those of ExposureConfig. With `out` the list is written there, for its owner
    only.
    """
    import torch

    from tightlip.audit.exposure import ExposureConfig, measure_exposures
    from tightlip.audit.scan import Scanner
    from tightlip.models.loading import load_causal_lm, load_tokenizer

    config = ExposureConfig(**settings)
    keys = _read_keys(key)
    folder = model_folder(Path(model))
    _refuse_own_choice(folder, keys)
    if is_run(Path(model)) and (said := missing_copies(open_run(Path(model)), keys)):
        log.warning(said)
    tokenizer = load_tokenizer(folder)
    loaded = load_causal_lm(folder, device=_device(device), dtype=torch.float32)
    scanner = Scanner(loaded, bos_id=tokenizer.bos_token_id)
    found = []
    for each in keys:
        others = [canary for other in keys if other is not each for canary in other.of_planted]
        entries = measure_exposures(scanner, tokenizer, each, config, others)
        found += [entry.to_json() for entry in entries]
    if out is not None:
        write_json(Path(out), found)
    return found


def missing_copies(record: RunRecord, keys: Sequence[Planted]) -> str | None:
    """A sentence where planted canaries do not stand in a run's training text as the keys say:
    what is measured is then another model, or another key, than its reader thinks."""
    planted = [canary for key in keys for canary in key.of_planted]
    if not planted:
        return None
    if not is_prepared(record.corpus_folder):
        return "The run's training text is no longer there, so nobody can tell whether the canaries stood in it."
    wanted = {canary.text: 0 for canary in planted}
    open_run_corpus(record)  # refused where other text lies there now
    for batch in open_corpus(record.corpus_folder / "train.parquet").batches():
        for text in batch.texts:
            if text in wanted:
                wanted[text] += 1
    if planted and not any(wanted.values()):
        return (
            f"None of the {len(planted):,} planted canaries stands in the run's training text: it never saw them, and that "
            "it knows none says nothing about what it keeps. Is this the key of another corpus?"
        )
    fewer = sum(wanted[canary.text] < canary.repetitions for canary in planted)
    if not fewer:
        return None
    return (
        f"{fewer:,} of {len(planted):,} planted canaries stand in the run's training text fewer times than the key says: "
        "some copies were held out, scrubbed or taken for duplicates. Plant after splitting."
    )


def model_folder(model: Path) -> Path:
    """`model` itself, or the model of a finished run."""
    if not is_run(model):
        return model
    record = open_run(model)
    if not record.finished:
        raise UsageError(f"{model} is not finished training. Give its train command again.")
    return record.model_folder


def _unmitigated(run: Path) -> RunRecord:
    if not is_run(run):
        raise UsageError(
            f"{run} is no run, and canaries are chosen from the text that a run trained on. Train one: "
            "tightlip train CORPUS --out RUN"
        )
    model_folder(run)
    record = open_run(run)
    mitigation = record.config["train"]["mitigation"]
    if mitigation != "none":
        raise UsageError(
            f"{run} was trained with mitigation {mitigation!r}, which has a hand in what surprises the model. Choose with "
            "an unmitigated run: tightlip train CORPUS --out RUN --mitigation none"
        )
    return record


def _read_keys(given: Keys) -> list[Planted]:
    """The keys, each once; one path stands for itself."""
    paths = [given] if isinstance(given, str | Path) else list(given)
    return [read_key(path) for path in dict.fromkeys(Path(path).resolve() for path in paths)]


def _refuse_own_choice(folder: Path, keys: Sequence[Planted]) -> None:
    choosers = {
        print_
        for key in keys
        if key.model_fingerprint is not None
        for print_ in (key.model_fingerprint, *key.snapshot_fingerprints)
    }
    if not choosers:
        return
    from tightlip.models.fingerprints import model_fingerprint

    if model_fingerprint(folder) in choosers:
        raise UsageError(
            f"{folder} comes from the run that chose these real canaries as what surprises it most, so the choice "
            "flatters it. Choose with an unmitigated run of another --seed, and measure all models with that key."
        )


def _device(name: str) -> Any:
    from tightlip.api.audit import usable_device

    return usable_device(name)
