"""What a scan keeps of each token: the names and types of its columns, and how they are computed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

NOT_SCORED = -1  # the rank of a token that was never predicted: the first without a BOS


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """The columns of a scan, and the function that fills them from rows of logits and their targets.

    `score` gives one tensor for each column, in their order. A float that is NaN refuses the whole
    scan: what cannot be is minus infinity. `settings` is whatever else decides the figures, as JSON
    can hold it; name and settings are part of a kept scan's key. Scans of those in `found_in` have the
    same columns, and more.
    """

    name: str
    columns: Mapping[str, type[np.generic]]
    score: Callable[["Tensor", "Tensor"], "tuple[Tensor, ...]"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    found_in: tuple["Scorer", ...] = ()

    @property
    def key(self) -> dict[str, Any]:
        """What tells its scans from those of others; the first scorer's are older than scorers."""
        return {} if self.name == PLAIN.name else {"scorer": self.name, **self.settings}

    def empty(self, size: int) -> list[np.ndarray]:
        """A column each, for tokens that nobody has predicted yet."""
        return [
            np.full(size, np.nan if issubclass(kind, np.floating) else NOT_SCORED, dtype=kind)
            for kind in self.columns.values()
        ]


def _scored(
    logits_NV: "Tensor", targets_N: "Tensor", *, moments: bool = False
) -> "tuple[Tensor, ...]":
    from tightlip.scan.scoring import score_logits  # with all that torch takes

    return score_logits(logits_NV, targets_N, moments=moments)


_COLUMNS: dict[str, type[np.generic]] = {"ranks": np.int32, "log_probs": np.float32}
# Beside them the mean and the deviation of the log-probability under the model's own distribution.
MOMENTS = Scorer(
    name="moments",
    columns=_COLUMNS | {"means": np.float32, "deviations": np.float32},
    score=partial(_scored, moments=True),
)
PLAIN = Scorer(name="plain", columns=_COLUMNS, score=_scored, found_in=(MOMENTS,))
