"""`tightlip represent train` as typed: killed and started again, refused in a line, several seeds."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vectors.toy_corpora import toy_corpus

pytestmark = pytest.mark.slow

FLAGS = (
    *("--label", "topic", "--private", "age", "--extractor", "bag", "--dimensions", "8"),
    *("--epsilon", "50", "--epochs", "3", "--device", "cpu"),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "texts.parquet"
    pq.write_table(pa.Table.from_pylist(toy_corpus(120)), path)
    return path


def halves(run):
    """Every byte that is deployed."""
    return {
        path.relative_to(run): path.read_bytes()
        for half in ("device", "server")
        for path in sorted((run / half).rglob("*"))
        if path.is_file()
    }


def test_killed_before_any_of_its_files_it_goes_on_to_the_same_halves(command, corpus, tmp_path):
    whole = command("represent", "train", corpus, *FLAGS, "--out", tmp_path / "whole")
    assert whole.status == 0, whole.err
    wanted = halves(tmp_path / "whole")
    assert whole.renames > 8
    for rename in range(1, whole.renames + 1, 5):
        out = tmp_path / f"killed-{rename}"
        killed = command(
            "represent", "train", corpus, *FLAGS, "--out", out, die_before_rename=rename
        )
        assert killed.status == -9
        again = command("represent", "train", corpus, *FLAGS, "--out", out)
        assert again.status == 0, again.err
        assert halves(out) == wanted
        assert not (out / "checkpoint").exists()
        left = [path for path in out.rglob(".*") if "partial" in path.name and path.is_dir()]
        assert left == []


def test_it_says_what_was_learnt_and_what_a_vector_promises(command, corpus, tmp_path):
    done = command("represent", "train", corpus, *FLAGS, "--out", tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert f"{metrics['test_accuracy']:.3f}" in done.out
    assert "ε = 50.00 at δ = 1e-05 (proved)" in done.out
    assert f"represent attack {tmp_path / 'run'}" in done.out


def test_several_seeds_are_told_with_their_spread(command, corpus, tmp_path):
    done = command("represent", "train", corpus, *FLAGS, "--seeds", "2", "--out", tmp_path / "runs")
    assert done.status == 0, done.err
    summary = json.loads((tmp_path / "runs" / "summary.json").read_text())
    found = summary["test_accuracy"]
    assert f"{found['mean']:.3f} ± {found['spread']:.3f}" in done.out
    assert (tmp_path / "runs" / "seed-1" / "device").is_dir()
    assert done.out.splitlines()[-1].endswith(f"tightlip represent attack {tmp_path / 'runs'}")


@pytest.mark.parametrize(
    ("flags", "because"),
    [
        (("--label", "sign"), "no column 'sign'"),
        (("--private", "age,topic"), "both the label"),
        (("--extractor", "bga"), "Closest: bag"),
        (("--method", "none"), "means nothing"),
        (("--seeds", "1"), "no spread"),
        (("--device", "tpu9"), "Unknown device"),
        (("--bins", "age"), "does not say where to cut"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(command, corpus, tmp_path, flags, because):
    done = command("represent", "train", corpus, *FLAGS, *flags, "--out", tmp_path / "run")
    assert done.status == 2
    assert because in done.refusal
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_share_of_an_epoch_is_refused(command, corpus, tmp_path):
    done = command("represent", "train", corpus, *FLAGS, "--epochs", "1.5", "--out", tmp_path / "r")
    assert done.status == 2
    assert "--epochs" in done.err
    assert not (tmp_path / "r").exists()


def test_a_refused_option_waits_for_no_torch(corpus, tmp_path):
    words = ["tightlip", "represent", "train", str(corpus), "--label", "topic", "--method", "none"]
    words += ["--epsilon", "3", "--out", str(tmp_path / "run")]
    program = f"""
import sys
from tightlip.cli.main import main
sys.argv = {words!r}
try:
    main()
except SystemExit as end:
    print(end.code, [name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "epsilon=3.0 means nothing" in done.stderr
    assert done.stdout == "2 []\n"


@pytest.mark.parametrize("words", [("audit",), ("ledger",), ("compare",)])
def test_what_is_for_language_models_says_that_this_run_is_none(command, corpus, tmp_path, words):
    run = tmp_path / "run"
    assert command("represent", "train", corpus, *FLAGS, "--epochs", "1", "--out", run).status == 0
    done = command(*words, run, *([run] if words == ("compare",) else []))
    assert done.status == 2, done.err
    assert f"{run} is a run of `tightlip represent train`" in done.refusal


def test_on_the_bundled_plays_a_bag_learns_more_than_the_most_frequent_genre(command, tmp_path):
    """Through noise that a vector's ε of 8 proves; far more seldom than 1 in 10,000 by chance."""
    done = command(
        *("represent", "train", "bundled", "--label", "genre", "--private", "play,gender"),
        *("--extractor", "bag", "--epsilon", "8", "--epochs", "2", "--batch-size", "64"),
        *("--dimensions", "32", "--device", "cpu", "--out", tmp_path / "run"),
    )
    assert done.status == 0, done.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    # 700 test texts: the standard error of an accuracy near 0.4 is 0.0185.
    assert metrics["test_accuracy"] > metrics["majority_accuracy"] + 0.03


def test_export_needs_to_know_what_for(command, corpus, tmp_path):
    command("represent", "train", corpus, *FLAGS, "--out", tmp_path / "run")
    assert "Add --onnx" in command("represent", "export", tmp_path / "run" / "device").refusal
    assert "Give" in command("represent", "export", tmp_path / "run", "--onnx").refusal
