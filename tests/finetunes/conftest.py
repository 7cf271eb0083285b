"""The base that every fine-tune here begins with, and the folders made of it."""

import pytest

from finetunes.making import Workshop, save_base


@pytest.fixture(scope="session")
def base(shared):
    return shared("base-of-fine-tunes", save_base)


@pytest.fixture(scope="module")
def workshop(base, tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("workshop"), base)
