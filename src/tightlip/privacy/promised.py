"""What a private training promises, as its ledger begins."""

import math
import secrets
from typing import TYPE_CHECKING, Any

from tightlip.privacy.accounting import accountant_at
from tightlip.privacy.adaptive import BECAUSE, MECHANISMS, AdaptiveSpec
from tightlip.privacy.ledger import guarantee_terms
from tightlip.privacy.owners import NOT_PROTECTED
from tightlip.privacy.plans import Terms

if TYPE_CHECKING:
    from tightlip.privacy.private_training import PrivateTraining


def promised_by(training: "PrivateTraining") -> dict[str, Any]:
    """The terms of its ledger before the first step."""
    spec, terms = training.spec, training.terms
    weaker = spec.insecure_seed is not None or training.mode == "as-published"
    return guarantee_terms(
        training.mechanism,
        delta=training.delta,
        unit=spec.unit,
        clip_norm=spec.clip_norm if math.isfinite(spec.clip_norm) else None,
        num_units=training.num_protected,
        expected_batch=spec.expected_batch,
        corpus_fingerprint=training.source.fingerprint,
        planned_steps=training.plan.planned_steps,
        run=secrets.token_hex(16),
        insecure_seed=spec.insecure_seed is not None,
        standing="as published" if weaker else terms.standing,
        because=_because(training),
        covers=list(terms.covers),
        outside=[*terms.outside, *([NOT_PROTECTED] if training.ownership else [])],
        **({"documents_taken": training.num_units} if training.ownership else {}),
        **training.arithmetic.terms,
        **terms.whose(),
        **_adaptive_terms(training),
    )


def _because(training: "PrivateTraining") -> str:
    spec, because = training.spec, training.terms.because
    if training.mode == "as-published" and BECAUSE["as-published"] not in because:
        because = BECAUSE["as-published"]  # whatever the terms say
    if spec.insecure_seed is not None:
        because = f"The noise comes from a known seed and hides nothing. {because}"
    if training.one_unit_a_pass:
        because += f" No two {spec.unit}s share a pass, since the model is one that mixes rows or rounds them by place."
    return because


def _adaptive_terms(training: "PrivateTraining") -> dict[str, Any]:
    """What an adaptive run promises otherwise than plain private training."""
    if training.adaptive is None:
        return {}
    plan, mode, accountant = training.plan, training.adaptive.mode, accountant_at(training.delta)
    terms = training.adaptive.terms(plan.noise_multiplier)
    if mode == "as-published":
        accountant = "PLD of σ·γ of each batch, our reading: the paper gives no accounting"
    if mode == "scale":
        accountant = "PLD at the least noise that a step can have"
        terms["planned_steps"] = plan.planned_steps
    if (budget := plan.budget) is not None:
        accountant = (
            f"RDP filter at order {budget.order}, or PLD at the least noise if that is less"
        )
        terms |= {"epsilon": plan.target, "order": budget.order}
        terms["rdp_budget"] = budget.budget
    return {"mechanism": MECHANISMS[mode], "accountant": accountant, "adaptive": terms}


def on_your_word(adaptive: AdaptiveSpec | None, people: str | None) -> Terms:
    """The terms of somebody's own loop, where nobody here knows what else shaped the weights."""
    outside = (*Terms().outside, "where tokenizer and starting weights came from: yours to say")
    if people is None:
        outside += ("other runs on the same people: name them, and they are counted together",)
    whose = () if people is None else (people,)
    if adaptive is None:
        return Terms(outside=outside, people=whose)
    weights = "where the weights came from, and that each hangs on its own text alone"
    return Terms(because=BECAUSE[adaptive.mode], outside=(*outside, weights), people=whose)
