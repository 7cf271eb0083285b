"""What commands without a page print: what was prepared, and what a run promises."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tightlip.core.figures import count, guarantee_words, percent
from tightlip.report.kit.table import Column, Row, Table, plain_row

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def print_guarantee(guarantee: dict[str, Any], console: Any) -> None:
    """One line with ε, its δ, unit and standing; a red one below where it protects nobody."""
    words = guarantee_words(guarantee)
    console.print(f"{'guarantee':24} {words.value}", soft_wrap=True)
    if words.insecure:
        console.print(words.insecure, style="bold red", soft_wrap=True)


def statistics_table(statistics: dict[str, Any]) -> "RichTable":
    """What `tightlip prepare` found and did, one line each."""
    warnings = [
        plain_row("Warning", "", warning, style="red") for warning in statistics["warnings"]
    ]
    columns = [Column(left=True), Column(), Column(left=True, style="dim")]
    return Table(columns=columns, rows=[*_statistics_rows(statistics), *warnings]).printed()


def _statistics_rows(statistics: dict[str, Any]) -> Iterator[Row]:
    per_user = statistics["documents_per_user"]
    ends = f"median; from {count(per_user['min'])} to {count(per_user['max'])}"
    unknown = f"{percent(statistics['unknown_share'])} unknown"
    yield plain_row("Users", count(statistics["users"]), "")
    read = f"{count(statistics['documents_read'])} read"
    yield plain_row("Documents", count(statistics["documents"]), read)
    yield plain_row("Tokens", count(statistics["tokens"]), unknown)
    yield plain_row("Documents per user", f"{per_user['median']:g}", ends)
    for what in ("documents", "sentences"):
        num = count(statistics[f"duplicate_{what}"])
        yield plain_row(f"Repeated {what}", num, "found in the source")
    for verb in ("removed", "scrubbed"):
        for name, num in statistics[verb].items():
            if num:
                yield plain_row(f"{verb.capitalize()} {name.replace('_', ' ')}", count(num), "")
    if statistics["skipped_rows"]:
        yield plain_row("Skipped rows", count(statistics["skipped_rows"]), "unusable")
    for split in ("train", "validation"):
        if split in statistics:
            part = statistics[split]
            tokens = f"documents, {count(part['tokens'])} tokens"
            yield plain_row(split.capitalize(), count(part["documents"]), tokens)
