"""From a probability to tries: how often one must ask before a text has come out."""

import math

import numpy as np

EVEN, NEARLY = 0.5, 0.9  # the chances that tries are counted for
# Windows and people are counted that come out within so many tries.
WITHIN = tuple(10**place for place in range(10))
# Of windows that the reference draws too, those count that it draws so much more seldom.
TIMES_DEARER = 10


def queries_for(share: float, log_probs: np.ndarray | float) -> np.ndarray:
    """Tries after which a text of each probability has come out with the chance `share`.

    Infinite where the probability is 0, or so small that float64 cannot count them.

    Holds:
        closed_form: the least n with 1 - (1 - P)^n at least `share`.

    >>> queries_for(0.5, np.log([1.0, 0.5, 0.005])).tolist()
    [1.0, 1.0, 139.0]
    """
    log_probs = np.minimum(np.asarray(log_probs, np.float64), 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        # Of a small P, log1p(-P) is -P, which float64 no longer holds below e^-745.
        misses = np.log1p(-np.exp(log_probs))
        tries = np.where(
            log_probs > -30, math.log1p(-share) / misses, -math.log1p(-share) * np.exp(-log_probs)
        )
    # A hair less: of e^log(0.5) the quotient is a hair above 1, and 2 would be too many.
    return np.asarray(np.maximum(np.ceil(tries * (1 - 1e-12)), 1.0))
