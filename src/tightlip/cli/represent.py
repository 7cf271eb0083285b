"""`tightlip represent train` and `export`: the two halves, and the device's as ONNX."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightlip.cli.flags import Device
from tightlip.core.figures import rounded_up
from tightlip.core.progress import shown_progress

if TYPE_CHECKING:
    from rich.console import Console

    from tightlip.commands import AttackReport
    from tightlip.vectors.encode import Encoded
    from tightlip.vectors.run import RepresentRun, RepresentRuns


def represent_commands(guarded: Callable[..., Any]) -> typer.Typer:
    """The commands of `tightlip represent`, each with refusals in a line by `guarded`."""
    commands = typer.Typer(
        help="Send a private vector instead of the text: train, encode, classify, attack.",
        no_args_is_help=True,
        rich_markup_mode="rich",
    )
    commands.command("train")(guarded(train))
    commands.command("export")(guarded(export))
    commands.command("encode")(guarded(encode))
    commands.command("classify")(guarded(classify))
    commands.command("guarantee")(guarded(guarantee))
    commands.command("attack")(guarded(attack))
    return commands


# `tightlip represent train` and `export`: the two halves, and the device's as ONNX


DeviceName = Device
UserColumn = TextColumn = BadRows = str
_PRIVACY, _MODEL, _LENGTH = "What is hidden", "The model", "How long"
_TEXTS, _MACHINE, _ADVERSARY = "The texts", "The machine", "Method adversarial"


def _option(help_text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False)


def train(
    corpus: Annotated[
        str, typer.Argument(help="A corpus with further columns, or `bundled`: plays by speaker.")
    ],
    label: Annotated[str, typer.Option(help="The column that the server is to tell.")],
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    private: Annotated[
        str | None, _option("Columns nobody should tell, commas between.", _PRIVACY)
    ] = None,
    extractor: Annotated[
        str | None, _option("lstm (default), bag, or a Hugging Face encoder's folder.", _MODEL)
    ] = None,
    method: Annotated[
        str | None, _option("dpnr (default): noise; none, adversarial: baselines.", _PRIVACY)
    ] = None,
    mechanism: Annotated[
        str | None, _option("gaussian (default), laplace or laplace-as-published.", _PRIVACY)
    ] = None,
    epsilon: Annotated[
        float | None, _option("Of a whole vector; of a coordinate, as published.", _PRIVACY)
    ] = None,
    delta: Annotated[float | None, _option("1e-5 unless given.", _PRIVACY)] = None,
    dropout: Annotated[
        float | None, _option("The share of words masked in each text; 0.", _PRIVACY)
    ] = None,
    pooling: Annotated[str | None, _option("mean or cls; mean of a new extractor.", _MODEL)] = None,
    max_tokens: Annotated[int | None, _option("Read of each text; 128.", _MODEL)] = None,
    dimensions: Annotated[int | None, _option("Of a new extractor; 64.", _MODEL)] = None,
    vocabulary_size: Annotated[int | None, _option("Of a new extractor; 10,000.", _MODEL)] = None,
    hidden: Annotated[
        int | None, _option("The classifier's hidden layer; 0 for none.", _MODEL)
    ] = None,
    freeze: Annotated[
        bool | None, _option("Train the classifier alone.", _MODEL, "--freeze/--no-freeze")
    ] = None,
    epochs: Annotated[float | None, _option("4 unless given.", _LENGTH)] = None,
    batch_size: Annotated[int | None, _option("32 unless given.", _LENGTH)] = None,
    learning_rate: Annotated[
        float | None, _option("Of the extractor; 5e-3 of a new one, else 3e-5.", _LENGTH)
    ] = None,
    classifier_learning_rate: Annotated[float | None, _option("5e-3.", _LENGTH)] = None,
    noise_draws: Annotated[
        int | None, _option("Draws of noise for each text at a step; 8.", _LENGTH)
    ] = None,
    seed: Annotated[int | None, _option("0 unless given.", _LENGTH)] = None,
    seeds: Annotated[
        int | None, _option("Train so often, with seeds from --seed on; mean, spread.", _LENGTH)
    ] = None,
    split: Annotated[
        str | None, _option("8:1:1 by document (default), user, or column.", _TEXTS)
    ] = None,
    split_column: Annotated[
        str | None, _option("With --split column: says train, dev or test; split.", _TEXTS)
    ] = None,
    split_seed: Annotated[int | None, _option("0 unless given.", _TEXTS)] = None,
    bins: Annotated[
        list[str] | None,
        _option("Cut numbers: age=20,30, or age=..19,30.. May be given again.", _TEXTS),
    ] = None,
    user_column: UserColumn = "user",
    text_column: TextColumn = "text",
    bad_rows: BadRows = "error",
    adversary_weight: Annotated[float | None, _option("3 unless given.", _ADVERSARY)] = None,
    adversary_hidden: Annotated[int | None, _option("512 unless given.", _ADVERSARY)] = None,
    adversary_steps: Annotated[
        int | None, _option("Of the readers, for one of the extractor; 3.", _ADVERSARY)
    ] = None,
    device: Annotated[str | None, _option("auto (default), cpu or cuda.", _MACHINE)] = None,
    bf16: Annotated[
        bool | None, _option("bfloat16 on a GPU.", _MACHINE, "--bf16/--no-bf16")
    ] = None,
) -> None:
    """Train private vectors; the same command goes on where it stopped."""
    given = {name: value for name, value in locals().items() if value is not None}
    import tightlip
    from tightlip.core.progress import shown_progress
    from tightlip.vectors.settings import RepresentOptions, RepresentSettings

    options = {name: given.pop(name) for name in ("device", "bf16") if name in given}
    given["private"] = tuple(name.strip() for name in (private or "").split(",") if name.strip())
    given["bins"] = tuple(given.get("bins", ()))
    if "epochs" in given:
        given["epochs"] = _whole("epochs", given["epochs"])
    # Refused here, nobody waits for torch.
    RepresentSettings(**{name: given[name] for name in _settings_in(given)})
    with shown_progress():
        done = tightlip.represent_train(
            given.pop("corpus"), given.pop("out"), options=RepresentOptions(**options), **given
        )
    if hasattr(done, "runs"):
        _show_runs(done)
    else:
        _show_run(done)


def _settings_in(given: dict[str, Any]) -> set[str]:
    from dataclasses import fields

    from tightlip.vectors.settings import RepresentSettings

    return {field.name for field in fields(RepresentSettings)} & {*given}


def _whole(name: str, value: float) -> int:
    from tightlip.core.errors import UsageError

    if value != int(value):
        raise UsageError(f"{name}={value:g} is not a whole number. Use {int(value) + 1}.")
    return int(value)


def _show_run(run: "RepresentRun") -> None:
    from rich.console import Console

    console, metrics = Console(), run.metrics
    console.print(
        f"{metrics['num_train']:,} texts to train on, {metrics['num_dev']:,} to choose by, {metrics['num_test']:,} to test"
        + (f"; {metrics['num_dropped']:,} rows left out" if metrics["num_dropped"] else "")
    )
    console.print(f"{'test accuracy':24} {metrics['test_accuracy']:.3f}")
    if metrics["num_seen_in_train"] and metrics["test_accuracy_unseen"] is not None:
        console.print(
            f"{'  on texts not trained on':24} {metrics['test_accuracy_unseen']:.3f}"
            f"  ({metrics['num_seen_in_train']:,} test texts also stand in train)"
        )
    console.print(f"{'most frequent label':24} {metrics['majority_accuracy']:.3f}")
    console.print(f"{'best epoch':24} {metrics['best_epoch']} of {len(metrics['epochs'])}")
    _show_guarantee(run)
    console.print(
        f"The run: {run.folder}\nNext:    tightlip represent attack {run.folder}", soft_wrap=True
    )


def _show_guarantee(run: "RepresentRun") -> None:

    show_guarantee(run.guarantee, [])


def _show_runs(done: "RepresentRuns") -> None:
    from rich.console import Console

    console = Console()
    for name in ("test_accuracy", "dev_accuracy", "majority_accuracy"):
        found = done.summary[name]
        console.print(f"{name.replace('_', ' '):24} {found['mean']:.3f} ± {found['spread']:.3f}")
    console.print(f"over {len(done.runs)} seeds: mean, and standard deviation between them")
    _show_guarantee(done.runs[0])
    console.print(
        f"The runs: {done.folder}\nNext:     tightlip represent attack {done.folder}",
        soft_wrap=True,
    )


def export(
    device_half: Annotated[
        Path, typer.Argument(help="A device's half: RUN/device.", metavar="DEVICE")
    ],
    onnx: Annotated[bool, typer.Option("--onnx", help="Write an ONNX file.")] = False,
    out: Annotated[Path | None, typer.Option(help="The file to write; DEVICE/device.onnx.")] = None,
) -> None:
    """Write the device's extractor for another runtime."""
    from rich.console import Console

    import tightlip
    from tightlip.core.errors import UsageError

    if not onnx:
        raise UsageError("Nothing says what to export to. Add --onnx.")
    path = tightlip.represent_export(device_half, out=out)
    Console().print(
        f"{path}\nNext: tightlip represent encode {device_half} TEXTS --out vectors.parquet --runtime onnx",
        soft_wrap=True,
    )


# `tightlip represent guarantee`: what noise on a vector is worth, without a model at hand


def guarantee(
    dimensions: Annotated[int, typer.Option(help="Coordinates of the vector.")],
    epsilon: Annotated[
        float,
        typer.Option(
            help="For laplace-as-published: per coordinate. Otherwise of the whole vector at --delta."
        ),
    ],
    mechanism: Annotated[
        str, typer.Option(help="laplace-as-published, laplace, or gaussian.")
    ] = "laplace-as-published",
    dropout: Annotated[float, typer.Option(help="The share of words masked at random.")] = 0.0,
    delta: Annotated[
        float, typer.Option(help="The final δ; 0 with laplace is pure differential privacy.")
    ] = 1e-5,
    json_wanted: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON, all of it.")
    ] = False,
) -> None:
    """What one vector gives away: per coordinate, pure, and (ε, δ); and what more of them would."""
    from tightlip.vectors.guarantees import represent_guarantee

    record = represent_guarantee(
        dimensions=dimensions, epsilon=epsilon, mechanism=mechanism, dropout=dropout, delta=delta
    )
    if json_wanted:
        import json

        print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show_guarantee(record, record["releases"])


def show_guarantee(record: dict[str, Any], costs: list[dict[str, Any]]) -> None:
    """Print a record's lines, the texts they hold for, and what several releases cost."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _lines(record, costs):
        # Text, not str: rich would take brackets for its markup.
        table.add_row(name, Text(value))
    Console().print(table)


def _lines(record: dict[str, Any], costs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if record["epsilon"] is None:
        return [("ε", f"none: {record['standing']}"), ("because", record["because"])]
    lines = [("mechanism", _mechanism(record)), *figure_lines(record, record["standings"])]
    lines.append(("holds for", record["adjacency"]))
    if record["dropout"]:
        whole = record["any_two_texts"]
        told = [f"{name} {value}" for name, value in figure_lines(whole)]
        lines.append(("any two texts", "; ".join(told)))
    lines.append(("because", record["because"]))
    lines += [
        ("releases" if not number else "", cost_line(cost)) for number, cost in enumerate(costs)
    ]
    return [*lines, ("outside", "; ".join(record["outside"]))]


def figure_lines(
    figures: dict[str, Any], standings: dict[str, Any] | None = None
) -> list[tuple[str, str]]:
    """Per coordinate, pure and (ε, δ), each with its standing; what there is not is left out."""
    names = {"per_coordinate": "per coordinate", "pure": "pure", "epsilon": "(ε, δ)"}
    lines = []
    for key, name in names.items():
        if figures[key] is None:
            continue
        standing = f" ({standings[key]})" if standings else ""
        at = f" at δ = {figures['delta']:g}" if key == "epsilon" else ""
        lines.append((name, f"ε = {rounded_up(figures[key])}{at}{standing}"))
    return lines


def cost_line(cost: dict[str, Any]) -> str:
    """What so many vectors of one text cost together."""
    number = cost["releases"]
    which = "1 vector of a text" if number == 1 else f"{number:,} vectors of a text"
    return f"{which}: ε = {rounded_up(cost['epsilon'])} at δ = {cost['delta']:g} ({cost['how']})"


def _mechanism(record: dict[str, Any]) -> str:
    letter = "σ" if record["mechanism"] == "gaussian" else "b"
    words = f", {record['dropout']:.0%} of words masked" if record["dropout"] else ""
    return f"{record['mechanism']}, {record['dimensions']} dimensions, {letter} = {record['noise_scale']:.6g}{words}"


# `tightlip represent encode` and `classify`: the device's work and the server's


def encode(
    device_half: Annotated[
        Path, typer.Argument(help="A device's half: RUN/device.", metavar="DEVICE")
    ],
    texts: Annotated[
        str, typer.Argument(help="A corpus, or a .txt file with a text on each line.")
    ],
    out: Annotated[Path, typer.Option(help="The file of vectors to write, vectors.parquet.")],
    text_column: TextColumn = "text",
    user_column: UserColumn = "user",
    bad_rows: BadRows = "error",
    carry: Annotated[
        list[str] | None,
        typer.Option(help="A column to copy beside the vectors, as it is. May be given again."),
    ] = None,
    mask: Annotated[
        list[str] | None, typer.Option(help="A word that is always masked. May be given again.")
    ] = None,
    mask_file: Annotated[
        Path | None, typer.Option(help="A file of words that are always masked, one a line.")
    ] = None,
    mask_column: Annotated[
        str | None, typer.Option(help="A column of words to be masked in that row's text.")
    ] = None,
    releases: Annotated[
        int, typer.Option(help="Vectors of each text, each with fresh masks and noise.")
    ] = 1,
    batch_size: Annotated[int, typer.Option(help="Texts encoded at a time.")] = 32,
    device: DeviceName = "auto",
    runtime: Annotated[
        str, typer.Option(help="torch, or onnx after `represent export --onnx`.")
    ] = "torch",
) -> None:
    """Texts to private vectors: what runs on the user's device."""
    from tightlip.vectors.encode import represent_encode

    with shown_progress():
        encoded = represent_encode(
            device_half,
            texts,
            out=out,
            text_column=text_column,
            user_column=user_column,
            bad_rows=bad_rows,
            carry=carry or (),
            mask=mask or (),
            mask_file=mask_file,
            mask_column=mask_column,
            releases=releases,
            batch_size=batch_size,
            on=device,
            runtime=runtime,
        )
    _show_encoded(encoded, out)


def _show_encoded(encoded: "Encoded", out: Path) -> None:
    """The guarantee of what was written, and what the vectors of one text or person add up to."""
    from tightlip.core.figures import rounded_up
    from tightlip.vectors.guarantees import (
        BARE,
        TOLD_RELEASES,
        VectorMechanism,
        cost_of_texts,
        costs,
    )

    mechanism = VectorMechanism.from_record(encoded.record)
    show_guarantee(encoded.record, costs(mechanism, TOLD_RELEASES))
    whose = [("one text", encoded.most_of_one_text), ("one user", encoded.most_of_one_user or 1)]
    for who, most in whose:
        if most > 1 and mechanism.mechanism != BARE:
            epsilon = rounded_up(cost_of_texts(mechanism, most))
            print(
                f"Up to {most:,} of these vectors are of {who}: together ε = {epsilon} at δ = {mechanism.delta:g}, "
                "for any other texts in their place."
            )
    if (found := encoded.masking) is not None:
        print(
            f"{found.num_words:,} words masked in {found.num_texts:,} texts because they are marked; "
            f"{found.num_nowhere:,} found nowhere."
        )
    print(f"{len(encoded.vectors):,} vectors: {out}")


def classify(
    server_half: Annotated[
        Path, typer.Argument(help="A server's half: RUN/server.", metavar="SERVER")
    ],
    vectors: Annotated[Path, typer.Argument(help="A file that `represent encode` wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="A .parquet or .csv file for the labels; otherwise counts.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="A carried column with the true labels: print the accuracy.")
    ] = None,
) -> None:
    """Private vectors to labels: what runs on the server."""
    from collections import Counter

    from tightlip.core.errors import UsageError
    from tightlip.vectors.server import read_vectors, represent_classify

    columns = read_vectors(vectors).columns if label else {}
    if label and label not in columns:
        raise UsageError(
            f"{vectors} carries no column {label!r}. Columns there: {', '.join(columns) or 'none'}. "
            f"Encode with --carry {label}."
        )
    labels, _ = represent_classify(server_half, vectors, out=out)
    for name, count in Counter(labels).most_common():
        print(f"{count:>8,}  {name}")
    if label:
        right = sum(told == str(true) for told, true in zip(labels, columns[label], strict=True))
        print(f"accuracy {right / len(labels):.4f} ({right:,} of {len(labels):,})")
    if out is not None:
        print(f"The labels: {out}")


# `tightlip represent attack`: what eavesdroppers read from a run's vectors


def attack(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Runs of tightlip represent train, or folders of seeds.", metavar="RUN"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for attack.json and report.html; RUN itself, or attacks for several runs."
        ),
    ] = None,
    attackers: Annotated[
        str | None,
        typer.Option(help="Some of mlp, logistic, averaged, trees, with commas between; all."),
    ] = None,
    copies: Annotated[
        int, typer.Option(help="Releases of each text that the averaging attacker hears.")
    ] = 16,
    attributes: Annotated[
        str | None,
        typer.Option(help="Columns to read, with commas between; the run's private ones."),
    ] = None,
    entities: Annotated[
        str | None,
        typer.Option(
            help="Names in the texts: a file with a name a line, auto (NLTK or spaCy), or column:NAME with lists of ids."
        ),
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Draw the vectors by t-SNE.")] = True,
    again: Annotated[
        bool, typer.Option("--again", help="Measure anew what RUN/attack.json already answers.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Decides attackers and resampling; noise is always fresh.")
    ] = 0,
    num_bootstraps: Annotated[int, typer.Option(help="Resamples behind each interval.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Texts that are encoded at a time.")] = 32,
    device: Device = "auto",
) -> None:
    """Train attackers on a run's vectors and tell what they read, against guessing."""
    from rich.console import Console

    import tightlip
    from tightlip.core.progress import shown_progress

    with shown_progress():
        report = tightlip.represent_attack(
            runs,
            out=out,
            attackers=_listed(attackers),
            copies=copies,
            attributes=_listed(attributes),
            entities=entities,
            pictures=pictures,
            again=again,
            seed=seed,
            num_bootstraps=num_bootstraps,
            batch_size=batch_size,
            device=device,
        )
    show(report, Console())


def _listed(words: str | None) -> list[str] | None:
    return None if words is None else [word.strip() for word in words.split(",") if word.strip()]


def show(report: "AttackReport", console: "Console") -> None:
    """The headline, what was found in each run, the table, and the way to the page."""
    from rich.text import Text

    from tightlip.report.vectors.table import terminal_tables
    from tightlip.report.vectors.words import columns_of, findings, headline, notes_of

    columns = columns_of(report.results)
    console.print(Text(headline(report.results), style="bold"))
    for column in columns:
        for sentence in findings(column.first):
            prefix = f"{column.name}: " if len(columns) > 1 else ""
            console.print(Text(prefix + sentence))
    for table in terminal_tables(columns, console.width):
        console.print()
        console.print(table)
    console.print()
    for note in notes_of(report.results):
        console.print(Text(note, style="dim"))
    if report.num_kept:
        console.print(
            Text(
                f"{report.num_kept} of {len(report.results)} runs were measured before; --again measures them anew.",
                style="dim",
            )
        )
    console.print(
        f"The page, which says what each figure means: {report.page}",
        highlight=False,
        soft_wrap=True,
    )
