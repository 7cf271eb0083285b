"""One object that owns sampler, clip, noise and accountant, so that they cannot disagree.

private = PrivateTraining(model, optimizer, documents, users=users, epsilon=8.0,
                          expected_batch=64, steps=1000, ledger="ledger.json")
while private.has_budget():
    private.step()
print(private.guarantee())
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.randomness import keyed_generator
from tightlip.privacy.accounting import (
    EpsilonMeter,
    Mechanism,
    check_delta,
    default_delta,
)
from tightlip.privacy.causality import check_causal
from tightlip.privacy.clipping import Clip
from tightlip.privacy.ledger import Ledger, claimed, guarantee_terms
from tightlip.privacy.noise import noise_for
from tightlip.privacy.passes import Passes, Physical, Way
from tightlip.privacy.per_unit import check_no_buffers, no_rule_for
from tightlip.privacy.row_losses import NO_LABEL
from tightlip.privacy.sampling import PoissonSampler, UnitRows
from tightlip.privacy.self_check import synthetic_rows
from tightlip.privacy.sources import Documents, Source, source_of
from tightlip.privacy.spec import PrivacySpec, Terms
from tightlip.privacy.uses import Layout

log = logging.getLogger("tightlip")
LONGEST_CHECKED = 32  # positions of the two synthetic rows of the self-check


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step saw. All of it is private: it must not leave the owner's hands."""

    loss: Tensor
    num_targets: int


class PrivateTraining:
    """Differentially private training of `model` by `optimizer`, one step at a time.

    Holds:
        charged: a step is in the ledger before it changes a weight.
        within: no step is taken that would pass the target ε.
        complete: every trainable parameter is clipped, or the start is refused.
        fresh: sampling and noise are drawn anew, also after a resumption.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        documents: "Source | Sequence[Tensor]",
        *,
        ledger: str | Path,
        users: Sequence[Any] | None = None,
        terms: Terms | None = None,
        way: Way = "eager",
        bf16: bool = False,
        physical_rows: int | None = None,
        widths: tuple[int, ...] = (),
        claims_ledger: bool = True,
        **spec: Any,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.source = source_of(documents, users)
        self.spec = PrivacySpec(**{"unit": "example" if users is None else "user", **spec})
        if isinstance(self.source, Documents):
            _check_unit(self.spec.unit, users)
        self.terms = terms or Terms(
            outside=(
                *Terms().outside,
                "where tokenizer and starting weights came from: yours to say",
            )
        )
        self.device = next(model.parameters()).device
        generator = keyed_generator(self.spec.insecure_seed)
        self._generator = generator
        self._units = UnitRows(np.asarray(self.source.unit_of_row))
        self._sampler = PoissonSampler(self._units.num_units, self.spec.expected_batch, generator)
        self._noise = noise_for(self.device, self.spec.insecure_seed)
        self._widths = widths
        self._passes = self._checked_passes(way, bf16)
        self._physical_rows = physical_rows or (64 if self.device.type == "cuda" else 16)
        self.mechanism, self.delta = self._calibrated()
        self.most_steps = self._most_steps()
        self.ledger = self._ledger(Path(ledger), claims_ledger)

    def close(self) -> None:
        """Let another training go on with the ledger."""
        self.ledger.close()

    @property
    def num_units(self) -> int:
        return self._units.num_units

    @property
    def epsilon(self) -> float:
        """At least what is spent so far."""
        return self.ledger.epsilon

    def has_budget(self) -> bool:
        """Whether another step may be taken."""
        return self.ledger.steps < (self.most_steps or self.spec.steps)

    def step(self) -> Step:
        """Draw, charge, clip, add noise, update."""
        if self.most_steps is not None and self.ledger.steps >= self.most_steps:
            raise GuaranteeError(
                f"{self.ledger.steps} steps are spent, and another would pass epsilon={self.spec.epsilon:g}. "
                f"Stop here, or begin a new run with more noise."
            )
        # Without dropout: its masks go by place in the batch, so one unit more would change
        # everybody's, and with them the whole sum.
        self.model.eval()
        units = self._sampler.draw()
        self.ledger.charge()
        gradients, step = self._clipped_sum(units)
        # By the expected size of a draw, never by the real one, which is private.
        share = 1 / self.spec.expected_batch
        if self.mechanism.noise_multiplier:
            scale = self.mechanism.noise_multiplier * self.spec.clip_norm
            self._noise.add(gradients, scale=scale, share=share)
        else:
            for gradient in gradients:
                gradient.mul_(share)
        self.optimizer.zero_grad()  # also of what is frozen: an old gradient has no noise
        for parameter, gradient in zip(self._passes.parameters.values(), gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self.optimizer.step()
        return step

    def guarantee(self) -> dict[str, Any]:
        """What may be said now, exactly; also written to the ledger."""
        return self.ledger.finish()

    def _clipped_sum(self, units: np.ndarray) -> tuple[list[Tensor], Step]:
        """The sum over the drawn units, however many physical batches they take."""
        total: list[Tensor] | None = None
        loss, num_targets = torch.zeros((), device=self.device), 0
        batches = list(self.physical_batches(units))
        for batch, targets in batches:
            found = self._passes(batch)
            # A unit that is not finite counts nothing, here as in the sum.
            loss += torch.where(found.losses.isfinite(), found.losses, 0).sum().float()
            num_targets += targets
            parts = list(found.gradients.values())
            if total is None:
                # A captured pass writes to the same memory each time.
                keep = len(batches) > 1 and self._passes.wants_fixed_shapes
                total = [part.clone() for part in parts] if keep else parts
            else:
                torch._foreach_add_(total, parts)
        if total is None:
            total = [_zeros(each) for each in self._passes.parameters.values()]
        return total, Step(loss=loss / max(1, len(units)), num_targets=num_targets)

    def physical_batches(self, units: np.ndarray) -> Iterator[tuple[Physical, int]]:
        """The drawn units in batches of bounded size, those of like shape together; with each,
        how many targets it has. Nobody who was drawn is left out."""
        rows_of = [
            self._units.rows(unit, self.spec.rows_per_unit, self._generator) for unit in units
        ]
        longest = np.array([self.source.lengths[rows].max() for rows in rows_of], int)
        sizes = np.array([self._room(len(rows)) for rows in rows_of], int)
        for size in np.unique(sizes):
            chosen = np.flatnonzero(sizes == size)
            chosen = chosen[np.argsort(longest[chosen], kind="stable")]
            together = max(1, self._physical_rows // int(size))
            for start in range(0, len(chosen), together):
                part = chosen[start : start + together]
                yield self._physical(
                    [rows_of[one] for one in part], int(size), int(longest[part].max()), together
                )

    def _room(self, num_rows: int) -> int:
        if self._passes.wants_fixed_shapes and self.spec.rows_per_unit > 1 and num_rows > 1:
            return self.spec.rows_per_unit
        return 1 << (num_rows - 1).bit_length()

    def _physical(
        self, rows_of: list[np.ndarray], size: int, longest: int, together: int
    ) -> tuple[Physical, int]:
        fixed = self._passes.wants_fixed_shapes
        rows_UM = np.full((together if fixed else len(rows_of), size), -1, np.int64)
        for unit, rows in enumerate(rows_of):
            rows_UM[unit, : len(rows)] = rows
        width = (
            min((w for w in self._widths if w >= longest), default=longest) if fixed else longest
        )
        ids_BT, targets_BT = self.source.gather(rows_UM.ravel(), width)
        num_rows_U = torch.from_numpy((rows_UM >= 0).sum(1))
        num_targets = int((targets_BT != NO_LABEL).sum())
        batch = Physical.of(
            _moved(ids_BT, self.device),
            _moved(targets_BT, self.device),
            _moved(num_rows_U, self.device),
            Layout(num_units=len(rows_UM), rows_per_unit=size),
        )
        return batch, num_targets

    def _checked_passes(self, way: Way, bf16: bool) -> Passes:
        check_no_buffers(self.model)
        _check_optimizer(self.model, self.optimizer)
        self.model.eval()
        clip = Clip(norm=self.spec.clip_norm, per_layer=self.spec.per_layer)
        passes = Passes(self.model, clip, way=way, bf16=bf16)
        length = min(LONGEST_CHECKED, int(self.source.lengths.max()))
        some = torch.full((1, length), self._some_id(), device=self.device)
        widest = max(int(self.source.lengths.max()), *(self._widths or (1,)))
        check_causal(self.model, synthetic_rows(self.model, some[:, :1].expand(-1, widest)))
        slow = no_rule_for(self.model, passes.parameters, some)
        if slow is not None:
            log.warning(
                "No fast rule covers %s: units are clipped one after the other, exactly but slowly.",
                slow,
            )
            passes.way = "slow"
        return passes

    def _some_id(self) -> int:
        """A large id that stands in the first rows: a model need not say how many it knows."""
        rows = np.arange(min(64, len(self.source.lengths)))
        ids_BT, _ = self.source.gather(rows, int(self.source.lengths[rows].max()))
        return int(ids_BT.max())

    def _calibrated(self) -> tuple[Mechanism, float]:
        spec, releases = self.spec, self.terms.releases
        delta = default_delta(self.num_units) if spec.delta is None else spec.delta
        check_delta(delta, self.num_units, spec.allow_loose_delta, unit=spec.unit)
        sigma = spec.noise_multiplier
        if sigma is None:
            from tightlip.privacy.calibration import calibrated_noise_multiplier

            assert spec.epsilon is not None
            sigma = calibrated_noise_multiplier(
                epsilon=spec.epsilon,
                delta=delta,
                sampling_rate=self._sampler.sampling_rate,
                steps=spec.steps,
                releases=releases,
            )
        return Mechanism(
            noise_multiplier=sigma, sampling_rate=self._sampler.sampling_rate, releases=releases
        ), delta

    def _most_steps(self) -> int | None:
        """How many steps the budget has; None where there is no target."""
        if self.spec.epsilon is None:
            return None
        if self.spec.noise_multiplier is None:
            return self.spec.steps
        from tightlip.privacy.calibration import largest_steps

        most = largest_steps(self.mechanism, self.spec.epsilon, self.delta, self.spec.steps)
        if most == 0:
            raise UsageError(
                f"noise_multiplier={self.spec.noise_multiplier:g} spends more than epsilon={self.spec.epsilon:g} in its "
                f"first step. Use more noise, a larger epsilon, or leave noise_multiplier out."
            )
        return most

    def _ledger(self, path: Path, claims: bool) -> Ledger:
        spec = self.spec
        insecure = spec.insecure_seed is not None
        terms = guarantee_terms(
            self.mechanism,
            delta=self.delta,
            unit=spec.unit,
            clip_norm=spec.clip_norm if math.isfinite(spec.clip_norm) else None,
            num_units=self.num_units,
            expected_batch=spec.expected_batch,
            corpus_fingerprint=self.source.fingerprint,
            insecure_seed=insecure,
            standing="as published" if insecure else self.terms.standing,
            because=f"The noise comes from a known seed and hides nothing. {self.terms.because}"
            if insecure
            else self.terms.because,
            covers=list(self.terms.covers),
            outside=list(self.terms.outside),
        )
        meter = EpsilonMeter(self.mechanism, self.delta, self.most_steps or spec.steps)
        claim = claimed(path) if claims else None  # before it is read, or two could read the same
        try:
            ledger = (Ledger.open if path.exists() else Ledger.begin)(path, terms, meter)
        except BaseException:
            if claim is not None:
                claim.close()  # or a kept traceback would keep the lock
            raise
        ledger.claim = claim
        return ledger


def _check_unit(unit: str, users: Sequence[Any] | None) -> None:
    """Refuse a name for the unit that is not what is sampled and clipped."""
    if unit != ("example" if users is None else "user"):
        given = "no users" if users is None else "users"
        raise UsageError(
            f"unit={unit!r} with {given} given: with users the unit is a user, without them an example. Leave unit out."
        )


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that changes other weights than those that are clipped."""
    changed = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in changed:
            raise UsageError(
                f"The optimizer does not hold {name}, so it would never change. Give it the optimizer, or freeze it."
            )
        changed.discard(id(parameter))
    if changed:
        raise GuaranteeError(
            f"The optimizer changes {len(changed)} tensors that are no parameters of the model: nothing would clip them. "
            f"Build it from model.parameters()."
        )


def _zeros(parameter: nn.Parameter) -> Tensor:
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(parameter.shape, dtype=wide, device=parameter.device)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
