"""`tightlip canaries plant` and `tightlip canaries measure` as calls."""

from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.files import write_json
from tightlip.core.run_folder import is_run, open_run
from tightlip.corpus.canaries import CanaryConfig, Planted, read_key
from tightlip.corpus.canaries import plant_canaries as plant
from tightlip.corpus.readers import BadRows, open_corpus


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
    documents = open_corpus(
        corpus, user_column=user_column, text_column=text_column, bad_rows=bad_rows
    )
    return plant(documents, Path(out), config)


def measure_canaries(
    model: str | Path,
    key: str | Path,
    *,
    out: str | Path | None = None,
    device: str = "auto",
    **settings: Any,
) -> list[dict[str, Any]]:
    """What a model, or the one that a run trained, knows of every canary in the key.

    `settings` are those of ExposureConfig. With `out` the list is written there, for its owner
    only.
    """
    import torch

    from tightlip.api.audit import usable_device
    from tightlip.audit.exposure import ExposureConfig, measure_exposures
    from tightlip.audit.scan import Scanner
    from tightlip.models.loading import load_causal_lm, load_tokenizer

    config = ExposureConfig(**settings)
    planted = read_key(Path(key))
    folder = model_folder(Path(model))
    tokenizer = load_tokenizer(folder)
    loaded = load_causal_lm(folder, device=usable_device(device), dtype=torch.float32)
    scanner = Scanner(loaded, bos_id=tokenizer.bos_token_id)
    found = [one.to_json() for one in measure_exposures(scanner, tokenizer, planted, config)]
    if out is not None:
        write_json(Path(out), found)
    return found


def model_folder(model: Path) -> Path:
    """`model` itself, or the model of a finished run."""
    if not is_run(model):
        return model
    record = open_run(model)
    if not record.finished:
        raise UsageError(f"{model} is not finished training. Give its train command again.")
    return record.model_folder
