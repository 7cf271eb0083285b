"""What was measured of canaries, in the terminal: a table for each kind, and plain sentences."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

Entry = dict[str, Any]
_NAMES = {"planted": "canaries", "real": "real texts"}


def canary_tables(found: list[Entry]) -> list[Any]:
    """A table by number of repetitions: planted canaries, then real ones, as far as there are."""
    return [
        _table(_NAMES[kind], group, columns)
        for kind, columns in (("planted", _planted_columns(found)), ("real", _REAL_COLUMNS))
        if (group := of_kind(found, kind))
    ]


def canary_lines(found: list[Entry]) -> list[str]:
    """What the tables' figures mean, in plain sentences."""
    planted, real = of_kind(found, "planted"), of_kind(found, "real")
    lines = [_threshold_line(planted)] if planted else []
    lines += [line for kind in _NAMES for line in _tab_lines(of_kind(found, kind), kind)]
    return lines + _sampled_lines(planted) + _unknown_lines(real)


def of_kind(found: list[Entry], kind: str) -> list[Entry]:
    return [one for one in found if one["kind"] == kind]


def most_successes(found: list[Entry]) -> int:
    """How many of these TAB could complete at most: one text for each beginning.

    Two users may have written the same text, and then both succeed at once.
    """
    by_prompt: dict[str, Counter[str]] = {}
    for one in found:
        by_prompt.setdefault(one["prompt"], Counter())[one["text"]] += 1
    return sum(max(texts.values()) for texts in by_prompt.values())


Columns = Sequence[tuple[str, Callable[[list[Entry]], str]]]


def _planted_columns(found: list[Entry]) -> Columns:
    above = _threshold(of_kind(found, "planted"))
    return (
        ("mean exposure, bits", lambda group: f"{mean(one['exposure_bits'] for one in group):.1f}"),
        ("exposed", lambda group: f"{sum(one['low'] > above for one in group):,}"),
        ("tab", _num_tab),
    )


def _num_tab(group: list[Entry]) -> str:
    return f"{sum(one['tab'] for one in group):,}"


def _median_perplexity(group: list[Entry]) -> str:
    known = [one["perplexity"] for one in group if one["perplexity"] is not None]
    return f"{median(known):,.0f}" if known else "-"


_REAL_COLUMNS: Columns = (("median perplexity", _median_perplexity), ("tab", _num_tab))


def _table(name: str, found: list[Entry], columns: Columns) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("repeated", name, *(title for title, _ in columns)):
        table.add_column(title, justify="right")
    for times in sorted({one["repetitions"] for one in found}):
        group = [one for one in found if one["repetitions"] == times]
        table.add_row(f"{times:,}", f"{len(group):,}", *(value(group) for _, value in columns))
    return table


def _threshold(planted: list[Entry]) -> float:
    from tightlip.audit.exposure import exposed_above_bits

    return exposed_above_bits(max(len(planted), 1))


def _threshold_line(planted: list[Entry]) -> str:
    return (
        f"Exposed: above {_threshold(planted):.1f} bits, which chance passes for one of {len(planted):,} canaries in 5 of "
        "100 models that never saw them. Such models show 1.4 bits on average."
    )


def _tab_lines(group: list[Entry], kind: str) -> list[str]:
    if not group:
        return []
    lines = [f"Tab: {_num_tab(group)} of {len(group):,} {kind} canaries are completed."]
    most = most_successes(group)
    if most < len(group):
        lines.append(
            f"Tab: at most {most:,} of {len(group):,} can succeed, for the others begin like one of these."
        )
    return lines


def _sampled_lines(planted: list[Entry]) -> list[str]:
    sampled = [one for one in planted if not one["exact"]]
    if not sampled:
        return []
    worst = max(one["fit_ks"] for one in sampled)
    return [
        f"{len(sampled):,} exposures are estimated from sampled candidates; the fitted curve is off by "
        f"at most {worst:.3f} (Kolmogorov-Smirnov)."
    ]


def _unknown_lines(real: list[Entry]) -> list[str]:
    num = sum(one["perplexity"] is None for one in real)
    if not num:
        return []
    return [
        f"{num:,} real texts hold a word that this model's vocabulary lacks: it cannot complete them."
    ]
