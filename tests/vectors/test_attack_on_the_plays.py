"""On the bundled plays the attack weakens as ε falls; through the whole pipeline on a small run."""

import json
import random
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tightlip
from tightlip.core.errors import UsageError
from tightlip.corpus.bundled import demo_speeches
from tightlip.vectors.attack import AttackInput, attack
from tightlip.vectors.attack_runs import parts_of_run, released_afresh, users_of, what_to_read
from tightlip.vectors.data import load_examples
from tightlip.vectors.encode import load_device
from tightlip.vectors.grid_noise import GridNoise
from tightlip.vectors.guarantees import VectorMechanism
from tightlip.vectors.release import released
from tightlip.vectors.run import represent_train
from tightlip.vectors.settings import AttackSettings

pytestmark = pytest.mark.slow

SMALL = {"label": "play", "private": ("gender",), "extractor": "bag", "dimensions": 32}
QUICK = {"attackers": ["logistic", "averaged"], "copies": 4, "num_bootstraps": 100, "device": "cpu"}


def speeches(num):
    """Some speeches, spread over all plays."""
    rows = [row for row in demo_speeches().to_pylist() if row["gender"]]
    return rows[:: max(1, len(rows) // num)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without noise, whose vectors are made to tell the play."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    represent_train(speeches(2000), out, method="none", epochs=3, **SMALL)
    return out


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "noisy"
    represent_train(speeches(600), out, epsilon=200.0, mechanism="gaussian", epochs=1, **SMALL)
    return out


def test_the_attack_weakens_as_epsilon_falls(plain):
    """Each step down in ε leaves the attacker no better, within intervals; in the end it is blind."""
    examples = load_examples(plain)
    parts, device = parts_of_run(examples), load_device(plain / "device")
    raw = device.extractor.encode(examples.texts, batch_size=64, device="cpu")
    targets, _ = what_to_read(plain, examples, parts, ["play"])
    settings = AttackSettings(attackers=("logistic",), copies=1, num_bootstraps=200, pictures=False)
    found = []
    for epsilon in (None, 2000.0, 100.0, 0.5):
        name = "none" if epsilon is None else "gaussian"
        mechanism = VectorMechanism(mechanism=name, dimensions=raw.shape[1], epsilon=epsilon)
        noise = GridNoise(random.Random(0).randbytes)  # fresh, one run in forty fails by chance
        releases = released_afresh(
            lambda m=mechanism, n=noise: released(raw, m, n), parts, copies=1
        )
        test_users = [users_of(examples)[place] for place in parts.test]
        nothing = np.zeros(len(test_users), dtype=bool)
        heard = AttackInput(
            releases=releases, bare=releases.single, targets=targets, entities=None, users=test_users,
            seen=nothing, main_right=nothing, main_plain=nothing,
        )  # fmt: skip
        found.append(attack(heard, settings)["attributes"]["play"]["attackers"]["logistic"]["all"])
    accuracies = [one["accuracy"] for one in found]
    for before, after in pairwise(accuracies):
        assert after["low"] <= before["high"]
    assert accuracies[0]["low"] > accuracies[-1]["high"]  # it had something to lose
    assert found[0]["above_majority"]["low"] > 0
    assert found[-1]["above_majority"]["low"] <= 0.03
    assert found[-1]["auc"]["low"] <= 0.53


def test_a_run_is_attacked_from_its_folder(noisy):
    report = tightlip.represent_attack(noisy, **QUICK)
    (result,) = report.results
    assert report.page == noisy / "report.html"
    assert oct((noisy / "attack.json").stat().st_mode)[-3:] == "600"
    assert result["releases"]["num"] == 4
    assert result["releases"]["epsilon"] > result["guarantee"]["epsilon"]
    assert set(result["privacy"]) == {"majority", "logistic", "averaged", "strongest", "bare"}
    written = json.loads((noisy / "attack.json").read_text(encoding="utf-8"))
    assert written["runs"][0]["privacy"] == result["privacy"]
    page = report.page.read_text(encoding="utf-8")
    for text in load_examples(noisy).texts[:200]:
        assert len(text) < 20 or text not in page


def test_the_same_question_is_not_asked_twice(noisy):
    first = tightlip.represent_attack(noisy, **QUICK)
    again = tightlip.represent_attack(noisy, **QUICK)
    assert again.num_kept == 1
    assert again.results == first.results
    other = tightlip.represent_attack(noisy, **{**QUICK, "seed": 1})
    assert other.num_kept == 0


def test_a_list_of_names_that_changed_is_another_question(noisy, tmp_path):
    names = tmp_path / "names.txt"
    asked = {**QUICK, "attackers": ["logistic"], "copies": 1, "entities": names, "pictures": False}
    found = []
    for name in ("thou", "thee"):
        names.write_text(name, encoding="utf-8")
        found.append(tightlip.represent_attack(noisy, **asked).results[0]["entities"]["names"])
    assert found == [["thou"], ["thee"]]


def test_several_runs_make_one_page_and_names_and_other_columns_can_be_read(plain, noisy, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("thee\nthou\nNobodyIsCalledThis\n", encoding="utf-8")
    report = tightlip.represent_attack(
        [plain, noisy],
        **QUICK,
        out=tmp_path / "both",
        attributes=["play"],
        entities=names,
        pictures=False,
    )
    assert report.page == tmp_path / "both" / "report.html"
    assert set(report.results[0]["attributes"]) == {"play"}
    found = report.results[0]["privacy"]  # a column that the run was not told is private
    assert found["bare"]["all"]["high"] < found["majority"]["all"]["low"]
    assert "averaged" not in report.results[0]["privacy"]  # bare vectors are the same each time
    assert report.results[0]["releases"] is None
    found = report.results[0]["entities"]
    assert found["names"] == ["thou", "thee"] or found["names"] == ["thee", "thou"]
    assert found["num_left_out"] == 1
    page = report.page.read_text(encoding="utf-8")
    assert "too rare" in page
    assert "NobodyIsCalledThis" not in page


def test_a_folder_of_seeds_is_one_group(tmp_path):
    out = tmp_path / "seeds"
    represent_train(
        speeches(200), out, seeds=2, epsilon=500.0, mechanism="gaussian", epochs=1, **SMALL
    )
    report = tightlip.represent_attack(
        out, attackers=["logistic"], copies=1, num_bootstraps=100, pictures=False
    )
    assert [result["group"] for result in report.results] == ["seeds", "seeds"]
    assert [result["run"] for result in report.results] == ["seeds/seed-0", "seeds/seed-1"]
    assert report.page == out / "report.html"


def test_rows_that_stand_in_train_are_counted_and_left_out_beside(tmp_path):
    rows = speeches(300)
    for place, row in enumerate(rows):
        row["split"] = ("train", "dev", "test")[min(place % 10 // 4, 2)]
    rows += [{**row, "split": "test"} for row in rows[:20] if row["split"] == "train"]
    out = tmp_path / "run"
    represent_train(rows, out, method="none", epochs=1, split="column", **SMALL)
    report = tightlip.represent_attack(
        out, attackers=["logistic"], copies=1, num_bootstraps=100, pictures=False
    )
    (result,) = report.results
    seen = len({row["text"] for row in rows if row["split"] == "train"} & {row["text"] for row in rows if row["split"] == "test"})  # fmt: skip
    assert result["num_seen_in_train"] >= seen >= 6
    assert "unseen" in result["privacy"]["strongest"]
    assert any("also stand in the training part" in note for note in result["notes"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"runs": "nowhere"}, "no finished run"),
        ({"runs": []}, "No run was given"),
        ({"attackers": ["mpl"]}, "Unknown attacker 'mpl'"),
        ({"attributes": ["age"]}, "no column 'age'"),
        ({"entities": "missing.txt"}, r"missing\.txt is not a file of names"),
        ({"entities": "column:age"}, "no column 'age'"),
    ],
)
def test_what_cannot_be_attacked_is_refused_with_the_way_on(noisy, given, said):
    with pytest.raises(UsageError, match=said):
        tightlip.represent_attack(given.pop("runs", noisy), **{**QUICK, **given})


def test_one_run_given_twice_is_refused(noisy):
    with pytest.raises(UsageError, match="twice"):
        tightlip.represent_attack([noisy, noisy / ".." / noisy.name], **QUICK)


def test_without_users_each_row_is_somebodys_own(tmp_path):
    nobody = pa.Table.from_pylist(speeches(200)).drop_columns(["user"])
    pq.write_table(nobody, tmp_path / "plays.parquet")
    out = tmp_path / "run"
    represent_train(tmp_path / "plays.parquet", out, method="none", epochs=1, **SMALL)
    (result,) = tightlip.represent_attack(
        out, attackers=["logistic"], copies=1, num_bootstraps=100, pictures=False
    ).results
    assert result["num_test_users"] == result["num_test"]
    assert any("no users" in note for note in result["notes"])
