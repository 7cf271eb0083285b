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
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightlip.core.devices import moved
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.randomness import keyed_generator
from tightlip.core.settings import takes
from tightlip.privacy.accounting import Mechanism
from tightlip.privacy.adaptive import BECAUSE, MECHANISMS, AdaptiveSpec, checked_weights
from tightlip.privacy.clipping import Clip
from tightlip.privacy.layers import Layout, zeros_for
from tightlip.privacy.ledger import ACCOUNTANT, Ledger, claimed, guarantee_terms, read_ledger
from tightlip.privacy.noise_schedules import noise_for, schedule_for
from tightlip.privacy.passes import Passes, Physical, Way
from tightlip.privacy.per_unit import (
    check_model,
    check_optimizer,
    no_rule_for,
    synthetic_rows,
    without_dropout,
)
from tightlip.privacy.plans import PrivacySpec, Terms, noise_plan
from tightlip.privacy.row_losses import NO_LABEL
from tightlip.privacy.sampling import PoissonSampler, UnitRows

log = logging.getLogger("tightlip")
LONGEST_CHECKED = 32  # positions of the two synthetic rows of the self-check


class Source(Protocol):
    """Rows to train on: whose each is, how long, and the rows themselves."""

    unit_of_row: np.ndarray
    lengths: np.ndarray
    fingerprint: str

    def gather(self, rows: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
        """Ids and targets [B, T] of the rows; a row of -1 is padding without a target."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step saw. All of it is private: it must not leave the owner's hands."""

    loss: Tensor
    num_targets: int


class PrivateTraining:
    """Differentially private training of `model` by `optimizer`, one step at a time.

    Arguments:
        model, optimizer: any causal language model that gives logits for ids, and any of torch's.
        documents: a tensor of ids for each document, or a Source.
        ledger: the file that every step is charged to; where it is there, its account goes on.
        users: whose each document is. With them the unit is a user, without them a document.
        epsilon: the target; training stops before it is passed.
        noise_multiplier: the noise of a step, in clip_norm. Default: as little as epsilon allows.
        delta: the δ that ε is read at. Default: by the number of units, below 1 / units.
        clip_norm: the most that a unit's gradient counts for.
        per_layer: clip each layer by itself.
        rows_per_unit: the most rows that a drawn unit gives to a step, chosen at random.
        expected_batch: units in a step, on average.
        steps: for how many the noise is planned.
        allow_loose_delta: take a delta above 1 / units.
        insecure_seed: for tests only; noise and sampling from a known seed hide nothing.
        unit: 'user' or 'example'; `users` says it already.
        terms: how sure the promise is, where more is known than this loop can know.
        way, bf16: how passes are run, and whether in bfloat16.
        physical_rows: rows in memory at once. Default: 16 on a CPU, 64 on a GPU.
        widths: lengths that rows are padded to, so that few shapes come up.
        claims_ledger: keep other processes from going on with the ledger meanwhile.
        adaptive: lets `weights` decide on clipping or noise.
        weights: the ρ of each row, for `adaptive`: private, all but their public facts.

    Holds:
        charged: a step is in the ledger before it changes a weight.
        within: no step is taken that would pass the target ε.
        complete: every trainable parameter is clipped, or the start is refused.
        fresh: sampling and noise are drawn anew, also after a resumption.
    """

    @takes()
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        documents: Source | Sequence[Tensor],
        *,
        ledger: str | Path,
        users: Sequence[Any] | None = None,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float | None = None,
        clip_norm: float = 1.0,
        per_layer: bool = False,
        rows_per_unit: int = 4,
        expected_batch: float = 32,
        steps: int = 1000,
        allow_loose_delta: bool = False,
        insecure_seed: int | None = None,
        unit: str | None = None,
        terms: Terms | None = None,
        way: Way = "eager",
        bf16: bool = False,
        physical_rows: int | None = None,
        widths: tuple[int, ...] = (),
        claims_ledger: bool = True,
        adaptive: AdaptiveSpec | None = None,
        weights: np.ndarray | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.source = _source_of(documents, users)
        self.spec = PrivacySpec(
            unit=unit or ("example" if users is None else "user"),
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            clip_norm=clip_norm,
            per_layer=per_layer,
            rows_per_unit=rows_per_unit,
            expected_batch=expected_batch,
            steps=steps,
            allow_loose_delta=allow_loose_delta,
            insecure_seed=insecure_seed,
        )
        if isinstance(self.source, Documents):
            _check_unit(self.spec.unit, users)
        self.terms = terms or _on_your_word(adaptive)
        self.device = next(model.parameters()).device
        generator = keyed_generator(self.spec.insecure_seed)
        self._generator = generator
        self._units = UnitRows(np.asarray(self.source.unit_of_row))
        self._sampler = PoissonSampler(self._units.num_units, self.spec.expected_batch, generator)
        self._noise = noise_for(self.device, self.spec.insecure_seed)
        self._widths = widths
        with without_dropout(model):
            self._passes = self._checked_passes(way, bf16)
        self._physical_rows = physical_rows or (64 if self.device.type == "cuda" else 16)
        self.adaptive = adaptive
        self._rho = self._weights(weights)
        self.plan = noise_plan(
            self.spec,
            num_units=self.num_units,
            sampling_rate=self._sampler.sampling_rate,
            releases=self.terms.releases,
            adaptive=adaptive,
        )
        self.schedule = schedule_for(adaptive, self.plan, self.spec, Path(ledger).parent)
        self.ledger = self._ledger(Path(ledger), claims_ledger)

    def close(self) -> None:
        """Let another training go on with the ledger."""
        self.ledger.close()

    @property
    def num_units(self) -> int:
        return self._units.num_units

    @property
    def mechanism(self) -> Mechanism:
        """A step as the accounting has it; where the noise varies, with the least it can be."""
        return self.plan.mechanism

    @property
    def _mode(self) -> str | None:
        return None if self.adaptive is None else self.adaptive.mode

    @property
    def delta(self) -> float:
        return self.plan.delta

    @property
    def most_steps(self) -> int | None:
        return self.plan.most_steps

    @property
    def epsilon(self) -> float:
        """At least what is spent so far."""
        return self.ledger.epsilon

    def has_budget(self) -> bool:
        """Whether another step is planned and may be taken."""
        return self.may_step() and self.ledger.steps < self.spec.steps

    def may_step(self) -> bool:
        """Whether another step stays within the target, if there is one."""
        within = self.most_steps is None or self.ledger.steps < self.most_steps
        return within and self.schedule.fits()

    def step(self) -> Step:
        """Draw, charge, clip, add noise, update."""
        if not self.may_step():
            raise GuaranteeError(
                f"{self.ledger.steps} steps are spent, and another would pass epsilon={self.spec.epsilon:g}. "
                f"Stop here, or begin a new run with more noise."
            )
        rows_of, rho_U = self._drawn(self._sampler.draw())
        sigma = self.schedule.charge(self.ledger.charge, rho_U)
        # Masks of dropout go by place in the batch, so one unit more would change everybody's,
        # and with them the whole sum.
        with without_dropout(self.model):
            gradients, step = self._clipped_sum(rows_of, rho_U)
        # By the expected size of a draw, never by the real one, which is private.
        share = 1 / self.spec.expected_batch
        if sigma:
            self._noise.add(gradients, scale=sigma * self.spec.clip_norm, share=share)
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

    def exact_record(self) -> dict[str, Any]:
        """The same, and nothing is written."""
        return self.ledger.record(exact=True)

    def settle(self) -> None:
        """Make what is charged and released survive a power cut."""
        self.schedule.settle(self.ledger.rewrite)
        self.ledger.settle()

    def _weights(self, weights: np.ndarray | None) -> np.ndarray | None:
        if (weights is None) != (self.adaptive is None):
            raise UsageError("adaptive and weights belong together. Give both, or neither.")
        if weights is None or self.adaptive is None:
            return None
        return checked_weights(weights, len(self.source.lengths), self.adaptive.least_weight)

    def _drawn(self, units: np.ndarray) -> tuple[list[np.ndarray], np.ndarray | None]:
        """The rows that speak for each unit; of an adaptive run also the unit's weight: their
        mean. All of it is private."""
        most = self.spec.rows_per_unit
        rows_of = [self._units.rows(unit, most, self._generator) for unit in units]
        if self._rho is None or not rows_of:
            return rows_of, None if self._rho is None else np.empty(0)
        sizes = np.array([len(rows) for rows in rows_of])
        sums = np.add.reduceat(self._rho[np.concatenate(rows_of)], np.cumsum(sizes) - sizes)
        return rows_of, sums / sizes

    def _clipped_sum(
        self, rows_of: list[np.ndarray], rho_U: np.ndarray | None
    ) -> tuple[list[Tensor], Step]:
        """The sum over the drawn units, however many physical batches they take."""
        total: list[Tensor] | None = None
        loss, num_targets = torch.zeros((), device=self.device), 0
        batches = list(self.physical_batches(rows_of, rho_U))
        for batch, targets in batches:
            clipped = self._passes(batch)
            # A unit that is not finite counts nothing, here as in the sum.
            loss += torch.where(clipped.losses.isfinite(), clipped.losses, 0).sum().float()
            num_targets += targets
            parts = list(clipped.gradients.values())
            if total is None:
                # A captured pass writes to the same memory each time.
                keep = len(batches) > 1 and self._passes.wants_fixed_shapes
                total = [part.clone() for part in parts] if keep else parts
            else:
                torch._foreach_add_(total, parts)
        if total is None:
            total = [zeros_for(each) for each in self._passes.parameters.values()]
        return total, Step(loss=loss / max(1, len(rows_of)), num_targets=num_targets)

    def physical_batches(
        self, rows_of: list[np.ndarray], rho_U: np.ndarray | None
    ) -> Iterator[tuple[Physical, int]]:
        """The drawn units in batches of bounded size, those of like shape together; with each,
        how many targets it has. Nobody who was drawn is left out."""
        shares_U = np.ones(len(rows_of))
        if rho_U is not None and self.adaptive is not None:
            shares_U = self.adaptive.clip_shares(rho_U)
        longest = np.array([self.source.lengths[rows].max() for rows in rows_of], int)
        sizes = np.array([self._room(len(rows)) for rows in rows_of], int)
        for size in np.unique(sizes):
            chosen = np.flatnonzero(sizes == size)
            chosen = chosen[np.argsort(longest[chosen], kind="stable")]
            together = max(1, self._physical_rows // int(size))
            for start in range(0, len(chosen), together):
                part = chosen[start : start + together]
                rows, widest = [rows_of[one] for one in part], int(longest[part].max())
                yield self._physical(rows, shares_U[part], int(size), widest, together)

    def _room(self, num_rows: int) -> int:
        if self._passes.wants_fixed_shapes and self.spec.rows_per_unit > 1 and num_rows > 1:
            return self.spec.rows_per_unit
        return 1 << (num_rows - 1).bit_length()

    def _physical(
        self, rows_of: list[np.ndarray], shares: np.ndarray, size: int, longest: int, together: int
    ) -> tuple[Physical, int]:
        fixed = self._passes.wants_fixed_shapes
        rows_UM = np.full((together if fixed else len(rows_of), size), -1, np.int64)
        for unit, rows in enumerate(rows_of):
            rows_UM[unit, : len(rows)] = rows
        widths = self._widths if fixed else ()
        width = min((each for each in widths if each >= longest), default=longest)
        ids_BT, targets_BT = self.source.gather(rows_UM.ravel(), width)
        num_rows_U = torch.from_numpy((rows_UM >= 0).sum(1))
        num_targets = int((targets_BT != NO_LABEL).sum())
        batch = Physical.of(
            moved(ids_BT, self.device),
            moved(targets_BT, self.device),
            moved(num_rows_U, self.device),
            Layout(num_units=len(rows_UM), rows_per_unit=size),
            self._shares(shares, len(rows_UM)),
        )
        return batch, num_targets

    def _shares(self, shares: np.ndarray, num_units: int) -> Tensor | None:
        """Which part of the clip norm bounds each unit; places without one have all of it."""
        if self.adaptive is None:
            return None
        padded = np.concatenate([shares, np.ones(num_units - len(shares))])
        return moved(torch.from_numpy(padded), self.device)

    def _checked_passes(self, way: Way, bf16: bool) -> Passes:
        check_optimizer(self.model, self.optimizer)
        clip = Clip(norm=self.spec.clip_norm, per_layer=self.spec.per_layer)
        passes = Passes(self.model, clip, way=way, bf16=bf16)
        length = min(LONGEST_CHECKED, int(self.source.lengths.max()))
        some = torch.full((1, length), self._some_id(), device=self.device)
        widest = max(int(self.source.lengths.max()), *(self._widths or (1,)))
        check_model(self.model, synthetic_rows(self.model, some[:, :1].expand(-1, widest)))
        slow = no_rule_for(self.model, some)
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

    def _because(self) -> str:
        because = self.terms.because
        if self._mode == "as-published" and BECAUSE["as-published"] not in because:
            because = BECAUSE["as-published"]  # whatever the terms say
        if self.spec.insecure_seed is not None:
            because = f"The noise comes from a known seed and hides nothing. {because}"
        return because

    def _adaptive_terms(self) -> dict[str, Any]:
        """What an adaptive run promises otherwise than plain private training."""
        if self.adaptive is None:
            return {}
        mode, budget, accountant = self.adaptive.mode, self.plan.budget, ACCOUNTANT
        terms = self.adaptive.terms(self.plan.noise_multiplier)
        if mode == "as-published":
            accountant = "PLD of σ·γ of each batch, our reading: the paper gives no accounting"
        if mode == "scale":
            accountant = "PLD at the least noise that a step can have"
            terms["planned_steps"] = self.plan.planned_steps
        if budget is not None:
            accountant = (
                f"RDP filter at order {budget.order}, or PLD at the least noise if that is less"
            )
            terms |= {"epsilon": self.plan.target, "order": budget.order}
            terms["rdp_budget"] = budget.budget
        return {"mechanism": MECHANISMS[mode], "accountant": accountant, "adaptive": terms}

    def _ledger(self, path: Path, claims: bool) -> Ledger:
        spec = self.spec
        weaker = spec.insecure_seed is not None or self._mode == "as-published"
        terms = guarantee_terms(
            self.mechanism,
            delta=self.delta,
            unit=spec.unit,
            clip_norm=spec.clip_norm if math.isfinite(spec.clip_norm) else None,
            num_units=self.num_units,
            expected_batch=spec.expected_batch,
            corpus_fingerprint=self.source.fingerprint,
            insecure_seed=spec.insecure_seed is not None,
            standing="as published" if weaker else self.terms.standing,
            because=self._because(),
            covers=list(self.terms.covers),
            outside=list(self.terms.outside),
            **self._adaptive_terms(),
        )
        meter, schedule = self.plan.meter(self.adaptive), self.schedule
        claim = claimed(path) if claims else None  # before it is read, or two could read the same
        try:
            goes_on = path.exists()
            make = Ledger.open if goes_on else Ledger.begin
            ledger = make(path, terms, meter, state=schedule.state, figures=schedule.figures)
            if goes_on:
                schedule.restore(read_ledger(path).get("adaptive_state", {}), ledger.steps)
        except BaseException:
            if claim is not None:
                claim.close()  # or a kept traceback would keep the lock
            raise
        ledger.claim = claim
        return ledger


class Documents:
    """Documents as tensors of ids, each read whole."""

    def __init__(self, documents: Sequence[Tensor], users: Sequence[Any] | None) -> None:
        if users is not None and len(users) != len(documents):
            raise UsageError(
                f"{len(users)} users for {len(documents)} documents. Give one user for each document."
            )
        if not len(documents):
            raise UsageError("There are no documents to train on.")
        self._documents = [
            torch.as_tensor(document, dtype=torch.long).cpu() for document in documents
        ]
        self.unit_of_row = np.arange(len(documents))
        if users is not None:
            names = np.array([str(user) for user in users])
            self.unit_of_row = np.unique(names, return_inverse=True)[1]
        # The last id is only predicted, never fed.
        self.lengths = np.array([max(1, len(document) - 1) for document in self._documents])
        # A hash of the text in a ledger would tell who is in it.
        self.fingerprint = ""

    def gather(self, rows: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        targets = torch.full((len(rows), width), NO_LABEL)
        for place, row in enumerate(rows):
            if row >= 0:
                document = self._documents[row]
                size = max(0, len(document) - 1)  # a document of one id or none predicts nothing
                ids[place, :size] = document[:size]
                targets[place, :size] = document[1:]
        return ids, targets


def _source_of(documents: Source | Sequence[Tensor], users: Sequence[Any] | None) -> Source:
    if hasattr(documents, "gather"):
        return documents  # type: ignore[return-value]
    return Documents(documents, users)  # type: ignore[arg-type]


def _on_your_word(adaptive: AdaptiveSpec | None) -> Terms:
    """The terms of somebody's own loop, where nobody here knows what else shaped the weights."""
    outside = (*Terms().outside, "where tokenizer and starting weights came from: yours to say")
    if adaptive is None:
        return Terms(outside=outside)
    weights = "where the weights came from, and that each hangs on its own text alone"
    return Terms(because=BECAUSE[adaptive.mode], outside=(*outside, weights))


def _check_unit(unit: str, users: Sequence[Any] | None) -> None:
    """Refuse a name for the unit that is not what is sampled and clipped."""
    if unit != ("example" if users is None else "user"):
        given = "no users" if users is None else "users"
        raise UsageError(
            f"unit={unit!r} with {given} given: with users the unit is a user, without them an example. Leave unit out."
        )
