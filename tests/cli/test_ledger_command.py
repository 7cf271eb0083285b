import json

import pytest
import typer
from typer.testing import CliRunner

from tightlip.cli import train as command
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.figures import rounded_up
from tightlip.core.run_folder import begin_run, open_run, write_ledger
from tightlip.privacy.accounting import EpsilonMeter, Mechanism, epsilon_spent
from tightlip.privacy.composition import ledger
from tightlip.privacy.ledger import Ledger, guarantee_terms, read_ledger

pytestmark = pytest.mark.slow

MECHANISM = Mechanism(noise_multiplier=2.0, sampling_rate=0.05)
PLAIN = {
    "mechanism": "none",
    **dict.fromkeys(("epsilon", "delta", "unit", "adjacency", "sampling", "accountant")),
    "steps": 40,
    "standing": "measured only",
    "because": "Plain training bounds nobody's influence on the weights.",
    "covers": [],
    "outside": [],
}
app = typer.Typer()
app.command()(command.ledger)


def said(*arguments):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(each) for each in arguments])
    assert result.exception is None, result.exception
    return result.stdout


def private_run(folder, *, steps=60, finished=True, **changed):
    begin_run(folder, {"corpus": {"folder": "corpus"}})
    given = {
        "delta": 1e-5,
        "unit": "user",
        "clip_norm": 1.0,
        "num_units": 1000,
        "expected_batch": 50,
        "corpus_fingerprint": "abc",
        "insecure_seed": False,
        "standing": "proved",
        "because": "Everything that shaped the weights is clipped and noised [by a theorem].",
        "covers": ["weights", "snapshots"],
        "outside": ["audits"],
    } | changed
    terms = guarantee_terms(MECHANISM, **given)
    run = Ledger.begin(folder / "ledger.json", terms, EpsilonMeter(MECHANISM, 1e-5, 100))
    run.steps = steps - 1
    run.charge()
    if finished:
        run.finish()
    return folder


def plain_run(folder):
    begin_run(folder, {"corpus": {"folder": "corpus"}})
    write_ledger(folder, PLAIN)
    return folder


def test_a_run_is_told_with_all_that_stands_behind_its_epsilon(tmp_path):
    text = said(private_run(tmp_path / "run"))
    spent = epsilon_spent(MECHANISM, 60, 1e-5)
    more = epsilon_spent(MECHANISM, 1060, 1e-5)
    assert f"{rounded_up(spent)} (proved; arithmetic not recorded)" in text
    assert f"Another 1,000 steps would bring ε to {rounded_up(more)}." in text
    for words in (
        "1e-05",
        "user",
        "add or remove one user",
        "Poisson",
        "PLD",
        "weights; snapshots",
    ):
        assert words in text
    assert "[by a theorem]" in text
    assert "audits" in text
    assert "ε by RDP" in text
    (published,) = [line for line in text.splitlines() if "Gaussian DP" in line]
    assert "as published in papers; no guarantee" in published
    assert "Insecure" not in text


def test_json_is_the_whole_record_and_what_more_steps_would_cost(tmp_path):
    run = private_run(tmp_path / "run")
    there = json.loads(said(run, "--json"))
    more = there.pop("another_1000_steps")
    assert there == read_ledger(run / "ledger.json")
    assert more == epsilon_spent(MECHANISM, 1060, 1e-5)


def test_a_run_under_way_tells_what_it_has_spent_so_far(tmp_path):
    run = private_run(tmp_path / "run", finished=False)
    assert ledger(run)["epsilon"] == epsilon_spent(MECHANISM, 60, 1e-5)
    assert "60 so far; the run is not finished" in said(run)
    assert ledger(open_run(run))["steps"] == 60


def test_the_ledger_of_a_loop_of_ones_own_is_read_as_a_file_or_by_its_folder(tmp_path):
    (tmp_path / "own").mkdir()
    kept = private_run(tmp_path / "run") / "ledger.json"
    kept.rename(tmp_path / "own" / "ledger.json")
    expected = epsilon_spent(MECHANISM, 60, 1e-5)
    for where in (tmp_path / "own", tmp_path / "own" / "ledger.json"):
        assert json.loads(said(where, "--json"))["epsilon"] == expected


def test_a_fixed_seed_is_said_in_red_wherever_epsilon_is(tmp_path, monkeypatch):
    run = private_run(tmp_path / "run", insecure_seed=True)
    other = private_run(tmp_path / "other")
    monkeypatch.setenv("FORCE_COLOR", "1")
    for text in (said(run), said(run, other)):
        (line,) = [line for line in text.splitlines() if "Insecure" in line]
        assert line.startswith("\x1b[1;31m")
    assert json.loads(said(run, "--json"))["insecure_seed"] is True


def test_a_plain_run_is_measured_only_and_shows_no_figure(tmp_path):
    run = plain_run(tmp_path / "run")
    text = said(run)
    assert "none: measured only" in text
    assert PLAIN["because"] in text
    assert "Another" not in text
    assert ledger(run) == PLAIN | {"another_1000_steps": None}


def test_several_runs_are_composed(tmp_path):
    runs = [private_run(tmp_path / name, steps=30) for name in ("one", "two")]
    there = json.loads(said(*runs, "--json"))
    assert there["epsilon"] == pytest.approx(epsilon_spent(MECHANISM, 60, 1e-5), rel=1e-3)
    assert there["num_runs"] == 2
    text = said(*runs)
    assert f"{rounded_up(there['epsilon'])} (as published)" in text
    assert "all settled beforehand" in there["because"]
    assert "2 runs composed" in text


def test_a_plain_run_among_them_leaves_no_joint_epsilon(tmp_path):
    text = said(private_run(tmp_path / "one"), plain_run(tmp_path / "two"))
    assert "none: measured only" in text
    assert "Run 2 has no ε of its own" in text


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a tightlip run"):
        ledger(tmp_path)
    begin_run(tmp_path / "run", {"corpus": {"folder": "corpus"}})
    with pytest.raises(UsageError, match=r"no ledger\.json yet"):
        ledger(tmp_path / "run")
    (tmp_path / "run/ledger.json").write_text("{")
    with pytest.raises(GuaranteeError, match="damaged"):
        ledger(tmp_path / "run")
    with pytest.raises(UsageError, match="No run was given"):
        ledger()


@pytest.mark.parametrize("epsilon", [0.0, 0.00123, 0.05, 0.1, 2.3, 3.5811, 7.999, 123.456])
def test_a_printed_epsilon_is_never_below_what_was_spent(epsilon):
    assert float(rounded_up(epsilon)) >= epsilon
    assert float(rounded_up(epsilon)) <= epsilon * 1.11 + 1e-12
