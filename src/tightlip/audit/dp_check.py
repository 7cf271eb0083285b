"""Whether a run's canaries contradict its ε, by one training run.

Each of m canaries was in or not, by a fair coin of its own. Whoever sees the result names the c
canaries that it is surest of, and v of these guesses are right. Two checks differ in what is seen:
in the *engine* canaries of known gradient, in every noised sum; in the *text* check planted texts,
through the finished model. Both are judged by the trade-off function of the run's own steps
(`trade_off`). Beside it stands the lower bound on ε of Steinke, Nasr and Jagielski 2023, which knows
no more of the run than its δ.

How often, at most. Let q = e^ε/(1 + e^ε), and W be binomial(r, q): with δ = 0 a guess is right
with probability at most q, whatever the other coins, so Pr[v right] is at most a tail of W, and
randomised response reaches it. With δ, a coin's chance given the guesses and all other coins
may pass q. As the excess is (P - e^ε Q)⁺/(1 + e^ε) under one's weight, its mean is at most
δ/(1 + e^ε) for each canary. Now uncover the guesses in random order. If n are still covered, an
excess there helps only where exactly as many of these n turn out right as are missing, which a
binomial does with probability at most a(n), its highest. The order is random and each canary's
place in it uniform, so all m excesses together add at most

    m · δ/(1 + e^ε) · (a(0) + … + a(r - 1))/r.

The paper's own term is 2mδ·α, α the highest mean of i probabilities of W just below v. It is
mostly larger, by about 1 + e^ε. We take the larger of the two: an accusation must stand under
either argument. Ours was checked against the exact optimum over all mechanisms, a linear
program (tests/audit/test_dp_check.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tightlip.audit import trade_off
from tightlip.audit.measures import Audited
from tightlip.core.errors import UsageError
from tightlip.core.figures import rounded_up
from tightlip.core.files import read_sealed, write_json
from tightlip.core.gates import Known
from tightlip.core.run_folder import DP_CHECK, DP_CHECK_RESULT, ENGINE_CHECK, RunRecord
from tightlip.corpus.canaries import read_check_key
from tightlip.corpus.opening import finished_run
from tightlip.scan.models import OpenedModel, open_model
from tightlip.scan.options import ScanOptions
from tightlip.scan.scans import claimed_to_write

Verdict = Literal["consistent", "contradicted", "nothing claimed"]
# Forty right guesses are the fewest that can contradict ε = 2.5.
_FEW = 40
_TRIED = 256  # values of ε, before the last one rejected is narrowed
_NARROWED = 40
LOGITS_AT_ONCE = 1 << 24
CONFIDENCE = 1 - trade_off.LEVEL
# For a run that claims nothing: small enough to weigh nothing beside a few thousand canaries.
DELTA_WITHOUT_CLAIM = 1e-5
# What a gate may ask for, of each check.
_FIGURES = ("num_canaries", "num_guesses", "num_correct", "p_value", "epsilon_lower_bound")
FIGURES: Known = dict.fromkeys(
    ["claimed_epsilon", *(f"{kind}_{name}" for kind in ("engine", "text") for name in _FIGURES)]
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a run says of itself: ε at δ, None where it says none, and the steps behind it."""

    epsilon: float | None
    delta: float
    steps: trade_off.Steps | None = None

    @classmethod
    def of(cls, guarantee: Mapping[str, Any]) -> "Claim":
        """What a ledger claims, or did before an earlier check. Where it has no steps of equal noise,
        its ε and δ are all there is."""
        if (epsilon := (guarantee.get("withdrawn") or guarantee).get("epsilon")) is None:
            return cls(epsilon=None, delta=DELTA_WITHOUT_CLAIM)
        names = ("noise_multiplier", "sampling_rate", "steps")
        told = {name: guarantee[name] for name in names if guarantee.get(name)}
        plain = len(told) == len(names) and not guarantee.get("adaptive")
        steps = trade_off.Steps(**told) if plain else None
        return cls(epsilon=epsilon, delta=guarantee["delta"], steps=steps)

    def law(self, *, independent: bool) -> trade_off.Law | None:
        """What the claim allows; `independent` where canaries share nothing but the engine."""
        if self.epsilon is None:
            return None
        if self.steps is None:
            return trade_off.TradeOff.of(np.array([self.epsilon]), np.array([self.delta]))
        return self.steps.independent() if independent else self.steps.trade_off()


@dataclass(frozen=True, kw_only=True)
class DPCheck:
    """What one kind of canary says about a run.

    `p_value` is at most how often a run as claimed lets so many guesses be right, and
    `num_to_contradict` how many are too many: None where not even all would be, or nothing is claimed.
    """

    num_canaries: int
    num_guesses: int
    num_correct: int
    num_to_contradict: int | None
    p_value: float | None
    epsilon_lower_bound: float
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class DPChecks:
    """What a run claims, and what either kind of canary says; None where it has none of them."""

    claimed_epsilon: float | None
    delta: float
    confidence: float = CONFIDENCE
    engine: DPCheck | None = None
    text: DPCheck | None = None
    # How often planted texts that nothing but noise hides would tell half the noise.
    text_power: float | None = None
    # Why the claim was taken back, now or by an earlier check, whatever this one says.
    on_record: str | None = None

    @property
    def verdict(self) -> Verdict:
        found = [each.verdict for each in (self.engine, self.text) if each is not None]
        return "contradicted" if "contradicted" in found else found[0]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}

    @property
    def claim(self) -> str:
        """The ε that the run claims, never less."""
        return rounded_up(math.inf if self.claimed_epsilon is None else self.claimed_epsilon)

    def contradiction(self) -> str:
        """What a ledger says from then on."""
        each = next(x for x in (self.engine, self.text) if x and x.verdict == "contradicted")
        kind = "in the engine" if each is self.engine else "in the text"
        return (
            f"The run's own canaries contradict its ε: of {each.num_guesses:,} guesses about those {kind} {each.num_correct:,} "
            f"were right, and {each.num_to_contradict:,} are too many for ε {self.claim}. At most {trade_off.LEVEL:.0%} of "
            "honest runs look so by chance."
        )


def gated(record: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a record as gates name them."""
    figures = {"claimed_epsilon": record["claimed_epsilon"]}
    for kind in ("engine", "text"):
        found = record[kind] or {}
        figures |= {f"{kind}_{name}": found.get(name) for name in _FIGURES}
    return figures


def check_guesses(
    scores: np.ndarray, included: np.ndarray, claim: Claim, *, independent: bool = False
) -> DPCheck:
    """Guess by `scores`, high for "in", count by `included`, and compare with the claim.

    How many guesses there are depends on the claim and the number of canaries alone. Whoever tries
    several numbers and keeps the best accuses an honest run far more often than LEVEL says.

    Holds:
        honest: a private run is contradicted with probability at most LEVEL.
        silent: scores that know nothing contradict as seldom.
    """
    num_guesses = num_guesses_for(claim, len(scores), independent=independent)
    num_correct = trade_off.correct_guesses(scores, included, num_guesses)
    allowed, needed, p = claim.law(independent=independent), None, None
    verdict: Verdict = "nothing claimed"
    if allowed is not None:
        needed = allowed.least_to_contradict(len(scores), num_guesses)
        p = allowed.p_value(len(scores), num_guesses, num_correct)
        contradicts = needed is not None and num_correct >= needed
        verdict = "contradicted" if contradicts else "consistent"
    return DPCheck(
        num_canaries=len(scores),
        num_guesses=num_guesses,
        num_correct=num_correct,
        num_to_contradict=needed,
        p_value=p,
        epsilon_lower_bound=epsilon_lower_bound(len(scores), num_guesses, num_correct, claim.delta),
        verdict=verdict,
    )


def num_guesses_for(claim: Claim, num_canaries: int, *, independent: bool = False) -> int:
    """Before anybody looks at a score."""
    if independent:
        return trade_off.even(num_canaries, trade_off.ENGINE_SHARE)
    if claim.steps is None or num_canaries < _FEW:
        return default_num_guesses(num_canaries)
    return trade_off.best_num_guesses(claim.steps, num_canaries)[0]


def default_num_guesses(num_canaries: int) -> int:
    """A fifth of the canaries, or 40 where that is more and at most half; half "in", half "out".

    Few guesses are the surest, and many give the bound room: all right, it is about ln(r/3).
    With scores shifted by one standard deviation and 1,000 canaries a tenth, a fifth, a half and
    all gave bounds of 1.66, 1.53, 1.14 and 0.68; shifted by two, 3.22, 3.44, 2.84 and 1.52.

    >>> [default_num_guesses(m) for m in (10, 50, 100, 1000)]
    [4, 24, 40, 200]
    """
    return 2 * (max(num_canaries // 5, min(num_canaries // 2, _FEW)) // 2)


def p_value(
    num_canaries: int, num_guesses: int, num_correct: int, epsilon: float, delta: float
) -> float:
    """At most how often an (ε, δ)-private run lets so many guesses be right.

    Holds:
        valid: no mechanism does it more often.
        tight: with δ = 0, randomised response does it exactly as often.
    """
    right = 1 / (1 + math.exp(-epsilon))
    chances = _chances(num_guesses, np.arange(num_guesses + 1), right)
    ours = (1 - right) * _mean_highest(num_guesses, right)
    papers = 2 * _highest_mean_below(chances, num_correct)
    return min(1.0, float(chances[num_correct:].sum()) + num_canaries * delta * max(ours, papers))


def _highest_mean_below(chances: np.ndarray, num_correct: int) -> float:
    """max over i of Pr[v - i ≤ W < v]/i; 0 where nothing is below."""
    if not num_correct:
        return 0.0
    just_below = np.cumsum(chances[:num_correct][::-1])
    return float((just_below / np.arange(1, num_correct + 1)).max())


def _mean_highest(num_guesses: int, right: float) -> float:
    """(a(0) + … + a(r - 1))/r, where a(n) is the highest probability of binomial(n, right)."""
    if not num_guesses:
        return 1.0
    n = np.arange(num_guesses)
    mode = np.minimum(((n + 1) * right).astype(np.int64), n)
    return float(_chances(n, mode, right).mean())


def _chances(n: int | np.ndarray, k: np.ndarray, right: float) -> np.ndarray:
    """The probability of k right guesses out of n."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, np.max(n) + 1)))])
    ways = logs[n] - logs[k] - logs[n - k]
    return np.exp(ways + k * math.log(right) + (n - k) * math.log1p(-right))


def epsilon_lower_bound(
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """The largest ε that so many right guesses rule out; 0 where they rule out none.

    Whatever is private at some ε is so at any larger one, so one ε ruled out rules out all below.

    Holds:
        monotone: more right guesses, less confidence or a smaller δ never give less.
        unbeaten: with δ = 0 it is the log odds of Clopper and Pearson's lower limit.
    """
    if not 0 < confidence < 1:
        raise UsageError(f"confidence={confidence} is none. Use a number such as 0.95.")

    def is_ruled_out(epsilon: float) -> bool:
        return p_value(num_canaries, num_guesses, num_correct, epsilon, delta) <= 1 - confidence

    # δ weighs less as ε grows, so an ε may be ruled out where a smaller one is not: from above.
    tried = np.linspace(_most(num_guesses, confidence), 0, _TRIED)
    first = next((place for place, each in enumerate(tried) if is_ruled_out(each)), None)
    if first is None:
        return 0.0
    low, high = float(tried[first]), float(tried[max(first - 1, 0)])
    for _ in range(_NARROWED):
        middle = (low + high) / 2
        low, high = (middle, high) if is_ruled_out(middle) else (low, middle)
    return low


def _most(num_guesses: int, confidence: float) -> float:
    """The ε at which q^r = 1 - confidence: all guesses right rule out no larger one."""
    if not num_guesses:
        return 0.0
    return max(0.0, -math.log(math.expm1(-math.log1p(-confidence) / num_guesses)))


@torch.inference_mode()
def scores_of(opened: OpenedModel, key_file: Path) -> np.ndarray:
    """Minus each canary's mean loss in nats, read as training read it: behind a BOS if there is one.

    Asked as anybody with the model's probabilities could ask.
    """
    model, ids_MT = opened.model, torch.from_numpy(read_check_key(key_file).tokens_ML)
    if opened.begin_id is not None:
        ids_MT = torch.nn.functional.pad(ids_MT, (1, 0), value=opened.begin_id)
    ids_MT = ids_MT.to(opened.device)
    vocabulary = model.config.get_text_config().vocab_size
    together = max(1, LOGITS_AT_ONCE // (ids_MT.shape[1] * vocabulary))
    parts = []
    for ids_BT in ids_MT.split(together):
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits.float()
        known_BT = logits_BTV.log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]
        parts.append(known_BT.double().mean(1))
    scores = torch.cat(parts).cpu().numpy()
    if not np.isfinite(scores).all():
        raise UsageError(
            f"{opened.name} gives losses that are no numbers, so no guess can be made. Train again."
        )
    return scores


def check_run(
    run: str | Path | RunRecord, take_back: Callable[..., str], *, device: str = "auto"
) -> DPChecks:
    """What the run's canaries say of the ε its ledger claims. Also written to RUN/dp_check_result.json.

    Contradicted means that the claim is untrue, or that this was one of the at most 5 in 100 honest
    runs that look so. `take_back`, of training, then puts it on record for good: no later check washes it away.
    """
    record = finished_run(run)
    with claimed_to_write(record.folder):
        final = partial(open_model, record.model_folder, ScanOptions(device=device))
        checks = checks_of(record, final)
        reason = record.guarantee.get("withdrawn") and record.guarantee["because"]
        if checks.verdict == "contradicted":
            reason = take_back(record, checks.contradiction(), **checks.to_json())
        checks = replace(checks, on_record=reason)
        write_json(record.folder / DP_CHECK_RESULT, checks.to_json())
    return checks


def checks_of(run: RunRecord, open_final: Callable[[], OpenedModel]) -> DPChecks:
    """Both checks of a run, as far as it has canaries for them."""
    claim, key_file = Claim.of(run.guarantee), run.folder / DP_CHECK
    engine = run.folder / ENGINE_CHECK
    asked = run.config.get("train", {}).get(run.mitigation, {})
    for setting, file in (("dp_check_engine", engine), ("dp_check_canaries", key_file)):
        if asked.get(setting) and not file.exists():
            raise UsageError(
                f"{run.folder} was trained with {setting}={asked[setting]}, and {file} is missing, so nobody knows who was in: what "
                "is left would be checked, and called all. Put it back, or train again."
            )
    if not key_file.exists() and not engine.exists():
        raise UsageError(
            f"{run.folder} was trained without canaries, so there is nothing to guess. "
            "Run: tightlip train CORPUS --mitigation dp --epsilon 2 --dp-check-engine 1000 --out DIR"
        )
    found: dict[str, Any] = {}
    if engine.exists():
        there, _ = read_sealed(engine)
        scores, included = np.array(there["scores"]), np.array(there["included"], bool)
        found["engine"] = check_guesses(scores, included, claim, independent=True)
    if key_file.exists():
        included = read_check_key(key_file).included_M
        scores = text_scores(run, open_final(), key_file)
        found["text"] = check_guesses(scores, included, claim)
        if claim.steps is not None and len(included) >= _FEW:
            found["text_power"] = trade_off.best_num_guesses(claim.steps, len(included))[1]
    return DPChecks(claimed_epsilon=claim.epsilon, delta=claim.delta, **found)


def text_scores(run: RunRecord, opened: OpenedModel, key_file: Path) -> np.ndarray:
    """How much likelier each text became; of a new model, how likely it is."""
    scores = scores_of(opened, key_file)
    start = Path(str(run.config.get("train", {}).get("model", "")))
    if not (start / "config.json").is_file():
        return scores
    return scores - scores_of(open_model(start, ScanOptions(device=opened.device)), key_file)


class DPCheckAudit:
    """Whether a run's own canaries contradict its ε."""

    finds_secrets = True

    def depends_on(self, audited: Audited) -> dict[str, Any]:
        return {}  # the keys are the run's own

    def figures(self, audited: Audited) -> dict[str, Any]:
        assert audited.subject.run is not None
        final = audited.scans.opened
        return checks_of(audited.subject.run, lambda: final(audited.model)).to_json()

    def accuses(self, figures: dict[str, Any]) -> bool:
        if figures["claimed_epsilon"] is not None:
            return bool(figures["verdict"] == "contradicted")
        checks = (figures["engine"], figures["text"])
        return any(each["epsilon_lower_bound"] > 0 for each in checks if each)
