"""The guarantee that lies beside a model's weights, and whether it is about these."""

from pathlib import Path
from typing import Any

from tightlip.core.checksums import digest_of
from tightlip.core.errors import GuaranteeError
from tightlip.core.files import read_json
from tightlip.core.register import as_it_stands
from tightlip.core.run_folder import RunRecord

OWN_RECORD = "guarantee.json"  # beside a model's weights
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")


def weights_in(folder: Path) -> dict[str, str]:
    """Digests of the files in a model's folder that hold weights, by name; not of checkpoints in it."""
    patterns = ("*.safetensors", "*.bin", "*/adapter_model.*")
    files = sorted(each for pattern in patterns for each in folder.glob(pattern))
    names = {each.relative_to(folder).as_posix(): each for each in files}
    left_out = ("checkpoint-", *_NOT_WEIGHTS)
    return {name: digest_of(each) for name, each in names.items() if not name.startswith(left_out)}


def guarantee_beside(folder: Path) -> dict[str, Any]:
    """The guarantee beside a model's weights, empty where there is none. A trainer's lists the files
    that it is about, and where others stand there now it is refused; a run's folder has checksums."""
    path = folder / OWN_RECORD
    record: dict[str, Any] = read_json(path) if path.is_file() else {}
    listed = record.get("weights")
    if listed is None or listed == (there := weights_in(folder)):
        return as_it_stands(record)
    name = min(name for name in {*listed, *there} if listed.get(name) != there.get(name))
    raise GuaranteeError(
        f"{path} was written for other weights than those beside it: {name} was changed, added or removed since, so nobody knows "
        "what they cost. Put the weights of that run back; or delete guarantee.json, which is not theirs."
    )


def guarantee_of(model: Any, run: RunRecord | None) -> dict[str, Any] | None:
    """What a model promises: by its run's ledger, or by what a trainer wrote beside its weights; None
    where nobody says. A guarantee that lists no weights may be a copy beside any others."""
    if run is not None:
        return run.guarantee or None
    beside = guarantee_beside(Path(model)) if isinstance(model, str | Path) else {}
    return beside if "weights" in beside else None
