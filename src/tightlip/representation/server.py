"""What runs on the server: vectors in, labels out. It never sees a text."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tightlip.core.errors import UsageError
from tightlip.representation.guarantees import VectorMechanism
from tightlip.representation.halves import (
    SERVER,
    Classifier,
    load_classifier,
    noise_print,
    read_half,
)
from tightlip.representation.vectors import VectorFile

_AT_ONCE = 65_536


class Server:
    """A classifier of the vectors that one device makes.

    Holds:
        paired: vectors of another training are refused.
        honest: vectors whose record tells of other noise than this training had are refused.
        shares: the probabilities of a vector add up to 1.
        alone: it loads without the device's half.
    """

    def __init__(self, classifier: Classifier, *, pair: str) -> None:
        self.classifier, self.pair = classifier.eval(), pair

    @property
    def labels(self) -> list[str]:
        return list(self.classifier.labels)

    @torch.inference_mode()
    def classify(self, vectors: VectorFile | np.ndarray) -> tuple[list[str], np.ndarray]:
        """The likeliest label of each vector, and the probabilities of all labels."""
        given = self._checked(vectors)
        found = np.empty((len(given), len(self.labels)), np.float32)
        for start in range(0, len(given), _AT_ONCE):
            part = torch.from_numpy(np.array(given[start : start + _AT_ONCE], np.float32))
            found[start : start + _AT_ONCE] = self.classifier(part).softmax(dim=1).numpy()
        return [self.labels[number] for number in found.argmax(axis=1)], found

    def _checked(self, vectors: VectorFile | np.ndarray) -> np.ndarray:
        if isinstance(vectors, VectorFile):
            if vectors.pair != self.pair:
                raise UsageError(
                    f"The vectors belong to the pair {vectors.pair}, and this server to {self.pair}. "
                    "Encode the texts with the device that was trained with it."
                )
            self._check_record(vectors.record)
            vectors = vectors.vectors
        if vectors.ndim != 2 or vectors.shape[1] != self.classifier.dimensions:
            raise UsageError(
                f"Vectors of shape {vectors.shape} cannot be classified: the server takes {self.classifier.dimensions} dimensions."
            )
        return vectors

    def _check_record(self, record: dict[str, Any]) -> None:
        VectorMechanism.from_record(record)
        if not self.pair.endswith(f"-{noise_print(record)}"):
            raise UsageError(
                "The vectors' record tells of other noise than the device of this pair adds. "
                "It was changed: encode the texts again, with the device that was trained with this server."
            )


def load_server(folder: Path | str) -> Server:
    """The server's half in `folder`."""
    return Server(load_classifier(folder), pair=read_half(Path(folder), SERVER)["pair"])
