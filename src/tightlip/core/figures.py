"""Figures and guarantees as people read them, in the terminal and on every page.

A figure shows no more digits than it deserves and an ε is never rounded down; a guarantee has
its standing beside it, and without one no ε is printed.
"""

import math
from dataclasses import dataclass
from typing import Any

UNKNOWN = "not known"
# Only these two standings come with a number; anything else prints none (METHODS.md, 6).
STANDINGS_WITH_EPSILON = ("proved", "as published")
INSECURE = (
    "Insecure: noise and sampling came from a fixed seed (--insecure-seed), for tests only. "
    "Whoever knows the seed can subtract the noise; this ε protects nobody."
)
# No record of a guarantee is longer; the page stays small if one is.
MOST_CHARACTERS = 2000
NO_ARITHMETIC = "arithmetic not recorded"  # of a run of an earlier version
_OPENINGS = {
    "proved": "Proved ({arithmetic}): a theorem covers exactly what was run.",
    "as published": "As published: the usual figure, but its proof does not cover what was run.",
}
_DETAILS = (
    *("mechanism", "unit", "adjacency", "sampling", "accountant", "arithmetic"),
    *("steps", "planned_steps", "covers", "outside"),
)


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


def arithmetic_words(guarantee: dict[str, Any]) -> str:
    """How far a proof covers the numbers that the machine added up, in short.

    >>> arithmetic_words({"arithmetic": "float32: measured 1.2e-06 C over 16 draws, 10 x charged"})
    'float32 measured'
    >>> arithmetic_words({"arithmetic": "exact: units never meet in floating point"}), arithmetic_words({})
    ('exact', 'arithmetic not recorded')
    """
    parts = str(guarantee.get("arithmetic") or NO_ARITHMETIC).split("; ")
    kinds = sorted({(part.partition(":")[0], "measured" in part) for part in parts})
    return ", ".join(f"{kind} measured" if measured else kind for kind, measured in kinds)


def standing_words(guarantee: dict[str, Any]) -> str:
    """A training run's standing. Proved is what a theorem says of exact numbers, so the arithmetic
    stands beside it wherever it is printed.

    >>> standing_words({"standing": "proved"}), standing_words({"standing": "as published"})
    ('proved; arithmetic not recorded', 'as published')
    """
    standing = str(guarantee["standing"])
    return f"{standing}; {arithmetic_words(guarantee)}" if standing == "proved" else standing


def people_words(people: dict[str, Any]) -> str:
    """ε per person over all registered runs, with what it rests on.

    >>> people_words({"epsilon": 9.741, "delta": 1e-5, "unit": "user", "runs": 2, "standing": "as published"})
    'ε = 9.75 at δ = 1e-05, per person over 2 registered runs (as published)'
    """
    runs = counted(people["runs"], "registered run")
    unit = "person" if people.get("unit") == "user" else people.get("unit")
    if people.get("epsilon") is None:
        return f"no ε for the people of all {runs} together"
    figure = f"ε = {rounded_up(people['epsilon'])} at δ = {people['delta']:g}"
    return f"{figure}, per {unit} over {runs} ({standing_words(people)})"


def shown_first(guarantee: dict[str, Any]) -> dict[str, Any] | None:
    """What a record says of its people, where more than this run was registered for them."""
    people = guarantee.get("people") or {}
    return people if people.get("runs", 1) > 1 else None


@dataclass(frozen=True, kw_only=True)
class GuaranteeWords:
    """A guarantee as printed: the badge, the headline value and what stands behind it."""

    standing: str
    badge: str
    value: str
    sentence: str
    details: tuple[tuple[str, str], ...] = ()
    insecure: str = ""


def guarantee_words(guarantee: dict[str, Any] | None) -> GuaranteeWords:
    """What may be said about a guarantee.

    Holds:
        no_epsilon_without_standing: ε appears only when proved or as published, with that word beside it.
        no_proof_without_arithmetic: beside "proved" stands how the numbers were added up.
        people_first: ε per person over all registered runs comes before the run's own.
        unknown_is_plain: no record, or "measured only", reads "No guarantee: …".
    """
    if guarantee is None:
        return GuaranteeWords(
            standing="no guarantee",
            badge="no guarantee",
            value="none",
            sentence="No guarantee: nothing is known about how this model was trained, so only what was measured here speaks.",
        )
    standing = str(guarantee.get("standing") or "measured only")
    because = _as_sentence(guarantee.get("because"))
    details = _details(guarantee)
    if standing not in STANDINGS_WITH_EPSILON:
        plain = because or "This way of training comes with no proof; only the measurements speak."
        return GuaranteeWords(
            standing=f"no guarantee ({standing})",
            badge=f"no guarantee ({standing})",
            value="none",
            sentence=f"No guarantee: {standing}. {plain}",
            details=details,
        )
    epsilon = UNKNOWN if guarantee.get("epsilon") is None else shown_epsilon(guarantee)
    delta = f" at δ = {guarantee['delta']:g}" if guarantee.get("delta") is not None else ""
    per = f", per {guarantee['unit']}" if guarantee.get("unit") else ""
    value = f"ε = {epsilon}{delta}{per} ({standing_words(guarantee)})"
    opening = _OPENINGS[standing].format(arithmetic=arithmetic_words(guarantee))
    insecure = guarantee.get("insecure_seed")
    if people := shown_first(guarantee):
        value = f"{people_words(people)}; this run alone: {value}"
        because = f"{because} Over all runs: {_as_sentence(people.get('because'))}"
        insecure = insecure or people.get("insecure_seed")
    return GuaranteeWords(
        standing=standing,
        badge=standing_words(guarantee),
        value=value,
        sentence=f"{opening} {because}".strip(),
        details=details,
        insecure=INSECURE if insecure else "",
    )


def _details(guarantee: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """What the record says of how the model was trained, as pairs of a name and its words."""
    known = [name for name in _DETAILS if guarantee.get(name) not in (None, "", [], {})]
    return tuple((name, _in_words(guarantee[name])) for name in known)


def _in_words(value: Any) -> str:
    if isinstance(value, int):
        return count(value)
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return str(value)[:MOST_CHARACTERS]


def _as_sentence(text: Any) -> str:
    """A sentence that begins and ends like one."""
    text = str(text or "").strip()[:MOST_CHARACTERS]
    return text and text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")
