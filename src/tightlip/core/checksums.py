"""Checksums of what tightlip writes and reads back: no flipped bit changes a result unseen.

A folder of ours holds a list of the files in it, as `sha256sum` writes one; its last line is of
the lines above. A JSON file that stands alone, or is written at every step, carries its checksum
in itself. Files of version 0.1, and of others, have none, and are read as they are.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tightlip.core.errors import DamagedError, UsageError

LIST = ".tightlip.sha256"
SEAL = "sha256"
Listed = dict[str, tuple[str, ...]]  # the digests that a file may have: while it changes, two
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_LARGE, _LONG, _LONGEST = 1_000_000, 50_000, 100_000_000
_lists: dict[Path, tuple[str, Listed]] = {}  # long ones, which take longer to parse than to read
_known: dict[tuple[int, ...], str] = {}  # digests of files, by what changes when they do


def checked(path: Path, *, complete: bool = True, may_lack: str | None = None) -> Path:
    """`path`, a file or a folder with files, unless what is there is not what was written.

    A folder that was written whole is `complete`, but for files that end in `may_lack`; in one
    whose files come one by one, a killed process may have listed one that it did not come to write.

    Holds:
        changed: whatever byte of a listed file is changed, added or cut off, it is refused.
        written_meanwhile: a file that another process replaces, whole, is not refused.
    """
    folder, names = (path, listed(path)) if path.is_dir() else (path.parent, (path.name,))
    for each in (folder / name for name in names):
        if not os.path.lexists(each):
            if path.is_dir() and complete and each.suffix != may_lack:
                raise DamagedError(
                    f"{each} is missing. Put a whole copy of {path} back, or make it again. If you took it away and mean it, "
                    f"delete {LIST} there."
                )
        # Twice: between reading the list and the file it names, both may have been replaced.
        elif not (_is_as_listed(each) or _is_as_listed(each)):
            raise DamagedError(
                f"{each} is damaged, or was changed: its content is not what tightlip wrote. Put a whole copy back, or make "
                f"it again. If the change is yours and meant, delete {LIST} beside it."
            )
    return path


def checked_whole(folder: Path, *, but: Collection[str] = ()) -> Path:
    """`folder`, with all folders in it `but` those of these names, as `checked` has it."""
    for found in sorted(folder.rglob(LIST)):
        if not {*found.relative_to(folder).parts} & {*but}:
            checked(found.parent, complete=False)
    return folder


def _is_as_listed(path: Path) -> bool:
    digests = listed(path.parent).get(path.name)
    return digests is None or (path.is_file() and digest_of(path) in digests)


def digest_of(path: Path) -> str:
    """SHA-256 of a file; a large one is not read again while it stays as it is."""
    about = path.stat()
    state = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    if state in _known:
        return _known[state]
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if about.st_size >= _LARGE:  # small ones may follow one another within the clock's tick
        _known[state] = digest
    return digest


def listed(folder: Path) -> Listed:
    """The files that a folder's list names, with the digests that each may have."""
    path = folder / LIST
    try:
        # Nothing else is opened: a pipe would never end, and a device might not either.
        is_one = path.is_file() and path.stat().st_size <= _LONGEST
        text = path.read_text(encoding="utf-8") if is_one else ""
        if not is_one and not os.path.lexists(path):
            return {}
    except PermissionError as error:
        raise UsageError(
            f"{path} may not be read, and without it nobody knows whether the files beside it are whole. Let its reader read "
            f"it too: chmod g+r {path}"
        ) from error
    except UnicodeDecodeError:
        text = ""
    if (known := _lists.get(path)) is not None and known[0] == text:
        return dict(known[1])
    *lines, last = [_LINE.fullmatch(line) for line in text.split("\n")[:-1]] or [None]
    if last is None or last[2] != LIST or not all(lines) or text != list_text(_by_name(lines)):
        raise DamagedError(
            f"{path} is damaged, so nobody knows whether the files beside it are whole. Put a whole copy of {folder} back, "
            "or make it again. If you are sure of the files, delete the list."
        )
    files = _by_name(lines)
    if len(text) >= _LONG:
        _lists[path] = text, files
    return dict(files)


def _by_name(lines: list[re.Match | None]) -> Listed:
    files: Listed = {}
    for line in lines:
        if line is not None:
            files[line[2]] = (*files.get(line[2], ()), line[1])
    return files


def list_text(files: Mapping[str, tuple[str, ...]]) -> str:
    """The list as it is written."""
    pairs = [(digest, name) for name in sorted(files) for digest in files[name]]
    above = "".join(f"{digest}  {name}\n" for digest, name in pairs)
    return f"{above}{hashlib.sha256(above.encode()).hexdigest()}  {LIST}\n"


def is_listed_kind(path: Path) -> bool:
    """Whether a folder's list names such a file: not a card that people write on, nor what is hidden."""
    # A name that cannot be printed may hold what ends a line, or bytes that are no UTF-8.
    return not path.name.startswith(".") and path.suffix != ".md" and path.name.isprintable()


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with a checksum of itself: one flipped bit could make ε five times smaller."""
    return {**record, SEAL: _digest_of_record(record)}


def unsealed(record: Any) -> tuple[dict[str, Any], bool]:
    """A record without its checksum, and whether it had one; ValueError where that is not right."""
    if not isinstance(record, dict):
        raise ValueError("it is no record")
    inner = {name: value for name, value in record.items() if name != SEAL}
    if SEAL in record and record[SEAL] != _digest_of_record(inner):
        raise ValueError("its content is not what tightlip wrote")
    return inner, SEAL in record


def _digest_of_record(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
