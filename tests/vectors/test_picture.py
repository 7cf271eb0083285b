"""A picture's places: the same again, inside the frame, clusters apart."""

from functools import partial

import numpy as np

from tightlip.vectors import attack

chosen_rows, flat_places = partial(attack.chosen_rows, seed=0), partial(attack.flat_places, seed=0)


def two_clusters(num=60, dimensions=80):
    rng = np.random.default_rng(0)
    side = np.arange(num) % 2
    return side, rng.standard_normal((num, dimensions)) + 20 * side[:, None]


def test_clusters_stay_apart_and_the_picture_is_the_same_again():
    side, vectors = two_clusters()
    places = flat_places(vectors)
    centres = [places[side == one].mean(axis=0) for one in (0, 1)]
    spread = max(places[side == one].std(axis=0).max() for one in (0, 1))
    assert np.linalg.norm(centres[0] - centres[1]) > 2 * spread
    np.testing.assert_array_equal(places, flat_places(vectors))
    assert places.min() == 0
    assert places.max() == 1


def test_too_few_different_vectors_have_no_picture():
    assert flat_places(np.zeros((3, 4))) is None
    assert flat_places(np.zeros((20, 4))) is None


def test_equal_vectors_share_a_place():
    _, vectors = two_clusters()
    places = flat_places(np.concatenate([vectors, vectors[:10]]))
    np.testing.assert_array_equal(places[:10], places[60:])


def test_of_many_rows_some_are_drawn_in_order():
    assert chosen_rows(5).tolist() == [0, 1, 2, 3, 4]
    some = chosen_rows(5000, most=100)
    assert len(set(some.tolist())) == 100
    assert (np.diff(some) > 0).all()
