"""Texts to private vectors, vectors to labels, and what a mechanism is worth without either."""

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.progress import task
from tightlip.core.randomness import keyed_generator
from tightlip.vectors.extractors import Raw
from tightlip.vectors.grid_noise import GridNoise
from tightlip.vectors.guarantees import BARE, VectorMechanism, costs
from tightlip.vectors.halves import DEVICE, GUARANTEE, check_files, load_extractor, read_half
from tightlip.vectors.masking import Marked, marks_of, masked_texts
from tightlip.vectors.release import drawn, noised, released

if TYPE_CHECKING:
    import numpy as np

    from tightlip.vectors.masking import Masking


Runtime = Literal["torch", "onnx"]
# Texts given at a time to an extractor that does not hand out its vectors batch by batch.
AT_ONCE = 4096
# Batches on their way at a time: a GPU is never without one while the interpreter is busy.
_ON_THE_WAY = 3
_DRAWING = 2  # threads that draw noise, beside the interpreter's lock


class RawVectors(Protocol):
    """What a device needs of an extractor."""

    def encode(self, texts: Sequence[str], *, batch_size: int, device: Any) -> np.ndarray:
        """The raw vectors of `texts` in their order."""


class Device:
    """An extractor with the words it masks and the noise it adds.

    Raw vectors never leave `encode`: only normalised, noised ones do.

    Holds:
        fresh: encoding a text again draws other masks and other noise, in a forked process too.
        any_text: the empty text, one word, and text beyond the window are vectors like any other.
        alone: it loads without the server's half.
    """

    def __init__(
        self, extractor: RawVectors, mechanism: VectorMechanism, *, mask_word: str, pair: str
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
        batch_size: int = 32,
        device: Any = None,
    ) -> np.ndarray:
        """Vectors to send in place of `texts`, float32; words in `marked` are always masked."""
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} holds no text. Use 1 or more.")
        found = np.empty((len(texts), self.dimensions), np.float32)
        if not len(texts):
            return found
        marks = marks_of(marked, len(texts))
        with (
            task("encode", len(texts)) as bar,
            ThreadPoolExecutor(_DRAWING) as drawing,
            ThreadPoolExecutor(1) as releasing,
        ):
            noise = _Ahead(partial(drawn, self.mechanism, self._noise), drawing)
            pending: deque[Future[int]] = deque()
            for raw in self._raw(texts, marks, noise, batch_size=batch_size, device=device):
                pending.append(releasing.submit(self._release, raw, noise.next(), found))
                while len(pending) > _ON_THE_WAY:
                    bar.advance(pending.popleft().result())
            while pending:
                bar.advance(pending.popleft().result())
        return found

    def _raw(
        self, texts: Sequence[str], marks: Sequence[frozenset[str]], noise: "_Ahead", **given: Any
    ) -> Iterator[Raw]:
        """Raw vectors of the masked texts, some at a time.

        While these are extracted the next texts are masked, and noise for them is drawn.
        """
        bare = self.mechanism.mechanism == BARE

        def masked(places: np.ndarray, at_once: int = given["batch_size"]) -> list[str]:
            for start in range(0, len(places), at_once):
                noise.draw(0 if bare else len(places[start : start + at_once]))
            return self._masked([texts[n] for n in places], [marks[n] for n in places])

        stream = getattr(self.extractor, "stream", None)
        if stream is not None:
            yield from stream(texts, prepared=masked, **given)
            return
        for start in range(0, len(texts), AT_ONCE):
            places = np.arange(start, min(start + AT_ONCE, len(texts)))
            vectors = self.extractor.encode(masked(places, AT_ONCE), **given)
            yield Raw(places, partial(np.asarray, vectors))

    def _masked(self, texts: Sequence[str], marks: Sequence[frozenset[str]]) -> list[str]:
        return masked_texts(
            texts,
            mask_word=self.mask_word,
            dropout=self.mechanism.dropout,
            marked=marks,
            generator=self._masks(),
        )

    def _masks(self) -> np.random.Generator:
        """The generator of masks; a forked process makes its own, or it would draw its parent's."""
        if os.getpid() != self._process:
            self._generator, self._process = keyed_generator(), os.getpid()
        return self._generator

    def _release(self, raw: Raw, noise: "Future[np.ndarray]", found: np.ndarray) -> int:
        """Put what may be sent of these vectors where it belongs; how many they are."""
        vectors = raw.arrived()
        if self.mechanism.mechanism == BARE:
            found[raw.places] = released(vectors, self.mechanism, self._noise)
        else:
            found[raw.places] = noised(vectors, self.mechanism, noise.result())
        return len(raw.places)


class _Ahead:
    """Noise being drawn for vectors that are not there yet, handed out once, in order."""

    def __init__(self, drawn: Callable[[int], np.ndarray], pool: ThreadPoolExecutor) -> None:
        self._drawn, self._pool = drawn, pool
        self._coming: deque[Future[np.ndarray]] = deque()

    def draw(self, num_vectors: int) -> None:
        self._coming.append(self._pool.submit(self._drawn, num_vectors))

    def next(self) -> "Future[np.ndarray]":
        return self._coming.popleft()


def load_device(folder: Path | str, *, runtime: Runtime = "torch") -> Device:
    """The device's half in `folder`, its guarantee checked against the noise it will add."""
    folder = Path(folder)
    about = read_half(folder, DEVICE)
    mechanism = VectorMechanism.from_record(about["guarantee"])
    _check_guarantee(folder, about, mechanism)
    extractor: RawVectors
    if runtime == "onnx":
        from tightlip.vectors.onnx_export import load_onnx_extractor

        check_files(folder, about, weights=False)
        extractor = load_onnx_extractor(folder)
    elif runtime == "torch":
        extractor = load_extractor(folder)
    else:
        raise UsageError(f"Unknown runtime {runtime!r}. Available: torch, onnx.")
    return Device(extractor, mechanism, mask_word=about["mask_word"], pair=about["pair"])


def _check_guarantee(folder: Path, about: dict[str, Any], mechanism: VectorMechanism) -> None:
    if mechanism.dimensions != about["dimensions"]:
        raise UsageError(
            f"{folder} makes vectors of {about['dimensions']} dimensions, and its guarantee is for "
            f"{mechanism.dimensions}. Copy the folder again, or train again."
        )
    beside = folder / GUARANTEE
    if beside.is_file():
        try:
            same = read_json(beside) == about["guarantee"]
        except ValueError:
            same = False
        if not same:
            raise UsageError(
                f"{beside} and device.json state different guarantees. Copy the folder again, or train again."
            )


# Texts to private vectors, vectors to labels, and what a mechanism is worth without either


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
    from tightlip.core.devices import usable_device
    from tightlip.vectors.masking import as_read, masking_of
    from tightlip.vectors.server import write_vectors

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
    from tightlip.vectors.masking import holds_marked, marks_of

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
    from tightlip.vectors.data import open_source

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
