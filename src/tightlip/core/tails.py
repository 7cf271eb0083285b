"""How far into the tails of resampled users a 95% interval goes."""

import math

LEFT_OUT = 0.05  # what lies outside a 95% interval


def tail_share(num_users: int, num_groups: int = 1) -> float:
    """The share beyond each end; `num_groups` of users are drawn separately.

    Percentiles of few users' draws are too narrow; these go further out (Hesterberg 2015).

    >>> [round(tail_share(n), 4) for n in (5, 20, 100, 10_000)]
    [0.001, 0.0159, 0.0231, 0.025]
    """
    from scipy.special import ndtr, stdtrit

    freedom = num_users - num_groups
    student = stdtrit(freedom, 1 - LEFT_OUT / 2)
    return float(ndtr(-math.sqrt(num_users / freedom) * student))
