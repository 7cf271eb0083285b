"""What was done to a corpus before, kept inside the files it was cut into.

A promise about a corpus covers how it was made of the one before: a share held out by number, or
sentences removed because somebody else wrote them too, let one person's text decide what is left
of another's. `train.parquet` and `validation.parquet` of a prepared corpus carry its settings in
their metadata, canaries are planted with them, and the next `prepare` finds them there. A data
frame, or a file that other tools wrote anew, has no history to tell.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tightlip.core.files import read_json
from tightlip.core.run_folder import run_around
from tightlip.corpus.formats import kind_of

_NAME = b"tightlip.history"
# Of the settings of a preparation, those by which one text can decide about another.
_KEPT = ("split", "deduplicate")


def step_of(settings: dict[str, Any], source_fingerprint: str) -> dict[str, Any]:
    """One preparation, as the next one will read of it."""
    return {name: settings[name] for name in _KEPT} | {"source_fingerprint": source_fingerprint}


def metadata_of(history: list[dict[str, Any]]) -> dict[bytes, bytes] | None:
    """The history as a Parquet file's metadata."""
    return {_NAME: json.dumps(history).encode()} if history else None


def history_of(source: Any) -> list[dict[str, Any]]:
    """Every preparation that a corpus came through, the first one first; empty where none is told.

    Of a folder of files, what any of them came through.
    """
    if isinstance(source, pa.Table):
        return _read(source.schema)
    if not isinstance(source, str | Path) or not Path(source).exists():
        return []
    path = Path(source)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    steps: list[dict[str, Any]] = []
    for file in files:
        if kind_of(file) == "parquet":
            steps += [step for step in _read(_schema(file)) if step not in steps]
    return steps


def sources_of(prepared: Path) -> set[str]:
    """Fingerprints of the text that a prepared corpus was made from, and of what that was cut from."""
    record = prepared / "prepared.json"
    if not record.is_file():
        return set()
    known = read_json(record)
    return {known["source_fingerprint"], *fingerprints(known.get("history", []))}


def fingerprints(history: list[dict[str, Any]]) -> set[str]:
    return {step["source_fingerprint"] for step in history}


def preparation_behind(folder: Path) -> Path | None:
    """The prepared corpus that a tokenizer's folder came out of: it stands in it, or in a run on
    it; None where neither is known, as of a copy."""
    for above in (folder.resolve(), *folder.resolve().parents[:2]):
        if (above / "prepared.json").is_file():
            return above
    run = run_around(folder)
    return None if run is None else run.corpus_folder


def sources_behind(model: Path) -> set[str]:
    """Fingerprints of all text that a model's weights are known to have learnt from, its run's and
    those of the runs that this one went on from."""
    found: set[str] = set()
    seen: set[Path] = set()
    run = run_around(model)
    while run is not None and run.folder not in seen:
        seen.add(run.folder)
        found |= sources_of(run.corpus_folder)
        before = Path(str(run.config.get("train", {}).get("model", "")))
        run = run_around(before) if before.is_dir() and before.is_absolute() else None
    return found


def _schema(file: Path) -> pa.Schema | None:
    try:
        return pq.read_schema(file)
    except (pa.ArrowException, OSError):
        return None  # no Parquet after all: whoever reads its rows says so


def _read(schema: pa.Schema | None) -> list[dict[str, Any]]:
    found = (schema.metadata or {}).get(_NAME) if schema is not None else None
    return json.loads(found) if found else []
