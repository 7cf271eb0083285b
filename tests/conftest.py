"""Settings and fixtures for all tests."""

import os

# Tiny models gain nothing from threads, and two test runs on one machine would fight over cores.
# Before torch is imported, so that subprocesses started by tests inherit it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from killable import Commands

# The same cases in every run; one worker may be slow while the other one trains.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """Runs `tightlip ...` in a fork of one process and says how it ended.

    One process for all tests of commands: importing torch takes longer than most of them.
    """
    commands = Commands(tmp_path_factory.mktemp("command"))
    yield commands
    commands.close()
