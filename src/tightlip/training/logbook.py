"""What a run says: into its log.txt, and to whoever listens to the logger "tightlip"."""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tightlip.core.files import OWNER_FILE

log = logging.getLogger("tightlip")


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


def in_words(line: dict[str, Any]) -> str:
    seconds = "" if line["seconds"] is None else f", {line['seconds']:.1f} s"
    return f"Epoch {line['epoch']:g}, step {line['step']}: {in_short(line)}{seconds}."


def in_short(line: dict[str, Any]) -> str:
    train, held = line["train_perplexity"], line["validation_perplexity"]
    if line["train_loss_nats"] is None:
        return "losses are private"
    words = f"perplexity {train or math.inf:.1f}"
    return words if held is None else f"{words}, validation {held:.1f}"
