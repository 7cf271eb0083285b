"""Figures of a guarantee as people read them."""

import math
from typing import Any


def rounded_up(epsilon: float) -> str:
    """Two decimals, or two figures below 0.1; never less than what was spent.

    >>> rounded_up(3.5811), rounded_up(0.01234), rounded_up(0.0)
    ('3.59', '0.013', '0.00')
    """
    if math.isinf(epsilon):
        return "∞"
    digits = 2 if epsilon >= 0.1 or epsilon == 0 else 1 - math.floor(math.log10(epsilon))
    # Decimals such as 2.3 are stored a hair off; that hair is not spent privacy.
    return f"{math.ceil(epsilon * 10**digits - 1e-9) / 10**digits:.{digits}f}"


def shown_epsilon(guarantee: dict[str, Any]) -> str:
    """A record's ε. That of adaptive DP as published comes rounded up to three figures, and more
    of them would only look exact.

    >>> shown_epsilon({"epsilon": 19.8, "adaptive": {"mode": "as-published"}})
    '19.8'
    >>> shown_epsilon({"epsilon": 19.8})
    '19.80'
    """
    epsilon = guarantee["epsilon"]
    mode = (guarantee.get("adaptive") or {}).get("mode")
    if mode == "as-published" and epsilon == float(f"{epsilon:.3g}"):
        return f"{epsilon:,.10g}"
    return rounded_up(epsilon)
