"""Texts to private vectors, vectors to labels, and what a mechanism is worth without either."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightlip.core.errors import UsageError
from tightlip.representation.guarantees import VectorMechanism, cost_record

if TYPE_CHECKING:
    import numpy as np

    from tightlip.representation.words import Masking

TOLD_RELEASES = (1, 10, 100)


def represent_guarantee(
    *,
    dimensions: int,
    epsilon: float,
    mechanism: str = "laplace-as-published",
    dropout: float = 0.0,
    delta: float = 1e-5,
    releases: Sequence[int] = TOLD_RELEASES,
) -> dict[str, Any]:
    """The guarantee record of a mechanism, and under `releases` what so many of one text cost."""
    made = VectorMechanism(
        mechanism=mechanism, dimensions=dimensions, epsilon=epsilon, delta=delta, dropout=dropout
    )
    return made.record() | {"releases": costs(made, releases)}


def costs(mechanism: VectorMechanism, releases: Sequence[int]) -> list[dict[str, Any]]:
    """ε of several releases of one text, how it was composed and for which texts, at its δ."""
    if mechanism.epsilon is None:
        return []
    return [cost_record(mechanism, number) for number in releases]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Released vectors, what stands beside them, and what they may promise.

    `most_of_one_text` and `most_of_one_user` are for whoever holds the texts: how many of these
    vectors are of one text, and of one person. `masking` tells what the marked words found, where
    some were marked. They are not in the file.
    """

    vectors: "np.ndarray"
    columns: dict[str, list[Any]]
    record: dict[str, Any]
    pair: str
    most_of_one_text: int
    most_of_one_user: int | None
    masking: "Masking | None" = None


@dataclass(frozen=True)
class _Texts:
    texts: list[str]
    users: list[str] | None
    columns: dict[str, list[Any]]


def represent_encode(
    device: Path | str,
    texts: Any,
    *,
    out: Path | str | None = None,
    text_column: str = "text",
    user_column: str = "user",
    bad_rows: str = "error",
    carry: Sequence[str] = (),
    mask: Collection[str] = (),
    mask_file: Path | str | None = None,
    mask_column: str | None = None,
    releases: int = 1,
    batch_size: int = 32,
    on: str = "auto",
    runtime: str = "torch",
) -> Encoded:
    """Vectors that may be sent in place of `texts`, by a device's half, written to `out`.

    `texts` is a list of strings, a .txt file with a text on each line, or any corpus. `carry` names
    columns to copy beside the vectors; nothing covers them. Words in `mask`, in the lines of
    `mask_file` and in each row's `mask_column` are always masked. `releases` writes each text so
    many times, with fresh masks and noise.

    Holds:
        in_order: vector n is of text n.
        textless: the text and the marked words are in no column of the file; a column to carry
            that holds one of its row's marked words is refused.
        whole: killed, it leaves no file.
    """
    from tightlip.api.audit import usable_device
    from tightlip.representation.device import load_device
    from tightlip.representation.vectors import write_vectors
    from tightlip.representation.words import as_read, masking_of

    _check_call(out, releases, carry, {text_column, mask_column, "text"})
    half = load_device(device, runtime=runtime)  # type: ignore[arg-type]
    wanted = [*carry, *([mask_column] if mask_column else [])]
    given = _read(
        texts, wanted, text_column=text_column, user_column=user_column, bad_rows=bad_rows
    )
    marks = _marks(given, mask, mask_file, mask_column)
    masking = masking_of(given.texts, marks) if any(marks) else None
    _refuse_marked(given, carry, marks)
    vectors = half.encode(
        given.texts * releases,
        marked=marks * releases,
        batch_size=batch_size,
        device=usable_device(on) if runtime == "torch" else None,
    )
    encoded = Encoded(
        vectors=vectors,
        columns=_carried(given, carry, releases),
        record=half.mechanism.record() | _together(half.mechanism, releases),
        pair=half.pair,
        most_of_one_text=releases * _most([as_read(text) for text in given.texts]),
        most_of_one_user=None if given.users is None else releases * _most(given.users),
        masking=masking,
    )
    if out is not None:
        write_vectors(out, vectors, encoded.columns, encoded.record, pair=half.pair)
    return encoded


def _check_call(
    out: Path | str | None, releases: int, carry: Sequence[str], hidden: set[str | None]
) -> None:
    if out is not None and Path(out).suffix.lower() != ".parquet":
        raise UsageError(
            f"{out} would be a Parquet file under another name. Let it end in .parquet."
        )
    if releases < 1:
        raise UsageError(f"releases={releases} would release nothing. Use 1 or more.")
    if set(carry) & hidden:
        raise UsageError(
            "The text and the marked words cannot be carried beside the vectors that hide them. "
            "Name other columns."
        )
    if releases > 1 and "release" in carry:
        raise UsageError(
            "A column 'release' cannot be carried where each text is released several times: "
            "there it tells which release a vector is. Rename yours."
        )


def _refuse_marked(given: _Texts, carry: Sequence[str], marks: list[list[str]]) -> None:
    """Refuse columns that would tell the words that are masked in the texts."""
    from tightlip.representation.words import holds_marked, marks_of

    if not any(marks):
        return
    compared = marks_of(marks, len(marks))
    for name in carry:
        # Lists and the like as they are written out: their brackets and commas part words too.
        values = zip(given.columns[name], compared, strict=True)
        num = sum(value is not None and holds_marked(str(value), each) for value, each in values)
        if num:
            raise UsageError(
                f"Column {name!r} holds a marked word in {num:,} of {len(marks):,} rows, and would carry it "
                "beside the vectors that hide it. Leave it out, or code its values."
            )


def _read(source: Any, wanted: Sequence[str], **columns: Any) -> _Texts:
    """The texts of a list, a .txt file or a corpus, with the columns asked for."""
    if isinstance(source, str | Path) and Path(source).suffix.lower() == ".txt":
        source = _lines(Path(source))
    if isinstance(source, list | tuple) and all(isinstance(text, str) for text in source):
        if wanted:
            raise UsageError(
                f"There is no column {wanted[0]!r}: these are texts alone. Give a corpus with columns."
            )
        if not source:
            raise UsageError("There is no text to encode. Give at least one.")
        return _Texts(list(source), None, {})
    return _of_corpus(source, wanted, columns)


def _lines(path: Path) -> list[str]:
    """The lines of a file. A line ends where the file says so; a form feed is white space in it."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as stream:
            return [line.removesuffix("\n").removesuffix("\r") for line in stream]
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 ({error}). Convert it first.") from error
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist. Give a file with a text on each line.") from None


def _of_corpus(source: Any, wanted: Sequence[str], columns: dict[str, Any]) -> _Texts:
    from tightlip.representation.data import open_source

    opened = open_source(source, **columns)
    texts: list[str] = []
    users: list[str] = []
    found: dict[str, list[Any]] = {name: [] for name in wanted}
    there: dict[str, None] = {columns["user_column"]: None} if opened.has_users else {}
    for batch in opened.corpus.batches():
        texts += batch.texts
        users += batch.users
        there |= dict.fromkeys(batch.attributes)
        for name, values in found.items():
            same = batch.users if name == columns["user_column"] else batch.attributes.get(name)
            values += same or [None] * len(batch)
    for name in wanted:
        if name not in there:
            raise UsageError(
                f"{opened.corpus.name} has no column {name!r}. Columns there: {', '.join(there) or 'none'}."
            )
    return _Texts(texts, users if opened.has_users else None, found)


def _marks(
    given: _Texts, mask: Collection[str], file: Path | str | None, column: str | None
) -> list[list[str]]:
    """The words to be masked in each text."""
    if isinstance(mask, str):
        mask = [mask]
    common = [*mask, *(_lines(Path(file)) if file is not None else ())]
    if column is None:
        return [common] * len(given.texts)
    return [[*common, *_words_in(value, column)] for value in given.columns[column]]


def _words_in(value: Any, column: str) -> list[str]:
    """Words of a cell: a list of them, or one string with commas or white space between."""
    if value is None:
        return []
    if isinstance(value, str):
        return value.replace(",", " ").split()
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return value
    raise UsageError(
        f"Column {column!r} holds a {type(value).__name__}, not words. Give a list of strings, or one string."
    )


def _carried(given: _Texts, carry: Sequence[str], releases: int) -> dict[str, list[Any]]:
    columns = {name: given.columns[name] * releases for name in carry}
    if releases > 1:
        columns["release"] = [
            number for number in range(1, releases + 1) for _ in range(len(given.texts))
        ]
    return columns


def _together(mechanism: VectorMechanism, releases: int) -> dict[str, Any]:
    """What the file's releases of each text cost together, where there are several."""
    return {"releases": costs(mechanism, [releases])} if releases > 1 else {}


def _most(values: list[str]) -> int:
    """How often the most frequent value stands there."""
    return max(Counter(values).values())


def represent_classify(
    server: Path | str, vectors: Any, *, out: Path | str | None = None
) -> tuple[list[str], "np.ndarray"]:
    """Each vector's likeliest label and the probabilities of all, by a server's half.

    `vectors` is a file of `represent_encode`, or an array. `out` (.parquet or .csv) gets the
    carried columns, `predicted` and `probability`.
    """
    from tightlip.representation.server import load_server
    from tightlip.representation.vectors import read_vectors

    if out is not None and Path(out).suffix.lower() not in (".parquet", ".csv"):
        raise UsageError(f"{out} has no ending that names its format. Use .parquet or .csv.")
    half = load_server(server)
    given = read_vectors(vectors) if isinstance(vectors, str | Path) else vectors
    labels, probabilities = half.classify(given)
    if out is not None:
        _write_predictions(Path(out), getattr(given, "columns", {}), labels, probabilities)
    return labels, probabilities


def _write_predictions(
    path: Path, columns: dict[str, list[Any]], labels: list[str], probabilities: "np.ndarray"
) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    from tightlip.core.files import written_whole

    told = {"predicted": labels, "probability": probabilities.max(axis=1)}
    table = pa.table({name: value for name, value in columns.items() if name not in told} | told)
    with written_whole(path) as beside:
        if path.suffix.lower() == ".csv":
            pa.csv.write_csv(table, beside)
        else:
            pa.parquet.write_table(table, beside, compression="zstd")
