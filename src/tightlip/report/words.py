"""The report's words: numbers as people read them, the verdict, the guarantee.

The page and the terminal take every sentence from here and from `terminal.py`, so
that nobody is told one thing on the screen and another in the file.
"""

import math
from dataclasses import dataclass
from typing import Any

from tightlip.core.figures import shown_epsilon

UNKNOWN = "not known"
# No record of a guarantee is longer; the page stays small if one is.
MOST_CHARACTERS = 2000
# Only these two standings come with a number; anything else prints none (METHODS.md, 6).
STANDINGS_WITH_EPSILON = ("proved", "as published")


def count(value: Any) -> str:
    """A whole number with thousands marked.

    >>> count(2138), count(None)
    ('2,138', 'not known')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return UNKNOWN
    return f"{int(value):,}"


def number(value: Any) -> str:
    """A measured quantity with three figures, never more than it deserves.

    >>> [number(x) for x in (1.3094, 12345.6, 0.00042, float("inf"), None)]
    ['1.31', '12,346', '0.00042', '∞', 'not known']
    """
    if value is None:
        return UNKNOWN
    value = float(value)
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-4:
        return f"{value:.2g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def percent(share: Any) -> str:
    """A share between 0 and 1 as a percentage.

    >>> percent(0.237), percent(0.0004), percent(1.0)
    ('23.7%', '0.04%', '100%')
    """
    if share is None or not math.isfinite(share):
        return UNKNOWN
    hundredths = 100 * share
    if hundredths in (0, 100):
        return f"{hundredths:.0f}%"
    if 99.95 <= hundredths < 100:
        return "over 99.9%"  # never round a shortfall up to all
    return f"{hundredths:.1f}%" if hundredths >= 0.1 else f"{hundredths:.2g}%"


def counted(value: int, one: str, many: str | None = None) -> str:
    """A count and its noun.

    >>> counted(1, "person", "people"), counted(2138, "sequence")
    ('1 person', '2,138 sequences')
    """
    return f"{count(value)} {one if value == 1 else many or one + 's'}"


INSECURE = (
    "Insecure: noise and sampling came from a fixed seed (--insecure-seed), for tests only. "
    "Whoever knows the seed can subtract the noise; this ε protects nobody."
)


@dataclass(frozen=True, kw_only=True)
class GuaranteeWords:
    """A guarantee as printed: the badge, the headline value and what stands behind it."""

    standing: str
    value: str
    sentence: str
    details: tuple[tuple[str, str], ...]
    insecure: str = ""


def guarantee_words(guarantee: dict[str, Any] | None) -> GuaranteeWords:
    """What the report may say about a guarantee.

    Holds:
        no_epsilon_without_standing: ε appears only when proved or as published, with that word beside it.
        unknown_is_plain: no record, or "measured only", reads "No guarantee: …".
    """
    if guarantee is None:
        return GuaranteeWords(
            standing="no guarantee",
            value="none",
            sentence="No guarantee: nothing is known about how this model was trained, so only what was measured here speaks.",
            details=(),
        )
    standing = str(guarantee.get("standing") or "measured only")
    because = _ended(guarantee.get("because"))
    details = tuple(
        (name, _listed(guarantee[name]))
        for name in (
            "mechanism",
            "unit",
            "adjacency",
            "sampling",
            "accountant",
            "steps",
            "covers",
            "outside",
        )
        if guarantee.get(name) not in (None, "", [], {})
    )
    if standing not in STANDINGS_WITH_EPSILON:
        plain = because or "This way of training comes with no proof; only the measurements speak."
        return GuaranteeWords(
            standing=f"no guarantee ({standing})",
            value="none",
            sentence=f"No guarantee: {standing}. {plain}",
            details=details,
        )
    per = f", per {guarantee['unit']}" if guarantee.get("unit") else ""
    delta = f" at δ = {guarantee['delta']:g}" if guarantee.get("delta") is not None else ""
    opening = {
        "proved": "Proved: a theorem covers exactly what was run.",
        "as published": "As published: the usual figure, but its proof does not cover what was run.",
    }[standing]
    return GuaranteeWords(
        standing=standing,
        value=f"ε = {_epsilon(guarantee)}{delta}{per} ({standing})",
        sentence=f"{opening} {because}".strip(),
        details=details,
        insecure=INSECURE if guarantee.get("insecure_seed") else "",
    )


def _epsilon(guarantee: dict[str, Any]) -> str:
    value = guarantee.get("epsilon")
    return number(value) if value is None else shown_epsilon(guarantee)


def _ended(text: Any) -> str:
    """A sentence that begins and ends like one."""
    text = str(text or "").strip()[:MOST_CHARACTERS]
    return text and text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")


def _listed(value: Any) -> str:
    if isinstance(value, int):
        return count(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(str(part) for part in value)[:MOST_CHARACTERS]
    return str(value)[:MOST_CHARACTERS]


def longest_unique(summary: dict[str, Any]) -> int | None:
    """Tokens in the longest unique sequence, where lengths are known."""
    lengths = [
        int(length) for length, found in (summary.get("unique_by_length") or {}).items() if found
    ]
    return max(lengths, default=None)


def verdict(summary: dict[str, Any], *, num_copied: int | None = None) -> tuple[str, list[str]]:
    """The report in one sentence, then what somebody must know to weigh it."""
    unique = summary.get("unique")
    if not summary.get("distinct_sequences") and not unique:
        return (
            "This model completed nothing it was trained on.",
            [
                "Not one token of the corpus was among its predictions. An untrained model, or the wrong corpus, looks the same."
            ],
        )
    if unique is None:
        return ("How much this model gives away is not known.", [])
    if unique == 0:
        shared = f"Each of the {counted(summary['distinct_sequences'], 'sequence')} it completes was written by two people or more."
        return ("None found: this model completed no text that only one person wrote.", [shared])
    return (_unique_sentence(summary, unique), _weighing(summary, unique, num_copied))


def _unique_sentence(summary: dict[str, Any], unique: int) -> str:
    pieces = "1 piece of text" if unique == 1 else f"{count(unique)} pieces of text"
    return f"This model completes {pieces} that only one person wrote."


def _weighing(summary: dict[str, Any], unique: int, num_copied: int | None) -> list[str]:
    them, belong = ("It", "belongs") if unique == 1 else ("They", "belong")
    sentences = []
    owners, users, longest = (
        summary.get("users_with_unique"),
        summary.get("num_users"),
        longest_unique(summary),
    )
    if owners and users:
        tail = "" if longest is None else f"; the longest is {counted(longest, 'token')}"
        whose = (
            f"{count(owners)} of {counted(users, 'person', 'people')} ({percent(owners / users)})"
        )
        sentences.append(f"{them} {belong} to {whose}{tail}.")
    worst = summary.get("leakage_epsilon")
    if worst is not None and not math.isnan(worst):
        times = "far" if math.isinf(worst) else f"{number(worst)} times"
        sentences.append(
            f"The worst is {times} less surprising to this model than to the public one."
        )
    if summary.get("public_unique"):
        pieces = counted(summary["public_unique"], "such piece")
        sentences.append(
            f"The public model completes {pieces} too: if it never saw this text, some can simply be guessed."
        )
    if num_copied:
        stood = "was" if num_copied == 1 else "were"
        sentences.append(
            f"{count(num_copied)} {stood} already in front of the model when it completed them (marked “copied”)."
        )
    return sentences
