"""Nothing is removed that is not ours, and a refusal leaves nothing private behind."""

import shutil

import pytest

from faults.cases import SMALL, write_place
from tightlip.core.run_folder import go_back_to

pytestmark = pytest.mark.slow
TRAIN = ("train", "corpus.parquet", *SMALL)


@pytest.fixture
def place(shared, tmp_path):
    return shutil.copytree(shared("faults", write_place), tmp_path / "place")


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_report_is_not_written_into_a_run_that_has_scans(place, command):
    assert command("membership", "run", "--num-bootstraps", "100", place=place).status == 0
    before = names(place / "run")
    ran = command("audit", "run", "--out", "run", place=place)
    assert (ran.status, names(place / "run")) == (2, before)
    assert "holds other files" in ran.refusal


@pytest.mark.parametrize("flags", [(), ("--no-keep-scan",), ("--redact",)])
def test_folders_of_others_that_are_called_like_ours_stay(place, command, flags):
    for path in ("docs/scan/passport.pdf", "docs/snapshots/holiday.jpg"):
        (place / path).parent.mkdir(parents=True)
        (place / path).touch()
    command("audit", "run", "--out", "docs", *flags, place=place)
    assert (place / "docs/scan/passport.pdf").exists()
    assert (place / "docs/snapshots/holiday.jpg").exists()


@pytest.mark.parametrize("made", ["model", "config.toml", "a finished run", "nothing"])
def test_a_refused_training_leaves_no_text(place, command, made):
    out, flags = place / "out", ()
    if made == "a finished run":
        shutil.copytree(place / "run", out)
        shutil.rmtree(out / "corpus")
        flags = ("--seed", "5")
    elif made == "nothing":
        flags = ("--mitigation", "dp", "--epsilon", "8", "--delta", "0.5")
    else:
        out.mkdir()
        (out / made).write_text("a = 1\n")
    before = names(out)
    ran = command(*TRAIN, "--out", "out", *flags, place=place)
    assert ran.status in (2, 3), ran.err
    assert names(out) == before


def test_what_only_looks_half_written_stays(place, command):
    kept = ["theirs/deep/.film.20240101.partial", ".theirs.backup.999999.partial", ".theirs.lock"]
    for path in (*kept, "theirs/notes.txt"):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text("mine")
    assert command(*TRAIN, "--out", "theirs", place=place).status == 2
    assert all((place / path).read_text() == "mine" for path in kept)


def test_a_link_in_the_place_of_snapshots_is_not_followed(place):
    shutil.rmtree(place / "run/snapshots")
    (place / "elsewhere/epoch-7").mkdir(parents=True)
    (place / "run/snapshots").symlink_to(place / "elsewhere")
    go_back_to(place / "run", [])
    assert (place / "elsewhere/epoch-7").is_dir()


def test_an_attack_is_not_written_among_other_files(place, command):
    (place / "out").mkdir()
    (place / "out/report.html").write_text("mine")
    how = ("--attackers", "logistic", "--num-bootstraps", "100")
    ran = command("represent", "attack", "vectors", "--out", "out", *how, place=place)
    assert ran.status == 2
    assert (place / "out/report.html").read_text() == "mine"


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"snapshot": "epoch-1"}', "\x00"])
def test_damaged_metrics_are_refused_in_a_line(place, command, line):
    (place / "run/metrics.jsonl").write_text(line + "\n")
    for words in (("audit", "run", "--out", "out"), ("membership", "run"), ("ledger", "run")):
        ran = command(*words, place=place)
        assert ran.status == 2
        assert "metrics.jsonl is damaged" in ran.refusal


@pytest.mark.parametrize("words", [("prepare",), ("represent", "train", "--label", "team")])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("c.csv", "user1,my PIN is 4711\nbob,hello\n"),
        ("c.csv", "bob,my PIN is 4711\nalice,hello\n"),
        ("c.jsonl", '{"my PIN is 4711": "x", "user": "u"}\n'),
    ],
)
def test_no_error_quotes_a_row(place, command, words, file, content):
    (place / file).write_text(content)
    ran = command(*words, file, "--out", "out", place=place)
    assert ran.status == 2, ran.out
    assert not any(word in ran.out + ran.err for word in ("4711", "bob", "alice", "user1"))
