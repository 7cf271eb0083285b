"""What decides how private vectors are trained, checked before any work."""

import math
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.registry import unknown
from tightlip.core.settings import check_range

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
            f"Column {column!r} has {len(distinct)} different numbers, which are no classes. Cut them: --bins "
            f"{column}=20,30 (at these points), or --bins {column}=..19,30.. (these ranges; what is between is left out)."
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
        number = None if _is_empty(value) else _number(value)
        if number is None and not _is_empty(value):
            raise UsageError(f"Column {column!r} has {value!r}, which is no number to cut at.")
        inside = [
            place
            for place, (_, low, high) in enumerate(ranges)
            if number is not None and low <= number <= high
        ]
        ids.append(inside[0] if inside else LEFT_OUT)
    return Categories([name for name, _, _ in ranges], np.array(ids, np.int64))


def ranges_of(column: str, cut: str) -> list[tuple[str, float, float]]:
    """The ranges that `cut` names, with their lowest and highest number.

    Holds:
        apart: no number is in two of them, and none is without a number.
    """
    words = [word.strip() for word in cut.split(",")]
    try:
        found = list(_named(words) if ".." in cut else _cut_at(words))
    except ValueError as error:
        raise UsageError(
            f"bins={column}={cut!r} is not understood. Write cut points, {column}=20,30, or ranges, {column}=..19,30.."
        ) from error
    _check_apart(column, cut, found)
    return found


def _named(words: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    for word in words:
        low, dots, high = word.partition("..")
        if not dots:
            raise ValueError(word)
        yield (
            word,
            _finite(low) if low.strip() else -math.inf,
            _finite(high) if high.strip() else math.inf,
        )


def _cut_at(words: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    points = [-math.inf, *sorted(map(_finite, words)), math.inf]
    for low, high in pairwise(points):
        yield _between(low, high), low, math.nextafter(high, -math.inf)


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


def _between(low: float, high: float) -> str:
    words = (
        f"from {low:g}" if low > -math.inf else "",
        f"below {high:g}" if high < math.inf else "",
    )
    return " ".join(filter(None, words))


def _is_empty(value: Any) -> bool:
    """Whether a cell says nothing: null, blank, or not a number where there are numbers."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float | np.floating) and math.isnan(value))


def span_of(values: Sequence[Any]) -> tuple[float, float] | None:
    """The lowest and the highest number of a column; None where it has none."""
    numbers = [_number(value) for value in values if not _is_empty(value)]
    known = [number for number in numbers if number is not None]
    return (min(known), max(known)) if known else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return (
        float(value) if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?", value) else None
    )


# What decides how private vectors are trained, checked before any work


# As in tightlip.models.configurations, which would load torch: a refusal should not wait for it.
NEW_EXTRACTORS = ("lstm", "bag")
METHODS = ("dpnr", "none", "adversarial")
MECHANISMS = ("laplace-as-published", "laplace", "gaussian")
SPLITS = ("document", "user", "column")
POOLINGS = ("cls", "mean")
# What only one method uses.
_NOISE = ("epsilon", "mechanism")
_ADVERSARY = ("adversary_weight", "adversary_hidden", "adversary_steps")
_SHAPE = ("dimensions", "vocabulary_size")
_DEFAULT_MECHANISM = "gaussian"
# A new encoder learns fast; fine-tuning faster than this forgets what the encoder knew.
_RATES = {"new": 5e-3, "given": 3e-5}


class _Settings:
    """A frozen dataclass that a table of config.toml can spell."""

    @classmethod
    def from_tree(cls, tree: dict[str, Any], where: str) -> Self:
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in tree:
            if name not in known:
                raise UsageError(f"{where}: {unknown('setting', name, known)}")
        return cls(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in tree.items()
            }
        )

    def tree(self) -> dict[str, Any]:
        """The settings that have a value, as TOML has them."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()  # type: ignore[call-overload]
            if value is not None and value != ()
        }


@dataclass(frozen=True, kw_only=True)
class RepresentSettings(_Settings):
    """Everything that decides what the two halves become.

    `label` is the column to be told from a text, `private` those that nobody else should tell.
    `extractor` is lstm, bag or the folder of a Hugging Face encoder; `dimensions` and
    `vocabulary_size` shape a new one. Method dpnr trains through the noise of `mechanism` at
    `epsilon` and `delta`; none without any; adversarial against classifiers of the private
    columns, weighed by `adversary_weight`. `dropout` is the share of words masked in each text.

    `bins` cuts a column of numbers: "age=20,30" at these points, "age=..19,30.." into these
    ranges, what lies between them left out. `split` says what is kept together when 8 of 10
    parts go to training: documents that read the same, all documents of a user, or what the
    column `split_column` says (train, dev, test).
    """

    table: typing.ClassVar[str] = "represent"

    label: str
    private: tuple[str, ...] = ()
    extractor: str = "lstm"
    method: str = "dpnr"
    mechanism: str | None = None  # gaussian under dpnr
    epsilon: float | None = None
    delta: float = 1e-5
    dropout: float = 0.0
    pooling: str | None = None
    max_tokens: int | None = None
    dimensions: int | None = None
    vocabulary_size: int | None = None
    hidden: int = 0
    epochs: int = 4
    batch_size: int = 32
    learning_rate: float | None = None
    classifier_learning_rate: float = 5e-3
    noise_draws: int = 8
    freeze: bool = False
    split: str = "document"
    split_column: str = "split"
    split_seed: int = 0
    bins: tuple[str, ...] = ()
    adversary_weight: float | None = None
    adversary_hidden: int | None = None
    adversary_steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._fill()
        for name, allowed in (("method", METHODS), ("split", SPLITS)):
            if getattr(self, name) not in allowed:
                raise UsageError(unknown(name, getattr(self, name), list(allowed)))
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise UsageError(unknown("pooling", self.pooling, list(POOLINGS)))
        self._check_columns()
        self._check_numbers()
        self._check_method()
        self._check_extractor()

    def _fill(self) -> None:
        """Put in what follows from the rest, so that a run's config says all there is."""
        filled: dict[str, Any] = {}
        if self.method == "dpnr" and self.mechanism is None:
            filled["mechanism"] = _DEFAULT_MECHANISM
        if self.learning_rate is None:
            filled["learning_rate"] = _RATES["new" if self.is_new else "given"]
        if self.is_new and self.vocabulary_size is None:
            filled["vocabulary_size"] = 10_000
        if self.method == "adversarial":
            defaults = {"adversary_weight": 3.0, "adversary_hidden": 512, "adversary_steps": 3}
            filled |= {name: v for name, v in defaults.items() if getattr(self, name) is None}
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    @property
    def is_new(self) -> bool:
        """Whether the extractor is made here and not read from a folder."""
        return self.extractor in NEW_EXTRACTORS

    def _check_columns(self) -> None:
        if not self.label:
            raise UsageError("label='' names no column. Give the column to classify by: --label")
        if self.label in self.private:
            raise UsageError(
                f"{self.label!r} is both the label, which the server should tell, and private, which nobody should. "
                "Name another column in one of them."
            )
        if len(set(self.private)) != len(self.private) or "" in self.private:
            raise UsageError(
                f"private={','.join(self.private)} names a column twice, or none. Name each once: --private age,gender"
            )
        self._check_bins()

    def _check_bins(self) -> None:
        cut_before: set[str] = set()
        for given in self.bins:
            column, says, cut = given.partition("=")
            if column not in (self.label, *self.private):
                raise UsageError(
                    f"bins={given!r} cuts a column that is neither the label nor private. Write it as COLUMN=20,30 with "
                    f"one of: {', '.join((self.label, *self.private))}."
                )
            if not says:
                raise UsageError(
                    f"bins={given!r} does not say where to cut. Write cut points, {column}=20,30, or ranges, "
                    f"{column}=..19,30.."
                )
            if column in cut_before:
                raise UsageError(
                    f"bins cuts {column} twice. Put all its points in one: --bins {column}=20,30"
                )
            cut_before.add(column)
            ranges_of(column, cut)

    def _check_numbers(self) -> None:
        for name in (
            "epochs",
            "batch_size",
            "noise_draws",
            "max_tokens",
            "dimensions",
            "adversary_steps",
        ):
            check_range(self, name, at_least=1)
        for name in ("hidden", "seed", "split_seed", "dropout", "adversary_weight"):
            check_range(self, name, at_least=0)
        for name in ("learning_rate", "classifier_learning_rate", "epsilon"):
            check_range(self, name, above=0)
        check_range(self, "adversary_hidden", at_least=1)
        check_range(self, "delta", at_least=0, below=1)
        check_range(self, "dropout", below=1)
        if self.dimensions == 1:
            raise UsageError("dimensions=1 leaves nothing after scaling to [0, 1]. Use 2 or more.")

    def _check_method(self) -> None:
        unused = {
            "dpnr": _ADVERSARY,
            "none": (*_NOISE, *_ADVERSARY),
            "adversarial": _NOISE,
        }[self.method]
        for name in unused:
            if getattr(self, name) is not None:
                raise UsageError(
                    f"{name}={getattr(self, name)} means nothing to method={self.method!r}. Leave it out, or choose "
                    f"another --method: {', '.join(METHODS)}."
                )
        if self.method == "dpnr" and self.mechanism not in MECHANISMS:
            raise UsageError(unknown("mechanism", str(self.mechanism), list(MECHANISMS)))
        if self.method == "dpnr" and self.epsilon is None:
            raise UsageError(
                "method='dpnr' needs to know how much noise: give --epsilon, such as 8 (the whole vector's, under "
                "gaussian and laplace). For vectors without noise: --method none"
            )
        if self.method == "adversarial" and not self.private:
            raise UsageError(
                "method='adversarial' trains against readers of private columns, and none is named. Add --private."
            )

    def _check_extractor(self) -> None:
        if self.is_new:
            if self.freeze:
                raise UsageError(
                    f"freeze keeps an extractor as it is, and a new {self.extractor} knows nothing yet. Give a trained "
                    "encoder's folder, or leave freeze out."
                )
            return
        for name in _SHAPE:
            # What is no folder is a slip of the pen, and told as one when it is to be opened.
            if getattr(self, name) is not None and Path(self.extractor).is_dir():
                raise UsageError(
                    f"{name}={getattr(self, name)} shapes a new extractor, and {self.extractor} has a shape of its own. "
                    "Leave it out."
                )
        if self.freeze and self.method == "adversarial":
            raise UsageError(
                "method='adversarial' changes the extractor, and freeze keeps it. Leave one of them out."
            )


@dataclass(frozen=True, kw_only=True)
class RepresentOptions(_Settings):
    """How the work is done; none of it changes what is learnt on a CPU."""

    table: typing.ClassVar[str] = "options"

    device: str = "auto"
    bf16: bool = False
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_range(self, "checkpoint_seconds", at_least=0)
