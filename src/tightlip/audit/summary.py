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

_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


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
        value = _figure(summary, key, condition)
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
    match = re.fullmatch(
        r"\s*([a-z_]+(?:\[[^\]]+\])?)\s*(>=|<=|==|!=|>|<)\s*(-?[0-9.]+(?:e-?[0-9]+)?)\s*", condition
    )
    if not match:
        raise UsageError(
            f"--fail-on {condition!r} is not a comparison. Write it like 'unique>0' or 'leakage_epsilon>2'."
        )
    key, sign, limit = match.groups()
    try:
        return key, _COMPARISONS[sign], float(limit)
    except ValueError:
        raise UsageError(f"--fail-on {condition!r}: {limit!r} is not a number.") from None


def _figure(summary: dict[str, Any], key: str, condition: str) -> float | int | None:
    name, _, inner = key.partition("[")
    if name not in summary:
        numeric = sorted(k for k, v in summary.items() if v is None or _is_number(v))
        raise UsageError(
            f"--fail-on {condition!r}: there is no figure {name!r}. Figures: {', '.join(numeric)}."
        )
    value = summary[name]
    if inner and isinstance(value, dict):
        inner = inner.rstrip("]")
        # A length nobody leaked has no entry: none were found, which is a known zero.
        value = value.get(inner, 0 if name == "unique_by_length" else None)
    if value is not None and not _is_number(value):
        hint = f"{name}[…]" if isinstance(value, dict) else "another figure"
        raise UsageError(f"--fail-on {condition!r}: {name} is not one number. Use {hint}.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
