import json
import math

import pytest

from tightlip.core.errors import UsageError
from tightlip.vectors.guarantees import (
    ANY_TWO,
    ONE_WORD,
    VectorMechanism,
    cost_of_releases,
    cost_of_texts,
    cost_record,
)
from tightlip.vectors.settings import MECHANISMS
from tightlip.vectors.vector_accounting import GRID_STEP, gaussian_epsilon, laplace_epsilon

FIGURES = ("per_coordinate", "pure", "epsilon", "delta")


def published(**changed):
    given = {"mechanism": "laplace-as-published", "dimensions": 384, "epsilon": 0.05}
    return VectorMechanism(**given | changed)


def figures(record):
    return tuple(record[name] for name in FIGURES)


def test_the_published_epsilon_stands_beside_what_holds_for_the_vector():
    record = published().record()
    assert figures(record) == (0.05, 19.2, pytest.approx(4.2154, abs=1e-4), 1e-5)
    assert record["noise_scale"] == 20
    assert record["standing"] == "as published"
    assert record["standings"] == {
        "per_coordinate": "as published",
        "pure": "proved",
        "epsilon": "proved",
    }
    assert "one coordinate" in record["because"]
    assert record["adjacency"] == ANY_TWO
    wider = published(dimensions=768).record()
    assert (wider["pure"], round(wider["epsilon"], 2)) == (38.4, 6.34)


def test_dropout_amplifies_each_line_after_composing_and_says_for_which_texts():
    record = published(dropout=0.5).record()
    plain = published().record()
    halved = [math.log((1 + math.exp(plain[name])) / 2) for name in ("per_coordinate", "pure")]
    assert figures(record)[:2] == pytest.approx(halved)
    assert record["epsilon"] == pytest.approx(3.38, abs=0.005)
    assert "differ in one word" in record["adjacency"]
    assert figures(record["any_two_texts"]) == figures(plain)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_sound_mechanisms_spend_what_was_asked_for_the_whole_vector(mechanism, dropout):
    made = VectorMechanism(mechanism=mechanism, dimensions=32, epsilon=3.0, dropout=dropout)
    record = made.record()
    assert 2.999 < record["epsilon"] <= 3.0
    assert record["standing"] == "proved"
    assert record["noise_scale"] == made.grid_units * GRID_STEP
    less = VectorMechanism(
        mechanism=mechanism,
        dimensions=32,
        epsilon=3.0,
        dropout=dropout,
        units=round(0.99 * made.grid_units),
    )
    assert less.record()["epsilon"] > 3.0


def test_pure_laplace_has_the_scale_of_all_coordinates_together():
    made = VectorMechanism(mechanism="laplace", dimensions=100, epsilon=4.0, delta=0)
    assert made.noise_scale == 25
    assert figures(made.record()) == (0.04, 4.0, 4.0, 0)
    halved = VectorMechanism(mechanism="laplace", dimensions=100, epsilon=4.0, delta=0, dropout=0.5)
    assert halved.record()["pure"] == pytest.approx(4.0, rel=1e-5)
    assert halved.record()["pure"] <= 4.0


def test_gaussian_noise_promises_nothing_pure_and_needs_no_dimensions():
    few, many = (
        VectorMechanism(mechanism="gaussian", dimensions=size, epsilon=2.0) for size in (2, 768)
    )
    assert few.noise_scale == many.noise_scale
    assert figures(few.record())[:2] == (None, None)
    assert (few.normalisation, published().normalisation) == ("unit-ball", "unit-range")


def test_bare_vectors_promise_nothing():
    bare = VectorMechanism(mechanism="none", dimensions=8, epsilon=None)
    record = bare.record()
    assert figures(record) == (None, None, None, None)
    assert record["standing"] == "measured only"
    assert record["noise_scale"] == 0
    assert cost_of_releases(bare, 3)[0] == math.inf
    assert VectorMechanism.from_record(json.loads(json.dumps(record))) == bare


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_mechanism_comes_back_from_its_record_with_the_same_noise(mechanism, dropout):
    made = VectorMechanism(mechanism=mechanism, dimensions=16, epsilon=0.7, dropout=dropout)
    record = json.loads(json.dumps(made.record()))
    again = VectorMechanism.from_record(record)
    assert again == made
    assert again.grid_units == made.grid_units
    assert again.record() == record


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 0.5},
        {"pure": 1.0},
        {"per_coordinate": 0.01},
        {"delta": 1e-9},
        {"noise_scale": 10.0},
        {"noise_scale": 20.000001},
        {"noise_scale": 0.0},
        {"dimensions": 768},
        {"dropout": 0.1},
        {"target_epsilon": 0.001, "per_coordinate": 0.001},
        {"epsilon": float("nan")},
        {"epsilon": "0.05"},
        {"epsilon": None},
        {"grid_step": 0.5},
        {"mechanism": "magic"},
        {"mechanism": "gaussian"},
        {"dimensions": "384"},
        {"any_two_texts": {"per_coordinate": 0.05, "pure": 19.2, "epsilon": 0.1, "delta": 1e-5}},
        {"any_two_texts": None},
        {"adjacency": "any two texts"},
        {"unit": "one user"},
        {"standing": "certified"},
        {"standings": {"per_coordinate": "proved", "pure": "proved", "epsilon": "proved"}},
        {"covers": ["everything you ever send"]},
        {"outside": []},
        {"because": "trust me"},
        {"accountant": "exact"},
        {"normalisation": "none"},
        {"certified_epsilon": 0.1},
    ],
    ids=str,
)
def test_a_record_that_was_changed_to_promise_more_is_refused(change):
    record = published(dropout=0.2).record() | change
    with pytest.raises(UsageError):
        VectorMechanism.from_record(record)
    record.pop("noise_scale")
    with pytest.raises(UsageError):
        VectorMechanism.from_record(record)


@pytest.mark.parametrize(
    "change",
    [
        {"mechanism": "laplce"},
        {"dimensions": 0},
        {"epsilon": 0},
        {"epsilon": None},
        {"epsilon": math.inf},
        {"epsilon": math.nan},
        {"delta": -1e-5},
        {"delta": 1.0},
        {"delta": 0.6, "dropout": 0.5},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"dropout": math.nan},
        {"mechanism": "gaussian", "delta": 0},
        {"mechanism": "none"},
        {"epsilon": 1e-9},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(change):
    with pytest.raises(UsageError):
        published(**change).record()


def test_several_releases_cost_the_better_of_both_ways():
    made = published(dimensions=24, epsilon=0.5, dropout=0.9)
    once, how = cost_of_releases(made, 1)
    assert once == made.record()["epsilon"]
    assert "amplified" in how
    whole = [laplace_epsilon(made.grid_units, 24 * n, 1e-5) for n in (1, 2, 400)]
    added = [n * made.epsilon_of(1e-5 / n) for n in (1, 2, 400)]
    found = [cost_of_releases(made, n) for n in (1, 2, 400)]
    assert [cost for cost, _ in found] == [min(pair) for pair in zip(whole, added, strict=True)]
    assert whole[0] > added[0]
    assert whole[2] < added[2]
    assert ANY_TWO in found[2][1]


def test_another_release_never_costs_less():
    for made in (
        published(dimensions=16, dropout=0.5),
        published(mechanism="gaussian", epsilon=2.0),
    ):
        costs = [cost_of_releases(made, n)[0] for n in (1, 2, 3, 10, 50)]
        assert costs == sorted(costs)
    sigma = published(mechanism="gaussian", epsilon=2.0)
    assert cost_of_releases(sigma, 7)[0] == gaussian_epsilon(sigma.grid_units, 1e-5, 7)
    with pytest.raises(UsageError, match="1 or more"):
        cost_of_releases(sigma, 0)


def test_each_field_of_a_record_is_needed():
    record = published(dropout=0.2).record()
    for name in record:
        with pytest.raises(UsageError):
            VectorMechanism.from_record({key: record[key] for key in record if key != name})


def test_figures_that_are_higher_than_they_need_be_are_believed():
    record = published(dropout=0.2).record()
    higher = record | {"epsilon": record["epsilon"] + 1, "pure": record["pure"] + 1}
    assert VectorMechanism.from_record(higher) == published(dropout=0.2)


def test_figures_for_any_two_texts_are_never_those_that_masks_amplified():
    made = published(dropout=0.5)
    record = made.record() | {"any_two_texts": made.figures(dropout=True)}
    with pytest.raises(UsageError, match="claims"):
        VectorMechanism.from_record(record)


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 0.1},
        {"any_two_texts": 0.1},
        {"releases": 2},
        {"releases": "5"},
        {"releases": 0},
        {"delta": 1e-9},
        {"how": "added"},
        {"adjacency": ANY_TWO},
        {"certified": True},
    ],
    ids=str,
)
def test_what_a_record_says_of_several_releases_is_checked(change):
    made = published(dimensions=24, epsilon=0.3, dropout=0.95)
    told = cost_record(made, 5)
    assert VectorMechanism.from_record(made.record() | {"releases": [told]}) == made
    with pytest.raises(UsageError):
        VectorMechanism.from_record(made.record() | {"releases": [told | change]})
    with pytest.raises(UsageError):
        VectorMechanism.from_record(made.record() | {"releases": 5})


def test_what_several_vectors_cost_says_for_which_texts():
    made = published(dimensions=24, epsilon=0.3, dropout=0.95)
    for number in (1, 5):
        told = cost_record(made, number)
        assert told["adjacency"] == ONE_WORD
        assert "differ in one word" in told["how"]
        assert told["any_two_texts"] == laplace_epsilon(made.grid_units, 24 * number, 1e-5)
        assert told["any_two_texts"] > told["epsilon"]
    many = cost_record(published(dimensions=24, epsilon=0.5, dropout=0.9), 400)
    assert many["adjacency"] == ANY_TWO
    assert many["epsilon"] == many["any_two_texts"]


def test_texts_of_one_person_cost_what_any_texts_do_masked_or_not():
    masked, plain = (published(dimensions=24, epsilon=0.5, dropout=share) for share in (0.5, 0.0))
    assert cost_of_texts(masked, 5) == cost_of_texts(plain, 5) == cost_of_releases(plain, 5)[0]
    assert (
        cost_of_texts(VectorMechanism(mechanism="none", dimensions=2, epsilon=None), 2) == math.inf
    )
