import numpy as np
import pytest
import torch

from tightlip.vectors.release import unit_ball, unit_range

ODD = {
    "constant": [3.0, 3.0, 3.0, 3.0],
    "zero": [0.0, 0.0, 0.0, 0.0],
    "not a number": [1.0, float("nan"), 2.0, 3.0],
    "infinite": [1.0, float("inf"), 2.0, 3.0],
    "infinite both ways": [float("-inf"), float("inf"), 2.0, 3.0],
    "all not a number": [float("nan")] * 4,
}


def by_hand(record):
    least, most = min(record), max(record)
    return [(value - least) / (most - least) for value in record]


@pytest.mark.parametrize(
    ("of", "name"),
    [
        *((unit_range, name) for name in ODD),
        *((unit_ball, name) for name in ODD if name != "constant"),
    ],
)
def test_what_cannot_be_normalised_becomes_a_fixed_vector(of, name):
    rows = np.array([ODD[name], [1.0, 2.0, 3.0, 5.0]], np.float32)
    assert of(rows)[0].tolist() == [0] * 4
    assert of(torch.from_numpy(rows))[0].tolist() == [0] * 4
    assert of(rows)[1].any()
    assert torch.isfinite(of(torch.from_numpy(rows))).all()


def test_each_record_is_stretched_to_the_whole_range_by_itself():
    rows = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32) * 100
    found = unit_range(rows)
    assert found == pytest.approx(np.array([by_hand(row) for row in rows.tolist()]), abs=1e-6)
    assert found.min(axis=1).tolist() == [0] * 50
    assert found.max(axis=1).tolist() == [1] * 50


def test_each_record_gets_length_one():
    rows = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    assert np.linalg.norm(unit_ball(rows), axis=1) == pytest.approx(np.ones(50))
    assert unit_ball(rows) == pytest.approx(rows / np.linalg.norm(rows, axis=1)[:, None], abs=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e38])
@pytest.mark.parametrize("of", [unit_range, unit_ball])
def test_numpy_and_torch_agree_on_numbers_large_and_small(of, scale):
    rows = np.random.default_rng(1).uniform(-1, 1, size=(50, 16)).astype(np.float32)
    rows = rows * np.float32(scale)
    assert of(torch.from_numpy(rows)).numpy() == pytest.approx(of(rows), abs=1e-6)


@pytest.mark.parametrize("of", [unit_range, unit_ball])
def test_gradients_are_those_of_the_formula_and_finite_for_odd_records(of):
    torch.manual_seed(0)
    rows = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(of, (rows,))
    odd = torch.tensor(list(ODD.values()), requires_grad=True)
    of(odd).square().sum().backward()
    assert torch.isfinite(odd.grad).all()
