"""What all commands share: paths are looked at first, and nothing heavy is imported for that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tightlip.core.registry import unknown

LINES = """
prepare nosuch
prepare . --validation nosuch
prepare . --tokenizer nosuch
prepare . --public-model nosuch
prepare . --public-corpus nosuch
train nosuch
train nosuch --mitigation blah --epsilon 2
train --out o nosuch --mitigation dp --epsilon 2
train . --config nosuch --mitigation blah
train . --validation nosuch
train . --tokenizer nosuch
audit nosuch
audit . nosuch
audit . --validation nosuch
audit . --public-model nosuch
audit . --baseline nosuch
membership nosuch
membership . --reference nosuch
membership . --members nosuch
membership . --non-members nosuch
membership . --base nosuch
membership . --key nosuch
groups nosuch
groups . --against nosuch
groups . --held-out nosuch
groups . --key nosuch
dp-check nosuch
tab nosuch
tab . --report nosuch
compare . nosuch
compare . . --key nosuch
compare . . --corpus nosuch
compare . . --held-out nosuch
compare . . --reference nosuch
ledger . nosuch
reproduce adaptive --corpus nosuch
reproduce adaptive --public-corpus nosuch
reproduce adaptive --public-model nosuch
canaries plant nosuch
canaries plant . --words nosuch
canaries plant . --names nosuch
canaries choose nosuch
canaries choose . --key nosuch
canaries measure nosuch
canaries measure . --key nosuch
represent train nosuch
represent export nosuch
represent encode nosuch .
represent encode . nosuch
represent classify nosuch .
represent classify . nosuch
represent attack . nosuch
canaries --out o --seed 1 plant nosuch
represent --out o encode . nosuch
""".strip().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_a_path_that_leads_nowhere_is_spoken_of_first(command, line):
    ran = command(*line.split())
    assert ran.status == 2
    assert ran.refusal.startswith("tightlip: nosuch does not exist. Give "), ran.err


def test_no_path_waits_for_torch():
    program = (
        "import sys, contextlib; from tightlip.cli.main import app\n"
        "for line in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit): app(line.split())\n"
        "    assert not {'torch', 'transformers'} & {*sys.modules}, line"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *LINES],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("room", ["canaries plant", "represent attack", "tab", "train", "compare"])
def test_the_help_names_what_a_path_is_of_and_no_types_of_python(command, room):
    ran = command(*room.split(), "--help")
    assert ran.status == 0
    assert "list[" not in ran.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train = 3", "{file}: train = 3 is not a table."),
        ("[train]\nmitigation = 3", "{file}, [train]: Unknown mitigation 3."),
        ('[train]\nmitigation = "dp"\ndp = 3', "{file}, [train.dp]: 3 is not a table."),
        (
            '[train]\nmitigation = "dp"\n[train.dp]\nepsilonn = 3',
            "{file}, [train.dp]: Unknown setting 'epsilonn'. Closest: epsilon.",
        ),
        ("[train]\nstepps = 3", "{file}, [train]: Unknown setting 'stepps'. Closest: steps."),
        ("[options]\nbf = true", "{file}, [options]: Unknown setting 'bf'."),
        ("stepps = 3", "{file}: Unknown table 'stepps'."),
    ],
)
def test_a_slip_in_a_file_of_settings_is_refused_with_its_place(command, tmp_path, text, words):
    file = tmp_path / "run.toml"
    file.write_text(text)
    ran = command("train", tmp_path, "--out", tmp_path / "o", "--config", file)
    assert ran.status == 2
    assert ran.refusal.startswith("tightlip: " + words.format(file=file)), ran.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--flat", "--flat means nothing to mitigation='none'. Add --mitigation adaptive-dp or dp"),
        ("--flat --mitigation dp --mitigation triplet", "nothing to mitigation='triplet'"),
        ("--mitigation Dp", "Unknown mitigation 'Dp'. Closest: dp."),
    ],
)
def test_a_flag_of_a_mitigation_says_whose_it_is(command, tmp_path, flags, words):
    ran = command("train", tmp_path, "--out", tmp_path / "o", *flags.split())
    assert ran.status == 2
    assert words in ran.refusal


def test_the_closest_name_is_found_whatever_its_case():
    assert "Closest: User." in unknown("column", "uSER", ["User", "text"])
