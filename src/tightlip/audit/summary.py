"""The report's headline figures, and the gate that fails on them."""

import math
import operator
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from tightlip.audit.leaks import Fit, Leaks
from tightlip.audit.public import PublicView
from tightlip.core.errors import UsageError
from tightlip.core.registry import unknown

_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
# What a gate may ask for: the numbers of summary.json, and the tables of numbers within it.
FIGURES = (
    "accuracy",
    "distinct_sequences",
    "fewer_than_p",
    "leakage_epsilon",
    "num_documents",
    "num_tokens",
    "num_users",
    "p",
    "perplexity",
    "public_unique",
    "sequences_in_s",
    "top_k",
    "unique",
    "users_with_unique",
    "validation_accuracy",
    "validation_perplexity",
)
TABLES = ("curated", "unique_by_length")


def summarise(
    leaks: Leaks,
    *,
    top_k: int,
    fewer_than: int,
    thresholds: Iterable[float],
    ratios: np.ndarray,
    public: PublicView | None,
    validation: Fit | None,
) -> dict[str, Any]:
    """The keys of summary.json that come from the findings. What is not known is None."""
    unique = leaks.unique
    unique_ratios = ratios[unique]
    lengths, counts = np.unique(leaks.lengths[unique], return_counts=True)
    known = unique_ratios[~np.isnan(unique_ratios)]
    return {
        "unique": int(unique.sum()),
        "unique_by_length": {str(n): int(c) for n, c in zip(lengths, counts, strict=True)},
        "curated": {f"{t:g}": int((unique_ratios >= t).sum()) for t in thresholds}
        if public
        else None,
        "leakage_epsilon": _leakage_epsilon(known, public is not None and not unique.any()),
        "sequences_in_s": len(leaks.runs),
        "distinct_sequences": len(leaks.distinct),
        "users_with_unique": len(np.unique(leaks.owners[unique])),
        "fewer_than_p": int((leaks.users_in_s < fewer_than).sum()),
        "p": fewer_than,
        "perplexity": finite(leaks.fit.perplexity),
        "accuracy": leaks.fit.accuracy,
        "top_k": top_k,
        "validation_perplexity": finite(validation.perplexity) if validation else None,
        "validation_accuracy": validation.accuracy if validation else None,
        "public_unique": public.unique if public else None,
        "public_model": public.name if public else None,
        "cross_tokenizer": public.cross_tokenizer if public else None,
        "num_users": leaks.corpus.num_users,
        "num_documents": leaks.corpus.num_documents,
        "num_tokens": leaks.corpus.num_tokens,
    }


def _leakage_epsilon(unique_ratios: np.ndarray, nothing_unique: bool) -> float | None:
    """The largest ratio. Where a public model was asked and nothing is unique, nothing leaks: 0."""
    if nothing_unique:
        return 0.0
    return finite(unique_ratios.max()) if len(unique_ratios) else None


def finite(value: float | None) -> float | None:
    """JSON has no infinity; a figure that is not a number is not known."""
    return float(value) if value is not None and math.isfinite(value) else None


def failed_conditions(summary: dict[str, Any], conditions: Iterable[str]) -> list[str]:
    """Which of 'unique>0', 'curated[2]>=10' and the like hold, each with the figure that made it so.

    A figure that is not known fails: a gate must not pass for want of an answer.

    >>> failed_conditions({"unique": 3, "leakage_epsilon": None}, ["unique>5", "leakage_epsilon>2"])
    ['leakage_epsilon>2: leakage_epsilon is not known']
    """
    failed = []
    for condition in conditions:
        key, compare, limit = parsed_condition(condition)
        value = _figure(summary, key)
        if value is None:
            failed.append(f"{condition}: {key} is not known")
        elif compare(value, limit):
            failed.append(
                f"{condition}: {key} is {value:g}"
                if isinstance(value, float)
                else f"{condition}: {key} is {value}"
            )
    return failed


def parsed_condition(condition: str) -> tuple[str, Any, float]:
    """Figure, comparison and limit of a condition; a figure that no report has is refused."""
    match = re.fullmatch(
        r"\s*([a-z_]+)(\[[^\]]+\])?\s*(>=|<=|==|!=|>|<)\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*",
        condition,
    )
    if not match:
        raise UsageError(
            f"--fail-on {condition!r} is not a comparison. Write it like 'unique>0' or 'leakage_epsilon>2'."
        )
    name, inner, sign, limit = match.groups()
    _check_figure(name, inner, condition)
    return name + (inner or ""), _COMPARISONS[sign], _number(limit, condition)


def _check_figure(name: str, inner: str | None, condition: str) -> None:
    if name in TABLES:
        if inner is None:
            raise UsageError(
                f"--fail-on {condition!r}: {name} is not one number. Use one of its entries, like {name}[2]."
            )
        _number(inner[1:-1], condition)
    elif name not in FIGURES:
        raise UsageError(f"--fail-on {condition!r}: {unknown('figure', name, _available())}")
    elif inner is not None:
        raise UsageError(f"--fail-on {condition!r}: {name} is one number. Leave {inner} out.")


def check_threshold(key: str, condition: str, thresholds: Iterable[float]) -> None:
    """Refuse curated[t] for a t that the audit does not count."""
    name, _, inner = key.partition("[")
    counted = [f"{t:g}" for t in thresholds]
    if name == "curated" and f"{float(inner.rstrip(']')):g}" not in counted:
        raise UsageError(
            f"--fail-on {condition!r}: curated is counted at {', '.join(counted)} only. "
            f"Use one of these, or name others with --curated-at."
        )


def _available() -> list[str]:
    return sorted([*FIGURES, *(f"{name}[…]" for name in TABLES)])


def _number(text: str, condition: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--fail-on {condition!r}: {text!r} is not a number.") from None


def _figure(summary: dict[str, Any], key: str) -> float | int | None:
    name, _, inner = key.partition("[")
    value = summary.get(name)
    if not inner or value is None:
        return value
    entries = {float(entry): number for entry, number in value.items()}
    # A length nobody leaked has no entry: none were found, which is a known zero.
    return entries.get(float(inner[:-1]), 0 if name == "unique_by_length" else None)
