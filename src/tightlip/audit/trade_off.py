"""How many right guesses a run's own noise allows: the test behind `tightlip dp-check`.

Each of m canaries was in or out by a fair coin. Whoever sees what the run told names c of them, and N
guesses are right. Turn one canary's coin over and leave what was seen as it is: a right guess about
it becomes a wrong one, and every other stays. So, averaged over canaries and coins, the probability
that a canary is guessed right while N ≥ i is at most f̄ of the probability that it is guessed wrong
while N ≥ i - 1, where f̄(x) = 1 - f(x) is the most that an event of probability x on one side can
have on the other (Mahloujifar, Melis and Chaudhuri 2024, for the trade-off function f). With p_n the
probability of N = n:

    Σ_{n ≥ i} n/m · p_n  ≤  f̄( Σ_{n ≥ i-1} (c - n)/m · p_n )     for every i.

A chance τ of v right guesses or more is possible only if some p with that tail fulfils all of them.
The least that p needs below v is worked out step by step; where that is more than there is, τ is
ruled out.

Canaries inside the engine leave more to say. Coins, draws and noise are each canary's own, so that
scores are independent: given the lowest of the c/2 highest scores, each of the others is right by
itself, with a probability that follows from f and from which share of all scores lies above
(`Independent`).

f is not the curve through one (ε, δ) but that of the run's steps: dp-accounting's privacy loss
distribution gives δ(ε) for every ε, each a line above f̄. Where a canary is in or out with equal
chance, the average over both is bounded by the average of both directions' δ(ε). It is worked out
here from the ledger's figures alone, not by the code that wrote them.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LEVEL = 0.05  # honest runs that are contradicted, at most
_LINES, _MOST_EPSILON = 1000, 100.0
_LEAST_DELTA = 1e-12
_INTERVALS_PER_DEVIATION, _FINEST, _COARSEST = 8, 1e-5, 1e-3
_HALVINGS = 50
ENGINE_SHARE = 0.5  # of canaries that are guessed about where every step was watched
# How often the share of scores beyond a guess may be less than assumed, above and below.
_SHARE_LEVEL = LEVEL / 20
SHARES, _USUAL_SHARE = (0.1, 0.2, 0.3, 0.5), 0.2
_DRAWS, _SEED = 200, 0  # of simulated runs: a claim's number of guesses is always the same


@dataclass(frozen=True, eq=False)
class TradeOff:
    """f̄ as the least of many lines: slope · x + offset."""

    slopes: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(
        cls, epsilons: np.ndarray, deltas: np.ndarray, back: np.ndarray | None = None
    ) -> "TradeOff":
        """Of a mechanism that is (ε, δ)-private for each of these pairs, the other way (ε, `back`)."""
        grows, back = np.exp(epsilons), deltas if back is None else back
        offsets = np.concatenate([deltas, 1 - (1 - back) / grows])
        return cls(np.concatenate([grows, 1 / grows]), offsets)

    def least(self, reached: float) -> float:
        """The least probability on one side of what has probability `reached` on the other.

        >>> TradeOff.of(np.array([0.0]), np.array([0.25])).least(0.75)
        0.5
        """
        return max(0.0, float(((reached - self.offsets) / self.slopes).max()))

    def most_right(self, share: float) -> float:
        """The highest probability that a guess is right, of guesses about such a `share` of canaries.

        With r and w the probabilities that such a canary is on the side that was guessed, or not:
        r + w = 2 · share, and r ≤ f̄(w).
        """
        twice = 2 * share
        right = ((self.slopes * twice + self.offsets) / (1 + self.slopes)).min()
        return min(1.0, max(0.0, float(right)) / twice)

    def allows(self, chance: float, num_canaries: int, num_guesses: int, num_correct: int) -> bool:
        """Whether so many guesses, or more, can be right with this probability."""
        m, c = num_canaries, num_guesses
        right, wrong = chance * num_correct / m, chance * (c - num_correct) / m
        for missing in range(num_correct, 0, -1):
            needed = self.least(right)
            if needed > wrong:
                right += (missing - 1) / (c - missing + 1) * (needed - wrong)
                wrong = needed
            if right + wrong > c / m:
                return False
        return True

    def p_value(self, num_canaries: int, num_guesses: int, num_correct: int) -> float:
        """At most how often so many guesses, or more, are right.

        Holds:
            valid: no run with this trade-off does it more often.
            monotone: more right guesses never give more.
        """
        low, high = _LEAST_DELTA, 1.0
        if self.allows(high, num_canaries, num_guesses, num_correct):
            return 1.0
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            if self.allows(middle, num_canaries, num_guesses, num_correct):
                low = middle
            else:
                high = middle
        return high

    def least_to_contradict(self, num_canaries: int, num_guesses: int) -> int | None:
        """How many of the guesses must be right; None where not even all of them would do."""
        is_too_many = lambda num: not self.allows(LEVEL, num_canaries, num_guesses, num)  # noqa: E731
        needed = bisect_left(range(num_guesses + 1), True, key=is_too_many)
        return None if needed > num_guesses else needed


@dataclass(frozen=True, eq=False)
class Independent:
    """The same for canaries whose scores are independent: guesses "in" and "out" have a trade-off of
    their own each.

    Holds:
        valid: a run as claimed is contradicted with probability at most LEVEL.
    """

    inward: TradeOff
    outward: TradeOff

    def p_value(self, num_canaries: int, num_guesses: int, num_correct: int) -> float:
        """At most how often so many guesses, or more, are right."""
        tail = self._tail(num_canaries, num_guesses)[num_correct]
        return min(1.0, float(tail) + 2 * _SHARE_LEVEL)

    def least_to_contradict(self, num_canaries: int, num_guesses: int) -> int | None:
        """How many of the guesses must be right; None where not even all of them would do."""
        tail = self._tail(num_canaries, num_guesses)
        enough = np.flatnonzero(tail + 2 * _SHARE_LEVEL <= LEVEL)
        return int(enough[0]) if len(enough) else None

    def _tail(self, num_canaries: int, num_guesses: int) -> np.ndarray:
        """At most how often v guesses or more are right, by v."""
        from scipy.special import betaincinv
        from scipy.stats import binom

        half = num_guesses // 2
        # The share of all scores beyond the lowest guess has a beta law; guesses about fewer
        # canaries are surer.
        share = float(betaincinv(max(half, 1), num_canaries - half + 1, _SHARE_LEVEL))
        numbers = np.arange(half + 1)
        laws = [binom.pmf(numbers, half, f.most_right(share)) for f in (self.inward, self.outward)]
        return np.convolve(*laws)[::-1].cumsum()[::-1]


Law = TradeOff | Independent


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a ledger says of a run's steps: Gaussian noise on Poisson samples, so many times."""

    noise_multiplier: float
    sampling_rate: float
    steps: int

    def trade_off(self) -> TradeOff:
        """That between a run with one unit and a run without it, the average of both directions."""
        epsilons, inward, outward = _deltas(self)
        return TradeOff.of(epsilons, (inward + outward) / 2)

    def independent(self) -> Independent:
        """The same for canaries of the engine."""
        epsilons, inward, outward = _deltas(self)
        pairs = ((inward, outward), (outward, inward))
        return Independent(*(TradeOff.of(epsilons, *pair) for pair in pairs))

    def ideal_scores(
        self, included: np.ndarray, noise: float, draw: np.random.Generator
    ) -> np.ndarray:
        """What the finished model can tell at most: the sum of all steps along each canary's own
        coordinate, with `noise` times what the ledger says."""
        drawn = draw.binomial(self.steps, self.sampling_rate, included.shape) * included
        spread = noise * self.noise_multiplier * math.sqrt(self.steps)
        return drawn + draw.normal(size=included.shape) * spread

    def watched_scores(
        self, included: np.ndarray, noise: float, draw: np.random.Generator
    ) -> np.ndarray:
        """The same of whoever saw every noised sum."""
        scores = np.zeros(included.shape)
        for _ in range(self.steps):
            here = (draw.random(included.shape) < self.sampling_rate) & included
            seen = here + draw.normal(size=included.shape) * (noise * self.noise_multiplier)
            scores += log_ratio(seen, self.noise_multiplier, self.sampling_rate)
        return scores


@lru_cache(maxsize=16)
def _deltas(run: Steps) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """δ at many ε: of a run with one unit against one without it, and the other way."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    # Finer where a step's loss varies little, or rounding up would pile up.
    deviation = run.sampling_rate * math.sqrt(math.expm1(min(run.noise_multiplier**-2, 700.0)))
    one = pld.from_gaussian_mechanism(
        run.noise_multiplier,
        sampling_prob=run.sampling_rate,
        value_discretization_interval=min(
            max(deviation / _INTERVALS_PER_DEVIATION, _FINEST), _COARSEST
        ),
    )
    all_steps = one.self_compose(run.steps)
    most = all_steps.get_epsilon_for_delta(_LEAST_DELTA)
    epsilons = np.linspace(0.0, min(most, _MOST_EPSILON), _LINES)
    both = (all_steps._pmf_remove, all_steps._pmf_add)
    inward, outward = (np.asarray(each.get_delta_for_epsilon(epsilons)) for each in both)
    return epsilons, inward, outward


def log_ratio(seen: np.ndarray, noise_multiplier: float, sampling_rate: float) -> np.ndarray:
    """What one step says for "in": ln((1 - q) + q·N(1, σ²)/N(0, σ²)) at `seen`, in clip norms.

    Without noise, what was seen itself.
    """
    if not noise_multiplier:
        return seen
    shifted = np.minimum((2 * seen - 1) / (2 * noise_multiplier**2), 500.0)
    return np.log1p(sampling_rate * np.expm1(shifted))


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


def even(num_canaries: int, share: float) -> int:
    """So many guesses, half of them "in" and half "out"."""
    return 2 * int(num_canaries * share / 2)


def rejected_share(
    steps: Steps,
    num_canaries: int,
    num_guesses: int,
    *,
    noise: float,
    watched: bool = False,
    num_draws: int = _DRAWS,
) -> float:
    """How often the check contradicts runs that have `noise` times the noise they claim, with canaries
    that nothing but noise hides: its power below 1, its honesty at 1."""
    law: Law = steps.independent() if watched else steps.trade_off()
    if (needed := law.least_to_contradict(num_canaries, num_guesses)) is None:
        return 0.0
    draw = np.random.default_rng(_SEED)
    scores_of = steps.watched_scores if watched else steps.ideal_scores
    times = 0
    for _ in range(num_draws):
        included = draw.random(num_canaries) < 0.5
        scores = scores_of(included, noise, draw)
        times += correct_guesses(scores, included, num_guesses) >= needed
    return times / num_draws


def best_num_guesses(steps: Steps, num_canaries: int) -> tuple[int, float]:
    """How many guesses a finished model is asked for, and how often they would tell half the noise.

    Settled by the claim and the number of canaries alone, before anybody looks at a score: trying
    several on the run's own scores and keeping the best would accuse honest runs.
    """
    numbers = [even(num_canaries, share) for share in SHARES]
    power = [rejected_share(steps, num_canaries, number, noise=0.5) for number in numbers]
    best = max(range(len(numbers)), key=lambda at: (power[at], -abs(SHARES[at] - _USUAL_SHARE)))
    return numbers[best], power[best]
