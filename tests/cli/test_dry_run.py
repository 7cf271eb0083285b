"""--dry-run: what a command would take, with nothing written, registered or charged."""

import json
import random
import resource
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import tightlip
from tightlip.audit.leakage import dry_run as audits
from tightlip.core.checksums import LIST
from tightlip.core.children import ALONE_SECONDS, CHILD_BYTES
from tightlip.core.engines import EngineSettings
from tightlip.core.errors import UsageError
from tightlip.core.progress import Estimate
from tightlip.corpus.opening import CorpusSource
from tightlip.training import run as trainings
from training.small_corpora import documents, prepared

KEYS = {
    *("corpus", "stages", "seconds", "memory_bytes", "gpu_memory_bytes", "disk_bytes"),
    *("passing_disk_bytes", "free_disk_bytes", "machines", "machine_hours", "notes"),
}
SMALL = {"hidden_size": 8, "embedding_size": 8, "num_layers": 1, "batch_size": 16}


def seen(folder: Path):
    """Every file under a folder, and when it was last written."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def bytes_in(folder: Path, *names: str):
    files = [path for name in names for path in (folder / name).rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry")
    corpus = prepared(folder / "corpus", num_documents=300)
    return tightlip.train(corpus.folder, folder / "run", epochs=2, **SMALL)


def test_an_audit_is_estimated_and_leaves_nothing(run, command, tmp_path, register):
    before, out = seen(run.folder.parent), tmp_path / "report"
    ran = command("audit", run.folder, "--out", out, "--dry-run", "--json")
    assert ran.status == 0, ran.err
    told = json.loads(ran.out)
    assert {*told} == KEYS
    assert told["seconds"] == pytest.approx(sum(told["stages"].values()), abs=0.01)
    assert "Scanning the model" in told["stages"]
    assert told["corpus"]["tokens"] == tightlip.audit(run.folder, out=out).summary["num_tokens"]
    stays = bytes_in(tmp_path, "report")
    assert told["disk_bytes"] == pytest.approx(stays, rel=0.15)
    assert seen(run.folder.parent) == before
    assert not register.exists()


def test_the_dry_run_of_an_audit_leaves_no_folder(run, tmp_path):
    tightlip.estimate_audit(run.folder, out=tmp_path / "report")
    assert not [*tmp_path.iterdir()]


def test_what_a_run_leaves_on_disk_is_what_its_dry_run_said(run, tmp_path):
    corpus = run.folder.parent / "corpus"
    before = seen(corpus)
    told = tightlip.estimate_train(corpus, tmp_path / "run", epochs=2, **SMALL)
    assert told.disk_bytes == bytes_in(run.folder, "model", "snapshots")
    assert told.corpus["steps"] == run.metrics[-1]["step"]
    assert told.memory_bytes <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert seen(corpus) == before
    assert not [*tmp_path.iterdir()]


def test_a_private_dry_run_registers_and_charges_nothing(tmp_path, register):
    raw, out = documents(num_documents=200, num_users=40), tmp_path / "run"
    private = {"mitigation": "dp", "noise_multiplier": 1.0, "delta": 1e-3, "allow_unproved": True}
    told = tightlip.estimate_train(raw, out, steps=3, **private, **SMALL)
    assert told.stages["Training"] > 0
    assert not [*tmp_path.iterdir()]
    assert not register.exists()


def test_a_private_dry_run_gives_an_old_corpus_no_name(tmp_path, register):
    corpus = prepared(tmp_path / "corpus", num_documents=200, num_users=40, split="user").folder
    for name in ("id.json", LIST):  # as an earlier version left it
        (corpus / name).unlink()
    known, before = register.read_bytes(), seen(corpus)
    private = {"mitigation": "dp", "noise_multiplier": 1.0, "delta": 1e-3, "allow_unproved": True}
    tightlip.estimate_train(corpus, tmp_path / "run", steps=2, **private, **SMALL)
    assert seen(corpus) == before
    assert register.read_bytes() == known


def test_a_large_raw_corpus_is_to_be_prepared_first(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "MOST_PREPARED", 10)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(row) for row in documents()))
    with pytest.raises(UsageError, match="tightlip prepare"):
        tightlip.estimate_train(corpus, tmp_path / "run", **SMALL)


def test_json_of_train_is_for_dry_runs(command, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps(documents()[0]))
    ran = command("train", corpus, "--out", tmp_path / "run", "--json")
    assert (ran.status, "--dry-run" in ran.err) == (2, True)


@pytest.mark.parametrize("seed", range(5))
def test_stages_are_a_fixed_part_and_one_in_proportion(seed):
    draw = random.Random(seed)
    once, fixed, slope = draw.random() + 1, draw.random() / 100, draw.random() / 1e4
    sizes, whole = (8_000, 60_000, 1_000_000), 50_000_000
    first, small, last = (
        audits._Trial(
            num_characters=size,
            stages={"scan": (once if not place else fixed) + slope * size},
            summary={},
            written=0,
        )
        for place, size in enumerate(sizes)
    )
    told = audits._extrapolated(first, small, last, whole)["scan"]
    assert told == pytest.approx(once + slope * whole, rel=1e-6)


def test_the_rows_tried_are_short_and_long_as_those_of_the_corpus():
    draw = random.Random(1)
    rows = [("u", "x" * int(draw.paretovariate(1.5) * 10)) for _ in range(3_000)]
    text = audits.read_text(CorpusSource(rows, {}), "Reading")
    some = text.some(text.num_characters / 10)
    assert text.num_documents == 3_000
    mean = text.num_characters / text.num_documents
    assert sum(map(audits.row_size, some)) / len(some) == pytest.approx(mean, rel=0.1)


def test_hours_are_those_of_all_machines():
    told = Estimate(
        corpus={}, stages={"a": 1800.0, "b": 1800.0}, memory_bytes=None, gpu_memory_bytes=None,
        disk_bytes=None, passing_disk_bytes=None, free_disk_bytes=1, machines=16,
    )  # fmt: skip
    assert told.machine_hours == 16
    assert any("16 machines" in line for line in told.lines())


TIMES = {
    "Scanning the model": 600.0,
    "Scanning validation text": 60.0,
    "Reading words": 210.0,
    "Counting": 90.0,
    audits.REST: 7.0,
}
ONCE = {
    "Scanning the model": 40.0,
    "Scanning validation text": 1.0,
    "Reading words": 10.0,
    "Counting": 2.0,
    audits.REST: 6,
}
SHARD_TOKENS = 100


@pytest.mark.parametrize(("workers", "machines"), [(1, 1), (6, 3), (10_000, 16)])
def test_on_a_cluster_the_scan_is_shared_out_and_all_machines_are_paid(
    run, monkeypatch, workers, machines
):
    plain, of_all = EngineSettings.opened, {"num_workers": workers, "num_python": workers}
    cluster = SimpleNamespace(is_remote=True, num_machines=machines, **of_all)

    def opened(settings, device="auto"):
        return nullcontext(cluster) if settings.engine == "ray" else plain(settings, device)

    monkeypatch.setattr(EngineSettings, "opened", opened)
    check_shared_out(run.folder, workers, machines, monkeypatch)


def test_processes_of_this_machine_share_what_is_python_s(run, monkeypatch):
    monkeypatch.setattr(audits, "_extrapolated", lambda *given: dict(TIMES if given[-1] else ONCE))
    here = tightlip.estimate_audit(run.folder, device="cpu", workers=3)
    beside = tightlip.estimate_audit(run.folder, device="cpu", workers=8)
    # This process never gives memory back, as it is counted.
    assert beside.memory_bytes - here.memory_bytes >= 4 * CHILD_BYTES
    alone, shared = here.stages, beside.stages
    assert {name: alone[name] for name in TIMES} == TIMES
    assert shared["Reading words"] == pytest.approx(10 + ALONE_SECONDS + (200 - ALONE_SECONDS) / 4)
    assert {name: shared[name] for name in TIMES if name != "Reading words"} == {
        name: seconds for name, seconds in TIMES.items() if name != "Reading words"
    }


def check_shared_out(run, workers, machines, monkeypatch):
    """The dry run of a cluster against that of this machine, which takes TIMES, of them ONCE without
    any text."""
    monkeypatch.setattr(audits, "_extrapolated", lambda *given: dict(TIMES if given[-1] else ONCE))
    monkeypatch.setattr(audits, "SHARD_TOKENS", SHARD_TOKENS)
    here = tightlip.estimate_audit(run, device="cpu", workers=1)
    there = tightlip.estimate_audit(run, device="cpu", engine="ray")
    num_shards = here.corpus["tokens"] // SHARD_TOKENS
    assert 1 < num_shards < 10_000
    at_once = min(workers, num_shards)  # others have no shard to scan
    for name, seconds in TIMES.items():
        assert here.stages[name] == seconds
        shares = {"Scan": at_once, "Read": workers}.get(name[:4], 1)
        # What is there once is done by each: the model is opened, say.
        assert there.stages[name] == pytest.approx(ONCE[name] + (seconds - ONCE[name]) / shares)
    assert (here.machines, there.machines) == (1, machines)
    for told in (here, there):
        assert told.seconds == pytest.approx(sum(told.stages.values()))
        assert told.machine_hours == pytest.approx(told.seconds * told.machines / 3600)
    reading = there.stages["Reading"] - here.stages["Reading"]  # which is timed anew
    starting = there.stages[audits.CLUSTER]
    assert starting >= audits.WORKER_SECONDS
    saved = (660 - 41) * (1 - 1 / at_once) + (210 - 10) * (1 - 1 / workers)
    assert here.seconds - there.seconds == pytest.approx(saved - reading - starting)
    assert (here.corpus, here.disk_bytes) == (there.corpus, there.disk_bytes)
    assert [*{*there.notes} - {*here.notes}] == [audits.OF_A_CLUSTER]
