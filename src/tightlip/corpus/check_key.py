"""The key of a run's check canaries: what each reads, and whether it was trained on.

Training writes it, the check reads it. Canaries are nobody's text, so their coins, unlike any
real person's, may be written down; still only the owner reads them, since whoever knows the
coins can guess them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json, write_json


@dataclass(frozen=True, kw_only=True, eq=False)
class CanaryKey:
    """Shapes: M canaries, L tokens of each."""

    tokens_ML: np.ndarray
    included_M: np.ndarray

    def __len__(self) -> int:
        return len(self.included_M)

    @property
    def length(self) -> int:
        return self.tokens_ML.shape[1]


def write_key(path: Path, key: CanaryKey) -> None:
    write_json(
        path,
        {
            "num_canaries": len(key),
            "length": key.length,
            "included": key.included_M.tolist(),
            "tokens": [" ".join(map(str, tokens)) for tokens in key.tokens_ML.tolist()],
        },
    )


def read_key(path: Path) -> CanaryKey:
    """The key in `path`, or a refusal where it is not whole."""
    try:
        there = read_json(path)
        key = CanaryKey(
            tokens_ML=np.array([text.split() for text in there["tokens"]], np.int64),
            included_M=np.array(there["included"], bool),
        )
        if key.tokens_ML.shape != (there["num_canaries"], there["length"]) or len(key) != len(
            key.tokens_ML
        ):
            raise ValueError("canaries are missing")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is damaged ({error}), so nobody knows which canaries were trained on. Put a whole "
            "copy back, or train again with another --out."
        ) from error
    return key
