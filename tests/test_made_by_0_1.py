"""Corpora, runs, reports and vectors of version 0.1 still open: see made_by_0_1/README.md."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tightlip
from tightlip.core.run_folder import open_run
from tightlip.corpus.prepare import open_prepared
from tightlip.report.kit import render_page

pytestmark = pytest.mark.slow

RUNS = ("plain", "dp", "adversarial")


@pytest.fixture
def place(tmp_path):
    """A copy: measuring a run writes into its folder."""
    return shutil.copytree(Path(__file__).parent / "made_by_0_1", tmp_path / "made")


def test_a_prepared_corpus_opens(place):
    corpus = open_prepared(place / "prepared")
    assert corpus.train.num_documents == 48
    assert corpus.validation.num_documents == 12
    assert corpus.train.document(0).tolist()


@pytest.mark.parametrize("name", RUNS)
def test_a_finished_run_opens_with_its_snapshots(place, name):
    run = open_run(place / name)
    assert run.finished
    assert [snapshot.name for snapshot in run.snapshots] == ["epoch-1", "epoch-2"]
    assert open_prepared(run.corpus_folder).train.num_documents == 48


def test_a_ledger_promises_what_it_did(place, command):
    recorded = json.loads((place / "dp/ledger.json").read_text())
    record = tightlip.ledger(place / "dp")
    assert record["epsilon"] == recorded["epsilon"] == pytest.approx(8, abs=0.01)
    assert record["standing"] == "proved"
    told = command("ledger", place / "dp")
    assert told.status == 0, told.err
    assert "8.00" in told.out
    for name in ("plain", "adversarial"):
        assert tightlip.ledger(place / name)["epsilon"] is None


@pytest.mark.parametrize("name", ["report", "redacted"])
def test_a_report_opens_with_the_figures_it_had(place, name):
    recorded = json.loads((place / name / "summary.json").read_text())
    report = tightlip.open_report(place / name)
    assert report.unique == recorded["unique"]
    assert report.distinct_sequences == recorded["distinct_sequences"] == 28
    assert report.sequences.num_rows == 28


def test_a_run_is_audited_as_it_was(place, command, tmp_path):
    ran = command("audit", place / "plain", "--out", tmp_path / "again")
    assert ran.status == 0, ran.err
    before = pq.read_table(place / "report/sequences.parquet").drop_columns(["perplexities"])
    now = pq.read_table(tmp_path / "again/sequences.parquet").select(before.column_names)
    assert now.to_pylist() == before.to_pylist()


@pytest.mark.parametrize("name", ["report", "redacted"])
def test_a_reports_page_is_made_again_by_tokens(place, name):
    page = render_page("leakage", folder=place / name)
    assert "only one person wrote" in page
    assert ">Leaks<" not in page


def test_a_run_completes_what_is_typed(place, command):
    ran = command("tab", place / "plain", "--prompt", "ant bee")
    assert ran.status == 0, ran.err
    assert ran.out.startswith("ant bee cat")


def test_runs_are_compared(place, command, tmp_path):
    runs = [place / name for name in RUNS]
    ran = command("compare", *runs, "--out", tmp_path / "compared")
    assert ran.status == 0, ran.err
    rows = json.loads((tmp_path / "compared/comparison.json").read_text())["runs"]
    assert [row["name"] for row in rows] == list(RUNS)
    assert [row["perplexity"]["value"] > 1 for row in rows] == [True] * 3


def test_the_servers_half_reads_the_vectors(place, command, tmp_path):
    labels = tmp_path / "labels.csv"
    ran = command(
        *("represent", "classify", place / "represent/server", place / "vectors.parquet"),
        *("--label", "team", "--out", labels),
    )
    assert ran.status == 0, ran.err
    assert len(labels.read_text().splitlines()) == 61


def test_the_devices_half_encodes_with_the_guarantee_it_had(place, command, tmp_path):
    ran = command(
        *("represent", "encode", place / "represent/device", place / "corpus.jsonl"),
        *("--out", tmp_path / "vectors.parquet"),
    )
    assert ran.status == 0, ran.err
    assert "ε = 8.00 at δ = 1e-05 (proved)" in ran.out
    made = pq.read_table(place / "vectors.parquet")
    assert pq.read_table(tmp_path / "vectors.parquet").num_rows == made.num_rows == 60


def test_an_unfinished_run_is_refused_with_the_version_to_use(place, command):
    before = sorted(path for path in (place / "unfinished").rglob("*"))
    ran = command(
        *("train", place / "unfinished/corpus", "--out", place / "unfinished"),
        *("--config", place / "unfinished.toml"),
    )
    assert ran.status == 2, ran.err
    assert "unfinished run of tightlip 0.1" in ran.refusal
    assert "Finish it with tightlip 0.1" in ran.refusal
    after = sorted(path for path in (place / "unfinished").rglob("*") if path.name != ".lock")
    assert after == before
