import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.stats import chi2

from privacy.test_ledger import begun, meter_for, terms
from tightlip.privacy.accounting import Mechanism, epsilon_spent
from tightlip.privacy.ledger import Ledger
from tightlip.privacy.selection import NoisyLoss, reach

LOSSES = np.array([0.5, 2.0, 7.9, 11.0, math.nan, 3.25])
BOUND = 8.0


class Record:
    """As much of a ledger as is asked, without a file."""

    def __init__(self):
        self.steps, self.told = 1, {}

    def rewrite(self): ...

    def settle(self): ...


def mean_by_hand():
    return sum(8.0 if math.isnan(each) else min(each, 8.0) for each in LOSSES) / len(LOSSES)


def test_without_noise_to_speak_of_it_is_the_mean_of_the_clipped_losses():
    told = NoisyLoss(noise_multiplier=1e-9, num_planned=1).told(
        Record(), lambda: LOSSES, bound=BOUND
    )
    assert told == pytest.approx(mean_by_hand(), abs=1e-6)


@pytest.mark.parametrize("more", [-3.0, 0.0, 4.0, 1e9, math.inf, math.nan])
def test_one_unit_moves_the_sum_by_one_at_most(more):
    one = np.append(LOSSES, more)
    assert abs(reach(one, BOUND).sum() - reach(LOSSES, BOUND).sum()) <= 1


def test_the_noise_is_as_wide_as_it_was_charged_and_half_as_much_again_would_show():
    """Sum and number of units, each over 400 releases of their own key."""
    noisy, draws = NoisyLoss(noise_multiplier=3.0, num_planned=1), 400
    sums, counts = [], []
    for _ in range(draws):
        record = Record()
        # So many units at the middle that the sum is all noise and no figure is cut off.
        nats = noisy.told(record, lambda: np.full(1000, BOUND / 2), bound=BOUND)
        count = record.told["num_units"]
        sums.append((nats - BOUND / 2) / (BOUND / 2) * count)
        counts.append(count - 1000)
    low, high = chi2.ppf([1e-4, 1 - 1e-4], draws) / draws
    for seen in (sums, counts):
        spread = np.mean(np.square(seen)) / 3.0**2
        assert low < spread < high
        assert not low < spread * 1.5**2 < high
        assert not low < spread / 1.5**2 < high
    assert abs(np.corrcoef(sums, counts)[0, 1]) < 0.25


def test_all_that_is_planned_is_charged_as_dp_accounting_composes_it():
    release = NoisyLoss(noise_multiplier=6.0, num_planned=8).release()
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(6.0), 9)  # and the number of units
    mechanism = Mechanism(noise_multiplier=1.0, sampling_rate=0.5, releases=(release,))
    assert epsilon_spent(mechanism, 0, 1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5), rel=1e-3
    )


def test_no_more_is_told_than_was_planned_and_the_same_weights_are_told_of_once(tmp_path):
    noisy = NoisyLoss(
        noise_multiplier=0.1, num_planned=2
    )  # so little that no figure is cut to the bound
    ledger = begun(tmp_path)
    ledger.charge()
    first = noisy.told(ledger, lambda: LOSSES, bound=BOUND)
    again = Ledger.open(ledger.path, terms(), meter_for(terms()))  # after a kill
    assert noisy.told(again, lambda: pytest.fail("asked again"), bound=BOUND) == first
    again.charge()
    second = noisy.told(again, lambda: LOSSES, bound=BOUND)
    assert second != first
    again.charge()
    assert noisy.told(again, lambda: pytest.fail("asked"), bound=BOUND) is None
    assert again.record()["noisy_validation"]["losses"] == [[1, first], [2, second]]
