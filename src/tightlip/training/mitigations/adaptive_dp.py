"""Adaptive differential privacy as a mitigation: what a document's weight changes, and by what right.

Three modes on the engine of `dp`: `clip` and `scale` are proved, `as-published` is the paper's.
"""

from dataclasses import replace
from typing import Any

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.corpus.privacy_weights import PrivacyWeights
from tightlip.corpus.shared_text import MOST_COPIED
from tightlip.privacy.adaptive import BECAUSE, AdaptiveSpec
from tightlip.privacy.plans import Terms
from tightlip.training.config import TrainConfig
from tightlip.training.mitigations import CorpusFacts, Setting
from tightlip.training.mitigations.dp import PrivateMitigation, terms_of

_WEIGHTS_SHIFT = "The weights are normalised over this very corpus, so every one of them depends on every document."
_PUBLIC_FACTS = (
    *("normalisation", "is_sound", "estimator", "model", "model_fingerprint"),
    *("public_corpus", "public_corpus_fingerprint"),
)


class AdaptiveMitigation(PrivateMitigation):
    """Private training whose clip bounds, or whose noise, follow the documents' weights.

    Holds:
        own_text_only: the proved modes refuse weights that hang on other people's text.
        same_breaches: what breaks the proof of `dp` breaks it here.
    """

    def terms(self, config: TrainConfig, corpus: CorpusFacts) -> Terms:
        weights = _weights_of(corpus)  # first: whoever has none can mend nothing else
        plain = terms_of(config, corpus)
        mode = config.adaptive
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

    def further(self, setting: Setting) -> dict[str, Any]:
        weights, config = _weights_of(setting.corpus), setting.config
        return {
            "adaptive": adaptive_spec(config, weights),
            "weights": weights.rho[setting.rows.documents],
        }

    def guarantee(self, num_steps: int, *, ended: bool = True) -> dict[str, Any]:
        """As published, the figure of the batches that were drawn is told once, at the end: a
        snapshot's would tell of those before it. Until then it is that of the least noise."""
        adaptive = self.private.adaptive
        if adaptive is not None and adaptive.mode == "as-published" and not ended:
            return self.private.ledger.record()
        return super().guarantee(num_steps, ended=ended)

    def said(self) -> str:
        if self.private.adaptive is not None and self.private.adaptive.mode == "as-published":
            return "as published: no guarantee"
        words, budget = super().said(), self.private.plan.budget
        return words if budget is None else f"{words}, {budget.spent / budget.budget:.0%} spent"


def adaptive_spec(config: TrainConfig, weights: PrivacyWeights) -> AdaptiveSpec:
    """The mode and its numbers, with what may be told of the weights."""
    told = {name: weights.info[name] for name in _PUBLIC_FACTS}
    if weights.info["is_sound"]:  # of others a and b are extremes of the private text
        told |= {name: weights.info[name] for name in ("a", "b")}
    return AdaptiveSpec(
        mode=config.adaptive,
        least_weight=weights.info["least_weight"],
        least_clip=config.least_clip,
        gamma_floor=config.gamma_floor,
        release_noise=config.release_noise,
        averaging=config.averaging,
        accountant=config.scale_accountant,
        facts=told,
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


def _taken_at_your_word(weights: PrivacyWeights) -> list[str]:
    """What the weights rest on and nobody here can check."""
    info = weights.info
    said = []
    if info["estimator"] == "language model":
        said.append(
            f"the weights' language model ({info['model']}), taken never to have seen this text beyond what tightlip "
            "knows of its training"
        )
    if info["public_corpus"] is not None:
        how = "" if said else ", of which the weights are a frequency estimate"
        said.append(f"the weights' public corpus {info['public_corpus']}{how}, taken to be public")
    # The same words whether there are any: how many there are is private, and in weights/info.json.
    said.append(
        f"texts that stand both here and in public text, up to {MOST_COPIED:.0%} of the longer ones: they count as public"
    )
    return said
