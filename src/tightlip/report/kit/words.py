"""Words that pages share: figures with their intervals, names in a row, flags set as code."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

Figure = Mapping[str, Any]  # `value`, and either `low` and `high` or `spread` over seeds
NONE = "–"
NEVER_SAW_BITS = 1.44  # the mean exposure under a model that never saw the canary
FLAG = re.compile(r"--[a-z][a-z-]*(?: (?:[0-9][0-9.]*[0-9]|[0-9]|[A-Z]+\b))?")


def with_flags(sentence: str) -> Markup:
    """The sentence with its flags set as code, so that no line breaks inside one.

    >>> with_flags("a < b, see --key FILE")
    Markup('a &lt; b, see <code class="flag">--key FILE</code>')
    """
    return Markup(FLAG.sub(r'<code class="flag">\g<0></code>', str(escape(sentence))))


def joined(names: Sequence[str]) -> str:
    """
    >>> joined(["a"]), joined(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def at(*path: str) -> Callable[[Any], Any]:
    """What a record has under these names, null where one is missing.

    >>> at("a", "b")({"a": {"b": 1}}), at("a", "b")({"a": None})
    (1, None)
    """

    def get(record: Any) -> Any:
        for name in path:
            record = None if record is None else record.get(name)
        return record

    return get


def cut_name(name: str, most: int = 24) -> str:
    """A run's name that fits a plot; of a path the end tells more than the beginning."""
    return name if len(name) <= most else "…" + name[-most + 1 :]


def share_words(figure: Figure | None) -> str:
    """A share as a percentage with one decimal.

    >>> share_words({"value": 0.7134}), share_words(None)
    ('71.3%', '–')
    """
    if figure is None or figure["value"] is None:
        return NONE
    return f"{100 * figure['value']:.1f}%"


def range_words(
    figure: Figure | None, *, scale: float = 100, digits: int = 1, sign: str = ""
) -> str:
    """The interval, or the spread over seeds.

    >>> range_words({"value": 0.7, "low": 0.654, "high": 0.75})
    '65.4 to 75.0'
    >>> range_words({"value": 0.7, "low": None, "high": None, "spread": 0.021})
    '± 2.1 over seeds'
    """
    if figure is None:
        return ""
    if figure.get("spread") is not None:
        return f"± {scale * figure['spread']:.{digits}f} over seeds"
    if figure["low"] is None:
        return ""
    low, high = (f"{scale * figure[end]:{sign}.{digits}f}" for end in ("low", "high"))
    return f"{low} to {high}"


def points_words(figure: Figure | None, *, sign: str = "+") -> str:
    """A difference of two shares in points.

    >>> points_words({"value": 0.034}), points_words({"value": -0.0001})
    ('+3.4', '+0.0')
    """
    if figure is None or figure["value"] is None:
        return NONE
    return f"{round(100 * figure['value'], 1) + 0.0:{sign}.1f}"


def p_words(p: float | None) -> str:
    """A p-value.

    >>> p_words(0.0005), p_words(0.0321), p_words(None)
    ('p < 0.001', 'p = 0.032', 'no test')
    """
    if p is None:
        return "no test"
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.1 else f"p = {p:.2f}"
