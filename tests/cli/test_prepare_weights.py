"""`tightlip prepare --privacy-weights`: killed anywhere, it leaves whole weights or none, and goes on."""

import json
import shutil

import numpy as np
import pytest

from tightlip.core.checksums import LIST
from tightlip.corpus.privacy_weights import read_weights
from training.test_weighing import documents, save_model

pytestmark = pytest.mark.slow

SHARD = 300


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    save_model(folder / "public-model", "gpt2")
    for name, seed in (("corpus", 3), ("public", 9)):
        lines = [json.dumps(row) + "\n" for row in documents(40, seed=seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def preparing(place, out, *others):
    return ("prepare", place / "corpus.jsonl", "--out", out, *others)


def weighing(place, out, *others):
    public = ("--public-model", place / "public-model", "--public-corpus", place / "public.jsonl")
    return (*preparing(place, out), "--privacy-weights", *public, *others)


def weights_there(folder):
    """The weights, or None; half of some would be an error that says damaged."""
    return read_weights(folder) if (folder / "weights").exists() else None


def test_killed_before_a_rename_no_half_weights_stand_and_the_same_command_goes_on(
    place, command, tmp_path
):
    plain, undisturbed = tmp_path / "plain", tmp_path / "undisturbed"
    assert command(*preparing(place, plain)).status == 0
    shutil.copytree(plain, undisturbed)
    ran = command(*weighing(place, undisturbed), shard_tokens=SHARD)
    assert ran.status == 0, ran.err
    expected = read_weights(undisturbed)
    for number in [*range(2, ran.renames, 4), ran.renames]:
        out = shutil.copytree(plain, tmp_path / f"killed-{number}")
        killed = command(*weighing(place, out), shard_tokens=SHARD, die_before_rename=number)
        assert killed.status == -9
        assert weights_there(out) is None
        finished = len(list(out.glob("scan/*/[0-9]*.npz")))
        again = command(*weighing(place, out), shard_tokens=SHARD)
        assert again.status == 0, again.err
        assert len(again.scans) == len(ran.scans) - finished, "a finished shard was scanned again"
        assert read_weights(out).rho.tolist() == expected.rho.tolist()
        assert [path.name for path in out.glob(".*")] == [LIST]


def test_killed_while_replacing_the_old_the_new_or_none_stand(place, command, tmp_path):
    out = tmp_path / "p"
    assert command(*weighing(place, out)).status == 0
    old = read_weights(out)
    changed = weighing(place, out, "--weights", "public-rank")
    for number in range(1, 20):
        killed = command(*changed, die_before_rename=number)
        found = weights_there(out)
        if killed.status == 0:
            break
        assert killed.status == -9
        assert found is None or found.rho.tolist() == old.rho.tolist()
    assert read_weights(out).info["normalisation"] == "public-rank"
    assert [path.name for path in out.glob(".*")] == [LIST]


def test_the_command_says_what_it_weighed_by(place, command, tmp_path):
    out = tmp_path / "p"
    ran = command(*weighing(place, out, "--least-weight", "0.1"))
    assert "by public-model against public.jsonl (public): median" in ran.out
    assert "weights.html" in ran.out
    assert read_weights(out).rho.min() >= 0.1
    words = command(
        *preparing(place, out), "--privacy-weights", "--public-corpus", place / "public.jsonl"
    )
    assert "frequency estimate, no language model" in words.out
    assert np.isfinite(read_weights(out).rho).all()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--privacy-weights",), "neither is given"),
        (("--least-weight", "0.2"), "Add --privacy-weights"),
        (("--device", "cpu"), "Add --privacy-weights"),
        (("--privacy-weights", "--public-model", "nowhere", "--weights", "rank"), "does not exist"),
    ],
)
def test_flags_that_do_nothing_or_miss_something_are_refused_before_any_work(
    place, command, tmp_path, flags, said
):
    ran = command(*preparing(place, tmp_path / "p", *flags))
    assert ran.status == 2
    assert said in ran.refusal
    assert not (tmp_path / "p").exists()
