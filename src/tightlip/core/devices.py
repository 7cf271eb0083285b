"""What is asked before work starts: which device a name means, whether a model looks left only, and
which numbers its tokens have.

Configurations do not tell: GPT-NeoX says is_decoder=False and looks back only; so says BERT, which
looks both ways. Shapes: B rows, T positions, V vocabulary.
"""

import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightlip.core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# An engine sets it whose workers open the models that scan: this machine need not have their devices.
on_workers: ContextVar[bool] = ContextVar("on_workers", default=False)


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


def device_of(model: "torch.nn.Module") -> "torch.device":
    """Where a model takes its input; what accelerate keeps on disk is on no device."""
    import torch

    devices = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))


def kind_of_device(name: str) -> str:
    """What decides how numbers are rounded: the processor's name, and torch's build."""
    import torch

    build = f"torch {torch.__version__}"
    if name != "cpu" and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {build}, CUDA {torch.version.cuda}"
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = next(iter(named), platform.processor() or platform.machine())
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, {build}"


def one_thread() -> AbstractContextManager[None]:
    """A small model trains no faster on many threads, and beside other work far slower."""
    return num_threads(1)


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Compute with so many threads inside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Sums in one order: on the way back, attention's would add what is ready first.

    What has no such form runs as it is, and torch's warning of it is for nobody here.
    """
    import torch
    from torch.utils import deterministic as fills

    if device != "cuda":  # everything that models do has one order on a CPU
        yield
        return
    # What torch takes on a Hopper GPU anyway; with it cuBLAS keeps to one order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, filling = torch.get_deterministic_debug_mode(), fills.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
        # torch lays an LSTM's weights out for cuDNN in every type but bfloat16, and then complains.
        warnings.filterwarnings(
            "ignore", message="RNN module weights are not", category=UserWarning
        )
        try:
            # use_deterministic_algorithms would also keep inductor from choosing fast kernels.
            torch.set_deterministic_debug_mode("warn")
            fills.fill_uninitialized_memory = False  # or every new tensor is written first
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            fills.fill_uninitialized_memory = filling


def moved(tensor: "Tensor", device: "torch.device") -> "Tensor":
    """The tensor on `device`, without waiting for it."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 means float32: TF32 would break ties one way here and another there. On a GPU the same
    numbers give the same bits: no kernel is chosen by how fast it was, nor adds up in any order."""
    import torch

    cudnn: Any = torch.backends.cudnn
    switches, benchmark = (cudnn.conv, cudnn.rnn), cudnn.benchmark
    before, by_older = _precisions(switches), _read(lambda: cudnn.allow_tf32)
    try:
        cudnn.allow_tf32 = cudnn.benchmark = False
        for each in switches:
            each.fp32_precision = "ieee"
        with products_in(), deterministic("cuda" if torch.cuda.is_available() else "cpu"):
            yield
    finally:
        cudnn.benchmark = benchmark
        if by_older is not None:
            cudnn.allow_tf32 = by_older
        _restore(switches, before)


@contextmanager
def products_in(precision: str = "highest") -> Iterator[None]:
    """Matrix products of float32 in a precision of `torch.set_float32_matmul_precision`: "highest" is
    float32 proper. Else a GPU may take tf32, and a CPU bfloat16, on whatever switch was set before.

    torch has older and newer switches, and refuses to read the older after a newer one was set.
    """
    import torch

    backends: Any = torch.backends
    switches = backends.cuda.matmul, backends.mkldnn.matmul
    before, by_older = _precisions(switches), _read(torch.get_float32_matmul_precision)
    torch.set_float32_matmul_precision(precision)  # sets the newer ones too
    try:
        yield
    finally:
        if by_older is not None:
            torch.set_float32_matmul_precision(by_older)
        _restore(switches, before)


def _precisions(switches: Iterable[Any]) -> list[str]:
    return [each.fp32_precision for each in switches]


def _restore(switches: Iterable[Any], before: list[str]) -> None:
    for each, precision in zip(switches, before, strict=True):
        each.fp32_precision = precision


def _read(older_switch: Callable[[], Any]) -> Any:
    try:
        return older_switch()
    except RuntimeError:
        return None


def looks_ahead(
    logits_of: "Callable[[Tensor], Tensor]", ids_BT: "Tensor", *, tolerance: float
) -> bool:
    """Whether the logits at a position change with what stands to the right of it.

    Rows cut short must be answered as their beginnings are, up to `tolerance` of the largest logit.
    Logits that are no numbers are like nothing, not even themselves.
    """
    import torch

    with torch.no_grad():
        long_BTV = logits_of(ids_BT)
        for length in _lengths(ids_BT.shape[1]):
            short_BTV, beginning_BTV = logits_of(ids_BT[:, :length]), long_BTV[:, :length]
            # Of -inf, as of a word that is never said, the difference to itself is no number.
            same_BTV = short_BTV == beginning_BTV
            off = (short_BTV - beginning_BTV).masked_fill_(same_BTV, 0).abs().max()
            size = short_BTV.masked_fill(~short_BTV.isfinite(), 0).abs().max().clamp(min=1e-3)
            if not bool(off <= tolerance * size):
                return True
    return False


def rounding_tolerance(dtype: "torch.dtype", *, least: float = 1e-4) -> float:
    """Products of other shapes round differently; a position that looks right is off by far more."""
    import torch

    return max(least, 16 * torch.finfo(dtype).eps)


def _lengths(length: int) -> list[int]:
    """1, 2, 4, … and all but one: a model may look right only at the beginning, or only of long rows."""
    powers = {1 << power for power in range(length.bit_length()) if 1 << power < length}
    return sorted(powers | {max(1, length - 1)})


MAX_TOKEN_ID = 2**24  # the largest vocabularies have some 300,000 tokens


def check_token_ids(place: str, tokenizer: Any) -> None:
    """Refuse ids that tables of all tokens would have to reach up to."""
    ids = tokenizer.get_vocab().values()
    odd = next((number for number in ids if not 0 <= number <= MAX_TOKEN_ID), None)
    if odd is not None:
        raise UsageError(
            f"{place} has {len(ids):,} tokens, one of them with the id {odd}. Ids lie between 0 and {MAX_TOKEN_ID:,}: "
            "fetch or save the tokenizer again."
        )


def begin_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text, found by encoding one.

    Attributes do not tell: a reloaded tokenizer may say that it adds no begin token, and add it.
    """
    for text in ("a", *tokenizer.convert_ids_to_tokens([*range(min(len(tokenizer), 64))])):
        bare, whole = (
            list(tokenizer([text], truncation=False, verbose=False, **how)["input_ids"][0])
            for how in ({"add_special_tokens": False}, {})
        )
        places = [n for n in range(len(whole)) if whole[n : n + len(bare)] == bare]
        if places and bare and not {*bare} & {*tokenizer.all_special_ids}:
            return whole[: places[0]]
    return []
