"""Numbers of settings, checked against their ranges."""

import math
from typing import Any

from tightlip.core.errors import UsageError


def check_range(
    settings: Any,
    name: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """Refuse a number out of its range; None is no number and passes."""
    value = getattr(settings, name)
    if value is None:
        return
    low = at_least is not None and not value >= at_least
    low = low or (above is not None and not value > above)
    high = below is not None and not value < below
    high = high or (at_most is not None and not value <= at_most)
    if low or high or not math.isfinite(value):
        bounds = {"at least": at_least, "above": above, "below": below, "at most": at_most}
        wanted = " and ".join(f"{word} {b}" for word, b in bounds.items() if b is not None)
        raise UsageError(f"{name}={value:g} is out of range. It must be {wanted or 'finite'}.")
