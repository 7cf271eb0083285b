"""The release of mode `scale`: how much noise it has, what it is rounded to, what it costs."""

import numpy as np
import pytest

from tightlip.core.errors import GuaranteeError
from tightlip.core.grid_gaussian import grid_of
from tightlip.privacy.adaptive import AdaptiveSpec, joint_multiplier
from tightlip.privacy.noise_schedules import ReleasedNoise
from tightlip.privacy.rdp_filter import RdpFilter, subsampled_gaussian_rdp

LEAST, BATCH, Z, SIGMA, RATE = 0.05, 10, 3.0, 2.0, 0.02
HALF = (1 - LEAST) / 2


def schedule(folder, *, budget=None, seed=5, **own):
    spec = AdaptiveSpec(mode="scale", least_weight=LEAST, **{"release_noise": Z, **own})
    return ReleasedNoise(spec, SIGMA, BATCH, folder, budget=budget, insecure_seed=seed)


@pytest.mark.parametrize(("share", "fits"), [(1.0, True), (0.95, False), (1.05, False)])
def test_the_spread_of_releases_is_within_two_per_cent_of_what_is_charged(tmp_path, share, fits):
    """The standard deviation of 40,000 draws is known to 0.35%, and a tenth too little shows."""
    made = schedule(tmp_path)
    made.release_noise *= share  # what a wrong release would use, where z is charged
    told = np.array([made.released(np.full(8, 0.3)) for _ in range(40_000)])
    found = told.std() * BATCH / (Z * HALF)
    assert (abs(found - 1) < 0.02) == fits


def test_releases_lie_on_a_grid_of_their_noise(tmp_path):
    """c + k·g·h/L and nothing between, g the grid of noise of z: the last bits of a sum tell more than noise hides."""
    made, draw = schedule(tmp_path), np.random.default_rng(0)
    steps = np.array(
        [
            (made.released(draw.uniform(LEAST, 1, 12)) - (1 + LEAST) / 2)
            * BATCH / (grid_of(Z) * HALF)
            for _ in range(500)
        ]
    )  # fmt: skip
    assert np.abs(steps - np.round(steps)).max() < 1e-4
    assert len({*np.round(steps)}) > 400


def test_sums_that_differ_below_the_grid_are_released_alike(tmp_path):
    """The same noise on two sums a thousandth of the grid apart: the same release, but where a
    rounding edge lies between them."""
    fine = 1e-3 * Z * HALF / 65_536
    one, other = (
        [
            made.released(np.array([0.3, 0.4 + shift]))
            for made in (schedule(tmp_path, seed=seed) for seed in range(300))
        ]
        for shift in (0.0, fine)
    )
    alike = np.mean([a == b for a, b in zip(one, other, strict=True)])
    assert alike > 0.98


def cost(noise):
    return subsampled_gaussian_rdp(8, noise, RATE)


@pytest.mark.parametrize(("room", "fits"), [("between", False), ("both", True)])
def test_a_step_fits_only_with_its_release(tmp_path, room, fits):
    """A budget that holds the gradient and not the release with it holds no step."""
    alone, both = cost(SIGMA), cost(joint_multiplier(SIGMA, Z))
    assert alone < both
    budget = both * 1.001 if room == "both" else (alone + both) / 2
    made = schedule(tmp_path, budget=RdpFilter(order=8, budget=budget, sampling_rate=RATE))
    recorded = []
    assert made.fits() == fits
    if fits:
        made.charge(lambda: recorded.append(1), np.full(8, 0.3))
        assert made.budget.spent == pytest.approx(both, rel=1e-6)
    else:
        with pytest.raises(GuaranteeError, match="would pass the budget"):
            made.charge(lambda: recorded.append(1), np.full(8, 0.3))
    assert len(recorded) == fits


def test_whatever_fits_may_be_charged(tmp_path):
    """Asked before each step, the budget refuses none in the middle and is not passed."""
    room = 25.5 * cost(joint_multiplier(SIGMA / 2, Z))
    budget = RdpFilter(order=8, budget=room, sampling_rate=RATE)
    made, taken = schedule(tmp_path, budget=budget, averaging=0.0), 0
    while made.fits():
        made.charge(lambda: None, np.full(1, LEAST))
        taken += 1
    assert budget.spent <= room < budget.spent + cost(joint_multiplier(SIGMA / 2, Z)) * 1.001
    assert taken >= 25
