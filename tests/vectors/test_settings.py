"""Settings are checked before any work, and a run's config.toml spells all of them."""

import dataclasses

import pytest

from tightlip.core.errors import UsageError
from tightlip.core.settings import read_toml, toml_text
from tightlip.models.configurations import WORD_ENCODERS
from tightlip.vectors.settings import NEW_EXTRACTORS, RepresentSettings

GOOD = {"label": "topic", "private": ("age",), "epsilon": 8.0}


@pytest.mark.parametrize(
    ("changed", "because"),
    [
        ({"epsilon": None}, "give epsilon, such as 8"),
        ({"epsilon": 0.0}, "epsilon=0 is out of range"),
        ({"epsilon": float("nan")}, "out of range"),
        ({"dropout": 1.0}, "dropout=1 is out of range"),
        ({"delta": 1.0}, "delta=1 is out of range"),
        ({"method": "dprn"}, "Closest: dpnr"),
        ({"mechanism": "laplce"}, "Closest: laplace"),
        ({"method": "none"}, "epsilon=8.0 means nothing"),
        ({"method": "adversarial", "epsilon": None, "private": ()}, "Add private"),
        ({"adversary_weight": 1.0}, "means nothing to method='dpnr'"),
        ({"private": ("topic",)}, "both the label"),
        ({"private": ("age", "age")}, "twice"),
        ({"bins": ("sign=1",)}, "neither the label nor private"),
        ({"bins": ("age",)}, "bins='age' does not say where to cut"),
        ({"bins": ("age=20", "age=30")}, "cuts age twice"),
        ({"bins": ("age=30..20",)}, "holds no number"),
        ({"bins": ("age=..20,15..",)}, "overlap"),
        ({"bins": ("age=20,20",)}, "twice"),
        ({"pooling": "max"}, "Unknown pooling"),
        ({"split": "usr"}, "Closest: user"),
        ({"epochs": 0}, "epochs=0"),
        ({"freeze": True}, "knows nothing yet"),
        ({"extractor": ".", "dimensions": 4}, "shape of its own"),
        ({"dimensions": 1}, "2 or more"),
    ],
)
def test_what_cannot_work_is_refused(changed, because):
    with pytest.raises(UsageError, match=because):
        RepresentSettings(**(GOOD | changed))


@pytest.mark.parametrize(
    "changed",
    [{}, {"bins": ("age=20,30",), "private": ()}, {"method": "adversarial", "epsilon": None}],
)
def test_a_file_gives_the_settings_back(changed, tmp_path):
    if changed.get("private") == ():
        changed = changed | {"bins": ()}
    settings = RepresentSettings(**(GOOD | changed))
    path = tmp_path / "config.toml"
    path.write_text(toml_text({"represent": settings.tree()}))
    assert RepresentSettings.from_tree(read_toml(path)["represent"], str(path)) == settings


def test_an_unknown_setting_is_named_with_the_closest():
    with pytest.raises(UsageError, match="Closest: epsilon"):
        RepresentSettings.from_tree({"label": "x", "epsilom": 1.0}, "here")


def test_the_new_extractors_are_those_that_there_are():
    assert NEW_EXTRACTORS == WORD_ENCODERS


def test_every_setting_has_a_flag_of_its_name():
    from tightlip.cli.flags import command_of
    from tightlip.cli.represent import train

    flags = {flag for option in command_of(train, None).params for flag in option.opts}
    for field in dataclasses.fields(RepresentSettings):
        assert f"--{field.name.replace('_', '-')}" in flags, field.name
