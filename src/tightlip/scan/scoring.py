"""From a row of logits to two facts: the target's rank and its log-probability.

The rank is the number of tokens with a strictly higher logit, compared in float32, on every
device. One compiled pass each on the CPU (numba) and the GPU (Triton): a chain of torch
operations reads the logits five times and took 1.8× the model's own forward pass.
"""

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

Scores = tuple[torch.Tensor, torch.Tensor]
_LOGITS_WORTH_A_THREAD = 200_000


def score_logits(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> Scores:
    """Rank (int32) and log-probability (float32) of each row's target."""
    if logits_NV.device.type == "cpu":
        return _score_on_cpu(logits_NV.float().contiguous(), targets_N)
    if logits_NV.device.type == "cuda" and importlib.util.find_spec("triton"):
        return _score_with_triton(logits_NV, targets_N)
    return score_with_torch(logits_NV, targets_N)


def score_with_torch(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> Scores:
    """The same in plain operations: the oracle, and the way on devices without a kernel."""
    logits_NV = logits_NV.float()
    target_N1 = logits_NV.gather(1, targets_N[:, None])
    ranks = (logits_NV > target_N1).sum(dim=1, dtype=torch.int32)
    return ranks, target_N1[:, 0] - logits_NV.logsumexp(dim=1)


def _score_on_cpu(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> Scores:
    from tightlip.scan.scoring_cpu import score_rows

    ranks = np.empty(len(targets_N), dtype=np.int32)
    log_probs = np.empty(len(targets_N), dtype=np.float32)
    arrays = (logits_NV.detach().numpy(), targets_N.numpy(), ranks, log_probs)

    def score(share: slice) -> None:
        score_rows(*(array[share] for array in arrays))

    first, *others = _shares(len(targets_N), logits_NV.shape[1])
    # Not numba's own threads: OpenMP's spin while they wait for each other, and beside another
    # busy process scanning took 10 to 60 times as long.
    waiting = [_threads(os.getpid()).submit(score, share) for share in others]
    score(first)
    for other in waiting:
        other.result()
    return torch.from_numpy(ranks), torch.from_numpy(log_probs)


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
    def score_rows(logits, targets, ranks, log_probs, stride, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32)
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        above = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(
                logits + row * stride + column, mask=column < width, other=float("-inf")
            ).to(tl.float32)
            above += (value > target).to(tl.int32)
            # Each lane keeps its own running maximum; they are joined after the loop.
            larger = tl.maximum(highest, value)
            safe = tl.where(larger == float("-inf"), 0.0, larger)
            total = total * tl.exp(highest - safe) + tl.exp(value - safe)
            highest = larger
        top = tl.max(highest, 0)
        total_all = tl.sum(total * tl.exp(highest - top), 0)
        tl.store(ranks + row, tl.sum(above, 0))
        tl.store(log_probs + row, target - top - tl.log(total_all))

    return score_rows


def _score_with_triton(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> Scores:
    rows, width = logits_NV.shape
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    ranks = torch.empty(rows, dtype=torch.int32, device=logits_NV.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    if rows:
        _triton_kernel()[(rows,)](
            logits_NV,
            targets_N,
            ranks,
            log_probs,
            logits_NV.stride(0),
            width,
            BLOCK=2048,
            num_warps=8,
        )
    return ranks, log_probs
