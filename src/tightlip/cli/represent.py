"""`tightlip represent`: private vectors trained, exported, encoded, classified and attacked."""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import tightlip
from tightlip.cli import Gate, GateSettings, page_words, print_json, print_overview, say
from tightlip.cli.flags import Json, OnDevice, argument, switch, with_settings
from tightlip.core.errors import UsageError
from tightlip.core.figures import rounded_up
from tightlip.core.files import claimed, read_json
from tightlip.core.progress import shown_progress, terminal
from tightlip.core.settings import names_in, split_settings
from tightlip.corpus.prepare_config import ColumnSettings
from tightlip.report.kit.table import printed_lines
from tightlip.vectors import settings

if TYPE_CHECKING:
    from tightlip.vectors.attack_runs import AttackReport
    from tightlip.vectors.encode import Encoded

DeviceHalf = Annotated[Path, argument("DEVICE", "A device's half: RUN/device.")]


@with_settings(settings.RepresentSettings, settings.RepresentOptions, ColumnSettings)
def train(
    corpus: Annotated[
        str,
        argument(
            "CORPUS",
            "A corpus with further columns, or `bundled`: plays by speaker.",
            words=["bundled"],
        ),
    ],
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    given: dict[str, Any],
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Train so often, with seeds from --seed on; mean, spread.",
            rich_help_panel="How long",
        ),
    ] = None,
) -> None:
    """Train, and say what was learnt and what a vector promises."""
    kinds = (settings.RepresentSettings, ColumnSettings, settings.RepresentOptions)
    *_, options = split_settings(given, *kinds)  # refused here, nobody waits for torch
    own = {name: given[name] for name in given if name not in names_in(settings.RepresentOptions)}
    with shown_progress():
        done = tightlip.represent_train(corpus, out, seeds=seeds, options=options, **own)
    several = hasattr(done, "runs")
    console, title = terminal(), "The runs:" if several else "The run:"
    for line in _over_seeds(done) if several else _of_one_run(done.metrics):
        console.print(line)
    show_guarantee((done.runs[0] if several else done).guarantee, [])
    console.print(f"{title} {done.folder}", soft_wrap=True)
    console.print(f"{'Next:':{len(title)}} tightlip represent attack {done.folder}", soft_wrap=True)


def _of_one_run(metrics: dict[str, Any]) -> Iterator[str]:
    dropped = f"; {metrics['num_dropped']:,} rows left out" if metrics["num_dropped"] else ""
    yield f"{metrics['num_train']:,} texts to train on, {metrics['num_dev']:,} to choose by, {metrics['num_test']:,} to test{dropped}"
    yield f"{'test accuracy':24} {metrics['test_accuracy']:.3f}"
    if metrics["num_seen_in_train"] and metrics["test_accuracy_unseen"] is not None:
        seen = f"({metrics['num_seen_in_train']:,} test texts also stand in train)"
        yield f"{'  on texts not trained on':24} {metrics['test_accuracy_unseen']:.3f}  {seen}"
    yield f"{'most frequent label':24} {metrics['majority_accuracy']:.3f}"
    yield f"{'best epoch':24} {metrics['best_epoch']} of {len(metrics['epochs'])}"


def _over_seeds(done: Any) -> Iterator[str]:
    for name in ("test_accuracy", "dev_accuracy", "majority_accuracy"):
        figure = done.summary[name]
        yield f"{name.replace('_', ' '):24} {figure['mean']:.3f} ± {figure['spread']:.3f}"
    yield f"over {len(done.runs)} seeds: mean, and standard deviation between them"


@with_settings(onnx=switch("--onnx", "Write an ONNX file."))
def export(
    device_half: DeviceHalf,
    given: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="The file to write; DEVICE/device.onnx.")] = None,
) -> None:
    """Write the device's extractor for another runtime."""
    if not given:
        raise UsageError("Nothing says what to export to. Add --onnx.")
    with claimed(out or device_half / "device.onnx"):
        path = tightlip.represent_export(device_half, out=out)
    terminal().print(
        f"{path}\nNext: tightlip represent encode {device_half} TEXTS --out vectors.parquet --runtime onnx",
        soft_wrap=True,
    )


@with_settings(settings.GuaranteeSettings)
def guarantee(given: dict[str, Any], json_wanted: Json = False) -> None:
    """What one vector gives away: per coordinate, pure, and (ε, δ); and what more of them would."""
    record = tightlip.represent_guarantee(**given)
    if json_wanted:
        print_json(record)
    else:
        show_guarantee(record, record["releases"])


def show_guarantee(record: dict[str, Any], costs: list[dict[str, Any]]) -> None:
    """Print a record's lines, the texts they hold for, and what several releases cost."""
    terminal().print(printed_lines(_lines(record, costs)))


def _lines(record: dict[str, Any], costs: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if record["epsilon"] is None:
        yield "ε", f"none: {record['standing']}"
        yield "because", record["because"]
        return
    yield "mechanism", _mechanism(record)
    yield from _figures(record, record["standings"])
    yield "holds for", record["adjacency"]
    if record["dropout"]:
        figures = [f"{name} {value}" for name, value in _figures(record["any_two_texts"])]
        yield "any two texts", "; ".join(figures)
    yield "because", record["because"]
    for number, cost in enumerate(costs):
        yield "" if number else "releases", _cost(cost)
    yield "outside", "; ".join(record["outside"])


def _figures(
    figures: dict[str, Any], standings: dict[str, Any] | None = None
) -> Iterator[tuple[str, str]]:
    """Per coordinate, pure and (ε, δ), each with its standing; what there is not is left out."""
    names = {"per_coordinate": "per coordinate", "pure": "pure", "epsilon": "(ε, δ)"}
    for key, name in names.items():
        if figures[key] is not None:
            standing = f" ({standings[key]})" if standings else ""
            at = f" at δ = {figures['delta']:g}" if key == "epsilon" else ""
            yield name, f"ε = {rounded_up(figures[key])}{at}{standing}"


def _cost(cost: dict[str, Any]) -> str:
    """What so many vectors of one text cost together."""
    number = cost["releases"]
    which = "1 vector of a text" if number == 1 else f"{number:,} vectors of a text"
    return f"{which}: ε = {rounded_up(cost['epsilon'])} at δ = {cost['delta']:g} ({cost['how']})"


def _mechanism(record: dict[str, Any]) -> str:
    letter = "σ" if record["mechanism"] == "gaussian" else "b"
    words = f", {record['dropout']:.0%} of words masked" if record["dropout"] else ""
    return f"{record['mechanism']}, {record['dimensions']} dimensions, {letter} = {record['noise_scale']:.6g}{words}"


@with_settings(OnDevice, settings.EncodeSettings, settings.EncodingOptions, ColumnSettings)
def encode(
    device_half: DeviceHalf,
    texts: Annotated[str, argument("TEXTS", "A corpus, or a .txt file with a text on each line.")],
    out: Annotated[Path, typer.Option(help="The file of vectors to write, vectors.parquet.")],
    given: dict[str, Any],
) -> None:
    """Encode, and say what was released."""
    on = given.pop("device", OnDevice.device)
    with claimed(out), shown_progress():
        encoded = tightlip.represent_encode(device_half, texts, out=out, on=on, **given)
    _show_encoded(encoded, out)


def _show_encoded(encoded: "Encoded", out: Path) -> None:
    """The guarantee of what was written, and what the vectors of one text or person add up to."""
    from tightlip.vectors import guarantees

    mechanism = guarantees.VectorMechanism.from_record(encoded.record)
    show_guarantee(encoded.record, guarantees.costs(mechanism, guarantees.TOLD_RELEASES))
    whose = [("one text", encoded.most_of_one_text), ("one user", encoded.most_of_one_user or 1)]
    for who, most in whose:
        if most > 1 and mechanism.mechanism != guarantees.BARE:
            epsilon = rounded_up(guarantees.cost_of_texts(mechanism, most))
            say(
                f"Up to {most:,} of these vectors are of {who}: together ε = {epsilon} at δ = {mechanism.delta:g}, "
                "for any other texts in their place."
            )
    if (masking := encoded.masking) is not None:
        say(
            f"{masking.num_words:,} words masked in {masking.num_texts:,} texts because they are marked; "
            f"{masking.num_nowhere:,} found nowhere."
        )
    say(f"{len(encoded.vectors):,} vectors: {out}")


def classify(
    server_half: Annotated[Path, argument("SERVER", "A server's half: RUN/server.")],
    vectors: Annotated[Path, argument("VECTORS", "A file that `represent encode` wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="A .parquet or .csv file for the labels; otherwise counts.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="A carried column with the true labels: print the accuracy.")
    ] = None,
) -> None:
    """Private vectors to labels: what runs on the server."""
    from tightlip.corpus.owners import columns_there
    from tightlip.vectors.server import read_vectors, represent_classify

    columns = read_vectors(vectors).columns if label else {}
    if label and label not in columns:
        raise UsageError(
            f"{vectors} carries no column {label!r}. {columns_there(columns, label)} "
            f"Encode with --carry {label}."
        )
    with claimed(out) if out else nullcontext():
        labels, _ = represent_classify(server_half, vectors, out=out)
    for name, count in Counter(labels).most_common():
        say(f"{count:>8,}  {name}")
    if label:
        right = sum(
            predicted == str(true) for predicted, true in zip(labels, columns[label], strict=True)
        )
        say(f"accuracy {right / len(labels):.4f} ({right:,} of {len(labels):,})")
    if out is not None:
        say(f"The labels: {out}")


@with_settings(
    *(OnDevice, settings.AttackSettings, settings.EncodingOptions, GateSettings),
    again=switch("--again", "Measure anew what RUN/attack.json already answers."),
)
def attack(
    runs: Annotated[
        list[Path], argument("RUN", "Runs of tightlip represent train, or folders of seeds.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for attack.json and report.html; RUN itself, or attacks for several runs."
        ),
    ] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Attack, and say what was read."""
    from tightlip.vectors.attack_runs import FIGURES, RESULT, gated

    gate = Gate("represent attack", given, FIGURES, lambda r: gated(r["runs"]), record=RESULT)
    with shown_progress():
        report = tightlip.represent_attack(runs, out=out, **given)
    gate.judge(read_json(report.folder / RESULT), lambda: show(report, terminal()))


def show(report: "AttackReport", console: Console) -> None:
    """The headline, what was found in each run, the table, and the way to the page."""
    from tightlip.report.vectors import words

    columns = words.columns_of(report.results)
    found = [
        (f"{column.name}: " if len(columns) > 1 else "") + sentence
        for column in columns
        for sentence in words.findings(column.first)
    ]
    tables = words.terminal_tables(columns, console.width)
    print_overview(console, words.headline(report.results), found, tables)
    notes = words.notes_of(report.results)
    if report.num_kept:
        notes.append(
            f"{report.num_kept} of {len(report.results)} runs were measured before; --again measures them anew."
        )
    for note in notes:
        console.print(Text(note, style="dim"))
    say(page_words(report.page), console)
