"""The device's half at work: texts masked, extracted, normalised and noised; and `tightlip represent
encode` as one call, texts to a file of private vectors."""

import os
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tightlip.core.devices import usable_device
from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.progress import task
from tightlip.core.randomness import keyed_generator
from tightlip.core.settings import split_settings, takes
from tightlip.corpus.prepare_config import ColumnSettings
from tightlip.vectors import halves, masking
from tightlip.vectors.data import Columns, open_source, read_columns
from tightlip.vectors.extractors import Raw, Tokenised, made_ahead, pieces
from tightlip.vectors.grid_noise import GridNoise
from tightlip.vectors.guarantees import VectorMechanism, costs
from tightlip.vectors.masking import Marked, Masking, masked_texts
from tightlip.vectors.release import drawn, noised
from tightlip.vectors.server import VectorFile, write_vectors
from tightlip.vectors.settings import EncodeSettings, EncodingOptions, Runtime

# Batches on their way at a time: a GPU is never without one while the interpreter is busy.
_ON_THE_WAY = 3
_DRAWING = 2  # threads that draw noise, beside the interpreter's lock


class Device:
    """An extractor with the words it masks and the noise it adds.

    Raw vectors never leave `encode`: only normalised, noised ones do.

    Holds:
        fresh: encoding a text again draws other masks and other noise, in a forked process too.
        any_text: the empty text, one word, and text beyond the window are vectors like any other.
        alone: it loads without the server's half.
    """

    def __init__(
        self, extractor: Tokenised, mechanism: VectorMechanism, *, mask_word: str, pair: str
    ) -> None:
        self.extractor, self.mechanism = extractor, mechanism
        self.mask_word, self.pair = mask_word, pair
        self._noise = GridNoise()
        self._generator, self._process = keyed_generator(), os.getpid()

    @property
    def dimensions(self) -> int:
        return self.mechanism.dimensions

    def encode(
        self,
        texts: Sequence[str],
        *,
        marked: Marked = (),
        batch_size: int = EncodingOptions.batch_size,
        device: Any = None,
    ) -> np.ndarray:
        """Vectors to send in place of `texts`, float32; words in `marked` are always masked."""
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} holds no text. Use 1 or more.")
        sent = np.empty((len(texts), self.dimensions), np.float32)
        if not len(texts):
            return sent
        marks = masking.marks_of(marked, len(texts))
        with task("encode", len(texts)) as bar, ThreadPoolExecutor(_DRAWING) as drawing:
            # Of vectors that are not there yet, in their order; each is used once.
            noise: deque[Future[np.ndarray]] = deque()

            def masked(places: np.ndarray) -> list[str]:
                """While texts are extracted the next are masked, and noise for them is drawn."""
                for some in pieces(places, batch_size):
                    noise.append(drawing.submit(drawn, self.mechanism, self._noise, len(some)))
                return self._masked([texts[n] for n in places], [marks[n] for n in places])

            coming = self.extractor.stream(
                texts, prepared=masked, batch_size=batch_size, device=device
            )
            releases = (partial(self._release, raw, noise.popleft(), sent) for raw in coming)
            for num_released in made_ahead(releases, _ON_THE_WAY):
                bar.advance(num_released)
        return sent

    def _masked(self, texts: Sequence[str], marks: Sequence[frozenset[str]]) -> list[str]:
        if os.getpid() != self._process:  # a forked process would draw its parent's masks
            self._generator, self._process = keyed_generator(), os.getpid()
        return masked_texts(
            texts,
            mask_word=self.mask_word,
            dropout=self.mechanism.dropout,
            marked=marks,
            generator=self._generator,
        )

    def _release(self, raw: Raw, noise: Future[np.ndarray], sent: np.ndarray) -> int:
        """Put what may be sent of these vectors where it belongs; how many they are."""
        sent[raw.places] = noised(raw.arrived(), self.mechanism, noise.result())
        return len(raw.places)


def load_device(folder: Path | str, *, runtime: Runtime = EncodeSettings.runtime) -> Device:
    """The device's half in `folder`, its guarantee checked against the noise it will add."""
    folder = Path(folder)
    about = halves.read_half(folder, halves.DEVICE)
    mechanism = VectorMechanism.from_record(about["guarantee"])
    _check_guarantee(folder, about, mechanism)
    extractor: Tokenised
    if runtime == "onnx":
        halves.check_files(folder, about, weights=False)
        extractor = halves.OnnxExtractor(folder)
    elif runtime == "torch":
        extractor = halves.load_extractor(folder)
    else:
        raise UsageError(f"Unknown runtime {runtime!r}. Available: torch, onnx.")
    return Device(extractor, mechanism, mask_word=about["mask_word"], pair=about["pair"])


def _check_guarantee(folder: Path, about: dict[str, Any], mechanism: VectorMechanism) -> None:
    if mechanism.dimensions != about["dimensions"]:
        raise UsageError(
            f"{folder} makes vectors of {about['dimensions']} dimensions, and its guarantee is for "
            f"{mechanism.dimensions}. Copy the folder again, or train again."
        )
    beside = folder / halves.GUARANTEE
    if beside.is_file() and read_json(beside) != about["guarantee"]:
        raise UsageError(
            f"{beside} and device.json state different guarantees. Copy the folder again, or train again."
        )


@dataclass(frozen=True, kw_only=True)
class Encoded(VectorFile):
    """Released vectors, what stands beside them, and what they may promise.

    `most_of_one_text` and `most_of_one_user` are for whoever holds the texts: how many of these
    vectors are of one text, and of one person. `masking` tells what the marked words found, where
    some were marked. They are not in the file.
    """

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
    kinds = (EncodeSettings, EncodingOptions, ColumnSettings)
    asked, options, columns = split_settings(settings, *kinds)
    releases, carry, mask_column = asked.releases, asked.carry, asked.mask_column
    _check_call(out, releases, carry, {columns.text_column, mask_column, "text"})
    half = load_device(device, runtime=asked.runtime)
    given = _read(texts, [*carry, *([mask_column] if mask_column else [])], **columns.tree())
    marks = _marks(given, asked)
    _refuse_marked(given, carry, marks)
    vectors = half.encode(
        given.texts * releases,
        marked=marks * releases,
        batch_size=options.batch_size,
        device=usable_device(on) if asked.runtime == "torch" else None,
    )
    carried = {name: given.named[name] * releases for name in carry}
    if releases > 1:
        carried["release"] = [number + 1 for number in range(releases) for _ in given.texts]
    # What the file's releases of each text cost together, where there are several.
    together = {"releases": costs(half.mechanism, [releases])} if releases > 1 else {}
    encoded = Encoded(
        vectors=vectors,
        columns=carried,
        record=half.mechanism.record() | together,
        pair=half.pair,
        most_of_one_text=releases * _most(map(masking.as_read, given.texts)),
        most_of_one_user=None if given.users is None else releases * _most(given.users),
        masking=masking.masking_of(given.texts, marks) if any(marks) else None,
    )
    if out is not None:
        write_vectors(out, encoded)
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
    compared = masking.marks_of(marks, len(marks))
    for name in carry:
        # Lists and the like as they are written out: their brackets and commas part words too.
        values = zip(given.named[name], compared, strict=True)
        if num := sum(v is not None and masking.holds_marked(str(v), each) for v, each in values):
            raise UsageError(
                f"Column {name!r} holds a marked word in {num:,} of {len(marks):,} rows, and would carry it "
                "beside the vectors that hide it. Leave it out, or code its values."
            )


def _read(source: Any, wanted: Sequence[str], **columns: Any) -> Columns:
    """The texts of a list, a .txt file or a corpus, with the columns asked for."""
    if isinstance(source, str | Path) and Path(source).suffix.lower() == ".txt":
        source = lines_of(Path(source))
    if isinstance(source, list | tuple) and all(isinstance(text, str) for text in source):
        if wanted:
            raise UsageError(
                f"There is no column {wanted[0]!r}: these are texts alone. Give a corpus with columns."
            )
        if not source:
            raise UsageError("There is no text to encode. Give at least one.")
        return Columns(texts=list(source), users=None, named={})
    return read_columns(open_source(source, **columns), wanted)


def lines_of(path: Path) -> list[str]:
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
    common = [*asked.mask, *(lines_of(Path(file)) if file is not None else ())]
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


def _most(values: Iterable[str]) -> int:
    """How often the most frequent value stands there."""
    return max(Counter(values).values())
