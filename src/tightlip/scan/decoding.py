"""How likely the true token is to be drawn by a deployment that samples with temperature, top-k and
top-p, in transformers' order.

    n     tokens with a logit strictly above the true token's; top-k keeps it if n < k
    Z     the weights e^(z/τ) of all tokens, or of the k highest
    A     the share of Z that the n tokens have; top-p keeps the true one if A < p
    mass  the weights of what is drawn from: Z, or with top-p the shortest beginning, highest first,
          that has at least p of Z

The true token's probability is its weight over that mass. Among equals it comes first, as for the
rank: which of them a deployment keeps is decided by its sorting. One pass over the logits gives n, A
and Z; the nucleus is looked for only in rows where it goes on behind the true token.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightlip.scan.options import Decoding
from tightlip.scan.scoring import LANES, Rows, in_threads, read_rows
from tightlip.scan.store import PLAIN, Scorer

_MOST_LANES = 512  # with a larger k, sorting their logits takes longer than sorting all
_UNDERFLOWS = 104.0  # e to minus that is 0 in float32


def scorer_of(decoding: Decoding) -> Scorer:
    """What a scan stores to know how likely each token is drawn: `log_probs`.

    Without temperature and truncation that is the plain scan, which may be there already.
    """
    if decoding == Decoding():
        return PLAIN
    return Scorer(
        name="decoding",
        columns={"log_probs": np.float32},
        score=lambda logits, targets: (decoded_log_probs(logits, targets, decoding),),
        settings=decoding.tree(),
    )


def decoded_log_probs(logits_NV: Tensor, targets_N: Tensor, decoding: Decoding) -> Tensor:
    """Log-probability (float32) of each row's target under the decoding; minus infinity if cut.

    Holds:
        as_defined: the same as METHODS 8.2 by brute force, ties included.
        as_transformers: without ties at the edges, what its own warpers and a softmax give.
        greedy: with top-k 1, 0 where no token is above the target, else minus infinity.
    """
    rows = read_rows(
        logits_NV,
        targets_N,
        temperature=decoding.temperature,
        above=decoding.nucleus is not None,
        lanes=decoding.top_k is not None,
    )
    if rows is None:
        return decode_with_torch(logits_NV, targets_N, decoding)
    return _drawn(rows, decoding)


def decode_with_torch(logits_NV: Tensor, targets_N: Tensor, decoding: Decoding) -> Tensor:
    """The same by sorting every row: the oracle, and the way on devices without a kernel."""
    ordered_NV = logits_NV.float().sort(dim=1, descending=True).values
    target_N1 = logits_NV.float().gather(1, targets_N[:, None])
    is_above = ordered_NV > target_N1
    weights_NV = ((ordered_NV - ordered_NV[:, :1]) / decoding.temperature).exp()
    log_weight = (target_N1 - ordered_NV[:, :1])[:, 0] / decoding.temperature
    if decoding.top_k is not None:
        weights_NV[:, decoding.top_k :] = 0
    mass, above = weights_NV.sum(1), (weights_NV * is_above).sum(1)
    is_kept = is_above.sum(1) < (decoding.top_k or logits_NV.shape[1])
    if decoding.nucleus is not None:
        goal = decoding.nucleus * mass
        is_kept &= above < goal
        reached = weights_NV.cumsum(1)
        last = (reached < goal[:, None]).sum(1).clamp(max=logits_NV.shape[1] - 1)
        mass = torch.maximum(reached.gather(1, last[:, None])[:, 0], above + log_weight.exp())
    return torch.where(is_kept, log_weight - mass.log(), -torch.inf)


def _drawn(rows: Rows, decoding: Decoding) -> Tensor:
    log_weight, mass, k = rows.target_log_weights, rows.total, decoding.top_k
    is_kept, ordered = torch.ones_like(log_weight, dtype=torch.bool), None
    if k is not None and k < rows.logits.shape[1]:
        ordered = rows.log_weights(_highest(rows, k)).exp()
        is_kept, mass = rows.num_above < k, ordered.sum(1)
    if decoding.nucleus is not None:
        assert rows.above is not None
        goal, own = decoding.nucleus * mass, rows.above + log_weight.exp()
        is_kept &= rows.above < goal
        goes_on = is_kept & (own < goal)
        if ordered is not None:  # the nucleus is among the k highest
            reached = ordered.cumsum(1)
            last = (reached < goal[:, None]).sum(1).clamp(max=ordered.shape[1] - 1)
            mass = reached.gather(1, last[:, None])[:, 0]
        else:
            mass = _nuclei(rows, goes_on, goal)
        mass = torch.where(goes_on, mass, own)
    # An infinite logit leaves no probabilities: NaN, which a scan refuses.
    log_probs = log_weight - mass.log() + (rows.highest - rows.highest)
    return torch.where(is_kept, log_probs, -torch.inf + (rows.highest - rows.highest))


def _highest(rows: Rows, k: int) -> Tensor:
    """The k highest logits of each row, in order."""
    logits, lanes, width = rows.logits, rows.lanes, rows.logits.shape[1]
    if lanes is None or k > _MOST_LANES or width < 2 * LANES:
        return logits.topk(k, dim=1).values.float()
    # All of them are in the k lanes whose own highest are the k highest.
    columns = lanes.topk(k, dim=1).indices[:, :, None] + torch.arange(
        0, width, LANES, device=logits.device
    )
    values = logits.gather(1, columns.clamp(max=width - 1).flatten(1)).float()
    values = values.masked_fill(columns.flatten(1) >= width, -torch.inf)
    return values.topk(k, dim=1).values


def _nuclei(rows: Rows, wanted: Tensor, goal: Tensor) -> Tensor:
    """The mass of the nuclei of some rows, given how much it must be at least."""
    masses, rate = torch.ones_like(goal), 1 / rows.temperature
    if rows.logits.device.type == "cpu":
        from tightlip.scan.scoring_cpu import nuclei_of_rows

        columns = (rows.logits, rows.targets, wanted, rows.highest, rows.above, goal, masses)
        in_threads(partial(nuclei_of_rows, np.float32(rate)), *columns)
    elif len(goal):
        _triton_kernel()[(len(goal),)](
            *(rows.logits, rows.targets, wanted.to(torch.int8), rows.highest, rows.above, goal),
            *(masses, rate, _UNDERFLOWS * rows.temperature),
            *(rows.logits.stride(0), rows.logits.shape[1]),
            BLOCK=2048,  # the fastest of those tried on an H200, for sure and unsure rows
            WAYS=4,
            num_warps=8,
        )
    return masses


@cache
def _triton_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def nuclei(logits, targets, wanted, highest, above_in, goals, masses, rate, reach, stride, width, BLOCK: tl.constexpr, WAYS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
        """The nucleus ends at the lowest logit above which there is less than the goal. It lies
        between `low` and `high`, and each pass asks at WAYS places between them."""
        row = tl.program_id(0).to(tl.int64)
        if tl.load(wanted + row) != 0:
            top = tl.load(highest + row)
            goal = tl.load(goals + row)
            mass = tl.load(above_in + row)  # of what is above `high`
            high = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32)
            low = tl.minimum(top - reach, high - 1.0)
            going_on = low < high
            step = (tl.arange(0, WAYS) + 1).to(tl.float32) / WAYS
            while going_on:
                places = tl.where(step < 1.0, low + (high - low) * step, high)
                sums = tl.zeros((WAYS, BLOCK), tl.float32)
                least = tl.full((BLOCK,), float("inf"), tl.float32)
                most = tl.full((BLOCK,), float("-inf"), tl.float32)
                for start in range(0, width, BLOCK):
                    column = start + tl.arange(0, BLOCK)
                    value = tl.load(
                        logits + row * stride + column, mask=column < width, other=float("-inf")
                    ).to(tl.float32)
                    weight = tl.exp((value - top) * rate)
                    sums += tl.where(value[None, :] > places[:, None], weight[None, :], 0.0)
                    is_between = (value > low) & (value <= high)
                    least = tl.minimum(least, tl.where(is_between, value, float("inf")))
                    most = tl.maximum(most, tl.where(is_between, value, float("-inf")))
                going_on = tl.min(least, 0) < tl.max(most, 0)  # else one logit is left
                found = tl.sum(sums, 1)
                is_short = (found < goal) & (step < 1.0)
                mass = tl.where(going_on, tl.max(tl.where(is_short, found, mass), 0), mass)
                next_low = tl.max(tl.where(is_short | (step == 1.0), low, places), 0)
                next_high = tl.min(tl.where(is_short, places, high), 0)
                high = tl.where(going_on, next_high, tl.minimum(tl.max(most, 0), high))
                low = tl.where(going_on, next_low, low)
            weight = tl.maximum(tl.exp((high - top) * rate), 1e-37)
            missing = tl.maximum(tl.ceil((goal - mass) / weight), 1.0)
            tl.store(masses + row, mass + missing * weight)

    return nuclei
