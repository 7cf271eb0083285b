"""`tightlip represent encode` as one call: texts to a file of private vectors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.devices import usable_device
from tightlip.core.errors import UsageError
from tightlip.core.settings import split_settings, takes
from tightlip.corpus.prepare_config import ColumnSettings
from tightlip.vectors.data import Columns, open_source, read_columns
from tightlip.vectors.device import load_device
from tightlip.vectors.guarantees import costs
from tightlip.vectors.masking import Masking, as_read, holds_marked, marks_of, masking_of
from tightlip.vectors.server import write_vectors
from tightlip.vectors.settings import EncodeSettings, EncodingOptions


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Released vectors, what stands beside them, and what they may promise.

    `most_of_one_text` and `most_of_one_user` are for whoever holds the texts: how many of these
    vectors are of one text, and of one person. `masking` tells what the marked words found, where
    some were marked. They are not in the file.
    """

    vectors: np.ndarray
    columns: dict[str, list[Any]]
    record: dict[str, Any]
    pair: str
    most_of_one_text: int
    most_of_one_user: int | None
    masking: Masking | None = None


@takes(EncodeSettings, EncodingOptions, ColumnSettings)
def represent_encode(
    device: Path | str,
    texts: Any,
    *,
    out: Path | str | None = None,
    on: str = "auto",
    **settings: Any,
) -> Encoded:
    """Vectors that may be sent in place of `texts`, by a device's half, written to `out`.

    `texts` is a list of strings, a .txt file with a text on each line, or any corpus. It
    runs `on` cpu, cuda or auto. The columns in `carry` are copied as they are, and nothing covers
    them.

    Holds:
        in_order: vector n is of text n.
        textless: the text and the marked words are in no column of the file; a column to carry
            that holds one of its row's marked words is refused.
        whole: killed, it leaves no file.
    """
    asked, options, columns = split_settings(
        settings, EncodeSettings, EncodingOptions, ColumnSettings
    )
    releases, carry, mask_column = asked.releases, asked.carry, asked.mask_column
    _check_call(out, releases, carry, {columns.text_column, mask_column, "text"})
    half = load_device(device, runtime=asked.runtime)
    wanted = [*carry, *([mask_column] if mask_column else [])]
    given = _read(texts, wanted, **columns.tree())
    marks = _marks(given, asked)
    masking = masking_of(given.texts, marks) if any(marks) else None
    _refuse_marked(given, carry, marks)
    vectors = half.encode(
        given.texts * releases,
        marked=marks * releases,
        batch_size=options.batch_size,
        device=usable_device(on) if asked.runtime == "torch" else None,
    )
    # What the file's releases of each text cost together, where there are several.
    together = {"releases": costs(half.mechanism, [releases])} if releases > 1 else {}
    encoded = Encoded(
        vectors=vectors,
        columns=_carried(given, carry, releases),
        record=half.mechanism.record() | together,
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


def _refuse_marked(given: Columns, carry: Sequence[str], marks: list[list[str]]) -> None:
    """Refuse columns that would tell the words that are masked in the texts."""
    if not any(marks):
        return
    compared = marks_of(marks, len(marks))
    for name in carry:
        # Lists and the like as they are written out: their brackets and commas part words too.
        values = zip(given.named[name], compared, strict=True)
        num = sum(value is not None and holds_marked(str(value), each) for value, each in values)
        if num:
            raise UsageError(
                f"Column {name!r} holds a marked word in {num:,} of {len(marks):,} rows, and would carry it "
                "beside the vectors that hide it. Leave it out, or code its values."
            )


def _read(source: Any, wanted: Sequence[str], **columns: Any) -> Columns:
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
        return Columns(texts=list(source), users=None, named={})
    return read_columns(open_source(source, **columns), wanted)


def _lines(path: Path) -> list[str]:
    """The lines of a file. A line ends where the file says so; a form feed is white space in it."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as stream:
            return [line.removesuffix("\n").removesuffix("\r") for line in stream]
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 ({error}). Convert it first.") from error
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist. Give a file with a text on each line.") from None


def _marks(given: Columns, asked: EncodeSettings) -> list[list[str]]:
    """The words to be masked in each text."""
    file, column = asked.mask_file, asked.mask_column
    common = [*asked.mask, *(_lines(Path(file)) if file is not None else ())]
    if column is None:
        return [common] * len(given.texts)
    return [[*common, *_words_in(value, column)] for value in given.named[column]]


def _words_in(value: Any, column: str) -> list[str]:
    """Words of a cell: a list of them, or one string with commas or white space between."""
    if value is None or isinstance(value, str):
        return (value or "").replace(",", " ").split()
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return value
    raise UsageError(
        f"Column {column!r} holds a {type(value).__name__}, not words. Give a list of strings, or one string."
    )


def _carried(given: Columns, carry: Sequence[str], releases: int) -> dict[str, list[Any]]:
    columns = {name: given.named[name] * releases for name in carry}
    if releases > 1:
        columns["release"] = [number + 1 for number in range(releases) for _ in given.texts]
    return columns


def _most(values: list[str]) -> int:
    """How often the most frequent value stands there."""
    return max(Counter(values).values())
