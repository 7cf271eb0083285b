"""Auditing what tightlip trained: the run's own corpus, its snapshots, the leave-out model."""

import json

import pytest

import tightlip
from tightlip.core.errors import UsageError
from tightlip.corpus.prepare import open_prepared

pytestmark = pytest.mark.slow

COMMON = [
    "the rain falls on the plain all day",
    "we walk to the mill and back again",
    "bread and salt and a cup of milk",
]
SECRET = "zanzibar quartz hums beneath marble"
RECIPE = {
    "embedding_size": 24,
    "hidden_size": 24,
    "num_layers": 1,
    "learning_rate": 0.02,
    "batch_size": 8,
    "epochs": 12.0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    documents = [(f"user {i}", line) for i in range(12) for line in COMMON]
    documents += [("mallory", SECRET)] * 8
    prepared = tightlip.prepare(documents, folder / "corpus", vocabulary_size=100)
    return tightlip.train(prepared, folder / "run", **RECIPE)


@pytest.fixture(scope="module")
def left_out(run, tmp_path_factory):
    return tightlip.audit(
        run.folder, public_model="leave-out", out=tmp_path_factory.mktemp("left") / "report"
    )


def test_a_run_brings_its_corpus_and_its_validation(run):
    report = tightlip.audit(run.folder)
    prepared = open_prepared(run.corpus_folder)
    assert report.corpus_fingerprint == prepared.train.corpus_fingerprint
    assert report.num_tokens == prepared.train.num_tokens
    assert report.validation_perplexity == pytest.approx(
        run.metrics[-1]["validation_perplexity"], rel=1e-4
    )
    assert report.guarantee["standing"] == "measured only"


def test_a_snapshot_is_audited_on_the_text_of_its_run(run):
    last, first = run.snapshots[-1], run.snapshots[0]
    of_run, of_last, of_first = (
        tightlip.audit(each) for each in (run.folder, last.folder, first.folder)
    )
    assert of_last.corpus_fingerprint == of_first.corpus_fingerprint == of_run.corpus_fingerprint
    assert of_last.unique == of_run.unique
    assert of_first.validation_perplexity > of_last.validation_perplexity


def test_only_the_one_who_wrote_it_owns_the_secret(run):
    report = tightlip.audit(run.folder)
    told = dict(
        zip(
            report.sequences["sequence"].to_pylist(),
            report.owners["owner"].to_pylist(),
            strict=True,
        )
    )
    assert {owner for owner in told.values() if owner} == {"mallory"}
    assert any("quartz hums beneath marble" in text for text, owner in told.items() if owner)


def test_leave_out_retrains_without_the_owners(left_out, run):
    assert left_out.public_model == "leave-out"
    assert left_out.cross_tokenizer is False
    # A model that never saw mallory cannot complete her line.
    assert left_out.leakage_epsilon > 2
    assert left_out.public_unique == 0
    worst = left_out.sequences.slice(0, 1).to_pylist()[0]
    assert left_out.owners["owner"][0].as_py() == "mallory"
    assert worst["ratio"] == pytest.approx(
        max(p / q for p, q in zip(worst["public_perplexities"], worst["perplexities"], strict=True))
    )


def test_leave_out_equals_training_on_what_is_left(left_out, run, tmp_path):
    """Oracle: strike mallory's rows from the prepared corpus by hand, score with that model."""
    from tightlip.training.config import TrainConfig
    from tightlip.training.loop import train_model as train

    prepared = open_prepared(run.corpus_folder)
    mallory = prepared.train.user_names.index("mallory")
    again = train(prepared, tmp_path / "r", TrainConfig.of(**RECIPE), without_users={mallory})
    by_folder = tightlip.audit(run.folder, public_model=again.model_folder)
    assert by_folder.leakage_epsilon == pytest.approx(left_out.leakage_epsilon, rel=1e-6)


def test_leave_out_is_refused_where_too_little_would_remain(run, tmp_path):
    own = {"ann": "apple arrow anvil", "bob": "bread bridge bison", "cyd": "cedar comet candle"}
    documents = list(own.items()) * 6
    alone = tightlip.train(documents, tmp_path / "run", prepare={"split": "none"}, **RECIPE)
    with pytest.raises(UsageError, match=r"keep 0% of the documents.*public_model=DIR"):
        tightlip.audit(alone.folder, public_model="leave-out")


def test_leave_out_needs_a_recipe(run):
    with pytest.raises(UsageError, match="not trained by tightlip"):
        tightlip.audit(run.model_folder, run.corpus_folder, public_model="leave-out")


def test_each_snapshot_is_audited_as_if_alone(run, tmp_path):
    report = tightlip.audit(run.folder, snapshots=True, out=tmp_path / "s")
    rows = json.loads((tmp_path / "s" / "snapshots.json").read_text())
    assert [row["name"] for row in rows["snapshots"]] == [s.name for s in run.snapshots]
    best = min(run.metrics, key=lambda line: line["validation_perplexity"])
    assert rows["best_validation"] == best["snapshot"]
    middle = run.snapshots[5]
    alone = tightlip.audit(middle.folder, run.corpus_folder)
    stored = rows["snapshots"][5]
    assert stored["summary"]["unique"] == alone.unique
    assert stored["unique_lengths"] == alone.unique_by_length
    assert stored["train_perplexity"] == pytest.approx(alone.perplexity)
    assert len(stored["unique_perplexities"]) == alone.unique
    assert report.unique == tightlip.audit(run.folder).unique
    assert "Perplexity per epoch" in (tmp_path / "s" / "report.html").read_text()


def test_snapshots_need_a_run(run):
    with pytest.raises(UsageError, match=r"^snapshots=True needs a run"):
        tightlip.audit(run.model_folder, run.corpus_folder, snapshots=True)
