"""What a long command would take, told before it starts."""

import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds by stage, memory and disk in bytes; None where something cannot be known.

    `disk_bytes` is what stays, `passing_disk_bytes` what is there only while the command runs.
    """

    corpus: dict[str, Any]
    stages: dict[str, float]
    memory_bytes: int | None
    gpu_memory_bytes: int | None
    disk_bytes: int | None
    passing_disk_bytes: int | None
    free_disk_bytes: int
    machines: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    @property
    def machine_hours(self) -> float:
        return self.seconds * self.machines / 3600

    def record(self) -> dict[str, Any]:
        """Everything, as --json prints it."""
        return {
            **asdict(self),
            "stages": {name: round(seconds, 3) for name, seconds in self.stages.items()},
            "seconds": round(self.seconds, 3),
            "machine_hours": self.machine_hours,
        }

    def lines(self) -> Iterator[str]:
        """The same for people."""
        for name, value in self.corpus.items():
            yield f"{name.replace('_', ' '):26} {value:>14,}"
        yield ""
        for name, seconds in self.stages.items():
            yield f"{name:26} {duration(seconds):>14}"
        yield f"{'in all':26} {duration(self.seconds):>14}"
        yield ""
        sizes = {
            "memory, at most": self.memory_bytes,
            "memory of the GPU": self.gpu_memory_bytes,
            "disk, to stay": self.disk_bytes,
            "disk, while it runs": self.passing_disk_bytes,
            "disk, free": self.free_disk_bytes,
        }
        for name, size in sizes.items():
            if size is not None:
                yield f"{name:26} {bytes_in_words(size):>14}"
        if self.machines > 1:
            yield f"{f'hours of {self.machines} machines':26} {self.machine_hours:>14,.2f}"
        yield from ("", *self.notes, "This was a dry run: nothing was written or charged.")


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(0.42), duration(75), duration(7380), duration(200_000)
    ('0.4 s', '75 s', '2 h 3 min', '56 h')
    """
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 1440 else f"{minutes / 60:,.0f} h"


def bytes_in_words(num_bytes: int) -> str:
    """Bytes as people read them.

    >>> bytes_in_words(2_500_000_000), bytes_in_words(4_300_000), bytes_in_words(812)
    ('2.50 GB', '4.30 MB', '0.81 KB')
    """
    unit = next((each for each in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= each[0]), (1e3, "KB"))
    return f"{num_bytes / unit[0]:,.2f} {unit[1]}"


def most_memory() -> int:
    """Bytes that this process has held at most so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def most_gpu_memory(device: Any) -> int | None:
    """Bytes that torch has taken of the GPU at most so far; None without one."""
    import torch

    return torch.cuda.max_memory_reserved() if torch.device(device).type == "cuda" else None


def free_disk(out: Path) -> int:
    """Bytes free where `out` is, or would be."""
    there = next(each for each in (out, *out.resolve().parents) if each.exists())
    return shutil.disk_usage(there).free


def size_of(folder: Path) -> int:
    """Bytes of all files under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
