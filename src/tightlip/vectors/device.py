"""The device's half at work: texts masked, extracted, normalised and noised, some at a time."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json
from tightlip.core.progress import task
from tightlip.core.randomness import keyed_generator
from tightlip.vectors.extractors import Raw, made_ahead
from tightlip.vectors.grid_noise import GridNoise
from tightlip.vectors.guarantees import BARE, VectorMechanism
from tightlip.vectors.halves import DEVICE, GUARANTEE, check_files, load_extractor, read_half
from tightlip.vectors.masking import Marked, marks_of, masked_texts
from tightlip.vectors.release import drawn, noised, released
from tightlip.vectors.settings import EncodeSettings, EncodingOptions, Runtime

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
        batch_size: int = EncodingOptions.batch_size,
        device: Any = None,
    ) -> np.ndarray:
        """Vectors to send in place of `texts`, float32; words in `marked` are always masked."""
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} holds no text. Use 1 or more.")
        sent = np.empty((len(texts), self.dimensions), np.float32)
        if not len(texts):
            return sent
        marks = marks_of(marked, len(texts))
        with task("encode", len(texts)) as bar, ThreadPoolExecutor(_DRAWING) as drawing:
            # Of vectors that are not there yet, in their order; each is used once.
            noise: deque[Future[np.ndarray]] = deque()

            def draw(num_vectors: int) -> None:
                noise.append(drawing.submit(drawn, self.mechanism, self._noise, num_vectors))

            coming = self._raw(texts, marks, draw, batch_size=batch_size, device=device)
            releases = (partial(self._release, raw, noise.popleft(), sent) for raw in coming)
            for num_released in made_ahead(releases, _ON_THE_WAY):
                bar.advance(num_released)
        return sent

    def _raw(
        self,
        texts: Sequence[str],
        marks: Sequence[frozenset[str]],
        draw: Callable[[int], None],
        **given: Any,
    ) -> Iterator[Raw]:
        """Raw vectors of the masked texts, some at a time.

        While these are extracted the next texts are masked, and noise for them is drawn.
        """
        bare = self.mechanism.mechanism == BARE

        def masked(places: np.ndarray, at_once: int = given["batch_size"]) -> list[str]:
            for start in range(0, len(places), at_once):
                draw(0 if bare else len(places[start : start + at_once]))
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
        vectors = raw.arrived()
        if self.mechanism.mechanism == BARE:
            sent[raw.places] = released(vectors, self.mechanism, self._noise)
        else:
            sent[raw.places] = noised(vectors, self.mechanism, noise.result())
        return len(raw.places)


def load_device(folder: Path | str, *, runtime: Runtime = EncodeSettings.runtime) -> Device:
    """The device's half in `folder`, its guarantee checked against the noise it will add."""
    folder = Path(folder)
    about = read_half(folder, DEVICE)
    mechanism = VectorMechanism.from_record(about["guarantee"])
    _check_guarantee(folder, about, mechanism)
    extractor: RawVectors
    if runtime == "onnx":
        from tightlip.vectors.onnx_export import OnnxExtractor

        check_files(folder, about, weights=False)
        extractor = OnnxExtractor(folder)
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
    if beside.is_file() and read_json(beside) != about["guarantee"]:
        raise UsageError(
            f"{beside} and device.json state different guarantees. Copy the folder again, or train again."
        )
