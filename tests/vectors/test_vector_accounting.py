"""ε of noise on a grid, against closed forms and against laws written out value by value."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from scipy.signal import fftconvolve

from tightlip.core.errors import UsageError
from tightlip.vectors.vector_accounting import (
    GRID_STEPS,
    amplified,
    before_dropout,
    gaussian_epsilon,
    gaussian_units,
    laplace_epsilon,
    laplace_units,
    pure_epsilon,
    zcdp_epsilon,
)
from vectors.discrete_laws import (
    gaussian_law,
    hockey_stick,
    laplace_law,
    least_epsilon,
    moved,
)


def exact_laplace_epsilon(units: int, num_coordinates: int, delta: float) -> float:
    """Oracle: the loss of one coordinate is (M − 2x)/t at x in 0 … M; convolve it k times."""
    ratio = math.exp(-1 / units)
    inner = (1 - ratio) / (1 + ratio) * ratio ** np.arange(1, GRID_STEPS)
    law = np.concatenate([[1 / (1 + ratio)], inner, [ratio**GRID_STEPS / (1 + ratio)]])
    assert law.sum() == pytest.approx(1, abs=1e-12)
    whole = law
    for _ in range(num_coordinates - 1):
        whole = fftconvolve(whole, law)
    losses = (num_coordinates * GRID_STEPS - 2 * np.arange(len(whole))) / units
    return least_epsilon(
        lambda epsilon: float(
            (np.maximum(whole, 0) * np.maximum(-np.expm1(epsilon - losses), 0)).sum()
        ),
        delta,
        pure_epsilon(units, num_coordinates),
    )


@pytest.mark.parametrize("epsilon", [0.05, 0.7, 2.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_one_coordinate_has_the_closed_form_of_laplace(epsilon, delta):
    # δ(ε) = 1 − e^((ε − ε₀)/2): the grid is so fine that it hardly differs.
    closed = max(0.0, epsilon + 2 * math.log1p(-delta))
    found = laplace_epsilon(math.ceil(GRID_STEPS / epsilon), 1, delta)
    assert found == pytest.approx(closed, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("num_coordinates", [1, 2, 3, 5])
@pytest.mark.parametrize("epsilon", [0.05, 0.7])
def test_few_coordinates_spend_what_the_convolved_law_does_and_never_less(num_coordinates, epsilon):
    units = math.ceil(GRID_STEPS / epsilon)
    exact = exact_laplace_epsilon(units, num_coordinates, 1e-3)
    found = laplace_epsilon(units, num_coordinates, 1e-3)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-3)


@pytest.mark.parametrize(("num_coordinates", "published"), [(384, 4.22), (768, 6.34)])
def test_many_coordinates_spend_what_continuous_laplaces_do(num_coordinates, published):
    continuous = pld.from_laplace_mechanism(20, value_discretization_interval=1e-4)
    epsilon = continuous.self_compose(num_coordinates).get_epsilon_for_delta(1e-5)
    found = laplace_epsilon(20 * GRID_STEPS, num_coordinates, 1e-5)
    assert found == pytest.approx(epsilon, rel=1e-5)
    assert round(found, 2) == published


def test_a_coarser_account_of_thousands_of_coordinates_is_close_and_not_below():
    fine = pld.from_laplace_mechanism(20, value_discretization_interval=2e-3)
    optimistic = pld.from_laplace_mechanism(
        20, value_discretization_interval=2e-4, pessimistic_estimate=False
    )
    found = laplace_epsilon(20 * GRID_STEPS, 3840, 1e-5)
    assert found >= optimistic.self_compose(3840).get_epsilon_for_delta(1e-5)
    assert found <= fine.self_compose(3840).get_epsilon_for_delta(1e-5) * (1 + 1e-4)


@pytest.mark.parametrize("each", [1e-4, 0.05, 1.0, 10.0, 60.0, 99.0, 150.0])
@pytest.mark.parametrize("num_coordinates", [1, 5, 768, 20_000])
def test_at_no_scale_is_less_claimed_than_one_coordinate_shows_nor_more_than_pure(
    each, num_coordinates
):
    units = round(GRID_STEPS / each)
    found = laplace_epsilon(units, num_coordinates, 1e-5)
    one = pure_epsilon(units, 1) + 2 * math.log1p(-1e-5)
    # The loss has this mean, and lies below it with a chance of more than δ: ε cannot.
    mean = pure_epsilon(units, 1) + math.expm1(-pure_epsilon(units, 1))
    assert max(one, num_coordinates * mean * 0.9) <= found * (1 + 1e-3) + 1e-5
    assert found <= pure_epsilon(units, num_coordinates)


def test_pure_is_exact_and_what_delta_zero_gives():
    assert pure_epsilon(20 * GRID_STEPS, 384) == 19.2
    assert laplace_epsilon(20 * GRID_STEPS, 384, 0.0) == 19.2
    law = moved(laplace_law(7, 200), 0, 30)
    far = moved(laplace_law(7, 200), 30, 30)
    inside = slice(30, -30)
    assert np.log(law[inside] / far[inside]).max() == pytest.approx(30 / 7)


@pytest.mark.parametrize("delta", [1e-4, 1e-8, 1e-12, 1e-15])
def test_less_delta_more_coordinates_or_less_noise_never_spend_less(delta):
    found = laplace_epsilon(10 * GRID_STEPS, 64, delta)
    assert found <= pure_epsilon(10 * GRID_STEPS, 64)
    assert found <= laplace_epsilon(10 * GRID_STEPS, 64, delta / 10)
    assert found <= laplace_epsilon(10 * GRID_STEPS, 65, delta)
    assert found <= laplace_epsilon(9 * GRID_STEPS, 64, delta)


@pytest.mark.parametrize("units", [1.5, 6, 40])
def test_moving_a_coordinate_further_never_shows_less(units):
    """The pair that the account composes, moved over the whole range, is the worst one."""
    base = moved(laplace_law(units, 600), 0, 12)
    for epsilon in (0.0, 0.1, 0.5, 1.5):
        shown = [
            hockey_stick(base, moved(laplace_law(units, 600), by, 12), epsilon) for by in range(13)
        ]
        assert all(nearer <= further + 1e-12 for nearer, further in itertools.pairwise(shown))


@pytest.mark.parametrize("epsilon", [0.3, 2.0, 8.0])
def test_gaussian_noise_shows_no_more_than_claimed_in_the_law_written_out(epsilon):
    units = gaussian_units(epsilon, 1e-5)
    law = gaussian_law(units / 64, 8 * units // 64)
    apart = 2 * GRID_STEPS // 64  # the same shape on a grid 64 times as coarse
    one, other = moved(law, 0, apart), moved(law, apart, apart)
    assert hockey_stick(one, other, epsilon) <= 1e-5
    analytic = get_epsilon_gaussian(units / (2 * GRID_STEPS), 1e-5)
    assert analytic < gaussian_epsilon(units, 1e-5) < 1.15 * analytic


def test_gaussian_noise_is_claimed_soundly_along_an_axis_and_across_two():
    """Vectors 10 steps apart in one coordinate, or 6 and 8 in two; each law written out."""
    law = gaussian_law(6, 60)
    near = moved(law, 0, 10)
    along = hockey_stick(near, moved(law, 10, 10), 1.0)
    across = hockey_stick(np.outer(near, near), np.outer(moved(law, 6, 10), moved(law, 8, 10)), 1.0)
    for shown in (along, across):
        assert zcdp_epsilon(10**2 / (2 * 6**2), shown) >= 1.0


@pytest.mark.parametrize("sigma", [0.7, 3.0, 20.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_concentrated_privacy_is_converted_as_another_library_does(sigma, delta):
    orders = [1 + 10 ** (power / 40) for power in range(-80, 160)]
    accountant = RdpAccountant(orders)
    accountant.compose(GaussianDpEvent(sigma))
    assert zcdp_epsilon(1 / (2 * sigma**2), delta) == pytest.approx(
        accountant.get_epsilon(delta), rel=2e-3
    )


def masked_law(word: str, others: int, num_masked: int, values: dict, law, room: int) -> np.ndarray:
    """Oracle: the law of what is released, over every choice of places to mask."""
    places = range(1 + others)
    chosen = list(itertools.combinations(places, num_masked))
    laws = [law(values["_" if 0 in masked else word], room) for masked in chosen]
    return sum(laws) / len(laws)


@pytest.mark.parametrize(("others", "dropout"), [(1, 0.5), (3, 0.25), (3, 0.5), (4, 0.3), (2, 0.9)])
@pytest.mark.parametrize("hidden", [0, 4, 8])
def test_amplification_holds_in_every_small_case_counted_out(others, dropout, hidden):
    """Two texts that differ in one word, all masks written out: δ' is never exceeded."""
    num_masked = math.ceil(dropout * (1 + others))
    values = {"a": 0, "b": 8, "_": hidden}
    law = lambda by, room: moved(laplace_law(5, 400), by, room)  # noqa: E731
    one = masked_law("a", others, num_masked, values, law, 8)
    other = masked_law("b", others, num_masked, values, law, 8)
    for epsilon in (0.1, 0.5, 1.0, 1.5):
        base = hockey_stick(law(0, 8), law(8, 8), epsilon)
        claimed = amplified(epsilon, dropout)
        shown = max(hockey_stick(one, other, claimed), hockey_stick(other, one, claimed))
        assert shown <= (1 - dropout) * base + 1e-12


@pytest.mark.parametrize("num_coordinates", [2, 3])
def test_amplifying_each_coordinate_before_composing_is_false_and_after_is_true(num_coordinates):
    """One mask serves all coordinates: where it stays away they all show."""
    single = [moved(laplace_law(4, 60), by, 4) for by in (0, 4)]
    whole = list(single)
    for _ in range(num_coordinates - 1):
        whole = [
            np.multiply.outer(law, one).ravel() for law, one in zip(whole, single, strict=True)
        ]
    one, other = whole[0], (whole[0] + whole[1]) / 2  # the masked text reads like the first
    epsilon = 4 / 4
    inside = other > 1e-18
    shown = max(np.log(other[inside & (one > 1e-18)] / one[inside & (one > 1e-18)]))
    assert shown <= amplified(num_coordinates * epsilon, 0.5) + 1e-9
    assert shown > num_coordinates * amplified(epsilon, 0.5) + 0.05


def test_the_order_matters_as_in_the_example():
    """METHODS: 3.38 with the coordinates composed first; amplified first, a false 1.96."""
    right = amplified(laplace_epsilon(20 * GRID_STEPS, 384, 1e-5 / 0.5), 0.5)
    assert right == pytest.approx(3.38, abs=0.005)
    each = amplified(0.05, 0.5)
    wrong = laplace_epsilon(round(GRID_STEPS / each), 384, 1e-5)
    assert wrong == pytest.approx(1.96, abs=0.005)


@pytest.mark.parametrize("epsilon", [1e-6, 0.05, 0.999, 1.0, 30.0, 5000.0])
@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 0.99])
def test_amplification_can_be_undone_and_never_grows(epsilon, dropout):
    assert before_dropout(amplified(epsilon, dropout), dropout) == pytest.approx(epsilon, rel=1e-9)
    assert amplified(epsilon, dropout) <= epsilon
    if epsilon < 50:
        plain = math.log(1 + (1 - dropout) * (math.exp(epsilon) - 1))
        assert amplified(epsilon, dropout) == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_calibrated_noise_spends_the_budget_and_hardly_less(delta):
    units = laplace_units(64, 2.0, delta)
    assert laplace_epsilon(units, 64, delta) <= 2.0
    assert laplace_epsilon(round(units * 0.999), 64, delta) > 2.0
    units = gaussian_units(2.0, 1e-5)
    assert gaussian_epsilon(units, 1e-5) <= 2.0 < gaussian_epsilon(round(units * 0.999), 1e-5)


def test_a_budget_that_leaves_nothing_is_refused():
    with pytest.raises(UsageError, match="nothing would be left"):
        laplace_units(768, 1e-6, 0.0)
    with pytest.raises(UsageError, match="nothing would be left"):
        gaussian_units(1e-8, 1e-12)
