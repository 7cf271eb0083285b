"""Calls from Python: what help() shows, wrong names, and refusals that name arguments."""

import ast
import importlib
import inspect
import pydoc
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tightlip
from tightlip.audit.settings import LeakageConfig, Matching
from tightlip.cli.main import _COMMANDS, _ROOMS, app
from tightlip.core.errors import GuaranteeError, TightlipError, UsageError, with_arguments
from tightlip.core.settings import settings_of
from tightlip.corpus.prepare_config import PrepareConfig, TextSettings
from tightlip.privacy import PrivacySpec, PrivateTraining
from tightlip.scan.options import ScanOptions
from tightlip.training.config import RunOptions
from tightlip.training.mitigations.dp import DPConfig

ROOT = Path(tightlip.__file__).parent
CALLS = sorted({*tightlip._CALLS} - {"LeakageReport"})
# What the command line alone says, and what stands here for a name that is filled in.
ONLY_FLAGS = {"fail_on", "curated_at", "user", "dry_run"}


def shown(node: ast.expr) -> str:
    """A message as it is written, with something in the place of what is filled in."""
    if isinstance(node, ast.BinOp):
        return shown(node.left) + shown(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(each.value) if isinstance(each, ast.Constant) else "user" for each in node.values
        )
    return str(node.value) if isinstance(node, ast.Constant) else ""


def sentences() -> list[str]:
    """Every text in the program, outside of the command line's own, that holds a flag."""
    texts = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name == "cli":
            continue
        tree, inner = ast.parse(path.read_text(encoding="utf-8")), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr | ast.BinOp | ast.Expr):  # a docstring is an Expr
                inner |= {id(each) for each in ast.walk(node)} - {id(node)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.JoinedStr | ast.BinOp | ast.Constant)
            if is_text and id(node) not in inner:
                texts.append(shown(node))
    return [text for text in texts if re.search(r"--[a-z]", text) and " " in text]


def kinds_of_arguments() -> dict[str, set[Any]]:
    """The types of everything that any public call takes, and the objects that one is given."""
    signatures = [inspect.signature(getattr(tightlip, name)) for name in sorted(tightlip._CALLS)]
    signatures += map(inspect.signature, (PrepareConfig, RunOptions, Matching))
    kinds: dict[str, set[Any]] = {}
    for told in signatures:
        for name, each in told.parameters.items():
            kinds.setdefault(name, set()).add(each.annotation)
    return kinds


def outside_commands(text: str) -> str:
    """The text without its commands, by their names: each goes to the end of its clause."""
    names = "|".join([*_COMMANDS, *_ROOMS])
    return re.sub(rf"tightlip ({names})\b[^,;]*?(\.(\s|$)|[,;]|$)", "", text)


def test_no_refusal_in_python_names_a_flag():
    refusals = sentences()
    assert len(refusals) > 100
    left = [with_arguments(text) for text in refusals]
    assert [text for text in left if re.search(r"--[a-z]", outside_commands(text))] == []


def test_flags_become_arguments_that_some_call_takes():
    known, wrong = kinds_of_arguments(), []
    for text in sentences():
        before = re.findall(r"(?<![\w`])--([a-z][a-z-]*[a-z])", outside_commands(text))
        after = outside_commands(with_arguments(text))
        for name in (flag.replace("-", "_") for flag in before):
            is_switch = known.get(name) == {bool}
            as_written = rf"\b{name}=True" if is_switch else rf"\b{name}(?!=True)"
            if name not in {*known, *ONLY_FLAGS} or not re.search(as_written, after):
                wrong.append((name, text))
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "in_python"),
    [
        ("Give --public-model DIR.", "Give public_model=DIR."),
        ("Use --split none, or leave it out.", "Use split='none', or leave it out."),
        ("Add --mitigation adaptive-dp.", "Add mitigation='adaptive-dp'."),
        ("train it with --tokenizer RUN/model.", "train it with tokenizer=RUN/model."),
        ("Prepare with --holdout 0.2, or so.", "Prepare with holdout=0.2, or so."),
        ("Give --out a new folder.", "Give out a new folder."),
        ("Leave --min-users out.", "Leave min_users out."),
        ("add --allow-unproved: then", "add allow_unproved=True: then"),
        ("give --epsilon (such as 8)", "give epsilon (such as 8)"),
        ("/data/a--out b/--seed does not exist.", "/data/a--out b/--seed does not exist."),
        ("Unknown setting '--seed'.", "Unknown setting '--seed'."),
    ],
)
def test_a_flag_becomes_an_argument(line, in_python):
    assert with_arguments(line) == in_python
    assert with_arguments(in_python) == in_python


@pytest.mark.parametrize(
    "command",
    [
        "tightlip train CORPUS --mitigation dp --epsilon 2 --out DIR",
        "tightlip prepare CORPUS --out /a/b.c --privacy-weights",
    ],
)
def test_whole_commands_stay(command):
    line = f"a is not a tightlip run. Give --out, or run: {command}, then --seed 3. Or {command}"
    expected = f"a is not a tightlip run. Give out, or run: {command}, then seed=3. Or {command}"
    assert with_arguments(line) == expected


def test_the_command_line_names_flags_and_python_arguments(tmp_path):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"user": "ann", "text": "ant"}\n', encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        tightlip.prepare(corpus, tmp_path / "out", names=True)
    assert str(refused.value).endswith("Add scrub=True.")
    words = ["prepare", str(corpus), "--out", str(tmp_path / "out"), "--names"]
    ran = CliRunner().invoke(app, words)
    assert (ran.exit_code, ran.stderr[-13:]) == (2, "Add --scrub.\n")
    with pytest.raises(UsageError, match=r"give epsilon \(such as 8\), or noise_multiplier"):
        DPConfig()


@pytest.mark.parametrize("kind", [UsageError, GuaranteeError])
def test_an_error_keeps_its_kind_and_its_cause(kind):
    def refuse():
        try:
            raise OSError("disk")
        except OSError as error:
            raise kind("Use --dtype float32.") from error

    with pytest.raises(TightlipError) as refused:
        refuse()
    assert type(refused.value) is kind
    assert isinstance(refused.value.__cause__, OSError)
    assert str(refused.value) == "Use dtype='float32'."


def test_help_of_audit_shows_the_call():
    text = pydoc.plain(pydoc.render_doc(tightlip.audit))
    assert "tightlip.audit(model: Any, corpus: Any = None, *, out:" in text
    assert "Which of the corpus' words the model gives away" in text
    assert "PACKAGE CONTENTS" not in text
    for kind in (LeakageConfig, ScanOptions, TextSettings):
        for field in settings_of(kind):
            assert re.search(rf"\b{field.name}: .* = {re.escape(repr(field.default))}[,)]", text)
            assert f"\n        {field.name}: {field.metadata['about'].help}" in text


def test_the_audit_package_is_still_a_package():
    import tightlip.audit.canaries.real as real
    from tightlip.audit import settings

    assert importlib.import_module("tightlip.audit") is tightlip.audit
    assert tightlip.audit.canaries.real is real
    assert tightlip.audit.settings is settings
    assert callable(tightlip.audit)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_name_is_refused_with_the_closest(name):
    call = getattr(tightlip, name)
    told = inspect.signature(call).parameters
    assert all(each.kind != each.VAR_KEYWORD for each in told.values())
    right = [each for each in told if told[each].kind != inspect.Parameter.VAR_POSITIONAL][-1]
    wrong = right[:-1] + "x"
    with pytest.raises(UsageError, match=rf"^Unknown argument '{wrong}'\. Closest: {right}\."):
        call(**{wrong: 1})


@pytest.mark.parametrize("name", CALLS)
def test_help_says_what_each_setting_is(name):
    text = pydoc.plain(pydoc.render_doc(getattr(tightlip, name)))
    assert not re.search(r"--[a-z]", outside_commands(text))
    assert "`settings`" not in text


def test_an_argument_is_suggested_beside_settings(tmp_path):
    with pytest.raises(UsageError, match=r"'publik_model'\. Closest: public_model\."):
        tightlip.audit(tmp_path, tmp_path, publik_model=tmp_path)


def test_a_missing_setting_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"missing a required .*'label'"):
        tightlip.represent_train(tmp_path, tmp_path)


def test_private_training_spells_out_what_its_spec_holds():
    told = inspect.signature(PrivateTraining).parameters
    for field in fields(PrivacySpec):
        if field.name != "unit":  # which users decide on
            assert told[field.name].default == field.default
            assert told[field.name].annotation == field.type
    for name in told:
        assert re.search(rf"\b{name}\b.*: ", inspect.getdoc(PrivateTraining)), name
    with pytest.raises(UsageError, match=r"Unknown argument 'epsilom'\. Closest: epsilon\."):
        PrivateTraining(None, None, [], ledger="l", epsilom=8)


def test_dir_shows_public_names_only():
    public = [name for name in dir(tightlip) if not name.startswith("_")]
    assert set(dir(tightlip)) - set(public) == {"__version__"}
    assert {"audit", "train", "prepare", "LeakageReport"} < set(public)
    assert all(getattr(tightlip, name).__module__.startswith("tightlip.") for name in public)
