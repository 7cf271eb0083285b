"""Differentially private training as a mitigation: who is protected, and how."""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.figures import rounded_up
from tightlip.core.progress import log
from tightlip.core.run_folder import CHECKPOINT, LEDGER, METRICS, SNAPSHOTS
from tightlip.core.settings import names_in, setting
from tightlip.privacy.accounting import MOST_DOCUMENTS_PER_OWNER
from tightlip.privacy.ledger import read_ledger
from tightlip.privacy.passes import Way
from tightlip.privacy.plans import PrivacySpec, Terms
from tightlip.privacy.private_training import PrivateTraining
from tightlip.privacy.sampling import PER_OWNER
from tightlip.privacy.selection import NoisyLoss
from tightlip.privacy.sources import sampled_units
from tightlip.training.batches import Rows, TokenRows
from tightlip.training.config import BUILT_IN_MODELS, MitigationConfig, TrainConfig
from tightlip.training.lora import check_rows_stay_alone
from tightlip.training.losses import is_ours, is_recurrent, losses_by_unit
from tightlip.training.mitigations import CorpusFacts, RunContext
from tightlip.training.plan import Plan
from tightlip.training.promises import say_what_is_unknown, terms_of
from tightlip.training.recipe import CHECK_KINDS
from tightlip.training.together import has_split_weights

# Noise beside signal, as `noise_to_signal` has it, that is warned of. New models: on the bundled
# corpus none of four runs at 0.3 or above beat word frequencies, at 0.1 one of three did (docs/
# private-training.md). From public weights we measured nothing: there only at 1, noise as long as
# the most that units can say.
MOST_NOISE_FOR_NEW, MOST_NOISE = 0.3, 1.0
MOST_ERROR_NATS = 0.1  # of a noisy validation loss without a warning: an epoch seldom gains more
OF_A_TRIAL = "This is one of several trials, and what is promised is that of the choice among them."


@dataclass(frozen=True, kw_only=True)
class DPConfig(MitigationConfig):
    """What private training promises, and how.

    `unit` is whom the promise protects; the run's batch_size is the expected number of units of a
    step. `allow_unproved` goes on where a proof breaks, with a weaker standing.
    """

    name: ClassVar[str] = "dp"
    panel: ClassVar[str | None] = "Private training"
    is_private: ClassVar[bool] = True
    takes_whole_batches: ClassVar[bool] = False
    strength_setting: ClassVar[str | None] = "noise_multiplier"

    epsilon: float | None = setting(
        None, "The target: noise is set so that it is met, never passed.", above=0
    )
    unit: str = setting(
        PrivacySpec.unit, "Whom it protects; an example is a document.", choices=("user", "example")
    )
    delta: float | None = setting(
        None,
        "How often the promise may fail.",
        above=0,
        below=1,
        default_words="1e-5, or 1 / (10 units) where that is less",
    )
    noise_multiplier: float | None = setting(
        None, "The noise by hand, in units of the clip norm.", at_least=0
    )
    clip_norm: float = setting(PrivacySpec.clip_norm, "Largest gradient of a unit.", above=0)
    per_layer: bool = setting(False, "Clip each layer by itself.", flag="--per-layer/--flat")
    exact_sums: bool = setting(
        False,
        "Add units up as whole numbers: none changes how another is rounded.",
        flag="--exact-sums",
    )
    rows_per_unit: int = setting(
        PrivacySpec.rows_per_unit,
        "Most rows (documents, or pieces of long ones) of a unit in a step.",
        at_least=1,
    )
    documents_per_owner: int | None = setting(
        None,
        "Most documents of an owner that are ever drawn, where texts have several owners.",
        at_least=1,
        at_most=MOST_DOCUMENTS_PER_OWNER,
        default_words=f"{PER_OWNER} there",
    )
    allow_unproved: bool = setting(
        False, "Go on where a proof breaks; the standing says so.", flag="--allow-unproved"
    )
    allow_loose_delta: bool = setting(False, "A delta above 1 / units.", flag="--allow-loose-delta")
    insecure_seed: int | None = setting(None, "Known noise, for tests only: it protects nobody.")
    adam_correction: float | None = setting(
        None, "Take the noise out of Adam's second moment, down to this floor, such as 1.", above=0
    )
    noisy_validation: float | None = setting(
        None,
        "Tell the mean held-out loss with this noise, in what one unit moves it; it is charged.",
        above=0,
    )
    noisy_validation_bound: float | None = setting(
        None,
        "The most nats a token that a unit's held-out loss counts for.",
        above=0,
        default_words="the logarithm of the vocabulary's size",
        hidden=True,
    )
    dp_check_canaries: int | None = setting(
        None,
        "Plant so many texts, for tightlip dp-check RUN; they are trained on.",
        at_least=0,
        at_most=10_000_000,
    )
    dp_check_kind: str = setting(
        "random",
        "What they read: random tokens, rare ones, new ones, or samples of the model to start from.",
        choices=CHECK_KINDS,
    )
    dp_check_engine: int | None = setting(
        None,
        "Put so many canaries into the engine, for tightlip dp-check RUN; no weight hears of them.",
        at_least=0,
        at_most=10_000_000,
        default_words="as many as texts are planted",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon is None and self.noise_multiplier is None:
            raise UsageError(
                f"mitigation={self.name!r} needs a target: give --epsilon (such as 8), or --noise-multiplier (such "
                "as 1.0)."
            )

    def num_engine_canaries(self, context: RunContext) -> int:
        """As many as asked for; else as texts are planted, where the engine takes any."""
        if self.dp_check_engine is not None:
            return self.dp_check_engine
        alone = not (context.processes.are_several or has_split_weights(context.model))
        return self.num_check_canaries if alone else 0

    def check_run(self, config: TrainConfig) -> None:
        if self.adam_correction is not None and config.optimizer not in ("adam", "adamw"):
            raise UsageError(
                f"adam_correction={self.adam_correction:g} is about the second moment that adam and adamw divide by, and "
                f"optimizer={config.optimizer!r} is given. Use --optimizer adam, or leave adam_correction out."
            )
        if self.noisy_validation_bound is not None and not self.tells_validation:
            raise UsageError(
                f"noisy_validation_bound={self.noisy_validation_bound:g} is about noisy validation, which is off. Add "
                "--noisy-validation 10, or leave it out."
            )
        for name, instead in (
            ("dropout", "leave it out"),
            ("lora_dropout", "use --lora-dropout 0"),
        ):
            if share := getattr(config, name):
                raise UsageError(
                    f"{name}={share:g} under mitigation={self.name!r} would let one {self.unit} more or less change everybody's "
                    f"masks. Private training goes without dropout: {instead}."
                )
        if config.gradient_clip is not None:
            raise UsageError(
                f"gradient_clip={config.gradient_clip:g} is for plain training; private training clips each {self.unit}'s "
                f"gradient by clip_norm. Leave gradient_clip out."
            )

    def held_out_by_default(self) -> str | None:
        # A share held out by number would let one document more move others in and out.
        return "none" if self.unit == "example" else None


# Both know a promise by the same names.
_PASSED_ON = {each.name for each in fields(PrivacySpec)} & {*names_in(DPConfig)}


def dp_settings(config: TrainConfig) -> DPConfig:
    return cast(DPConfig, config.mitigation)


def noisy_loss(config: TrainConfig, steps_per_epoch: int) -> NoisyLoss | None:
    """What a private run will tell of its held-out text, at most; None where it tells nothing."""
    if (noise := dp_settings(config).noisy_validation) is None:
        return None
    plan = Plan(config=config, steps_per_epoch=steps_per_epoch)
    return NoisyLoss(noise_multiplier=noise, num_planned=plan.num_recorded)


def warn_if_loud(config: TrainConfig, corpus: CorpusFacts, num_units: int, vocabulary: int) -> None:
    """Say it where so few units cannot be heard through the noise, by public numbers alone."""
    settings: Any = config.mitigation
    if not settings.tells_validation:
        return
    reach = (settings.noisy_validation_bound or math.log(vocabulary)) / 2
    if settings.unit == "example":  # of which a share is held out, whole
        share = corpus.settings.get("holdout", 0.2)
        num_units = max(1, round(num_units * share / (1 - share)))
    error = settings.noisy_validation * reach / num_units
    if error > MOST_ERROR_NATS:
        log.warning(
            f"noisy_validation={settings.noisy_validation:g} tells the held-out loss of about {num_units:,} {settings.unit}s with an "
            f"error of about {error:.2g} nats: whoever stops or chooses by it goes by the noise. --noisy-validation "
            f"{MOST_ERROR_NATS * num_units / reach:.2g}, which costs more, gives {MOST_ERROR_NATS}; or use --public-validation FILE."
        )


class PrivateMitigation:
    """Poisson samples of units, clipped gradients, Gaussian noise, and a ledger of it all."""

    config_kind: type[MitigationConfig] = DPConfig
    private: PrivateTraining
    context: RunContext
    noisy: NoisyLoss | None

    def check(self, config: TrainConfig, corpus: CorpusFacts) -> None:
        self.terms(config, corpus)

    def terms(self, config: TrainConfig, corpus: CorpusFacts) -> Terms:
        """The standing of the run's promise, or a refusal."""
        return terms_of(config, corpus)

    def engine_settings(self, context: RunContext) -> dict[str, Any]:
        """What a kindred mitigation gives the engine beyond this."""
        return {}

    def steps_per_epoch(self, rows: Rows, config: TrainConfig) -> int:
        settings = dp_settings(config)
        source = by_unit(rows, settings.unit)
        return -(-len(sampled_units(source, settings.documents_per_owner)) // config.batch_size)

    def prepare(self, context: RunContext) -> None:
        config = context.config
        _check_ledger_is_there(context.folder)
        check_rows_stay_alone(context.model)
        terms = self.terms(config, context.corpus)
        if (noisy := noisy_loss(config, context.steps_per_epoch)) is not None:
            if context.processes.are_several:
                raise UsageError(
                    "noisy_validation is worked out by one process, and several were started. Start one, or use --public-validation FILE."
                )
            terms = replace(terms, releases=(*terms.releases, noisy.release()))
        if context.corpus.is_trial:
            terms = replace(terms, standing="as published", because=OF_A_TRIAL)
        self.context, self.noisy = context, noisy
        self.private = PrivateTraining(
            context.model,
            context.optimizer,
            by_unit(context.rows, dp_settings(config).unit, context.corpus.name),
            ledger=context.folder / LEDGER,
            claims_ledger=False,  # the whole folder is claimed already
            terms=terms,
            way=way_of(context),
            bf16=context.options.bf16,
            physical_rows=context.options.physical_rows,
            widths=context.widths,
            expected_batch=config.batch_size,
            steps=context.num_steps,
            check_canaries=dp_settings(config).num_engine_canaries(context),
            exact_sums=dp_settings(config).exact_sums,
            **{name: getattr(config.mitigation, name) for name in _PASSED_ON},
            **self.engine_settings(context),
        )
        self.private.ledger.repeats = True  # from its last checkpoint on, and no more
        say_what_is_unknown(config, context.corpus)
        if (ownership := self.private.ownership) is not None:
            log.warning(
                "Texts have several owners: %s of %s documents are drawn, at most %d of each of %s owners. Who wrote to whom is "
                "not protected.",
                *(f"{self.private.num_units:,}", f"{len(ownership.bounds) - 1:,}"),
                *(self.private.mechanism.documents_per_owner, f"{ownership.num_owners:,}"),
            )
        vocabulary = context.model.config.get_text_config().vocab_size
        warn_if_loud(config, context.corpus, self.private.num_units, vocabulary)
        is_new = config.model in BUILT_IN_MODELS
        warn_of_too_few(self.private, MOST_NOISE_FOR_NEW if is_new else MOST_NOISE)

    def step(self, number: int) -> tuple[Tensor, int]:
        step = self.private.step()
        return step.loss, step.num_targets

    def may_go_on(self) -> bool:
        return self.private.may_step()

    def settle(self) -> None:
        self.private.settle()

    def told_loss(self, held_out: Rows) -> float | None:
        if self.noisy is None:
            return None
        context, settings = self.context, dp_settings(self.context.config)
        units = by_unit(held_out, settings.unit).unit_of_row
        vocabulary = context.model.config.get_text_config().vocab_size
        return self.noisy.told(
            self.private.ledger,
            lambda: losses_by_unit(context.forward, held_out, units),
            bound=settings.noisy_validation_bound or math.log(vocabulary),
            insecure_seed=settings.insecure_seed,
        )

    def progress_words(self) -> str:
        spec, planned = self.private.spec, self.private.ledger.promised
        words = f"ε {rounded_up(planned)}, of which {rounded_up(self.private.epsilon)} so far"
        return words if spec.insecure_seed is None else f"[bold red]insecure {words}[/]"

    def guarantee(self, num_steps: int, *, ended: bool = True) -> dict[str, Any]:
        return self.private.exact_record(ended=ended)

    def state_dict(self) -> dict[str, Tensor]:
        """How many steps the weights hold; no generator's state and no batch's members, ever."""
        return {"steps": torch.tensor(self.private.ledger.steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        held, charged = int(state["steps"]), self.private.ledger.steps
        if charged < held:
            raise GuaranteeError(
                f"{self.private.ledger.path} has {charged} steps on record and the checkpoint holds {held}: steps would go "
                f"uncounted. Put the ledger of this run back, or train again with another --out."
            )


def noise_to_signal(noise: float, batch: float, num_weights: int, steps: int) -> float:
    """Length of all steps' noise beside the most that all units together can say.

    In C, the clip norm: each of T steps adds noise of σ/B to every one of d weights, √(T·d)·σ/B in
    all, and units that agree in every step move T. At a given ε this goes as √d/(ε·units), the
    rate of the worst case for convex losses (Bassily, Smith and Thakurta 2014).
    """
    return noise / batch * math.sqrt(num_weights / steps)


def warn_of_too_few(private: PrivateTraining, most: float = MOST_NOISE) -> None:
    """Say it where so few units cannot teach anything through so much noise."""
    weights = [weight for weight in private.model.parameters() if weight.requires_grad]
    num_weights, batch = sum(weight.numel() for weight in weights), private.spec.expected_batch
    ratio = noise_to_signal(private.plan.noise_multiplier, batch, num_weights, private.spec.steps)
    unit = private.spec.unit if private.ownership is None else "document"
    if ratio > most:
        enough = [f"{float(f'{ratio / most * n:.2g}'):,.0f}" for n in (private.num_units, batch)]
        log.warning(
            "%s %ss, %s a step, are too few for this much noise on %s weights: it is %.2g times the most that they can say "
            "together, and above %g expect nothing to be learnt. It would take at least %s, %s a step; or fewer weights (a "
            "smaller model, adapters), or a larger ε.",
            *(f"{private.num_units:,}", unit, f"{batch:,g}", f"{num_weights:,}"),
            *(ratio, most, *enough),
        )


def by_unit(rows: Rows, unit: str, name: str = "") -> TokenRows:
    """The rows with whom each belongs to: its writer, or its document, also where that has several
    owners."""
    ownership = rows.ownership if unit == "user" else None
    by_writer = unit == "user" and ownership is None
    return TokenRows(rows, np.asarray(rows.users if by_writer else rows.documents), name, ownership)


def way_of(context: RunContext) -> Way:
    if context.device.type != "cuda" or has_split_weights(context.model):
        return "eager"
    if is_recurrent(context.model) or (is_ours(context.model) and not context.options.compile):
        return "graph"
    return "compile" if context.options.compile else "eager"


def _check_ledger_is_there(folder: Path) -> None:
    """A run that has left anything behind must have its ledger, or it would spend twice."""
    if any((folder / name).exists() for name in (CHECKPOINT, METRICS, SNAPSHOTS)):
        read_ledger(folder / LEDGER)
