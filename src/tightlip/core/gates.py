"""Gates: conditions on figures, such as 'unique>0', that decide whether a model may ship."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from typing import Any
from xml.etree import ElementTree

from tightlip.core.errors import UsageError
from tightlip.core.registry import unknown

BASELINE = "baseline"  # in the place of a limit: the same figure of an earlier record
_COMPARISONS = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}
Figures = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entries:
    """A figure that is a table: what its entries may be called, None for any number.

    An entry that is not there is `absent`: 0 where nothing was found is a known zero.
    """

    names: Collection[str] | None = None
    absent: int | None = None
    advice: str = ""


# What a gate may ask for: by name one number (None), or a table of them.
Known = Mapping[str, Entries | None]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A figure, or an entry of one, held against a limit, which is None for the baseline's."""

    written: str
    name: str
    entry: str | None
    sign: str
    limit: float | None

    @property
    def figure(self) -> str:
        return self.name if self.entry is None else f"{self.name}[{self.entry}]"

    def value(self, figures: Figures, known: Known) -> Any:
        table = figures.get(self.name)
        if self.entry is None or table is None:
            return table
        kind = known[self.name]
        assert kind is not None
        entries = {_spelled(entry): value for entry, value in table.items()}
        return entries.get(_spelled(self.entry), kind.absent)

    def failure(self, figures: Figures, known: Known, baseline: Figures | None) -> str | None:
        """Why the gate does not pass; a figure that is not known must not let it."""
        value = self.value(figures, known)
        limit = self.limit if self.limit is not None else self.value(baseline or {}, known)
        if value is None:
            return f"{self.written}: {self.figure} is not known"
        if limit is None:
            return f"{self.written}: {self.figure} of the baseline is not known"
        if not _COMPARISONS[self.sign](value, limit):
            return None
        beside = "" if self.limit is not None else f", the baseline's {_short(limit)}"
        return f"{self.written}: {self.figure} is {_short(value)}{beside}"


def parsed_condition(written: str, known: Known) -> Condition:
    """The condition that a text is; a figure that there is not is refused."""
    match = re.fullmatch(
        r"\s*([a-z_0-9]+)(\[[^\]]+\])?\s*(>=|<=|==|!=|>|<)\s*(baseline|[-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*",
        written,
    )
    if not match:
        raise UsageError(
            f"--fail-on {written!r} is not a comparison. Write it like 'unique>0' or 'leakage_epsilon>2'."
        )
    name, inner, sign, limit = match.groups()
    entry = None if inner is None else inner[1:-1]
    _check_figure(written, name, entry, known)
    return Condition(
        written=written,
        name=name,
        entry=entry,
        sign=sign,
        limit=None if limit == BASELINE else _number(limit, written),
    )


def _check_figure(written: str, name: str, entry: str | None, known: Known) -> None:
    if name not in known:
        available = sorted(each if kind is None else f"{each}[…]" for each, kind in known.items())
        raise UsageError(f"--fail-on {written!r}: {unknown('figure', name, available)}")
    if (kind := known[name]) is None:
        if entry is not None:
            raise UsageError(f"--fail-on {written!r}: {name} is one number. Leave [{entry}] out.")
        return
    if entry is None:
        raise UsageError(
            f"--fail-on {written!r}: {name} is not one number. Use one of its entries, like {name}[{next(iter(kind.names or '2'))}]."
        )
    if kind.names is None:
        _number(entry, written)
    elif _spelled(entry) not in map(_spelled, kind.names):
        raise UsageError(
            f"--fail-on {written!r}: {name} is counted at {', '.join(kind.names)} only. Use one of these{kind.advice}."
        )


def failures(
    figures: Figures, conditions: Iterable[str], known: Known, *, baseline: Figures | None = None
) -> list[str]:
    """Which conditions hold, each with the figure that made it so: empty means all is well.

    >>> failures({"unique": 3, "epsilon": None}, ["unique>5", "epsilon>2"], {"unique": None, "epsilon": None})
    ['epsilon>2: epsilon is not known']
    """
    told = (parsed_condition(each, known).failure(figures, known, baseline) for each in conditions)
    return [line for line in told if line is not None]


def junit_text(
    suite: str, judged: Mapping[str, Figures], failed: Mapping[tuple[str, str], str | None]
) -> str:
    """Gates as JUnit reads them: a case for each condition on each subject, counts as properties.

    `failed` tells of each subject and condition why it failed, None where it passed.
    """
    root = ElementTree.Element("testsuites")
    for subject, figures in judged.items():
        cases = {each: why for (name, each), why in failed.items() if name == subject}
        counts = {"tests": len(cases) or 1, "failures": sum(map(bool, cases.values()))}
        one = ElementTree.SubElement(root, "testsuite", name=f"tightlip {suite} {subject}".strip())
        one.attrib |= {name: str(number) for name, number in counts.items()}
        listed = ElementTree.SubElement(one, "properties")
        for name, value in figures.items():
            if isinstance(value, int | float):
                ElementTree.SubElement(listed, "property", name=name, value=_short(value))
        for case, why in (cases or {"measured": None}).items():
            made = ElementTree.SubElement(one, "testcase", classname=f"tightlip {suite}", name=case)
            if why is not None:
                ElementTree.SubElement(made, "failure", message=why)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _spelled(entry: str) -> str:
    try:
        return f"{float(entry):g}"
    except ValueError:
        return entry


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(text: str, written: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--fail-on {written!r}: {text!r} is not a number.") from None
