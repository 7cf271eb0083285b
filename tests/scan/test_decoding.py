"""What a deployment draws: against the definition by brute force, and transformers' own warpers."""

import itertools
import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from scan.test_scoring import Says
from tightlip.core.errors import UsageError
from tightlip.scan.decoding import decode_with_torch, decoded_log_probs, scorer_of
from tightlip.scan.options import Decoding
from tightlip.scan.scanner import Scanner
from tightlip.scan.store import PLAIN

INFINITY = float("inf")
WAYS = (decoded_log_probs, decode_with_torch)
DECODINGS = [
    Decoding(temperature=0.7),
    Decoding(temperature=2.5),
    Decoding(top_k=1),
    Decoding(top_k=5),
    Decoding(top_p=0.9),
    Decoding(top_p=0.31),
    Decoding(temperature=0.6, top_p=0.97),
    Decoding(temperature=1.3, top_k=7, top_p=0.83),
    Decoding(temperature=0.5, top_k=10_000, top_p=1.0),
]


def by_definition(row, target, decoding):
    """Oracle: one row in float64, all tokens in order, the target first among its equals."""
    weights = {token: math.exp(logit / decoding.temperature) for token, logit in enumerate(row)}
    order = sorted(weights, key=lambda token: (-row[token], token != target))
    kept = order[: decoding.top_k]
    if decoding.top_p not in (None, 1.0):
        goal, reached, nucleus = decoding.top_p * math.fsum(weights[t] for t in kept), 0.0, []
        for token in kept:
            if reached >= goal:
                break
            nucleus.append(token)
            reached = math.fsum(weights[t] for t in nucleus)
        kept = nucleus
    if target not in kept:
        return -INFINITY
    return math.log(weights[target] / math.fsum(weights[token] for token in kept))


def by_transformers(logits, targets, decoding):
    """Oracle: transformers' warpers in its own order, then a softmax."""
    warpers = LogitsProcessorList()
    if decoding.temperature != 1:
        warpers.append(TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k is not None:
        warpers.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p is not None and decoding.top_p < 1:
        warpers.append(TopPLogitsWarper(decoding.top_p))
    warped = warpers(None, logits.clone()).double().log_softmax(dim=1)
    return warped.gather(1, targets[:, None])[:, 0]


def random_rows(width, seed, rows=60, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator) * scale
    # Half of the targets among the likely ones, or hardly any would be kept.
    likely = logits.topk(min(8, width)).indices[
        torch.arange(rows), torch.arange(rows) % min(8, width)
    ]
    any_one = torch.randint(0, width, (rows,), generator=generator)
    return logits, torch.where(torch.arange(rows) % 2 == 0, likely, any_one)


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
@pytest.mark.parametrize("width", [1, 2, 23, 700])
def test_without_ties_it_is_what_transformers_draws(width, decoding):
    logits, targets = random_rows(width, seed=width)
    want = by_transformers(logits, targets, decoding)
    for way in WAYS:
        found = way(logits, targets, decoding)
        assert found.dtype == torch.float32
        assert found.tolist() == pytest.approx(want.tolist(), abs=1e-5), way


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
@pytest.mark.parametrize("levels", [1, 2, 4])
def test_among_equals_the_true_token_comes_first(levels, decoding):
    """A deployment keeps some of the equals at an edge; assume that it keeps the one that hurts."""
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(0, levels, (80, 17), generator=generator).float()
    targets = torch.randint(0, 17, (80,), generator=generator)
    want = [by_definition(r, t, decoding) for r, t in zip(logits.tolist(), targets.tolist(), strict=True)]  # fmt: skip
    for way in WAYS:
        assert way(logits, targets, decoding).tolist() == pytest.approx(want, abs=1e-5), way


def test_no_order_among_equals_makes_the_true_token_likelier():
    row, decoding = [2.0, 1.0, 1.0, 1.0, 0.0], Decoding(top_k=3, top_p=0.8)
    mine = decoded_log_probs(torch.tensor([row]), torch.tensor([2]), decoding).item()
    others = []
    for order in itertools.permutations(range(5)):
        ranked = sorted(order, key=lambda token: -row[token])[:3]
        total = sum(math.exp(row[t]) for t in ranked)
        end = 1 + next(n for n in range(3) if sum(math.exp(row[t]) for t in ranked[: n + 1]) >= 0.8 * total)  # fmt: skip
        inside = ranked[:end]
        if 2 in inside:
            others.append(row[2] - math.log(sum(math.exp(row[t]) for t in inside)))
    assert mine == pytest.approx(max(others), abs=1e-6)


def test_greedy_is_drawing_among_one():
    logits, targets = random_rows(50, seed=3)
    logits[0, :2], targets[0] = 99.0, 1  # two are the likeliest: either may be shown
    found = decoded_log_probs(logits, targets, Decoding(temperature=0.8, top_k=1))
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1)
    assert found.tolist()[1:] == [0.0 if rank == 0 else -INFINITY for rank in ranks[1:].tolist()]
    assert found[0] == 0


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
def test_tokens_that_cannot_be_are_never_drawn_and_take_nothing(decoding):
    logits, targets = random_rows(40, seed=9)
    logits[:, ::3] = -INFINITY
    kept = [n for n in range(40) if n % 3]
    targets = torch.tensor([kept[t % len(kept)] for t in targets.tolist()])
    moved = torch.tensor([kept.index(t) for t in targets.tolist()])
    for way in WAYS:
        alone = way(logits[:, kept], moved, decoding)
        assert way(logits, targets, decoding).tolist() == pytest.approx(alone.tolist(), abs=1e-6)
        assert way(logits, torch.zeros_like(targets), decoding).tolist() == [-INFINITY] * 60


@pytest.mark.parametrize("scale", [1e-5, 30.0, 3000.0])
def test_sure_and_unsure_predictions_lose_no_digits(scale):
    logits, targets = random_rows(90, seed=4, scale=scale)
    for decoding in DECODINGS:
        want = [by_definition([v - max(r) for v in r], t, decoding) if scale < 100 else None for r, t in zip(logits.tolist(), targets.tolist(), strict=True)]  # fmt: skip
        found = decoded_log_probs(logits, targets, decoding)
        assert not found.isnan().any()
        assert (found <= 1e-6).all()
        if scale < 100:
            assert found.tolist() == pytest.approx(want, abs=2e-5, rel=1e-5)


def test_half_precision_and_other_strides_are_read_alike():
    logits, targets = random_rows(64, seed=6)
    decoding = Decoding(temperature=0.8, top_k=20, top_p=0.9)
    half = logits.bfloat16()
    want = decode_with_torch(half.float(), targets, decoding)
    assert decoded_log_probs(half, targets, decoding).tolist() == pytest.approx(want.tolist(), abs=1e-5)  # fmt: skip
    turned = logits.T.contiguous().T
    assert torch.equal(decoded_log_probs(turned, targets, decoding), decoded_log_probs(logits, targets, decoding))  # fmt: skip
    none = decoded_log_probs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), decoding)
    assert none.shape == (0,)


def test_the_k_highest_are_found_in_their_lanes(monkeypatch):
    """What a GPU does with the highest logit of each lane, done here by hand."""
    from tightlip.scan import decoding as module

    monkeypatch.setattr(module, "LANES", 16)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 40, (30, 101), generator=generator).float()
    padded = torch.cat([logits, torch.full((30, 11), -INFINITY)], dim=1)
    nothing = torch.zeros(30)
    rows = module.Rows(
        logits=logits, targets=nothing.long(), temperature=1.0, num_above=nothing, highest=nothing,
        total=nothing, above=None, moments=None, lanes=padded.view(30, 7, 16).amax(1),
    )  # fmt: skip
    for k in (1, 5, 16):
        assert torch.equal(module._highest(rows, k), logits.topk(k).values)


def test_a_scan_keeps_how_likely_each_token_is_drawn():
    row = [0.0, 1.0, 2.0, 3.0]
    scanner = Scanner(Says(row), bos_id=0)
    scorer = scorer_of(Decoding(temperature=0.5, top_k=2))
    (found,) = scanner.scan(np.array([3, 2, 1], np.int32), np.array([0, 3]), scorer)
    total = math.log(1 + math.exp(-2))
    assert found.tolist() == pytest.approx([-total, -2 - total, -INFINITY])
    assert scorer.key == {"scorer": "decoding", "temperature": 0.5, "top_k": 2}
    assert scorer_of(Decoding()) is PLAIN, "nothing is scaled or cut: the plain scan says it"


@pytest.mark.parametrize("row", [[-INFINITY] * 4, [0.0, INFINITY, 1.0, -INFINITY]])
@pytest.mark.parametrize("target", [1, 3])
def test_predictions_that_are_no_probabilities_are_refused(row, target):
    for decoding in (Decoding(temperature=0.5), Decoding(top_k=2), Decoding(top_p=0.5)):
        with pytest.raises(UsageError, match="NaN"):
            Scanner(Says(row), bos_id=0).scan(
                np.array([target] * 2), np.array([0, 2]), scorer_of(decoding)
            )


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])  # fmt: skip
def test_a_decoding_out_of_range_is_refused(wrong):
    with pytest.raises(UsageError, match="out of range"):
        Decoding(**wrong)
