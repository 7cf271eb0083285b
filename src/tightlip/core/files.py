"""Files that appear whole or not at all, readable by their owner only.

Reports and corpora hold private text, so every file is created with mode 0600
and every folder with 0700, whatever the umask says.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OWNER_FILE = 0o600
OWNER_FOLDER = 0o700


def make_private_folder(folder: Path) -> Path:
    """Create `folder` and what it lies in, for its owner only; what exists keeps its mode."""
    if not folder.exists():
        make_private_folder(folder.parent)
        folder.mkdir(mode=OWNER_FOLDER, exist_ok=True)
    return folder


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to; on success it becomes `path` in one step, on error it is gone."""
    make_private_folder(path.parent)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    os.close(os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, OWNER_FILE))
    try:
        yield beside
        fsync(beside)
        os.replace(beside, path)
        fsync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """Like `written_whole` for a folder that does not exist yet."""
    make_private_folder(folder.parent)
    beside = folder.with_name(f".{folder.name}.partial")
    # A killed predecessor may have left one: it is incomplete by definition.
    shutil.rmtree(beside, ignore_errors=True)
    make_private_folder(beside)
    try:
        yield beside
        for path in beside.rglob("*"):
            path.chmod(OWNER_FOLDER if path.is_dir() else OWNER_FILE)
            if path.is_file():
                fsync(path)
        os.rename(beside, folder)
        fsync(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def is_running(pid: int) -> bool:
    """Whether there is such a process; what a dead one left half-written is nobody's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def fsync(path: Path) -> None:
    """Make what a file holds, or a rename in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def digest_of_files(
    paths: list[Path], *, name: Callable[[Path], str] = lambda path: path.name
) -> str:
    """SHA-256 over the files' names and contents, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(name(path).encode() + b"\0")
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
