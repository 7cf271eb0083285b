"""`tightlip audit RUN --groups`: whose text is predicted worse, and who lost by a mitigation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tightlip.cli.membership import ends, refuse

RESULT = "groups.json"


def groups(
    run: str,
    device: str,
    against: str | None,
    keys: Sequence[Path] | None,
    others: dict[str, Any],
) -> None:
    """Measure, print, and write RUN/groups.json."""
    from rich.console import Console

    import tightlip
    from tightlip.api.measures import planted_texts
    from tightlip.core.progress import shown_progress

    refuse(run, "--groups", others)
    out = Path(run) / RESULT
    with shown_progress():
        found = tightlip.measure_groups(
            run, against=against, without_texts=planted_texts(keys or ()), out=out, device=device
        )
    console = Console()
    for table in _tables(found):
        console.print(table)
    for line in lines_of(found):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"The record: {out}", soft_wrap=True, highlight=False)


def _tables(found: dict[str, Any]) -> Iterator[Any]:
    """By number of training documents, the most first; then by each attribute."""
    curve = {_range(row): row for row in reversed(found["curve"])}
    for title, rows in ({"training documents": curve} | found["attributes"]).items():
        yield _table(title, rows)


def _table(title: str, rows: dict[str, Any]) -> Any:
    from rich.table import Table

    has_change = any(row["change"] is not None for row in rows.values())
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    for name in ["users", "perplexity", "95%"] + ["change", "95%"] * has_change:
        table.add_column(name, justify="right")
    for name, row in rows.items():
        figures = [f"{row['perplexity']['value']:.1f}", ends(row["perplexity"], ".1f")]
        if has_change:
            figures += [f"{row['change']['value']:+.1f}", ends(row["change"], "+.1f")]
        table.add_row(name, f"{row['num_users']:,}", *figures)
    return table


def _range(row: dict[str, Any]) -> str:
    first, last = row["num_samples_from"], row["num_samples_to"]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def lines_of(found: dict[str, Any]) -> list[str]:
    """What the table's figures mean, in plain sentences."""
    lines = [
        f"{found['num_users']:,} users with {found['num_documents']:,} held-out documents; perplexity of all their "
        f"text {found['perplexity']['value']:.1f} ({ends(found['perplexity'], '.1f')})."
    ]
    if (gap := found["gap"]) is not None:
        lines.append(_about_gap(found, gap))
    return lines + found["notes"]


def _about_gap(found: dict[str, Any], gap: dict[str, Any]) -> str:
    plain, log = gap["perplexity"], gap["log"]
    said = "more" if plain["value"] >= 0 else "less"
    line = (
        f"The perplexity of the {len(found['low'])} users with the fewest training documents rose by "
        f"{abs(plain['value']):.1f} points {said} than that of the {len(found['top'])} with the most "
        f"(95%: {ends(plain, '+.1f')}; in logs {log['value']:+.3f}, {ends(log, '+.3f')})."
    )
    if plain["low"] <= 0 <= plain["high"]:
        line += " The interval holds 0: this may be chance."
    return line
