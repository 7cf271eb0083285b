"""`tightlip audit RUN --membership`: can one tell what the run was trained on?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULT = "membership.json"
_SCORES = {"loss": "loss", "reference": "reference", "min_k": "min-k%", "zlib": "zlib"}
_RATES = {"tpr_at_1_percent_fpr": "at 1%", "tpr_at_0_1_percent_fpr": "at 0.1%"}


def membership(
    run: str,
    device: str,
    reference: str | None,
    keys: Sequence[Path] | None,
    others: dict[str, Any],
) -> None:
    """Measure, print, and write RUN/membership.json."""
    from rich.console import Console

    import tightlip
    from tightlip.api.measures import planted_texts
    from tightlip.core.progress import shown_progress

    refuse(run, "--membership", others)
    out = Path(run) / RESULT
    with shown_progress():
        found = tightlip.measure_membership(
            run,
            reference=reference,
            without_texts=planted_texts(keys or ()),
            out=out,
            device=device,
        )
    console = Console()
    console.print(_table(found))
    for line in lines_of(found):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"The record: {out}", soft_wrap=True, highlight=False)


def refuse(run: str, flag: str, others: dict[str, Any]) -> None:
    """Refuse what is no run, and flags of a leakage report."""
    from tightlip.core.errors import UsageError
    from tightlip.core.run_folder import is_run

    if not is_run(Path(run)):
        raise UsageError(
            f"{flag} compares what a run was trained on with what it held out, and {run} is no run of tightlip. "
            "Run: tightlip train CORPUS --out DIR"
        )
    if given := [name for name, value in others.items() if value]:
        raise UsageError(
            f"{flag} makes no leakage report, so {given[0]} does not go with it. "
            f"Run: tightlip audit {run} {flag}"
        )


def _table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    levels = {name: found[name] for name in ("documents", "users") if found[name] is not None}
    scores = [
        (level, name, score)
        for level, figures in levels.items()
        for name, score in figures["scores"].items()
        if score is not None
    ]
    rates = {name: title for name, title in _RATES.items() if any(s[name] for _, _, s in scores)}
    table = Table(box=None, pad_edge=False)
    table.add_column("of")
    table.add_column("score")
    for title in ("AUC", *rates.values()):
        table.add_column(title, justify="right")
        table.add_column("95%", justify="right")
    for level, name, score in scores:
        shares = [cell for rate in rates for cell in _cells(score[rate], ".1%")]
        table.add_row(level, _SCORES[name], *_cells(score["auc"], ".3f"), *shares)
    return table


def _cells(figure: dict[str, Any] | None, spelled: str) -> tuple[str, str]:
    if figure is None:
        return "", ""
    if figure["low"] is None:
        return f"{figure['value']:{spelled}}", ""
    return (
        f"{figure['value']:{spelled}}",
        f"{figure['low']:{spelled}}".removesuffix("%") + f"–{figure['high']:{spelled}}",
    )


def ends(figure: dict[str, Any], spelled: str) -> str:
    """An interval's two ends, or that there is none.

    >>> ends({"value": 2.0, "low": 1.0, "high": 3.0}, ".1f")
    '1.0 to 3.0'
    """
    if figure["low"] is None:
        return "no interval"
    return f"{figure['low']:{spelled}} to {figure['high']:{spelled}}"


def lines_of(found: dict[str, Any]) -> list[str]:
    """What the table's figures mean, in plain sentences."""
    documents = found["documents"]
    lines = [
        f"{documents['num_members']:,} training documents against {documents['num_nonmembers']:,} held-out ones; "
        "AUC 0.5 is chance, 1 tells every one.",
        *_about_rates(documents),
        _verdict("document", documents),
    ]
    if (users := found["users"]) is not None:
        lines.append(_verdict("user", users))
    return lines + found["notes"]


def _about_rates(level: dict[str, Any]) -> list[str]:
    if level["scores"]["loss"]["tpr_at_1_percent_fpr"] is None:
        return []
    return [
        "At 1%, at 0.1%: the share of those trained on that is found while so many of the others are accused; chance "
        "finds as many."
    ]


def _verdict(one: str, level: dict[str, Any]) -> str:
    scores = {name: score for name, score in level["scores"].items() if score is not None}
    best = max(scores, key=lambda name: scores[name]["auc"]["value"])
    auc = scores[best]["auc"]
    if auc["low"] is None or auc["low"] <= 0.5:
        return (
            f"These scores do not tell {one}s that were trained on from {one}s that were not: the highest AUC's interval "
            "is not above chance."
        )
    return (
        f"{one.capitalize()}s that were trained on can be told: of one that was and one that was not, the "
        f"{_SCORES[best]} score names the right one {auc['value']:.0%} of the time."
    )
