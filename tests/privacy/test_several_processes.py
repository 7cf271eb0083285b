"""Two and three processes train as one does: their sums, their noise, their ledger, and their ends."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scipy import stats

from privacy import together
from privacy.oracles import clipped_sum, norm_of, row_loss
from tightlip.core.grid_gaussian import grid_of
from tightlip.privacy.ledger import read_ledger

pytestmark = pytest.mark.slow

SEVERAL = [2, 3]
TESTS = Path(__file__).parents[1]
IN_NOISE = (together.NOISE * together.CLIP, together.NUM_USERS)  # σ·C, and what a sum is divided by


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder in which all groups of processes have left their results."""
    folder = tmp_path_factory.mktemp("together")
    script = [sys.executable, "-W", "ignore", TESTS / "privacy" / "together.py", folder]
    paths = os.pathsep.join([str(TESTS), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=540)
    errors = [each.read_text() for each in folder.glob("[123]/error-*.txt")]
    assert not errors, "\n".join(errors)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def result(left):
    def read(name, size, rank=0):
        return torch.load(left / str(size) / f"{name}-{rank}.pt", weights_only=False)

    return read


def on_all_ranks(result, name, size):
    return [result(name, size, rank) for rank in range(size)]


def are_equal(one, other):
    return [*one] == [*other] and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("size", SEVERAL)
@pytest.mark.parametrize("name", ["exact", "sharded-exact", "few", "sharded-few"])
def test_with_exact_sums_the_weights_are_those_of_one_process_to_the_bit(result, size, name):
    alone = result(name, 1)
    for each in on_all_ranks(result, name, size):
        assert are_equal(each["weights"], alone["weights"])
        assert each["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert each["num_targets"] == alone["num_targets"]


@pytest.mark.parametrize("name", ["lora", "sharded-lora", "slow", "bf16"])
def test_adapters_narrow_passes_and_slow_ones_too(result, name):
    for each in on_all_ranks(result, name, 2):
        assert are_equal(each["weights"], result(name, 1)["weights"])


@pytest.mark.parametrize("size", SEVERAL)
def test_with_float_sums_the_weights_are_those_of_one_process_but_for_rounding(result, size):
    alone = result("floats", 1)["weights"]
    every = on_all_ranks(result, "floats", size)
    assert all(are_equal(each["weights"], every[0]["weights"]) for each in every)
    for name, weight in alone.items():
        torch.testing.assert_close(every[0]["weights"][name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, *SEVERAL])
@pytest.mark.parametrize("name", ["sum", "sharded-sum"])
def test_the_sum_is_that_of_each_persons_clipped_gradient(result, size, name):
    expected = by_brute_force(together.chain())
    for (each,) in on_all_ranks(result, name, size):
        for parameter, gradient in expected.items():
            found = each[parameter].double() * together.NUM_USERS
            torch.testing.assert_close(found, gradient.double(), rtol=1e-3, atol=1e-4)


def by_brute_force(model, clip_norm=together.CLIP):
    """Oracle: everybody's gradient by plain autograd, row after row, clipped and added up."""
    by_user = [[] for _ in range(together.NUM_USERS)]
    for user, text in zip(together.users(), together.texts(), strict=True):
        by_user[user].append(text)
    trained = dict(model.named_parameters())
    every = []
    for texts in by_user:
        loss = sum(row_loss(model, text, text) for text in texts) / len(texts)
        own = torch.autograd.grad(loss, [*trained.values()])
        every.append(dict(zip(trained, own, strict=True)))
    assert any(norm_of(each) > clip_norm for each in every)
    return clipped_sum(every, clip_norm)


def noise_in(each, without):
    """Normal numbers that a release should hold: what is left of it without the sum."""
    scale, batch = IN_NOISE
    return torch.cat(
        [
            ((each[name].double() * batch - without[name].double()) / scale).flatten()
            for name in each
        ]
    )


def spread_is_right(normals):
    """Whether the variance of so many numbers is 1, but for a chance of one in a million."""
    squares, count = float(normals.square().sum()), len(normals)
    return stats.chi2.ppf(5e-7, count) < squares < stats.chi2.ppf(1 - 5e-7, count)


@pytest.mark.parametrize("size", [1, *SEVERAL])
@pytest.mark.parametrize("name", ["noise", "sharded-noise", "exact-noise"])
def test_noise_is_added_once_with_the_right_spread(result, size, name):
    sums = by_brute_force(together.wide())
    for each in result(name, size):
        normals = noise_in(each, sums)
        assert spread_is_right(normals)
        assert not spread_is_right(1.5 * normals)
        assert not spread_is_right(math.sqrt(size + 1) * normals)
        assert stats.kstest(normals.numpy(), "norm").pvalue > 1e-6


@pytest.mark.parametrize("size", [1, *SEVERAL])
@pytest.mark.parametrize("name", ["noise", "sharded-noise", "exact-noise"])
def test_what_is_released_lies_on_the_grid(result, size, name):
    scale, batch = IN_NOISE
    for each in result(name, size):
        for gradient in each.values():
            # 12 is no power of two: a float32 of cells over 12 is off by its own last place.
            cells = gradient.double() * batch / grid_of(scale)
            assert float((cells - cells.round()).abs().max()) < 1e-3
            assert len(cells.round().unique()) > 1


@pytest.mark.parametrize("size", SEVERAL)
@pytest.mark.parametrize("name", ["noise", "sharded-noise"])
def test_every_process_is_given_the_same_noise_also_where_nobodys_text_reaches(result, size, name):
    every = on_all_ranks(result, name, size)
    for step, first in enumerate(every[0]):
        assert all(are_equal(each[step], first) for each in every)
        untouched = first["embed.weight"][20:].double() * IN_NOISE[1] / IN_NOISE[0]
        assert spread_is_right(untouched.flatten())
    assert not are_equal(every[0][0], every[0][1])


@pytest.mark.parametrize("size", SEVERAL)
@pytest.mark.parametrize("name", ["noise", "seeded-noise"])
def test_no_two_owners_draw_the_same_noise(result, size, name):
    sums = by_brute_force(together.wide())["embed.weight"]
    (released,) = result(name, size)[:1]
    normals = noise_in({"x": released["embed.weight"]}, {"x": sums})
    parts = normals[: len(normals) // size * size].view(size, -1)
    for one in range(size):
        for other in range(one):
            together_ = float(torch.corrcoef(parts[[one, other]])[0, 1])
            assert abs(together_) < 5 / math.sqrt(parts.shape[1])


@pytest.mark.parametrize("size", SEVERAL)
@pytest.mark.parametrize("name", ["hole", "sharded-hole"])
def test_a_person_without_a_finite_gradient_counts_nothing_on_any_process(result, size, name):
    alone = result("hole", 1)
    for each in on_all_ranks(result, name, size):
        for parameter, gradient in alone.items():
            assert bool(gradient.isfinite().all())
            torch.testing.assert_close(each[parameter], gradient, rtol=1e-4, atol=1e-6)


def test_an_empty_draw_is_a_step_of_noise_alone(result, left):
    for each in on_all_ranks(result, "nobody", 2):
        assert each["loss"] == [0, 0]
        assert each["num_targets"] == [0, 0]
        assert each["steps"] == 2
    before = dict(together.chain().named_parameters())
    after = result("nobody", 2)["weights"]
    assert all(bool((after[name] != each).all()) for name, each in before.items())


@pytest.mark.parametrize("name", ["epsilon", "scale", "as-published", "clip"])
def test_epsilon_is_that_of_one_process_and_all_say_it(result, left, name):
    alone = result(name, 1)
    for each in on_all_ranks(result, name, 2):
        for figure in ("epsilon", "promised", "spent", "steps", "standing"):
            assert each[figure] == pytest.approx(alone[figure]), figure
    there = read_ledger(left / "2" / name / "ledger.json")
    assert there["steps"] == 2
    assert there["epsilon"] == alone["epsilon"]
    assert {*there} == {*read_ledger(left / "1" / name / "ledger.json")}


def test_what_an_adaptive_run_releases_is_released_once(result):
    first, second = on_all_ranks(result, "scale", 2)
    assert len(first["scales"]) == 2
    assert first["scales"] == second["scales"] == result("scale", 1)["scales"]
    assert are_equal(first["weights"], second["weights"])


def test_only_the_first_process_keeps_a_ledger(left):
    assert (left / "2" / "ledger-of-0" / "ledger.json").exists()
    assert not (left / "2" / "ledger-of-1").exists()


@pytest.mark.parametrize("size", SEVERAL)
def test_processes_that_differ_are_refused_on_all_of_them(result, size):
    every = on_all_ranks(result, "refusals", size)
    for told in every:
        assert "The processes differ in settings" in told["settings"]
        assert "The processes differ in the texts they train on" in told["texts"]
        assert "The processes differ in the texts they train on" in told["people"]
        assert "The processes differ in the weights they start from" in told["weights"]
        assert "The processes differ in the weights they start from" in told["base"]
        assert "way='mapped' with a model that is sharded" in told["way"]
        assert "DistributedDataParallel in it" in told["wrapped"]
        assert "no replicas of shards" in told["replicas"]
        assert "Leave mp_policy out" in told["narrow"]


def test_one_process_refuses_nothing_of_that(result):
    assert {*result("refusals", 1).values()} == {"nothing was refused"}


def test_weights_that_drift_apart_take_the_promise_back(result):
    for told in on_all_ranks(result, "drifted", 2):
        assert (told["standing"], told["epsilon"]) == ("measured only", None)
        assert "The processes' weights differ" in told["because"]
    assert result("drifted", 1)["standing"] != "measured only"


def test_a_killed_process_ends_the_others_and_nothing_applied_goes_uncounted(left):
    kills = left / "kills"
    applied = 0
    for life, dies in (("life-0", 1), ("life-1", 0)):
        statuses = json.loads((kills / life / "statuses.json").read_text())
        assert statuses.pop(dies) == -9
        assert all(status == 1 for status in statuses)  # they end by themselves, with an error
        applied += max(len(each.read_bytes()) for each in (kills / life).glob("applied-*"))
        steps = read_ledger(kills / life / "ledger.json")["steps"]
        assert applied <= steps < together.PLANNED


def test_the_same_command_goes_on_also_on_another_number_of_processes(left):
    kills = left / "kills"
    assert json.loads((kills / "statuses.json").read_text()) == [0]
    record = read_ledger(kills / "killed" / "ledger.json")
    before = read_ledger(kills / "life-1" / "ledger.json")
    assert record["steps"] == together.PLANNED
    assert len((kills / "life-2" / "applied-0").read_bytes()) == together.PLANNED - before["steps"]
    assert record["run"] == before["run"]
