"""Settings and fixtures for all tests."""

import gc
import itertools
import os
import tempfile

# Nobody's own register: each process of tests has one, and each test a fresh one.
os.environ["TIGHTLIP_REGISTER"] = f"{tempfile.mkdtemp(prefix='register-')}/register.jsonl"

# Nobody's own cache and credentials: object stores are played on loopback.
os.environ |= {
    "TIGHTLIP_CACHE": tempfile.mkdtemp(prefix="cache-"),
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
}

# Tiny models gain nothing from threads, and two test runs on one machine would fight over cores.
# Before torch is imported, so that subprocesses started by tests inherit it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import pytest
from hypothesis import settings

import remembered
from killable import Commands
from shared import Shared

# The same cases in every run; one worker may be slow while the other one trains.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("fixed")

REGISTER = os.environ["TIGHTLIP_REGISTER"]

# Whole commands, a browser, and what the pages of the docs start from: what uses them is slow.
SLOW_FIXTURES = {"command", "browser", "inputs"}


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "slow: takes long (whole commands, trainings, kills, a browser); not in make check",
    )


def pytest_collection_modifyitems(items):
    """Say which tests are slow, and begin with their files: the workers end on short ones."""
    for item in items:
        if SLOW_FIXTURES & {*item.fixturenames}:
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """What is imported by now stays: going through it again took a tenth of a second each time."""
    remembered.install()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Units of work for the workers, by hand: xdist's own groups are lost on pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return ByUnit(config, log)


def unit_of(nodeid):
    """A file's fixtures are made on one worker only, and one browser serves all pages.

    Each page of the docs stands alone, so that they even out what the workers have at the end.
    """
    file, _, test = nodeid.partition("::")
    if test.startswith("test_what_the_page_shows_runs"):
        return nodeid
    return "pages" if "tests/report/" in file else file


@pytest.fixture(scope="session")
def registers(tmp_path_factory):
    """Folders that are numbered here: pytest looks through all that there are to find a number."""
    root = tmp_path_factory.mktemp("registers")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def register(registers, monkeypatch):
    """The register of private runs, of this test only."""
    path = next(registers) / "register.jsonl"
    path.parent.mkdir()
    monkeypatch.setenv("TIGHTLIP_REGISTER", str(path))
    return path


@pytest.fixture
def register_of_processes(register, monkeypatch):
    """That of processes which were started before this test, in the place of its own."""
    monkeypatch.setenv("TIGHTLIP_REGISTER", REGISTER)


@pytest.fixture(autouse=True)
def asks_always(request, monkeypatch):
    """Whether rows meet is asked of every model, stock or not, where that is what is tested."""
    is_asked = request.path.stem.startswith(remembered.ALWAYS_ASKED)
    monkeypatch.setattr(remembered, "asks_always", is_asked)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """Folders made once for all workers: shared(name, make)."""
    root = tmp_path_factory.getbasetemp()
    folders = Shared((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "shared")
    yield folders
    folders.check_untouched()


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """Runs `tightlip ...` in a fork of one process and says how it ended.

    One process for all tests of commands: importing torch takes longer than most of them.
    """
    commands = Commands(tmp_path_factory.mktemp("command"))
    yield commands
    commands.close()
