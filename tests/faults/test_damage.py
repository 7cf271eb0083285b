"""Whatever happens to a file, a command that reads it refuses in a line or gives the same result.

Every command is given three times: with a damaged input; with a damaged file among those that it
had written when it was killed; and with one among those it left when it was done.
"""

import random
import shutil
from pathlib import Path

import pytest

from faults.cases import CASES
from faults.harm import CACHES, FOR_PEOPLE, SHORT, changes, is_litter, sample, told_wrong, tree

pytestmark = pytest.mark.slow
WRITERS = [name for name in SHORT if CASES[name].writes]
# What users bring has no checksum of ours: another byte may be another text, and another result.
BROUGHT = {"corpus.parquet"}
NUM_SAMPLED = 1  # damages of each command and stage, without `make faults`


def half(content, draw):
    return content[: len(content) // 2]


def nothing(content, draw):
    return b""


def byte(content, draw):
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ draw.randint(1, 255)]) + content[place + 1 :]


def late_bit(content, draw):
    place = draw.randrange(len(content) - max(1, len(content) // 20), len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def other(content, draw):
    return draw.randbytes(len(content))


DAMAGES = (half, nothing, byte, late_bit, other)


def inputs(name, place):
    """Every file that the arguments of a command name, or that is in a folder that they name."""
    given = [place / word for word in CASES[name].arguments if (place / word).exists()]
    paths = [path for one in given for path in ([one] if one.is_file() else one.rglob("*"))]
    return [str(path.relative_to(place)) for path in paths if path.is_file()]


def harm_done(bench, name, kept, path, damage):
    """What a command makes of a damaged file, where that is wrong."""
    unharmed = bench.unharmed(name)
    place = bench.fresh(kept)
    content = (place / path).read_bytes()
    damaged = damage(content, random.Random(f"{name} {path} {damage.__name__}"))
    (place / path).write_bytes(damaged)
    ran = bench.run(name)
    if problem := told_wrong(ran):
        return problem
    if ran.status or path in BROUGHT:
        return None
    after = tree(place)
    differing = {*changes(unharmed.after, after)} & {*unharmed.written}
    results = [path for path in sorted(differing) if not CACHES & {*Path(path).parts}]
    if results:
        return f"silently other results: {results}"
    if kept is None and ran.out != unharmed.ended.out:
        return "silently says something else"
    return None


def try_all(bench, name, kept, paths, tally):
    read = [path for path in sorted(paths) if Path(path).name not in FOR_PEOPLE]
    pairs = [(path, damage) for path in read for damage in DAMAGES]
    problems = []
    for path, damage in sample(pairs, NUM_SAMPLED, seed=name):
        problem = harm_done(bench, name, kept, path, damage)
        tally("damaged files", problem is None)
        problems += [f"{name} | {path} | {damage.__name__} | {problem}"] if problem else []
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", [name for name in SHORT if name != "represent guarantee"])
def test_a_damaged_input_is_refused_or_changes_nothing(name, bench, tally):
    try_all(bench, name, None, inputs(name, bench.fresh()), tally)


# Without `make faults` some commands have a damaged result, and others meet a damaged half of one.
@pytest.mark.parametrize("name", sample(WRITERS, 3))
def test_a_damaged_result_is_refused_or_made_again(name, bench, tally):
    unharmed = bench.unharmed(name)
    try_all(bench, name, unharmed.place, unharmed.written, tally)


@pytest.mark.parametrize("name", sample(WRITERS, 3, seed=1))
def test_what_a_killed_command_left_is_refused_or_made_again(name, bench, tally, tmp_path):
    unharmed = bench.unharmed(name)
    bench.fresh()
    bench.run(name, die_before_rename=unharmed.ended.renames)
    left = [p for p in changes(unharmed.before, tree(bench.place)) if not is_litter(p)]
    left = [path for path in left if ".partial/" not in path]
    kept = shutil.copytree(bench.place, tmp_path / "kept")
    try_all(bench, name, kept, left, tally)
