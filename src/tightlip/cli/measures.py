"""`tightlip membership`, `groups` and `dp-check`: the other measures of a run, as flags and words."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tightlip
from tightlip.audit.settings import ResamplingSettings
from tightlip.cli import print_lines
from tightlip.cli.flags import Device, KeepScan, existing, with_settings
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.progress import shown_progress
from tightlip.core.run_folder import DP_CHECK, DP_CHECK_RESULT, is_run
from tightlip.report.kit.table import printed_table
from tightlip.scan.options import ModelSettings

if TYPE_CHECKING:
    from tightlip.audit.dp_check import DPCheck

Run = Annotated[str, existing(typer.Argument, "RUN", "A run of tightlip train.")]
LeftOut = Annotated[
    list[Path] | None,
    existing(
        typer.Option, "KEY", "A key.json of canaries, which are left out. May be given again."
    ),
]
_RATES = {"tpr_at_1_percent_fpr": "at 1%", "tpr_at_0_1_percent_fpr": "at 0.1%"}


@with_settings(ResamplingSettings, ModelSettings)
def membership(
    run: Run,
    given: dict[str, Any],
    reference: Annotated[
        str | None,
        existing(
            typer.Option,
            "MODEL",
            "A model, or a run, that never saw that text; 'base' of an adapter.",
            words=["base"],
        ),
    ] = None,
    key: LeftOut = None,
    device: Device = "auto",
    keep_scan: KeepScan = True,
) -> None:
    """Measure, print, and write RUN/membership.json."""
    _check_run(run, "Membership compares what a run was trained on with what it held out")
    figures, record = _measured(
        "membership", run, key, reference=reference, device=device, keep_scan=keep_scan, **given
    )
    print_lines([_membership_table(figures), *lines_about_membership(figures), record])


@with_settings(ResamplingSettings, ModelSettings)
def groups(
    run: Run,
    given: dict[str, Any],
    against: Annotated[
        str | None, existing(typer.Option, "RUN", "The unmitigated run, to see who lost.")
    ] = None,
    key: LeftOut = None,
    device: Device = "auto",
    keep_scan: KeepScan = True,
) -> None:
    """Measure, print, and write RUN/groups.json."""
    _check_run(run, "Groups are told by what a run held out")
    figures, record = _measured(
        "groups", run, key, against=against, device=device, keep_scan=keep_scan, **given
    )
    print_lines([*_groups_tables(figures), *lines_about_groups(figures), record])


def _measured(
    what: str, run: str, keys: Sequence[Path] | None, **settings: Any
) -> tuple[dict[str, Any], str]:
    """The figures, and which file in the run they are written to."""
    from tightlip.audit.measures import planted_texts

    measure, record = getattr(tightlip, f"measure_{what}"), Path(run) / f"{what}.json"
    with shown_progress():
        figures = measure(run, without_texts=planted_texts(keys or ()), out=record, **settings)
    return figures, f"The record: {record}"


def _check_run(run: str, what_it_does: str, how_trained: str = "", *, has: str = "") -> None:
    """Refuse what is not a run, and one without the file that `has` names: the canaries."""
    lacks = "was trained without them" if is_run(Path(run)) else "is not a run of tightlip"
    if not is_run(Path(run)) or not (Path(run) / has).exists():
        raise UsageError(
            f"{what_it_does}, and {run} {lacks}. Run: tightlip train CORPUS {how_trained}--out DIR"
        )


def _membership_table(figures: dict[str, Any]) -> Any:
    scores = [
        (level, score)
        for level in ("documents", "users")
        for score in (figures[level] or {"scores": {}})["scores"].values()
        if score is not None
    ]
    rates = {name: title for name, title in _RATES.items() if any(s[name] for _, s in scores)}
    rows = [
        [
            level,
            score["title"],
            *_cells(score["auc"], ".3f"),
            *(cell for rate in rates for cell in _cells(score[rate], ".1%")),
        ]
        for level, score in scores
    ]
    headings = [
        "of",
        "score",
        *(each for name in ("AUC", *rates.values()) for each in (name, "95%")),
    ]
    return printed_table(headings, rows, num_left=2)


def _cells(figure: dict[str, Any] | None, spelled: str) -> tuple[str, str]:
    if figure is None:
        return "", ""
    value, low, high = (
        "" if figure[end] is None else f"{figure[end]:{spelled}}"
        for end in ("value", "low", "high")
    )
    return value, f"{low.removesuffix('%')}–{high}" if low else ""


def ends(figure: dict[str, Any], spelled: str) -> str:
    """An interval's two ends, or that there is none.

    >>> ends({"value": 2.0, "low": 1.0, "high": 3.0}, ".1f")
    '1.0 to 3.0'
    """
    if figure["low"] is None:
        return "no interval"
    return f"{figure['low']:{spelled}} to {figure['high']:{spelled}}"


def lines_about_membership(figures: dict[str, Any]) -> Iterator[str]:
    """What the table's figures mean, in plain sentences."""
    documents = figures["documents"]
    yield (
        f"{documents['num_members']:,} training documents against {documents['num_nonmembers']:,} held-out ones; "
        "AUC 0.5 is chance, 1 tells every one."
    )
    if documents["scores"]["loss"]["tpr_at_1_percent_fpr"] is not None:
        yield (
            "At 1%, at 0.1%: the share of those trained on that is found while so many of the others are accused; chance "
            "finds as many."
        )
    yield _verdict("document", documents)
    if (users := figures["users"]) is not None:
        yield _verdict("user", users)
    yield from figures["notes"]


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
        f"{scores[best]['title']} score names the right one {auc['value']:.0%} of the time."
    )


def _groups_tables(figures: dict[str, Any]) -> Iterator[Any]:
    """By number of training documents, the most first; then by each attribute."""
    curve = {_range(row): row for row in reversed(figures["curve"])}
    for title, rows in ({"training documents": curve} | figures["attributes"]).items():
        yield _groups_table(title, rows)


def _groups_table(title: str, rows: dict[str, Any]) -> Any:
    has_change = any(row["change"] is not None for row in rows.values())
    headings = [title, "users", "perplexity", "95%"] + ["change", "95%"] * has_change
    return printed_table(
        headings, [_groups_row(name, row, has_change) for name, row in rows.items()]
    )


def _groups_row(name: str, row: dict[str, Any], has_change: bool) -> list[str]:
    figures = [f"{row['perplexity']['value']:.1f}", ends(row["perplexity"], ".1f")]
    if has_change:
        figures += [f"{row['change']['value']:+.1f}", ends(row["change"], "+.1f")]
    return [name, f"{row['num_users']:,}", *figures]


def _range(row: dict[str, Any]) -> str:
    first, last = row["num_samples_from"], row["num_samples_to"]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def lines_about_groups(figures: dict[str, Any]) -> Iterator[str]:
    """What the table's figures mean, in plain sentences."""
    yield (
        f"{figures['num_users']:,} users with {figures['num_documents']:,} held-out documents; perplexity of all their "
        f"text {figures['perplexity']['value']:.1f} ({ends(figures['perplexity'], '.1f')})."
    )
    if (gap := figures["gap"]) is not None:
        yield _about_gap(figures, gap)
    yield from figures["notes"]


def _about_gap(figures: dict[str, Any], gap: dict[str, Any]) -> str:
    plain, log = gap["perplexity"], gap["log"]
    direction = "more" if plain["value"] >= 0 else "less"
    line = (
        f"The perplexity of the {len(figures['low'])} users with the fewest training documents rose by "
        f"{abs(plain['value']):.1f} points {direction} than that of the {len(figures['top'])} with the most "
        f"(95%: {ends(plain, '+.1f')}; in logs {log['value']:+.3f}, {ends(log, '+.3f')})."
    )
    if plain["low"] <= 0 <= plain["high"]:
        line += " The interval holds 0: this may be chance."
    return line


def dp_check(run: Run, device: Device = "auto") -> None:
    """Check, print, and refuse to let an untrue ε stand."""
    what_it_does = "The check looks at the canaries that a run was trained with"
    how_trained = "--mitigation dp --epsilon 2 --dp-check-canaries 1000 "
    _check_run(run, what_it_does, how_trained, has=DP_CHECK)
    from tightlip.audit.dp_check import check_run  # with torch

    check = check_run(run, device=device)
    print_lines([*lines_about_check(check), f"The record: {Path(run) / DP_CHECK_RESULT}"])
    if check.verdict == "contradicted":
        raise GuaranteeError(
            f"{run} claims ε {check.claimed_epsilon:.3g}, and its canaries show at least "
            f"{rounded_down(check.epsilon_lower_bound)} at {check.confidence:.0%} confidence. Do not rely on the claim; "
            "train and check again, and report it if it is contradicted twice."
        )


def lines_about_check(check: "DPCheck") -> list[str]:
    """The finding in plain sentences."""
    guessed = (
        f"{check.num_correct:,} of {check.num_guesses:,} guesses about {check.num_canaries:,} canaries "
        f"were right; {check.num_guesses // 2:,} would be by chance."
    )
    bound = (
        f"ε is at least {rounded_down(check.epsilon_lower_bound)} at δ {check.delta:g}, "
        f"with {check.confidence:.0%} confidence."
    )
    if check.claimed_epsilon is None:
        return [guessed, bound, "The run claims no ε."]
    verdict = "contradicted" if check.verdict == "contradicted" else "not contradicted"
    return [guessed, bound, f"The run's claim, ε {check.claimed_epsilon:.3g}, is {verdict}."]


def rounded_down(epsilon: float) -> str:
    """Two decimals, never more than was shown.

    >>> rounded_down(1.239), rounded_down(0.0)
    ('1.23', '0.00')
    """
    return f"{math.floor(epsilon * 100) / 100:.2f}"
