"""A full disk and a read-only one: a line that says so, nothing half-written, and then it goes on.

The disk is a tmpfs in a mount namespace of its own, which needs no rights: root is not stopped by
permission bits, and everybody is stopped by these. We look at it through /proc/PID/root.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from faults.cases import CASES, write_place
from faults.harm import (
    ALL,
    SHORT,
    Bench,
    changes,
    half_written,
    is_litter,
    sample,
    told_wrong,
    tree,
)
from killable import Commands

pytestmark = pytest.mark.slow
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")
ROOMY = 64 << 20
# Where the disk is full: how much of what the command adds still fits.
SHARES = {"early": 0.02, "in the middle": 0.5, "late": 0.95}


def can_unshare():
    try:
        return subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"]).returncode == 0
    except OSError:
        return False


class Disk(Bench):
    """A bench on a small disk of its own; `place` is where the commands see it."""

    def __init__(self, made, folder):
        (folder / "lives").mkdir()
        (folder / "disk").mkdir()
        super().__init__(Commands(folder / "lives", within=UNSHARE), made, folder / "disk")
        self.command("--version")  # it has become what it is to be
        self.mount("-t", "tmpfs", "-o", f"size={ROOMY}", "none")
        self.seen = Path(f"/proc/{self.command.pid}/root") / self.place.relative_to("/")

    def mount(self, *how):
        enter = ["nsenter", "-t", str(self.command.pid), "-U", "-m", "--preserve-credentials"]
        subprocess.run([*enter, "mount", *how, str(self.place.parent)], check=True)

    def resize(self, size, mode="rw"):
        self.mount("-o", f"remount,size={size},{mode}")

    def fresh(self):
        self.resize(ROOMY)
        shutil.rmtree(self.seen, ignore_errors=True)
        return shutil.copytree(self._made, self.seen)

    def used(self):
        return shutil.disk_usage(self.seen).used


@pytest.fixture(scope="module")
def disk(shared, tmp_path_factory):
    if not can_unshare():
        pytest.skip("no mount namespaces without rights here (unshare -rm)")
    disk = Disk(shared("faults", write_place), tmp_path_factory.mktemp("small"))
    yield disk
    disk.command.close()


def sizes(disk, name):
    """What the place takes before and after a command, and what it then holds."""
    disk.fresh()
    before = disk.used()
    ran = disk.run(name)
    assert ran.status == 0, ran.err
    return before, disk.used(), tree(disk.seen)


def harm_done(disk, name, size, unharmed):
    disk.fresh()
    disk.resize(size)
    before = tree(disk.seen)
    ran = disk.run(name)
    if problem := told_wrong(ran, statuses=(2,)):
        return problem
    if not re.search(
        r"The disk is full: \S+ needs more than [\d,]+ bytes, and [\d,]+ are", ran.err
    ):
        return f"does not say which file found no room: {ran.err.strip()[-200:]}"
    left = tree(disk.seen)
    if litter := [path for path in left if is_litter(path) and path not in before]:
        return f"left behind: {litter}"
    if broken := half_written(disk.seen):
        return f"half-written: {broken}"
    disk.resize(ROOMY)
    ran = disk.run(name)
    if ran.status:
        return f"with room again: status {ran.status}: {ran.err.strip()[-200:]}"
    differing = changes(unharmed, tree(disk.seen))
    return f"not as undisturbed: {differing}" if differing else None


# Without `make faults` some commands meet one of the three each, in turn.
@pytest.mark.parametrize(("number", "name"), enumerate(sample(SHORT, 3, seed=2)))
def test_a_full_disk_is_named_and_the_command_goes_on_with_room(number, name, disk, tally):
    before, after, unharmed = sizes(disk, name)
    if before == after:  # it writes nothing, and needs no room
        disk.fresh()
        disk.resize(before)
        ran = disk.run(name)
        assert ran.status == 0, ran.err
        return
    problems = []
    for when in SHARES if ALL else [list(SHARES)[number % 3]]:
        size = before + int(SHARES[when] * (after - before)) & ~4095  # whole pages
        problem = harm_done(disk, name, size, unharmed)
        tally("full disks", problem is None)
        problems += [f"{name} | full {when} | {problem}"] if problem else []
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", sample(list(CASES), 4))
def test_a_read_only_folder_is_named(name, disk, tally):
    disk.fresh()
    disk.resize(ROOMY, "ro")
    ran = disk.run(name)
    problem = told_wrong(ran, statuses=(2,) if CASES[name].writes else (0,))
    names = [Path(path).name for path in CASES[name].writes]
    if problem is None and ran.status and not any(name in ran.err for name in names):
        problem = f"names no path: {ran.err.strip()[-200:]}"
    tally("read-only folders", problem is None)
    assert problem is None, f"{name} | {problem}"
