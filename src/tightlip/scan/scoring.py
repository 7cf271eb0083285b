"""From a row of logits to two facts: the target's rank and its log-probability.

On request two more: mean and standard deviation of the log-probability when the token is drawn from
the model's own distribution p, from Σp·log p and Σp·log²p. Both sums are taken around the highest
logit: around 0 they would lose the deviation of an almost even distribution to rounding.

The rank is the number of tokens with a strictly higher logit, compared in float32, on every
device. One compiled pass each on the CPU (numba) and the GPU (Triton): a chain of torch
operations reads the logits five times and took 1.8× the model's own forward pass.
"""

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

Scores = tuple[Tensor, ...]
LANES = 2048  # of the GPU's pass: as many highest logits are known after it
_LOGITS_WORTH_A_THREAD = 200_000
# So far below the highest logit a token adds nothing to either sum; minus infinity would add NaN.
LOWEST = -87.0


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of logits after one pass; weights e^(z/τ) are relative to the highest logit's.

    `above` is the weight of all above the target and `moments` are mean and deviation of the
    log-probability, where asked for; `lanes` holds, where it is known, the highest logit of every
    LANES-th column.
    """

    logits: Tensor
    targets: Tensor
    temperature: float
    num_above: Tensor
    highest: Tensor
    total: Tensor
    above: Tensor | None
    moments: Tensor | None
    lanes: Tensor | None

    def log_weights(self, values: Tensor) -> Tensor:
        """Logarithms of the weights of these logits, several of each row."""
        return (values - self.highest[:, None]) / self.temperature

    @property
    def target_log_weights(self) -> Tensor:
        return self.log_weights(self.logits.gather(1, self.targets[:, None]).float())[:, 0]


def score_logits(logits_NV: Tensor, targets_N: Tensor, *, moments: bool = False) -> Scores:
    """Rank (int32) and log-probability (float32) of each row's target; with `moments` also mean and
    deviation of the log-probability (float32)."""
    if (rows := read_rows(logits_NV, targets_N, moments=moments)) is None:
        return score_with_torch(logits_NV, targets_N, moments=moments)
    log_probs = rows.target_log_weights - rows.total.log()
    return rows.num_above, log_probs, *(() if rows.moments is None else rows.moments)


def score_with_torch(logits_NV: Tensor, targets_N: Tensor, *, moments: bool = False) -> Scores:
    """The same in plain operations: the oracle, and the way on devices without a kernel."""
    logits_NV = logits_NV.float()
    target_N1 = logits_NV.gather(1, targets_N[:, None])
    ranks = (logits_NV > target_N1).sum(dim=1, dtype=torch.int32)
    log_probs = target_N1[:, 0] - logits_NV.logsumexp(dim=1)
    if not moments:
        return ranks, log_probs
    below_NV = (logits_NV - logits_NV.amax(dim=1, keepdim=True)).clamp(min=LOWEST)
    totals_N1 = below_NV.logsumexp(dim=1, keepdim=True)
    probs_NV = (below_NV - totals_N1).exp()
    mean_N1 = (probs_NV * below_NV).sum(dim=1, keepdim=True)
    variance_N = (probs_NV * (below_NV - mean_N1).square()).sum(dim=1)
    return ranks, log_probs, (mean_N1 - totals_N1)[:, 0], variance_N.sqrt()


def read_rows(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    above: bool = False,
    moments: bool = False,
    lanes: bool = False,
) -> Rows | None:
    """One pass over the logits; None on devices without a kernel. Moments are those of temperature 1."""
    device, num_rows = logits_NV.device, len(targets_N)
    on_cpu = device.type == "cpu"
    if not on_cpu and not (device.type == "cuda" and importlib.util.find_spec("triton")):
        return None
    logits_NV = logits_NV.float().contiguous() if on_cpu else logits_NV
    empty = partial(torch.empty, dtype=torch.float32, device=device)
    rows = Rows(
        logits=logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous(),
        targets=targets_N,
        temperature=temperature,
        num_above=torch.empty(num_rows, dtype=torch.int32, device=device),
        highest=empty(num_rows),
        total=empty(num_rows),
        above=empty(num_rows) if above else None,
        moments=empty(2, num_rows) if moments else None,
        lanes=empty(num_rows, LANES) if lanes and not on_cpu else None,
    )
    if num_rows:
        _read_on_cpu(rows) if on_cpu else _read_with_triton(rows)
    return rows


def _read_on_cpu(rows: Rows) -> None:
    from tightlip.scan.scoring_cpu import read_moments, read_rows

    columns = (rows.logits, rows.targets, rows.num_above, rows.highest, rows.total)
    if rows.moments is None:
        in_threads(partial(read_rows, np.float32(1 / rows.temperature)), *columns, rows.above)
    else:
        in_threads(read_moments, *columns, *rows.moments)


def in_threads(kernel: Callable[..., None], *columns: Tensor | None) -> None:
    """Run a compiled kernel over the rows of all columns, the logits first, shared out among threads.

    Not numba's own threads: OpenMP's spin while they wait for each other, and beside another
    busy process scanning took 10 to 60 times as long.
    """
    arrays = [None if one is None else one.detach().numpy() for one in columns]
    assert columns[0] is not None

    def work(share: slice) -> None:
        kernel(*(None if array is None else array[share] for array in arrays))

    first, *others = _shares(*columns[0].shape)
    waiting = [_threads(os.getpid()).submit(work, share) for share in others]
    work(first)
    for other in waiting:
        other.result()


def _shares(rows: int, width: int) -> list[slice]:
    """Rows for each thread; all for one where they are done sooner than a thread wakes."""
    parts = min(torch.get_num_threads(), max(1, rows * width // _LOGITS_WORTH_A_THREAD))
    edges = np.linspace(0, rows, parts + 1, dtype=int)
    return [slice(begin, end) for begin, end in pairwise(edges)]


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """One pool for each process: a fork has its parent's pool but not the threads in it."""
    return ThreadPoolExecutor(torch.get_num_threads())


@cache
def _triton_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def read_rows(  # type: ignore[no-untyped-def]
        logits, targets, num_above_out, highest_out, total_out, above_out, lanes, means, deviations,
        rate, stride, width, LANES: tl.constexpr, LOWEST: tl.constexpr,
    ):  # fmt: skip
        """What is None is not asked for, and compiled away."""
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32)
        lane = tl.arange(0, LANES)
        highest = tl.full((LANES,), float("-inf"), tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        above = tl.zeros((LANES,), tl.float32)
        first = tl.zeros((LANES,), tl.float32)
        second = tl.zeros((LANES,), tl.float32)
        num_above = tl.zeros((LANES,), tl.int32)
        for start in range(0, width, LANES):
            column = start + lane
            value = tl.load(
                logits + row * stride + column, mask=column < width, other=float("-inf")
            ).to(tl.float32)
            is_above = value > target
            num_above += is_above.to(tl.int32)
            # Each lane keeps its own running maximum; they are joined after the loop.
            larger = tl.maximum(highest, value)
            safe = tl.where(larger == float("-inf"), 0.0, larger)
            kept, new = tl.exp((highest - safe) * rate), tl.exp((value - safe) * rate)
            if above_out is not None:
                above = above * kept + tl.where(is_above, new, 0.0)
            if means is not None:
                # (x - b)² from (x - a)² and x - a, where the maximum went from a to b.
                moved = tl.maximum(highest - safe, LOWEST)
                below = tl.maximum(value - safe, LOWEST)
                second += moved * (2 * first + moved * total)
                second = second * kept + new * below * below
                first = (first + moved * total) * kept + new * below
            total = total * kept + new
            highest = larger
        top = tl.max(highest, 0)
        kept = tl.exp((highest - top) * rate)
        total_all = tl.sum(total * kept, 0)
        tl.store(num_above_out + row, tl.sum(num_above, 0))
        tl.store(highest_out + row, top)
        tl.store(total_out + row, total_all)
        if above_out is not None:
            tl.store(above_out + row, tl.sum(above * kept, 0))
        if lanes is not None:
            tl.store(lanes + row * LANES + lane, highest)
        if means is not None:
            moved = tl.maximum(highest - top, LOWEST)
            second += moved * (2 * first + moved * total)
            mean = tl.sum((first + moved * total) * kept, 0) / total_all
            variance = tl.sum(second * kept, 0) / total_all - mean * mean
            tl.store(means + row, mean - tl.log(total_all))
            tl.store(deviations + row, tl.sqrt(tl.maximum(variance, 0.0)))

    return read_rows


def _read_with_triton(rows: Rows) -> None:
    means, deviations = (None, None) if rows.moments is None else rows.moments
    _triton_kernel()[(len(rows.targets),)](
        *(rows.logits, rows.targets, rows.num_above, rows.highest, rows.total, rows.above),
        *(rows.lanes, means, deviations),
        *(1 / rows.temperature, rows.logits.stride(0), rows.logits.shape[1]),
        LANES=LANES,
        LOWEST=LOWEST,
        num_warps=8,
    )
