"""An empirical lower bound on ε from one training run (Steinke, Nasr, Jagielski 2023).

Each of m canaries was trained on or not, by a fair coin of its own. Whoever sees the result
names the r canaries that it is surest of, and v of these guesses are right. If training is
(ε, δ)-differentially private, so is guessing, and v cannot be large often.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tightlip.audit.measures import Audited
from tightlip.core.errors import UsageError
from tightlip.core.files import write_json
from tightlip.core.gates import Known
from tightlip.core.run_folder import DP_CHECK, DP_CHECK_RESULT, RunRecord
from tightlip.corpus.canaries import CheckKey, read_check_key
from tightlip.corpus.opening import finished_run
from tightlip.scan.models import OpenedModel, claimed_to_write, open_model
from tightlip.scan.options import ScanOptions

Verdict = Literal["consistent", "contradicted", "nothing claimed"]
# Forty right guesses are the fewest that can contradict ε = 2.5.
_FEW = 40
_TRIED = 256  # values of ε, before the last one rejected is narrowed
_NARROWED = 40
LOGITS_AT_ONCE = 1 << 24
CONFIDENCE = 0.95
# For a run that claims nothing: small enough to weigh nothing beside a few thousand canaries.
DELTA_WITHOUT_CLAIM = 1e-5
# What a gate may ask for.
FIGURES: Known = dict.fromkeys(
    ("num_canaries", "num_guesses", "num_correct", "epsilon_lower_bound", "claimed_epsilon")
)


@dataclass(frozen=True, kw_only=True)
class DPCheck:
    """What one run's canaries say about its ε; the claim is None where the run makes none."""

    num_canaries: int
    num_guesses: int
    num_correct: int
    epsilon_lower_bound: float
    confidence: float
    claimed_epsilon: float | None
    delta: float
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_guesses(
    scores: np.ndarray,
    included: np.ndarray,
    *,
    claimed_epsilon: float | None,
    delta: float,
) -> DPCheck:
    """Guess by `scores`, high for "trained on", count by `included`, and compare with the claim.

    How many guesses there are depends on the number of canaries alone. Whoever tries several
    numbers and keeps the best accuses an honest run far more often than CONFIDENCE says.

    Holds:
        honest: a private run is contradicted with probability at most 1 - CONFIDENCE.
        silent: scores that know nothing give 0 as often.
    """
    num_guesses = default_num_guesses(len(scores))
    num_correct = correct_guesses(scores, included, num_guesses)
    bound = epsilon_lower_bound(len(scores), num_guesses, num_correct, delta)
    return DPCheck(
        num_canaries=len(scores),
        num_guesses=num_guesses,
        num_correct=num_correct,
        epsilon_lower_bound=bound,
        verdict=_verdict(bound, claimed_epsilon),
        claimed_epsilon=claimed_epsilon,
        delta=delta,
        confidence=CONFIDENCE,
    )


def _verdict(bound: float, claimed_epsilon: float | None) -> Verdict:
    if claimed_epsilon is None:
        return "nothing claimed"
    return "contradicted" if bound > claimed_epsilon else "consistent"


def default_num_guesses(num_canaries: int) -> int:
    """A fifth of the canaries, or 40 where that is more and at most half; half "in", half "out".

    Few guesses are the surest, and many give the bound room: all right, it is about ln(r/3).
    With scores shifted by one standard deviation and 1,000 canaries a tenth, a fifth, a half and
    all gave bounds of 1.66, 1.53, 1.14 and 0.68; shifted by two, 3.22, 3.44, 2.84 and 1.52.

    >>> [default_num_guesses(m) for m in (10, 50, 100, 1000)]
    [4, 24, 40, 200]
    """
    return 2 * (max(num_canaries // 5, min(num_canaries // 2, _FEW)) // 2)


def correct_guesses(scores: np.ndarray, included: np.ndarray, num_guesses: int) -> int:
    """Guess "in" for the highest scores and "out" for the lowest, half each; how many are right.

    Equal scores are taken in the canaries' order, which knows nothing of the coins.

    >>> correct_guesses(np.array([3.0, 9.0, 1.0, 5.0]), np.array([False, True, True, False]), 2)
    1
    """
    assert len(scores) == len(included)
    assert num_guesses <= len(scores)
    order = np.argsort(scores, kind="stable")
    highest = order[len(order) - num_guesses // 2 :]
    lowest = order[: num_guesses - num_guesses // 2]
    return int(included[highest].sum() + (~included[lowest]).sum())


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
    model = opened.model
    ids_MT = _ids(read_check_key(key_file), opened.begin_id).to(opened.device)
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


def _ids(key: CheckKey, bos: int | None) -> Tensor:
    ids_MT = torch.from_numpy(key.tokens_ML)
    return ids_MT if bos is None else torch.nn.functional.pad(ids_MT, (1, 0), value=bos)


def check_run(run: str | Path | RunRecord, *, device: str = "auto") -> DPCheck:
    """A lower bound on the run's ε from its planted canaries, beside the ε its ledger claims.

    Also written to RUN/dp_check_result.json. A bound above the claim means that the claim is
    untrue, or that this was one of the 5 in 100 honest runs that look so.
    """
    record = finished_run(run)
    opened = open_model(record.model_folder, ScanOptions(device=device))
    with claimed_to_write(record.folder):
        check = DPCheckAudit().check(record, opened)
        write_json(record.folder / DP_CHECK_RESULT, check.to_json())
    return check


class DPCheckAudit:
    """A lower bound on ε by guessing which check canaries a run was trained on."""

    finds_secrets = True

    def depends_on(self, audited: Audited) -> dict[str, Any]:
        return {}  # the key is the run's own

    def figures(self, audited: Audited) -> dict[str, Any]:
        assert audited.subject.run is not None
        return self.check(audited.subject.run, audited.scans.opened(audited.model)).to_json()

    def check(self, run: RunRecord, opened: OpenedModel) -> DPCheck:
        """What `opened` knows of the run's own canaries, beside what the run claims."""
        key_file, claimed = run.folder / DP_CHECK, run.guarantee.get("epsilon")
        if not key_file.exists():
            raise UsageError(
                f"{run.folder} was trained without canaries, so there is nothing to guess. "
                "Run: tightlip train CORPUS --mitigation dp --epsilon 2 --dp-check-canaries 1000 --out DIR"
            )
        return check_guesses(
            scores_of(opened, key_file),
            read_check_key(key_file).included_M,
            claimed_epsilon=claimed,
            delta=DELTA_WITHOUT_CLAIM if claimed is None else run.guarantee["delta"],
        )

    def accuses(self, figures: dict[str, Any]) -> bool:
        return bool(figures["epsilon_lower_bound"] > (figures["claimed_epsilon"] or 0))
