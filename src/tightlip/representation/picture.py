"""A picture of vectors: t-SNE's two coordinates for each, before and after the noise.

Such pictures show clusters and invite stories; the attackers' figures are what counts.
"""

from typing import Any

import numpy as np

from tightlip.representation.attackers import sklearn_part

MOST_POINTS = 500
FIRST_DIMENSIONS = 50  # principal components, as the method's authors advise
FEWEST_POINTS = 8


def chosen_rows(num_rows: int, *, most: int = MOST_POINTS, seed: int = 0) -> np.ndarray:
    """Which rows are drawn: all, or `most` of them at random, in order."""
    if num_rows <= most:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, most, replace=False))


def flat_places(vectors: np.ndarray, *, seed: int = 0) -> np.ndarray | None:
    """Two coordinates between 0 and 1 for each vector; null where too few differ.

    Holds:
        same_again: one seed gives one picture.
        apart: well separated clusters stay apart.
    """
    vectors = np.asarray(vectors, dtype=np.float64)
    # Equal vectors share a place. scikit-learn's t-SNE crashes on vectors that are all equal.
    vectors, place_of = np.unique(vectors, axis=0, return_inverse=True)
    if len(vectors) < FEWEST_POINTS:
        return None
    vectors = (vectors - vectors.mean(axis=0)) / vectors.std()
    most = min(FIRST_DIMENSIONS, *vectors.shape)
    decomposition: Any = sklearn_part("decomposition")
    if most < vectors.shape[1]:
        vectors = decomposition.PCA(most, random_state=seed).fit_transform(vectors)
    placed = sklearn_part("manifold").TSNE(
        n_components=2,
        init="pca",
        learning_rate="auto",
        perplexity=min(30.0, (len(vectors) - 1) / 3),
        random_state=seed,
    )
    return between_0_and_1(placed.fit_transform(vectors))[place_of.reshape(-1)]


def between_0_and_1(places: np.ndarray) -> np.ndarray:
    """The same picture, each axis stretched to fill its frame."""
    low, high = places.min(axis=0), places.max(axis=0)
    return np.round((places - low) / np.where(high > low, high - low, 1), 4)
