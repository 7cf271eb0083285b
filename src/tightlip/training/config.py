"""What a training run is asked for. `TrainConfig` decides the weights, `RunOptions` does not."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from tightlip.core.errors import UsageError
from tightlip.core.registry import look_up, names_of, unknown
from tightlip.core.settings import (
    LARGEST_SIZE,
    Settings,
    check_names,
    names_in,
    separated,
    setting,
    settings_of,
)

BUILT_IN_MODELS = ("lstm", "gru", "transformer")
DEFAULT_EPOCHS = 5.0
_LENGTH, _LORA = "How long", "Adapters"
_length, _lora = (partial(setting, None, panel=panel) for panel in (_LENGTH, _LORA))
_SHAPE = (
    *("embedding_size", "hidden_size", "num_layers", "num_heads"),
    *("dropout", "tie_word_embeddings"),
)
_OF_LORA = ("lora_alpha", "lora_targets", "lora_dropout", "load_in")


@dataclass(frozen=True, kw_only=True)
class MitigationConfig(Settings):
    """What a mitigation is asked for. This one is plain training, which has nothing to be set.

    A mitigation's own sits in its file. It says what the run must know of it: `is_private`, its
    promise is an ε and nothing measured on the text may be published; `needs_weights`, it reads
    the documents' privacy weights; `takes_whole_batches`, its step is one forward pass over a batch;
    `takes_split_weights`, it runs the model as a whole; `strength_setting`, the one at whose 0 it
    leaves training as it is.
    """

    panel: ClassVar[str | None] = "The mitigation"
    name: ClassVar[str] = "none"
    is_private: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    takes_whole_batches: ClassVar[bool] = True
    takes_split_weights: ClassVar[bool] = True
    strength_setting: ClassVar[str | None] = None

    def in_words(self) -> str:
        """The mitigation and how strong it is, for the log."""
        setting = self.strength_setting
        value = None if setting is None else getattr(self, setting)
        return self.name if value is None else f"{self.name} with {setting} {value:g}"

    @property
    def num_check_canaries(self) -> int:
        """Canaries that the run plants to check its own ε."""
        return getattr(self, "dp_check_canaries", None) or 0

    @property
    def tells_validation(self) -> bool:
        """Whether the loss of held-out text is told with noise, and the run goes by that."""
        return getattr(self, "noisy_validation", None) is not None

    def check_run(self, config: "TrainConfig") -> None:
        """Refuse settings of the run that the mitigation cannot work with."""

    def held_out_by_default(self) -> str | None:
        """The split of a raw corpus that the promise can bear; None where any can."""
        return None


def mitigation_config(name: str) -> type[MitigationConfig]:
    """What a registered mitigation is configured by."""
    kind: type[MitigationConfig] = look_up("mitigation", name).config_kind
    return kind


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Everything that decides what the weights become, whatever the mitigation.

    `early_stop` counts epochs without a better validation perplexity. `snapshot_steps` adds
    snapshots inside epochs, and `first_quarter` one after a quarter of the first. `mitigation`
    holds the settings of one of them: `TrainConfig(mitigation=DPConfig(epsilon=8))`.

    >>> TrainConfig.of(mitigation="none", epochs=2).epochs
    2.0
    """

    panel: ClassVar[str | None] = "The model"

    mitigation: MitigationConfig = field(default_factory=MitigationConfig)
    model: str = setting("lstm", "lstm, gru, transformer, or a model folder to go on from.")
    lora: int | None = _lora(
        "Train LoRA adapters of this rank on --model DIR instead of its weights.",
        at_least=1,
        at_most=LARGEST_SIZE,
    )
    lora_alpha: float | None = _lora(
        "What adapters add is times this / rank.", above=0, default_words="twice the rank"
    )
    lora_targets: tuple[str, ...] | None = _lora(
        "Layers that get adapters, commas between, such as q_proj,v_proj.",
        parse=separated(str),
        default_words="all linear ones but the output's",
    )
    lora_dropout: float = setting(
        0.0, "Share of an adapter's inputs left out.", at_least=0, below=1, panel=_LORA
    )
    load_in: str | None = _lora("Hold the frozen base in few bits.", choices=("4bit", "8bit"))
    embedding_size: int = setting(
        128, "Size of a word's embedding; of LSTM and GRU.", at_least=1, at_most=LARGEST_SIZE
    )
    hidden_size: int = setting(128, "Size of each layer.", at_least=1, at_most=LARGEST_SIZE)
    num_layers: int = setting(2, "Layers of a built-in model.", at_least=1, at_most=1_000)
    num_heads: int = setting(
        4, "Attention heads of a transformer.", at_least=1, at_most=LARGEST_SIZE
    )
    dropout: float = setting(0.0, "Share of units left out.", at_least=0, below=1)
    tie_word_embeddings: bool = setting(
        False, "Input and output embeddings are one matrix.", hidden=True
    )
    optimizer: str = setting("adam", "The optimizer.", choices=("adam", "adamw", "adamax", "sgd"))
    learning_rate: float = setting(1e-3, "Step size of the optimizer.", above=0)
    weight_decay: float = setting(0.0, "Of the optimizer.", at_least=0, hidden=True)
    momentum: float = setting(0.0, "Of sgd.", at_least=0, below=1, hidden=True)
    schedule: str = setting(
        "constant", "How the learning rate goes on.", choices=("constant", "linear", "cosine")
    )
    warmup_steps: int = setting(0, "Steps over which the rate rises.", at_least=0, hidden=True)
    gradient_clip: float | None = setting(None, "Largest gradient norm.", above=0)
    average_weights: float | None = setting(
        None,
        "Leave a moving average of the weights with this decay, such as 0.999.",
        above=0,
        below=1,
    )
    batch_size: int = setting(
        32, "Rows of a step; under private training, units.", at_least=1, at_most=10_000_000
    )
    sequence_length: int = setting(128, "Most tokens of a row.", at_least=1, at_most=10_000_000)
    seed: int = setting(0, "Decides start and order.", at_least=0)
    epochs: float | None = _length(
        "Times over the text.", above=0, at_most=1_000_000, default_words="5"
    )
    steps: int | None = _length("Instead of epochs.", at_least=1)
    early_stop: int | None = _length(
        "Stop after this many epochs without a better validation perplexity.", at_least=1
    )
    until_perplexity: float | None = _length("Stop at this validation perplexity.", above=1)
    trials: str | None = setting(
        None, "Choose with privacy among the settings in this TOML file.", path="FILE"
    )
    snapshot: str = setting(
        "epoch", "When the model is kept on its way.", choices=("epoch", "none"), panel=_LENGTH
    )
    snapshot_steps: int | None = _length("Also every n steps.", at_least=1, hidden=True)
    first_quarter: bool = setting(
        False, "Also after a quarter of the first epoch.", panel=_LENGTH, hidden=True
    )

    def __post_init__(self) -> None:
        if not isinstance(self.mitigation, MitigationConfig):
            raise UsageError(
                f"mitigation={self.mitigation!r} is not a mitigation's settings. Give an object such as DPConfig(epsilon=8), "
                "or names by TrainConfig.of(mitigation='dp', epsilon=8)."
            )
        super().__post_init__()
        self._check_model()
        self._check_adapters()
        self._check_length()
        if self.momentum and self.optimizer != "sgd":
            raise UsageError(
                f"momentum={self.momentum} means nothing to {self.optimizer}. Use optimizer=sgd, or leave it out."
            )
        self.mitigation.check_run(self)

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """The config that flags spell: the mitigation by its name, its settings beside the run's."""
        return cls.from_tree(settings, "")

    @classmethod
    def from_tree(cls, tree: dict[str, Any], where: str) -> Self:
        """From a table of TOML: the mitigation's settings in a table of its name, or beside the
        run's, as version 0.1 wrote them and as flags are given.

        Holds:
            its_own_only: a setting of another mitigation is refused, also where it asks for what is
                the default there: whoever gives it believes that it does something.
        """
        tree = dict(tree)
        name = tree.pop("mitigation", None) or "none"
        if isinstance(name, MitigationConfig):
            check_names(cls, tree, where)
            return cls(**tree, mitigation=name)
        kind = mitigation_config(name)
        own = tree.pop(name, {})
        check_names(kind, own, where and f"{where}, [train.{name}]")
        own = own | {each: tree.pop(each) for each in names_in(kind) if each in tree}
        _refuse_settings_of_others(tree, name, {*names_in(cls)})
        check_names(cls, tree, where and f"{where}, [train]")
        return cls(**tree, mitigation=kind(**own))

    def tree(self) -> dict[str, Any]:
        """The settings that have a value and a meaning: of a given model not the shape, which is
        its own; those of the mitigation in a table of their own."""
        without = {*(() if self.model in BUILT_IN_MODELS else _SHAPE)}
        without |= {*(_OF_LORA if self.lora is None else ())}
        tree = {name: value for name, value in super().tree().items() if name not in without}
        tree["mitigation"] = self.mitigation.name
        own = self.mitigation.tree()
        return tree | {self.mitigation.name: own} if own else tree

    def _check_model(self) -> None:
        if self.model in BUILT_IN_MODELS:
            return
        if not Path(self.model).is_dir():
            described = unknown("model", self.model, list(BUILT_IN_MODELS))
            raise UsageError(f"{described} Or give the path of a Hugging Face model folder.")
        for each in settings_of(type(self)):
            if each.name in _SHAPE and getattr(self, each.name) != each.default:
                raise UsageError(
                    f"{each.name}={getattr(self, each.name)} shapes a built-in model, and {self.model} has "
                    f"a shape of its own. Leave it out."
                )

    def _check_adapters(self) -> None:
        if self.lora is None:
            for each in settings_of(type(self)):
                if each.name in _OF_LORA and (value := getattr(self, each.name)) != each.default:
                    raise UsageError(
                        f"{each.name}={value} is about adapters, and without them it would do nothing. Add --lora 16, or leave it out."
                    )
        elif self.model in BUILT_IN_MODELS:
            raise UsageError(
                f"lora={self.lora} adapts a model that knows something already, and a new {self.model} would stay as random as it "
                "begins. Give --model DIR, a Transformer's folder, or leave lora out."
            )

    def _check_length(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise UsageError(
                f"epochs={self.epochs:g} and steps={self.steps} both say how long to train. Give one of them."
            )
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", DEFAULT_EPOCHS)


def _refuse_settings_of_others(tree: dict[str, Any], chosen: str, own: set[str]) -> None:
    for name in [name for name in tree if name not in own]:
        if name in names_of("mitigation"):
            raise UsageError(
                f"There are settings of mitigation {name!r}, and mitigation={chosen!r} is chosen. Leave one of them out."
            )
        if of := mitigations_with(name):
            raise UsageError(
                f"{name}={tree[name]} means nothing to mitigation={chosen!r}. "
                f"Add --mitigation {' or '.join(of)}, or leave it out."
            )


def mitigations_with(setting_name: str) -> list[str]:
    """The mitigations that have a setting of this name."""
    return [
        name for name in names_of("mitigation") if setting_name in names_in(mitigation_config(name))
    ]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Settings):
    """How the work is done: where, how fast, how often it is saved for a resumption."""

    panel: ClassVar[str | None] = "The machine"

    device: str = setting("auto", "cpu, cuda, or auto: the GPU where there is one.")
    bf16: bool = setting(False, "bfloat16 on a GPU.")
    compile: bool = setting(False, "torch.compile on a GPU.")
    fsdp: bool = setting(False, "Split the weights over all processes (FSDP2).", flag="--fsdp")
    checkpoint_seconds: float = setting(
        60.0, "Seconds between checkpoints.", at_least=0, hidden=True
    )
    physical_rows: int | None = setting(
        None,
        "Rows that private training has in memory at once.",
        at_least=1,
        default_words="8 on a CPU, on a GPU what a step draws",
        hidden=True,
    )
    keep_snapshots: int | None = _length(
        "Keep only the last so many snapshots.", at_least=1, default_words="all"
    )
    merge: bool = setting(
        False, "The merged model too, in RUN/merged.", flag="--merge", panel=_LORA
    )
