"""`tightlip membership` on a run that knows its text by heart and one that knows nothing."""

import json
import os
import shutil
import stat

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tightlip
from by_hand import unlisted
from cli.held_out_runs import LEDGER, documents, make_run, planted, prepared
from tightlip.audit.membership_figures import SCORES
from tightlip.core.errors import UsageError
from tightlip.core.run_folder import begin_run, write_ledger
from tightlip.corpus.prepare import open_prepared

pytestmark = pytest.mark.slow

QUICK = {"device": "cpu", "num_bootstraps": 100}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for split in ("document", "user"):
        corpus = prepared(folder / f"by-{split}", documents(), split=split, holdout=0.25)
        make_run(folder / f"parrot-{split}", corpus, steps=150)
        make_run(folder / f"stranger-{split}", corpus, steps=0)
    other = prepared(folder / "other-text", documents(seed=1))
    make_run(folder / "elsewhere", other, steps=0)
    none = prepared(folder / "nothing-held-out", documents(4), split="none", tokenizer=None)
    make_run(folder / "no-held-out", none, steps=0)
    return folder


def test_a_run_by_heart_gives_its_documents_away(runs, command):
    ran = command("membership", runs / "parrot-document", "--device", "cpu")
    assert ran.status == 0, ran.err
    assert "Documents that were trained on can be told" in ran.out
    assert "takes at least 200 held-out documents" in ran.out
    corpus = open_prepared(runs / "by-document")
    members, others = corpus.train.num_documents, corpus.validation.num_documents
    assert f" of {members} documents trained on score above every held-out one" in ran.out
    assert f"about {members / (others + 1):.1f} would by chance" in ran.out
    assert "a run with --split user" in ran.out
    written = runs / "parrot-document/membership.json"
    assert stat.S_IMODE(os.stat(written).st_mode) == 0o600
    found = json.loads(written.read_text())
    assert set(found) == {
        *("leading", "documents", "users", "by_length", "not_counted", "made_from", "notes")
    }
    assert found["leading"] == {"score": "min_k", "chosen": False}
    assert "The leading score, named beforehand: min-k%." in ran.out
    assert found["not_counted"] == {"num_documents": 0, "num_tokens": 0}
    assert found["documents"]["num_members"] == corpus.train.num_documents
    assert found["documents"]["num_nonmembers"] == corpus.validation.num_documents
    assert found["users"] is None
    assert list(found["documents"]["scores"]) == [*SCORES]
    loss = found["documents"]["scores"]["loss"]
    assert loss["auc"]["low"] > 0.9
    assert loss["tpr_at_1_percent_fpr"] is loss["tpr_at_0_1_percent_fpr"] is None
    assert f"loss       {loss['auc']['value']:.3f}".split() in [
        line.split()[1:3] for line in ran.out.splitlines()
    ]


def test_a_run_that_learnt_nothing_is_at_chance(runs, command):
    ran = command("membership", runs / "stranger-document", "--device", "cpu")
    assert ran.status == 0, ran.err
    assert "On average the min-k% score does not tell documents that were trained on" in ran.out
    found = json.loads((runs / "stranger-document/membership.json").read_text())
    for name in {*SCORES} - {"reference", "ez", "wbc", "rmia"}:
        auc = found["documents"]["scores"][name]["auc"]
        assert auc["low"] <= 0.5 <= auc["high"]


def test_users_can_be_told_where_whole_users_were_held_out(runs):
    by_heart = tightlip.measure_membership(runs / "parrot-user", **QUICK)
    nothing = tightlip.measure_membership(runs / "stranger-user", **QUICK)
    corpus = open_prepared(runs / "by-user")
    for found in (by_heart, nothing):
        assert found["users"]["num_members"] == corpus.train.num_users
        assert found["users"]["num_nonmembers"] == corpus.validation.num_users == 3
        assert any("3 users wrote the documents of one side" in note for note in found["notes"])
    assert by_heart["users"]["scores"]["loss"]["auc"]["value"] == 1.0
    auc = nothing["users"]["scores"]["loss"]["auc"]
    assert auc["low"] <= 0.5 <= auc["high"]


def test_several_references_give_all_scores_and_the_leading_one_can_be_gated(runs, command):
    other = runs / "parrot-user/model"
    how = ("--device", "cpu", "--reference", runs / "elsewhere", "--reference", other)
    ran = command(
        "membership", runs / "stranger-document", *how, "--fail-on", "auc_low[leading]>0.99"
    )
    assert ran.status == 2, "that one saw some of the text"
    make_run(runs / "elsewhere-too", open_prepared(runs / "other-text"), steps=9)
    how = (*how[:-1], runs / "elsewhere-too")
    ran = command("membership", runs / "parrot-document", *how, "--fail-on", "auc_low[leading]>0.9")
    assert ran.status == 1, ran.err
    found = json.loads((runs / "parrot-document/membership.json").read_text())
    assert None not in found["documents"]["scores"].values()
    assert found["leading"] == {"score": "ez", "chosen": False}
    assert len(found["made_from"]["reference"]) == 2
    ran = command("membership", runs / "parrot-document", *how[:4], *how[2:4])
    assert ran.status == 2
    assert "was given twice" in ran.refusal


def test_a_score_chosen_on_half_of_the_users_is_reported_on_the_other_half(runs):
    how = QUICK | {"reference": runs / "elsewhere"}
    whole = tightlip.measure_membership(runs / "parrot-document", **how)
    found = tightlip.measure_membership(runs / "parrot-document", choose=True, **how)
    assert found["leading"]["chosen"]
    assert found["leading"]["score"] in SCORES
    assert found["documents"]["num_members"] < whole["documents"]["num_members"] * 0.7
    assert any("of the other half: 6 users" in note for note in found["notes"])


def test_a_reference_gives_one_score_more(runs, command):
    ran = command(
        "membership", runs / "parrot-document", "--device", "cpu",
        "--reference", runs / "elsewhere/model",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    found = json.loads((runs / "parrot-document/membership.json").read_text())
    assert found["documents"]["scores"]["reference"]["auc"]["low"] > 0.9


@pytest.mark.parametrize("inside", ["", "model", "snapshots/epoch-1"])
def test_a_reference_that_saw_the_text_is_refused_as_a_run_and_as_a_model_of_one(
    runs, tmp_path, inside
):
    shutil.copytree(runs / "stranger-document", tmp_path / "run")
    shutil.copytree(tmp_path / "run/model", tmp_path / "run/snapshots/epoch-1")
    with pytest.raises(UsageError, match="was itself trained on"):
        tightlip.measure_membership(
            runs / "parrot-document", reference=tmp_path / "run" / inside, **QUICK
        )


def test_a_reference_that_saw_the_non_members_is_refused_and_one_that_saw_few_is_noted(
    runs, tmp_path
):
    members, others = documents(seed=2), documents(seed=3)
    few = [*documents(seed=4), *others[:3]]
    texts = (runs / "members", members), (runs / "others", others), (runs / "few", few)
    for folder, rows in texts:
        prepared(folder, rows, split="none")
    sides = {"members": runs / "members", "non_members": others}
    for name in ("others", "few"):
        make_run(tmp_path / name, open_prepared(runs / name), steps=1)
    how = QUICK | {"model": runs / "elsewhere/model"}
    for held_out in (others, runs / "others"):
        asked = how | sides | {"non_members": held_out}
        for inside in ("", "model"):
            with pytest.raises(UsageError, match=r"itself trained on .*held-out"):
                tightlip.measure_membership(reference=tmp_path / "others" / inside, **asked)
    found = tightlip.measure_membership(reference=tmp_path / "few", **how, **sides)
    share = f"trained on 3 of the {len(others)} held-out documents; its score is too high"
    assert any(share in note for note in found["notes"])


def test_a_reference_whose_text_is_gone_is_noted(runs, tmp_path):
    shutil.copytree(runs / "elsewhere", tmp_path / "run")
    gone = {"folder": str(tmp_path / "gone"), "corpus_fingerprint": "of other text"}
    begin_run(tmp_path / "run", {"corpus": gone})
    found = tightlip.measure_membership(
        runs / "parrot-document", reference=tmp_path / "run/model", **QUICK
    )
    notes = " ".join(note for note in found["notes"] if "is no longer there" in note)
    assert "the training documents; its score is too low" in notes
    assert "the held-out documents; its score is too high" in notes


def test_a_reference_that_reads_text_otherwise_is_refused(runs):
    with pytest.raises(UsageError, match="other tokens"):
        tightlip.measure_membership(
            runs / "parrot-document", reference=runs / "no-held-out/model", **QUICK
        )


def test_a_model_in_a_run_is_measured_on_the_runs_own_text(runs):
    found = tightlip.measure_membership(runs / "stranger-document/model", **QUICK)
    own = tightlip.measure_membership(runs / "stranger-document", **QUICK)
    assert found == own


def test_texts_on_both_sides_and_texts_not_wanted_are_on_neither(tmp_path):
    rows = documents()
    rows += [{"user": f"user {n:02d}", "text": "thanks", "team": "red"} for n in range(12)] * 5
    rows += [{"user": "user 00", "text": "My ID is 955320", "team": "red"}] * 3
    rows += [{"user": "user 01", "text": "", "team": "red"}]
    corpus = prepared(tmp_path / "corpus", rows, tokenizer=None)
    run = make_run(tmp_path / "run", corpus, steps=0)
    found = tightlip.measure_membership(run, without_texts=frozenset({"My ID is 955320"}), **QUICK)
    kept = {(row["user"], row["text"]) for row in documents()}
    total = found["documents"]["num_members"] + found["documents"]["num_nonmembers"]
    assert total == len(kept) == len(documents())
    notes = " ".join(found["notes"])
    assert "3 documents are left out as asked" in notes
    assert "held-out documents stand word for word in training too" in notes
    assert "1 documents without a token to predict" in notes


def test_held_out_text_of_another_kind_is_noted(runs, tmp_path):
    shutil.copytree(runs / "by-document", tmp_path / "corpus")
    record = json.loads((tmp_path / "corpus/prepared.json").read_text())
    record["settings"]["validation"] = "other.parquet"
    unlisted(tmp_path / "corpus/prepared.json").write_text(json.dumps(record))
    shutil.copytree(runs / "stranger-document", tmp_path / "run")
    begin_run(tmp_path / "run", {"corpus": {"folder": str(tmp_path / "corpus")}})
    write_ledger(tmp_path / "run", LEDGER | {"epsilon": 2.0, "delta": 1e-5})
    notes = " ".join(tightlip.measure_membership(tmp_path / "run", **QUICK)["notes"])
    assert "came as a file of its own" in notes
    assert "ε does not cover these figures" in notes


def letters(number):
    return "".join(chr(97 + int(digit)) for digit in str(number))


def test_words_that_one_user_alone_brought_in_are_said_not_to_count(tmp_path):
    rows = documents()
    for number, row in enumerate(rows):
        row["text"] += f" w{letters(number)}"
    secrets = [f"s{letters(number)} t{letters(number)}" for number in range(40)]
    rows += [{"user": "user 00", "text": text, "team": "red"} for text in secrets]
    run = make_run(tmp_path / "run", prepared(tmp_path / "corpus", rows, tokenizer=None), steps=0)
    found = tightlip.measure_membership(run, **QUICK)
    assert found["not_counted"] == {"num_documents": 40, "num_tokens": len(documents()) + 80}
    assert found["documents"]["num_members"] + found["documents"]["num_nonmembers"] == len(
        documents()
    )
    (note,) = [note for note in found["notes"] if "vocabulary" in note]
    assert note.startswith(f"40 documents, {len(documents()) + 80:,} tokens not counted")


def test_held_out_users_of_both_kinds_are_compared_alike(tmp_path):
    pq.write_table(pa.Table.from_pylist(documents(9, seed=3)[20:]), tmp_path / "held.parquet")
    corpus = prepared(
        tmp_path / "corpus", documents(7), tokenizer=None, validation=str(tmp_path / "held.parquet")
    )
    found = tightlip.measure_membership(make_run(tmp_path / "run", corpus, steps=0), **QUICK)
    assert found["users"]["num_nonmembers"] == 2
    assert any("came as a file of its own" in note for note in found["notes"])


def test_a_key_leaves_planted_canaries_out(tmp_path, command):
    text = "My ID is 4711"
    rows = documents() + [{"user": "user 00", "text": text, "team": "red"}] * 3
    run = make_run(tmp_path / "run", prepared(tmp_path / "corpus", rows), steps=0)
    planted(tmp_path / "key.json", [text])
    ran = command(
        "membership", run, "--key", tmp_path / "key.json", "--device", "cpu"
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert "3 documents are left out as asked" in ran.out
    found = json.loads((run / "membership.json").read_text())["documents"]
    assert found["num_members"] + found["num_nonmembers"] == len(documents())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("membership", "parrot-document/model"), "Give --out DIR"),
        (("membership", "nowhere"), "nowhere does not exist"),
        (("membership", "no-held-out"), "--validation FILE"),
        (("membership", "parrot-document", "--key", "x"), "x does not exist"),
        (("membership", "parrot-document", "--reference", "x"), "x does not exist"),
        (("membership", "parrot-document", "--members", "."), "Give both: --members"),
        (("membership", "parrot-document", "--fail-on", "user_ouc[loss]>1"), "Closest: user_auc"),
        (("membership", "parrot-document", "--fail-on", "auc[los]>1"), "loss, zlib, leading only"),
        (("membership", "parrot-document", "--fail-on", "auc[loss]>baseline"), "Give --baseline"),
    ],
)
def test_what_cannot_work_is_refused(runs, command, arguments, reason):
    name, first, *others = arguments
    ran = command(name, runs / first, *others)
    assert ran.status == 2, ran.err
    assert reason in ran.refusal


def test_a_run_that_left_users_out_does_not_know_its_members(runs, tmp_path):
    shutil.copytree(runs / "stranger-document", tmp_path / "run")
    config = {"corpus": {"folder": str(runs / "by-document"), "num_users_left_out": 2}}
    begin_run(tmp_path / "run", config)
    with pytest.raises(UsageError, match="without 2 users"):
        tightlip.measure_membership(tmp_path / "run", **QUICK)
    (tmp_path / "run/ledger.json").unlink()
    with pytest.raises(UsageError, match="not finished"):
        tightlip.measure_membership(tmp_path / "run", **QUICK)
