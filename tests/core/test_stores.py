"""Corpora, models and reports on a real S3 server, and what may not lie there."""

import gzip
import json
import shutil
import stat
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import tightlip
from animals import WORDS
from object_store import ROWS, Store, write_files, write_model
from tightlip.audit.leakage import dry_run
from tightlip.core.checksums import sealed
from tightlip.core.errors import DamagedError, StoreError, UsageError
from tightlip.core.stores import cache_folder, send, shown, worked_in
from tightlip.corpus.encoding import saved_tokenizer
from tightlip.corpus.readers import open_corpus
from tightlip.corpus.tokens import tokenize_documents

PAIRS = [(row["user"], row["text"]) for row in ROWS]
FEW = {"device": "cpu", "num_bootstraps": 100}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_files(folder)
    (folder / "model").mkdir()
    write_model(folder / "model")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "all.jsonl").write_text(lines)
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    comma = "".join(f"{user},{text}\n" for user, text in PAIRS)
    (folder / "all.csv").write_text(f"user,text\n{comma}")
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


def pairs(source, **columns):
    batches = open_corpus(source, **columns).batches()
    return [pair for batch in batches for pair in zip(batch.users, batch.texts, strict=True)]


# Patterns


def test_files_that_a_pattern_names_are_one_corpus_in_their_order(place):
    pattern = str(place / "mails" / "*.parquet")
    assert pairs(pattern) == PAIRS
    assert open_corpus(pattern).fingerprint() == open_corpus(place / "mails").fingerprint()


def test_a_pattern_gives_the_tokens_of_the_files_put_together(place, tmp_path):
    tokenizer = saved_tokenizer(str(place / "model"))
    made = [
        tokenize_documents(open_corpus(source).batches(), tokenizer, tmp_path / name)
        for name, source in (("a", place / "mails" / "*.parquet"), ("b", place / "all.parquet"))
    ]
    assert made[0].corpus_fingerprint == made[1].corpus_fingerprint


def test_a_bad_row_of_many_files_is_named_with_its_file(tmp_path):
    for number in range(12):
        user = None if number == 7 else "ann"
        rows = [{"user": "ann", "text": "x"}, {"user": user, "text": "y"}]
        (tmp_path / f"{number:02}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(UsageError, match=r"07\.jsonl, row 2 has null in column 'user'"):
        pairs(str(tmp_path / "*.jsonl"))
    assert len(pairs(str(tmp_path / "*.jsonl"), bad_rows="skip")) == 23


def test_whoever_reads_only_the_beginning_leaves_no_thread_behind(tmp_path):
    for number in range(20):
        lines = (json.dumps({"user": "ann", "text": f"{number} {n}"}) for n in range(5000))
        (tmp_path / f"{number:02}.jsonl").write_text("\n".join(lines))
    before = {*threading.enumerate()}
    first = open_corpus(tmp_path).batches()
    assert next(first).texts[0] == "0 0"
    started = {*threading.enumerate()} - before
    first.close()
    for thread in started:
        thread.join(10)
    assert started
    assert not any(thread.is_alive() for thread in started)


def test_a_pattern_of_several_kinds_or_of_none_is_refused(place):
    with pytest.raises(UsageError, match="mixes files of different kinds"):
        open_corpus(str(place / "all.[cp]*"))
    with pytest.raises(UsageError, match="does not exist"):
        open_corpus(str(place / "none" / "*.parquet"))


# Corpora


@pytest.mark.parametrize(
    "address",
    [
        *("mails/*.parquet", "*/?.parquet", "mails", "mails/", "all.parquet"),
        *("all.jsonl", "all.jsonl.gz", "all.csv"),
    ],
)
def test_a_corpus_on_a_store_is_the_corpus_here(store, place, address):
    assert pairs(f"s3://mails/{address}") == PAIRS
    here = open_corpus(str(place / address)).fingerprint()
    assert open_corpus(f"s3://mails/{address}").fingerprint() == here


def test_a_bad_row_on_a_store_is_named_with_its_address(store):
    store.client.put_object(Bucket="mails", Key="bad/1.jsonl", Body=b'{"user": "a"}\n')
    with pytest.raises(UsageError, match=r"s3://mails/bad/1\.jsonl, row 1 has no column 'text'"):
        pairs("s3://mails/bad/*.jsonl")


def test_what_fsspec_knows_is_read_too():
    import fsspec

    with fsspec.open("memory://mails/a.jsonl", "w") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in ROWS))
    assert pairs("memory://mails/a.jsonl") == PAIRS


def test_text_prepared_from_a_store_is_text_prepared_here(store, place, tmp_path):
    settings = {"split": "none", "min_users": 1}
    here = tightlip.prepare(place / "mails", tmp_path / "here", **settings)
    there = tightlip.prepare("s3://mails/mails", tmp_path / "there", **settings)
    assert there.train.corpus_fingerprint == here.train.corpus_fingerprint
    assert (
        json.loads((here.folder / "id.json").read_text())["people"]
        == (json.loads((there.folder / "id.json").read_text())["people"])
    )


# Models


def test_a_model_on_a_store_is_audited_like_the_same_model_here(store, place):
    here = tightlip.audit(place / "model", place / "mails", device="cpu", public_model="none")
    there = tightlip.audit("s3://mails/model", "s3://mails/mails/*.parquet", device="cpu")
    assert there.summary["model"] == "s3://mails/model"
    assert there.summary | {"model": ""} == here.summary | {"model": ""}
    assert there.sequences == here.sequences


def test_a_model_is_copied_once_whole_private_and_without_pickles(store, place, caplog):
    tightlip.complete("s3://mails/model", ["ant bee"], device="cpu")
    (folder,) = (cache_folder() / "models").iterdir()
    assert f"copied to {folder}" in caplog.text
    assert f"Delete {folder.parent} to be rid" in caplog.text
    copy = folder / "mails" / "model"
    here = {path.name for path in (place / "model").iterdir()}
    assert {path.name for path in copy.iterdir()} - {".tightlip.sha256"} == here - {
        "training_args.bin"
    }
    assert shown(copy / "config.json") == "s3://mails/model/config.json"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")} == {0o600, 0o700}
    store.requests.clear()
    tightlip.complete("s3://mails/model", ["ant bee"], device="cpu")
    assert ("GET", "/mails/model/model.safetensors") not in store.requests


def test_a_model_that_changed_is_copied_anew(store, tmp_path):
    for seed in (1, 2):
        (tmp_path / f"{seed}").mkdir()
        write_model(tmp_path / f"{seed}", seed=seed)
        (tmp_path / f"{seed}" / "notes.txt").write_text("x" * seed)
        store.put(tmp_path / f"{seed}", "mails", "changing/")
        tightlip.complete("s3://mails/changing", ["ant"], device="cpu")
    assert len([*(cache_folder() / "models").iterdir()]) == 2


def test_a_copy_that_fails_half_way_is_no_copy(store):
    with (
        store.failing(lambda n, method, path: "403" if path.endswith("tokenizer.json") else None),
        pytest.raises(StoreError, match="may not be read"),
    ):
        tightlip.complete("s3://mails/model", ["ant"], device="cpu")
    assert not [*(cache_folder() / "models").iterdir()]


def test_weights_that_are_pickles_and_runs_are_not_copied(store):
    store.client.put_object(Bucket="mails", Key="pickled/pytorch_model.bin", Body=b"x")
    store.client.put_object(Bucket="mails", Key="pickled/config.json", Body=b"{}")
    with pytest.raises(UsageError, match="unpickling can execute any code"):
        tightlip.complete("s3://mails/pickled", ["ant"])
    store.client.put_object(Bucket="mails", Key="run/config.toml", Body=b"")
    with pytest.raises(UsageError, match="is a run, and runs are read from a local disk"):
        tightlip.audit("s3://mails/run", "s3://mails/mails")


def test_an_adapter_and_its_base_may_both_lie_there(store, place, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place / "model")
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    store.put(tmp_path / "adapter", "mails", "adapter/")
    there = {"base": "s3://mails/model", "device": "cpu"}
    found = tightlip.audit("s3://mails/adapter", "s3://mails/mails", **there)
    assert found.summary["model"] == "s3://mails/adapter"
    assert "to s3://mails/model." in " ".join(found.summary["notes"])


# Reports


def test_a_report_is_sent_without_text_unless_asked_and_its_manifest_last(store, place):
    model, corpus = place / "model", place / "mails"
    sent = tightlip.audit(model, corpus, out="s3://mails/out/a", device="cpu")
    names = {name.removeprefix("out/a/") for name in store.names("mails", "out/a/")}
    tables = {f"{name}.parquet" for name in ("sequences", "owners", "users")}
    assert names == {*tables, "summary.json", "report.html", "manifest.json"}
    puts = [path for method, path in store.requests if method in ("PUT", "POST")]
    assert puts[-1] == "/mails/out/a/manifest.json"
    assert not [*cache_folder().glob("reports/*")], "nothing stays here"
    assert sent.redacted
    assert b"person-1" not in store.get("mails", "out/a/users.parquet")
    read = tightlip.open_report("s3://mails/out/a")
    assert read.summary == sent.summary
    with_text = tightlip.audit(model, corpus, out="s3://mails/out/b", redact=False, device="cpu")
    assert with_text.summary["redacted"] is False
    assert tightlip.open_report("s3://mails/out/b").users["user"][0].as_py() == "person-0"


def test_a_dry_run_is_of_the_report_that_would_be_sent(store, place, monkeypatch):
    looked_at = []
    disk = SimpleNamespace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: looked_at.append(folder) or disk)
    estimate = partial(tightlip.estimate_audit, place / "model", place / "mails", device="cpu")
    told = estimate(out="s3://mails/dry")
    with_text = estimate(out="s3://mails/dry", redact=False)
    scan = dry_run.SCAN_BYTES * told.corpus["tokens"]
    assert told.passing_disk_bytes == with_text.passing_disk_bytes + scan, "no scan is kept"
    assert told.disk_bytes < with_text.disk_bytes - scan, "nor any text"
    assert looked_at == [cache_folder().parent] * 2
    assert not store.names("mails", "dry")
    assert not cache_folder().exists()
    with pytest.raises(StoreError, match="cannot be written: there is no bucket 'nobody'"):
        estimate(out="s3://nobody/report")


def test_a_report_that_is_not_whole_is_refused(store, place):
    tightlip.audit(place / "model", place / "mails", out="s3://mails/out/c", device="cpu")
    store.client.put_object(Bucket="mails", Key="out/c/summary.json", Body=b"{}")
    with pytest.raises(DamagedError, match=r"summary\.json is of another size"):
        tightlip.open_report("s3://mails/out/c")
    page = store.get("mails", "out/c/report.html")
    tightlip.audit(place / "model", place / "mails", out="s3://mails/out/c", device="cpu")
    store.client.put_object(Bucket="mails", Key="out/c/report.html", Body=page[:-1] + b"!")
    with pytest.raises(DamagedError, match=r"report\.html is of another content"):
        tightlip.open_report("s3://mails/out/c")
    store.client.delete_object(Bucket="mails", Key="out/c/manifest.json")
    for read in (tightlip.open_report, lambda one: tightlip.compare([one, place / "model"])):
        with pytest.raises(UsageError, match=r"has no manifest\.json, or none that calls it"):
            read("s3://mails/out/c")


def test_reports_on_a_store_are_compared_and_the_comparison_sent(store, place, tmp_path):
    (tmp_path / "other").mkdir()
    write_model(tmp_path / "other", seed=5)
    for name, model in (("x", place / "model"), ("y", tmp_path / "other")):
        out = f"s3://mails/of/{name}/report"
        tightlip.audit(model, place / "mails", out=out, device="cpu")
    both = ["s3://mails/of/x/report", "s3://mails/of/y/report"]
    made = tightlip.compare(both, out="s3://mails/of/comparison", **FEW)
    assert [row["name"] for row in made.rows] == ["x/report", "y/report"]
    assert {"of/comparison/comparison.html", "of/comparison/manifest.json"} <= {
        *store.names("mails", "of/comparison")
    }
    assert made.page.is_file()


def test_membership_and_extraction_are_sent_too(store, place):
    others = "".join(f"other-{n % 4},{' '.join(reversed(WORDS[n : n + 4]))}\n" for n in range(8))
    store.client.put_object(Bucket="mails", Key="o.csv", Body=f"user,text\n{others}".encode())
    texts = {"members": "s3://mails/mails/[012].parquet", "non_members": "s3://mails/o.csv"}
    out = "s3://mails/figures"
    figures = tightlip.measure_membership("s3://mails/model", **texts, out=out, **FEW)
    sent = json.loads(store.get("mails", "figures/membership.json"))
    assert sent == json.loads(json.dumps(figures))
    assert sent["made_from"]["members"] is None
    there = tightlip.extract(
        place / "model", place / "mails", out="s3://mails/extraction", lengths=(2,), device="cpu"
    )
    assert there.redacted
    assert "extraction/manifest.json" in store.names("mails", "extraction")


def test_generated_text_is_audited_and_the_report_sent_without_a_hash_of_any_text(store, place):
    out = "s3://mails/of-text"
    sent = tightlip.audit_text(["ant bee cat dog elk"], place / "mails", out=out, min_words=3)
    assert sent.table("users").num_rows == 4
    summary = json.loads(store.get("mails", "of-text/summary.json"))
    assert summary == sent.summary
    assert summary["corpus_fingerprint"] is summary["synthetic_fingerprint"] is None


def put_manifest(store, where, *names, kind="leakage", **also):
    files = [{"name": name, "size": 1, "sha256": ""} for name in names]
    record = {"format": 1, "kind": kind, "whole": True, "files": files} | also
    content = json.dumps(sealed(record))
    store.client.put_object(Bucket="mails", Key=f"{where}/manifest.json", Body=content)


@pytest.mark.parametrize(
    "name",
    ["../victim/precious.json", "/mails/victim/precious.json", "", "a/../../x.json", ".a.json"],
)
def test_a_manifest_that_names_files_elsewhere_deletes_and_reads_none(store, tmp_path, name):
    for key in ("victim/precious.json", "lying/report.html"):
        store.client.put_object(Bucket="mails", Key=key, Body=b"x")
    put_manifest(store, "lying", name, "report.html")
    (tmp_path / "summary.json").write_text("{}")
    before = store.names("mails")
    with pytest.raises(UsageError, match="holds other files"):
        send(tmp_path, "s3://mails/lying", "leakage")
    with pytest.raises(DamagedError, match="no report has a file"):
        tightlip.open_report("s3://mails/lying")
    assert store.names("mails") == before


def test_a_place_with_other_files_is_left_alone(store, place):
    def refused(out, words="holds other files"):
        before = store.names("mails", out)
        with pytest.raises(UsageError, match=words):
            tightlip.audit("no model", place / "mails", out=f"s3://mails/{out}")
        assert store.names("mails", out) == before

    refused("mails")
    refused("mails/*", "is a pattern")
    for content in (b"{}", b'{"name": "web"}', b"not JSON"):
        store.client.put_object(Bucket="mails", Key="theirs/manifest.json", Body=content)
        refused("theirs")
    put_manifest(store, "half", "summary.json")
    store.client.put_object(Bucket="mails", Key="half/precious.json", Body=b"x")
    refused("half")
    put_manifest(store, "newer", format=99)
    refused("newer")
    with pytest.raises(DamagedError, match=r"s3://mails/newer/manifest\.json .* another version"):
        tightlip.open_report("s3://mails/newer")


def test_a_folder_left_here_lets_no_report_in_among_other_files(store, tmp_path):
    def work(out="s3://mails/busy"):
        with worked_in(out, "leakage") as folder:
            (folder / "summary.json").write_text("{}")
            return folder

    left = work()
    assert left.is_dir()
    store.client.put_object(Bucket="mails", Key="busy/precious.txt", Body=b"x")
    with pytest.raises(UsageError, match=r"holds other files \('precious\.txt'\)"):
        work()
    with pytest.raises(UsageError, match="holds other files"):
        send(left, "s3://mails/busy", "leakage")


def test_two_servers_with_buckets_of_one_name_share_no_folder_here(store, monkeypatch):
    def folder():
        with worked_in("s3://mails/same", "leakage") as made:
            return made

    first = folder()
    assert folder() == first
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.url.replace("127.0.0.1", "localhost"))
    assert folder() != first


def test_a_report_of_another_command_is_not_replaced(store, place, tmp_path):
    (tmp_path / "comparison.json").write_text("{}")
    send(tmp_path, "s3://mails/one-of", "comparison")
    before = store.names("mails", "one-of")
    with pytest.raises(UsageError, match="kind 'comparison', and one of the kind 'membership'"):
        tightlip.measure_membership(
            place / "model", members=[], non_members=[], out="s3://mails/one-of"
        )
    assert store.names("mails", "one-of") == before


def test_of_an_earlier_report_nothing_is_left(store, tmp_path):
    for name in ("summary.json", "snapshots/step-1/summary.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for hidden in ("log.txt", ".work", "scan/tokens.json"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text("{}")
    send(tmp_path, "s3://mails/twice", "leakage")
    sent = {f"twice/{name}" for name in ("manifest.json", "summary.json")}
    assert {*store.names("mails", "twice")} == sent | {"twice/snapshots/step-1/summary.json"}
    (tmp_path / "snapshots/step-1/summary.json").unlink()
    send(tmp_path, "s3://mails/twice", "leakage")
    assert {name for name in store.names("mails", "twice") if not name.endswith("/")} == sent


def test_a_bucket_may_have_any_name(store, place):
    store.client.create_bucket(Bucket="address")
    store.put(place / "model", "address", "model/")
    assert tightlip.complete("s3://address/model", ["ant"], device="cpu")
    (copy,) = cache_folder().glob("models/*/address/model")
    assert shown(copy) == "s3://address/model"


def test_a_model_may_have_a_manifest_of_its_own(store, place):
    store.put(place / "model", "mails", "with-manifest/")
    store.client.put_object(Bucket="mails", Key="with-manifest/manifest.json", Body=b"{}")
    assert tightlip.complete("s3://mails/with-manifest", ["ant"], device="cpu")


# What may not lie there


@pytest.mark.parametrize(
    "call",
    [
        lambda out: tightlip.train("mails.parquet", out),
        lambda out: tightlip.prepare("mails.parquet", out),
        lambda out: tightlip.plant_canaries("mails.parquet", out),
        lambda out: tightlip.measure_groups("model", out=out),
        lambda out: tightlip.measure_canaries("model", out),
        lambda out: tightlip.ledger(out),
        lambda out: tightlip.represent_train("mails.parquet", out, label="team"),
        lambda out: tightlip.run_demo(Path(out)),
    ],
)
def test_what_is_under_way_and_ledgers_are_refused_on_a_store(call):
    with pytest.raises(UsageError, match="s3://mails/x is on an object store"):
        call("s3://mails/x")


def test_a_register_on_a_store_is_refused(monkeypatch, place, tmp_path):
    monkeypatch.setenv("TIGHTLIP_REGISTER", "s3://mails/register.jsonl")
    with pytest.raises(UsageError, match="is on an object store"):
        tightlip.prepare(place / "mails", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_password_in_an_address_is_refused_and_not_repeated():
    with pytest.raises(UsageError, match="has a password in it") as refused:
        open_corpus("s3://key:hunter2@mails/x")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["https://x.org/mails", "HTTP://x.org/m", "file:///tmp/x", "s3://", "S3:///mails/x"]
)
def test_what_is_no_place_on_a_store_is_no_folder_here_either(
    place, tmp_path, monkeypatch, address
):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: open_corpus(address),
        lambda: tightlip.complete(address, ["ant"]),
        lambda: tightlip.audit(place / "model", place / "mails", out=address),
        lambda: tightlip.prepare(place / "mails", address),
    ):
        with pytest.raises(UsageError, match="object store"):
            call()
    with pytest.raises(UsageError, match="object store"):
        tightlip.audit(place / "model", place / "mails", out=Path("https://x.org/mails"))
    assert not [*tmp_path.iterdir()]


def test_an_address_in_upper_case_is_one(store, place):
    assert pairs("S3://mails/mails") == PAIRS
    with pytest.raises(UsageError, match="s3://mails/mails holds other files"):
        tightlip.audit(place / "model", place / "mails", out="S3://mails/mails")
    with pytest.raises(UsageError, match=r"simplecache::s3:// cannot be read"):
        open_corpus("simplecache::s3://mails/mails")


def test_what_is_not_there_is_said_in_words(store):
    with pytest.raises(StoreError, match="there is no bucket 'nobody'"):
        open_corpus("s3://nobody/mails/*.parquet")
    with pytest.raises(UsageError, match="s3://mails/none does not exist"):
        open_corpus("s3://mails/none")
    with pytest.raises(StoreError, match="cannot be written: there is no bucket 'nobody'"):
        tightlip.audit("model", "mails", out="s3://nobody/report")
    with pytest.raises(UsageError, match="nosuch:// cannot be read here"):
        open_corpus("nosuch://mails/x")


def test_the_command_line_takes_addresses_and_patterns(store, place, capsys):
    from tightlip.cli.main import app

    corpus, out = str(place / "mails" / "*.parquet"), "s3://mails/by-command"
    arguments = ["audit", "s3://mails/model", corpus, "--out", out, "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    assert ended.value.code == 0
    assert "The report: s3://mails/by-command/report.html" in capsys.readouterr().out
    for refused in (["train", corpus, "--out", "s3://mails/run"], ["ledger", "s3://mails/run"]):
        with pytest.raises(SystemExit) as ended:
            app(refused)
        assert ended.value.code == 2
        assert "is on an object store" in capsys.readouterr().err
