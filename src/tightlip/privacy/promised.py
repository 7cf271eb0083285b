"""What a private training promises, as its ledger begins, and what rounding it is charged for.

float32 rounds a product of all units' tokens as a whole, so one unit more changes the last bits of
what the others add. How much can be measured, and the worst case is too far off to be of use. Ten
times what was measured is taken off every unit's bound, and the ledger says so; or sums are whole
numbers, in which units never meet (`exact_sums`).
"""

import math
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tightlip.core.errors import GuaranteeError
from tightlip.privacy.accounting import accountant_at
from tightlip.privacy.adaptive import BECAUSE, MECHANISMS, AdaptiveSpec
from tightlip.privacy.ledger import guarantee_terms
from tightlip.privacy.passes import Passes, Physical
from tightlip.privacy.per_unit import num_ids_of
from tightlip.privacy.physical_batches import PhysicalBatches
from tightlip.privacy.plans import Terms, unregistered
from tightlip.privacy.rows_alone import synthetic_units
from tightlip.privacy.sampling import NOT_PROTECTED

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
        outside=[
            *terms.outside,
            *([NOT_PROTECTED] if training.ownership else []),
            *_taken_on_trust(training.model),
        ],
        **({"documents_taken": training.num_units} if training.ownership else {}),
        **training.arithmetic.terms,
        **terms.whose(),
        **_adaptive_terms(training),
    )


def _taken_on_trust(model: nn.Module) -> list[str]:
    """Code of the model that is none of the libraries'. It is asked on made-up rows whether it keeps
    people apart; what only somebody's own words would set off, no row of ours shows."""
    own = sorted(name for name in {*_code_of(model)} if name.split(".")[0] not in LIBRARIES)
    words = (
        f"what the model's own code ({', '.join(own)}) does with words that no made-up row holds"
    )
    return [words] if own else []


def _code_of(model: nn.Module) -> Iterator[str]:
    """The modules of Python that a model's layers, their hooks and their attention come from."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    library: Any = sys.modules.get("transformers.modeling_utils")
    code: list[Any] = [
        hook for kind in hooks for hook in getattr(nn.modules.module, f"_global{kind}", {}).values()
    ]
    for part in model.modules():
        code += (hook for kind in hooks for hook in getattr(part, kind).values())
        for each in type(part).__mro__:  # a wrapper may have made a class of its own of somebody's
            code += [
                each,
                *(vars(each)[name] for name in ("forward", "__call__") if name in vars(each)),
            ]
        given = (each for each in vars(part).values() if not isinstance(each, nn.Module))
        code += (each for each in given if callable(each))
        named = getattr(getattr(part, "config", None), "_attn_implementation", None)
        if library is not None:
            code.append(library.ALL_ATTENTION_FUNCTIONS.get(named, nn.Module))
        if isinstance(part, torch.jit.ScriptModule):
            yield "TorchScript"
    for each in code:
        yield from _modules_of(each)


def _modules_of(code: Any) -> Iterator[str]:
    """Where a function or class was written, and all that it is wrapped in."""
    while code is not None:
        while isinstance(code, partial | MethodType):
            code = code.func if isinstance(code, partial) else code.__func__
        kind = code if isinstance(code, type) else type(code)
        is_function = isinstance(code, FunctionType)
        yield str(code.__globals__.get("__name__")) if is_function else kind.__module__
        code = getattr(code, "__wrapped__", None)


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
        either = "or PLD at the least noise if that is less"
        accountant = f"RDP filter at order {budget.order}, {either}"
        terms |= {"epsilon": plan.target, "order": budget.order}
        terms["rdp_budget"] = budget.budget
    return {"mechanism": MECHANISMS[mode], "accountant": accountant, "adaptive": terms}


def on_your_word(adaptive: AdaptiveSpec | None, people: str | None) -> Terms:
    """The terms of somebody's own loop, where nobody here knows what else shaped the weights."""
    outside = (
        *Terms().outside,
        "where tokenizer and starting weights came from: yours to say",
        "the number of units, which counts as public",
    )
    outside += (unregistered(people),)
    whose = () if people is None else (people,)
    if adaptive is None:
        return Terms(outside=outside, people=whose)
    weights = "where the weights came from, and that each hangs on its own text alone"
    return Terms(because=BECAUSE[adaptive.mode], outside=(*outside, weights), people=whose)


LIBRARIES = {
    *("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "torchao", "tightlip"),
    *("huggingface_hub", "builtins", "abc", "typing", "types", "functools", "collections"),
    *("contextlib", "dataclasses", "enum"),
}
DRAWS, TIMES = 4, 10
MOST_CHARGED = 0.1  # of the clip norm
MOST_ROUNDED = 1e-2  # of the clip norm
LEAST = 2.0**-24  # of the clip norm: four draws that show less have not seen it all


@dataclass(frozen=True)
class Arithmetic:
    """In words, and the share of the clip norm that is kept free for it."""

    words: str
    charged: float = 0.0
    setting: str = ""

    @property
    def terms(self) -> dict[str, Any]:
        """What stands in a ledger."""
        return {
            "arithmetic": self.words,
            "arithmetic_charged": self.charged,
            "arithmetic_setting": self.setting,
        }


def arithmetic_of(
    passes: Passes, batches: PhysicalBatches, before: dict[str, Any], *, expected_batch: float
) -> Arithmetic:
    """How the sums of these passes come about, measured where they are sums of floats; of a run that
    goes on as it was measured then, or the worse of both if it goes on in another setting."""
    assert passes.clip is not None
    kind, precision = "exact" if passes.clip.exact else "floats", "bf16" if passes.bf16 else "full"
    num_weights = sum(each.numel() for each in passes.parameters.values())
    setting = f"{kind}, all clipped, {passes.way} {precision} {batches.device.type} {tuple(batches.usual())}, {num_weights} weights"
    kept = None
    if before.get("arithmetic") is not None:
        kept = Arithmetic(before["arithmetic"], before["arithmetic_charged"], setting)
        if before.get("arithmetic_setting") == setting:
            return kept
    words, charged = _measured(passes, batches, expected_batch)
    if kept is not None and kept.words.startswith("exact") == passes.clip.exact:
        words, charged = max((charged, words), (kept.charged, kept.words))[::-1]
    return Arithmetic(words, charged, setting)


def _measured(passes: Passes, batches: PhysicalBatches, expected_batch: float) -> tuple[str, float]:
    assert passes.clip is not None
    on_gpu, off = batches.device.type == "cuda", rounded_together(passes, batches)
    # Rounding is thousands of times less; and exact sums know of none.
    if off > (0 if passes.clip.exact else MOST_ROUNDED):
        raise GuaranteeError(
            f"Who shares a pass with a unit moves its gradient, by {off:.2g} of the clip norm, as in a model that mixes rows. Clipping "
            "does not bound that. Give a model in which each row is by itself, or physical_rows=1."
        )
    if passes.clip.exact:
        assumed = ", tensor cores taken to add as float32 does" if on_gpu else ""
        return f"exact: units never meet in floating point{assumed}", 0.0
    kinds = {each.dtype for each in passes.parameters.values()}
    kind = "float64" if kinds == {torch.float64} else "float32"
    told = f"{off:.1e}" if off > LEAST else f"under {LEAST:.1e}"
    off = max(off, LEAST)
    # One unit more may move everybody after it to another place, and some to another pass.
    num_passes = batches.num_passes(expected_batch)
    words = (
        f"{kind}: measured {told} C over {DRAWS} draws, {TIMES} x charged for each of {num_passes} passes, taken off "
        "the clip norm"
    )
    charged = TIMES * off * num_passes
    if charged > MOST_CHARGED:
        raise GuaranteeError(
            f"Rounding may move others by {charged:.2g} of the clip norm in the {num_passes:,} passes of a step, too much to take off "
            "everybody's bound. Add exact_sums=True, or use more physical_rows or a smaller batch."
        )
    return words, charged


def rounded_together(passes: Passes, batches: PhysicalBatches) -> float:
    """The most, in clip norms, that others' sums changed with a unit beside them; over units of
    made-up text, all alike in one half of the draws, and the others moved up by a place."""
    assert passes.clip is not None
    every = (batches.usual(), *reversed(batches.asked()))
    shape = next((each for each in every if each.num_units > 1), None)
    if shape is None:
        return 0.0  # passes are added up in float64
    num_ids = num_ids_of(passes.model, shape.width)
    most = 0.0
    for draw in range(DRAWS):
        half, place = divmod(draw, DRAWS // 2)
        if not place:
            alike = slice(0, None if half else 1)
            together = synthetic_units(shape, num_ids, alike, batches.device)
            together, share = _all_clipped(passes, together)
            everybody = _sums(passes, together)
        places_U = torch.arange(shape.num_units, device=batches.device)
        gone_U = places_U == min(place, shape.num_units - 1)
        own = _sums(passes, together.without(~gone_U))
        others = _sums(passes, together.without(gone_U).moved_up())
        squares = [
            float((whole.double() - part.double() - alone.double()).square().sum())
            for whole, part, alone in zip(everybody, others, own, strict=True)
        ]
        most = max(most, math.sqrt(sum(squares)) / (share * passes.clip.norm))
    return most


def _all_clipped(passes: Passes, together: Physical) -> tuple[Physical, float]:
    """The units with so small a share of the clip norm that each is clipped, in every group; and the
    share. With a clip norm above the first gradients less would show than later ones bring."""
    assert passes.clip is not None
    norms_U = passes(together).norms.double()
    some_U = norms_U[(norms_U > 0) & norms_U.isfinite()]
    if passes.clip.exact or not math.isfinite(passes.clip.norm) or not len(some_U):
        return together, 1.0
    exponent = math.frexp(float(some_U.min()) / passes.clip.norm)[1]
    share = 2.0 ** min(0, max(-60, exponent - 11))
    return replace(together, shares_U=torch.full_like(norms_U, share)), share


def _sums(passes: Passes, batch: Physical) -> list[Tensor]:
    """Copies: a captured pass writes to the same memory each time."""
    return [each.clone() for each in passes(batch).gradients.values()]
