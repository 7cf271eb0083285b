"""What a training run is asked for. `TrainConfig` decides the weights, `RunOptions` does not."""

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.registry import names_of, unknown
from tightlip.core.settings import Settings, check_range, fields_of

BUILT_IN_MODELS = ("lstm", "gru", "transformer")
_CHOICES = {
    "optimizer": ("adam", "adamw", "adamax", "sgd"),
    "schedule": ("constant", "linear", "cosine"),
    "snapshot": ("epoch", "none"),
    "unit": ("user", "example"),
    "batching": ("user", "uniform"),
    "triplet_pairs": ("auxiliary", "inside"),
    "adaptive": ("clip", "scale", "as-published"),
    "scale_accountant": ("filter", "floor"),
}
_SIZES = ("embedding_size", "hidden_size", "num_layers", "num_heads", "sequence_length")
_COUNTS = (
    *("steps", "batch_size", "early_stop", "snapshot_steps", "rows_per_unit", "lora"),
    *("discriminator_size", "discriminator_steps"),
)
PRIVATE_MITIGATIONS = ("dp", "adaptive-dp")
# What private training promises; each means something with these mitigations only.
PRIVACY = (
    *("epsilon", "noise_multiplier", "delta", "unit", "clip_norm", "per_layer", "rows_per_unit"),
    *("allow_unproved", "allow_loose_delta", "insecure_seed", "dp_check_canaries"),
)
# What mitigation=adaptive-dp needs besides, and in which of its modes it means something.
ADAPTIVE = {
    "adaptive": ("clip", "scale", "as-published"),
    "least_clip": ("clip",),
    "gamma_floor": ("scale",),
    "release_noise": ("scale",),
    "averaging": ("scale",),
    "scale_accountant": ("scale",),
}
# What the privacy regularisers need, and under which of them it means something.
REGULARISERS = {
    "privacy_weight": ("adversarial", "triplet"),
    "privacy_warmup_steps": ("adversarial", "triplet"),
    "batching": ("adversarial", "triplet"),
    "discriminator_size": ("adversarial",),
    "discriminator_steps": ("adversarial",),
    "discriminator_learning_rate": ("adversarial",),
    "triplet_pairs": ("triplet",),
    "triplet_margin": ("triplet",),
}
# Distances are not bounded as the adversary's nats are: at 1 the triplet term drowns the loss.
DEFAULT_WEIGHTS = {"adversarial": 1.0, "triplet": 0.03}
_SHAPE = (
    "embedding_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "dropout",
    "tie_word_embeddings",
)
DEFAULT_EPOCHS = 5.0


def check_given(settings: typing.Mapping[str, Any]) -> None:
    """Refuse what belongs to another mitigation, also where it asks for what is the default there:
    whoever gives it believes that it does something."""
    mitigation = settings.get("mitigation") or "none"
    meant_for = dict.fromkeys(PRIVACY, PRIVATE_MITIGATIONS) | dict.fromkeys(
        ADAPTIVE, ("adaptive-dp",)
    )
    for name, of in (meant_for | REGULARISERS).items():
        given = settings.get(name)
        if given is not None and given is not False and mitigation not in of:
            raise UsageError(
                f"{name}={settings[name]} means nothing to mitigation={mitigation!r}. "
                f"Add --mitigation {' or '.join(of)}, or leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Everything that decides what the weights become.

    `model` is lstm, gru, transformer or a Hugging Face folder to go on from; the sizes shape
    a built-in one (a transformer has no embedding_size of its own). `early_stop` counts epochs
    without a better validation perplexity. `snapshot_steps` adds snapshots inside epochs, and
    `first_quarter` one after a quarter of the first. `lora` is the rank of adapters to train
    instead of the weights.

    Under mitigation dp: `unit` is whom the promise protects, `batch_size` the expected number of
    units of a step, `rows_per_unit` the most rows that one of them gives to it. `epsilon` is the
    target, `noise_multiplier` the noise where it is set by hand. `allow_unproved` goes on where
    a proof breaks, with a weaker standing; `insecure_seed` is for tests.

    Under mitigation adaptive-dp too, `adaptive` says what a document's privacy weight changes.
    Mode clip: `least_clip` is the share of clip_norm left to a weight of 1. Mode scale:
    `gamma_floor` is the least share of the noise, `release_noise` the noise on the released mean
    weight (None: 10 times the noise multiplier), `averaging` how much of the moving average an
    earlier one keeps, `scale_accountant` (where the noise multiplier is given too) whether each step
    is charged at its own noise by a filter that may end the run early, or at the floor.

    Under mitigations adversarial and triplet: `privacy_weight` is the paper's λ, reached after
    `privacy_warmup_steps`; `batching` says whether a batch holds rows of one user or of any.
    `triplet_margin` is the squared distance beyond which rows of one author need not move apart.
    """

    table: typing.ClassVar[str] = "train"

    model: str = "lstm"
    embedding_size: int = 128
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    dropout: float = 0.0
    tie_word_embeddings: bool = False
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    gradient_clip: float | None = None
    epochs: float | None = None
    steps: int | None = None
    batch_size: int = 32
    sequence_length: int = 128
    early_stop: int | None = None
    until_perplexity: float | None = None
    snapshot: str = "epoch"
    snapshot_steps: int | None = None
    first_quarter: bool = False
    mitigation: str = "none"
    lora: int | None = None
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    unit: str = "user"
    clip_norm: float = 1.0
    per_layer: bool = False
    rows_per_unit: int = 4
    allow_unproved: bool = False
    allow_loose_delta: bool = False
    insecure_seed: int | None = None
    dp_check_canaries: int | None = None
    adaptive: str = "clip"
    least_clip: float = 0.2
    gamma_floor: float = 0.5
    release_noise: float | None = None
    averaging: float = 0.9
    scale_accountant: str = "filter"
    privacy_weight: float | None = None  # DEFAULT_WEIGHTS
    privacy_warmup_steps: int = 0
    batching: str = "user"
    discriminator_size: int = 1000
    discriminator_steps: int = 1
    discriminator_learning_rate: float = 1e-3
    triplet_pairs: str = "auxiliary"
    triplet_margin: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.privacy_weight is None:
            object.__setattr__(self, "privacy_weight", DEFAULT_WEIGHTS.get(self.mitigation))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(unknown(name, getattr(self, name), list(allowed)))
        if self.mitigation not in names_of("mitigation"):
            raise UsageError(unknown("mitigation", self.mitigation, names_of("mitigation")))
        self._check_model()
        self._check_length()
        self._check_numbers()
        self._check_privacy()
        self._check_adaptive()
        self._check_regulariser()

    def _check_model(self) -> None:
        if self.model not in BUILT_IN_MODELS and not Path(self.model).is_dir():
            described = unknown("model", self.model, list(BUILT_IN_MODELS))
            raise UsageError(f"{described} Or give the path of a Hugging Face model folder.")
        if self.model not in BUILT_IN_MODELS:
            for field in fields_of(type(self)):
                if field.name in _SHAPE and getattr(self, field.name) != field.default:
                    raise UsageError(
                        f"{field.name}={getattr(self, field.name)} shapes a built-in model, and {self.model} has "
                        f"a shape of its own. Leave it out."
                    )

    def tree(self) -> dict[str, Any]:
        """The settings that have a value and a meaning: of a given model not the shape, which is
        its own; those of a mitigation only under it."""
        without = {*(() if self.model in BUILT_IN_MODELS else _SHAPE)}
        without |= {*(() if self.mitigation in PRIVATE_MITIGATIONS else PRIVACY)}
        without |= {name for name, modes in ADAPTIVE.items() if not self._adapts_by(modes)}
        without |= {name for name, of in REGULARISERS.items() if self.mitigation not in of}
        return {name: value for name, value in super().tree().items() if name not in without}

    def _adapts_by(self, modes: tuple[str, ...]) -> bool:
        return self.mitigation == "adaptive-dp" and self.adaptive in modes

    def _check_length(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise UsageError(
                f"epochs={self.epochs:g} and steps={self.steps} both say how long to train. Give one of them."
            )
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", DEFAULT_EPOCHS)

    def _check_numbers(self) -> None:
        for name in (*_SIZES, *_COUNTS):
            check_range(self, name, at_least=1)
        for name in ("warmup_steps", "seed", "weight_decay", "momentum", "dropout"):
            check_range(self, name, at_least=0)
        for name in ("learning_rate", "gradient_clip", "epochs", "epsilon", "clip_norm", "delta"):
            check_range(self, name, above=0)
        for name in ("discriminator_learning_rate", "triplet_margin"):
            check_range(self, name, above=0)
        for name in ("privacy_weight", "privacy_warmup_steps", "averaging"):
            check_range(self, name, at_least=0)
        for name in ("least_clip", "gamma_floor"):
            check_range(self, name, above=0, at_most=1)
        check_range(self, "release_noise", above=0)
        check_range(self, "averaging", below=1)
        for name in ("noise_multiplier", "dp_check_canaries"):
            check_range(self, name, at_least=0)
        check_range(self, "until_perplexity", above=1)
        for name in ("momentum", "dropout"):
            check_range(self, name, below=1)
        check_range(self, "delta", below=1)
        if self.momentum and self.optimizer != "sgd":
            raise UsageError(
                f"momentum={self.momentum} means nothing to {self.optimizer}. Use optimizer=sgd, or leave it out."
            )

    def _check_privacy(self) -> None:
        if self.mitigation not in PRIVATE_MITIGATIONS:
            for field in fields_of(type(self)):
                if field.name in PRIVACY and getattr(self, field.name) != field.default:
                    raise UsageError(
                        f"{field.name}={getattr(self, field.name)} is part of private training, and mitigation="
                        f"{self.mitigation!r} promises nothing. Add --mitigation dp, or leave it out."
                    )
        elif self.epsilon is None and self.noise_multiplier is None:
            raise UsageError(
                f"mitigation={self.mitigation!r} needs a target: give --epsilon (such as 8), or --noise-multiplier (such "
                "as 1.0)."
            )
        elif self.dropout:
            raise UsageError(
                f"dropout={self.dropout:g} under mitigation={self.mitigation!r} would let one {self.unit} more or less change everybody's "
                f"masks. Private training goes without dropout: leave it out."
            )
        elif self.gradient_clip is not None:
            raise UsageError(
                f"gradient_clip={self.gradient_clip:g} is for plain training; private training clips each {self.unit}'s "
                f"gradient by clip_norm. Leave gradient_clip out."
            )

    def _check_adaptive(self) -> None:
        for field in fields_of(type(self)):
            modes = ADAPTIVE.get(field.name)
            if modes is None or getattr(self, field.name) == field.default:
                continue
            if self.mitigation != "adaptive-dp":
                raise UsageError(
                    f"{field.name}={getattr(self, field.name)} means nothing to mitigation={self.mitigation!r}. "
                    f"Add --mitigation adaptive-dp, or leave it out."
                )
            if self.adaptive not in modes:
                raise UsageError(
                    f"{field.name}={getattr(self, field.name)} means nothing to adaptive={self.adaptive!r}. "
                    f"Add --adaptive {' or '.join(modes)}, or leave it out."
                )
        if self.mitigation != "adaptive-dp":
            return
        if self.adaptive == "as-published" and self.epsilon is not None:
            raise UsageError(
                f"epsilon={self.epsilon:g} cannot be a target of adaptive='as-published': its noise, and so its figure, is "
                "known only once the batches are drawn. Give --noise-multiplier (such as 1.0) instead."
            )
        if self.adaptive != "clip" and self.noise_multiplier == 0:
            raise UsageError(
                f"noise_multiplier=0 leaves adaptive={self.adaptive!r} nothing to scale. Use a number such as 1.0."
            )
        if self.dp_check_canaries:
            raise UsageError(
                f"dp_check_canaries={self.dp_check_canaries} plants documents that have no privacy weight. Check a run of "
                "--mitigation dp instead, or leave it out."
            )

    def _check_regulariser(self) -> None:
        for field in fields_of(type(self)):
            of = REGULARISERS.get(field.name, (self.mitigation,))
            if self.mitigation not in of and getattr(self, field.name) != field.default:
                raise UsageError(
                    f"{field.name}={getattr(self, field.name)} means nothing to mitigation={self.mitigation!r}. "
                    f"Add --mitigation {' or '.join(of)}, or leave it out."
                )
        if self.triplet_pairs == "inside" and self.batching == "user":
            raise UsageError(
                "triplet_pairs='inside' takes its pairs from one batch, and with batching='user' all its rows have one "
                "author: no pair differs. Add --batching uniform, or use --triplet-pairs auxiliary."
            )


@dataclass(frozen=True, kw_only=True)
class RunOptions(Settings):
    """How the work is done: where, how fast, how often it is saved for a resumption.

    `physical_rows` is how many rows private training has in memory at once.
    """

    table: typing.ClassVar[str] = "options"

    device: str = "auto"
    bf16: bool = False
    compile: bool = False
    checkpoint_seconds: float = 60.0
    physical_rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "physical_rows", at_least=1)
        check_range(self, "checkpoint_seconds", at_least=0)
