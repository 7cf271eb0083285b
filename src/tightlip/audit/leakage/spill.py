"""Arrays with a row for each run or each sequence: in memory while they fit, else in files.

The files have no name. Nobody else can open them, and they go with the process that has them,
however it ends. What is mapped from them the system takes out of memory when it needs the room.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from tightlip.core.files import full_disk_in_words

RUN_BYTES = 180  # that a run takes in memory, from when it is found until it is written
SEQUENCE_BYTES = 40  # that a distinct sequence takes at most where runs are in files


@dataclass(frozen=True, kw_only=True)
class Room:
    """Where such arrays are, and how many of their rows are worked on at a time. Without a folder
    they are in memory, and all rows are."""

    folder: Path | None = None
    at_once: int = sys.maxsize

    def parts(self, size: int) -> Iterator[slice]:
        for start in range(0, size, self.at_once):
            yield slice(start, min(size, start + self.at_once))

    def full(self, size: int, value: Any, dtype: Any) -> np.ndarray:
        if self.folder is None or not size:
            return np.full(size, value, dtype)
        with full_disk_in_words(self.folder, self.folder):
            stream = _unnamed(self.folder)
            # A full disk would otherwise show, as a signal that kills, when a row is set.
            os.posix_fallocate(stream.fileno(), 0, size * np.dtype(dtype).itemsize)
        array = _mapped(stream, dtype)
        if value:
            array[:] = value
        return array

    def made(self, size: int, dtype: Any, make: Callable[[slice], Any]) -> np.ndarray:
        """The array whose rows of each part `make` gives."""
        array = self.full(size, 0, dtype)
        for part in self.parts(size):
            array[part] = make(part)
        return array

    def kept(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.folder is None else self.made(len(rows), rows.dtype, rows.__getitem__)

    def stacked(self, columns: list[np.ndarray]) -> np.ndarray:
        """One array of all the columns."""
        array = self.full(len(columns) * len(columns[0]), 0, columns[0].dtype)
        array = array.reshape(len(columns), -1)
        for row, column in zip(array, columns, strict=True):
            row[:] = column  # not all at once, which would stack them in memory first
        return array


IN_MEMORY = Room()


class Gathered:
    """Columns that grow: in memory up to `most` rows, then in files of `folder`."""

    def __init__(self, kinds: list[Any], folder: Path | None, most: int) -> None:
        self._kinds, self._folder, self._most = kinds, folder, most
        self._parts: list[list[np.ndarray]] = [[np.zeros(0, kind)] for kind in kinds]
        self._streams: list[IO[bytes]] = []
        self._num_held = 0

    def add(self, *columns: np.ndarray) -> None:
        for parts, column in zip(self._parts, columns, strict=True):
            parts.append(column)
        self._num_held += len(columns[0])
        if self._folder is not None and self._num_held > self._most:
            self._write(self._folder)

    def _write(self, folder: Path) -> None:
        self._streams = self._streams or [_unnamed(folder) for _ in self._kinds]
        with full_disk_in_words(folder, folder):
            for stream, kind, parts in zip(self._streams, self._kinds, self._parts, strict=True):
                for column in parts:
                    stream.write(np.ascontiguousarray(column, kind).data)
                stream.flush()
                parts[:] = [np.zeros(0, kind)]
        self._num_held = 0

    def columns(self) -> list[np.ndarray]:
        if not self._streams:
            return [np.concatenate(parts) for parts in self._parts]
        assert self._folder is not None
        self._write(self._folder)
        return [_mapped(each, kind) for each, kind in zip(self._streams, self._kinds, strict=True)]


def _unnamed(folder: Path) -> IO[bytes]:
    return TemporaryFile(dir=folder)


def _mapped(stream: IO[bytes], dtype: Any) -> np.ndarray:
    # np.asarray drops the memmap class, which numba does not know.
    return np.asarray(np.memmap(stream, dtype, "r+"))
