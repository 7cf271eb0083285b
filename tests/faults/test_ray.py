"""Audits on a real Ray cluster of several nodes: the local report to the byte, whoever dies meanwhile.

All tests of Ray are here, so that one process of tests has the one cluster.
"""

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tightlip
from cli.held_out_runs import documents, make_run, prepared
from cli.test_dry_run import check_shared_out
from faults.harm import ALL, changes, half_written, is_litter, tree
from killable import Commands
from tightlip.audit.leakage.counting import Sequences, count_in_shard, least_memory, over_shards
from tightlip.core.devices import on_workers
from tightlip.core.engines import EngineSettings
from tightlip.core.errors import FullDiskError, LostWorkersError, UsageError
from tightlip.core.files import written_whole
from tightlip.corpus.tokens import TokenizedCorpus, mapped
from tightlip.engines import ray as ray_engine
from tightlip.engines.local import LocalEngine
from tightlip.scan import store
from tightlip.scan.models import on_worker, open_model
from tightlip.scan.options import ScanOptions

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")
SHARD_TOKENS = 40  # so that a small text has many
QUICK = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Nobody's own home: a folder with the token of the cluster, and without what Ray may leave."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        (home / "token").write_text("a" * 64)
        patch.setenv("HOME", str(home))
        # Workers import what these tests give them.
        there = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, there)))
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "token"))
        # Ray's workers would let every other test go first, and take four times as long.
        patch.setenv("RAY_worker_niceness", "0")
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        yield home
        assert [path.name for path in home.iterdir()] == ["token"]


@pytest.fixture(scope="module")
def cluster(home):
    """It asks for a token."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK}
    with ray_engine._environment({"RAY_AUTH_MODE": "token"}):
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(num_cpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def command(home, tmp_path_factory):
    """Commands in that home."""
    commands = Commands(tmp_path_factory.mktemp("command"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def engine(cluster):
    """Two workers, one on each node; to import torch for each test anew would take minutes."""
    settings = EngineSettings(engine="ray", address=cluster.address, threads_per_worker=1)
    with settings.opened("cpu") as engine:
        on_workers.set(False)  # what is audited here in between is
        yield engine


@pytest.fixture
def on_ray(engine, monkeypatch):
    """Calls with engine="ray" get the engine that stands."""
    plain = EngineSettings.opened

    def opened(settings, device="auto"):
        return nullcontext(engine) if settings.engine == "ray" else plain(settings, device)

    engine.notes.clear()
    monkeypatch.setattr(EngineSettings, "opened", opened)
    monkeypatch.setattr(store, "SHARD_TOKENS", SHARD_TOKENS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    corpus = prepared(folder / "corpus", documents(), split="document", holdout=0.25)
    return make_run(folder / "run", corpus, steps=40)


def report_of(folder):
    """Every file of a report but the log; of checksums the names."""
    return {path: told for path, told in tree(folder).items() if path != "log.txt"}


# First, while no other engine has the cluster


def test_a_killed_driver_goes_on_from_the_shards_on_storage(cluster, command, run, tmp_path, tally):
    how = ("audit", run, "--threads-per-worker", 1, "--device", "cpu")
    local, out = tmp_path / "local", tmp_path / "ray"
    ran = command(*how, "--out", local, shard_tokens=SHARD_TOKENS)
    assert ran.status == 0, ran.err
    how = (*how, "--engine", "ray", "--address", cluster.address, "--workers", 1, "--out", out)
    life = command.begin(*how, shard_tokens=SHARD_TOKENS)
    killed = life.kill_once(lambda: any(out.rglob("*.npz")))
    assert killed.status == -signal.SIGKILL, killed.err
    time.sleep(1)  # its workers notice
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.npz")}
    problem = half_written(out)
    ran = command(*how, shard_tokens=SHARD_TOKENS)
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*.npz")}
    assert ran.status == 0, ran.err
    assert 0 < len(before) < len(after) / 2
    assert before.items() <= after.items(), "what stood was scanned again"
    assert not [path for path in tree(out) if is_litter(path)]
    tally("drivers killed", not problem and not changes(report_of(local), report_of(out)))
    assert not problem
    assert changes(report_of(local), report_of(out)) == []
    assert "ray" not in ran.err.lower()


def test_a_command_starts_its_own_cluster_and_ends_it(command, run, tmp_path):
    own, temporary = shutil.copytree(run, tmp_path / "run"), Path(tempfile.gettempdir())
    before = {*temporary.glob("tl-*")}
    how = ("--engine", "ray", "--workers", 1, "--threads-per-worker", 1, "--device", "cpu")
    life = command.begin("membership", own, *how, "--num-bootstraps", 100)
    address, folder = _own_cluster(temporary, before)
    with pytest.raises(ray.exceptions.AuthenticationError):
        ray._raylet.GcsClient(address=address)
    assert folder.stat().st_mode & 0o777 == 0o700
    ran = life.end()
    assert ran.status == 0, ran.err
    assert "ray" not in ran.err.lower(), "it says nothing of its own"
    assert any((own / "scan").rglob("*.npz"))
    assert not folder.exists()


def _own_cluster(temporary, before):
    """Where the cluster of a command listens, once it does, and its folder."""
    end = time.monotonic() + 180
    while time.monotonic() < end:
        for path in temporary.glob("tl-*/ray/session_2*/gcs_server_port_*"):
            folder = path.parents[2]
            if folder not in before and (port := path.read_text().strip()):
                return f"127.0.0.1:{port}", folder
        time.sleep(0.01)
    raise AssertionError("no cluster was started")


def test_a_cluster_that_does_not_answer_or_asks_for_another_token_is_refused_in_words(
    cluster, monkeypatch
):
    def join(address):
        return EngineSettings(engine="ray", address=address).opened("cpu")

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "127.0.0.1:1", "local", "nowhere"):
        with pytest.raises(UsageError, match=f"at {address} cannot be joined"), join(address):
            pass
    for name, value in (("RAY_AUTH_TOKEN", "b" * 64), ("RAY_AUTH_MODE", "disabled")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            words = r"authentication.*RAY_AUTH_TOKEN_PATH"
            with pytest.raises(UsageError, match=words), join(cluster.address):
                pass


def test_what_is_wrong_with_arguments_is_said_before_a_cluster_starts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(EngineSettings, "opened", None)  # nothing is opened
    wrong = {"out": tmp_path / "out", "engine": "ray"}
    for call in (tightlip.audit, tightlip.extract):
        with pytest.raises(UsageError, match="memory='5xx'"):
            call(run, memory="5xx", **wrong)
    with pytest.raises(UsageError, match="num_bootstraps=3"):
        tightlip.measure_membership(run, num_bootstraps=3, **wrong)
    with pytest.raises(UsageError, match="save_pretrained"):
        tightlip.audit((object(), object()), **wrong)


def test_without_ray_it_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'tightlip\[ray\]'"):
        tightlip.audit(run, out=tmp_path / "out", engine="ray")
    with pytest.raises(UsageError, match="Give engine='ray' too"):
        tightlip.audit(run, out=tmp_path / "out", address="auto")


# What every engine owes


def test_results_come_in_the_items_order_and_errors_reach_the_caller(engine):
    def late_for_early_ones(number):
        time.sleep(0.2 * (number == 0))
        return number * number

    pairs = list(engine.map(late_for_early_ones, iter(range(20))))
    assert pairs == [(number, number * number) for number in range(20)]
    assert list(engine.map(len, [])) == []
    with pytest.raises(ZeroDivisionError):
        list(engine.map(lambda number: 1 / number, range(3)))
    with pytest.raises(UsageError, match=r"^not like this$"):
        list(engine.map(_refuse, range(3)))


def _refuse(number):
    raise UsageError("not like this")


def test_a_worker_opens_once_and_what_was_not_asked_to_the_end_is_forgotten(engine, tmp_path):
    def opening():
        (tmp_path / f"opened-{os.getpid()}").touch(exist_ok=False)
        return lambda number: number

    begun = engine.scatter(lambda: lambda number: time.sleep(0.05) or "old", range(100))
    assert next(begun) == (0, "old")
    begun.close()
    assert [result for _, result in engine.scatter(opening, range(8))] == [*range(8)]
    assert 1 <= len([*tmp_path.iterdir()]) <= 2


# The same bytes


def test_reports_are_those_of_the_local_engine_to_the_byte(on_ray, run, tmp_path):
    asked = {"contexts": ("training", "short"), "near": 0.2, "near_tokens": 4, "near_sample": 20}
    for engine in ("local", "ray"):
        how = {"engine": engine, "threads_per_worker": 1, "device": "cpu"}
        tightlip.audit(run, out=tmp_path / engine / "audit", **asked, **how)
        tightlip.extract(run, out=tmp_path / engine / "extract", lengths=(2, 4), top_k=3, **how)
        own = shutil.copytree(run, tmp_path / "run")
        tightlip.measure_membership(own, out=tmp_path / engine, num_bootstraps=100, **how)
        shutil.move(own, tmp_path / engine / "run")
    local, other = (report_of(tmp_path / engine) for engine in ("local", "ray"))
    assert sum(path.endswith(".npz") for path in other) > 20
    assert changes(local, other) == []


def test_a_dry_run_tells_of_the_cluster_that_stands(on_ray, cluster, engine, run, monkeypatch):
    num_machines = len(cluster.list_all_nodes())  # the head, which has no worker, is paid too
    check_shared_out(run, engine.num_workers, num_machines, monkeypatch)
    assert (engine.num_workers, num_machines) == (2, 3)


def test_a_model_in_memory_and_what_workers_cannot_see_are_refused(on_ray, run, tmp_path):
    pair = (object(), object())
    for given in ({"model": pair}, {"model": run, "public_model": pair}):
        with pytest.raises(UsageError, match="save_pretrained"):
            tightlip.audit(**given, out=tmp_path / "out", engine="ray")
    with pytest.raises(UsageError, match="Leave engine='ray' out"):
        tightlip.audit(run, out=tmp_path / "out", engine="ray", device_map="auto")
    assert not (tmp_path / "out").exists()


def test_a_worker_names_the_path_that_it_does_not_see(engine, tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(9, dtype=np.int32))
    corpus = TokenizedCorpus(
        tokens=mapped(path), bounds=np.array([0, 9]), users=np.zeros(1, np.int32), user_names=["a"],
        corpus_fingerprint="c", tokenizer_fingerprint="t",
    )  # fmt: skip
    found = engine.map(lambda number: int(corpus.tokens[number]), [3])
    assert list(found) == [(3, 3)]
    path.unlink()
    with pytest.raises(UsageError, match=f"{path}.*same paths"):
        list(engine.map(lambda number: int(corpus.tokens[number]), [3]))


def test_a_worker_that_does_not_see_the_model_says_on_which_machine(engine, run, tmp_path):
    folder = shutil.copytree(Path(run) / "model", tmp_path / "model")
    model = open_model(folder, ScanOptions(device="cpu", batch_tokens=77))
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match=f"{socket.gethostname()}.*{folder}"):
        list(engine.scatter(partial(_scanned_by, model), [0]))


def _scanned_by(model):
    return on_worker(model).open_scan


def test_another_address_than_that_of_the_cluster_that_stands_is_refused(cluster, engine):
    with ray_engine._joined(cluster.address), ray_engine._joined(None):
        pass
    assert ray.is_initialized(), "it stays"
    with socket.create_server(("", 0)) as other:
        there = ray_engine._joined(f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(UsageError, match=f"has joined {cluster.address}"), there:
            pass


def test_a_cluster_without_gpus_is_asked_for_another_device():
    with pytest.raises(UsageError, match=r"'cuda'.*no GPUs\. Use cpu or auto"):
        ray_engine._device("cuda", has_gpu=False)


def test_workers_hold_no_more_than_their_share_of_a_corpus_five_times_as_large(engine, tmp_path):
    """What they take while they count is looked at every few milliseconds."""
    num_documents, size = 6000, 1000
    tokens = np.random.default_rng(0).integers(0, 5000, num_documents * size, dtype=np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    corpus = TokenizedCorpus(
        tokens=mapped(tmp_path / "tokens.npy"),
        bounds=np.arange(num_documents + 1, dtype=np.int64) * size,
        users=np.arange(num_documents, dtype=np.int32) // 3,
        user_names=[str(number) for number in range(num_documents // 3)],
        corpus_fingerprint="c",
        tokenizer_fingerprint="t",
    )
    whole = least_memory(replace(corpus, bounds=np.array([0, len(tokens)]), users=np.zeros(1, int)))
    bound = whole // 5
    needles = Sequences(tokens=tokens[:3000].copy(), offsets=np.arange(0, 3001, 3))
    watched = partial(_peak_of, look=partial(count_in_shard, sequences=needles))
    list(over_shards(engine, watched, corpus, bound * engine.workers // 4))  # compiled by now
    found = list(over_shards(engine, watched, corpus, bound * engine.workers))
    assert len(found) > 5
    peaks = [peak for _, (peak, _) in found]
    threads_and_the_like = 4 << 20  # of the process itself, whatever it counts; the text has 162 MB
    assert bound / 4 < max(peaks) <= bound + threads_and_the_like, (peaks, bound)
    totals = sum(counts.totals for _, (_, counts) in found)
    one = next(
        iter(over_shards(LocalEngine(1), partial(count_in_shard, sequences=needles), corpus, whole))
    )
    assert totals.tolist() == one[1].totals.tolist()


def _peak_of(shard, look):
    """How much memory of its own the process takes more than before at most, and what is found."""
    size = 4 * len(shard.tokens)  # stands by now
    before, peak, is_over = _own_memory() - size, 0, threading.Event()

    def watch():
        nonlocal peak
        while not is_over.is_set():
            peak = max(peak, _own_memory() - before)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = look(shard)
    is_over.set()
    watcher.join()
    return peak, found


def _own_memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def test_runs_that_outgrow_memory_come_to_the_same_report(on_ray, engine, run, tmp_path):
    how = {"threads_per_worker": 1, "device": "cpu"}
    tightlip.audit(run, out=tmp_path / "local", **how)
    report = tightlip.audit(run, out=tmp_path / "ray", engine="ray", memory="5KB", **how)
    assert 180 * report.sequences_in_s > 5_000
    assert changes(report_of(tmp_path / "local"), report_of(tmp_path / "ray")) == []


# Whoever dies. First those tests that want workers which have imported everything.


COMMANDS = {
    "audit": tightlip.audit,
    "extract": partial(tightlip.extract, lengths=(2, 4), top_k=3),
    "membership": partial(tightlip.measure_membership, num_bootstraps=100),
}


def made_by(command, run, **how):
    """Every file that a command leaves in a run and its report, always at one path."""
    own = shutil.copytree(run, run.with_name("own"))
    COMMANDS[command](own, out=own / "report", threads_per_worker=1, device="cpu", **how)
    assert not half_written(own)
    made = report_of(own)
    shutil.rmtree(own)
    return made


@pytest.fixture(scope="module")
def locally(run):
    return cache(lambda command: made_by(command, run))


@pytest.mark.parametrize("command", COMMANDS if ALL else ["audit"])
@pytest.mark.parametrize("fault", ["nodes killed", "workers killed", "full disks"])
def test_whoever_dies_or_has_no_room_the_report_is_that_of_this_machine(
    fault, command, on_ray, cluster, engine, locally, run, tally
):
    wanted, there = locally(command), []
    _wait_for_both(engine)
    num_workers = engine.num_workers

    def kill_node():
        while not there:
            there.extend(run.with_name("own").rglob("*.npz"))
            time.sleep(0.002)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    killer = threading.Thread(target=kill_node)
    if fault == "nodes killed":
        killer.start()
    else:
        next(engine.map(partial(_harm, fault), [0]))
    before = {*engine._kinds}
    made = made_by(command, run, engine="ray")
    if fault == "nodes killed":
        killer.join()
        cluster.add_node(num_cpus=1)
    assert len(there) < sum(path.endswith(".npz") for path in made) / 2, "it was nearly done"
    assert len(before - {*engine._kinds}) == 1, "nobody was lost"
    assert engine.num_workers == num_workers - (fault == "full disks"), "it is asked no more"
    engine.num_workers = num_workers
    tally(fault, not changes(wanted, made))
    assert changes(wanted, made) == []


def _wait_for_both(engine):
    engine.start()
    while engine._starting:
        engine._take_in(ray.wait([*engine._starting])[0][0])
    assert len(engine._kinds) == 2


def _harm(fault, _):
    """From now on the worker dies of the first shard that it would write, or finds its disk full."""

    @contextmanager
    def harmed(path):
        if fault == "workers killed":
            os.kill(os.getpid(), signal.SIGKILL)
        with written_whole(path) as beside:  # the kernel says that there is no room
            beside.unlink()
            beside.symlink_to("/dev/full")
            yield beside

    store.written_whole = harmed


def test_all_that_the_workers_of_a_lost_machine_had_in_hand_is_done_again():
    """One of two tasks of a machine ends first; the other's worker is dismissed with it."""

    def lost(task):
        raise ray.exceptions.RayActorError

    engine, again = object.__new__(ray_engine.RayEngine), deque()
    engine._ray = SimpleNamespace(
        get=lost, kill=lambda worker: None, nodes=lambda: [{"NodeID": "b", "Alive": True}],
        exceptions=ray.exceptions,
    )  # fmt: skip
    engine._nodes = {"first": "a", "second": "a", "third": "b"}
    engine._kinds = dict.fromkeys(engine._nodes, "cpu")
    engine._busy = {"task 4": ("first", 4), "task 5": ("second", 5), "task 6": ("third", 6)}
    engine._idle, engine._starting = [], {}
    engine._settle("task 4", {}, again, Counter())
    assert sorted(again) == [4, 5]
    assert [*engine._busy] == ["task 6"]


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("words", ["has tightlip 0.1", "The machines of the cluster differ"])
def test_a_worker_that_comes_late_and_is_refused_leaves_what_others_did(words, is_late):
    """In the place of one that died, say. Of another refusal no scan is left."""

    def told(task):
        if words.startswith("The"):
            return "CPU b", "b"
        raise ray.exceptions.RayTaskError("kind", "", UsageError(words))

    engine = object.__new__(ray_engine.RayEngine)
    engine._ray, engine._mixed = SimpleNamespace(get=told, exceptions=ray.exceptions), False
    engine._nodes = {"first": "a"} if is_late else {}
    engine._kinds, engine._idle = dict.fromkeys(engine._nodes, "CPU a"), []
    engine._starting = {"task": "second"}
    if words.startswith("The") and not is_late:
        engine._take_in("task")
        assert engine._idle == ["second"]
        return
    with pytest.raises(UsageError, match=words) as refused:
        engine._take_in("task")
    assert isinstance(refused.value, LostWorkersError) == is_late


def _node(_):
    return ray.get_runtime_context().get_node_id()


def test_a_shard_that_kills_every_worker_ends_in_words(engine, monkeypatch):
    monkeypatch.setattr(ray_engine, "_MOST_DEATHS", 2)  # each takes the start of another
    with pytest.raises(UsageError, match=r"2 workers died at the same shard.*batch_tokens"):
        list(engine.map(lambda number: os.kill(os.getpid(), signal.SIGKILL), [0]))


def test_machines_of_different_kinds_are_refused_unless_asked_for_and_then_told(
    on_ray, engine, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(ray_engine, "_Worker", _OfItsOwnKind)
    _fill_every_disk(engine)
    with pytest.raises(UsageError, match=r"differ: CPU \w+; CPU \w+\..*mixed=True"):
        engine.kinds("cpu")
    monkeypatch.setattr(engine, "_mixed", True)
    report = tightlip.audit(run, out=tmp_path / "out", engine="ray", device="cpu")
    assert any("different kinds (CPU" in note for note in report.summary["notes"])
    again = tightlip.audit(run, out=tmp_path / "out", engine="local", device="cpu")
    assert any("different kinds" in note for note in again.summary["notes"]), "the scan was kept"
    engine._dismiss([*engine._kinds])


def _fill_every_disk(engine):
    """Where nobody has room the refusal says so, and all workers are gone."""

    def no_room(number):
        raise FullDiskError("The disk is full: x")

    num_workers = engine.num_workers
    with pytest.raises(FullDiskError, match="disk is full"):
        list(engine.map(no_room, range(3)))
    engine.num_workers = num_workers


class _OfItsOwnKind(ray_engine._Worker):
    """A worker whose node is like no other."""

    def __init__(self, *given):
        super().__init__(*given)
        ray_engine.kind_of_device = store.kind_of_device = lambda device: f"CPU {_node(0)[:6]}"
