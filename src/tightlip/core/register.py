"""The register: which private runs spent on whose text, one file for each user of this machine.

A line for each prepared corpus says whose text it is, and one for each private run, written before
its first step, what that run will spend at most. Lines are only ever added. The file is its
owner's alone: it holds fingerprints of text, by which a corpus that is prepared twice is known.

A guarantee that lies elsewhere, in a ledger or beside a model's weights, is read here too: whether it
is about these weights, and whether the register knows it to be taken back.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightlip.core.checksums import digest_of, sealed, unsealed
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.files import OWNER_FILE, fsync, make_private_folder, read_json, refuse_store

if TYPE_CHECKING:
    from tightlip.core.run_folder import RunRecord

PLACE = "TIGHTLIP_REGISTER"  # the environment's variable that names the file
CORPUS, RUN = "corpus", "run"

Entry = dict[str, Any]
OWN_RECORD = "guarantee.json"  # beside a model's weights
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
_FIGURES = ("epsilon", "epsilon_so_far", "epsilon_rdp", "epsilon_as_published")


def register_path() -> Path:
    """Where the register is, or would be."""
    if given := os.environ.get(PLACE):
        refuse_store(given)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(given) if given else Path(state) / "tightlip" / "register.jsonl"
    if not path.is_absolute():
        raise UsageError(
            f"The register of private runs would be {path}, which is another file in each folder: runs in one would not count in "
            f"another. Give {PLACE} its whole path."
        )
    return path


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Keep a register of its own for experiments, whose text is public or only tried out."""
    before = os.environ.get(PLACE)
    os.environ[PLACE] = str(folder.absolute() / "register.jsonl")
    try:
        yield
    finally:
        del os.environ[PLACE]
        os.environ |= {} if before is None else {PLACE: before}


def entries(kind: str) -> list[Entry]:
    """All lines of a kind, the oldest first; a refusal where the register cannot be trusted."""
    path = register_path()
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise _unusable(path, "read", error) from error
    return [entry for entry in _entries_in(content, path) if entry["kind"] == kind]


def add(make: Callable[[list[Entry]], Entry | None]) -> None:
    """Add the line that `make` gives when it has seen those that are there; it may give none.

    Holds:
        alone: of two processes the second sees the line of the first.
        kept: the line is on the disk when this returns.
        torn: a line that a kill cut off is gone at the next one; its run had not begun.
    """
    path = register_path()
    try:
        make_private_folder(path.parent)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, OWNER_FILE)
        with os.fdopen(descriptor, "rb+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            content = file.read()
            if (entry := make(_entries_in(content, path))) is not None:
                file.truncate(content.rfind(b"\n") + 1)
                _append(file.fileno(), json.dumps(sealed(entry)).encode() + b"\n")
                fsync(path)
                fsync(path.parent)
    except OSError as error:
        raise _unusable(path, "written", error) from error


def taken_back(record: Entry, because: str, **found: Any) -> Entry:
    """A guarantee that turned out to be none: no ε, neither the run's nor its people's. What it was,
    and what was `found`, stays under `withdrawn`."""
    was = {name: record.get(name) for name in ("epsilon", "standing", "because")}
    none = {"standing": "measured only", "because": because}
    lost = record | dict.fromkeys({*_FIGURES} & {*record}) | none | {"withdrawn": was | found}
    if "runs" in (people := record.get("people") or {}):
        lost["people"] = people | {"epsilon": None} | none
    return lost


def as_it_stands(record: Entry) -> Entry:
    """A guarantee out of any file. The file may be a copy, or older than what the register knows:
    the last line of its run says whether it was taken back."""
    if record.get("epsilon") is None or not record.get("run"):
        return record
    lines = [each["terms"] for each in entries(RUN) if each["terms"]["run"] == record["run"]]
    if not lines or lines[-1].get("epsilon") is not None:
        return record
    return taken_back(record, str(lines[-1]["because"]))


def _append(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def _entries_in(content: bytes, path: Path) -> list[Entry]:
    """Every whole line; a last one without its end was never written whole."""
    *lines, _ = content.split(b"\n")
    try:
        found = [unsealed(json.loads(line)) for line in lines]
    except ValueError:
        found = [({}, False)]
    if not all(is_sealed and "kind" in entry for entry, is_sealed in found):
        raise GuaranteeError(
            f"{path} is damaged: a line of it is not what tightlip wrote, so nobody knows what was spent on whom. Put a "
            f"whole copy back. If there is none, move it away: what it told of is then to be added up by hand."
        )
    return [entry for entry, _ in found]


def _unusable(path: Path, done: str, error: OSError) -> GuaranteeError:
    return GuaranteeError(
        f"{path} cannot be {done} ({error.strerror}), and a private run is put on record there before its first step. "
        f"Make room or give the right to do so, or set {PLACE} to a file that is kept."
    )


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


def guarantee_of(model: Any, run: "RunRecord | None") -> dict[str, Any] | None:
    """What a model promises: by its run's ledger, or by what a trainer wrote beside its weights; None
    where nobody says. A guarantee that lists no weights may be a copy beside any others."""
    if run is not None:
        return run.guarantee or None
    beside = guarantee_beside(Path(model)) if isinstance(model, str | Path) else {}
    return beside if "weights" in beside else None
