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
from tightlip.audit.settings import Matching, MembershipSettings, ResamplingSettings
from tightlip.cli import Gate, GateSettings, flags, page_words, print_lines, print_overview
from tightlip.cli.flags import KeptScan, Keys, Model, OnDevice, argument, path_flag, with_settings
from tightlip.core.engines import EngineSettings
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.files import read_json, store_address
from tightlip.core.progress import shown_progress, terminal
from tightlip.core.run_folder import DP_CHECK, DP_CHECK_RESULT, ENGINE_CHECK, is_run, run_around
from tightlip.corpus.prepare_config import TextSettings
from tightlip.report.kit.table import printed_table
from tightlip.scan.options import ModelSettings

if TYPE_CHECKING:
    from tightlip.audit.dp_check import DPCheck, DPChecks
    from tightlip.commands import Comparison

Run = Annotated[str, argument("RUN", "A run of tightlip train.")]
LeftOut = Annotated[
    list[Path] | None,
    flags.option("KEY", "A key.json of canaries, which are left out. May be given again."),
]
Out = Annotated[Path | None, typer.Option(help="A folder for the record. For a run: RUN.")]
MEMBERS = path_flag("CORPUS", "Text it was trained on. A run knows its own.")
_RATES = {"tpr_at_1_percent_fpr": "at 1%", "tpr_at_0_1_percent_fpr": "at 0.1%"}
SAME = ("made_from.members", "made_from.held_out", "made_from.read_as")
_KINDS = (OnDevice, KeptScan, ModelSettings, GateSettings, TextSettings)


@with_settings(
    *(MembershipSettings, EngineSettings, *_KINDS),
    members=MEMBERS,
    non_members=path_flag("CORPUS", "Text like it that it was not trained on."),
    reference=Annotated[
        list[str] | None,
        flags.option(
            "MODEL",
            "A model, or a run, that never saw that text; 'base' of an adapter. May be given again.",
            ["base"],
        ),
    ],
)
def membership(model: Model, given: dict[str, Any], key: LeftOut = None, out: Out = None) -> None:
    """Measure, print, and write membership.json."""
    _measure("membership", model, given, key, out, lines_about_membership)


@with_settings(
    *(ResamplingSettings, *_KINDS),
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
    record = Path(folder or "") / file
    lines = [*lines_about(figures), f"The record: {store_address(record) or record}"]
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
    rows = []
    for level, score in scores:
        found = [cell for rate in rates for cell in _cells(score[rate], ".1%")]
        rows.append([level, score["title"], *_cells(score["auc"], ".3f"), *found])
    pairs = [each for name in ("AUC", *rates.values()) for each in (name, "95%")]
    return printed_table(["of", "score", *pairs], rows, num_left=2)


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
    leading = figures["leading"]["score"]
    if documents["scores"][leading]["tpr_at_1_percent_fpr"] is not None:
        yield (
            "At 1%, at 0.1%: the share of those trained on that is found while so many of the others are accused; chance "
            "finds as many."
        )
    how = "chosen on other users" if figures["leading"]["chosen"] else "named beforehand"
    yield f"The leading score, {how}: {documents['scores'][leading]['title']}."
    yield from _verdict("document", documents, leading)
    if (users := figures["users"]) is not None:
        yield from _verdict("user", users, leading)
    if within := figures["by_length"]:
        areas = [f"{each['scores'][leading]['auc']['value']:.3f}" for each in within]
        most = [f"{each['longest']:,}" for each in within]
        yield (
            f"Among documents of like length (up to {', '.join(most)} tokens) its AUC is {', '.join(areas)}."
        )
    yield from figures["notes"]


def _verdict(one: str, level: dict[str, Any], leading: str) -> Iterator[str]:
    score, number = level["scores"][leading], level["num_members"]
    auc, title, above = score["auc"], score["title"], score["num_above_all_nonmembers"]
    if auc["low"] is None or auc["low"] <= 0.5:
        yield (
            f"On average the {title} score does not tell {one}s that were trained on from {one}s that were not: its AUC's "
            "interval is not above chance."
        )
    else:
        yield (
            f"{one.capitalize()}s that were trained on can be told: of one that was and one that was not, the "
            f"{title} score names the right one {math.floor(1000 * auc['value']) / 10:g}% of the time."
        )
    if above:
        # Any of them and of the non-members is as likely the highest, so one in so many is above.
        chance = number / (level["num_nonmembers"] + 1)
        yield (
            f"{above:,} of {number:,} {one}s trained on score above every held-out one; about {chance:,.1f} would by chance."
        )


def _groups_tables(figures: dict[str, Any]) -> Iterator[Any]:
    """By number of training documents, the most first; then by each attribute."""
    curve = {_range(row): row for row in reversed(figures["curve"])}
    for title, rows in ({"training documents": curve} | figures["attributes"]).items():
        has_change = any(row["change"] is not None for row in rows.values())
        headings = [title, "users", "perplexity", "95%"] + ["change", "95%"] * has_change
        if rows:
            lines = [_groups_row(name, row, has_change) for name, row in rows.items()]
            yield printed_table(headings, lines)


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
    has_any = any((Path(run) / name).exists() for name in (DP_CHECK, ENGINE_CHECK))
    if not is_run(Path(run)) or not has_any:
        lacks = "was trained without them" if is_run(Path(run)) else "is not a run of tightlip"
        raise UsageError(
            f"The check looks at the canaries that a run was trained with, and {run} {lacks}. Run: tightlip train CORPUS "
            "--mitigation dp --epsilon 2 --dp-check-engine 1000 --out DIR"
        )
    from tightlip.audit.dp_check import FIGURES, check_run, gated  # with torch
    from tightlip.training.starting import take_back

    gate = Gate("dp-check", given, FIGURES, _only(gated), record=DP_CHECK_RESULT)
    checks = check_run(run, take_back, **given)
    lines = [*lines_about_checks(checks), f"The record: {Path(run) / DP_CHECK_RESULT}"]
    gate.judge(checks.to_json(), lambda: print_lines(lines))
    if checks.verdict == "contradicted":
        raise GuaranteeError(
            f"{run} claims ε {checks.claim}, and its canaries contradict that at {checks.confidence:.0%} confidence. "
            "The claim is taken back: ledger, card and reports show no ε for it. Train and check again, and report it if it is "
            "contradicted twice."
        )
    if checks.on_record is not None:
        raise GuaranteeError(
            f"The claim of {run} was taken back before, and no later check gives it back. On record: {checks.on_record}"
        )


def lines_about_checks(checks: "DPChecks") -> Iterator[str]:
    """The findings in plain sentences."""
    if checks.engine is not None:
        yield "Engine: canaries of known gradient, seen in every noised sum."
        yield from _about_check(checks.engine, checks)
    if checks.text is not None:
        yield "Text: planted texts, seen through the finished model."
        yield from _about_check(checks.text, checks)
        if checks.text_power is not None:
            yield (
                f"  It would notice that half the noise is missing in {checks.text_power:.0%} of runs at the very most."
            )
    if checks.claimed_epsilon is None:
        yield "The run claims no ε, so there is nothing to contradict."
    else:
        verdict = "contradicted" if checks.verdict == "contradicted" else "not contradicted"
        yield f"The run's claim, ε {checks.claim} at δ {checks.delta:.2g}, is {verdict}."


def _about_check(check: "DPCheck", checks: "DPChecks") -> Iterator[str]:
    yield (
        f"  {check.num_correct:,} of {check.num_guesses:,} guesses about {check.num_canaries:,} canaries were right; "
        f"{check.num_guesses // 2:,} would be by chance."
    )
    if check.p_value is not None:
        chance = f"At most {_percent(check.p_value)} of honest runs have as many right"
        if check.p_value >= 0.5:
            chance = "Many honest runs have as many right"
        needed = "not even all of them would contradict the claim: take more canaries"
        if check.num_to_contradict is not None:
            needed = f"{check.num_to_contradict:,} or more would contradict the claim"
        yield f"  {chance}; {needed}."
    yield (
        f"  By the guesses alone (Steinke et al.), ε is at least {rounded_down(check.epsilon_lower_bound)} at δ "
        f"{checks.delta:.2g}, with {checks.confidence:.0%} confidence."
    )


def _percent(share: float) -> str:
    return "0.1%" if share <= 0.001 else f"{math.ceil(share * 1000) / 10:g}%"


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
        list[Path], argument("MODEL", "Runs of tightlip train, other models, or reports.")
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
    from tightlip.report.comparison import headline, missing, tolerance_words, uncounted
    from tightlip.report.comparison.table import terminal_tables

    sentence, weighing = headline(made.rows)
    tables = terminal_tables(made.rows, console.width)
    print_overview(console, sentence, (weighing, *made.notes), tables)
    for row in made.rows:
        if words := " ".join(row["verdicts"]):
            console.print(Text.assemble((row["name"], "bold"), ": ", words))
        if row["guarantee"]["insecure"]:
            console.print(Text(f"{row['name']}: {row['guarantee']['insecure']}", style="bold red"))
    tolerance = tolerance_words(made.matching.tolerance)
    for reason in (tolerance, *uncounted(made.rows), *missing(made.rows)):
        console.print(Text(reason, style="dim"))
    print_lines([page_words(made.page, "measure")], console)
