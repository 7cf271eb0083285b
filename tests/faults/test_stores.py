"""A store that fails now and then, is down, or hangs up while a report is sent: nothing half written
counts as whole, and the same command goes on."""

import os
import signal
from itertools import count
from threading import Event

import pytest

import tightlip
from killable import Commands
from object_store import ROWS, Store, environment, every_tenth, write_files, write_model
from tightlip.core.errors import UsageError
from tightlip.core.stores import StoreError, cache_folder
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
    for name, value in environment(server, tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
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
    with pytest.raises(StoreError, match="failed again and again.*AWS_ENDPOINT_URL"):
        open_corpus(DOWN)


def test_credentials_that_are_refused_are_spoken_of(store):
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    answer = store._app

    def refuse(environ, start_response):
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [denied]

    store._app = refuse
    try:
        with pytest.raises(StoreError, match="may not be read.*AWS_PROFILE"):
            open_corpus("s3://mails/mails/*.parquet")
    finally:
        store._app = answer


def test_a_file_that_fails_half_way_through_is_not_a_shorter_corpus(store, monkeypatch):
    monkeypatch.setattr("tightlip.core.stores.PATIENCE_SECONDS", 0)
    corpus = open_corpus("s3://mails/mails/*.parquet")
    is_last = lambda n, method, path: "503" if path.endswith("4.parquet") else None  # noqa: E731
    with (
        store.failing(is_last),
        pytest.raises(StoreError, match=r"s3://mails/mails/4\.parquet could not be read"),
    ):
        list(corpus.batches())


def test_where_sending_fails_the_same_command_goes_on_from_its_scan(store, place, monkeypatch):
    monkeypatch.setattr("tightlip.core.stores.PATIENCE_SECONDS", 0)
    given = {"out": "s3://mails/late", "device": "cpu"}
    is_page = lambda n, method, path: "503" if path.endswith("report.html") else None  # noqa: E731
    with store.failing(is_page), pytest.raises(StoreError, match="is kept in") as failed:
        tightlip.audit(place / "model", place / "mails", **given)
    assert "late/manifest.json" not in store.names("mails", "late")
    with pytest.raises(UsageError, match=r"has no manifest\.json"):
        tightlip.open_report("s3://mails/late")
    (folder,) = cache_folder().glob("reports/*/mails/late")
    assert str(folder) in str(failed.value)
    monkeypatch.setattr("tightlip.scan.scanner.Scanner.scan", lambda *given: pytest.fail("again"))
    tightlip.audit(place / "model", place / "mails", **given)
    assert tightlip.open_report("s3://mails/late").num_documents == len(ROWS)
    assert not folder.exists()


def test_an_audit_killed_while_its_report_is_sent_sends_it_when_given_again(
    server, place, tmp_path, monkeypatch, tally
):
    """Killed as its first, third and last file arrive: until then the store holds no report."""
    env = environment(server, tmp_path / "cache")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    audit = (
        "audit",
        place / "model",
        place / "mails",
        "--out",
        "s3://mails/killed",
        "--device",
        "cpu",
    )
    commands = Commands(tmp_path, env={**os.environ, **env})
    try:
        for number in (1, 3, 6):
            arrived, gone = Event(), Event()
            puts = count(1)

            def held(n, method, path, number=number, puts=puts, arrived=arrived, gone=gone):
                is_sent = path.startswith("/mails/killed/") and method == "POST"
                if is_sent and "uploads" not in path and next(puts) == number:
                    arrived.set()
                    gone.wait(60)
                    return "drop"
                return None

            with server.failing(held):
                ended = commands.begin(*audit).kill_once(arrived.is_set)
                gone.set()
            assert ended.status == -signal.SIGKILL, ended.err
            with pytest.raises(UsageError, match=r"has no manifest\.json"):
                tightlip.open_report("s3://mails/killed")
            tally("store kills", True)
        assert commands(*audit).status == 0
    finally:
        commands.close()
    assert tightlip.open_report("s3://mails/killed").num_documents == len(ROWS)
    assert not [*cache_folder().glob("reports/*/mails/*")]
