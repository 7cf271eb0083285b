"""`tightlip train`: a language model with snapshots, from a raw or a prepared corpus."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import tightlip
from tightlip.cli.flags import Config, check_exists, with_settings
from tightlip.cli.ledger import print_guarantee
from tightlip.core.errors import UsageError
from tightlip.core.progress import shown_progress
from tightlip.core.registry import names_of, unknown
from tightlip.core.settings import Settings, about, check_names, names_in, read_toml, settings_of
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.training.config import (
    MitigationConfig,
    RunOptions,
    TrainConfig,
    mitigation_config,
    mitigations_with,
)

if TYPE_CHECKING:
    from tightlip.core.run_folder import RunRecord

_TABLES: dict[str, type[Settings]] = {
    "train": TrainConfig,
    "prepare": PrepareConfig,
    "options": RunOptions,
}
_RECORDED = ("corpus", "start", "versions")  # what a run's own config.toml has beyond settings
# Of what `tightlip prepare` takes, listed here too; the others work without being listed.
_MORE = (
    "Not listed, and there: every flag of tightlip prepare, and the rarer ones in docs/training.md."
)
_OF_A_RAW_CORPUS = ("user_column", "text_column", "validation", "tokenizer", "vocabulary_size")


def train(
    corpus: Annotated[
        str, typer.Argument(help="A prepared corpus, or a raw one to prepare inside the run.")
    ],
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    given: dict[str, Any],
    config: Config = None,
    mitigation: Annotated[
        str | None,
        typer.Option(
            help=f"What is done against leakage: {', '.join(names_of('mitigation'))}. Each has settings of "
            "its own: tightlip train --mitigation NAME --help",
            metavar="NAME",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Train, from flags and a TOML file."""
    check_exists(corpus, "a prepared corpus, or a file or folder of text")
    tables = _tables(config) if config else {}
    if mitigation is not None:
        given = {"mitigation": mitigation, **given}
    settings, prepare, options = (tables.get(table, {}) | _of(given, table) for table in _TABLES)
    with shown_progress():
        run = tightlip.train(
            corpus,
            out,
            prepare=prepare or None,
            options=RunOptions.from_tree(options, str(config)),
            **settings,
        )
    _show(run, Console())


def _with_flags_for(args: list[str]) -> Callable[..., None]:
    """The command with the flags of the mitigation that its arguments name."""
    name = _mitigation_in(args)
    own = MitigationConfig if name is None or name == "none" else mitigation_config(name)
    _explain_foreign_flags(args, own, name or "none")
    listed = {
        *(field for kind in (TrainConfig, own, RunOptions) for field in _listed(kind)),
        *_OF_A_RAW_CORPUS,
    }
    made = with_settings(TrainConfig, own, RunOptions, PrepareConfig, listed=listed)(train)
    made.epilog = _MORE  # type: ignore[attr-defined]
    return made


train.with_flags_for = _with_flags_for  # type: ignore[attr-defined]


def _mitigation_in(args: list[str]) -> str | None:
    """What --mitigation says, or the table [train] of the file that --config names."""
    if (name := _value_of("--mitigation", args)) is not None:
        return name
    path = _value_of("--config", args)
    if path is None or not Path(path).is_file():
        return None
    return read_toml(Path(path)).get("train", {}).get("mitigation")


def _value_of(flag: str, args: list[str]) -> str | None:
    for place, word in enumerate(args):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and place + 1 < len(args):
            return args[place + 1]
    return None


def _listed(kind: type[Settings]) -> Iterable[str]:
    return (field.name for field in settings_of(kind) if not about(field).hidden)


def _explain_foreign_flags(args: list[str], own: type[Settings], chosen: str) -> None:
    """Say of a flag that another mitigation has what it belongs to; of others Typer says enough."""
    known = names_in(own, *_TABLES.values())
    for word in args:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name not in known and (of := mitigations_with(name)):
            raise UsageError(
                f"{word.partition('=')[0]} means nothing to mitigation={chosen!r}. Add --mitigation {' or '.join(of)}, or leave "
                "it out."
            )


def _of(given: dict[str, Any], table: str) -> dict[str, Any]:
    """The flags for one table; the seed is the run's and the corpus'."""
    if table != "train":
        return {name: value for name, value in given.items() if name in names_in(_TABLES[table])}
    foreign = {*names_in(PrepareConfig, RunOptions)} - {*names_in(TrainConfig)}
    return {name: value for name, value in given.items() if name not in foreign}


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    """The file's tables; a name or table that would do nothing is refused.

    A run's own config.toml may be given: what it records beyond the settings is passed over.
    """
    tree = {name: value for name, value in read_toml(path).items() if name not in _RECORDED}
    for table, values in tree.items():
        if table not in _TABLES or not isinstance(values, dict):
            raise UsageError(
                f"{path}: {unknown('table', table, list(_TABLES))} Settings stand under [train], "
                f"[prepare] or [options]."
            )
        if table != "train":  # whose names hang on the mitigation
            check_names(_TABLES[table], values, f"{path}, [{table}]")
    return tree


def _show(run: "RunRecord", console: Console) -> None:
    last = run.metrics[-1] if run.metrics else {}
    for name in ("epoch", "train_perplexity", "validation_perplexity", "validation_accuracy"):
        if last.get(name) is not None:
            console.print(f"{name.replace('_', ' '):24} {last[name]:.4g}")
    if run.stop == "privacy budget":
        console.print(f"{'stopped':24} by its privacy budget, after step {last['step']:,}")
    if run.guarantee.get("epsilon") is not None:
        print_guarantee(run.guarantee, console)
    console.print(f"The run: {run.folder}\nNext:    tightlip audit {run.folder}", soft_wrap=True)
