"""`tightlip represent attack` as a stranger types it."""

import json
import shutil

import pyarrow.parquet as pq
import pytest

from by_hand import unlisted
from tightlip.corpus.bundled import demo_speeches

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(command, tmp_path_factory):
    """Two small runs, with noise and without."""
    folder = tmp_path_factory.mktemp("runs")
    pq.write_table(demo_speeches().take(list(range(0, 7000, 14))), folder / "plays.parquet")
    for name, flags in {"noisy": ["--epsilon", 50], "open": ["--method", "none"]}.items():
        made = command(
            "represent", "train", folder / "plays.parquet", "--out", folder / name,
            "--label", "genre", "--private", "gender", "--extractor", "bag", "--epochs", 1, *flags,
        )  # fmt: skip
        assert made.status == 0, made.err
    return folder


QUICK = (
    "--attackers",
    "logistic,averaged",
    "--copies",
    4,
    "--num-bootstraps",
    100,
    "--no-pictures",
)


def test_one_run_is_told_in_the_terminal_and_written_beside_it(command, runs):
    done = command("represent", "attack", runs / "noisy", *QUICK)
    assert done.status == 0, done.err
    assert "From one vector" in done.out
    assert "Empirical privacy, 1 − X" in done.out
    assert "what these averages cost" in done.out
    assert f"{runs}/noisy/report.html" in done.out
    (result,) = json.loads((runs / "noisy" / "attack.json").read_text(encoding="utf-8"))["runs"]
    assert result["releases"]["num"] == 4
    assert result["releases"]["any_two_texts"] == result["releases"]["epsilon"], "no word is masked"
    assert "proved; any two texts" in " ".join(done.out.split())
    for name in ("attack.json", "report.html"):
        assert (runs / "noisy" / name).stat().st_mode & 0o077 == 0


def test_its_figures_are_gates(command, runs):
    failed = command(
        "represent",
        "attack",
        runs / "noisy",
        *QUICK,
        "--fail-on",
        "accuracy>=0",
        "--fail-on",
        "privacy>1",
    )
    assert failed.status == 1
    assert "failed on noisy: accuracy>=0" in failed.err
    assert "privacy>1" not in failed.err


def test_asked_the_same_again_it_answers_from_the_folder(command, runs):
    command("represent", "attack", runs / "noisy", *QUICK)
    again = command("represent", "attack", runs / "noisy", *QUICK)
    assert "1 of 1 runs were measured before" in again.out


def test_killed_between_two_runs_it_goes_on_with_the_second(command, runs, tmp_path):
    """The first run's figures are there; the page is written at the end or not at all."""
    asked = (runs / "noisy", runs / "open", *QUICK, "--seed", 5, "--out", tmp_path / "both")
    killed = command("represent", "attack", *asked, die_before_rename=3)
    assert killed.status == -9
    assert not (tmp_path / "both").exists()
    done = command("represent", "attack", *asked)
    assert done.status == 0, done.err
    assert "1 of 2 runs were measured before" in done.out
    assert (tmp_path / "both" / "report.html").exists()


def test_an_earlier_versions_interval_of_a_chosen_gap_is_left_out(command, runs, tmp_path):
    """The figures are still taken from the folder: what is wrong in them is not."""
    shutil.copytree(runs / "noisy", tmp_path / "noisy")
    command("represent", "attack", tmp_path / "noisy", *QUICK)
    path = tmp_path / "noisy" / "attack.json"
    before = json.loads(path.read_text(encoding="utf-8"))
    found = before["runs"][0]["fairness"]["gender"]
    found["groups"]["neither"] = next(iter(found["groups"].values()))
    before["runs"][0]["attributes"]["gender"]["values"].append("neither")
    assert len(found["groups"]) > 2
    found["gap"] = {"value": 0.2, "low": 0.1, "high": 0.3}
    unlisted(path).write_text(json.dumps(before), encoding="utf-8")
    asked = (tmp_path / "noisy", *QUICK, "--out", tmp_path / "elsewhere")
    again = command("represent", "attack", *asked)
    assert "1 of 1 runs were measured before" in again.out, again.err
    after = json.loads((tmp_path / "elsewhere" / "attack.json").read_text(encoding="utf-8"))[
        "runs"
    ][0]
    assert after["fairness"]["gender"]["gap"] == {"value": 0.2, "low": None, "high": None}


def test_halves_of_two_trainings_in_one_folder_are_refused(command, runs, tmp_path):
    mixed = tmp_path / "mixed"
    shutil.copytree(runs / "noisy", mixed)
    shutil.rmtree(mixed / "server")
    shutil.copytree(runs / "open" / "server", mixed / "server")
    refused = command("represent", "attack", mixed, *QUICK)
    assert refused.status == 2
    assert "come from two trainings" in refused.refusal


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--attackers", "mpl"), "Unknown attacker 'mpl'. Available: mlp, logistic"),
        (("--copies", 1), "copies=1 leaves nothing to average"),
        (("--attributes", "age"), "no column 'age'. Columns there:"),
        (("--entities", "nowhere.txt"), "nowhere.txt is not a file of names"),
    ],
)
def test_a_refusal_is_one_line_with_the_way_on(command, runs, flags, said):
    refused = command("represent", "attack", runs / "noisy", *flags)
    assert refused.status == 2
    assert said in refused.refusal


def test_a_folder_that_is_no_run_is_refused_with_the_command_that_makes_one(command, tmp_path):
    refused = command("represent", "attack", tmp_path)
    assert refused.status == 2
    assert "tightlip represent train CORPUS --out" in refused.refusal
