"""What a run says: into its log.txt, and to whoever listens to the logger "tightlip"."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tightlip.core.files import OWNER_FILE

log = logging.getLogger("tightlip")


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Append everything logged inside to `path` (owner only), made when the first line comes."""
    handler = _WhenNeeded(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
        handler.close()


class _WhenNeeded(logging.FileHandler):
    """A file that is not there before its first line, nor where its folder never came to be."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mode="a", encoding="utf-8", delay=True)

    def _open(self):  # type: ignore[no-untyped-def]
        descriptor = os.open(self.baseFilename, os.O_CREAT | os.O_APPEND | os.O_WRONLY, OWNER_FILE)
        return os.fdopen(descriptor, "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        if Path(self.baseFilename).parent.is_dir():
            super().emit(record)


# What a run says: into its log.txt, and to whoever listens to the logger "tightlip"


@contextmanager
def logged_into(path: Path) -> Iterator[None]:
    """Append every line of the logger "tightlip" to `path` meanwhile."""
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, OWNER_FILE))
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()
