"""Two processes, one folder: the second is refused before it writes, whatever the command."""

import shutil

import pytest

from faults.cases import CASES, write_place
from tightlip.cli.main import _COMMANDS, _ROOMS
from tightlip.core.files import claimed

pytestmark = pytest.mark.slow
WRITERS = [(name, path) for name, case in CASES.items() for path in case.writes]


@pytest.fixture(scope="module")
def place(shared):
    return shared("faults", write_place)


def tree(folder):
    """Everything under a folder, with its content."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not path.name.endswith(".lock")
    }


def test_every_command_is_examined():
    in_rooms = {f"{room} {name}" for room, (_, names) in _ROOMS.items() for name in names}
    assert {*CASES} == {*_COMMANDS} | in_rooms


@pytest.mark.parametrize(("name", "path"), WRITERS)
def test_the_second_of_two_is_refused_and_writes_nothing(
    name, path, place, command, tmp_path, tally
):
    copied = shutil.copytree(place, tmp_path / "place")
    before = tree(copied)
    with claimed(copied / path):
        ran = command(*CASES[name].arguments, place=copied)
    refused = ran.status == 2 and f"{path} is in use" in ran.err
    tally("second processes", refused and tree(copied) == before)
    assert ran.status == 2, ran.err
    assert f"{path} is in use by another tightlip process" in ran.refusal
    assert tree(copied) == before
