"""A column's values as classes to be told from a text, numbers cut into ranges."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tightlip.core.errors import UsageError

LEFT_OUT = -1
_MOST_NUMBERS = 20


@dataclass(frozen=True)
class Categories:
    """A column as classes: their names, and each row's class by number."""

    names: list[str]
    ids: np.ndarray

    def chosen(self, places: np.ndarray) -> "Categories":
        return Categories(self.names, self.ids[places])


def categories(values: Sequence[Any], column: str, cut: str | None = None) -> Categories:
    """A column's values as classes; what is null, or in no range of `cut`, is left out.

    >>> categories(["b", None, "a"], "x").ids.tolist()
    [1, -1, 0]
    >>> categories([18, 25, 40], "age", "..19,30..").ids.tolist()
    [0, -1, 1]
    """
    if cut is not None:
        return _binned(values, column, cut)
    numbers = [_number(value) for value in values if value is not None]
    distinct = {str(value) for value in values if value is not None}
    numeric = bool(numbers) and all(number is not None for number in numbers)
    if numeric and len(distinct) > _MOST_NUMBERS:
        raise UsageError(
            f"Column {column!r} has {len(distinct)} different numbers, which are no classes. Cut them: --bins "
            f"{column}=20,30 (at these points), or --bins {column}=..19,30.. (these ranges; what is between is left out)."
        )
    if len(distinct) > max(_MOST_NUMBERS, len(values) // 2):
        raise UsageError(
            f"Column {column!r} has {len(distinct)} different values in {len(values)} rows, so there is nothing to learn "
            "of most. Name a column of classes."
        )
    names = sorted(distinct, key=(lambda name: float(name)) if numeric else None)  # type: ignore[arg-type]
    places = {name: place for place, name in enumerate(names)}
    ids = [LEFT_OUT if value is None else places[str(value)] for value in values]
    return Categories(names, np.array(ids, np.int64))


def _binned(values: Sequence[Any], column: str, cut: str) -> Categories:
    ranges = list(_ranges(column, cut))
    ids = []
    for value in values:
        number = None if value is None else _number(value)
        if value is not None and number is None:
            raise UsageError(f"Column {column!r} has {value!r}, which is no number to cut at.")
        inside = [
            place
            for place, (_, low, high) in enumerate(ranges)
            if number is not None and low <= number <= high
        ]
        ids.append(inside[0] if inside else LEFT_OUT)
    return Categories([name for name, _, _ in ranges], np.array(ids, np.int64))


def _ranges(column: str, cut: str) -> Iterator[tuple[str, float, float]]:
    """The ranges that `cut` names, with their lowest and highest number."""
    words = [word.strip() for word in cut.split(",")]
    try:
        if any(".." in word for word in words):
            ends = [word.partition("..") for word in words]
            found = [
                (word, float(low or "-inf"), float(high or "inf"))
                for word, (low, _, high) in zip(words, ends, strict=True)
            ]
        else:
            points = [float("-inf"), *sorted(map(float, words)), float("inf")]
            found = [
                (_between(low, high), low, math.nextafter(high, -math.inf))
                for low, high in pairwise(points)
            ]
    except ValueError as error:
        raise UsageError(
            f"bins={column}={cut!r} is not understood. Write cut points, {column}=20,30, or ranges, {column}=..19,30.."
        ) from error
    yield from found


def _between(low: float, high: float) -> str:
    words = (
        f"from {low:g}" if low > -math.inf else "",
        f"below {high:g}" if high < math.inf else "",
    )
    return " ".join(filter(None, words))


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return (
        float(value) if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?", value) else None
    )
