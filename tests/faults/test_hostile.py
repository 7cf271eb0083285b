"""Folders made by an enemy: no command hangs, quotes what it was led to, or ends in a traceback."""

import os
import shutil

import pytest

from faults.cases import CASES
from faults.harm import SHORT, sample, told_wrong

pytestmark = pytest.mark.slow
SECRET = "the PIN of somebody else is 4711"
NASTY = "a\n\x1b[2J[red]<b>\u202e"
HANGS = 10  # seconds; each takes one to three
FOLDERS = ("run", "checked", "vectors", "vectors/device", "vectors/server")
# Names of files that the maker of a folder decides about; those that a folder does not have are
# passed over.
FILES = (
    "config.toml", "metrics.jsonl", "ledger.json", "model/config.json", "model/model.safetensors",
    "model/tokenizer.json", "model/tokenizer_config.json", "model/generation_config.json",
    "model/guarantee.json", "corpus/prepared.json", "corpus/train.parquet", "corpus/train/info.json",
    "corpus/train/tokens.npy", "corpus/tokenizer/tokenizer.json", "dp_check.json",
    "snapshots/epoch-1/model.safetensors", "device.json", "guarantee.json", "server.json",
    "model.safetensors", "extractor/config.json", "extractor/model.safetensors", "split.parquet",
    "device/device.json", "device/extractor/tokenizer.json", "server/server.json", "metrics.json",
)  # fmt: skip


def link_out(path):
    """To a file of somebody else's, which is not what it should be, and must not be quoted."""
    place = next(above for above in path.parents if above.name == "place")
    (place.parent / "secret").write_text(SECRET)
    path.symlink_to(os.path.relpath(place.parent / "secret", path.parent))


def link_loop(path):
    path.symlink_to(path.name)


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/tty")


def folder(path):
    path.mkdir()


def deep(path):
    path.write_text('{"a":' * 100_000)


def huge_number(path):
    path.write_text('{"step": 1' + "0" * 10_000 + ', "epoch": 1e999, "vocab_size": 1e308}')


TRICKS = (link_out, link_loop, fifo, device, folder, deep, huge_number)
READERS = {
    name: sorted({*CASES[name].arguments} & {*FOLDERS})
    for name in SHORT
    if {*CASES[name].arguments} & {*FOLDERS}
}


def tried(bench, name, file, trick):
    """What is wrong with how a command meets a file that is something else."""
    path = bench.fresh() / file
    path.unlink()
    trick(path)
    ran = bench.run(name, kill_after=HANGS)
    if SECRET in ran.out + ran.err:
        return "quotes a file outside the folder"
    return told_wrong(ran)


@pytest.mark.parametrize("name", sample(list(READERS), 6))
def test_a_file_that_is_something_else_is_refused(name, bench, tally):
    place = bench.fresh()
    files = [f"{folder}/{file}" for folder in READERS[name] for file in FILES]
    files = [file for file in files if (place / file).is_file()]
    problems = []
    for file, trick in sample([(f, t) for f in files for t in TRICKS], 1, seed=name):
        problem = tried(bench, name, file, trick)
        tally("hostile files", problem is None)
        problems += [f"{name} | {file} | {trick.__name__} | {problem}"] if problem else []
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", sample(list(READERS), 3))
def test_a_name_that_commands_the_terminal_is_shown_as_text(name, bench, tally):
    place = bench.fresh()
    for folder in READERS[name]:
        if (place / folder).exists():
            shutil.move(place / folder, place / f"{folder}{NASTY}")
    renamed = {folder: f"{folder}{NASTY}" for folder in READERS[name]}
    arguments = [renamed.get(word, word) for word in CASES[name].arguments]
    ran = bench.run(name, arguments=arguments, kill_after=HANGS)
    problem = told_wrong(ran)
    if not problem and any(character in ran.out + ran.err for character in ("\x1b[2J", "\u202e")):
        problem = "commands the terminal"
    tally("hostile names", problem is None)
    assert problem is None, f"{name} | {problem}"
