"""`tightlip canaries`: plant made-up secrets in a corpus, or choose real ones; measure what a
model keeps of them."""

from pathlib import Path
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
    from tightlip.cli.canary_table import canary_lines, canary_tables
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
