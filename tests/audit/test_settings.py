"""The settings of audits: by name in Python, spelt otherwise on the command line."""

import ast
from pathlib import Path

import pytest

import tightlip
from tightlip.audit.settings import ChoiceConfig, ExposureConfig, LeakageConfig, Matching
from tightlip.core.errors import UsageError
from tightlip.core.resampling import ResamplingSettings
from tightlip.core.settings import about, settings_of, split_settings
from tightlip.corpus.prepare_config import ColumnSettings
from tightlip.scan.options import ScanOptions
from tightlip.vectors.settings import EncodeSettings, EncodingOptions, GuaranteeSettings


def test_settings_go_to_the_kind_that_has_them():
    config, options = split_settings(
        {"top_k": 3, "window": 64, "thresholds": [2, 4]}, LeakageConfig, ScanOptions
    )
    assert (config.top_k, config.thresholds) == (3, (2.0, 4.0))
    assert (options.window, options.device) == (64, "auto")


ONCE = (Matching, ResamplingSettings, ColumnSettings, GuaranteeSettings, EncodeSettings, EncodingOptions)  # fmt: skip
# Words for other things too, elsewhere: a model's dropout, a training's batch and seed.
ALSO_OTHERS = {"seed", "dropout", "batch_size"}


def defaults_written_in(path):
    """Names and literal defaults of parameters, and of fields that are not settings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.arguments):
            yield from zip([each.arg for each in node.kwonlyargs], node.kw_defaults, strict=True)
            last = [each.arg for each in node.args[len(node.args) - len(node.defaults) :]]
            yield from zip(last, node.defaults, strict=True)


def test_no_default_of_a_setting_is_written_a_second_time():
    settings = {field.name: field.default for kind in ONCE for field in settings_of(kind)}
    twice = [
        f"{path.name}: {name}={value.value!r}"
        for path in sorted(Path(tightlip.__file__).parent.rglob("*.py"))
        for name, value in defaults_written_in(path)
        if isinstance(value, ast.Constant)
        and value.value is not None
        and settings.get(name) == value.value
        and (name not in ALSO_OTHERS or path.parent.name in ("vectors", "audit", "cli"))
    ]
    assert twice == []


def test_an_unknown_setting_is_refused_with_the_closest(tmp_path):
    with pytest.raises(UsageError, match=r"Unknown argument 'top_n'\. Closest: top_k"):
        tightlip.audit(tmp_path, tmp_path, top_n=3)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (LeakageConfig, {"top_k": 0}, "top_k=0"),
        (LeakageConfig, {"occurrences": 0}, "occurrences=0"),
        (LeakageConfig, {"fewer_than": 0}, "fewer_than=0"),
        (ScanOptions, {"dtype": "int3"}, "Unknown dtype 'int3'"),
        (ScanOptions, {"window": 1}, "window=1"),
        (ScanOptions, {"memory": "lots"}, "memory='lots'"),
        (ExposureConfig, {"num_samples": 99}, "num_samples=99"),
        (ExposureConfig, {"prompt_tokens": 0}, "prompt_tokens=0"),
        (ChoiceConfig, {"min_tokens": 1}, "min_tokens=1"),
    ],
)
def test_what_cannot_work_is_refused(kind, given, says):
    with pytest.raises(UsageError, match=says):
        kind(**given)


def test_the_command_line_spells_two_of_them_otherwise():
    fields = {field.name: about(field) for field in settings_of(LeakageConfig)}
    assert fields["occurrences"].parse("all") is None
    assert fields["occurrences"].parse("12") == 12
    assert fields["thresholds"].flag == "--curated-at"
    assert fields["thresholds"].parse("1.5,2") == (1.5, 2.0)
    for name, text in (("occurrences", "few"), ("thresholds", "2,three")):
        with pytest.raises(UsageError, match=text):
            fields[name].parse(text)
