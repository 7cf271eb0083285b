"""`tightlip canaries`: plant made-up secrets in a corpus, measure what a model keeps of them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tightlip.cli.options import BadRows, Device, TextColumn, UserColumn

_PLANT, _MEASURE = "With plant", "With measure"


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def canaries(
    action: Annotated[str, typer.Argument(help="'plant' or 'measure'.", metavar="ACTION")],
    source: Annotated[
        str,
        typer.Argument(
            help="plant: the corpus. measure: a run, or a model's folder.", metavar="CORPUS|MODEL"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="plant: a new folder. measure: a file for the JSON list."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides the secrets, or the decoys sampled.")] = 0,
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
        bool, _option("Canaries of their own for each user.", _PLANT, "--per-user")
    ] = False,
    words: Annotated[
        Path | None, _option("A file of words, one a line, for {words:N}.", _PLANT)
    ] = None,
    names: Annotated[
        Path | None, _option("A file of names, one a line, for {names}.", _PLANT)
    ] = None,
    num_words: Annotated[
        int, _option("Without such a file: so many of the corpus' most frequent.", _PLANT)
    ] = 1000,
    user_column: UserColumn = "user",
    text_column: TextColumn = "text",
    bad_rows: BadRows = "error",
    key: Annotated[Path | None, _option("The key.json of what was planted.", _MEASURE)] = None,
    enumerate_up_to: Annotated[
        int, _option("Score every candidate where there are no more.", _MEASURE)
    ] = 1_000_000,
    num_samples: Annotated[
        int, _option("Otherwise score so many, and estimate.", _MEASURE)
    ] = 20_000,
    prompt_tokens: Annotated[
        int, _option("Tokens that the tab attack types before it accepts.", _MEASURE)
    ] = 1,
    device: Device = "auto",
) -> None:
    """Plant made-up secrets in a corpus, and measure what a model keeps of them."""
    from tightlip.core.errors import UsageError
    from tightlip.core.registry import unknown

    for_planting = {
        "--template": template,
        "--repetitions": repetitions,
        "--per-user": per_user,
        "--words": words,
        "--names": names,
    }
    if action == "plant":
        _refuse(action, {"--key": key})
        if out is None:
            raise UsageError(
                f"plant needs a folder to write to. Run: tightlip canaries plant {source} --out DIR"
            )
        settings = {
            "templates": tuple(template or ()),
            "repetitions": _numbers(repetitions),
            "per_user": per_user,
            "words": _lines(words),
            "names": _lines(names),
            "num_words": num_words,
            "seed": seed,
        }
        columns = {"user_column": user_column, "text_column": text_column, "bad_rows": bad_rows}
        _plant(source, out, settings | columns)
    elif action == "measure":
        _refuse(action, for_planting)
        if key is None:
            raise UsageError(
                f"measure needs the key. Run: tightlip canaries measure {source} --key DIR/key.json"
            )
        settings = {
            "enumerate_up_to": enumerate_up_to,
            "num_samples": num_samples,
            "prompt_tokens": prompt_tokens,
            "seed": seed,
        }
        _measure(source, key, out, settings | {"device": device})
    else:
        raise UsageError(unknown("action", action, ["plant", "measure"]))


def _refuse(action: str, others: dict[str, Any]) -> None:
    from tightlip.core.errors import UsageError

    if given := [name for name, value in others.items() if value]:
        raise UsageError(f"{given[0]} does nothing with 'canaries {action}'. Leave it out.")


def _numbers(given: str | None) -> tuple[int, ...] | None:
    from tightlip.core.errors import UsageError

    if given is None:
        return None
    try:
        return tuple(int(number) for number in given.split(","))
    except ValueError:
        raise UsageError(
            f"--repetitions {given!r} is no list of numbers. Write it so: --repetitions 1,10,100"
        ) from None


def _lines(path: Path | None) -> list[str] | None:
    return None if path is None else path.read_text(encoding="utf-8").splitlines()


def _plant(corpus: str, out: Path, settings: dict[str, Any]) -> None:
    from rich.console import Console

    import tightlip
    from tightlip.core.progress import shown_progress

    with shown_progress():
        planted = tightlip.plant_canaries(corpus, out, **settings)
    num_copies = sum(canary.repetitions for canary in planted.canaries)
    num_users = len({canary.user for canary in planted.canaries})
    console = Console()
    console.print(
        f"Planted {len(planted.canaries):,} canaries with {num_users:,} users, {num_copies:,} copies in all.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"The corpus: {out / 'corpus.parquet'}", highlight=False, soft_wrap=True)
    console.print(
        f"The key: {out / 'key.json'}. Keep it from whoever trains.",
        highlight=False,
        soft_wrap=True,
    )


def _measure(model: str, key: Path, out: Path | None, settings: dict[str, Any]) -> None:
    from rich.console import Console

    import tightlip
    from tightlip.core.progress import shown_progress

    with shown_progress():
        found = tightlip.measure_canaries(model, key, out=out, **settings)
    console = Console()
    console.print(_table(found))
    for line in lines_of(found):
        console.print(line, highlight=False, soft_wrap=True)
    if out is not None:
        console.print(f"The list: {out}", highlight=False, soft_wrap=True)


def _table(found: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    threshold = _threshold(found)
    table = Table(box=None, pad_edge=False)
    for name in ("repeated", "canaries", "mean exposure, bits", "exposed", "tab"):
        table.add_column(name, justify="right")
    for times in sorted({one["repetitions"] for one in found}):
        group = [one for one in found if one["repetitions"] == times]
        table.add_row(
            f"{times:,}",
            f"{len(group):,}",
            f"{sum(one['exposure_bits'] for one in group) / len(group):.1f}",
            f"{sum(one['low'] > threshold for one in group):,}",
            f"{sum(one['tab'] for one in group):,}",
        )
    return table


def lines_of(found: list[dict[str, Any]]) -> list[str]:
    """What the table's figures mean, in plain sentences."""
    lines = [
        f"Exposed: above {_threshold(found):.1f} bits, which chance passes for one of {len(found):,} canaries in 5 of "
        "100 models that never saw them. Such models show 1.4 bits on average."
    ]
    num_prompts = len({one["prompt"] for one in found})
    if num_prompts < len(found):
        lines.append(
            f"Tab: at most {num_prompts:,} of {len(found):,} can succeed, for the others begin like one of these."
        )
    sampled = [one for one in found if not one["exact"]]
    if sampled:
        worst = max(one["fit_ks"] for one in sampled)
        lines.append(
            f"{len(sampled):,} exposures are estimated from sampled candidates; the fitted curve is off by "
            f"at most {worst:.3f} (Kolmogorov-Smirnov)."
        )
    return lines


def _threshold(found: list[dict[str, Any]]) -> float:
    from tightlip.audit.exposure import exposed_above_bits

    return exposed_above_bits(len(found))
