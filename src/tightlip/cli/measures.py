"""`tightlip membership`, `groups` and `dp-check`: the other measures, as flags and words."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tightlip
from tightlip.audit.settings import ResamplingSettings
from tightlip.cli import print_lines
from tightlip.cli.flags import Device, KeepScan, Model, existing, with_settings
from tightlip.cli.gates import Gate, GateSettings
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.progress import shown_progress
from tightlip.core.run_folder import DP_CHECK, DP_CHECK_RESULT, is_run, run_around
from tightlip.corpus.prepare_config import TextSettings
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
Members = Annotated[
    str | None, existing(typer.Option, "CORPUS", "Text it was trained on. A run knows its own.")
]
Out = Annotated[Path | None, typer.Option(help="A folder for the record. For a run: RUN.")]
_RATES = {"tpr_at_1_percent_fpr": "at 1%", "tpr_at_0_1_percent_fpr": "at 0.1%"}
SAME = ("made_from.members", "made_from.held_out", "made_from.read_as")
_KINDS = (ResamplingSettings, ModelSettings, GateSettings, TextSettings)


@with_settings(*_KINDS)
def membership(
    model: Model,
    given: dict[str, Any],
    members: Members = None,
    non_members: Annotated[
        str | None, existing(typer.Option, "CORPUS", "Text like it that it was not trained on.")
    ] = None,
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
    out: Out = None,
    device: Device = "auto",
    keep_scan: KeepScan = True,
) -> None:
    """Measure, print, and write membership.json."""
    from tightlip.audit.membership import FIGURES, gated

    gate = Gate("membership", given, FIGURES, _only(gated), record="membership.json", same=SAME)
    texts = {"members": members, "non_members": non_members}
    how = {"reference": reference, "device": device, "keep_scan": keep_scan, **texts, **given}
    figures, where = _measured("membership", model, key, out, **how)
    lines = [_membership_table(figures), *lines_about_membership(figures), where]
    gate.judge(figures, lambda: print_lines(lines))


@with_settings(*_KINDS)
def groups(
    model: Model,
    given: dict[str, Any],
    held_out: Annotated[
        str | None,
        existing(typer.Option, "CORPUS", "Text it was not trained on. A run knows its own."),
    ] = None,
    members: Members = None,
    against: Annotated[
        str | None,
        existing(
            typer.Option,
            "MODEL",
            "The unmitigated run or model, to see who lost; 'base' of an adapter.",
            words=["base"],
        ),
    ] = None,
    key: LeftOut = None,
    out: Out = None,
    device: Device = "auto",
    keep_scan: KeepScan = True,
) -> None:
    """Measure, print, and write groups.json."""
    from tightlip.audit.groups import FIGURES, gated

    gate = Gate("groups", given, FIGURES, _only(gated), record="groups.json", same=SAME)
    texts = {"members": members, "held_out": held_out}
    how = {"against": against, "device": device, "keep_scan": keep_scan, **texts, **given}
    figures, where = _measured("groups", model, key, out, **how)
    lines = [*_groups_tables(figures), *lines_about_groups(figures), where]
    gate.judge(figures, lambda: print_lines(lines))


def _only(gated: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, dict[str, Any]]]:
    """Figures of a record that is about one model."""
    return lambda record: {"": gated(record)}


def _measured(
    what: str, model: str, keys: Sequence[Path] | None, out: Path | None, **settings: Any
) -> tuple[dict[str, Any], str]:
    """The figures, and which file they are written to."""
    from tightlip.audit.measures import planted_texts

    folder = out or (Path(model) if is_run(Path(model)) else None)
    texts = any(settings.get(name) for name in ("non_members", "held_out"))
    if folder is None and (texts or run_around(Path(model))):
        raise UsageError("Where should the record go? Give --out DIR.")
    measure, planted = getattr(tightlip, f"measure_{what}"), planted_texts(keys or ())
    with shown_progress():
        figures = measure(model, without_texts=planted, out=folder, **settings)
    return figures, f"The record: {Path(folder or '') / what}.json"


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
        f"{scores[best]['title']} score names the right one {math.floor(1000 * auc['value']) / 10:g}% of the time."
    )


def _groups_tables(figures: dict[str, Any]) -> Iterator[Any]:
    """By number of training documents, the most first; then by each attribute."""
    curve = {_range(row): row for row in reversed(figures["curve"])}
    for title, rows in ({"training documents": curve} | figures["attributes"]).items():
        if rows:
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


@with_settings(GateSettings)
def dp_check(run: Run, given: dict[str, Any], device: Device = "auto") -> None:
    """Check, print, and refuse to let an untrue ε stand."""
    what_it_does = "The check looks at the canaries that a run was trained with"
    how_trained = "--mitigation dp --epsilon 2 --dp-check-canaries 1000 "
    _check_run(run, what_it_does, how_trained, has=DP_CHECK)
    from tightlip.audit.dp_check import FIGURES, check_run  # with torch

    gate = Gate("dp-check", given, FIGURES, _only(dict), record=DP_CHECK_RESULT)
    check = check_run(run, device=device)
    lines = [*lines_about_check(check), f"The record: {Path(run) / DP_CHECK_RESULT}"]
    gate.judge(check.to_json(), lambda: print_lines(lines))
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
