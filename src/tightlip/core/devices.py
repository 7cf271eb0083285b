"""The device that a name means, or why it cannot be used, said before anything is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager

from tightlip.core.errors import UsageError


def usable_device(name: str, *, bf16: bool = False) -> str:
    """The device that `name` means, with room for bfloat16 where asked; auto is the GPU, if any."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise UsageError(f"Unknown device {name!r}. Available: auto, cpu, cuda, cuda:N.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={name!r} needs a GPU, and torch sees none here. Use device=auto.")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter from a build without the backend
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"device={name!r} cannot be used here ({reason}). Use cpu, cuda or auto."
        ) from error
    if bf16 and kind == "cpu":
        # Without AVX-512, oneDNN's bfloat16 LSTM ends the process with an illegal instruction.
        raise UsageError("bf16=True is for GPUs, and this run is on the CPU. Leave bf16 out.")
    return name


@contextmanager
def one_thread() -> Iterator[None]:
    """A small model trains no faster on many threads, and beside other work far slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
