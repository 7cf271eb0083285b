"""A store that fails now and then, is down, or hangs up while a report is sent: nothing half written
counts as whole, and the same command goes on."""

import errno
import json
import signal
from threading import Event
from types import SimpleNamespace

import pytest

import tightlip
from object_store import ROWS, Store, every_tenth, write_files, write_model
from tightlip.core.errors import FullDiskError, StoreError, UsageError
from tightlip.core.stores import cache_folder, send, worked_in
from tightlip.corpus.readers import open_corpus

DOWN = "s3://mails/x?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_files(folder)
    (folder / "model").mkdir()
    write_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def server(place):
    store = Store()
    store.client.create_bucket(Bucket="mails")
    store.put(place, "mails")
    yield store
    store.close()


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("TIGHTLIP_CACHE", str(tmp_path / "cache"))
    server.requests.clear()
    return server


@pytest.mark.parametrize("how", ["503", "drop"])
def test_a_store_that_fails_every_tenth_request_is_read_and_written(store, how, tally):
    out = f"s3://mails/tenth/{how}"
    with store.failing(every_tenth(how)):
        sent = tightlip.audit("s3://mails/model", "s3://mails/mails", out=out, device="cpu")
        read = tightlip.open_report(out)
    assert len(store.requests) > 30
    for _ in range(len(store.requests) // 10):
        tally("store requests", True)
    assert read.summary == sent.summary
    assert read.summary["num_documents"] == len(ROWS)


def test_a_store_that_is_down_ends_in_words(store, monkeypatch):
    monkeypatch.setattr("tightlip.core.stores.PATIENCE_SECONDS", 0)
    with pytest.raises(StoreError, match=r"failed again and again.*AWS_ENDPOINT_URL"):
        open_corpus(DOWN)


def test_a_region_that_cannot_be_asked_for_ends_in_words(monkeypatch):
    def fails(uri):
        raise OSError("When resolving region for bucket 'mails': AWS Error NETWORK_CONNECTION")

    monkeypatch.setattr("pyarrow.fs.FileSystem", SimpleNamespace(from_uri=fails))
    with pytest.raises(StoreError, match=r"s3://far/x could not be read.*NETWORK_CONNECTION"):
        open_corpus("s3://far/x")


def test_credentials_that_are_refused_are_spoken_of(store):
    with (
        store.failing(lambda n, method, path: "403"),
        pytest.raises(StoreError, match=r"may not be read.*AWS_PROFILE"),
    ):
        open_corpus("s3://mails/mails/*.parquet")


def test_a_file_that_fails_half_way_through_is_not_a_shorter_corpus(store):
    corpus = open_corpus("s3://mails/mails/*.parquet")
    with (
        store.failing(lambda n, method, path: "403" if path.endswith("4.parquet") else None),
        pytest.raises(StoreError, match=r"s3://mails/mails/4\.parquet may not be read"),
    ):
        list(corpus.batches())


def test_where_sending_fails_the_same_command_goes_on_from_its_scan(store, place, monkeypatch):
    given = {"out": "s3://mails/late", "device": "cpu"}
    with (
        store.failing(lambda n, how, path: "403" if how == "PUT" and "html" in path else None),
        pytest.raises(StoreError, match="is kept in") as failed,
    ):
        tightlip.audit(place / "model", place / "mails", **given)
    assert json.loads(store.get("mails", "late/manifest.json"))["whole"] is False
    with pytest.raises(UsageError, match=r"has no manifest\.json"):
        tightlip.open_report("s3://mails/late")
    assert not store.client.list_multipart_uploads(Bucket="mails").get("Uploads")
    (folder,) = cache_folder().glob("reports/*/mails/late")
    assert str(folder) in str(failed.value)
    monkeypatch.setattr("tightlip.scan.scanner.Scanner.begun", lambda *given: pytest.fail("again"))
    tightlip.audit(place / "model", place / "mails", **given)
    assert tightlip.open_report("s3://mails/late").num_documents == len(ROWS)
    assert not folder.exists()


def test_where_nothing_was_worked_out_nothing_is_left_and_nothing_said_of_it(store, place):
    with pytest.raises((StoreError, UsageError)) as failed:
        tightlip.audit(place / "model", "s3://nobodys/mails/*.parquet", out="s3://mails/never")
    assert "nobodys" in str(failed.value)
    assert "is kept in" not in str(failed.value)
    assert not [*cache_folder().glob("reports/*/mails/never")]


def test_an_overwrite_that_is_cut_off_is_done_by_another_machine(store, tmp_path, monkeypatch):
    def made(*names):
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in names:
            (folder / name).write_text(json.dumps(names))
        return folder

    out, new = "s3://mails/again", made("new.json", "summary.json")
    send(made("old.json", "summary.json"), out, "leakage")
    with (
        store.failing(lambda n, how, path: "403" if how == "PUT" and "new" in path else None),
        pytest.raises(StoreError, match="may not be written"),
    ):
        send(new, out, "leakage")
    with pytest.raises(UsageError, match="sending it was cut off"):
        tightlip.open_report(out)
    monkeypatch.setenv("TIGHTLIP_CACHE", str(tmp_path / "elsewhere"))
    with worked_in(out, "leakage"):
        send(new, out, "leakage")
    names = {name for name in store.names("mails", "again/") if not name.endswith("/")}
    assert names == {f"again/{name}" for name in ("manifest.json", "new.json", "summary.json")}


def test_a_disk_that_is_full_is_not_called_a_failure_of_the_store(store, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tightlip.core.stores.shutil.copyfileobj", full)
    with pytest.raises(FullDiskError, match="The disk is full"):
        tightlip.complete("s3://mails/model", ["ant"], device="cpu")


def test_a_corpus_that_is_replaced_between_two_passes_is_refused(store):
    def put(content):
        store.client.put_object(Bucket="mails", Key="moving/a.csv", Body=content)

    put(b"user,text\nann,ant bee\n")
    corpus = open_corpus("s3://mails/moving/*.csv")
    assert [text for batch in corpus.batches() for text in batch.texts] == ["ant bee"]
    put(b"user,text\nann,ant bee cat\n")
    with pytest.raises(StoreError, match=r"moving/a\.csv changed meanwhile"):
        list(corpus.batches())


def test_an_audit_killed_while_its_report_is_sent_sends_it_when_given_again(
    server, place, command, tally
):
    """Killed as its manifest arrives the first time, before all files, and the second, behind them:
    the store holds no report."""
    out = f"s3://mails/killed{server.here}"
    audit = ("audit", place / "model", place / "mails", "--out", out, "--device", "cpu")
    for last in (1, 2):
        arrived, gone, came = Event(), Event(), []

        def held(n, method, path, last=last, arrived=arrived, gone=gone, came=came):
            came += [path] if method in ("PUT", "POST") else []
            if method == "GET" or came.count("/mails/killed/manifest.json") < last:
                return None
            arrived.set()
            gone.wait(60)
            return "drop"

        with server.failing(held):
            ended = command.begin(*audit).kill_once(arrived.is_set)
            gone.set()
        assert ended.status == -signal.SIGKILL, ended.err
        with pytest.raises(UsageError, match=r"has no manifest\.json"):
            tightlip.open_report(out)
        tally("store kills", True)
    ended = command(*audit)
    assert ended.status == 0, ended.err
    assert tightlip.open_report(out).num_documents == len(ROWS)
