"""How much noise a step gets, and what is put on record for it before it happens.

A schedule is asked once a step, after the draw. Whatever it charges is on disk before it
answers, so a process that dies may have charged a step it never took, never the other way round.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tightlip.core.errors import GuaranteeError
from tightlip.core.files import OWNER_FILE, fsync, make_private_folder
from tightlip.core.grid_gaussian import GridGaussian
from tightlip.privacy.accounting import COARSER, Mechanism, Spend, delta_left, epsilon_of
from tightlip.privacy.adaptive import AdaptiveSpec, joint_multiplier
from tightlip.privacy.ledger import exact_figures, figures_of
from tightlip.privacy.plans import NoisePlan, PrivacySpec, rounded_up_to
from tightlip.privacy.rdp_filter import RdpFilter


class Noise(Protocol):
    """Puts fresh noise on tensors in place."""

    def add(self, tensors: list[Tensor], *, scale: float, share: float, unit: float = 1.0) -> None:
        """Every entry becomes share · g · K, K the cell of unit · entry + scale · N(0, 1) on a grid g;
        32-bit whole numbers become float32 where they lie."""


class CPUNoise:
    """Noise from a cipher on as many threads as torch uses."""

    def __init__(self, insecure_seed: int | None = None) -> None:
        self._gaussian = GridGaussian(insecure_seed, num_threads=torch.get_num_threads())

    def add(self, tensors: list[Tensor], *, scale: float, share: float, unit: float = 1.0) -> None:
        arrays = [tensor.detach().numpy() for tensor in tensors]
        self._gaussian.add(arrays, scale=scale, share=share, unit=unit)


def noise_for(device: torch.device, insecure_seed: int | None) -> Noise:
    """The noise for gradients on `device`."""
    if device.type != "cuda":
        return CPUNoise(insecure_seed)
    from tightlip.privacy.noise_kernels import GPUNoise

    return GPUNoise(device, insecure_seed=insecure_seed)


SCALES = "noise_scales.jsonl"  # public: what each step was charged at, and the release before it
PRIVATE_COUNTS = "private_noise.bin"  # owner-only: how often each share of the noise was used
_STEPS = 2.0**30  # that a weight's reach is told in
_RATIO = 1.02  # between two shares of the noise that are counted apart
_SHARE = "<u8"


class Schedule:
    """The noise of one step after another: here the same at every step, as in plain private
    training and in mode `clip`."""

    def __init__(self, noise_multiplier: float) -> None:
        self.noise_multiplier = noise_multiplier

    def fits(self) -> bool:
        """Whether another step stays within the budget."""
        return True

    def charge(self, record: Callable[[], None], rho_U: np.ndarray | None) -> float:
        """Charge one step, `record` putting it on disk; its noise multiplier."""
        record()
        return self.noise_multiplier

    def figures(self, record: dict[str, Any]) -> dict[str, float | None]:
        """ε of the steps on record, as `exact_figures` has it."""
        return exact_figures(record)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, all of it public."""
        return {}

    def restore(self, state: dict[str, Any], steps: int) -> None:
        """Go on from a ledger of `steps` steps."""

    def settle(self, record: Callable[[], None]) -> None:
        """Make all of it survive a power cut."""


class ReleasedNoise(Schedule):
    """Mode `scale`: σ_t = σ·clip(m, γ_floor, 1), m a moving average of the releases before t.

    Holds:
        earlier_only: what is drawn in a step changes the noise of later steps, never its own.
        joint: gradient and release of a step are charged as one Gaussian.
        charged: a step is on record before its release is made.
        within: with a filter, no step is charged that would pass its budget.
    """

    def __init__(
        self,
        spec: AdaptiveSpec,
        noise_multiplier: float,
        expected_batch: float,
        folder: Path,
        *,
        budget: RdpFilter | None,
        insecure_seed: int | None = None,
    ) -> None:
        super().__init__(noise_multiplier)
        self.spec = spec
        self.release_noise = spec.release_noise_for(noise_multiplier)
        self.expected_batch, self.budget = expected_batch, budget
        self.average, self.num_releases = 1.0, 0
        self._centre, self._half = (1 + spec.least_weight) / 2, (1 - spec.least_weight) / 2
        self._path = folder / SCALES
        self._last: float | None = None
        self._is_recorded = True
        # A seed of its own: with the sampler's the noise would follow the draw.
        self._noise = GridGaussian(None if insecure_seed is None else insecure_seed + 1)

    def next_noise(self) -> float:
        """σ_t, from what was released before."""
        return self.noise_multiplier * min(max(self.average, self.spec.gamma_floor), 1.0)

    def fits(self) -> bool:
        joint = joint_multiplier(self.next_noise(), self.release_noise)
        return self.budget is None or self.budget.fits(joint)

    def charge(self, record: Callable[[], None], rho_U: np.ndarray | None) -> float:
        assert rho_U is not None
        sigma = self.next_noise()
        if self.budget is not None:
            self.budget.charge(joint_multiplier(sigma, self.release_noise))
        self._note(sigma)
        record()
        self._learn(self.released(rho_U))
        return sigma

    def released(self, rho_U: np.ndarray) -> float:
        """γ̂: the weights' mean over the expected batch, with noise of z times one unit's reach."""
        # In halves of the range each unit is between -1 and 1, also after rounding.
        reach_U = np.clip((rho_U - self._centre) / self._half, -1.0, 1.0)
        # In whole steps, so that one unit moves the sum by its own share and no last bit besides.
        total = np.array([float((reach_U * _STEPS).astype(np.int64).sum()) / _STEPS])
        self._noise.add([total], scale=self.release_noise)
        return self._centre + float(total[0]) * self._half / self.expected_batch

    def _learn(self, release: float) -> None:
        counted = release if release > 0 else self.spec.gamma_floor
        self.average = self.spec.averaging * self.average + (1 - self.spec.averaging) * counted
        self.num_releases += 1
        self._last, self._is_recorded = release, False

    def _note(self, sigma: float) -> None:
        line = {"noise_multiplier": sigma, "release_before": self._last}
        _append(self._path, json.dumps(line).encode() + b"\n")

    def state(self) -> dict[str, Any]:
        """Releases are public by the proof, and so is what follows from them."""
        spent = {} if self.budget is None else {"rdp": self.budget.spent}
        return {"average": self.average, "num_releases": self.num_releases, **spent}

    def restore(self, state: dict[str, Any], steps: int) -> None:
        self._check_lines(steps)
        numbers = [state.get(name) for name in ("average", *(("rdp",) if self.budget else ()))]
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in numbers):
            raise _lost("the releases and what they cost")
        self.average, self.num_releases = float(numbers[0]), int(state.get("num_releases", 0))  # type: ignore[arg-type]
        if self.budget is not None:
            self.budget.spent = float(state["rdp"])
            # No step is cheaper than one of full noise.
            full = joint_multiplier(self.noise_multiplier, self.release_noise)
            if self.budget.spent < steps * self.budget.cost(full) * (1 - 1e-6):
                raise _lost(f"all that {steps} steps cost")

    def _check_lines(self, steps: int) -> None:
        """No more steps may have released something than the ledger has charged.

        A line is written before its step is charged: of one that a kill came between, nothing was
        released, and its line goes. More can only be of a power cut that took the ledger back.
        """
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        if len(lines) > steps + 1:
            raise _lost(f"{len(lines)} steps, as many as {self._path} has releases of,")
        if len(lines) == steps + 1:
            os.truncate(self._path, sum(map(len, lines[:-1])))

    def settle(self, record: Callable[[], None]) -> None:
        if not self._is_recorded:
            record()
            self._is_recorded = True
        _flush(self._path)


class BatchNoise(Schedule):
    """Mode `as-published`: σ times the mean weight of the very batch. No theorem covers it.

    How often each share of the noise was used is private. It is kept beside the ledger, for the
    owner only, as counts without an order.
    """

    def __init__(self, spec: AdaptiveSpec, noise_multiplier: float, folder: Path) -> None:
        super().__init__(noise_multiplier)
        self.spec = spec
        self._path = folder / PRIVATE_COUNTS
        self._counts = np.zeros(_bin(spec.least_weight) + 1, _SHARE)

    def charge(self, record: Callable[[], None], rho_U: np.ndarray | None) -> float:
        assert rho_U is not None
        # An empty batch has the noise of a weight of 1.
        gamma = float(np.clip(rho_U.mean(), self.spec.least_weight, 1.0)) if len(rho_U) else 1.0
        self._count(_bin(gamma))
        record()
        return self.noise_multiplier * gamma

    def figures(self, record: dict[str, Any]) -> dict[str, float | None]:
        """ε of the noise that was really used, composed by PLD: our reading of the paper. Three
        figures, rounded up: more of them would tell more of the batches."""
        mechanism = Mechanism.of_record(record)
        steps = tuple(
            (replace(mechanism, noise_multiplier=self.noise_multiplier * _share(place)), int(count))
            for place, count in enumerate(self._counts)
            if count
        )
        left = delta_left(mechanism.releases, record["delta"])
        # Dozens of noise multipliers take a while at the fine interval; the coarse one costs 0.01% of ε.
        spent = epsilon_of(Spend(steps, mechanism.releases, left), "pld", COARSER)
        return figures_of(rounded_up_to(3, spent) if 0 < spent < math.inf else spent)

    def _count(self, place: int) -> None:
        self._counts[place] += 1
        if not self._path.exists():
            _append(self._path, np.zeros_like(self._counts).tobytes())
        descriptor = os.open(self._path, os.O_WRONLY)
        try:  # one write inside a page: a kill leaves the old count or the new one
            os.pwrite(descriptor, self._counts[place].tobytes(), place * 8)
        finally:
            os.close(descriptor)

    def restore(self, state: dict[str, Any], steps: int) -> None:
        there = self._path.read_bytes() if self._path.exists() else bytes(self._counts.nbytes)
        if len(there) != self._counts.nbytes:
            raise _lost(f"{self._path}, whole")
        self._counts = np.frombuffer(there, _SHARE).copy()
        if int(self._counts.sum()) < steps:
            raise _lost(f"{self._path}, which counts as many steps")

    def settle(self, record: Callable[[], None]) -> None:
        _flush(self._path)


def schedule_for(
    adaptive: AdaptiveSpec | None, plan: NoisePlan, spec: PrivacySpec, folder: Path
) -> Schedule:
    """The noise of a run's steps; what it keeps beside the ledger goes to `folder`."""
    if adaptive is not None and adaptive.mode == "scale":
        return ReleasedNoise(
            adaptive,
            plan.noise_multiplier,
            spec.expected_batch,
            folder,
            budget=plan.budget,
            insecure_seed=spec.insecure_seed,
        )
    if adaptive is not None and adaptive.mode == "as-published":
        return BatchNoise(adaptive, plan.noise_multiplier, folder)
    return Schedule(plan.noise_multiplier)


def _bin(gamma: float) -> int:
    """Which count a share of the noise belongs to, rounded towards less noise."""
    return max(0, math.ceil(math.log(1 / gamma) / math.log(_RATIO) - 1e-9))


def _share(place: int) -> float:
    """The least share of the noise that a count stands for."""
    return float(_RATIO**-place)


def _append(path: Path, line: bytes) -> None:
    make_private_folder(path.parent)
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, OWNER_FILE)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    if path.exists():
        fsync(path)


def _lost(what: str) -> GuaranteeError:
    return GuaranteeError(
        f"The ledger is damaged: {what} should stand there, so nobody knows what the run has spent. Put a whole copy "
        "back, or train again in another folder."
    )
