"""`tightlip audit` as one call: find the model and the corpus, audit, write the report."""

from tightlip.core.errors import UsageError


def usable_device(name: str) -> str:
    """The device that `name` means; auto is the GPU where there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter from a build without CUDA
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"device={name!r} cannot be used here ({reason}). Use cpu, cuda or auto."
        ) from error
    return name
