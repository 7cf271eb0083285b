"""`tightlip compare` as a command: what it prints, what it refuses, and how it goes on."""

import json
import random
import shutil

import pytest

import tightlip
from tightlip.core.checksums import LIST

pytestmark = pytest.mark.slow

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"]
RECIPE = {
    "embedding_size": 8,
    "hidden_size": 8,
    "num_layers": 1,
    "learning_rate": 0.02,
    "epochs": 2.0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs on one corpus with canaries in it."""
    folder = tmp_path_factory.mktemp("place")
    draw = random.Random(0)
    documents = [
        (f"user {user}", " ".join(draw.choices(WORDS, k=5)))
        for user in range(12)
        for _ in range(2 + user)
    ]
    tightlip.plant_canaries(
        documents, folder / "planted", templates=["My code is {digits:2}"], repetitions=[1, 6]
    )
    prepared = tightlip.prepare(folder / "planted/corpus.parquet", folder / "corpus")
    tightlip.train(prepared, folder / "runs/plain", **RECIPE)
    tightlip.train(prepared, folder / "runs/again", **RECIPE, seed=1)
    return folder


def compare(command, runs, out, *more, key, **how):
    arguments = [runs / "plain", runs / "again", "--key", key, "--out", out, "--device", "cpu"]
    return command("compare", *arguments, "--num-bootstraps", "100", *more, **how)


@pytest.fixture(scope="module")
def whole(command, place, tmp_path_factory):
    """A comparison that nobody interrupted: how it ended, and what it left."""
    folder = tmp_path_factory.mktemp("whole")
    runs = shutil.copytree(place / "runs", folder / "runs")
    ran = compare(command, runs, folder / "out", key=place / "planted/key.json")
    assert ran.status == 0, ran.err
    return ran, files_in(folder / "out")


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_table_and_the_way_to_the_page_are_printed(whole):
    ran, files = whole
    assert sorted(files) == ["comparison.csv", "comparison.html", "comparison.json"]
    lines = ran.out.splitlines()
    (perplexity,) = [line for line in lines if line.startswith("Validation perplexity")]
    shown = [row["perplexity"]["value"] for row in json.loads(files["comparison.json"])["runs"]]
    assert [float(cell) for cell in perplexity.split()[2:]] == pytest.approx(shown, rel=0.01)
    for measure in (
        "Leaks",
        "Unique by tokens",
        "Exposure, 6× (bits)",
        "Tab, planted",
        "Membership AUC (min-k%)",
    ):
        assert any(line.startswith(measure) for line in lines), measure
    assert "none (measured only)" in ran.out
    assert lines[-1].endswith("out/comparison.html")


def killed_at(ran):
    """Renames to die before: in the first run's measures, in the second's, and at the very end."""
    return (ran.renames // 4, 3 * ran.renames // 4, ran.renames)


def test_killed_anywhere_it_goes_on_to_the_same_files(command, place, whole, tmp_path):
    ran, expected = whole
    key = place / "planted/key.json"
    for number in killed_at(ran):
        folder = tmp_path / str(number)
        runs = shutil.copytree(place / "runs", folder / "runs")
        killed = compare(command, runs, folder / "out", key=key, die_before_rename=number)
        assert killed.status == -9
        for path in runs.glob("*/measures/*/*.json"):
            if not path.name.startswith("."):
                json.loads(path.read_text())  # whole, or not there
        again = compare(command, runs, folder / "out", key=key)
        assert again.status == 0, again.err
        assert files_in(folder / "out") == expected
        left = {path.name for path in runs.glob("*/measures/*/*")}
        assert left - {LIST} == {"exposures.json", "groups.json", "leakage.json", "membership.json"}


def test_what_is_there_is_not_scanned_again(command, place, whole, tmp_path):
    runs = shutil.copytree(place / "runs", tmp_path / "runs")
    key = place / "planted/key.json"
    first = compare(command, runs, tmp_path / "out", key=key)
    assert first.scans
    second = compare(command, runs, tmp_path / "out", key=key)
    assert second.status == 0
    assert second.scans == [], second.err
    assert second.out == first.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("runs/plain",), "One model was given, and a comparison needs different ones"),
        (("runs/plain", "runs"), "config.json"),
        (("runs/plain", "runs/again", "--key", "nokey.json"), "nokey.json"),
        (("runs/plain", "runs/again", "--tolerance", "2"), "tolerance=2 is out of range"),
        (("runs/plain", "runs/again", "--at-perplexity", "0"), "at_perplexity=0 is out of range"),
        (("runs/plain", "runs/again", "--reference", "planted"), "has no config.json"),
        (("runs/plain", "runs/again", "--out", "planted"), "holds other files"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(command, place, tmp_path, arguments, reason):
    given = [
        place / word if word.startswith(("runs", "nokey", "planted")) else word
        for word in arguments
    ]
    out = [] if "--out" in arguments else ["--out", tmp_path / "o"]
    ran = command("compare", *given, *out)
    assert ran.status == 2, ran.err
    assert reason in ran.refusal
    assert not (tmp_path / "o").exists()


def test_canaries_that_the_runs_never_saw_are_said_to_be_so(command, place, tmp_path):
    other = [("user 1", "ant bee cat")] * 20
    tightlip.plant_canaries(
        other, tmp_path / "other", templates=["My code is {digits:2}"], repetitions=[5], seed=3
    )
    runs = shutil.copytree(place / "runs", tmp_path / "runs")
    ran = compare(command, runs, tmp_path / "out", key=tmp_path / "other/key.json")
    assert ran.status == 0, ran.err
    rows = json.loads((tmp_path / "out/comparison.json").read_text())["runs"]
    for row in rows:
        assert any("None of the 1 planted canaries stands in" in said for said in row["verdicts"])
