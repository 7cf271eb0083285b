"""`tightlip groups`: figures from plain forward passes, and comparisons that are refused."""

import json
import math
import os
import shutil
import stat
from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch

import tightlip
from cli.held_out_runs import documents, make_run, planted, prepared
from tightlip.core.errors import UsageError
from tightlip.core.run_folder import begin_run
from tightlip.corpus.prepare import open_prepared
from tightlip.models.loading import load_causal_lm, load_tokenizer

pytestmark = pytest.mark.slow

QUICK = {"device": "cpu", "num_bootstraps": 100}
KEYS = {
    "perplexity", "num_users", "num_documents", "users", "top", "low", "gap", "curve", "attributes",
    "notes", "made_from",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    corpus = prepared(folder / "corpus", documents(), holdout=0.25)
    make_run(folder / "plain", corpus, steps=30)
    make_run(folder / "mitigated", corpus, steps=3)
    few = prepared(folder / "few-users", documents(6), tokenizer=None)
    make_run(folder / "few", few, steps=0)
    other_text = prepared(folder / "other-text", documents(seed=1))
    make_run(folder / "other-text-run", other_text, steps=0)
    by_user = prepared(folder / "by-user", documents(50), split="user")
    make_run(folder / "users-held-out", by_user, steps=0)
    none = prepared(folder / "nothing-held-out", documents(4), split="none")
    make_run(folder / "no-held-out", none, steps=0)
    return folder


@torch.inference_mode()
def losses_by_user(run, corpus):
    """Oracle: one document after the other through the model's own loss."""
    model, bos = load_causal_lm(run / "model"), load_tokenizer(run / "model").bos_token_id
    sums, tokens = Counter(), Counter()
    held = corpus.validation
    for number in range(held.num_documents):
        ids = torch.tensor([[bos, *held.document(number).tolist()]])
        user = held.user_names[held.users[number]]
        num_tokens = ids.shape[1] - 1
        sums[user] += float(model(input_ids=ids, labels=ids).loss) * num_tokens
        tokens[user] += num_tokens
    return sums, tokens


def test_figures_are_those_of_plain_forward_passes(runs, command):
    ran = command("groups", runs / "mitigated", "--against", runs / "plain", "--device", "cpu")
    assert ran.status == 0, ran.err
    written = runs / "mitigated/groups.json"
    assert stat.S_IMODE(os.stat(written).st_mode) == 0o600
    found = json.loads(written.read_text())
    assert set(found) == KEYS
    corpus = open_prepared(runs / "corpus")
    (sums, tokens), (plain, _) = (
        losses_by_user(runs / name, corpus) for name in ("mitigated", "plain")
    )
    overall = math.exp(sum(sums.values()) / sum(tokens.values()))
    assert found["perplexity"]["value"] == pytest.approx(overall, rel=1e-4)
    assert found["num_documents"] == corpus.validation.num_documents
    changes = {}
    for row in found["users"]:
        name = row["user"]
        assert row["num_test_tokens"] == tokens[name]
        assert row["perplexity"] == pytest.approx(math.exp(sums[name] / tokens[name]), rel=1e-4)
        assert row["baseline_perplexity"] == pytest.approx(
            math.exp(plain[name] / tokens[name]), rel=1e-4
        )
        changes[name] = row["change"]
    # User n wrote 5 + n documents; a quarter held out, 8 and 9 have ten left each, and 0 and 1 four.
    assert found["top"] == [f"user {number:02d}" for number in (11, 10, 8, 9, 7)]
    assert found["low"] == [f"user {number:02d}" for number in (1, 0, 2, 3, 4)]
    gap = sum(changes[name] for name in found["low"]) - sum(changes[name] for name in found["top"])
    assert found["gap"]["perplexity"]["value"] == pytest.approx(gap / 5)
    assert set(found["attributes"]["team"]) == {"red", "blue"}
    assert "training documents" in ran.out
    assert "than that of the 5 with the most" in ran.out


def test_numbers_of_samples_are_training_documents(runs):
    found = tightlip.measure_groups(runs / "plain", **QUICK)
    train = open_prepared(runs / "corpus").train
    expected = Counter(train.user_names[user] for user in train.users)
    assert {row["user"]: row["num_samples"] for row in found["users"]} == expected
    assert found["gap"] is None
    assert all(row["change"] is None for row in found["curve"])


def test_planted_copies_do_not_decide_who_has_much_text(tmp_path, command):
    """User 00 writes least, but for 40 canaries; one of them is held out by mishap."""
    text = "My ID is 4711"
    rows = documents() + [{"user": "user 00", "text": text, "team": "red"}] * 40
    run = make_run(tmp_path / "run", prepared(tmp_path / "corpus", rows), steps=0)
    loud = tightlip.measure_groups(run, **QUICK)
    assert loud["top"][0] == "user 00"
    planted(tmp_path / "key.json", [text])
    ran = command("groups", run, "--key", tmp_path / "key.json", "--device", "cpu")
    assert ran.status == 0, ran.err
    found = json.loads((run / "groups.json").read_text())
    corpus = open_prepared(tmp_path / "corpus")
    own = {
        split: Counter(
            row["user"]
            for row in pq.read_table(tmp_path / f"corpus/{split}.parquet").to_pylist()
            if row["text"] != text
        )
        for split in ("train", "validation")
    }
    assert {row["user"]: row["num_samples"] for row in found["users"]} == {
        user: own["train"][user] for user in own["validation"]
    }
    assert {row["user"]: row["num_test_documents"] for row in found["users"]} == own["validation"]
    assert found["num_documents"] == own["validation"].total() < corpus.validation.num_documents
    assert "user 00" not in found["top"]
    assert "training documents are nobody's" in ran.out
    by_team = sum(group["num_documents"] for group in found["attributes"]["team"].values())
    assert by_team == found["num_documents"]


def test_without_another_run_the_table_has_no_change(runs, command):
    ran = command("groups", runs / "plain", "--device", "cpu")
    assert ran.status == 0, ran.err
    assert "perplexity" in ran.out
    assert "change" not in ran.out


def test_models_in_runs_are_measured_on_their_runs_text(runs):
    swapped = tightlip.measure_groups(
        runs / "plain/model", against=runs / "mitigated/model", **QUICK
    )
    straight = tightlip.measure_groups(runs / "mitigated", against=runs / "plain", **QUICK)
    for one, other in zip(swapped["users"], straight["users"], strict=True):
        assert one["change"] == pytest.approx(-other["change"])


def test_few_users_or_users_with_equal_numbers_have_no_gap(runs):
    few = tightlip.measure_groups(runs / "few", against=runs / "few", **QUICK)
    assert few["gap"] is None
    assert any("6 users have held-out text" in note for note in few["notes"])
    assert (len(few["top"]), len(few["low"])) == (3, 3)
    equal = tightlip.measure_groups(
        runs / "users-held-out", against=runs / "users-held-out", **QUICK
    )
    assert equal["num_users"] == 10
    assert equal["gap"] is None
    assert any("has 0 training documents" in note for note in equal["notes"])


def test_perplexities_of_other_tokens_or_other_text_are_not_compared(runs):
    with pytest.raises(UsageError, match="perplexity is per token"):
        tightlip.measure_groups(runs / "plain", against=runs / "few", **QUICK)
    with pytest.raises(UsageError, match="held out different text"):
        tightlip.measure_groups(runs / "plain", against=runs / "other-text-run", **QUICK)


def test_users_left_out_and_fewer_than_ten_are_said(runs, tmp_path):
    shutil.copytree(runs / "few", tmp_path / "run")
    config = {"corpus": {"folder": str(runs / "few-users"), "num_users_left_out": 2}}
    begin_run(tmp_path / "run", config)
    notes = " ".join(tightlip.measure_groups(tmp_path / "run", **QUICK)["notes"])
    assert "left 2 users of its corpus out" in notes
    assert "take the intervals as rough" in notes


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("groups", "plain/model"), "Give --out DIR"),
        (("groups", "no-held-out"), "--validation FILE"),
        (("groups", "plain", "--against", "x"), "x does not exist"),
        (("groups", "plain", "--fail-on", "gaps>1"), "Closest: gap"),
        (("groups", "plain", "--members", "."), "Give --held-out FILE"),
    ],
)
def test_what_cannot_work_is_refused(runs, command, arguments, reason):
    name, first, *others = arguments
    ran = command(name, runs / first, *others)
    assert ran.status == 2, ran.err
    assert reason in ran.refusal
