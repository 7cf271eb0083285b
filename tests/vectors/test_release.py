import numpy as np
import pytest
import torch
from scipy import stats

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.vectors.grid_noise import GridNoise
from tightlip.vectors.guarantees import VectorMechanism
from tightlip.vectors.release import drawn, noised, normalised, on_grid, released, training_noise
from tightlip.vectors.vector_accounting import GRID_STEP, GRID_STEPS

LAPLACE = VectorMechanism(mechanism="laplace-as-published", dimensions=24, epsilon=0.05)
GAUSSIAN = VectorMechanism(mechanism="gaussian", dimensions=24, epsilon=4.0)
BARE = VectorMechanism(mechanism="none", dimensions=24, epsilon=None)
CONTINUOUS = {"laplace-as-published": stats.laplace.cdf, "gaussian": stats.norm.cdf}
EVIL = np.array(
    [
        [np.nan] * 24,
        [np.inf] * 24,
        [7.0] * 24,
        [0.0] * 24,
        [3.4e38, -3.4e38] * 12,
        [1e-45] * 23 + [0.0],
        [1.0] + [0.0] * 23,
        [np.inf, -np.inf] + [1.0] * 22,
    ],
    np.float32,
)


def seeded(seed=0):
    return GridNoise(np.random.default_rng(seed).bytes)


def raw(num=1500, seed=0):
    return np.random.default_rng(seed).normal(size=(num, 24)).astype(np.float32)


@pytest.mark.parametrize("mechanism", [LAPLACE, GAUSSIAN], ids=lambda each: each.mechanism)
def test_noise_has_the_promised_scale_and_one_and_a_half_times_it_would_show(mechanism):
    noise = released(raw(), mechanism, seeded()) - on_grid(raw(), mechanism) * GRID_STEP
    law = CONTINUOUS[mechanism.mechanism]
    assert stats.kstest(noise.ravel() / mechanism.noise_scale, law).pvalue > 1e-4
    assert stats.kstest(1.5 * noise.ravel() / mechanism.noise_scale, law).pvalue < 1e-4
    assert stats.kstest(noise.ravel() / 1.5 / mechanism.noise_scale, law).pvalue < 1e-4


@pytest.mark.parametrize("mechanism", [LAPLACE, GAUSSIAN], ids=lambda each: each.mechanism)
def test_noise_is_independent_between_entries_vectors_and_calls(mechanism):
    source = seeded()
    parts = [released(raw(), mechanism, source) for _ in range(2)]
    noises = np.stack([part - on_grid(raw(), mechanism) * GRID_STEP for part in parts], axis=0)
    limit = 5 / np.sqrt(noises[0].size)
    one, other = noises.reshape(2, -1)
    shared = other + 0.2 * one
    assert abs(np.corrcoef(one, other)[0, 1]) < limit < abs(np.corrcoef(one, shared)[0, 1])
    between = np.corrcoef(noises[0], rowvar=False) - np.eye(24)
    assert np.abs(between).max() < 5 / np.sqrt(1500)
    common = noises[0] + 0.5 * noises[0][:, :1]
    assert np.abs(np.corrcoef(common, rowvar=False) - np.eye(24)).max() > 5 / np.sqrt(1500)


@pytest.mark.parametrize(
    "vectors", [raw(500), EVIL, EVIL * np.float32(0.3)], ids=["raw", "evil", "less"]
)
def test_before_noise_every_value_is_a_whole_number_of_steps_in_its_range(vectors):
    boxed, balled = on_grid(vectors, LAPLACE), on_grid(vectors, GAUSSIAN)
    assert boxed.dtype == balled.dtype == np.int64
    assert boxed.min() >= 0
    assert boxed.max() <= GRID_STEPS
    for record in balled.tolist():
        assert sum(value * value for value in record) <= GRID_STEPS**2
    plain = np.isfinite(vectors).all(axis=1)
    assert boxed[plain] * GRID_STEP == pytest.approx(
        normalised(torch.from_numpy(vectors[plain]).double(), LAPLACE).numpy(), abs=GRID_STEP
    )


def test_two_vectors_in_the_ball_are_never_more_than_its_diameter_apart():
    vectors = raw(2000)
    steps = on_grid(np.concatenate([vectors, -vectors]), GAUSSIAN)
    apart = ((steps[:2000] - steps[2000:]) ** 2).sum(axis=1)
    assert apart.max() <= (2 * GRID_STEPS) ** 2
    assert apart.max() > (1.99 * GRID_STEPS) ** 2


@pytest.mark.parametrize("mechanism", [LAPLACE, GAUSSIAN, BARE], ids=lambda each: each.mechanism)
def test_whatever_the_extractor_computes_the_release_is_finite(mechanism):
    found = released(EVIL, mechanism, seeded())
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert released(EVIL[:0], mechanism, seeded()).shape == (0, 24)


def test_the_published_epsilon_is_exceeded_by_two_coordinates_and_the_pure_one_is_not():
    """(0, 1) against (1, 0): the best guess is right e^(2ε) times as often as it is wrong."""
    mechanism = VectorMechanism(mechanism="laplace-as-published", dimensions=2, epsilon=1.0)
    ends = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32)
    counts = []
    for number, text in enumerate(ends):
        found = released(np.repeat(text[None], 200_000, axis=0), mechanism, seeded(number))
        counts.append(int(np.sum((found[:, 0] <= 0) & (found[:, 1] >= 1))))
    shown = np.log(counts[0] / counts[1])
    error = np.sqrt(1 / counts[0] + 1 / counts[1])
    assert shown - 5 * error > mechanism.record()["per_coordinate"]
    assert shown == pytest.approx(mechanism.record()["pure"], abs=5 * error)


def test_a_constant_and_a_broken_vector_are_released_alike():
    same = np.stack([np.full(24, np.nan), np.full(24, 2.0), np.full(24, -1e30)]).astype(np.float32)
    assert not on_grid(same, LAPLACE).any()


def test_released_floats_are_those_of_the_steps_and_the_noise_is_wiped_out():
    noise = drawn(LAPLACE, seeded(3), 5)
    expected = (on_grid(raw(5), LAPLACE) + noise) / GRID_STEPS
    assert noised(raw(5), LAPLACE, noise).tolist() == expected.astype(np.float32).tolist()
    assert not noise.any()
    with pytest.raises(GuaranteeError, match="used before"):
        noised(raw(5), LAPLACE, noise)


def test_noise_for_fewer_vectors_is_refused_and_never_shared():
    for num in (1, 4, 6):
        with pytest.raises(GuaranteeError, match="share it"):
            noised(raw(5), LAPLACE, drawn(LAPLACE, seeded(), num))


def test_bare_vectors_are_normalised_and_nothing_else():
    expected = normalised(torch.from_numpy(raw(5)), BARE).numpy()
    assert released(raw(5), BARE, seeded()) == pytest.approx(expected, abs=1e-6)


def test_vectors_of_another_size_are_refused():
    with pytest.raises(UsageError, match="24 dimensions"):
        released(np.zeros((3, 25), np.float32), LAPLACE, seeded())


@pytest.mark.parametrize("mechanism", [LAPLACE, GAUSSIAN], ids=lambda each: each.mechanism)
def test_noise_for_training_has_the_same_law(mechanism):
    torch.manual_seed(0)
    noise = training_noise(torch.zeros(2000, 24), mechanism)
    law = CONTINUOUS[mechanism.mechanism]
    assert stats.kstest(noise.numpy().ravel() / mechanism.noise_scale, law).pvalue > 1e-4
    assert stats.kstest(noise.numpy().ravel() / mechanism.noise_scale / 1.5, law).pvalue < 1e-4
    assert (
        training_noise(torch.zeros(2, 24, dtype=torch.bfloat16), mechanism).dtype == torch.bfloat16
    )
    assert not training_noise(torch.zeros(2, 24), BARE).any()
