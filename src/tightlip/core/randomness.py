"""Randomness that nobody can guess, search through or find on a disk.

Noise and sampling protect people only while they stay secret. Their generators are keyed by
the operating system, leave no state behind, and cannot be copied.
"""

import secrets
from typing import NoReturn

import numpy as np

from tightlip.core.errors import GuaranteeError

KEY_BITS = 128
SECRET = (
    "A generator's state is never written or copied: whoever reads it can subtract the noise. "
    "Make a new one; a resumed run draws fresh randomness."
)


class _Keyed(np.random.Generator):
    """A generator that stays where it is."""

    def __reduce__(self) -> NoReturn:
        raise GuaranteeError(SECRET)


def keyed_generator(insecure_seed: int | None = None) -> np.random.Generator:
    """A generator under a secret key of 128 bits; with `insecure_seed`, the same every time.

    Holds:
        secret: no two calls without a seed share a stream.
        kept: pickling and copying are refused.
    """
    # Philox takes its 128 bits whole as the key of ten mixing rounds, and no way back to the key is
    # known; numpy's other generators were not made to hide their state. Noise, whose raw output
    # shows, comes from a cipher: `grid_gaussian`.
    key = secrets.randbits(KEY_BITS) if insecure_seed is None else insecure_seed % 2**KEY_BITS
    return _Keyed(np.random.Philox(key=key))
