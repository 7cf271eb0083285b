"""One object that owns sampler, clip, noise and accountant, so that they cannot disagree.

private = PrivateTraining(model, optimizer, documents, users=users, epsilon=8.0,
                          expected_batch=64, steps=1000, ledger="ledger.json")
while private.has_budget():
    private.step()
print(private.guarantee())
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.files import read_sealed, write_sealed
from tightlip.core.grid_gaussian import NotFinite
from tightlip.core.processes import Processes
from tightlip.core.randomness import keyed_generator
from tightlip.core.run_folder import ENGINE_CHECK
from tightlip.core.settings import takes
from tightlip.privacy.accounting import Mechanism
from tightlip.privacy.adaptive import AdaptiveSpec, checked_weights
from tightlip.privacy.clipping import Clip, ClippedGradients
from tightlip.privacy.composition import enrolled
from tightlip.privacy.engine_canaries import EngineCanaries
from tightlip.privacy.exact_sums import MOST_UNITS
from tightlip.privacy.layers import zeros_for
from tightlip.privacy.ledger import Ledger, ToldLedger, claimed, read_ledger
from tightlip.privacy.noise_schedules import noise_for, schedule_for
from tightlip.privacy.passes import Passes, Physical, Way
from tightlip.privacy.people import withdraw
from tightlip.privacy.per_unit import check_optimizer, without_dropout
from tightlip.privacy.physical_batches import PhysicalBatches
from tightlip.privacy.plans import PrivacySpec, Terms, noise_plan
from tightlip.privacy.promised import arithmetic_of, on_your_word, promised_by
from tightlip.privacy.releasing import Shares, check_same_text, release, tell_noise
from tightlip.privacy.rows_alone import checked_passes, shared_by_others
from tightlip.privacy.sampling import PER_OWNER, Ownership, PoissonSampler, UnitRows
from tightlip.privacy.shards import check_shards, shards_of
from tightlip.privacy.sources import Documents, Source, sampled_units, source_of

log = logging.getLogger("tightlip")
# Beside the ledger, for its owner only; hubs are not sent such names.
SHAPES = "_private_shapes.json"


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step saw. All of it is private: it must not leave the owner's hands."""

    loss: Tensor
    num_targets: int


class PrivateTraining:
    """Differentially private training of `model` by `optimizer`, one step at a time.

    Arguments:
        model, optimizer: any causal language model that gives logits for ids, and any of torch's
            optimizers but LBFGS.
        documents: a tensor of ids for each document, or a Source.
        ledger: the file that every step is charged to; where it is there, its account goes on.
        users: whose each document is. With them the unit is a user, without them a document. A list
            where it has several owners: documents are then drawn, a few of each owner's.
        epsilon: the target; training stops before it is passed.
        noise_multiplier: the noise of a step, in clip_norm. Default: as little as epsilon allows.
        delta: the δ that ε is read at. Default: by the number of units, below 1 / units.
        clip_norm: the most that a unit's gradient counts for.
        per_layer: clip each layer by itself.
        exact_sums: add units up as whole numbers, so that none changes how another is rounded.
        rows_per_unit: the most rows that a drawn unit gives to a step, chosen at random.
        expected_batch: units in a step, on average.
        steps: for how many the noise is planned.
        allow_loose_delta: take a delta above 1 / units.
        insecure_seed: for tests only; noise and sampling from a known seed hide nothing.
        unit: 'user' or 'example'; `users` says it already.
        people: a name of yours for whose text it is; runs of one name are counted together.
        terms: how sure the promise is, where more is known than this loop can know.
        way, bf16: how passes are run, and whether in bfloat16.
        physical_rows: rows in memory at once. Default: 8 on a CPU; on a GPU what a step draws, up to 16,384 tokens.
        widths: lengths that rows are padded to. Default: powers of two.
        claims_ledger: keep other processes from going on with the ledger meanwhile.
        adaptive: lets `weights` decide on clipping or noise.
        weights: the ρ of each row, for `adaptive`: private, all but their public facts.
        documents_per_owner: most documents of an owner that are ever drawn, where texts have several
            owners. Default: 4.
        check_canaries: so many units of known gradient, which no weight hears of: `tightlip dp-check`
            asks what the noise let through of them.

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
        exact_sums: bool = False,
        rows_per_unit: int = 4,
        expected_batch: float = 32,
        steps: int = 1000,
        allow_loose_delta: bool = False,
        insecure_seed: int | None = None,
        unit: str | None = None,
        people: str | None = None,
        terms: Terms | None = None,
        way: Way = "eager",
        bf16: bool = False,
        physical_rows: int | None = None,
        widths: tuple[int, ...] = (),
        claims_ledger: bool = True,
        adaptive: AdaptiveSpec | None = None,
        weights: np.ndarray | None = None,
        documents_per_owner: int | None = None,
        check_canaries: int | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.source = source_of(documents, users)
        self.spec = spec = PrivacySpec(
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
            documents_per_owner=documents_per_owner,
        )
        if isinstance(self.source, Documents):
            _check_unit(spec.unit, users)
        self.terms = terms or on_your_word(adaptive, people)
        self.device = next(model.parameters()).device
        self._processes = processes = Processes.here()
        processes.agreed((spec, exact_sums, way, bf16, physical_rows, widths, adaptive), "settings")
        self._generator = keyed_generator(spec.insecure_seed)
        self.ownership: Ownership | None = getattr(self.source, "ownership", None)
        if self.ownership is not None and adaptive is not None and adaptive.mode != "clip":
            raise UsageError(
                f"adaptive={adaptive.mode!r} is worked out for people who are drawn at most once a step, and texts here have "
                "several owners. Use --adaptive clip, or plain dp."
            )
        units = sampled_units(self.source, spec.documents_per_owner)
        self._units = UnitRows(np.asarray(self.source.unit_of_row), units)
        self._sampler = PoissonSampler(self.num_units, spec.expected_batch, self._generator)
        self._noise = noise_for(self.device, processes.own_seed(spec.insecure_seed))
        self._batches = PhysicalBatches(
            self.source,
            model,
            rows_per_unit=spec.rows_per_unit,
            physical_rows=physical_rows,
            expected_batch=spec.expected_batch / processes.size,
            most_units=MOST_UNITS if exact_sums and self.device.type == "cuda" else None,
            widths=widths,
        )
        check_optimizer(model, optimizer)
        self.clip = Clip(norm=spec.clip_norm, per_layer=spec.per_layer, exact=exact_sums)
        check_shards(model, processes, way)
        self._shares: Shares | None = None
        if processes.are_several or shards_of(model):
            check_same_text(self.source, processes)
            self._shares = Shares(model, processes)
            processes.agreed(self._shares.digest(frozen=True), "the weights they start from")
        path = Path(ledger).resolve()  # a link would be replaced, and what it led to left behind
        before = processes.told(lambda: read_ledger(path) if path.exists() else dict[str, Any]())
        self.canaries: EngineCanaries | None = None
        if check_canaries:
            self.canaries = self._canaries(check_canaries, path, before, adaptive)
        with without_dropout(model):
            passes = Passes(model, self.clip, way=way, bf16=bf16)
            passes.draws = processes.same_draws()
            self._passes = checked_passes(passes, self._batches)
            processes.agreed((passes.way, self._batches.chosen), "which rows may share a pass")
            arithmetic = arithmetic_of(
                self._passes, self._batches, before, expected_batch=spec.expected_batch
            )
        self.arithmetic = max(processes.all_gathered(arithmetic), key=lambda each: each.charged)
        self._mixing_asked_at = (-1, False)  # steps, and whether of moved weights
        self._fixed = self._passes.untouched.fixed_now()
        self._all_parameters = [(each, each.requires_grad) for each in model.parameters()]
        self.adaptive = adaptive
        self._rho = self._weights(weights)
        per_owner = None if self.ownership is None else spec.documents_per_owner or PER_OWNER
        mechanism = Mechanism(
            noise_multiplier=spec.noise_multiplier or 1.0,
            sampling_rate=self._sampler.sampling_rate,
            releases=self.terms.releases,
            documents_per_owner=per_owner,
        )
        self.plan = noise_plan(spec, mechanism, num_units=self.num_protected, adaptive=adaptive)
        self.schedule = schedule_for(adaptive, self.plan, spec, path.parent)
        sigma = self.plan.noise_multiplier  # without noise the clip norm may be infinite
        tell_noise(optimizer, sigma and sigma * spec.clip_norm / spec.expected_batch, self.mode)
        self.ledger = self._ledger(path, claims_ledger)
        self._fits = processes.told(self.schedule.fits)
        apart = processes.told(lambda: self._apart_at_first(path.with_name(SHAPES), before))
        if not all(each in apart for each in self._apart):
            self._take_back("Rows that shared a pass before move each other now.")

    def close(self) -> None:
        """Let another training go on with the ledger."""
        self.ledger.close()

    @property
    def num_units(self) -> int:
        """How many each step samples from."""
        return self._units.num_units

    @property
    def num_protected(self) -> int:
        """How many the promise is made to: the units, or the owners of the documents that are sampled."""
        return self.num_units if self.ownership is None else self.ownership.num_owners

    @property
    def mechanism(self) -> Mechanism:
        """A step as the accounting has it; where the noise varies, with the least it can be."""
        return self.plan.mechanism

    @property
    def _apart(self) -> list[list[int]]:
        """The shapes whose units take a pass each."""
        return sorted([shape.width, shape.rows_per_unit] for shape in self._batches.apart)

    def _apart_at_first(self, path: Path, before: dict[str, Any]) -> list[list[int]]:
        """What was so when the run began; kept from everybody, since it tells how long texts are."""
        if not before.get("steps") and self._apart:
            write_sealed(path, {"apart": self._apart})
        return read_sealed(path)[0]["apart"] if path.exists() else []

    @property
    def one_unit_a_pass(self) -> bool:
        """Whether no two units share a pass, since the model mixes rows or rounds them by place."""
        return self._batches.one_unit_a_pass

    @property
    def mode(self) -> str | None:
        """That of an adaptive run."""
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
        return within and (self.schedule.fits() if self._processes.is_first else self._fits)

    def step(self) -> Step:
        """Draw, charge, clip, add noise, update."""
        return self._taken(applies=True)

    def noisy_gradients(self) -> Step:
        """All of a step but the update: the parameters' `.grad` hold the noisy gradients, and what is
        done with them costs nothing more. It is charged whether or not they are used."""
        return self._taken(applies=False)

    def _taken(self, *, applies: bool) -> Step:
        if not self.may_step():
            raise GuaranteeError(
                f"{self.ledger.steps} steps are spent, and another would pass epsilon={self.spec.epsilon:g}. "
                f"Stop here, or begin a new run with more noise."
            )
        if any(each.requires_grad != before for each, before in self._all_parameters):
            raise GuaranteeError(
                "Other parameters require gradients than at the start, which were not looked at then: they would not be clipped, or "
                "not be trained. Put requires_grad back as it was, or begin a new run on the same people."
            )
        rows_of, rho_U, sigma, self._fits, drawn = self._processes.told(self._draw_and_charge)
        if not self._processes.is_first:
            self.ledger.charge()
        try:
            sums, step = self._clipped_sum(rows_of, rho_U)
            self._release(self._with_canaries(sums, drawn), sigma, applies)
        except NotFinite:
            # Somebody's gradient is no number. They count nothing, and everybody else what they did.
            sums, step = self._clipped_sum(rows_of, rho_U, finite_only=True)
            self._release(self._with_canaries(sums, drawn), sigma, applies)
        if self.canaries is not None:
            self.canaries.watch(
                expected_batch=self.spec.expected_batch,
                noise_multiplier=sigma,
                sampling_rate=self._sampler.sampling_rate,
            )
        return step

    def _draw_and_charge(
        self,
    ) -> tuple[list[np.ndarray], np.ndarray | None, float, bool, np.ndarray]:
        """Of several processes the first draws, and nobody is told before it is on record. Canaries of the
        engine are numbered behind the units."""
        units = self._sampler.draw()
        rows_of, rho_U = self._drawn(units[units < self.num_units])
        sigma = self.schedule.charge(self.ledger.charge, rho_U)
        canaries = units[units >= self.num_units] - self.num_units
        return rows_of, rho_U, sigma, self.schedule.fits(), canaries

    def _canaries(
        self, num: int, path: Path, before: dict[str, Any], adaptive: AdaptiveSpec | None
    ) -> EngineCanaries:
        """The engine's own, drawn as likely as any unit, by the same sampler."""
        if adaptive is not None or self.ownership is not None or self._shares is not None:
            raise UsageError(
                f"check_canaries={num} asks one process whose noise is the same in every step and whose units are people or "
                "documents of one owner. Check such a run of the same settings, or leave check_canaries out."
            )
        rate, both = self._sampler.sampling_rate, self.num_units + num
        self._sampler = PoissonSampler(both, min(rate * both, both), self._generator)
        return EngineCanaries(
            num,
            self.clip,
            device=self.device,
            file=path.with_name(ENGINE_CHECK),
            goes_on=bool(before.get("steps")),
        )

    def _with_canaries(self, sums: list[Tensor], drawn: np.ndarray) -> list[Tensor]:
        if self.canaries is None:
            return sums
        share = 1 - self.arithmetic.charged
        return [*sums, self.canaries.clipped_sum(drawn, share, like=sums[0])]

    def _release(self, sums: list[Tensor], sigma: float, applies: bool) -> None:
        # By the expected size of a draw, never by the real one, which is private.
        amounts = {"scale": sigma * self.spec.clip_norm, "share": 1 / self.spec.expected_batch}
        if self.clip.exact:
            amounts["unit"] = self.clip.step
        noise = self._noise if sigma else None
        if self._shares is not None:
            self._shares.release(sums, self.optimizer, noise, applies=applies, **amounts)
            return
        parameters = list(self._passes.parameters.values())
        parameters += [] if self.canaries is None else self.canaries.parameters
        release(sums, parameters, self.optimizer, noise, applies=applies, **amounts)

    def guarantee(self) -> dict[str, Any]:
        """What may be said now, exactly; also written to the ledger."""
        self._ask_for_mixing()
        if self.canaries is not None:
            self.canaries.settle()
        return self._processes.told(self.ledger.finish)

    def exact_record(self, *, ended: bool = False) -> dict[str, Any]:
        """The same, and nothing is written."""
        self._ask_for_mixing(moved=ended)
        return self._processes.told(lambda: self.ledger.record(exact=True))

    def settle(self) -> None:
        """Make what is charged and released survive a power cut."""
        self._processes.told(self._settle)

    def _settle(self) -> None:
        self.schedule.settle(self.ledger.rewrite)
        if self.canaries is not None:
            self.canaries.settle()
        self.ledger.settle()

    def _ask_for_mixing(self, *, moved: bool = True) -> None:
        """Take back the promise where training has led the model to mix rows; at snapshots it is asked
        of the weights as they are."""
        if self._mixing_asked_at == (self.ledger.steps, moved):
            return
        self._mixing_asked_at = (self.ledger.steps, moved)
        with without_dropout(self.model):
            reason = shared_by_others(self._passes, self._batches, moved=moved)
        has_changed = self._passes.untouched.fixed_now() != self._fixed
        weights = "" if self._shares is None else self._shares.digest()
        every = self._processes.all_gathered((reason, has_changed, weights))
        for reason in filter(None, (each[0] for each in every)):
            self._take_back(f"The trained model mixes rows, or rounds them by place: {reason}.")
        if any(each[1] for each in every):
            self._take_back(
                "Weights or buffers that are not trained have changed, unclipped and without noise, as by merge_adapter() and "
                "unmerge_adapter() too: merge a copy."
            )
        if len({each[2] for each in every}) > 1:
            self._take_back("The processes' weights differ, so one of them was changed by itself.")

    def _take_back(self, reason: str) -> None:
        log.warning("The guarantee is taken back. %s", reason)
        self.ledger.taken_back = f"{reason} One {self.spec.unit} may have moved others' gradients, which the clip norm does not bound."
        self.ledger.rewrite()  # or a killed process would go on with the promise
        if self.ledger.people is not None:
            withdraw(self.ledger.record(), self.ledger.path)

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
        rows_of = [rows for rows in rows_of if len(rows)]  # an empty document adds nothing
        if self._rho is None or not rows_of:
            return rows_of, None if self._rho is None else np.empty(0)
        sizes = np.array([len(rows) for rows in rows_of])
        sums = np.add.reduceat(self._rho[np.concatenate(rows_of)], np.cumsum(sizes) - sizes)
        return rows_of, sums / sizes

    def _clipped_sum(
        self, rows_of: list[np.ndarray], rho_U: np.ndarray | None, *, finite_only: bool = False
    ) -> tuple[list[Tensor], Step]:
        """The sum over the drawn units, however many physical batches they take; with `finite_only`
        as though the units whose gradients are no numbers had not been drawn."""
        total: list[Tensor] | None = None
        loss, num_targets = torch.zeros((), device=self.device), 0
        batches = list(self.physical_batches(rows_of, rho_U))
        for batch, targets in batches:
            clipped = self._clipped(batch, finite_only)
            # A unit that is not finite counts nothing, here as in the sum.
            loss += torch.where(clipped.losses.isfinite(), clipped.losses, 0).sum().float()
            num_targets += targets
            parts = list(clipped.gradients.values())
            if len(batches) == 1:
                total = parts
            elif total is None:
                # 32 bits hold the whole numbers of one pass, and floats of all would be rounded as
                # their number has it. Copies: a captured pass writes to the same memory each time.
                total = [part.to(torch.float64, copy=True) for part in parts]
            else:
                for sums, part in zip(total, parts, strict=True):
                    sums += part
        if total is None:
            total = [zeros_for(each) for each in self._passes.parameters.values()]
        if self._processes.are_several:
            seen = torch.stack([loss.double(), loss.new_tensor(num_targets, dtype=torch.float64)])
            self._processes.add_up([seen])
            loss, num_targets = seen[0].float(), int(seen[1])
        return total, Step(loss=loss / max(1, len(rows_of)), num_targets=num_targets)

    def _clipped(self, batch: Physical, finite_only: bool) -> ClippedGradients:
        # Masks of dropout go by place in the batch, so one unit more would change everybody's, and
        # with them the whole sum.
        with without_dropout(self.model):
            clipped = self._passes(batch)
            if not finite_only:
                return clipped
            return self._passes(batch.without(~(clipped.norms + clipped.losses).isfinite()))

    def physical_batches(
        self, rows_of: list[np.ndarray], rho_U: np.ndarray | None
    ) -> Iterator[tuple[Physical, int]]:
        """What a step runs of the drawn units; with each batch, how many targets it has."""
        shares_U = np.ones(len(rows_of))
        if self.adaptive is not None and rho_U is not None:
            shares_U = self.adaptive.clip_shares(rho_U)
        shares_U = shares_U * (1 - self.arithmetic.charged)
        return self._batches.of(rows_of, shares_U, self._processes)

    def _ledger(self, path: Path, claims: bool) -> Ledger:
        terms = promised_by(self)
        opened: list[Ledger] = []

        def steps_on_record() -> int:
            opened.append(self._opened(path, terms, claims))
            return opened[0].steps

        steps, meter = self._processes.told(steps_on_record), self.plan.meter(self.adaptive)
        return opened[0] if opened else ToldLedger(path, terms, meter, steps)

    def _opened(self, path: Path, terms: dict[str, Any], claims: bool) -> Ledger:
        meter, schedule = self.plan.meter(self.adaptive), self.schedule
        claim = claimed(path) if claims else None  # before it is read, or two could read the same
        try:
            goes_on = path.exists()
            make = Ledger.open if goes_on else Ledger.begin
            ledger = make(path, terms, meter, state=schedule.state, figures=schedule.figures)
            if goes_on:
                schedule.restore(read_ledger(path).get("adaptive_state", {}), ledger.steps)
            enrolled(ledger)
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
