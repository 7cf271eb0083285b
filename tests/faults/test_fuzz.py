"""A few of the damaged files that `make fuzz` draws without end."""

import shutil

import pytest

from faults.cases import write_place
from faults.fuzz import READERS, add_what_is_read, failures
from faults.harm import ALL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(shared, tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz") / "place"
    shutil.copytree(shared("faults", write_place), place)
    add_what_is_read(place)
    return place


@pytest.mark.parametrize("name", READERS)
def test_a_reader_lets_out_nothing_but_refusals(name, place, tally):
    bad = list(failures(name, place, examples=50 if ALL else 5, number=0))
    tally("fuzzed readers", not bad)
    assert not bad, "\n".join(bad)
