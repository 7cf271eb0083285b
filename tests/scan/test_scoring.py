"""Rank and log-probability of a target against float64 and against plain torch operations."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tightlip.core.errors import UsageError
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.scan.scanner import Scanner
from tightlip.scan.scoring import LOWEST, score_logits, score_with_torch
from tightlip.scan.store import NOT_SCORED, Scorer

INFINITY = float("inf")


def in_float64(logits, targets):
    """Oracle: the definition, one row at a time, with Python's exact sum."""
    ranks, log_probs = [], []
    for row, target in zip(logits.double().tolist(), targets.tolist(), strict=True):
        ranks.append(sum(value > row[target] for value in row))
        top = max(row)
        total = math.fsum(math.exp(value - top) for value in row)
        log_probs.append(row[target] - top - math.log(total))
    return ranks, log_probs


def check(logits, targets, *, absolute=3e-6):
    for score in (score_logits, score_with_torch):
        ranks, log_probs = score(logits, targets)
        want_ranks, want = in_float64(logits.float(), targets)
        assert ranks.dtype == torch.int32
        assert log_probs.dtype == torch.float32
        assert ranks.tolist() == want_ranks, score
        assert log_probs.tolist() == pytest.approx(want, rel=1e-6, abs=absolute), score


def random_targets(rows, width, generator):
    return torch.randint(0, width, (rows,), generator=generator)


@pytest.mark.parametrize("width", [1, 2, 3, 31, 1000, 50_257])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0, 1e4])
def test_scores_agree_with_float64(width, scale):
    generator = torch.Generator().manual_seed(width)
    rows = 3 if width > 1000 else 40
    logits = torch.randn(rows, width, generator=generator) * scale
    # Above 1e4 a float32 difference is itself rounded: to about 1e-3 of a nat.
    check(logits, random_targets(rows, width, generator), absolute=3e-6 + 1e-7 * scale)


@pytest.mark.parametrize("width", [2, 31, 4096])
def test_equal_logits_are_not_above_each_other(width):
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(0, 3, (50, width), generator=generator).float()
    check(logits, random_targets(50, width, generator))
    flat_ranks, flat = score_logits(torch.zeros(4, width), torch.tensor([0, 1, width - 1, 1]))
    assert flat_ranks.tolist() == [0] * 4
    assert flat.tolist() == pytest.approx([-math.log(width)] * 4, rel=1e-6)


def test_logits_one_float_apart_are_told_apart():
    low, high = np.float32(1.0), np.nextafter(np.float32(1.0), np.float32(2.0))
    logits = torch.tensor([[low, high, low], [high, low, low], [-high, -low, -high]])
    ranks, _ = score_logits(logits, torch.tensor([0, 0, 0]))
    assert ranks.tolist() == [1, 0, 1]


def test_half_precision_logits_are_compared_as_float32():
    logits = torch.tensor([[1.0, 1.0009765625, 3.0]], dtype=torch.float16)
    for score in (score_logits, score_with_torch):
        assert score(logits, torch.tensor([0]))[0].tolist() == [2]
        assert score(logits.bfloat16(), torch.tensor([0]))[0].tolist() == [
            1
        ]  # there they are equal


@pytest.mark.parametrize("width", [2, 31, 4096])
def test_forbidden_tokens_take_no_probability(width):
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(20, width, generator=generator)
    logits[torch.rand(20, width, generator=generator) < 0.4] = -INFINITY
    logits[:, 0] = 0.5
    targets = torch.zeros(20, dtype=torch.int64)
    check(logits, targets)


def test_a_forbidden_target_is_impossible_and_below_all_that_are_not():
    logits = torch.tensor([[0.0, -INFINITY, 2.0, -INFINITY]])
    for score in (score_logits, score_with_torch):
        ranks, log_probs = score(logits, torch.tensor([1]))
        assert ranks.tolist() == [2]
        assert log_probs.tolist() == [-INFINITY]


def test_certainty_is_a_log_probability_of_zero_and_its_opposite_stays_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [88.8, 0.0, -3.4e38]])
    check(logits, torch.tensor([0, 2, 0]), absolute=1e-3)  # a float32 near 1e4 has no finer steps
    assert score_logits(logits, torch.tensor([1, 1, 1]))[1][0] == -2e4


def test_rows_that_are_not_contiguous_are_scored_alike():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(31, 12, generator=generator)
    targets = random_targets(12, 31, generator)
    check(wide.T, targets)
    check(torch.randn(24, 40, generator=generator)[::2, 3:34], targets)


def test_no_rows_give_no_scores():
    ranks, log_probs = score_logits(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert (len(ranks), len(log_probs)) == (0, 0)


def moments_in_float64(logits):
    """Oracle: mean and deviation of log p under p, by the definition."""
    found = []
    for row in logits.double().tolist():
        top = max(row)
        total = math.log(math.fsum(math.exp(value - top) for value in row))
        likely = [value - top - total for value in row if value > -INFINITY]
        mean = math.fsum(math.exp(nats) * nats for nats in likely)
        found.append(
            (mean, math.sqrt(math.fsum(math.exp(nats) * (nats - mean) ** 2 for nats in likely)))
        )
    return found


@pytest.mark.parametrize("width", [1, 2, 31, 1000, 50_257])
@pytest.mark.parametrize("scale", [0, 1e-3, 1.0, 30.0, 1e4])
def test_mean_and_deviation_of_the_log_probability_agree_with_float64(width, scale):
    generator = torch.Generator().manual_seed(width)
    rows = 3 if width > 1000 else 20
    logits = torch.randn(rows, width, generator=generator) * scale
    logits[0, 0] += 11  # the deviation is largest where one token has about half of the chance
    if width > 2:
        logits[1, 1:] -= 7 + torch.zeros(width - 1)  # far below the highest, and all alike
        logits[2, 2] = -INFINITY
    targets = random_targets(rows, width, generator)
    for score in (score_logits, score_with_torch):
        *plain, means, deviations = score(logits, targets, moments=True)
        for one, other in zip(plain, score(logits, targets), strict=True):
            # Another kernel adds 50,257 numbers up in another order.
            assert one.tolist() == pytest.approx(other.tolist(), rel=3e-6)
        want = moments_in_float64(logits)
        assert means.tolist() == pytest.approx([mean for mean, _ in want], abs=1e-4)
        # The root of a variance that rounding of 1e-6 has moved.
        assert deviations.tolist() == pytest.approx([spread for _, spread in want], abs=1e-3)


def test_of_any_start_of_a_row_the_running_sums_are_those_of_the_whole():
    """The GPU's kernel as arithmetic: values that come one by one, the maximum moving with them."""
    row = torch.randn(500, generator=torch.Generator().manual_seed(3)).mul(5).double().tolist()
    highest, total, first, second = -INFINITY, 0.0, 0.0, 0.0
    for value in row:
        larger = max(highest, value)
        kept, new = math.exp(highest - larger), math.exp(value - larger)
        moved, below = max(highest - larger, LOWEST), max(value - larger, LOWEST)
        second = (second + moved * (2 * first + moved * total)) * kept + new * below**2
        first = (first + moved * total) * kept + new * below
        total, highest = total * kept + new, larger
    mean = first / total
    ((want, spread),) = moments_in_float64(torch.tensor([row], dtype=torch.float64))
    assert mean - math.log(total) == pytest.approx(want)
    assert math.sqrt(second / total - mean**2) == pytest.approx(spread)


def small_lstm():
    torch.manual_seed(0)
    return LSTMForCausalLM(LSTMConfig(9, 4, 4, 1)).eval()


@pytest.mark.parametrize("value", [float("nan"), INFINITY])
def test_a_model_with_broken_weights_is_refused_by_the_weights_name(value):
    model = small_lstm()
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 1] = value
    with pytest.raises(UsageError, match=r"embed.*weight.*NaN or infinite"):
        Scanner(model, bos_id=1)


class Says(nn.Module):
    """A model whose logits are one given row, at every position."""

    def __init__(self, row):
        super().__init__()
        self.row = torch.tensor(row)

    def forward(self, input_ids):
        logits = self.row.expand(*input_ids.shape, -1).clone()
        return type("Output", (), {"logits": logits})


def scan(model, ids):
    scanner = Scanner(model, bos_id=0)
    return scanner.scan(np.array(ids, dtype=np.int32), np.array([0, len(ids)]))


@pytest.mark.parametrize(
    "row",
    [
        [float("nan")] * 4,
        [0.0, 1.0, float("nan"), 2.0],
        [-INFINITY] * 4,
        [0.0, INFINITY, 1.0, -INFINITY],
    ],
    ids=["all NaN", "one NaN", "nothing possible", "infinitely likely"],
)
@pytest.mark.parametrize("target", [1, 3])
def test_predictions_that_are_no_probabilities_are_refused(row, target):
    with pytest.raises(UsageError, match="NaN"):
        scan(Says(row), [target, target])


def test_a_prediction_with_forbidden_tokens_is_scored():
    ranks, log_probs = scan(Says([0.0, 0.0, -INFINITY, -1.0]), [1, 2, 3])
    total = math.log(2 + math.exp(-1))
    assert ranks.tolist() == [0, 3, 2]
    assert log_probs.tolist() == pytest.approx([-total, -INFINITY, -1 - total])


def entropies(logits_NV, targets_N):
    shares = logits_NV.double().softmax(dim=1)
    return -(shares * shares.log()).sum(dim=1), targets_N.int()


def test_a_scorer_of_ones_own_fills_its_columns_and_nan_in_one_of_them_is_refused():
    scorer = Scorer(
        name="entropy", columns={"nats": np.float64, "targets": np.int32}, score=entropies
    )
    scanner = Scanner(Says([0.0, 0.0, 0.0, 0.0]), bos_id=None)
    nats, targets = scanner.scan(np.array([1, 2, 3, 2, 1]), np.array([0, 3, 5]), scorer)
    missing, four = math.nan, math.log(4)
    assert nats.tolist() == pytest.approx([missing, four, four, missing, four], nan_ok=True)
    assert targets.tolist() == [NOT_SCORED, 2, 3, NOT_SCORED, 1]
    with pytest.raises(UsageError, match="NaN"):
        Scanner(Says([0.0, -INFINITY]), bos_id=0).scan(np.array([0]), np.array([0, 1]), scorer)


class Overflowing(LSTMForCausalLM):
    """Finite weights, but the last layer's output is infinite now and then."""

    def __init__(self, config, after):
        super().__init__(config)
        self.base_model.register_forward_hook(self.overflow)
        self.after, self.calls = after, 0

    def overflow(self, module, inputs, output):
        self.calls += 1
        if self.calls > self.after:
            output.last_hidden_state[:, 2, 1] = INFINITY


def test_infinite_hidden_states_are_refused():
    torch.manual_seed(0)
    model = Overflowing(LSTMConfig(9, 4, 4, 1), after=7).eval()
    with pytest.raises(UsageError, match="NaN"):
        scan(model, [3, 4, 5, 6, 7, 8])
    assert model.calls > 7
