"""What a canary reads: a template whose slots are filled from lists of values, and back again.

`{digits:6}` is six places, each a digit; `{words:5}` five places with a space between them,
each a word of a list; `{names}` one place, a name of a list. A text may have been made from one
set of values, mostly, from several, or from none: `Readings` tells.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.registry import unknown

Pools = Mapping[str, Sequence[str]]
DIGIT_POOL = tuple("0123456789")
_SLOT = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")
_BETWEEN = {"digits": "", "words": " ", "names": " "}
MOST_PLACES = 64
Numbers = dict[int, dict[str, list[int]]]  # by a value's length and the value: where it is listed


@dataclass(frozen=True)
class Slot:
    """One place of a template: the name of the list that its value comes from."""

    pool: str


@dataclass(frozen=True)
class Template:
    """A template taken apart: literal text and places, in order."""

    text: str
    parts: tuple[str | Slot, ...]

    @property
    def places(self) -> tuple[str, ...]:
        """The list that each place draws from."""
        return tuple(part.pool for part in self.parts if isinstance(part, Slot))

    def filled(self, values: Sequence[str]) -> str:
        """The text with these values in its places.

        >>> read_template("My ID is {digits:3}.").filled("042")
        'My ID is 042.'
        """
        assert len(values) == len(self.places), (self.text, values)
        left = iter(values)
        return "".join(next(left) if isinstance(part, Slot) else part for part in self.parts)

    def num_candidates(self, pools: Pools) -> int:
        """In how many ways the places can be filled."""
        return math.prod(len(pools[name]) for name in self.places)

    def readings(self, pools: Pools) -> "Readings":
        return Readings(self, [pools[name] for name in self.places])

    def drawn(
        self, num_canaries: int, pools: Pools, taken: set[str], draw: np.random.Generator
    ) -> list[tuple[str, ...]]:
        """Values of so many canaries; what they read is new, and is `taken` from now on."""
        self._check_room(num_canaries, pools)
        readings = self.readings(pools)
        chosen: list[tuple[str, ...]] = []
        lists = [pools[name] for name in self.places]
        while len(chosen) < num_canaries:
            values = tuple(values[int(draw.integers(len(values)))] for values in lists)
            text = self.filled(values)
            num_ways = len(readings.of(text))
            # A text that can be filled in two ways would come up twice as often as others.
            if text not in taken and (num_ways == 1 or draw.random() < 1 / num_ways):
                taken.add(text)
                chosen.append(values)
        return chosen

    def _check_room(self, num_canaries: int, pools: Pools) -> None:
        if (space := self.num_candidates(pools)) < 2 * num_canaries:
            raise UsageError(
                f"Template {self.text!r} can be filled in {space:,} ways, too few for {num_canaries:,} canaries that must "
                "differ and leave as many decoys. Use more or larger slots."
            )


def read_template(text: str) -> Template:
    """`text` taken apart, or a refusal that names the slot at fault."""
    parts: list[str | Slot] = []
    end = 0
    for match in _SLOT.finditer(text):
        parts += [text[end : match.start()], *_places(match, text)]
        end = match.end()
    parts.append(text[end:])
    literals = [part for part in parts if isinstance(part, str)]
    if any(brace in literal for literal in literals for brace in "{}"):
        raise UsageError(
            f"Template {text!r} has a brace that belongs to no slot. Slots: {{digits:6}}, {{words:5}}, {{names}}."
        )
    if len(literals) == len(parts):
        raise UsageError(
            f"Template {text!r} has no slot, so every canary would read alike. Add one: {{digits:6}}, {{words:5}} or {{names}}."
        )
    return Template(text, tuple(part for part in parts if part != ""))


def _places(match: re.Match[str], text: str) -> list[str | Slot]:
    pool, given = match[1], match[2]
    if pool not in _BETWEEN:
        raise UsageError(f"Template {text!r}: {unknown('slot', pool, sorted(_BETWEEN))}")
    if given is None and pool != "names":
        raise UsageError(
            f"Template {text!r}: {match[0]} does not say how many. Write {{{pool}:6}}."
        )
    if given is not None and not (given.isdecimal() and 1 <= int(given) <= MOST_PLACES):
        raise UsageError(
            f"Template {text!r}: {given!r} is not a number from 1 to {MOST_PLACES}. Write {{{pool}:6}}."
        )
    places: list[str | Slot] = [Slot(pool)]
    for _ in range(int(given or 1) - 1):
        places += [_BETWEEN[pool], Slot(pool)]
    return places


class Readings:
    """Takes texts apart as one template with its lists, one list for each place.

    Holds:
        every: the readings of a text are all ways to fill the template that spell it.
        once: `num_texts` counts a text once, in however many ways it can be filled.
        plain: where `plain` is true no text has two readings.
    """

    def __init__(self, template: Template, lists: Sequence[Sequence[str]]) -> None:
        left = iter(lists)
        self._num_ways = math.prod(map(len, lists))
        self._parts = [_numbered(next(left)) if isinstance(p, Slot) else p for p in template.parts]
        self._last = max(n for n, part in enumerate(self._parts) if not isinstance(part, str))

    def of(self, text: str) -> list[tuple[int, ...]]:
        """Of each reading of `text`, the number of the value in each place."""
        return self._from(0, text)

    def _from(self, number: int, text: str) -> list[tuple[int, ...]]:
        if number == len(self._parts):
            return [] if text else [()]
        part = self._parts[number]
        if isinstance(part, str):
            return self._from(number + 1, text[len(part) :]) if text.startswith(part) else []
        return [
            (here, *others)
            for length, values in part.items()
            for here in values.get(text[:length], ())
            for others in self._from(number + 1, text[length:])
        ]

    def num_texts(self) -> int:
        """How many different texts there are.

        Letter by letter, for each set of readings that are still open, how many beginnings have
        just these: every text is one beginning, and two ways to fill it are in the same set.
        """
        if self.plain:
            return self._num_ways
        beginnings = [_beginnings(part) for part in self._parts]
        end, total = (len(self._parts), ""), 0
        open_sets = {frozenset([(0, "")]): 1}
        while open_sets:
            total += sum(num for places, num in open_sets.items() if end in places)
            longer: dict[frozenset[tuple[int, str]], int] = defaultdict(int)
            for places, num in open_sets.items():
                for after in _by_letter(places, beginnings).values():
                    longer[frozenset(after)] += num
            open_sets = longer
        return total

    @property
    def plain(self) -> bool:
        """Whether it shows at once where each value ends: by its length, or by what follows it."""
        return all(
            isinstance(part, str)
            or (_differ(part) and (number == self._last or _ends_clearly(part, after)))
            for number, (part, after) in enumerate(pairwise([*self._parts, ""]))
        )


def _numbered(values: Sequence[str]) -> Numbers:
    numbers: Numbers = defaultdict(dict)
    for number, value in enumerate(values):
        numbers[len(value)].setdefault(value, []).append(number)
    return dict(numbers)


def _beginnings(part: str | Numbers) -> dict[str, tuple[set[str], bool]]:
    """Every beginning of a part's values: the letters that may follow, and whether it is a value."""
    values = {part} if isinstance(part, str) else {v for alike in part.values() for v in alike}
    found: dict[str, tuple[set[str], bool]] = defaultdict(lambda: (set(), False))
    for value in values:
        for length, letter in enumerate(value):
            found[value[:length]][0].add(letter)
        found[value] = (found[value][0], True)
    return dict(found)


def _by_letter(
    places: frozenset[tuple[int, str]], beginnings: list[dict[str, tuple[set[str], bool]]]
) -> dict[str, set[tuple[int, str]]]:
    """Where readings stand after one more letter; a value that ends there opens the next part."""
    after: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for number, before in places:
        if number == len(beginnings):
            continue
        for letter in beginnings[number][before][0]:
            letters, is_value = beginnings[number][before + letter]
            if letters:
                after[letter].add((number, before + letter))
            if is_value:
                after[letter].add((number + 1, ""))
    return after


def _differ(values: Numbers) -> bool:
    return all(len(numbers) == 1 for alike in values.values() for numbers in alike.values())


def _ends_clearly(values: Numbers, after: str | Numbers) -> bool:
    if len(values) == 1:
        return True
    return isinstance(after, str) and not any(
        after[0] in value for alike in values.values() for value in alike
    )
