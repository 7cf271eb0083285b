"""`tightlip canaries`: plant made-up secrets in a corpus, or choose real ones; measure what a
model keeps of them."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer

_PLANT, _CHOOSE, _MEASURE = "With plant", "With choose", "With measure"
# Which actions each flag is for; --out is for all of them.
_FOR = {
    **dict.fromkeys(
        ("template", "repetitions", "per_user", "words", "names", "num_words"), ("plant",)
    ),
    **dict.fromkeys(("user_column", "text_column", "bad_rows"), ("plant",)),
    "min_tokens": ("choose",),
    **dict.fromkeys(("enumerate_up_to", "num_samples", "prompt_tokens"), ("measure",)),
    "key": ("choose", "measure"),
    "device": ("choose", "measure"),
    "seed": ("plant", "measure"),
}


def _option(text: str, panel: str | None, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def canaries(
    action: Annotated[
        str, typer.Argument(help="'plant', 'choose' or 'measure'.", metavar="ACTION")
    ],
    source: Annotated[
        str,
        typer.Argument(
            help="plant: the corpus. choose: an unmitigated run. measure: a run, or a model's folder.",
            metavar="CORPUS|RUN|MODEL",
        ),
    ],
    out: Annotated[
        Path | None,
        _option(
            "plant: a new folder. choose: a file for the key. measure: a file for the JSON list.",
            None,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        _option("plant, measure: decides the secrets, or the decoys sampled; 0.", None),
    ] = None,
    key: Annotated[
        list[Path] | None,
        _option(
            "measure: the key.json of what was planted, or a key that choose wrote. choose: what was planted, never to "
            "be chosen. May be given again.",
            None,
        ),
    ] = None,
    device: Annotated[
        str | None, _option("choose, measure: cpu, cuda, or auto (default).", None)
    ] = None,
    template: Annotated[
        list[str] | None,
        _option(
            "Such as 'My ID is {digits:6}'; slots {digits:N}, {words:N}, {names}. May be given "
            "again. None: five random words, for each user.",
            _PLANT,
        ),
    ] = None,
    repetitions: Annotated[
        str | None,
        _option("How often: one canary a number. The paper's 1 to 50 unless given.", _PLANT),
    ] = None,
    per_user: Annotated[
        bool | None, _option("Canaries of their own for each user.", _PLANT, "--per-user")
    ] = None,
    words: Annotated[
        Path | None, _option("A file of words, one a line, for {words:N}.", _PLANT)
    ] = None,
    names: Annotated[
        Path | None, _option("A file of names, one a line, for {names}.", _PLANT)
    ] = None,
    num_words: Annotated[
        int | None,
        _option("Without such a file: so many of the corpus' most frequent; 1,000.", _PLANT),
    ] = None,
    user_column: Annotated[
        str | None, _option("The column that says who wrote a document; user.", _PLANT)
    ] = None,
    text_column: Annotated[
        str | None, _option("The column that holds the text; text.", _PLANT)
    ] = None,
    bad_rows: Annotated[
        str | None, _option("An unusable row: error (default) or skip (counted).", _PLANT)
    ] = None,
    min_tokens: Annotated[
        int | None, _option("Only documents of at least so many tokens; 5.", _CHOOSE)
    ] = None,
    enumerate_up_to: Annotated[
        int | None,
        _option("Score every candidate where there are no more; 1,000,000.", _MEASURE),
    ] = None,
    num_samples: Annotated[
        int | None,
        _option(
            "Otherwise score at least so many, and estimate; 20,000, and 95 for each canary.",
            _MEASURE,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, _option("Tokens that the tab attack types before it accepts; 1.", _MEASURE)
    ] = None,
) -> None:
    """Plant made-up secrets in a corpus, or choose real ones, and measure what a model keeps."""
    settings = {
        name: value for name, value in locals().items() if name in _FOR and value is not None
    }
    from tightlip.core.errors import UsageError
    from tightlip.core.registry import unknown

    actions = {"plant": _plant, "choose": _choose, "measure": _measure}
    if action not in actions:
        raise UsageError(unknown("action", action, list(actions)))
    for name in settings:
        if action not in _FOR[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} does nothing with 'canaries {action}'. Leave it out."
            )
    actions[action](source, out, settings)


def _numbers(given: str) -> tuple[int, ...]:
    from tightlip.core.errors import UsageError

    try:
        return tuple(int(number) for number in given.split(","))
    except ValueError:
        raise UsageError(
            f"--repetitions {given!r} is no list of numbers. Write it so: --repetitions 1,10,100"
        ) from None


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _said(line: str) -> None:
    from rich.console import Console

    Console().print(line, highlight=False, soft_wrap=True)


def _plant(corpus: str, out: Path | None, settings: dict[str, Any]) -> None:
    import tightlip
    from tightlip.core.errors import UsageError
    from tightlip.core.progress import shown_progress

    if out is None:
        raise UsageError(
            f"plant needs a folder to write to. Run: tightlip canaries plant {corpus} --out DIR"
        )
    readers: dict[str, Any] = {"repetitions": _numbers, "words": _lines, "names": _lines}
    settings = {name: readers.get(name, _same)(value) for name, value in settings.items()}
    templates = tuple(settings.pop("template", ()))
    with shown_progress():
        planted = tightlip.plant_canaries(corpus, out, templates=templates, **settings)
    num_copies = sum(canary.repetitions for canary in planted.canaries)
    num_users = len({canary.user for canary in planted.canaries})
    _said(
        f"Planted {len(planted.canaries):,} canaries with {num_users:,} users, {num_copies:,} copies in all."
    )
    _said(f"The corpus: {out / 'corpus.parquet'}")
    _said(f"The key: {out / 'key.json'}. Keep it from whoever trains.")


def _same(value: Any) -> Any:
    return value


def _choose(run: str, out: Path | None, settings: dict[str, Any]) -> None:
    import tightlip
    from tightlip.core.errors import UsageError
    from tightlip.core.progress import shown_progress

    if out is None:
        raise UsageError(
            f"choose needs a file to write to. Run: tightlip canaries choose {run} --out FILE"
        )
    with shown_progress():
        chosen = tightlip.choose_canaries(run, out, **settings)
    _said(
        f"Chosen: of {len(chosen.canaries):,} users the training document that surprises {run} most."
    )
    if chosen.num_users_left_out:
        _said(
            f"Left out: {chosen.num_users_left_out:,} users with no document that is long enough and spelt in known words."
        )
    _said(f"The key: {out}. It holds real text. Measure other models than this run's with it.")


def _measure(model: str, out: Path | None, settings: dict[str, Any]) -> None:
    from rich.console import Console

    import tightlip
    from tightlip.core.errors import UsageError
    from tightlip.core.progress import shown_progress

    keys = settings.pop("key", None)
    if not keys:
        raise UsageError(
            f"measure needs the key. Run: tightlip canaries measure {model} --key DIR/key.json"
        )
    with shown_progress():
        found = tightlip.measure_canaries(model, keys, out=out, **settings)
    for table in canary_tables(found):
        Console().print(table)
    for line in canary_lines(found):
        _said(line)
    if out is not None:
        _said(f"The list: {out}")


# What was measured of canaries, in the terminal: a table for each kind, and plain sentences


Entry = dict[str, Any]
MOST_LISTED = 5


def canary_tables(found: list[Entry]) -> list[Any]:
    """Tables by number of repetitions and of the most exposed users, then of real texts; as far
    as there are any."""
    tables = []
    if planted := of_kind(found, "planted"):
        tables += [_table("canaries", planted, _planted_columns(planted)), _most_exposed(planted)]
    if real := of_kind(found, "real"):
        tables.append(_table("real texts", real, _REAL_COLUMNS))
    return tables


def canary_lines(found: list[Entry]) -> list[str]:
    """What the tables' figures mean, in plain sentences."""
    planted, real = of_kind(found, "planted"), of_kind(found, "real")
    lines = [_threshold_line(planted), *_cannot_lines(planted)] if planted else []
    lines += [
        line for kind in ("planted", "real") for line in _tab_lines(of_kind(found, kind), kind)
    ]
    return lines + _sampled_lines(planted) + _unknown_lines(real)


def of_kind(found: list[Entry], kind: str) -> list[Entry]:
    return [one for one in found if one["kind"] == kind]


Columns = Sequence[tuple[str, Callable[[list[Entry]], str]]]


def _planted_columns(planted: list[Entry]) -> Columns:
    above = _threshold(planted)
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
    from rich.table import Table
    from rich.text import Text

    planted = sorted(planted, key=lambda one: (-one["low"], -one["exposure_bits"]))[:MOST_LISTED]
    table = Table(box=None, pad_edge=False)
    table.add_column("most exposed")
    for title in ("repeated", "bits", "at least", "at most", "tab"):
        table.add_column(title, justify="right")
    for one in planted:
        bits = [f"{one[name]:.1f}" for name in ("exposure_bits", "low", "high")]
        table.add_row(
            Text(one["user"]), f"{one['repetitions']:,}", *bits, "yes" if one["tab"] else "no"
        )
    return table


def _num_exposed(group: list[Entry], above: float) -> str:
    """None is no finding where not even a canary known by heart would be one."""
    from tightlip.audit.canaries.exposure import can_be_shown

    able = [one for one in group if can_be_shown(one, above)]
    if not able:
        return "cannot show"
    of_these = "" if len(able) == len(group) else f" of {len(able):,}"
    return f"{sum(one['low'] > above for one in able):,}{of_these}"


def _num_tab(group: list[Entry]) -> str:
    return f"{sum(one['tab'] for one in group):,}"


def _median_perplexity(group: list[Entry]) -> str:
    known = [one["perplexity"] for one in group if one["perplexity"] is not None]
    return f"{median(known):,.0f}" if known else "-"


_REAL_COLUMNS: Columns = (("median perplexity", _median_perplexity), ("tab", _num_tab))


def _table(name: str, found: list[Entry], columns: Columns) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("repeated", name, *(title for title, _ in columns)):
        table.add_column(title, justify="right")
    for times in sorted({one["repetitions"] for one in found}):
        group = [one for one in found if one["repetitions"] == times]
        table.add_row(f"{times:,}", f"{len(group):,}", *(value(group) for _, value in columns))
    return table


def _threshold(planted: list[Entry]) -> float:
    from tightlip.corpus.canaries import exposed_above_bits

    return exposed_above_bits(max(len(planted), 1))


def _threshold_line(planted: list[Entry]) -> str:
    return (
        f"Exposed: above {_threshold(planted):.1f} bits, which chance passes for one of {len(planted):,} canaries in 5 of "
        "100 models that never saw them. Such models show 1.4 bits on average."
    )


def _cannot_lines(planted: list[Entry]) -> list[str]:
    """Of which templates exposure cannot be shown, and what to do about it."""
    from tightlip.audit.canaries.exposure import can_be_shown, most_bits, samples_needed

    above, lines = _threshold(planted), []
    for name in dict.fromkeys(one["template"] for one in planted):
        group = [one for one in planted if one["template"] == name]
        unseen = [one for one in group if not can_be_shown(one, above)]
        if not unseen:
            continue
        most = max(unseen, key=most_bits)
        advice = (
            f"Measure with --num-samples {samples_needed(len(planted)):,}."
            if math.log2(most["space"]) > above
            else "Plant fewer canaries, or use larger slots."
        )
        lines.append(
            f"Exposure of {name!r} cannot be shown: a canary known by heart has {most_bits(most):.1f} bits here, and "
            f"more than {above:.1f} are needed. {advice}"
        )
    return lines


def _tab_lines(group: list[Entry], kind: str) -> list[str]:
    if not group:
        return []
    lines = [f"Tab: {_num_tab(group)} of {len(group):,} {kind} canaries are completed."]
    from tightlip.audit.canaries.tab_attack import most_successes

    most = most_successes([(one["prompt"], one["text"]) for one in group])
    if most < len(group):
        lines.append(
            f"Tab: at most {most:,} of {len(group):,} can succeed, for the others begin like one of these."
        )
    return lines


def _sampled_lines(planted: list[Entry]) -> list[str]:
    sampled = [one for one in planted if not one["exact"]]
    if not sampled:
        return []
    worst = max(one["fit_ks"] for one in sampled)
    fewest = min(one["num_samples"] for one in sampled)
    return [
        f"{len(sampled):,} exposures are estimated from sampled candidates, {fewest:,} of each template; the fitted "
        f"curve is off by at most {worst:.3f} (Kolmogorov-Smirnov)."
    ]


def _unknown_lines(real: list[Entry]) -> list[str]:
    num = sum(one["perplexity"] is None for one in real)
    if not num:
        return []
    return [
        f"{num:,} real texts hold a word that this model's vocabulary lacks: it cannot complete them."
    ]
