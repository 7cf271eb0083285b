"""`tightlip ledger`: what a run, or several together, may promise."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tightlip.cli import print_json
from tightlip.cli.flags import Json, existing
from tightlip.core import figures
from tightlip.core.progress import terminal
from tightlip.report.kit.table import printed_lines


def ledger(
    runs: Annotated[
        list[Path],
        existing(typer.Argument, "RUN", "A run or a ledger file, or several to compose."),
    ],
    json_wanted: Json = False,
) -> None:
    """What a run promises, and with all registered runs on the same people."""
    from tightlip.privacy.composition import ledger as guarantee_of

    record = guarantee_of(*runs)
    if json_wanted:
        print_json(record)
        return
    console = terminal()
    console.print(printed_lines(_lines(record)))
    if record.get("insecure_seed"):
        console.print(figures.INSECURE, style="bold red")
    after = record.get("another_1000_steps")
    # Where the noise varies, what more steps would cost is not known beforehand.
    if after is not None and _mode(record) in (None, "clip"):
        whose = "the run's " if record.get("people") else ""
        console.print(f"Another 1,000 steps would bring {whose}ε to {figures.rounded_up(after)}.")


def _lines(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Every line of the record that says something, the figures first."""
    lines = [*_people(record), *_figures(record)]
    lines += [("standing", figures.standing_words(record)), ("because", record["because"])]
    if record["epsilon"] is not None:
        lines.append(("arithmetic", record.get("arithmetic") or "not recorded"))
    for name in ("mechanism", "unit", "adjacency", "sampling", "accountant"):
        lines.append((name, record.get(name) or ""))
    least = "least " if _mode(record) in ("scale", "as-published") else ""
    lines += _numbers(record, "noise_multiplier", prefix=least)
    lines += _numbers(record, "clip_norm", "sampling_rate", "num_units", "expected_batch")
    lines += _numbers(record, "documents_per_owner", "documents_taken")
    lines += _adaptive(record)
    so_far = "" if record.get("finished", True) else " so far; the run is not finished"
    planned = record.get("planned_steps")
    of = "" if planned in (None, record["steps"]) else f" of {planned:,} planned"
    lines.append(("steps", f"{record['steps']:,}{of}{so_far}"))
    lines += [("also released", _told(release)) for release in record.get("releases") or ()]
    lines += [(name, "; ".join(record.get(name) or ())) for name in ("covers", "outside")]
    return [(name, value) for name, value in lines if value]


def _mode(record: dict[str, Any]) -> str | None:
    return (record.get("adaptive") or {}).get("mode")


def _numbers(record: dict[str, Any], *names: str, prefix: str = "") -> list[tuple[str, str]]:
    known = {name: record[name] for name in names if record.get(name) is not None}
    return [(f"{prefix}{name.replace('_', ' ')}", f"{known[name]:,.6g}") for name in known]


def _adaptive(record: dict[str, Any]) -> list[tuple[str, str]]:
    """What an adaptive run did with the weights, and where they came from."""
    adaptive = record.get("adaptive")
    if not adaptive:
        return []
    lines = [("adaptive", adaptive["mode"])]
    if adaptive["mode"] != "clip":
        lines += _numbers(adaptive, "noise_multiplier", prefix="full ")
    lines += _numbers(adaptive, "least_clip", "gamma_floor", "release_noise", "averaging")
    lines += _numbers(adaptive, "planned_steps", "order", "rdp_budget", "least_weight")
    state = record.get("adaptive_state") or {}
    lines += _numbers(state, "rdp", prefix="spent ") + _numbers(state, "average", prefix="moving ")
    weights = adaptive["weights"]
    made = [weights.get(name) for name in ("normalisation", "estimator", "model", "public_corpus")]
    return [*lines, ("weights", ", ".join(str(each) for each in made if each))]


def _people(record: dict[str, Any]) -> list[tuple[str, str]]:
    """What all registered runs on the same people come to, and why that may be claimed."""
    people = record.get("people") or {}
    if "runs" not in people or record["epsilon"] is None:
        return []
    lines = [("all runs", figures.people_words(people))]
    if people["runs"] > 1:
        lines.append(("over all runs", people["because"]))
    return [*lines, ("people", people["id"])]


def _figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    if record["epsilon"] is None:
        return [("ε", f"none: {record['standing']}")]
    lines = [("ε", f"{figures.shown_epsilon(record)} ({figures.standing_words(record)})")]
    if record.get("people"):
        lines = [("ε of this run", lines[0][1])]
    if record.get("epsilon_so_far") not in (None, record["epsilon"]):
        figure = figures.rounded_up(record["epsilon_so_far"])
        lines.append(
            ("ε so far", f"{figure} (of the steps taken; the promise is that of the plan)")
        )
    if record.get("epsilon_rdp") is not None:
        lines.append(
            ("ε by RDP", f"{figures.rounded_up(record['epsilon_rdp'])} (a looser upper bound)")
        )
    if record.get("epsilon_as_published") is not None:
        figure = figures.rounded_up(record["epsilon_as_published"])
        lines.append(("by Gaussian DP", f"{figure} (as published in papers; no guarantee)"))
    return [*lines, ("δ", f"{record['delta']:g}")]


def _told(release: dict[str, Any]) -> str:
    noise = f"noise multiplier {release['noise_multiplier']:g}, δ {release['delta']:g}"
    return f"{release['name']} ({noise}): {release['note']}"


def print_guarantee(guarantee: dict[str, Any], console: Any) -> None:
    """One line with ε, its δ, unit and standing; a red one below where it protects nobody."""
    words = figures.guarantee_words(guarantee)
    console.print(f"{'guarantee':24} {words.value}", soft_wrap=True)
    if words.insecure:
        console.print(words.insecure, style="bold red", soft_wrap=True)
