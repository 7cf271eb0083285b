"""`tightlip canaries plant`, `choose` and `measure`: secrets in a corpus, and what a model keeps."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer

import tightlip
from tightlip.audit.settings import ChoiceConfig, ExposureConfig
from tightlip.cli import Gate, GateSettings, print_lines
from tightlip.cli.flags import KeptScan, Keys, OnDevice, argument, with_settings
from tightlip.core.errors import UsageError
from tightlip.core.files import claimed
from tightlip.core.progress import shown_progress
from tightlip.corpus.canaries import CanaryConfig, exposed_above_bits
from tightlip.corpus.prepare_config import ColumnSettings
from tightlip.report.kit.table import printed_table
from tightlip.scan.options import ModelSettings

MOST_LISTED = 5
Entry = dict[str, Any]


@with_settings(CanaryConfig, ColumnSettings)
def plant(
    corpus: Annotated[str, argument("CORPUS", "The text to plant them in.")],
    out: Annotated[Path, typer.Option(help="A new folder for the corpus and the key.")],
    given: dict[str, Any],
) -> None:
    """Plant, and say where corpus and key are."""
    with shown_progress():
        planted = tightlip.plant_canaries(corpus, out, **given)
    num_copies = sum(canary.repetitions for canary in planted.canaries)
    num_users = len({canary.user for canary in planted.canaries})
    print_lines(
        [
            f"Planted {len(planted.canaries):,} canaries with {num_users:,} users, {num_copies:,} copies in all.",
            f"The corpus: {out / 'corpus.parquet'}",
            f"The key: {out / 'key.json'}. Keep it from whoever trains.",
        ]
    )


@with_settings(OnDevice, KeptScan, ChoiceConfig, key=Keys)
def choose(
    run: Annotated[str, argument("RUN", "An unmitigated run.")],
    out: Annotated[Path, typer.Option(help="A file for the key.")],
    given: dict[str, Any],
) -> None:
    """Choose, and say whose text was left out. What `key` names as planted is never chosen."""
    with shown_progress():
        chosen = tightlip.choose_canaries(run, out, **given)
    lines = [
        f"Chosen: of {len(chosen.canaries):,} users the training document that surprises {run} most."
    ]
    if chosen.num_users_left_out:
        lines.append(
            f"Left out: {chosen.num_users_left_out:,} users with no document that is long enough and spelt in known words."
        )
    key_line = f"The key: {out}. It holds real text. Measure other models than this run's with it."
    print_lines([*lines, key_line])


@with_settings(OnDevice, ExposureConfig, ModelSettings, GateSettings)
def measure(
    model: Annotated[str, argument("MODEL", "A run, or a model's folder.")],
    given: dict[str, Any],
    key: Keys = None,
    out: Annotated[Path | None, typer.Option(help="A file for the JSON list.")] = None,
) -> None:
    """Measure, and print a table for each kind of canary."""
    if not key:
        raise UsageError(
            f"measure needs the key. Run: tightlip canaries measure {model} --key DIR/key.json"
        )
    from tightlip.audit.canaries.exposure import FIGURES, gated

    gate = Gate(
        "canaries measure", given, FIGURES, lambda e: {"": gated(e)}, record="exposures.json"
    )
    with claimed(out) if out else nullcontext(), shown_progress():
        entries = tightlip.measure_canaries(model, key, out=out, **given)
    where = [] if out is None else [f"The list: {out}"]
    lines = [*canary_tables(entries), *canary_lines(entries), *where]
    gate.judge(entries, lambda: print_lines(lines))


def canary_tables(entries: list[Entry]) -> list[Any]:
    """Tables by number of repetitions and of the most exposed users, then of real texts; as far
    as there are any."""
    tables = []
    if planted := [one for one in of_kind(entries, "planted") if one["low"] is not None]:
        tables += [_table("canaries", planted, _planted_columns(planted)), _most_exposed(planted)]
    if real := of_kind(entries, "real"):
        tables.append(_table("real texts", real, _REAL_COLUMNS))
    return tables


def canary_lines(entries: list[Entry]) -> list[str]:
    """What the tables' figures mean, in plain sentences."""
    every, real = of_kind(entries, "planted"), of_kind(entries, "real")
    planted = [one for one in every if one["low"] is not None]
    lines = [_threshold_line(planted), *_cannot_lines(planted)] if planted else []
    if num := len(every) - len(planted):
        lines.append(f"{num:,} planted canaries have no exposure: their template or its lists hold a word that the model lacks.")  # fmt: skip
    lines += [*_tab_lines(every, "planted"), *_tab_lines(real, "real"), *_sampled_lines(planted)]
    if num := sum(one["perplexity"] is None for one in real):
        lines.append(
            f"{num:,} real texts hold a word that this model's vocabulary lacks: it cannot complete them."
        )
    return lines


def of_kind(entries: list[Entry], kind: str) -> list[Entry]:
    return [one for one in entries if one["kind"] == kind]


Columns = Sequence[tuple[str, Callable[[list[Entry]], str]]]


def _planted_columns(planted: list[Entry]) -> Columns:
    above = exposed_above_bits(len(planted))
    return (
        ("mean exposure, bits", lambda group: f"{mean(one['exposure_bits'] for one in group):.1f}"),
        ("lowest to highest", _span),
        ("exposed", lambda group: _num_exposed(group, above)),
        ("tab", _num_tab),
    )


def _span(group: list[Entry]) -> str:
    """From the least that any of them may have to the most, intervals counted."""
    return f"{min(one['low'] for one in group):.1f} to {max(one['high'] for one in group):.1f}"


def _most_exposed(planted: list[Entry]) -> Any:
    """The users whose canaries the model knows best, by what is certain."""
    planted = sorted(planted, key=lambda one: (-one["low"], -one["exposure_bits"]))[:MOST_LISTED]
    rows = []
    for one in planted:
        bits = [f"{one[name]:.1f}" for name in ("exposure_bits", "low", "high")]
        tab = "yes" if one["tab"] else "no"
        rows.append([one["user"], f"{one['repetitions']:,}", *bits, tab])
    return printed_table(["most exposed", "repeated", "bits", "at least", "at most", "tab"], rows)


def _num_exposed(group: list[Entry], above: float) -> str:
    """None is no finding where not even a canary known by heart would be one."""
    from tightlip.audit.canaries.exposure import can_be_shown

    if not (able := [one for one in group if can_be_shown(one, above)]):
        return "cannot show"
    of_these = "" if len(able) == len(group) else f" of {len(able):,}"
    return f"{sum(one['low'] > above for one in able):,}{of_these}"


def _num_tab(group: list[Entry]) -> str:
    return f"{sum(one['tab'] for one in group):,}"


def _median_perplexity(group: list[Entry]) -> str:
    known = [one["perplexity"] for one in group if one["perplexity"] is not None]
    return f"{median(known):,.0f}" if known else "-"


_REAL_COLUMNS: Columns = (("median perplexity", _median_perplexity), ("tab", _num_tab))


def _table(name: str, entries: list[Entry], columns: Columns) -> Any:
    rows = []
    for times in sorted({one["repetitions"] for one in entries}):
        group = [one for one in entries if one["repetitions"] == times]
        rows.append([f"{times:,}", f"{len(group):,}", *(value(group) for _, value in columns)])
    return printed_table(["repeated", name, *(title for title, _ in columns)], rows, num_left=0)


def _threshold_line(planted: list[Entry]) -> str:
    return (
        f"Exposed: above {exposed_above_bits(len(planted)):.1f} bits, which chance passes for one of {len(planted):,} canaries in 5 of "
        "100 models that never saw them. Such models show 1.4 bits on average."
    )


def _cannot_lines(planted: list[Entry]) -> Iterator[str]:
    """Of which templates exposure cannot be shown, and what to do about it."""
    from tightlip.audit.canaries.exposure import can_be_shown, most_bits, samples_needed

    above = exposed_above_bits(len(planted))
    for name in dict.fromkeys(one["template"] for one in planted):
        group = [one for one in planted if one["template"] == name]
        unseen = [one for one in group if not can_be_shown(one, above)]
        if not unseen:
            continue
        most = max(unseen, key=most_bits)
        advice = "Plant fewer canaries, or use larger slots."
        if math.log2(most["space"]) > above:
            advice = f"Measure with --num-samples {samples_needed(len(planted)):,}."
        yield (
            f"Exposure of {name!r} cannot be shown: a canary known by heart has {most_bits(most):.1f} bits here, and "
            f"more than {above:.1f} are needed. {advice}"
        )


def _tab_lines(group: list[Entry], kind: str) -> Iterator[str]:
    from tightlip.audit.canaries.tab_attack import tab_ceiling

    if group:
        yield f"Tab: {_num_tab(group)} of {len(group):,} {kind} canaries are completed."
    if (most := tab_ceiling(group)) < len(group):
        yield f"Tab: at most {most:,} of {len(group):,} can succeed, for the others begin like one of these."


def _sampled_lines(planted: list[Entry]) -> Iterator[str]:
    if sampled := [one for one in planted if not one["exact"]]:
        worst = max(one["fit_ks"] for one in sampled)
        fewest = min(one["num_samples"] for one in sampled)
        yield (
            f"{len(sampled):,} exposures are estimated from sampled candidates, {fewest:,} of each template; the fitted "
            f"curve is off by at most {worst:.3f} (Kolmogorov-Smirnov)."
        )
