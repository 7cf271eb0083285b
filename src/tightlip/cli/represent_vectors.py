"""`tightlip represent encode` and `classify`: the device's work and the server's."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightlip.cli.options import BadRows, TextColumn, UserColumn
from tightlip.cli.options import Device as DeviceName
from tightlip.core.progress import shown_progress

if TYPE_CHECKING:
    from tightlip.api.represent_vectors import Encoded


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
    from tightlip.api.represent_vectors import represent_encode

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
    from tightlip.api.represent_vectors import TOLD_RELEASES, costs
    from tightlip.cli.represent_guarantee import show_guarantee
    from tightlip.core.figures import rounded_up
    from tightlip.representation.guarantees import BARE, VectorMechanism, cost_of_texts

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

    from tightlip.api.represent_vectors import represent_classify
    from tightlip.core.errors import UsageError
    from tightlip.representation.vectors import read_vectors

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
