"""`tightlip train`: a language model with snapshots, from a raw or a prepared corpus; and `tightlip
ledger`: what a run, or several together, may promise."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import tightlip
from tightlip.cli import flags, print_estimate, print_json, since_start
from tightlip.cli.flags import Config, DryRun, Json, argument, with_settings
from tightlip.core import figures
from tightlip.core.errors import UsageError
from tightlip.core.progress import shown_progress, terminal
from tightlip.core.registry import names_of, unknown
from tightlip.core.settings import Settings, about, check_names, names_in, read_toml, settings_of
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.report.kit.table import printed_lines
from tightlip.training.config import MitigationConfig, RunOptions, TrainConfig, mitigation_config

if TYPE_CHECKING:
    from tightlip.core.run_folder import RunRecord


_TABLES = {"train": TrainConfig, "prepare": PrepareConfig, "options": RunOptions}
# What a run's own config.toml has beyond settings.
_RECORDED = ("corpus", "start", "versions", "selection")
_MORE = (
    "Not listed, and there: every flag of tightlip prepare, and the rarer ones in docs/training.md."
)
# Figures that a ledger may have beside the promise: what they are called, and what they are worth.
_OTHER_EPSILONS = {
    "epsilon_so_far": ("ε so far", "of the steps taken; the promise is that of the plan"),
    "epsilon_rdp": ("ε by RDP", "a looser upper bound"),
    "epsilon_as_published": ("by Gaussian DP", "as published in papers; no guarantee"),
}
# Of what `tightlip prepare` takes, listed here too; the others work without being listed.
_OF_A_RAW_CORPUS = (
    *("user_column", "text_column", "format", "validation", "public_validation"),
    *("tokenizer", "vocabulary_size"),
)


def train(
    corpus: Annotated[
        str, argument("CORPUS", "A prepared corpus, or a raw one to prepare inside the run.")
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
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Train, from flags and a TOML file."""
    if json and not dry_run:
        raise UsageError("--json prints what --dry-run expects. Add --dry-run, or leave it out.")
    tables, given = _tables(config) if config else {}, flags.parsed([TrainConfig], given)
    if mitigation is not None:
        given = {"mitigation": mitigation, **given}
    settings, prepare, options = (tables.get(table, {}) | _of(given, table) for table in _TABLES)
    TrainConfig.from_tree(settings, str(config or ""))  # refused with the name of the file
    own = settings.pop(settings.get("mitigation", "none"), {})  # the file's table of its name
    with shown_progress() if flags.is_first_process() else nullcontext():
        call: Any = tightlip.estimate_train if dry_run else tightlip.train
        start_up = since_start()
        run = call(
            corpus,
            out,
            prepare=prepare or None,
            options=RunOptions.from_tree(options, str(config)),
            **settings | own,
        )
    if dry_run:
        print_estimate(run, start_up, as_json=json)
    elif flags.is_first_process():
        _show(run, terminal())


def _with_flags_for(args: list[str]) -> Callable[..., None]:
    """The command with the flags of the mitigation that its arguments name."""
    given, others = _known_in(args)
    path = given.get("config")
    in_file = _tables(Path(path)).get("train", {}).get("mitigation") if path else None
    name = given.get("mitigation") or in_file or "none"
    own = MitigationConfig if name == "none" else mitigation_config(name)
    _explain_foreign_flags(others, own, name)
    return _with_flags_of(own)


def _with_flags_of(own: type[MitigationConfig]) -> Callable[..., None]:
    listed = {
        *(field for kind in (TrainConfig, own, RunOptions) for field in _listed(kind)),
        *_OF_A_RAW_CORPUS,
    }
    made = with_settings(TrainConfig, own, RunOptions, PrepareConfig, listed=listed)(train)
    made.epilog = _MORE  # type: ignore[attr-defined]
    return made


train.with_flags_for = _with_flags_for  # type: ignore[attr-defined]


def _known_in(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What is given of the flags that need no mitigation, and the other words.

    A path that leads nowhere is refused here, before the mitigation is imported, and torch with it.
    """
    command = flags.command_of(_with_flags_of(MitigationConfig), None)
    context = command.make_context("train", [], resilient_parsing=True, ignore_unknown_options=True)
    given, others, order = command.make_parser(context).parse_args([*args])
    for param in order:
        value = given[param.name]
        # A flag of a mitigation stands where the corpus is looked for, if it comes first.
        if param.callback is not None and isinstance(value, str) and not value.startswith("-"):
            param.process_value(context, value)
    return given, [str(given.get("corpus")), *others]


def _listed(kind: type[Settings]) -> Iterable[str]:
    return (field.name for field in settings_of(kind) if not about(field).hidden)


def _explain_foreign_flags(words: list[str], own: type[MitigationConfig], chosen: str) -> None:
    """Say of a flag that another mitigation has what it belongs to; of others Typer says enough."""
    for flag in {word.partition("=")[0] for word in words if word.startswith("--")} - _spelt(own):
        names = names_of("mitigation")
        if of := [name for name in names if flag in _spelt(mitigation_config(name))]:
            raise UsageError(
                f"{flag} means nothing to mitigation={chosen!r}. Add --mitigation {' or '.join(of)}, or leave it out."
            )


def _spelt(own: type[MitigationConfig]) -> set[str]:
    params = flags.command_of(_with_flags_of(own), None).params
    return {flag for param in params for flag in (*param.opts, *param.secondary_opts)}


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
            known = unknown("table", table, list(_TABLES))
            wrong = f"{table} = {values!r} is not a table." if table in _TABLES else known
            raise UsageError(
                f"{path}: {wrong} Settings stand under [train], [prepare] or [options]."
            )
        if table != "train":  # whose names hang on the mitigation
            check_names(_TABLES[table], values, f"{path}, [{table}]")
        elif (name := values.get("mitigation", "none")) not in names_of("mitigation"):
            known = unknown("mitigation", name, names_of("mitigation"))
            raise UsageError(f"{path}, [train]: {known}")
    return tree


def _show(run: "RunRecord", console: Console) -> None:
    last = run.metrics[-1] if run.metrics else {}
    names = ("epoch", "train_perplexity", "validation_perplexity", "validation_accuracy")
    for name in (*names, "noisy_validation_perplexity"):
        if last.get(name) is not None:
            console.print(f"{name.replace('_', ' '):24} {last[name]:.4g}")
    if run.stop == "privacy budget":
        console.print(f"{'stopped':24} by its privacy budget, after step {last['step']:,}")
    if run.guarantee.get("epsilon") is not None:
        print_guarantee(run.guarantee, console)
    if run.is_private:
        console.print(run.where_learning_shows, soft_wrap=True)
    console.print(f"The run: {run.folder}\nNext:    tightlip audit {run.folder}", soft_wrap=True)


def ledger(
    runs: Annotated[list[Path], argument("RUN", "A run or a ledger file, or several to compose.")],
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
    if record.get("insecure_seed") or (record.get("people") or {}).get("insecure_seed"):
        console.print(figures.INSECURE, style="bold red")
    # Where the noise varies, what more steps would cost is not known beforehand.
    if (after := record.get("another_1000_steps")) is not None and _mode(record) in (None, "clip"):
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
    if not (adaptive := record.get("adaptive")):
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


def _people(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What all registered runs on the same people come to, and why that may be claimed."""
    people = record.get("people") or {}
    if "runs" in people and record["epsilon"] is not None:
        yield "all runs", figures.people_words(people)
        if people["runs"] > 1:
            yield "over all runs", people["because"]
        yield "people", people["id"]


def _figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    if record["epsilon"] is None:
        return [("ε", f"none: {record['standing']}")]
    promise = f"{figures.shown_epsilon(record)} ({figures.standing_words(record)})"
    lines = [("ε of this run" if record.get("people") else "ε", promise)]
    others = {name: record.get(name) for name in _OTHER_EPSILONS}
    if others["epsilon_so_far"] == record["epsilon"]:
        del others["epsilon_so_far"]  # which is all there is to promise
    for name, epsilon in others.items():
        if epsilon is not None:
            title, meaning = _OTHER_EPSILONS[name]
            lines.append((title, f"{figures.rounded_up(epsilon)} ({meaning})"))
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
