"""Adaptive private training: whose bound is what, how much noise there is, what is on record."""

import json
import os
import stat

import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from privacy.accounts import theirs
from privacy.oracles import clipped_one, norm_of, unit_gradients
from privacy.test_passes import MODELS, VOCABULARY
from privacy.test_private_training import documents, flat, lstm
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.grid_gaussian import GridGaussian, grid_of
from tightlip.privacy import PrivateTraining
from tightlip.privacy.accounting import Mechanism, epsilon_spent
from tightlip.privacy.adaptive import MECHANISMS, AdaptiveSpec, clip_shares, joint_multiplier
from tightlip.privacy.clipping import Clip
from tightlip.privacy.composition import compose_runs
from tightlip.privacy.layers import Layout
from tightlip.privacy.ledger import MECHANISM, exact_figures, read_ledger
from tightlip.privacy.noise_schedules import PRIVATE_COUNTS, SCALES, CPUNoise, ReleasedNoise
from tightlip.privacy.passes import Passes, Physical
from tightlip.privacy.plans import Terms
from tightlip.privacy.private_training import SHAPES

pytestmark = pytest.mark.slow

LEAST = 0.05


def spec(mode="clip", **changed):
    return AdaptiveSpec(mode=mode, least_weight=LEAST, **{"facts": {"model": "m"}, **changed})


def weights(count=60, seed=0):
    return np.random.default_rng(seed).uniform(LEAST, 1, count)


def adaptive(folder, mode="clip", *, model=None, optimizer=None, texts=None, rho=None, **settings):
    model = model or lstm()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    texts = texts or documents()
    own = {
        name: settings.pop(name)
        for name in ("least_clip", "gamma_floor", "release_noise", "averaging", "accountant")
        if name in settings
    }
    chosen = {"expected_batch": 10, "steps": 20, "insecure_seed": 7, **settings}
    if "epsilon" not in chosen:
        chosen = {"noise_multiplier": 1.0, **chosen}
    return PrivateTraining(
        model, optimizer, texts, ledger=folder / "ledger.json", adaptive=spec(mode, **own),
        weights=weights(len(texts)) if rho is None else rho, **chosen,
    )  # fmt: skip


# clip: shares


@settings(max_examples=100, deadline=None)
@given(
    rho=st.lists(st.floats(0, 1), min_size=1, max_size=30),
    least_weight=st.floats(0.001, 0.9),
    least_clip=st.floats(0.001, 1),
)
def test_a_share_falls_with_the_weight_and_stays_in_its_range(rho, least_weight, least_clip):
    rho = np.sort(np.clip(rho, least_weight, 1))
    shares = clip_shares(rho, least_weight, least_clip)
    assert (shares > 0).all()
    assert (shares <= 1).all()
    assert (np.diff(shares) <= 0).all()
    exact = 1 - (1 - least_clip) * (rho - least_weight) / (1 - least_weight)
    assert (shares <= exact + 1e-15).all()
    np.testing.assert_allclose(shares, exact, rtol=2e-7, atol=1e-12)
    assert (clip_shares(rho, least_weight, 1.0) == 1).all()


# clip: no unit moves the sum by more than its own bound


def physical(shares, *, rows_per_unit=2, width=5, keep=None):
    """Units side by side; of the others than `keep` no target, so that they add nothing."""
    draw = torch.Generator().manual_seed(0)
    count = len(shares)
    shape = (count * rows_per_unit, width)
    ids = torch.randint(0, VOCABULARY, shape, generator=draw)
    targets = torch.randint(0, VOCABULARY, shape, generator=draw)
    if keep is not None:
        is_kept = torch.arange(count).repeat_interleave(rows_per_unit) == keep
        targets = torch.where(is_kept[:, None], targets, -100)
    layout = Layout(num_units=count, rows_per_unit=rows_per_unit)
    own = torch.full((count,), rows_per_unit)
    return Physical.of(ids, targets, own, layout, torch.from_numpy(np.asarray(shares, float)))


def own_gradients(model, batch):
    """Oracle: each unit by plain autograd. Targets stand one place after what predicts them."""
    rows = batch.layout.rows_per_unit
    found = []
    for unit in range(batch.layout.num_units):
        own = slice(unit * rows, (unit + 1) * rows)
        logits = model(batch.ids_BT[own], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), batch.targets_BT[own], reduction="none"
        )
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        gradients = torch.autograd.grad(losses.mean(1).mean(), [*trained.values()])
        found.append(dict(zip(trained, gradients, strict=True)))
    return found


@pytest.fixture
def traced(monkeypatch):
    """The traced graph itself; what a compiler makes of it is the compiler's own affair."""
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("name", "way", "per_layer"),
    [
        *((name, way, False) for name in MODELS for way in ("eager", "slow")),
        *((name, "compile", False) for name in ("lstm", "gpt2")),
        *((name, way, True) for name in ("gru", "llama") for way in ("eager", "slow", "compile")),
    ],
)
def test_every_unit_is_clipped_to_its_own_bound_whichever_way(name, way, per_layer):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    passes = Passes(model, Clip(norm=0.05, per_layer=per_layer), way=way)
    # Twice: a prepared pass must not keep the first batch's shares.
    for shares in ([1.0, 0.3, 0.01, 0.7], [0.2, 1.0, 0.6, 0.05]):
        found = passes(physical(shares)).gradients
        own = own_gradients(model, physical(shares))
        expected = [
            clipped_one(each, 0.05 * share, per_layer=per_layer)
            for each, share in zip(own, shares, strict=True)
        ]
        for parameter, gradient in found.items():
            torch.testing.assert_close(gradient, sum(each[parameter] for each in expected))
        for unit, share in enumerate(shares):
            alone = passes(physical(shares, keep=unit)).gradients
            assert 0 < norm_of(alone) <= 0.05 * share


@pytest.fixture
def without_onednn():
    """bfloat16 products without oneDNN: its kernels are illegal instructions on some machines."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.mark.usefixtures("without_onednn", "traced")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("name", "way"),
    [("transformer", "eager"), ("gpt2", "eager"), ("llama", "eager"), ("gpt2", "compile")],
)
def test_rounding_takes_no_unit_above_its_own_bound(name, way, bf16):
    torch.manual_seed(0)
    model = MODELS[name]().float()
    shares = clip_shares(np.random.default_rng(1).uniform(LEAST, 1, 12), LEAST, 0.01)
    passes = Passes(model, Clip(norm=0.003), way=way, bf16=bf16)
    for unit, share in enumerate(shares):
        norm = norm_of(passes(physical(shares, keep=unit)).gradients)
        assert 0.98 * 0.003 * share < norm <= 0.003 * share


def test_a_document_more_moves_the_sum_by_its_own_bound_at_most(tmp_path):
    texts = [text for text in documents(30) if len(text) > 1]
    rho, model = weights(len(texts)), lstm().double()
    training = adaptive(
        tmp_path, model=model, texts=texts, rho=rho, noise_multiplier=0.0, clip_norm=0.01,
        least_clip=0.1, physical_rows=7,
    )  # fmt: skip
    before = flat(model).clone()

    def summed(units):
        training._sampler.draw = lambda: units
        training.step()
        moved = (before - flat(model)) * 10
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(before.clone(), model.parameters())
        return moved

    everybody, bounds = np.arange(len(texts)), 0.01 * clip_shares(rho, LEAST, 0.1)
    whole = summed(everybody)
    reached = []
    for unit in everybody:
        moved = float((whole - summed(np.delete(everybody, unit))).norm())
        assert moved <= bounds[unit] * (1 + 1e-9)
        reached.append(moved / bounds[unit])
    assert np.median(reached) > 0.99
    expected = [
        clipped_one(each, bound)
        for each, bound in zip(
            [unit_gradients(model, text[None], text[None])[0] for text in texts],
            bounds, strict=True,
        )
    ]  # fmt: skip
    total = torch.cat([sum(each[name] for each in expected).flatten() for name in expected[0]])
    # What is charged for rounding comes off every bound.
    torch.testing.assert_close(whole, total, rtol=1e-4, atol=1e-7)


def test_a_users_weight_is_the_mean_over_the_rows_that_speak_for_it(tmp_path):
    texts, rho = documents(60), weights()
    training = adaptive(
        tmp_path, texts=texts, rho=rho, users=[number % 6 for number in range(60)],
        expected_batch=3, rows_per_unit=4,
    )  # fmt: skip
    rows_of, rho_U = training._drawn(np.arange(6))
    assert all(len(rows) == 4 for rows in rows_of)
    np.testing.assert_allclose(rho_U, [rho[rows].mean() for rows in rows_of])


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("way", ["eager", "slow"])
def test_with_all_bounds_whole_it_is_ordinary_private_training_bit_for_bit(kind, way, tmp_path):
    models = [lstm(), lstm()]
    runs = []
    for number, model in enumerate(models):
        more = {"adaptive": spec(least_clip=1.0), "weights": weights()} if number else {}
        runs.append(
            PrivateTraining(
                model, getattr(torch.optim, kind)(model.parameters(), lr=0.1), documents(),
                ledger=tmp_path / str(number) / "ledger.json", noise_multiplier=0.7,
                expected_batch=10, steps=6, insecure_seed=3, clip_norm=0.1, way=way, **more,
            )
        )  # fmt: skip
    for _ in range(6):
        for run in runs:
            run.step()
    assert torch.equal(flat(models[0]), flat(models[1]))
    plain, own = (run.guarantee() for run in runs)
    assert (own["epsilon"], own["epsilon_rdp"]) == (plain["epsilon"], plain["epsilon_rdp"])


# scale and as-published: how much noise there is


def noise_of_steps(folder, monkeypatch, mode, *, factor=1.0, steps=8, **settings):
    """Each step's update over its recorded scale, where documents have nothing to predict."""
    plain, scales = CPUNoise.add, []

    def off(self, tensors, *, scale, share):
        scales.append(scale)
        plain(self, tensors, scale=factor * scale, share=share)

    monkeypatch.setattr(CPUNoise, "add", off)
    model = lstm()
    texts = [torch.zeros(1, dtype=torch.long) for _ in range(60)]
    training = adaptive(
        folder, mode, model=model, texts=texts, noise_multiplier=1.5, clip_norm=0.2, **settings
    )
    updates = []
    for _ in range(steps):
        before = flat(model).clone()
        training.step()
        updates.append((before - flat(model)).numpy() * 10)
    return updates, scales, training


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (1.5, False), (1 / 1.5, False)])
def test_the_noise_of_scale_is_what_was_charged_and_a_wrong_one_is_found_out(
    factor, fits, tmp_path, monkeypatch
):
    updates, _, _ = noise_of_steps(tmp_path, monkeypatch, "scale", factor=factor, averaging=0.5)
    charged = [json.loads(line) for line in (tmp_path / SCALES).read_text().splitlines()]
    sigmas = [line["noise_multiplier"] for line in charged]
    assert len({*sigmas}) > 2
    scaled = [update / (0.2 * sigma) for update, sigma in zip(updates, sigmas, strict=True)]
    assert (stats.kstest(np.concatenate(scaled), "norm").pvalue > 1e-3) == fits
    # Each step by itself: the spread of so many entries is known within a few per cent.
    within = [abs(np.std(each) - 1) < 0.1 for each in scaled]
    assert all(within) == fits


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (1.5, False)])
def test_the_noise_as_published_is_that_of_the_batchs_mean_weight(
    factor, fits, tmp_path, monkeypatch
):
    seen, plain = [], PrivateTraining._drawn
    monkeypatch.setattr(
        PrivateTraining, "_drawn", lambda self, units: seen.append(plain(self, units)) or seen[-1]
    )
    updates, _, _ = noise_of_steps(tmp_path, monkeypatch, "as-published", factor=factor)
    gammas = [rho_U.mean() for _, rho_U in seen]
    spread = [
        np.std(update) / (0.2 * 1.5 * gamma) for update, gamma in zip(updates, gammas, strict=True)
    ]
    assert all(abs(each - 1) < 0.1 for each in spread) == fits


def test_an_empty_batch_as_published_gets_the_whole_noise(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tightlip.privacy.sampling.PoissonSampler.draw", lambda self: np.empty(0, np.int64)
    )
    _, scales, _ = noise_of_steps(tmp_path, monkeypatch, "as-published", steps=1)
    assert scales == [1.5 * 0.2]


# scale: what the noise depends on


def test_the_scale_of_a_step_follows_from_earlier_releases_only(tmp_path, monkeypatch):
    told = iter([0.6, -3.0, 0.0, 5.0, 0.4, 0.4])
    monkeypatch.setattr(ReleasedNoise, "released", lambda self, rho: next(told))
    _, scales, _ = noise_of_steps(tmp_path, monkeypatch, "scale", steps=6, averaging=0.5)
    average, expected = 1.0, []
    for release in (0.6, -3.0, 0.0, 5.0, 0.4, 0.4):
        expected.append(1.5 * min(max(average, 0.5), 1.0) * 0.2)
        # A release of 0 or less counts as the floor, which is 0.5.
        average = 0.5 * average + 0.5 * (release if release > 0 else 0.5)
    assert scales == pytest.approx(expected)


@pytest.mark.parametrize("step", [0, 3])
def test_other_weights_in_a_step_change_the_noise_after_it_and_not_its_own(step, tmp_path):
    plain, found = PrivateTraining._drawn, []
    for other in (False, True):
        count = iter(range(100))

        def drawn(self, units, other=other, count=count):
            rows_of, rho_U = plain(self, units)
            changed = other and next(count) == step
            return rows_of, np.full_like(rho_U, LEAST) if changed else rho_U

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PrivateTraining, "_drawn", drawn)
            more = {"averaging": 0.0, "release_noise": 0.5, "gamma_floor": 0.2}
            found.append(noise_of_steps(tmp_path / str(other), patch, "scale", **more)[1])
    assert found[0][: step + 1] == found[1][: step + 1]
    assert found[0][step + 1] != found[1][step + 1]


def test_a_release_is_the_mean_weight_over_the_expected_batch_with_the_noise_it_is_charged_for(
    tmp_path,
):
    rho, z = weights(12), 3.0
    schedule = ReleasedNoise(spec("scale", release_noise=z), 1.0, 10, tmp_path, budget=None)
    told = np.array([schedule.released(rho) for _ in range(4000)])
    centre, half = (1 + LEAST) / 2, (1 - LEAST) / 2
    mean = centre + (rho - centre).sum() / 10
    assert stats.kstest((told - mean) * 10 / (z * half), "norm").pvalue > 1e-3
    assert stats.kstest((told - mean) * 10 / (1.5 * z * half), "norm").pvalue < 1e-3
    # One unit more moves the sum by at most h, whichever its weight.
    for one in (LEAST, centre, 1.0):
        schedule._noise = GridGaussian(insecure_seed=0)
        without = schedule.released(rho)
        schedule._noise = GridGaussian(insecure_seed=0)
        assert abs(schedule.released(np.append(rho, one)) - without) * 10 <= half * (1 + grid_of(z))


# scale: what is spent


def recorded(folder):
    lines = (folder / SCALES).read_text().splitlines()
    return [json.loads(line)["noise_multiplier"] for line in lines]


def run_out(training):
    while training.has_budget():
        training.step()
    return training.guarantee()


TARGET = {"epsilon": 6.0, "noise_multiplier": 1.6, "steps": 300, "gamma_floor": 0.6}


@pytest.mark.parametrize("least", ["random", "all least", "all most"])
def test_what_is_spent_is_what_a_hand_composed_accountant_says(least, tmp_path):
    rho = {"random": weights(), "all least": np.full(60, LEAST), "all most": np.ones(60)}[least]
    training = adaptive(tmp_path, "scale", rho=rho, averaging=0.7, **TARGET)
    record = run_out(training)
    own, z = record["adaptive"], record["adaptive"]["release_noise"]
    assert z == pytest.approx(16.0)
    sigmas = recorded(tmp_path)
    assert len(sigmas) == record["steps"] < 300
    by_hand = RdpAccountant([own["order"]])
    for sigma in sigmas:
        theirs(by_hand, joint_multiplier(sigma, z), 10 / 60, 1)
    assert record["adaptive_state"]["rdp"] == pytest.approx(float(by_hand._rdp[0]), rel=1e-6)
    assert by_hand.get_epsilon(record["delta"]) <= 6.0
    theirs(by_hand, joint_multiplier(training.schedule.next_noise(), z), 10 / 60, 1)
    assert by_hand.get_epsilon(record["delta"]) > 6.0
    with pytest.raises(GuaranteeError, match="another would pass epsilon=6"):
        training.step()
    assert read_ledger(tmp_path / "ledger.json")["steps"] == record["steps"]


@settings(max_examples=12, deadline=None)
@given(told=st.lists(st.floats(-1e6, 1e6), max_size=25), averaging=st.floats(0, 0.99))
def test_whatever_is_released_the_target_is_kept(told, averaging, tmp_path_factory):
    """Releases as an enemy would choose them: the noise falls and rises at will."""
    folder = tmp_path_factory.mktemp("enemy")
    with pytest.MonkeyPatch.context() as patch:
        left = iter(told)
        patch.setattr(ReleasedNoise, "released", lambda self, rho: next(left, 0.0))
        training = adaptive(folder, "scale", averaging=averaging, **TARGET)
        patch.setattr(training, "_clipped_sum", lambda units, drawn: ([], None))
        patch.setattr(training._passes, "parameters", {})
        patch.setattr(training, "_ask_for_mixing", lambda: None)  # nothing is trained
        record = run_out(training)
    by_hand = RdpAccountant([record["adaptive"]["order"]])
    for sigma in recorded(folder):
        theirs(by_hand, joint_multiplier(sigma, 16.0), 10 / 60, 1)
    assert by_hand.get_epsilon(record["delta"]) <= 6.0
    assert record["epsilon"] <= 6.0


def test_the_promise_is_fixed_before_training_and_is_the_budget_not_the_spend(tmp_path):
    training = adaptive(tmp_path, "scale", **TARGET)
    said = {training.ledger.record()["epsilon"]}
    for _ in range(3):
        training.step()
        said.add(read_ledger(tmp_path / "ledger.json")["epsilon"])
    said.add(training.guarantee()["epsilon"])
    assert said == {6.0}


def test_where_the_floor_is_below_the_target_the_floor_is_promised(tmp_path):
    training = adaptive(tmp_path, "scale", epsilon=50.0, noise_multiplier=2.0, steps=5)
    floor = Mechanism(noise_multiplier=joint_multiplier(1.0, 20.0), sampling_rate=10 / 60)
    expected = epsilon_spent(floor, 5, training.delta)
    assert run_out(training)["epsilon"] == pytest.approx(expected)
    assert expected < 50


@pytest.mark.parametrize("accountant", ["filter", "floor"])
def test_without_a_target_every_planned_step_is_charged_at_the_floor(accountant, tmp_path):
    training = adaptive(tmp_path, "scale", accountant=accountant, steps=4)
    floor = Mechanism(noise_multiplier=joint_multiplier(0.5, 10.0), sampling_rate=10 / 60)
    training.step()
    record = training.guarantee()
    assert record["epsilon"] == pytest.approx(epsilon_spent(floor, 4, record["delta"]))
    assert record["noise_multiplier"] == floor.noise_multiplier


def test_with_the_floor_accountant_a_target_is_met_and_no_run_ends_early(tmp_path):
    training = adaptive(tmp_path, "scale", accountant="floor", epsilon=6.0, steps=12)
    record = run_out(training)
    assert record["steps"] == 12
    assert 5.9 < record["epsilon"] <= 6.0
    floor = Mechanism(noise_multiplier=record["noise_multiplier"], sampling_rate=10 / 60)
    assert record["epsilon"] == epsilon_spent(floor, 12, record["delta"])


@pytest.mark.parametrize("told", [-5.0, 0.7])
def test_with_a_target_alone_all_planned_steps_are_taken_whatever_is_released(
    told, tmp_path, monkeypatch
):
    monkeypatch.setattr(ReleasedNoise, "released", lambda self, rho: told)
    training = adaptive(tmp_path, "scale", epsilon=6.0, steps=25, averaging=0.5)
    record = run_out(training)
    assert record["steps"] == len(recorded(tmp_path)) == 25
    assert 5.9 < record["epsilon"] <= 6.0
    z = record["adaptive"]["release_noise"]
    least = min(joint_multiplier(sigma, z) for sigma in recorded(tmp_path))
    by_hand = theirs(PLDAccountant(), least, 10 / 60, 25).get_epsilon(record["delta"])
    assert by_hand <= record["epsilon"] * (1 + 1e-3)  # theirs has another interval
    assert (by_hand > 5.9) == (told < 0)
    with pytest.raises(GuaranteeError, match="another would pass epsilon=6"):
        training.step()


# What is on record, and when


class Killed(BaseException):
    """Stands in for the process dying on the spot."""


@pytest.mark.parametrize("where", ["released", "clipped", "updated"])
def test_a_step_that_dies_anywhere_is_charged_and_charged_again_when_repeated(
    where, tmp_path, monkeypatch
):
    training = adaptive(tmp_path, "scale", insecure_seed=None, **TARGET)
    training.step()
    before = read_ledger(tmp_path / "ledger.json")

    def die(*_, **__):
        raise Killed

    model = flat(training.model).clone()
    target = {
        "released": (training.schedule, "released"), "clipped": (training, "_clipped_sum"),
        "updated": (training.optimizer, "step"),
    }[where]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(*target, die)
        with pytest.raises(Killed):
            training.step()
    assert torch.equal(flat(training.model), model)
    there = read_ledger(tmp_path / "ledger.json")
    assert there["steps"] == 2
    assert there["adaptive_state"]["rdp"] > before["adaptive_state"]["rdp"]
    training.close()
    resumed = adaptive(tmp_path, "scale", insecure_seed=None, **TARGET)
    assert resumed.plan.budget.spent == there["adaptive_state"]["rdp"]
    assert resumed.schedule.average == there["adaptive_state"]["average"]
    resumed.step()
    after = read_ledger(tmp_path / "ledger.json")
    assert after["steps"] == 3
    assert after["adaptive_state"]["rdp"] > there["adaptive_state"]["rdp"]


def test_a_settled_run_goes_on_with_its_last_release(tmp_path):
    training = adaptive(tmp_path, "scale", **TARGET)
    for _ in range(3):
        training.step()
    training.settle()
    average = training.schedule.average
    training.close()
    assert adaptive(tmp_path, "scale", **TARGET).schedule.average == average != 1.0


@pytest.mark.parametrize(
    "state", [None, {}, {"average": 0.9}, {"average": 0.9, "rdp": 0.0}, {"average": "x", "rdp": 9}]
)
def test_a_ledger_that_lost_what_releases_cost_is_refused(state, tmp_path):
    training = adaptive(tmp_path, "scale", **TARGET)
    training.step()
    training.close()
    record = read_ledger(tmp_path / "ledger.json")
    record = {name: value for name, value in record.items() if name != "adaptive_state"}
    changed = record if state is None else record | {"adaptive_state": state}
    (tmp_path / "ledger.json").write_text(json.dumps(changed))
    with pytest.raises(GuaranteeError, match="damaged"):
        adaptive(tmp_path, "scale", **TARGET)


def test_a_ledger_taken_back_behind_its_releases_is_refused(tmp_path):
    training = adaptive(tmp_path, "scale", **TARGET)
    training.step()
    training.settle()
    earlier = (tmp_path / "ledger.json").read_bytes()
    for _ in range(2):
        training.step()
    training.close()
    (tmp_path / "ledger.json").write_bytes(earlier)  # as a power cut may
    with pytest.raises(GuaranteeError, match="3 steps"):
        adaptive(tmp_path, "scale", **TARGET)


def test_the_line_of_a_step_that_was_never_charged_is_forgotten(tmp_path):
    training = adaptive(tmp_path, "scale", **TARGET)
    training.step()
    training.close()
    lines = (tmp_path / SCALES).read_bytes()
    (tmp_path / SCALES).write_bytes(lines + lines)
    adaptive(tmp_path, "scale", **TARGET).close()
    assert (tmp_path / SCALES).read_bytes() == lines


@pytest.mark.parametrize("mode", ["clip", "scale"])
def test_weights_said_to_be_unsound_are_refused_in_python_too(mode):
    with pytest.raises(GuaranteeError, match="could promise nothing"):
        spec(mode, facts={"is_sound": False})
    assert spec("as-published", facts={"is_sound": False}).mode == "as-published"


def test_steps_beyond_the_plan_are_promised_what_they_cost_at_the_least_noise_or_the_target(
    tmp_path,
):
    """Their number counts while every run gets so far, whatever it releases; then the target."""
    training = adaptive(tmp_path, "scale", **{**TARGET, "steps": 1})
    told = [training.epsilon]
    while training.may_step():
        training.step()
        told.append(training.epsilon)
        assert training.exact_record()["epsilon"] == told[-1]
    assert told == sorted(told)
    for steps, epsilon in enumerate(told):
        at_least_noise = epsilon_spent(training.mechanism, max(steps, 1), training.delta)
        assert epsilon >= min(at_least_noise, TARGET["epsilon"]) * 0.9999
    assert told[1] < told[2] < TARGET["epsilon"] == told[-1]


def test_no_mode_goes_on_in_anothers_ledger_and_none_is_called_like_another(tmp_path):
    assert len({MECHANISM, *MECHANISMS.values()}) == 4
    adaptive(tmp_path, "clip").close()
    for mode in ("scale", "as-published"):
        with pytest.raises(GuaranteeError, match="was begun with mechanism="):
            adaptive(tmp_path, mode)
    with pytest.raises(GuaranteeError, match="was begun with adaptive="):
        adaptive(tmp_path, "clip", least_clip=0.5)
    with pytest.raises(GuaranteeError, match="was begun with mechanism="):
        PrivateTraining(
            (model := lstm()), torch.optim.SGD(model.parameters(), lr=1.0), documents(),
            ledger=tmp_path / "ledger.json", noise_multiplier=1.0, expected_batch=10, steps=20,
            insecure_seed=7,
        )  # fmt: skip


def test_what_batches_weighed_is_kept_from_the_ledger_and_from_everybody_else(
    tmp_path, monkeypatch
):
    _, scales, training = noise_of_steps(tmp_path, monkeypatch, "as-published")
    gammas = [scale / (1.5 * 0.2) for scale in scales]
    on_the_way = (tmp_path / "ledger.json").read_text()
    private = tmp_path / PRIVATE_COUNTS
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    record = training.guarantee()
    said = on_the_way + json.dumps(record)
    assert not any(str(gamma)[:5] in said for gamma in gammas)
    # Shapes whose rows round otherwise beside others, as on some CPUs, are kept in a private file.
    left = sorted({*os.listdir(tmp_path)} - {SHAPES})
    assert left == ["_ledger.json.lock", "ledger.json", private.name]
    by_hand = PLDAccountant(value_discretization_interval=1e-3)
    for gamma in gammas:
        theirs(by_hand, 1.5 * gamma, 10 / 60, 1)
    expected = by_hand.get_epsilon(record["delta"])
    assert expected <= record["epsilon"] <= 1.06 * expected
    assert json.loads(on_the_way)["epsilon"] >= record["epsilon"]


def test_a_run_as_published_goes_on_with_its_counts_or_not_at_all(tmp_path):
    training = adaptive(tmp_path, "as-published")
    for _ in range(4):
        training.step()
    training.settle()
    training.close()
    resumed = adaptive(tmp_path, "as-published")
    assert int(resumed.schedule._counts.sum()) == resumed.ledger.steps == 4
    resumed.step()
    resumed.close()
    (tmp_path / PRIVATE_COUNTS).unlink()
    with pytest.raises(GuaranteeError, match="should stand there"):
        adaptive(tmp_path, "as-published")


@pytest.mark.parametrize("mode", ["clip", "scale", "as-published"])
def test_no_weight_of_anybody_is_on_disk(mode, tmp_path):
    rho = weights()
    training = adaptive(tmp_path, mode, rho=rho, users=[n % 20 for n in range(60)])
    for _ in range(3):
        training.step()
    training.guarantee()
    told = "".join(path.read_text(errors="replace") for path in tmp_path.iterdir())
    private = [*rho, *clip_shares(rho, LEAST, 0.2)]
    assert not any(str(value)[:8] in told for value in private if value not in (LEAST, 1.0))


# Several runs together


def test_scale_runs_are_composed_by_their_budgets_or_at_the_least_noise_they_could_have(tmp_path):
    users = list(range(60))
    one, other = (
        run_out(adaptive(tmp_path / name, "scale", users=users, insecure_seed=None, **TARGET))
        for name in "ab"
    )
    assert one["steps"] < 300
    joint = compose_runs([one, other])
    order, budget = (one["adaptive"][name] for name in ("order", "rdp_budget"))
    by_budgets, _ = compute_epsilon([order], [2 * budget], one["delta"])
    least = Mechanism(noise_multiplier=joint_multiplier(0.96, 16.0), sampling_rate=10 / 60)
    assert by_budgets < epsilon_spent(least, 600, one["delta"])
    assert joint["epsilon"] == pytest.approx(by_budgets, rel=1e-6)
    assert f"at order {order}" in joint["because"]
    assert joint["standing"] == "proved"
    floor = [run | {"adaptive": without_filter(run["adaptive"])} for run in (one, other)]
    joint = compose_runs(floor, delta=one["delta"])
    assert joint["epsilon"] == pytest.approx(epsilon_spent(least, 600, one["delta"]), rel=1e-3)
    assert "the least that they could have" in joint["because"]
    assert joint["epsilon_as_published"] is None
    assert exact_figures(one)["epsilon"] == one["epsilon"]


def without_filter(adaptive):
    return {
        name: value
        for name, value in adaptive.items()
        if name not in ("epsilon", "order", "rdp_budget")
    }


def test_a_run_as_published_takes_the_proof_from_all_it_is_composed_with(tmp_path):
    users = list(range(60))
    published = adaptive(
        tmp_path / "a", "as-published", users=users, steps=2, insecure_seed=None, terms=Terms()
    )
    alone = run_out(published)
    assert alone["standing"] == "as published"  # whatever the terms say
    assert "one update shows it" in alone["because"]
    joint = compose_runs(
        [run_out(published), run_out(adaptive(tmp_path / "b", users=users, steps=2))]
    )
    assert joint["standing"] == "as published"
    assert joint["epsilon"] is not None
    least = [Mechanism(noise_multiplier=LEAST, sampling_rate=10 / 60), 2, joint["delta"]]
    assert joint["epsilon"] >= epsilon_spent(*least)


def test_weights_and_settings_that_cannot_be_are_refused(tmp_path):
    for rho, words in [
        (weights(59), "59 weights for 60 rows"),
        (np.full(60, 0.01), "not between least_weight=0.05 and 1"),
        (np.full(60, np.nan), "not between least_weight"),
        (np.full(60, 1.5), "not between least_weight"),
    ]:
        with pytest.raises(UsageError, match=words):
            adaptive(tmp_path, rho=rho)
    for mode, changed, words in [
        ("scale", {"noise_multiplier": 0.0}, "nothing to scale"),
        ("as-published", {"epsilon": 3.0}, "epsilon=3 cannot be a target"),
        ("scale", {"epsilon": 0.05, "noise_multiplier": 0.3}, "in its first step"),
        ("scale", {"epsilon": 1.0, "release_noise": 0.3}, "release_noise=0.3 alone spends more"),
        ("scale", {"gamma_floor": 0.0}, "gamma_floor=0.0 is out of range"),
        ("clip", {"least_clip": 1.2}, "least_clip=1.2 is out of range"),
        ("scale", {"averaging": 1.0}, "averaging=1.0 is out of range"),
        ("sideways", {}, "Unknown adaptive 'sideways'"),
    ]:
        with pytest.raises(UsageError, match=words):
            adaptive(tmp_path, mode, **changed)
    with pytest.raises(UsageError, match="belong together"):
        PrivateTraining(
            (model := lstm()), torch.optim.SGD(model.parameters(), lr=1.0), documents(),
            ledger=tmp_path / "ledger.json", noise_multiplier=1.0, adaptive=spec(),
        )  # fmt: skip
