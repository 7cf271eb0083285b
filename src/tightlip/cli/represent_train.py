"""`tightlip represent train` and `export`: the two halves, and the device's as ONNX."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightlip.cli.options import BadRows, TextColumn, UserColumn

if TYPE_CHECKING:
    from tightlip.api.represent_train import RepresentRun, RepresentRuns

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
    from tightlip.representation.settings import RepresentOptions, RepresentSettings

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

    from tightlip.representation.settings import RepresentSettings

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
    from tightlip.cli.represent_guarantee import show_guarantee

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
