"""The noise's own scale gives a unit away as published, and nothing under `clip` and `scale`.

The steps are the engine's, and the draw is fixed: 64 ordinary texts in every batch, in the other
world one rare text as well. Batches drawn at random differ in size by more than one text moves
their weight, and hide what a broken release would tell. The model has 100,000 coordinates that no
text touches, so that an update there is noise and nothing else; the attacker sees these alone.
"""

import math

import numpy as np
import pytest
import torch
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from scipy.stats import binomtest, norm
from torch import nn

from experiments.noise_scale_attack import (
    bound_from_alarms,
    divergence_nats,
    log_likelihood_ratio,
    mean_square,
    simulated_mean_squares,
    sum_moved,
    tell_apart,
)
from tightlip.core.errors import UsageError
from tightlip.corpus.privacy_weights import minmax_weights, public_weights, rank_weights
from tightlip.privacy.adaptive import AdaptiveSpec, joint_multiplier
from tightlip.privacy.noise_schedules import ReleasedNoise
from tightlip.privacy.private_training import PrivateTraining

pytestmark = pytest.mark.slow

WORDS, UNUSED, WIDTH = 8, 20_000, 5
ORDINARY, BATCH, LEAST, TRIALS = 128, 64, 0.05, 80
# Noise with which one step claims an ε near 0.4, or 0.6 with a release, in each mode.
NOISE = {"as-published": 200.0, "clip": 10.0, "scale": 200.0}
RELEASE = 10.0


class Sparse(nn.Module):
    """The next word from the last; the table has 20,000 words that nobody uses."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS + UNUSED, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.head(self.embed(ids))


def engine(folder, mode, rare, steps):
    """Private training by SGD on ordinary texts and, if `rare`, one of weight 1."""
    torch.manual_seed(0)
    model = Sparse()
    rho = np.full(ORDINARY + rare, LEAST)
    rho[ORDINARY:] = 1.0
    # With no memory a step's scale shows the release before it, bare: as much as can be seen.
    own = (
        {"averaging": 0.0, "gamma_floor": LEAST, "release_noise": RELEASE}
        if mode == "scale"
        else {}
    )
    return PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        [torch.tensor([number % WORDS, 1, 2]) for number in range(len(rho))],
        ledger=folder / "ledger.json",
        adaptive=AdaptiveSpec(mode=mode, least_weight=LEAST, **own),
        weights=rho,
        noise_multiplier=NOISE[mode],
        expected_batch=BATCH,
        steps=steps,
        delta=1e-5,
        physical_rows=256,
        insecure_seed=7 + rare,
    )


def updates_seen(folder, mode, rare, trials=TRIALS):
    """The mean square of each update where no gradient is. A step is a trial, its batch fixed."""
    private = engine(folder, mode, rare, trials + 1)
    batch = np.r_[np.arange(BATCH), [ORDINARY] * rare].astype(int)
    private._sampler.draw = lambda: batch
    embed, seen = private.model.embed.weight, []
    for _ in range(trials + 1):
        before = embed.detach()[WORDS:].clone()
        private.step()
        seen.append(mean_square((embed.detach()[WORDS:] - before).numpy()))
    return np.array(seen[1:])  # of `scale` the first step shows no release


def claimed_for_a_step(mode):
    """ε of one step whose draw is known: the Gaussian mechanism's own, at the least noise."""
    sigma = NOISE[mode] * (1 if mode == "clip" else LEAST)
    multiplier = joint_multiplier(sigma, RELEASE) if mode == "scale" else sigma
    return get_epsilon_gaussian(multiplier, 1e-5)


def attack(folder, mode, trials=TRIALS):
    without, within = (
        updates_seen(folder / f"{mode}-{rare}", mode, rare, trials) for rare in (0, 1)
    )
    return tell_apart(without, within, claimed_epsilon=claimed_for_a_step(mode), delta=1e-5)


def test_as_published_the_noise_alone_shows_far_more_than_one_step_claims(tmp_path):
    found = attack(tmp_path, "as-published")
    assert found.claimed_epsilon < 0.5
    assert (found.true_alarms, found.false_alarms) == (found.num_trials, 0)
    assert found.epsilon_lower_bound > 5 * found.claimed_epsilon
    assert found.verdict == "contradicted"


@pytest.mark.parametrize("mode", ["clip", "scale"])
def test_the_same_attacker_finds_nothing_where_the_noise_does_not_follow_the_batch(tmp_path, mode):
    found = attack(tmp_path, mode)
    assert found.claimed_epsilon < 0.7
    assert found.verdict == "consistent"
    assert found.epsilon_lower_bound <= found.claimed_epsilon


def without_noise(schedule, rho_U):
    """A release that tells the weights as they are."""
    return schedule._centre + (rho_U - schedule._centre).sum() / schedule.expected_batch


def of_its_own_batch(schedule, record, rho_U):
    """A step whose noise follows from what is drawn in it, bare."""
    record()
    return schedule.noise_multiplier * max(LEAST, without_noise(schedule, rho_U))


@pytest.mark.parametrize(
    ("name", "broken"), [("released", without_noise), ("charge", of_its_own_batch)]
)
def test_the_attacker_finds_a_release_that_is_broken(tmp_path, monkeypatch, name, broken):
    """What the test above is worth: it would not pass if the noise, or the delay, were missing."""
    monkeypatch.setattr(ReleasedNoise, name, broken)
    found = attack(tmp_path, "scale")
    assert (found.true_alarms, found.false_alarms) == (found.num_trials, 0)
    assert found.verdict == "contradicted"


def test_the_scale_of_an_update_is_what_the_paper_says(tmp_path):
    """γ·σ·C over the batch, read off the update itself."""
    seen = updates_seen(tmp_path, "as-published", 0, trials=4)
    wanted = NOISE["as-published"] * LEAST / BATCH
    assert np.sqrt(seen) == pytest.approx(wanted, rel=5 / math.sqrt(2 * UNUSED * WIDTH))


# The attacker's arithmetic


@pytest.mark.parametrize(("without", "within"), [(1.0, 1.3), (2.0, 1.9), (1.0, 1 + 1 / 4096)])
def test_the_likelihood_ratio_is_that_of_the_coordinates(without, within):
    update = np.random.default_rng(0).normal(0, within, 500)
    ratio = norm.logpdf(update, scale=within).sum() - norm.logpdf(update, scale=without).sum()
    found = log_likelihood_ratio(np.array([mean_square(update)]), 500, without, within)
    assert found == pytest.approx(ratio, abs=1e-9)


def test_the_divergence_is_the_mean_of_the_ratio():
    drawn = simulated_mean_squares(1.02, 1e4, 100_000, np.random.default_rng(0))
    ratios = log_likelihood_ratio(drawn, 1e4, 1.0, 1.02)
    assert ratios.mean() == pytest.approx(divergence_nats(1e4, 1.0, 1.02), abs=0.06)


def test_at_the_papers_size_a_step_shows_six_nats():
    """100 million coordinates, batches of 4,096: METHODS.md, section 4."""
    assert divergence_nats(1e8, 1.0, 1 + 1 / 4096) == pytest.approx(5.96, abs=0.005)


def test_drawn_mean_squares_follow_the_law_of_real_ones():
    real = np.random.default_rng(0).normal(0, 3.0, (4000, 50))
    drawn = simulated_mean_squares(3.0, 50, 4000, np.random.default_rng(1))
    for moment in (np.mean, np.std):
        assert moment(drawn) == pytest.approx(moment((real**2).mean(1)), rel=0.05)


@pytest.mark.parametrize(("hits", "wrong"), [(40, 0), (50, 3), (7, 7), (0, 50), (50, 50)])
def test_the_bound_is_clopper_and_pearsons(hits, wrong):
    low = binomtest(hits, 50).proportion_ci(0.95, "exact").low
    high = binomtest(wrong, 50).proportion_ci(0.95, "exact").high
    ratios = [(low - 1e-5, high), (1 - high - 1e-5, 1 - low)]
    wanted = max([0.0, *(math.log(above / below) for above, below in ratios if above > 0)])
    assert bound_from_alarms(hits, wrong, 50, 1e-5) == pytest.approx(wanted)


def test_more_true_alarms_or_fewer_false_ones_never_give_less():
    bounds = np.array(
        [[bound_from_alarms(hits, wrong, 20, 1e-5) for wrong in range(6)] for hits in range(10, 21)]
    )
    assert (np.diff(bounds, axis=0) >= 0).all()
    assert (np.diff(bounds, axis=1) <= 0).all()


def test_noise_of_one_law_is_accused_no_more_often_than_it_says():
    draw = np.random.default_rng(3)
    accused = 0
    for _ in range(400):
        without, within = (simulated_mean_squares(1.0, 100, 60, draw) for _ in range(2))
        found = tell_apart(without, within, claimed_epsilon=0.0, delta=1e-5)
        accused += found.verdict == "contradicted"
    assert accused <= 400 * 0.05


def test_a_quieter_world_is_found_as_well_as_a_louder_one():
    draw = np.random.default_rng(0)
    loud, quiet = (simulated_mean_squares(scale, 1e6, 100, draw) for scale in (1.1, 1.0))
    for pair in ((loud, quiet), (quiet, loud)):
        assert tell_apart(*pair, claimed_epsilon=1.0, delta=1e-5).epsilon_lower_bound > 2.4


def test_too_few_trials_are_refused():
    with pytest.raises(UsageError, match="4 or more"):
        tell_apart(np.ones(3), np.ones(3), claimed_epsilon=1.0, delta=1e-5)
    with pytest.raises(UsageError, match=r"0\.95"):
        bound_from_alarms(1, 0, 4, 1e-5, confidence=1.0)


# The second reason


def test_one_absurd_document_moves_everybodys_weight_but_not_by_public_constants():
    nats = np.random.default_rng(0).normal(math.log(60), 0.75, 20_000)
    absurd = math.log(1e6)
    assert sum_moved(lambda each: minmax_weights(each, 1e-9), nats, absurd, 4096) > 100
    assert 0 < sum_moved(lambda each: rank_weights(each, 1e-9), nats, absurd, 4096) < 1
    assert sum_moved(lambda each: public_weights(each, 2.0, 6.0, 0.05), nats, absurd, 4096) == 0
