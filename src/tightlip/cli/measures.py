"""`tightlip membership`, `groups`, `dp-check` and `compare`: the other measures, as flags and words."""

import math
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import tightlip
from tightlip.audit.settings import Matching, ResamplingSettings
from tightlip.cli import name_page, print_lines
from tightlip.cli.flags import KeptScan, Keys, Model, OnDevice, existing, path_flag, with_settings
from tightlip.cli.gates import Gate, GateSettings
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.files import read_json
from tightlip.core.progress import shown_progress, terminal
from tightlip.core.run_folder import DP_CHECK, DP_CHECK_RESULT, is_run, run_around
from tightlip.corpus.prepare_config import TextSettings
from tightlip.report.kit.table import printed_table
from tightlip.scan.options import ModelSettings

if TYPE_CHECKING:
    from tightlip.audit.dp_check import DPCheck
    from tightlip.commands import Comparison

Run = Annotated[str, existing(typer.Argument, "RUN", "A run of tightlip train.")]
LeftOut = Annotated[
    list[Path] | None,
    existing(
        typer.Option, "KEY", "A key.json of canaries, which are left out. May be given again."
    ),
]
Out = Annotated[Path | None, typer.Option(help="A folder for the record. For a run: RUN.")]
MEMBERS = path_flag("CORPUS", "Text it was trained on. A run knows its own.")
_RATES = {"tpr_at_1_percent_fpr": "at 1%", "tpr_at_0_1_percent_fpr": "at 0.1%"}
SAME = ("made_from.members", "made_from.held_out", "made_from.read_as")
_KINDS = (OnDevice, KeptScan, ResamplingSettings, ModelSettings, GateSettings, TextSettings)


@with_settings(
    *_KINDS,
    members=MEMBERS,
    non_members=path_flag("CORPUS", "Text like it that it was not trained on."),
    reference=path_flag(
        "MODEL", "A model, or a run, that never saw that text; 'base' of an adapter.", ["base"]
    ),
)
def membership(model: Model, given: dict[str, Any], key: LeftOut = None, out: Out = None) -> None:
    """Measure, print, and write membership.json."""
    _measure("membership", model, given, key, out, lines_about_membership)


@with_settings(
    *_KINDS,
    held_out=path_flag("CORPUS", "Text it was not trained on. A run knows its own."),
    members=MEMBERS,
    against=path_flag(
        "MODEL", "The unmitigated run or model, to see who lost; 'base' of an adapter.", ["base"]
    ),
)
def groups(model: Model, given: dict[str, Any], key: LeftOut = None, out: Out = None) -> None:
    """Measure, print, and write groups.json."""
    _measure("groups", model, given, key, out, lines_about_groups)


def _measure(
    what: str,
    model: str,
    given: dict[str, Any],
    keys: Sequence[Path] | None,
    out: Path | None,
    lines_about: Callable[[dict[str, Any]], Iterator[Any]],
) -> None:
    from tightlip.audit.measures import planted_texts

    audit, file = import_module(f"tightlip.audit.{what}"), f"{what}.json"
    gate = Gate(what, given, audit.FIGURES, _only(audit.gated), record=file, same=SAME)
    folder = out or (Path(model) if is_run(Path(model)) else None)
    texts = any(given.get(name) for name in ("non_members", "held_out"))
    if folder is None and (texts or run_around(Path(model))):
        raise UsageError("Where should the record go? Give --out DIR.")
    measure, planted = getattr(tightlip, f"measure_{what}"), planted_texts(keys or ())
    with shown_progress():
        figures = measure(model, without_texts=planted, out=folder, **given)
    lines = [*lines_about(figures), f"The record: {Path(folder or '') / file}"]
    gate.judge(figures, lambda: print_lines(lines))


def _only(gated: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, dict[str, Any]]]:
    """Figures of a record that is about one model."""
    return lambda record: {"": gated(record)}


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


def lines_about_membership(figures: dict[str, Any]) -> Iterator[Any]:
    """The table, and what its figures mean in plain sentences."""
    yield _membership_table(figures)
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


def lines_about_groups(figures: dict[str, Any]) -> Iterator[Any]:
    """The tables, and what their figures mean in plain sentences."""
    yield from _groups_tables(figures)
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


@with_settings(OnDevice, GateSettings)
def dp_check(run: Run, given: dict[str, Any]) -> None:
    """Check, print, and refuse to let an untrue ε stand."""
    if not is_run(Path(run)) or not (Path(run) / DP_CHECK).exists():
        lacks = "was trained without them" if is_run(Path(run)) else "is not a run of tightlip"
        raise UsageError(
            f"The check looks at the canaries that a run was trained with, and {run} {lacks}. Run: tightlip train CORPUS "
            "--mitigation dp --epsilon 2 --dp-check-canaries 1000 --out DIR"
        )
    from tightlip.audit.dp_check import FIGURES, check_run  # with torch

    gate = Gate("dp-check", given, FIGURES, _only(dict), record=DP_CHECK_RESULT)
    check = check_run(run, **given)
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


@with_settings(
    *(OnDevice, KeptScan, Matching, ResamplingSettings, ModelSettings, GateSettings, TextSettings),
    corpus=path_flag("CORPUS", "The text that models were trained on; a run knows it."),
    held_out=path_flag("CORPUS", "Text that they were not trained on."),
    key=Keys,
    reference=path_flag("MODEL", "A model that never saw the text: for ε_l and for membership."),
)
def compare(
    models: Annotated[
        list[Path],
        existing(typer.Argument, "MODEL", "Runs of tightlip train, other models, or reports."),
    ],
    given: dict[str, Any],
    out: Annotated[Path, typer.Option(help="A folder for comparison.html, .csv and .json.")] = Path(
        "comparison"
    ),
) -> None:
    """Utility, leakage, cost and guarantee of several models, and which may be compared."""
    from tightlip.audit.compared import FIGURES, gated
    from tightlip.commands import JSON

    gate = Gate("compare", given, FIGURES, lambda record: gated(record["runs"]), record=JSON)
    with shown_progress():
        made = tightlip.compare(models, out=out, **given)
    gate.judge(read_json(made.folder / JSON), lambda: show_comparison(made, terminal()))


def show_comparison(made: "Comparison", console: Console) -> None:
    """The table, the verdicts below it, and the way to the page."""
    from tightlip.report.comparison.table import terminal_tables
    from tightlip.report.comparison.words import headline, missing, tolerance_words, uncounted

    sentence, weighing = headline(made.rows)
    console.print(Text(sentence, style="bold"))
    for line in (weighing, *made.notes):
        console.print(Text(line))
    for part in terminal_tables(made.rows, console.width):
        console.print()
        console.print(part)
    console.print()
    for row in made.rows:
        words = " ".join(row["verdicts"])
        if words:
            console.print(Text.assemble((row["name"], "bold"), ": ", words))
        if row["guarantee"]["insecure"]:
            console.print(Text(f"{row['name']}: {row['guarantee']['insecure']}", style="bold red"))
    tolerance = tolerance_words(made.matching.tolerance)
    for reason in (tolerance, *uncounted(made.rows), *missing(made.rows)):
        console.print(Text(reason, style="dim"))
    name_page(made.page, console, "measure")
