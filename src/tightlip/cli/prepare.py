"""`tightlip prepare`: read, check, clean, split, tokenise."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as RichTable

import tightlip
from tightlip.cli import print_lines
from tightlip.cli.flags import KeptScan, OnDevice, argument, switch, with_settings
from tightlip.core.errors import UsageError
from tightlip.core.figures import count, percent
from tightlip.core.progress import shown_progress
from tightlip.core.settings import names_in, split_settings
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.corpus.privacy_weights import WeightsConfig
from tightlip.report.kit.table import Column, Row, Table, plain_row

_SAYS_NOTHING = (("device", OnDevice.device), ("keep_scan", KeptScan.keep_scan))


@with_settings(
    *(OnDevice, KeptScan, PrepareConfig, WeightsConfig),
    privacy_weights=switch(
        "--privacy-weights", "Weigh each training document by its rarity, for adaptive DP."
    ),
)
def prepare(
    corpus: Annotated[
        str, argument("CORPUS", "Parquet, JSON Lines, CSV, or a saved datasets folder.")
    ],
    out: Annotated[Path, typer.Option(help="The prepared corpus' folder.")],
    given: dict[str, Any],
) -> None:
    """Prepare, and weigh where that is asked for."""
    privacy_weights = given.pop("privacy_weights", False)
    names = names_in(WeightsConfig, OnDevice, KeptScan)
    said = {name: given.pop(name) for name in names if name in given}
    weighing = {n: said[n] for n in said if (n, said[n]) not in _SAYS_NOTHING}
    if privacy_weights:
        split_settings(weighing, WeightsConfig, OnDevice, KeptScan)  # before any text is read
    elif weighing:
        name, value = next(iter(weighing.items()))
        raise UsageError(
            f"{name}={str(value)!r} is for weighing documents, which is off. Add --privacy-weights, or leave it out."
        )
    with shown_progress():
        prepared = tightlip.prepare(corpus, out, **given)
        weighed = tightlip.weigh(prepared, **weighing) if privacy_weights else None
    lines: list[Any] = [statistics_table(prepared.statistics)]
    lines += [
        f"Released: the {release['name']}, noise multiplier {release['noise_multiplier']:g} for each "
        f"{release['unit']}, δ {release['delta']:g}. Preparing anew spends anew."
        for release in prepared.releases
    ]
    lines.append(f"Prepared: {prepared.folder}")
    if weighed is not None:
        from tightlip.report.weights import lines_about

        lines += lines_about(weighed.info, weighed.rho, weighed.log_perplexities)
        lines.append(f"Weights: {prepared.folder / 'weights' / 'weights.html'}")
    print_lines(lines)


def statistics_table(statistics: dict[str, Any]) -> RichTable:
    """What `tightlip prepare` found and did, one line each."""
    warnings = [plain_row("Warning", "", each, style="red") for each in statistics["warnings"]]
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
