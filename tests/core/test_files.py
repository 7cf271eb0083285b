"""Claims on folders, and what killed processes leave behind."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tightlip.core.checksums import LIST
from tightlip.core.errors import UsageError
from tightlip.core.files import (
    claimed,
    folder_written_whole,
    names_in,
    partial_beside,
    remove_partials_in,
    written_whole,
)

HOLD = """
import sys, time
from pathlib import Path
from tightlip.core.checksums import LIST
from tightlip.core.files import claimed, written_whole
with claimed(Path(sys.argv[1])), written_whole(Path(sys.argv[1]) / "inner/report.json"):
    print("claimed", flush=True)
    time.sleep(60)
"""
NOBODY = 2**22 + 1  # above any process' number


@pytest.fixture
def holder(tmp_path):
    """Another process that has claimed `out` and is writing a file in it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.wait()


def test_of_two_processes_the_second_is_refused_until_the_first_is_dead(tmp_path, holder):
    out = tmp_path / "out"
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="in use by another tightlip process"), claimed(out):
        raise AssertionError
    assert sorted(tmp_path.rglob("*")) == there
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with claimed(out):
        remove_partials_in(out)
        assert not list(tmp_path.rglob("*.partial")), "what it was killed over is gone"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_claim_is_of_the_folder_whatever_its_name(tmp_path, holder):
    (tmp_path / "link").symlink_to("out")
    for path in (tmp_path / "link", tmp_path / "inner/../out"):
        (tmp_path / "inner").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match="in use"), claimed(path):
            raise AssertionError


def test_whoever_has_claimed_may_claim_again_and_gives_back_once(tmp_path):
    with claimed(tmp_path / "out"):
        with claimed(tmp_path / "out"):
            pass
        assert (tmp_path / ".out.tightlip.lock").exists()
    assert not list(tmp_path.iterdir())


def test_a_claim_leaves_what_others_write_and_what_is_not_ours(tmp_path, holder):
    """A folder above one that is claimed: the other process goes on."""
    stays = tmp_path / ".mine.partial"
    stays.touch()
    ours = partial_beside(tmp_path / "report.json").name
    left_behind = [ours.replace(str(os.getpid()), str(NOBODY)), f".out.{NOBODY}.partial"]
    (tmp_path / left_behind[0]).touch()
    (tmp_path / left_behind[1]).touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (
        tmp_path / ours.replace("report.json", "link").replace(str(os.getpid()), str(NOBODY))
    ).symlink_to(elsewhere)
    with claimed(tmp_path):
        remove_partials_in(tmp_path)
    left = sorted(path.name for path in tmp_path.rglob(".*.partial"))
    theirs = ours.replace(str(os.getpid()), str(holder.pid))
    assert left == sorted([stays.name, left_behind[1], theirs])
    assert (elsewhere / "kept").exists()


def test_many_that_claim_at_once_work_one_after_the_other(tmp_path):
    program = """
import sys, time
from pathlib import Path
from tightlip.core.errors import UsageError
from tightlip.core.checksums import LIST
from tightlip.core.files import claimed
folder, done = Path(sys.argv[1]), 0
while done < 40:
    try:
        with claimed(folder / "out"):
            (folder / "inside").mkdir()  # fails if anybody else is in here
            (folder / "inside").rmdir()
            done += 1
    except UsageError:
        time.sleep(0.001)
"""
    ends = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in ends:
        assert process.wait(timeout=60) == 0, process.stderr.read().decode()
    assert not list(tmp_path.iterdir())


def test_what_a_file_manager_left_blocks_nothing_and_stays(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".DS_Store").write_bytes(b"theirs")
    assert names_in(out) == set()
    assert names_in(tmp_path / "nowhere") == set()
    with folder_written_whole(out) as beside:
        (beside / "file").touch()
    assert {path.name for path in out.iterdir()} == {".DS_Store", "file", LIST}


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/theirs").touch()

    def write():
        with folder_written_whole(tmp_path / "out") as beside:
            (beside / "file").touch()

    with pytest.raises(OSError, match="not empty"):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_a_file_written_whole_has_one_owner_and_nothing_beside_it(tmp_path):
    with written_whole(tmp_path / "a/file", alone=True) as beside:
        beside.write_text("whole")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]
    assert (tmp_path / "a/file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("No space left (28)")]
)
@pytest.mark.parametrize("whole", [written_whole, folder_written_whole])
def test_a_full_disk_names_the_file_what_it_needed_and_what_is_free(tmp_path, whole, error):
    def write():
        with whole(tmp_path / "out") as beside:
            (beside / "part" if beside.is_dir() else beside).write_bytes(b"x" * 1234)
            raise error

    with pytest.raises(UsageError, match=r"out needs more than 1,234 bytes, and [\d,]+ are free"):
        write()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_went_with_its_folder_is_not_taken_from_the_next_holder(tmp_path):
    folder = tmp_path / "parent/out"
    with claimed(folder):
        shutil.rmtree(folder.parent)
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "claimed\n"
    with pytest.raises(UsageError, match="in use"), claimed(folder):
        raise AssertionError
    process.kill()
    process.wait()


def test_a_forked_child_holds_nothing(tmp_path):
    with claimed(tmp_path / "out"):
        child = os.fork()
        if child == 0:
            try:
                with claimed(tmp_path / "out"):
                    os._exit(1)
            except UsageError:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
