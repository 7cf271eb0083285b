"""What the tests of faults share: how many to try, folders compared, an unharmed run of a command.

`make faults` sets TIGHTLIP_FAULTS=all; without it a sample with fixed seeds is taken, or so many
of each kind and command as TIGHTLIP_FAULTS says.
"""

import json
import os
import random
import re
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from safetensors import safe_open

from faults.cases import CASES
from killable import Commands, Finished
from tightlip.core.checksums import LIST

ASKED = os.environ.get("TIGHTLIP_FAULTS", "")
ALL = ASKED == "all"
# Minutes each: they are only begun. What they are made of are commands that are run to their end.
LONG = ("demo", "reproduce")
SHORT = tuple(name for name in CASES if name not in LONG)
HANGS_AFTER = 60  # seconds; the slowest of SHORT takes three
FOR_PEOPLE = {"log.txt", "README.md"}  # nothing reads them, and the first tells the time
TELL_THE_TIME = {"metrics.jsonl", "private.jsonl", "metrics.json"}
# Kept by a fingerprint of everything that they come from: what is read from them is in a result.
CACHES = {"scan", "measures"}


def sample(values: Sequence, few: int, *, seed: int | str = 0) -> list:
    """A few of the values, or with `make faults` all, in their order."""
    wanted = len(values) if ALL else int(ASKED or few)
    places = random.Random(seed).sample(range(len(values)), min(wanted, len(values)))
    return [values[place] for place in sorted(places)]


def spread(num: int, count: int) -> list[int]:
    """At most `count` of 1..num, the first and the last among them."""
    return sorted({*np.linspace(1, num, min(num, count)).round().astype(int).tolist()})


def tree(folder: Path) -> dict[str, bytes]:
    """The content of every file, told so that two good runs of a command are equal."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): _told(path) for path in files}


def _told(path: Path) -> bytes:
    if path.name in FOR_PEOPLE:
        return b""
    content = path.read_bytes()
    if path.name == LIST:  # of a file that was replaced it also holds the digest of the one before
        return repr(
            sorted({line[66:] for line in content.decode("utf-8", "replace").splitlines()})
        ).encode()
    if path.name in TELL_THE_TIME:
        return re.sub(rb'"seconds\w*": [0-9.e+-]+', b"", content)
    return content


def changes(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Which files are not the same."""
    return sorted(path for path in before | after if before.get(path) != after.get(path))


def is_litter(path: str) -> bool:
    return path.endswith((".partial", ".lock"))


def half_written(folder: Path) -> list[str]:
    """Files under their final names that are not whole."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if not any(map(is_litter, path.relative_to(folder).parts))]
    return [str(path.relative_to(folder)) for path in files if not _is_whole(path)]


def _is_whole(path: Path) -> bool:
    readers = {
        ".json": lambda: json.loads(path.read_text()),
        ".jsonl": lambda: [json.loads(line) for line in path.read_text().splitlines()],
        ".toml": lambda: tomllib.loads(path.read_text()),
        ".parquet": lambda: pq.read_table(path),
        ".npy": lambda: np.load(path),
        ".safetensors": lambda: safe_open(path, "np"),
        ".html": lambda: path.read_text().rstrip().endswith("</html>") or 1 / 0,
    }
    try:
        readers.get(path.suffix, lambda: None)()
    except Exception:
        return False
    return True


@dataclass(frozen=True)
class Unharmed:
    """What a command does where nothing goes wrong: how it ended, and the files it left."""

    ended: Finished
    before: dict[str, bytes]
    after: dict[str, bytes]
    place: Path  # a copy of where it was run

    @property
    def written(self) -> list[str]:
        return changes(self.before, self.after)


class Bench:
    """Commands in a folder that is made anew for each: always the same path, as results name it."""

    def __init__(self, command: Commands, made: Path, folder: Path) -> None:
        self.command, self._made, self.place = command, made, folder / "place"

    def fresh(self, also: Path | None = None) -> Path:
        """The place as `write_place` leaves it, or as it was kept in `also`."""
        shutil.rmtree(self.place, ignore_errors=True)
        return shutil.copytree(also or self._made, self.place, symlinks=True)

    def run(self, name: str, *, arguments: Sequence | None = None, **how) -> Finished:
        how = {"kill_after": HANGS_AFTER, "same_noise": True, **how}
        return self.command(*(arguments or CASES[name].arguments), place=self.place, **how)

    @cache  # noqa: B019 - one bench serves all tests
    def unharmed(self, name: str) -> Unharmed:
        before = tree(self.fresh())
        ended = self.run(name)
        assert ended.status == 0, ended.err
        kept = self.place.parent / "unharmed" / name
        shutil.copytree(self.place, kept, symlinks=True)
        return Unharmed(ended=ended, before=before, after=tree(kept), place=kept)


def told_wrong(ran: Finished, *, statuses: Sequence[int] = (0, 2, 3)) -> str | None:
    """What is wrong with the way a command ended, in words; None where nothing is."""
    if ran.status == -9:
        return f"hangs: killed after {ran.seconds:.0f} s"
    if "Traceback" in ran.err:
        return f"status {ran.status}, traceback: {ran.err.strip().splitlines()[-1][:200]}"
    if ran.status not in statuses:
        return f"status {ran.status}: {ran.err.strip()[-200:]}"
    if ran.status in (2, 3) and not any(
        line.startswith(("tightlip: ", "Usage:", "Error")) for line in ran.err.splitlines()
    ):
        return f"status {ran.status} without a line that says why: {ran.err.strip()[-200:]!r}"
    return None
