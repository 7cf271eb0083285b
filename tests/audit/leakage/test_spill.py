"""Runs that outgrow memory are kept in files, and the report is the same to the byte."""

import ctypes
import gc
import random
import shutil
import signal
import threading

import numpy as np
import pytest

import tightlip
from cli.held_out_runs import documents, make_run, prepared
from faults.harm import half_written, tree
from standins import BigramTable, scanned
from tightlip.audit.leakage import spill
from tightlip.audit.leakage.by_text import ByText
from tightlip.audit.leakage.leaks import find_leaks
from tightlip.audit.leakage.runs import Runs, distinct_in, distinct_sequences
from tightlip.audit.leakage.spill import Room
from tightlip.audit.leakage.tables import ratio_of_sequence, write_sequences
from tightlip.audit.settings import LeakageConfig
from tightlip.core.files import make_private_folder
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tokens import TokenizedCorpus, mapped
from tightlip.corpus.vocabulary import build_tokenizer
from tightlip.engines.local import LocalEngine

WORDS = ["the", "we", "love", "night", "sea", "key", "7", "42", ".", ",", "don't", "école"]


def random_documents(draw, *, several_owners):
    users = [f"user-{number}" for number in range(draw.randint(2, 6))]
    rows = []
    for _ in range(draw.randint(20, 60)):
        text = " ".join(draw.choices(WORDS, k=draw.choice([0, 1, 2, 5, 12])))
        owners = draw.sample(users, draw.randint(1, 2)) if several_owners else draw.choice(users)
        rows.append({"user": owners, "text": text})
    return rows + draw.choices(rows, k=6)  # repeated documents


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def spilled(monkeypatch):
    """The folders that arrays were put into."""
    folders, plain = [], spill._unnamed

    def watched(folder):
        folders.append(folder)
        return plain(folder)

    monkeypatch.setattr(spill, "_unnamed", watched)
    return folders


@pytest.mark.parametrize("seed", range(8))
def test_a_report_made_on_disk_is_the_one_made_in_memory(seed, tmp_path, spilled):
    draw = random.Random(seed)
    rows = random_documents(draw, several_owners=seed % 2 == 1)
    texts = [(str(number), row["text"]) for number, row in enumerate(rows)]
    kind = "bpe" if seed % 4 > 1 else "words"
    tokenizer = build_tokenizer(open_corpus(texts), kind=kind, size=270)
    given = {
        "tokenizer": tokenizer,
        "public_model": (BigramTable(len(tokenizer), seed + 100), tokenizer) if seed % 3 else None,
        "top_k": draw.randint(2, 90),
        "occurrences": draw.choice([1, 3, None]),
        "contexts": ("training", "short", "other"),
        "redact": seed == 7,
        "workers": 2,
    }
    model = BigramTable(len(tokenizer), seed, levels=draw.choice([2, 6, 40]))
    tightlip.audit(model, rows, out=tmp_path / "memory", memory="1MB", **given)
    assert not spilled
    tightlip.audit(model, rows, out=tmp_path / "disk", memory="5KB", **given)
    assert {*spilled} == {tmp_path / "disk" / ".work"}
    assert files_of(tmp_path / "disk") == files_of(tmp_path / "memory")
    assert not (tmp_path / "disk" / ".work").exists()


@pytest.mark.parametrize("seed", range(10))
def test_numbers_of_runs_in_files_are_those_in_memory(seed, tmp_path):
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, draw.integers(1, 9), 3000).astype(np.int32)
    lengths = draw.integers(1, 6, 900)
    starts = np.sort(draw.choice(2990, 900, replace=False))
    if seed % 3 == 0:  # most runs are the same one
        starts[: draw.integers(500, 900)], lengths[:] = starts[7], 2
    runs = Runs(starts=starts, lengths=lengths, documents=starts)
    want = distinct_sequences(tokens, runs)
    got = distinct_in(Room(folder=tmp_path, at_once=int(draw.integers(1, 400))), tokens, runs)
    assert got.number_of_run.tolist() == want.number_of_run.tolist()
    assert got.first_run.tolist() == want.first_run.tolist()
    assert sorted(np.concatenate(got.buckets).tolist()) == [*range(900)]
    assert all(len(bucket) == 0 or (np.diff(bucket) > 0).all() for bucket in got.buckets)
    assert [*tmp_path.iterdir()] == [], "the files have no names"


def test_a_hash_fills_buckets_evenly(tmp_path):
    """Of runs of one token too, which are the most."""
    tokens = np.arange(20_000, dtype=np.int32)
    runs = Runs(starts=tokens, lengths=np.ones_like(tokens), documents=tokens)
    room = Room(folder=tmp_path, at_once=1000)
    sizes = [len(bucket) for bucket in distinct_in(room, tokens, runs).buckets]
    assert len(sizes) == 20
    assert max(sizes) < 1200


@pytest.mark.slow
def test_memory_goes_with_its_bound_and_not_with_the_runs(tmp_path):
    """What the process takes is looked at every few milliseconds while runs that take eight times the
    bound are told apart, counted and written."""
    bound = 8_000_000
    a_report(a_scan(tmp_path / "few", 300), tmp_path / "small", bound // 20)  # compiled by now
    scan = a_scan(tmp_path / "many", 6000)
    peak, (leaks, files) = peak_of(lambda: a_report(scan, tmp_path / "disk", bound))
    in_memory, (_, same) = peak_of(lambda: a_report(scan, tmp_path / "memory", 10**9))
    assert files == same
    assert 180 * len(leaks.runs) > 8 * bound
    always = 24 << 20  # a shard of the scan, 10,000 rows of a table and what compresses them
    assert peak < bound + 40 * len(leaks.distinct) + always, (peak, len(leaks.distinct))
    assert in_memory > 2 * peak, (in_memory, peak)


@pytest.mark.slow
def test_killed_while_runs_are_in_files_it_leaves_what_it_would_have_left(command, tmp_path):
    corpus = prepared(tmp_path / "corpus", documents(), split="document", holdout=0.25)
    run = make_run(tmp_path / "run", corpus, steps=40)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert command("audit", run, "--out", whole).status == 0
    given = ("audit", run, "--out", out, "--memory", "10KB", "--workers", "2")
    last = command(*given).renames
    assert tree(out) == tree(whole)
    for before in (last - 12, last - 6, last - 3):
        shutil.rmtree(out)
        assert command(*given, die_before_rename=before).status == -signal.SIGKILL
        assert half_written(out) == []
        assert all(path.stat().st_mode & 0o077 == 0 for path in out.rglob("*"))
        assert command(*given).status == 0
        assert tree(out) == tree(whole)
    shutil.rmtree(out)
    sequences = out / ".work" / "sequences-tokens.npy"
    assert command.begin(*given).kill_once(sequences.exists).status == -signal.SIGKILL
    assert half_written(out) == []
    assert command(*given).status == 0
    assert tree(out) == tree(whole)


def a_scan(folder, num_documents):
    """Of a made-up text, half of whose tokens are hits."""
    draw, size = np.random.default_rng(0), 250
    make_private_folder(folder)
    tokens = (draw.zipf(1.2, num_documents * size) % 5000).astype(np.int32)
    np.save(folder / "tokens.npy", tokens)
    corpus = TokenizedCorpus(
        tokens=mapped(folder / "tokens.npy"),
        bounds=np.arange(num_documents + 1, dtype=np.int64) * size,
        users=np.arange(num_documents, dtype=np.int32) // 3,
        user_names=[str(number) for number in range(num_documents // 3)],
        corpus_fingerprint="c",
        tokenizer_fingerprint="t",
    )
    return scanned(random_ranks, corpus, folder / "scan")


def a_report(scan, folder, memory_bytes):
    """What leaks, and the tables' files."""
    leaks = find_leaks(
        scan,
        top_k=1,
        carries_text=np.ones(5000, bool),
        engine=LocalEngine(1),
        memory_bytes=memory_bytes,
        work=make_private_folder(folder),
    )
    nobody = leaks.room.full(len(leaks.distinct), -1, np.int64)
    by_text = ByText(users=nobody, unique=nobody > 0, leaks=nobody, owned=leaks.owned)
    ratios, config = ratio_of_sequence(leaks, None), LeakageConfig(redact=True)
    write_sequences(folder, leaks, by_text, ratios, None, None, config)
    return leaks, {name: content for name, content in files_of(folder).items() if "parquet" in name}


def random_ranks(tokens, bounds):
    size = int(bounds[-1] - bounds[0])
    ranks = np.random.default_rng(size).integers(0, 2, size).astype(np.int32)
    return ranks, np.full(size, -1.0, np.float32)


def peak_of(work):
    """How much memory of its own the process takes more than before at most, and what comes of it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but was not given back hides what is taken
    before, peak, is_over = own_memory(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not is_over.wait(0.002):
            peak = max(peak, own_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return_value = work()
    finally:
        is_over.set()
        watcher.join()
    return peak, return_value


def own_memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))
