"""One run's attack from arrays: who is the strongest, with and without rows seen, what is left out."""

import json
import math

import numpy as np
import pytest

from tightlip.core.errors import UsageError
from tightlip.vectors.attack import AttackInput, Entities, attack
from tightlip.vectors.attack_figures import Target
from tightlip.vectors.attackers import Parts, Reading, Releases
from tightlip.vectors.settings import AttackSettings

SIZES = (200, 60, 100)
FAST = AttackSettings(attackers=("logistic", "averaged"), num_bootstraps=100, copies=16)


def split(rows):
    train, dev, test = np.split(rows, np.cumsum(SIZES)[:-1])
    return Parts(train=train, dev=dev, test=test)


def heard(noise=1.0, *, num_seen=0, with_names=True, unknown=0, seed=0):
    """Two attributes, one in the vectors and one not; and two names."""
    rng = np.random.default_rng(seed)
    total = sum(SIZES)
    codes = rng.integers(0, 2, (4, total))
    codes[3] = rng.random(total) < 0.2
    codes[0, :: unknown or total] = -1 if unknown else codes[0, 0]
    clean = np.zeros((total, 6))
    for place in (0, 2, 3):
        clean[:, place] = 2 * codes[place] - 1
    copies = [clean + noise * rng.standard_normal(clean.shape) for _ in range(16)]
    parts = [split(rows.astype(np.float32)) for rows in (clean, copies[0], np.mean(copies, axis=0))]
    targets = [
        Target(name=name, values=("a", "b"), codes=split(row))
        for name, row in zip("pqxy", codes, strict=True)
    ]
    names = Entities(found_by="a list", targets=targets[2:], num_left_out=0)
    right = rng.random(SIZES[2]) < 0.8
    return AttackInput(
        releases=Releases(single=parts[1], averaged=parts[2]),
        bare=parts[0],
        targets=targets[:2],
        entities=names if with_names else None,
        users=[f"u{n % 25}" for n in range(SIZES[2])],
        seen=np.arange(SIZES[2]) < num_seen,
        main_right=right,
        main_plain=rng.random(SIZES[2]) < 0.5,
    )


@pytest.fixture(scope="module")
def found():
    return attack(heard(num_seen=20), FAST)


def test_what_stands_in_the_vectors_is_found_and_what_does_not_is_not(found):
    spelled, hidden = (found["attributes"][name]["attackers"] for name in "pq")
    assert spelled["logistic"]["all"]["above_majority"]["low"] > 0
    assert hidden["logistic"]["all"]["above_majority"]["low"] <= 0
    assert spelled["bare"]["all"]["accuracy"]["value"] == 1
    values = [
        spelled[name]["all"]["accuracy"]["value"] for name in ("logistic", "averaged", "bare")
    ]
    assert values == sorted(values)


def test_the_strongest_is_one_with_a_single_release(found):
    assert found["attributes"]["p"]["strongest"] == "logistic"
    strongest = found["privacy"]["strongest"]["all"]
    assert strongest == found["privacy"]["logistic"]["all"]
    assert found["privacy"]["averaged"]["all"]["value"] < strongest["value"]


def test_the_strongest_is_chosen_on_the_development_part_not_on_the_test(monkeypatch):
    """One attacker knows the development part and is wrong on the test part; one the reverse."""

    def readings(who, releases, values, **options):
        right = {part: np.eye(2)[getattr(values, part)] for part in ("dev", "test")}
        wrong = {part: 1 - scores for part, scores in right.items()}
        if who == "logistic":
            return Reading(dev=right["dev"], test=wrong["test"], chosen={})
        return Reading(dev=wrong["dev"], test=right["test"], chosen={})

    monkeypatch.setattr("tightlip.vectors.attack.read_attribute", readings)
    settings = AttackSettings(attackers=("trees", "logistic"), num_bootstraps=100, pictures=False)
    found = attack(heard(with_names=False), settings)
    assert found["attributes"]["p"]["strongest"] == "logistic"
    assert found["privacy"]["strongest"]["all"]["value"] == 1
    assert found["privacy"]["trees"]["all"]["value"] == 0


def test_every_figure_comes_with_and_without_rows_that_stand_in_train(found):
    assert found["num_seen_in_train"] == 20
    for figures in (found["main"], found["privacy"]["logistic"], found["entities"]["majority"]):
        assert set(figures) == {"all", "unseen"}
    everyone = attack(heard(), FAST)
    assert set(everyone["main"]) == {"all"}


def test_main_task_figures_are_plain_shares(found):
    run = heard(num_seen=20)
    assert found["main"]["all"]["value"] == pytest.approx(run.main_right.mean())
    assert found["main"]["unseen"]["value"] == pytest.approx(run.main_right[20:].mean())
    assert set(found["fairness"]["p"]["groups"]) == {"a", "b"}


def test_names_get_f1_and_their_baselines(found):
    names = found["entities"]
    assert names["attackers"]["bare"]["all"]["one_minus_f"]["value"] == 0
    assert 0 < names["attackers"]["logistic"]["all"]["one_minus_f_tuned"]["value"] < 1
    assert names["attackers"]["averaged"]["all"]["one_minus_f"]["value"] < 0.05
    assert len(names["each"]["strongest"]) == 2


def test_rows_without_a_value_are_neither_trained_on_nor_judged():
    run = heard(unknown=3, with_names=False, noise=0.1)
    found = attack(run, FAST)["attributes"]["p"]["attackers"]["logistic"]["all"]
    assert found["accuracy"]["value"] == 1  # every known row; a row of -1 is never right
    assert (run.targets[0].codes.test == -1).sum() > 30


def test_the_result_is_plain_json_with_places_for_a_picture(found):
    again = json.loads(json.dumps(found))
    assert again["picture"]["num_points"] == SIZES[2]
    assert len(again["picture"]["before"]) == len(again["picture"]["codes"]["p"]) == SIZES[2]
    assert all(0 <= x <= 1 for place in again["picture"]["after"] for x in place)
    assert math.isfinite(again["main"]["all"]["value"])


def test_values_that_are_users_are_marked():
    run = heard(with_names=False)
    speaker = Target(name="speaker", values=("u1", "u2"), codes=run.targets[0].codes)
    found = attack(
        AttackInput(**{**vars(run), "targets": [speaker]}),
        AttackSettings(attackers=("logistic",), num_bootstraps=100, pictures=False),
    )
    assert found["attributes"]["speaker"]["names_people"]
    assert found["picture"] is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"attackers": ("mpl",)}, "Unknown attacker 'mpl'"),
        ({"attackers": ("averaged",)}, "one release"),
        ({"copies": 1}, "nothing to average"),
        ({"num_bootstraps": 10}, "num_bootstraps=10"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong, said):
    with pytest.raises(UsageError, match=said):
        AttackSettings(**wrong)
