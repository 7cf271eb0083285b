"""`tightlip reproduce` as a command: which experiments there are, and what it says of others."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["leakage", "regularization"])
def test_experiments_to_come_are_refused_with_what_there_is(command, tmp_path, name):
    ran = command("reproduce", name, "--out", tmp_path / "out")
    assert ran.status == 2
    assert (
        ran.refusal
        == f"tightlip: The experiment '{name}' is not there yet. Available: adaptive, representation."
    )
    assert not (tmp_path / "out").exists()


def test_a_slip_is_answered_with_the_closest_name(command):
    ran = command("reproduce", "adaptiv")
    assert ran.status == 2
    assert "Closest: adaptive" in ran.refusal


def test_a_corpus_without_public_text_is_refused_before_any_work(command, tmp_path):
    (tmp_path / "mine.csv").write_text("text\nhello there\n", encoding="utf-8")
    ran = command(
        "reproduce", "adaptive", "--corpus", tmp_path / "mine.csv", "--out", tmp_path / "out"
    )
    assert ran.status == 2
    assert "--public-corpus FILE" in ran.refusal
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("experiment", "flag", "other"),
    [("representation", "--unit", "adaptive"), ("adaptive", "--extractor", "representation")],
)
def test_a_flag_of_the_other_experiment_is_refused(command, tmp_path, experiment, flag, other):
    ran = command("reproduce", experiment, flag, "user", "--out", tmp_path / "out")
    assert ran.status == 2
    assert f"{flag} is for the experiment '{other}'" in ran.refusal
    assert not (tmp_path / "out").exists()
