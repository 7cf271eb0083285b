"""What runs on the user's device: texts in, vectors out that may be sent."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.progress import Task, task
from tightlip.core.randomness import keyed_generator
from tightlip.representation.grid_noise import GridNoise
from tightlip.representation.guarantees import BARE, VectorMechanism
from tightlip.representation.halves import DEVICE, GUARANTEE, load_extractor, read_half
from tightlip.representation.release import drawn, noised, released
from tightlip.representation.words import Marked, marks_of, masked_texts

Runtime = Literal["torch", "onnx"]
# Texts whose noise and raw vectors are held at a time.
AT_ONCE = 4096


class RawVectors(Protocol):
    """What a device needs of an extractor."""

    def encode(self, texts: Sequence[str], *, batch_size: int, device: Any) -> np.ndarray:
        """The raw vectors of `texts` in their order."""


class Device:
    """An extractor with the words it masks and the noise it adds.

    Raw vectors never leave `encode`: only normalised, noised ones do.

    Holds:
        fresh: encoding a text again draws other masks and other noise.
        any_text: the empty text, one word, and text beyond the window are vectors like any other.
        alone: it loads without the server's half.
    """

    def __init__(
        self, extractor: RawVectors, mechanism: VectorMechanism, *, mask_word: str, pair: str
    ) -> None:
        self.extractor, self.mechanism = extractor, mechanism
        self.mask_word, self.pair = mask_word, pair
        self._noise, self._generator = GridNoise(), keyed_generator()

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
        given = {"batch_size": batch_size, "device": device}
        with task("encode", len(texts)) as bar, ThreadPoolExecutor(2) as beside:
            pending: deque[tuple[slice, Future[np.ndarray]]] = deque()
            for part, masked, noise in self._prepared(texts, marked, beside):
                raw = self.extractor.encode(masked, **given)
                pending.append((part, beside.submit(self._released, raw, noise)))
                while len(pending) > 1:
                    _take(pending, found, bar)
            while pending:
                _take(pending, found, bar)
        return found

    def _prepared(
        self, texts: Sequence[str], marked: Marked, beside: ThreadPoolExecutor
    ) -> Iterator[tuple[slice, list[str], "Future[np.ndarray] | None"]]:
        """Masked texts, some at a time, and noise being drawn for them while they are extracted."""
        parts = [slice(start, start + AT_ONCE) for start in range(0, len(texts), AT_ONCE)]
        marks = marks_of(marked, len(texts))
        bare = self.mechanism.mechanism == BARE
        # The next texts are masked while these are extracted; never two at a time.
        ahead = beside.submit(self._masked, texts, marks, parts[0])
        for part, after in zip(parts, [*parts[1:], None], strict=True):
            masked = ahead.result()
            noise = None if bare else beside.submit(drawn, self.mechanism, self._noise, len(masked))
            if after is not None:
                ahead = beside.submit(self._masked, texts, marks, after)
            yield part, masked, noise

    def _masked(
        self, texts: Sequence[str], marks: Sequence[frozenset[str]], part: slice
    ) -> list[str]:
        return masked_texts(
            texts[part],
            mask_word=self.mask_word,
            dropout=self.mechanism.dropout,
            marked=marks[part],
            generator=self._generator,
        )

    def _released(self, raw: np.ndarray, noise: "Future[np.ndarray] | None") -> np.ndarray:
        if noise is None:
            return released(raw, self.mechanism, self._noise)
        return noised(raw, self.mechanism, noise.result())


def _take(pending: "deque[tuple[slice, Future[np.ndarray]]]", found: np.ndarray, bar: Task) -> None:
    part, vectors = pending.popleft()
    found[part] = vectors.result()
    bar.advance(len(found[part]))


def load_device(folder: Path | str, *, runtime: Runtime = "torch") -> Device:
    """The device's half in `folder`, its guarantee checked against the noise it will add."""
    folder = Path(folder)
    about = read_half(folder, DEVICE)
    mechanism = VectorMechanism.from_record(about["guarantee"])
    _check_guarantee(folder, about, mechanism)
    extractor: RawVectors
    if runtime == "onnx":
        from tightlip.representation.onnx_export import load_onnx_extractor

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
