"""What decides how private vectors are trained, made and attacked, checked before any work.

Nothing here loads torch: a refusal, and the list of flags, should not wait for them.
"""

import typing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tightlip.core.errors import UsageError
from tightlip.core.resampling import ResamplingSettings
from tightlip.core.settings import LARGEST_SIZE, Settings, separated, setting

# As in tightlip.models.configurations, which would load torch.
NEW_EXTRACTORS = ("lstm", "bag")
NEW_VOCABULARY = 10_000
METHODS = ("dpnr", "none", "adversarial")
MECHANISMS = ("laplace-as-published", "laplace", "gaussian")
SPLITS = ("document", "user", "column")
POOLINGS = ("cls", "mean")
ATTACKERS = ("mlp", "logistic", "averaged", "trees")
Runtime = Literal["torch", "onnx"]
# What only one method uses.
_NOISE = ("epsilon", "mechanism")
_ADVERSARY = {"adversary_weight": 3.0, "adversary_hidden": 512, "adversary_steps": 3}
_UNUSED = {"dpnr": (*_ADVERSARY,), "none": (*_NOISE, *_ADVERSARY), "adversarial": _NOISE}
_SHAPE = ("dimensions", "vocabulary_size")
# What follows where it is not given. A new encoder learns fast; fine-tuning faster than this
# forgets what the encoder knew.
_FOLLOWS: dict[str, dict[str, Any]] = {
    "new": {"learning_rate": 5e-3, "vocabulary_size": NEW_VOCABULARY},
    "given": {"learning_rate": 3e-5},
    "dpnr": {"mechanism": "gaussian"},
    "none": {},
    "adversarial": _ADVERSARY,
}
# Settings by the title under which a command lists their flags.
_privacy = partial(setting, panel="What is hidden")
_model = partial(setting, panel="The model")
_rare_model = partial(_model, hidden=True)
_length = partial(setting, panel="How long")
_texts = partial(setting, panel="The texts")
_against = partial(setting, panel="Method adversarial")
_rare_against = partial(_against, hidden=True)
_names = separated(str)


def check_attacker(name: str) -> None:
    if name not in ATTACKERS:
        raise UsageError(f"Unknown attacker {name!r}. Available: {', '.join(ATTACKERS)}.")


@dataclass(frozen=True, kw_only=True)
class RepresentSettings(Settings):
    """Everything that decides what the two halves become.

    `label` is the column to be told from a text, `private` those that nobody else should tell.
    `extractor` is lstm, bag or the folder of a Hugging Face encoder; `dimensions` and
    `vocabulary_size` shape a new one. Method dpnr trains through the noise of `mechanism` at
    `epsilon` and `delta`; none without any; adversarial against classifiers of the private
    columns, weighed by `adversary_weight`. `dropout` is the share of words masked in each text.

    `bins` cuts a column of numbers: "age=20,30" at these points, "age=..19,30.." into these
    ranges, what lies between them left out. `split` says what is kept together when 8 of 10
    parts go to training: documents that read the same, all documents of a user, or what the
    column `split_column` says (train, dev, test).
    """

    label: str = setting(..., "The column that the server is to tell.")
    private: tuple[str, ...] = _privacy(
        (), "Columns nobody should tell, commas between.", parse=_names
    )
    extractor: str = _model("lstm", "lstm, bag, or a Hugging Face encoder's folder.")
    method: str = _privacy("dpnr", "dpnr: noise; none, adversarial: baselines.", choices=METHODS)
    mechanism: str | None = _privacy(
        None,
        "gaussian, laplace or laplace-as-published.",
        choices=MECHANISMS,
        default_words="gaussian",
    )
    epsilon: float | None = _privacy(
        None, "Of a whole vector; of a coordinate, as published.", above=0
    )
    delta: float = _privacy(1e-5, "The chance that ε does not hold.", at_least=0, below=1)
    dropout: float = _privacy(0.0, "The share of words masked in each text.", at_least=0, below=1)
    pooling: str | None = _rare_model(
        None, "mean or cls.", choices=POOLINGS, default_words="mean of a new extractor"
    )
    max_tokens: int | None = _rare_model(
        None, "Read of each text.", at_least=1, default_words="128"
    )
    dimensions: int | None = _model(
        None, "Of a new extractor.", at_least=1, default_words="64", at_most=LARGEST_SIZE
    )
    vocabulary_size: int | None = _rare_model(
        None, "Of a new extractor.", default_words=f"{NEW_VOCABULARY:,}", at_most=10_000_000
    )
    hidden: int = _rare_model(
        0, "The classifier's hidden layer; 0 for none.", at_least=0, at_most=LARGEST_SIZE
    )
    freeze: bool = _model(False, "Train the classifier alone.")
    epochs: int = _length(4, "How often every text is read.", at_least=1)
    batch_size: int = _length(32, "Texts in a step.", at_least=1)
    learning_rate: float | None = _length(
        None, "Of the extractor.", above=0, default_words="5e-3 of a new one, else 3e-5"
    )
    classifier_learning_rate: float = _length(5e-3, "Of the classifier.", above=0, hidden=True)
    noise_draws: int = _length(
        8, "Draws of noise for each text at a step.", at_least=1, hidden=True, at_most=100_000
    )
    split: str = _texts("document", "8:1:1 by document, user, or column.", choices=SPLITS)
    split_column: str = _texts(
        "split", "With --split column: says train, dev or test.", hidden=True
    )
    split_seed: int = _texts(0, "Decides the split.", at_least=0, hidden=True)
    bins: tuple[str, ...] = _texts(
        (), "Cut numbers: age=20,30, or age=..19,30.. May be given again."
    )
    adversary_weight: float | None = _against(
        None, "Of the readers' doubt.", at_least=0, default_words="3"
    )
    adversary_hidden: int | None = _rare_against(
        None, "The readers' hidden layer.", at_least=1, default_words="512", at_most=LARGEST_SIZE
    )
    adversary_steps: int | None = _rare_against(
        None, "Of the readers, for one of the extractor.", at_least=1, default_words="3"
    )
    seed: int = _length(0, "Decides everything drawn in training.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fill()
        if self.dimensions == 1:
            raise UsageError("dimensions=1 leaves nothing after scaling to [0, 1]. Use 2 or more.")
        self._check_columns()
        self._check_bins()
        self._check_method()
        self._check_extractor()

    def _fill(self) -> None:
        """Put in what follows from the rest, so that a run's config says all there is."""
        follows = _FOLLOWS["new" if self.is_new else "given"] | _FOLLOWS[self.method]
        for name, value in follows.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def is_new(self) -> bool:
        """Whether the extractor is made here and not read from a folder."""
        return self.extractor in NEW_EXTRACTORS

    def _check_columns(self) -> None:
        if not self.label:
            raise UsageError("label='' names no column. Give the column to classify by: --label")
        if self.label in self.private:
            raise UsageError(
                f"{self.label!r} is both the label, which the server should tell, and private, which nobody should. "
                "Name another column in one of them."
            )
        if len(set(self.private)) != len(self.private) or "" in self.private:
            raise UsageError(
                f"private={','.join(self.private)} names a column twice, or none. Name each once."
            )

    def _check_bins(self) -> None:
        from tightlip.vectors.categories import ranges_of

        cut_before: set[str] = set()
        for given in self.bins:
            column, says, cut = given.partition("=")
            if column not in (self.label, *self.private):
                raise UsageError(
                    f"bins={given!r} cuts a column that is neither the label nor private. Write it as COLUMN=20,30 with "
                    f"one of: {', '.join((self.label, *self.private))}."
                )
            if not says:
                raise UsageError(
                    f"bins={given!r} does not say where to cut. Write cut points, {column}=20,30, or ranges, "
                    f"{column}=..19,30.."
                )
            if column in cut_before:
                raise UsageError(
                    f"bins cuts {column} twice. Put all its points in one: {column}=20,30"
                )
            cut_before.add(column)
            ranges_of(column, cut)

    def _check_method(self) -> None:
        for name in _UNUSED[self.method]:
            if getattr(self, name) is not None:
                raise UsageError(
                    f"{name}={getattr(self, name)} means nothing to method={self.method!r}. Leave it out, or choose "
                    f"another --method: {', '.join(METHODS)}."
                )
        if self.method == "dpnr" and self.epsilon is None:
            raise UsageError(
                "method='dpnr' needs to know how much noise: give --epsilon, such as 8 (the whole vector's, under "
                "gaussian and laplace). For vectors without noise: --method none"
            )
        if self.method == "adversarial" and not self.private:
            raise UsageError(
                "method='adversarial' trains against readers of private columns, and none is named. Add --private."
            )

    def _check_extractor(self) -> None:
        if self.is_new:
            if self.freeze:
                raise UsageError(
                    f"freeze keeps an extractor as it is, and a new {self.extractor} knows nothing yet. Give a trained "
                    "encoder's folder, or leave freeze out."
                )
            return
        for name in _SHAPE:
            # What is no folder is a slip of the pen, and told as one when it is to be opened.
            if getattr(self, name) is not None and Path(self.extractor).is_dir():
                raise UsageError(
                    f"{name}={getattr(self, name)} shapes a new extractor, and {self.extractor} has a shape of its own. "
                    "Leave it out."
                )
        if self.freeze and self.method == "adversarial":
            raise UsageError(
                "method='adversarial' changes the extractor, and freeze keeps it. Leave one of them out."
            )


@dataclass(frozen=True, kw_only=True)
class RepresentOptions(Settings):
    """How the work is done; none of it changes what is learnt on a CPU."""

    panel: typing.ClassVar[str | None] = "The machine"

    device: str = setting("auto", "cpu, cuda, or auto: the GPU where there is one.")
    bf16: bool = setting(False, "bfloat16 on a GPU.")
    checkpoint_seconds: float = setting(
        60.0, "Between two moments that a killed training can go on from.", at_least=0, hidden=True
    )


@dataclass(frozen=True, kw_only=True)
class GuaranteeSettings(Settings):
    """The noise whose worth `represent guarantee` tells."""

    dimensions: int = setting(..., "Coordinates of the vector.")
    epsilon: float = setting(
        ..., "For laplace-as-published: per coordinate. Otherwise of the whole vector at --delta."
    )
    # Not what training adds: the published noise is the one whose ε has to be explained.
    mechanism: str = setting(
        "laplace-as-published",
        "The noise. `represent train` adds gaussian unless told otherwise.",
        choices=MECHANISMS,
    )
    dropout: float = setting(RepresentSettings.dropout, "The share of words masked at random.")
    delta: float = setting(
        RepresentSettings.delta, "The final δ; 0 with laplace is pure differential privacy."
    )


@dataclass(frozen=True, kw_only=True)
class EncodingOptions(Settings):
    """How texts are encoded; none of it changes what a vector promises."""

    batch_size: int = setting(32, "Texts encoded at a time.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class EncodeSettings(Settings):
    """What is masked and carried when texts are encoded, and what runs the extractor."""

    carry: tuple[str, ...] = setting(
        (), "A column to copy beside the vectors, as it is. May be given again."
    )
    mask: tuple[str, ...] = setting((), "A word that is always masked. May be given again.")
    mask_file: str | None = setting(None, "A file of words that are always masked, one a line.")
    mask_column: str | None = setting(None, "A column of words to be masked in that row's text.")
    releases: int = setting(
        1, "Vectors of each text, each with fresh masks and noise.", at_least=1, at_most=100_000
    )
    runtime: Runtime = setting("torch", "onnx after `tightlip represent export --onnx`.")

    def __post_init__(self) -> None:
        # One word, or a set of them, is given in Python.
        words = (self.mask,) if isinstance(self.mask, str) else tuple(self.mask)
        object.__setattr__(self, "mask", words)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class AttackSettings(ResamplingSettings):
    """Everything that decides what the attackers of a run come to.

    `attributes` are columns to read in place of the run's private ones; `entities` is a file of
    names, `auto`, or `column:NAME`; `copies` is how many releases of each text `averaged` hears.
    """

    attackers: tuple[str, ...] = setting(
        ATTACKERS,
        "Some of mlp, logistic, averaged, trees, with commas between.",
        default_words="all",
        parse=_names,
    )
    copies: int = setting(
        16, "Releases of each text that the averaging attacker hears.", at_most=100_000
    )
    attributes: tuple[str, ...] | None = setting(
        None,
        "Columns to read, with commas between.",
        default_words="the run's private ones",
        parse=_names,
    )
    entities: str | None = setting(
        None,
        "Names in the texts: a file with a name a line, auto (NLTK or spaCy), or column:NAME with lists of ids.",
    )
    pictures: bool = setting(True, "Draw the vectors by t-SNE.")
    seed: int = setting(
        ResamplingSettings.seed, "Decides attackers and resampling; noise is always fresh."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.attackers:
            check_attacker(name)
        if not set(self.attackers) - {"averaged"}:
            raise UsageError(
                "No attacker hears one release only. Add one of mlp, logistic and trees."
            )
        if self.copies < 1 or (self.copies == 1 and "averaged" in self.attackers):
            raise UsageError(
                f"copies={self.copies} leaves nothing to average. Use 2 or more, or leave `averaged` out of the attackers."
            )
