"""Corpora and runs that several test files need, made once for all workers of a test session."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


class Shared:
    """Folders by name, each made by whoever asks first; the others wait for it.

    Nobody may write into such a folder afterwards: take a copy. `check_untouched` tells whether
    somebody did.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._used: set[Path] = set()
        root.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, make: Callable[[Path], object]) -> Path:
        folder, done = self._root / name, self._root / f"{name}.done"
        with FileLock(self._root / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what a failed attempt left behind
                folder.mkdir()
                make(folder)
                done.write_text(_digest(folder), encoding="utf-8")
        self._used.add(folder)
        return folder

    def check_untouched(self) -> None:
        for folder in self._used:
            made = folder.with_name(f"{folder.name}.done").read_text(encoding="utf-8")
            assert _digest(folder) == made, f"a test wrote into {folder}, which others share"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        # A reader may take the lock of a run, which makes this empty file.
        if path.is_file() and path.name != ".lock":
            digest.update(path.read_bytes())
    return digest.hexdigest()
