"""Canaries inside the engine: units of known gradient, each on a coordinate that no model has.

The engine draws them with everybody else, clips them by the same code to the same norm, and puts the
same noise on their coordinates in the same call. What comes out is shown to the run's owner alone and
touches no weight, so that a model is trained as though they were not there, and costs no ε. A coin
decided for each whether it is in; one that is out is drawn like the others and adds nothing.
Shapes: M canaries, U units of a pass, T positions.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tightlip.core.errors import UsageError
from tightlip.core.files import read_sealed, write_sealed
from tightlip.core.randomness import keyed_generator
from tightlip.privacy.clipping import Clip
from tightlip.privacy.layers import Layout
from tightlip.privacy.passes import Passes, Physical
from tightlip.privacy.row_losses import NO_LABEL

_LENGTHS = 32.0  # of a canary's gradient in clip norms, so that it is always clipped
_LEAST_ROWS, _WIDTH = 8, 2


class _Coordinates(nn.Module):
    """A model of one number for each canary, all 0: the gradient of canary m is large and lies on
    number m alone."""

    def __init__(self, num_canaries: int, clip_norm: float) -> None:
        super().__init__()
        self.own = nn.Embedding(num_canaries, 1)
        nn.init.zeros_(self.own.weight)
        # Of two words equally likely, the gradient of the right one's logit is -1/2.
        slope = 2 * _LENGTHS * (clip_norm if np.isfinite(clip_norm) else 1.0)
        self.register_buffer("slopes", torch.tensor([slope, 0.0]))

    def forward(self, ids_UT: Tensor) -> Tensor:
        return self.own(ids_UT) * self.slopes


class EngineCanaries:
    """The canaries of one training, and what their owner has seen of each so far.

    Holds:
        apart: no weight and no other unit's share is changed by them.
        clipped: what a drawn canary adds is one clip norm, less what is charged for arithmetic.
        kept: coins are drawn once; a resumed run goes on with them and with what was seen.
    """

    def __init__(
        self, num_canaries: int, clip: Clip, *, device: torch.device, file: Path, goes_on: bool
    ) -> None:
        self._clip, self._file = clip, file
        self._passes = Passes(_Coordinates(num_canaries, clip.norm).to(device), clip)
        self._included, self._scores = self._begun(num_canaries, device, goes_on)
        self.settle()

    def __len__(self) -> int:
        return len(self._included)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients are what is released; no optimizer knows them."""
        return list(self._passes.parameters.values())

    def clipped_sum(self, drawn: np.ndarray, share: float, like: Tensor) -> Tensor:
        """What the drawn canaries add, in the kind of numbers that other sums have."""
        drawn = drawn[self._included[drawn]]
        rows = max(_LEAST_ROWS, 1 << (len(drawn) - 1).bit_length()) if len(drawn) else _LEAST_ROWS
        ids_UT, targets_UT = torch.zeros(rows, _WIDTH).long(), torch.full((rows, _WIDTH), NO_LABEL)
        ids_UT[: len(drawn), 0], targets_UT[: len(drawn), 0] = torch.from_numpy(drawn), 0
        device = self._scores.device
        batch = Physical.of(
            ids_UT.to(device),
            targets_UT.to(device),
            torch.ones(rows, dtype=torch.long, device=device),
            Layout(num_units=rows, rows_per_unit=1),
            torch.full((rows,), share, device=device),
        )
        (found,) = self._passes(batch).gradients.values()
        return found.to(like.dtype)

    def watch(
        self, *, expected_batch: float, noise_multiplier: float, sampling_rate: float
    ) -> None:
        """Add what this step's release says for "in", by the logarithm of the likelihood ratio."""
        (released,) = (each.grad for each in self.parameters)
        assert released is not None
        norm = self._clip.norm if np.isfinite(self._clip.norm) else 1.0
        seen_M = -released.double().flatten() * (expected_batch / norm)
        if noise_multiplier:
            shifted_M = ((2 * seen_M - 1) / (2 * noise_multiplier**2)).clamp(max=500.0)
            seen_M = torch.log1p(sampling_rate * torch.expm1(shifted_M))
        self._scores += seen_M

    def settle(self) -> None:
        """Keep coins and scores, for their owner only: whoever knows the coins can guess them."""
        write_sealed(
            self._file, {"included": self._included.tolist(), "scores": self._scores.tolist()}
        )

    def _begun(
        self, num_canaries: int, device: torch.device, goes_on: bool
    ) -> tuple[np.ndarray, Tensor]:
        if not goes_on or not self._file.exists():
            coins = keyed_generator().integers(0, 2, num_canaries).astype(bool)
            return coins, torch.zeros(num_canaries, dtype=torch.float64, device=device)
        there, _ = read_sealed(self._file)
        if len(there["included"]) != num_canaries:
            raise UsageError(
                f"{self._file} holds {len(there['included']):,} canaries, and {num_canaries:,} were asked for. Give the old "
                "number, or begin a new run."
            )
        scores = torch.tensor(there["scores"], dtype=torch.float64, device=device)
        return np.array(there["included"], bool), scores
