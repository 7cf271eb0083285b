import math

import pytest

from tightlip.training.config import TrainConfig
from tightlip.training.plan import Plan


def plan(steps_per_epoch=10, **settings):
    return Plan(config=TrainConfig.of(**settings), steps_per_epoch=steps_per_epoch)


def names(a_plan):
    steps = range(1, a_plan.num_steps + 1)
    return {step: a_plan.snapshot_name(step) for step in steps if a_plan.snapshot_name(step)}


def test_epochs_and_steps_say_how_long():
    assert plan(epochs=3).num_steps == 30
    assert plan(epochs=0.25).num_steps == 2
    assert plan(epochs=0.001).num_steps == 1
    assert plan(steps=7).num_steps == 7


def test_a_snapshot_follows_each_epoch():
    assert names(plan(epochs=2)) == {10: "epoch-1", 20: "epoch-2"}
    assert names(plan(epochs=2, snapshot="none")) == {}


def test_the_first_quarter_and_every_n_steps_add_snapshots_under_one_name_each():
    found = names(plan(epochs=2, first_quarter=True, snapshot_steps=5, steps_per_epoch=20))
    assert list(found) == [5, 10, 15, 20, 25, 30, 35, 40]
    assert [found[5], found[10], found[20], found[35]] == [
        "epoch-0.25",
        "step-10",
        "epoch-1",
        "step-35",
    ]
    assert names(plan(steps=9, snapshot="none", snapshot_steps=4)) == {4: "step-4", 8: "step-8"}


def test_a_run_that_ends_inside_an_epoch_leaves_a_snapshot_of_its_end():
    assert names(plan(steps=13)) == {10: "epoch-1", 13: "step-13"}


def test_an_epoch_of_one_step_has_no_quarter():
    assert names(plan(epochs=2, first_quarter=True, steps_per_epoch=1)) == {
        1: "epoch-1",
        2: "epoch-2",
    }


def test_metrics_are_taken_after_epochs_snapshots_and_the_end():
    a_plan = plan(steps=23, snapshot="none", snapshot_steps=7)
    assert [s for s in range(1, 24) if a_plan.is_recorded(s)] == [7, 10, 14, 20, 21, 23]


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_follows_its_closed_form(schedule, warmup):
    a_plan = plan(steps=20, schedule=schedule, warmup_steps=warmup, learning_rate=0.5)
    shape = {
        "constant": lambda share: 1.0,
        "linear": lambda share: 1 - share,
        "cosine": lambda share: math.cos(math.pi / 2 * share) ** 2,
    }[schedule]
    for step in range(20):
        wanted = (step + 1) / warmup if step < warmup else shape((step - warmup) / (20 - warmup))
        assert a_plan.learning_rate(step) == pytest.approx(0.5 * wanted)
