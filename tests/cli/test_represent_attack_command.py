"""`tightlip represent attack` as a stranger types it."""

import json

import pyarrow.parquet as pq
import pytest

from tightlip.corpus.bundled import demo_speeches


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
    for name in ("attack.json", "report.html"):
        assert (runs / "noisy" / name).stat().st_mode & 0o077 == 0


def test_asked_the_same_again_it_answers_from_the_folder(command, runs):
    command("represent", "attack", runs / "noisy", *QUICK)
    again = command("represent", "attack", runs / "noisy", *QUICK)
    assert "1 of 1 runs were measured before" in again.out


def test_killed_between_two_runs_it_goes_on_with_the_second(command, runs, tmp_path):
    """The first run's figures are there; the page is written at the end or not at all."""
    asked = (runs / "noisy", runs / "open", *QUICK, "--seed", 5, "--out", tmp_path / "both")
    killed = command("represent", "attack", *asked, die_before_rename=2)
    assert killed.status == -9
    assert not (tmp_path / "both").exists()
    done = command("represent", "attack", *asked)
    assert done.status == 0, done.err
    assert "1 of 2 runs were measured before" in done.out
    assert (tmp_path / "both" / "report.html").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--attackers", "mpl"), "Unknown attacker 'mpl'. Available: mlp, logistic"),
        (("--copies", 1), "copies=1 leaves nothing to average"),
        (("--attributes", "age"), "no column 'age'. Columns there:"),
        (("--entities", "nowhere.txt"), "nowhere.txt is no file of names"),
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
