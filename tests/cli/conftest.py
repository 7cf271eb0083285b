"""The command line, one process for all tests of it: importing torch takes longer than most of them."""

import pytest

from cli.commands import Commands


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """Runs `tightlip ...` and says how it ended."""
    commands = Commands(tmp_path_factory.mktemp("command"))
    yield commands
    commands.close()
