"""Adaptive differential privacy as a mitigation: what a document's weight changes, and by what right.

Three modes on the engine of `dp`: `clip` and `scale` are proved, `as-published` is the paper's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.settings import setting, settings_of
from tightlip.corpus.privacy_weights import PrivacyWeights
from tightlip.corpus.shared_text import MOST_COPIED
from tightlip.privacy.adaptive import BECAUSE, AdaptiveSpec
from tightlip.privacy.plans import Terms, check_varying
from tightlip.training.config import MitigationConfig, TrainConfig
from tightlip.training.mitigations import CorpusFacts, RunContext
from tightlip.training.mitigations.dp import DPConfig, PrivateMitigation
from tightlip.training.promises import terms_of

_WEIGHTS_SHIFT = "The weights are normalised over this very corpus, so every one of them depends on every document."
_PUBLIC_FACTS = (
    *("normalisation", "is_sound", "estimator", "model", "model_fingerprint"),
    *("public_corpus", "public_corpus_fingerprint"),
)


_OF_SPEC = ("least_clip", "gamma_floor", "release_noise", "averaging")
# The modes in which a setting means something; the others mean something in all.
_OF_MODE = {
    "least_clip": "clip",
    "adam_correction": "clip",  # takes one variance out, and in the others noise varies
    "gamma_floor": "scale",
    "release_noise": "scale",
    "averaging": "scale",
    "scale_accountant": "scale",
}


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(DPConfig):
    """Private training, and what a document's privacy weight changes in it.

    Under `scale_accountant` filter each step is charged at its own noise, and the run may end
    early; under floor all are charged at the least. It is chosen where the noise is given by hand.
    """

    name: ClassVar[str] = "adaptive-dp"
    panel: ClassVar[str | None] = "Adaptive private training"
    needs_weights: ClassVar[bool] = True

    adaptive: str = setting(
        "clip",
        "What weights change: each one's bound, all noise, or as the paper has it.",
        choices=("clip", "scale", "as-published"),
    )
    least_clip: float = setting(
        0.2, "clip: share of the clip norm for a weight of 1.", above=0, at_most=1
    )
    gamma_floor: float = setting(
        AdaptiveSpec.gamma_floor, "scale: least share of the noise.", above=0, at_most=1
    )
    release_noise: float | None = setting(
        None,
        "scale: noise on the released mean weight.",
        above=0,
        default_words="10 noise multipliers",
    )
    averaging: float = setting(
        AdaptiveSpec.averaging,
        "scale: what the moving average keeps each step.",
        at_least=0,
        below=1,
    )
    scale_accountant: str = setting(
        AdaptiveSpec.accountant,
        "scale: filter may end early; floor charges all steps at the least noise.",
        choices=("filter", "floor"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in settings_of(type(self)):
            if not self._means_something(field.name) and getattr(self, field.name) != field.default:
                raise UsageError(
                    f"{field.name}={getattr(self, field.name)} means nothing to adaptive={self.adaptive!r}. "
                    f"Add --adaptive {_OF_MODE[field.name]}, or leave it out."
                )
        check_varying(self.adaptive, self.epsilon, self.noise_multiplier)
        if self.dp_check_canaries:
            raise UsageError(
                f"dp_check_canaries={self.dp_check_canaries} plants documents that have no privacy weight. Check a run of "
                "--mitigation dp instead, or leave it out."
            )

    def tree(self) -> dict[str, Any]:
        return {
            name: value for name, value in super().tree().items() if self._means_something(name)
        }

    def held_out_by_default(self) -> str | None:
        return None  # a raw corpus has no weights and is refused

    def _means_something(self, name: str) -> bool:
        return _OF_MODE.get(name, self.adaptive) == self.adaptive


class AdaptiveMitigation(PrivateMitigation):
    """Private training whose clip bounds, or whose noise, follow the documents' weights.

    Holds:
        own_text_only: the proved modes refuse weights that hang on other people's text.
        same_breaches: what breaks the proof of `dp` breaks it here.
    """

    config_kind: type[MitigationConfig] = AdaptiveConfig

    def terms(self, config: TrainConfig, corpus: CorpusFacts) -> Terms:
        weights = _weights_of(corpus)  # first: whoever has none can mend nothing else
        plain = terms_of(config, corpus)
        mode = _settings(config).adaptive
        if mode != "as-published":
            _check_sound(mode, weights)
        broken = plain.standing != "proved"
        outside = (*plain.outside, *_taken_at_your_word(weights))
        if mode != "as-published":
            because = plain.because if broken else BECAUSE[mode]
            return replace(plain, because=because, outside=outside)
        reasons = [BECAUSE[mode], *([] if weights.info["is_sound"] else [_WEIGHTS_SHIFT])]
        because = " ".join([*reasons, *([plain.because] if broken else [])])
        return replace(plain, standing="as published", because=because, outside=outside)

    def engine_settings(self, context: RunContext) -> dict[str, Any]:
        weights = _weights_of(context.corpus)
        return {
            "adaptive": adaptive_spec(context.config, weights),
            "weights": weights.rho[context.rows.documents],
        }

    def guarantee(self, num_steps: int, *, ended: bool = True) -> dict[str, Any]:
        """As published, the figure of the batches that were drawn is told once, at the end: a
        snapshot's would tell of those before it. Until then it is that of the least noise."""
        if self.private.mode == "as-published" and not ended:
            return self.private.ledger.record()
        return super().guarantee(num_steps, ended=ended)

    def progress_words(self) -> str:
        if self.private.mode == "as-published":
            return "as published: no guarantee"
        words, budget = super().progress_words(), self.private.plan.budget
        return words if budget is None else f"{words}, {budget.spent / budget.budget:.0%} spent"


def _settings(config: TrainConfig) -> AdaptiveConfig:
    return cast(AdaptiveConfig, config.mitigation)


def adaptive_spec(config: TrainConfig, weights: PrivacyWeights) -> AdaptiveSpec:
    """The mode and its numbers, with what may be told of the weights."""
    told = {name: weights.info[name] for name in _PUBLIC_FACTS}
    if weights.info["is_sound"]:  # of others a and b are extremes of the private text
        told |= {name: weights.info[name] for name in ("a", "b")}
    settings = _settings(config)
    return AdaptiveSpec(
        mode=settings.adaptive,
        least_weight=weights.info["least_weight"],
        accountant=settings.scale_accountant,
        facts=told,
        **{name: getattr(settings, name) for name in _OF_SPEC},
    )


def _weights_of(corpus: CorpusFacts) -> PrivacyWeights:
    if corpus.weights is None:
        raise UsageError(
            "mitigation='adaptive-dp' needs privacy weights, and a raw corpus has none. Run: tightlip prepare CORPUS --out "
            "DIR --privacy-weights --public-model DIR --public-corpus FILE, and train on that folder."
        )
    return corpus.weights


def _check_sound(mode: str, weights: PrivacyWeights) -> None:
    if weights.info["is_sound"] is not True:
        raise GuaranteeError(
            f"The weights were normalised over this very corpus ({weights.info['normalisation']}), so one document moves "
            f"every other's weight, and adaptive={mode!r} could promise nothing. Prepare them with --weights public and "
            f"--public-corpus FILE, or use --adaptive as-published, which proves nothing."
        )


def _taken_at_your_word(weights: PrivacyWeights) -> Iterator[str]:
    """What the weights rest on and nobody here can check."""
    info, how = weights.info, ", of which the weights are a frequency estimate"
    if info["estimator"] == "language model":
        how = ""
        yield (
            f"the weights' language model ({info['model']}), taken never to have seen this text beyond what tightlip "
            "knows of its training"
        )
    if info["public_corpus"] is not None:
        yield f"the weights' public corpus {info['public_corpus']}{how}, taken to be public"
    # The same words whether there are any: how many there are is private, and in weights/info.json.
    yield f"texts that stand both here and in public text, up to {MOST_COPIED:.0%} of the longer ones: they count as public"
