"""Scanning while the corpus is tokenised gives the files of scanning afterwards."""

import json
import random
import threading

import pytest

import tightlip
from animals import WORDS
from models.tiny_finetunes import tiny_llama, words_tokenizer
from tightlip.core.errors import UsageError
from tightlip.core.settings import bytes_from
from tightlip.corpus import readers
from tightlip.scan import ahead, store
from tightlip.scan.scanner import Scanner


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(max_position_embeddings=64).save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def corpus():
    draw = random.Random(3)
    lengths = [draw.choice([0, 1, 5, 9, 30]) for _ in range(60)]
    return [
        {"user": f"u{draw.randrange(9)}", "text": " ".join(draw.choices(WORDS, k=length))}
        for length in lengths
    ]


@pytest.fixture
def scanned_by(monkeypatch):
    """Small shards, scanned ahead on a CPU too; the threads that scanned, a shard each."""
    monkeypatch.setattr(store, "SHARD_TOKENS", 50)
    monkeypatch.setattr(readers, "MAX_BATCH_ROWS", 7)
    threads, plain = [], Scanner.begun

    def begun(self, *given):
        threads.append(threading.current_thread())
        return plain(self, *given)

    monkeypatch.setattr(Scanner, "begun", begun)
    return threads


def audited(model, corpus, out):
    tightlip.audit(model, corpus, out=out, device="cpu")
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_scan_ahead_leaves_the_files_of_one_afterwards(
    model, corpus, scanned_by, tmp_path, monkeypatch
):
    want = audited(model, corpus, tmp_path / "afterwards")
    assert {*scanned_by} == {threading.main_thread()}
    num_shards = len(scanned_by)
    scanned_by.clear()
    monkeypatch.setattr(ahead, "DEVICES", ("cpu",))
    assert audited(model, corpus, tmp_path / "ahead") == want
    assert len(scanned_by) == num_shards, "nothing is scanned twice"
    assert {*scanned_by} - {threading.main_thread()}
    scanned_by.clear()
    assert audited(model, corpus, tmp_path / "ahead") == want
    assert scanned_by == [], "what was kept is not scanned ahead again"
    monkeypatch.setattr(ahead, "BYTES_PER_TOKEN", bytes_from("4GB") // 120)
    assert audited(model, corpus, tmp_path / "bounded") == want


def test_what_fails_ahead_is_said_by_the_scan(model, corpus, scanned_by, tmp_path, monkeypatch):
    want = audited(model, corpus, tmp_path / "afterwards")
    monkeypatch.setattr(ahead, "DEVICES", ("cpu",))
    plain = Scanner.check_on

    def only_the_whole(self, tokens, bounds):
        if len(bounds) <= len(corpus):
            raise UsageError("not yet")
        plain(self, tokens, bounds)

    monkeypatch.setattr(Scanner, "check_on", only_the_whole)
    assert audited(model, corpus, tmp_path / "ahead") == want


def test_what_is_read_otherwise_after_the_longest_document_is_scanned_again(
    model, corpus, scanned_by, tmp_path, monkeypatch
):
    want = audited(model, corpus, tmp_path / "afterwards")
    num_shards = len(scanned_by)
    scanned_by.clear()
    monkeypatch.setattr(ahead, "DEVICES", ("cpu",))
    plain = Scanner.check_on

    def otherwise(self, tokens, bounds):
        plain(self, tokens, bounds)
        if len(bounds) <= len(corpus):
            self.output_layer = None

    monkeypatch.setattr(Scanner, "check_on", otherwise)
    assert audited(model, corpus, tmp_path / "ahead") == want
    assert len(scanned_by) > num_shards


def test_an_interrupted_audit_goes_on_where_it_was(
    model, corpus, scanned_by, tmp_path, monkeypatch
):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in corpus))
    want = audited(model, file, tmp_path / "afterwards")
    num_shards = len(scanned_by)
    monkeypatch.setattr(ahead, "DEVICES", ("cpu",))
    plain, written = store._write_shard, []

    def until_the_third(path, *given):
        if len(written) == 3:
            raise KeyboardInterrupt
        plain(path, *given)
        written.append(path)

    monkeypatch.setattr(store, "_write_shard", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        audited(model, file, tmp_path / "ahead")
    assert all(path.exists() for path in written)
    monkeypatch.setattr(store, "_write_shard", plain)
    scanned_by.clear()
    assert audited(model, file, tmp_path / "ahead") == want
    assert len(scanned_by) == num_shards - len(written)
