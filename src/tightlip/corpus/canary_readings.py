"""Which values a text may have been made from: mostly one set, sometimes several, often none.

With the names Ann, Bob Cy, Ann Bob and Cy, "Ann Bob Cy" is `{names} {names}` in two ways.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from tightlip.corpus.canary_templates import Slot, Template

Numbers = dict[int, dict[str, list[int]]]  # by a value's length and the value: where it is listed


class Readings:
    """Takes texts apart as one template with its lists, one list for each place.

    Holds:
        every: the readings of a text are all ways to fill the template that spell it.
        plain: where `plain` is true no text has two readings.
    """

    def __init__(self, template: Template, lists: Sequence[Sequence[str]]) -> None:
        left = iter(lists)
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

    @property
    def plain(self) -> bool:
        """Whether it shows at once where each value ends: by its length, or by what follows it."""
        parts = list(pairwise([*self._parts, ""]))
        return all(
            isinstance(part, str)
            or (_differ(part) and (number == self._last or _ends_clearly(part, after)))
            for number, (part, after) in enumerate(parts)
        )


def _numbered(values: Sequence[str]) -> Numbers:
    found: Numbers = defaultdict(dict)
    for number, value in enumerate(values):
        found[len(value)].setdefault(value, []).append(number)
    return dict(found)


def _differ(values: Numbers) -> bool:
    return all(len(numbers) == 1 for alike in values.values() for numbers in alike.values())


def _ends_clearly(values: Numbers, after: str | Numbers) -> bool:
    if len(values) == 1:
        return True
    return isinstance(after, str) and not any(
        after[0] in value for alike in values.values() for value in alike
    )
