"""A column as classes: its values as they are, or its numbers cut into ranges."""

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
    """A column's values as classes; what is empty, or in no range of `cut`, is left out.

    >>> categories(["b", None, "a"], "x").ids.tolist()
    [1, -1, 0]
    >>> categories([18, 25, 40], "age", "..19,30..").ids.tolist()
    [0, -1, 1]
    """
    if cut is not None:
        return _binned(values, column, cut)
    given = [value for value in values if not _is_empty(value)]
    distinct = {str(value) for value in given}
    numeric = bool(given) and all(_number(value) is not None for value in given)
    if numeric and len(distinct) > _MOST_NUMBERS:
        raise UsageError(
            f"Column {column!r} has {len(distinct)} different numbers, which are no classes. Cut them by bins: "
            f"{column}=20,30 (at these points), or {column}=..19,30.. (these ranges; what is between is left out)."
        )
    if len(distinct) > max(_MOST_NUMBERS, len(given) // 2):
        raise UsageError(
            f"Column {column!r} has {len(distinct)} different values in {len(given)} rows, so there is nothing to learn "
            "of most. Name a column of classes."
        )
    names = sorted(distinct, key=(lambda name: float(name)) if numeric else None)  # type: ignore[arg-type]
    places = {name: place for place, name in enumerate(names)}
    ids = [LEFT_OUT if _is_empty(value) else places[str(value)] for value in values]
    return Categories(names, np.array(ids, np.int64))


def _binned(values: Sequence[Any], column: str, cut: str) -> Categories:
    ranges = ranges_of(column, cut)
    ids = []
    for value in values:
        number = math.nan if _is_empty(value) else _number(value)
        if number is None:
            raise UsageError(f"Column {column!r} has {value!r}, which is no number to cut at.")
        inside = [place for place, (_, low, high) in enumerate(ranges) if low <= number <= high]
        ids.append(inside[0] if inside else LEFT_OUT)
    return Categories([name for name, _, _ in ranges], np.array(ids, np.int64))


def ranges_of(column: str, cut: str) -> list[tuple[str, float, float]]:
    """The ranges that `cut` names, with their lowest and highest number.

    Holds:
        apart: no number is in two of them, and none is without a number.
    """
    words = [word.strip() for word in cut.split(",")]
    try:
        ranges = list(_named(words) if ".." in cut else _cut_at(words))
    except ValueError as error:
        raise UsageError(
            f"bins={column}={cut!r} is not understood. Write cut points, {column}=20,30, or ranges, {column}=..19,30.."
        ) from error
    _check_apart(column, cut, ranges)
    return ranges


def _named(words: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    for word in words:
        low, dots, high = word.partition("..")
        if not dots:
            raise ValueError(word)
        lowest = _finite(low) if low.strip() else -math.inf
        yield word, lowest, _finite(high) if high.strip() else math.inf


def _cut_at(words: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    for low, high in pairwise([-math.inf, *sorted(map(_finite, words)), math.inf]):
        start = f"from {low:g}" if low > -math.inf else ""
        end = f" below {high:g}" if high < math.inf else ""
        yield (start + end).strip(), low, math.nextafter(high, -math.inf)


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(word)
    return number


def _check_apart(column: str, cut: str, ranges: Sequence[tuple[str, float, float]]) -> None:
    given = f"bins={column}={cut!r}"
    for name, low, high in ranges:
        if low > high and ".." not in cut:
            raise UsageError(
                f"{given} names {low:g} twice, and nothing lies between. Name each point once."
            )
        if low > high:
            raise UsageError(f"{given}: {name} holds no number. Write the lower end first.")
    for (name, _, high), (other, low, _) in pairwise(sorted(ranges, key=lambda each: each[1:])):
        if low <= high:
            raise UsageError(
                f"{given}: {name} and {other} overlap, and a range holds both its ends. Let each begin above the one "
                "before."
            )


def _is_empty(value: Any) -> bool:
    """Whether a cell says nothing: null, blank, or not a number where there are numbers."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float | np.floating) and math.isnan(value))


def span_of(values: Sequence[Any]) -> tuple[float, float] | None:
    """The lowest and the highest number of a column; None where it has none."""
    known = [n for v in values if not _is_empty(v) and (n := _number(v)) is not None]
    return (min(known), max(known)) if known else None


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return float(value) if re.fullmatch(r"-?\d+(\.\d+)?", value) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None
