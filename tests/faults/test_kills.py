"""Killed at any moment and given again, a command leaves what it would have left undisturbed."""

import random
import signal

import pytest

from faults.cases import CASES
from faults.harm import ALL, LONG, SHORT, changes, half_written, is_litter, spread, tree

pytestmark = pytest.mark.slow
NUM_KILLS = 20 if ALL else 3


def moments(name, unharmed):
    """When to kill: before renames, from the first to the last; with `make faults` at random too."""
    renames = spread(unharmed.ended.renames, NUM_KILLS * 3 // 4 if ALL else NUM_KILLS)
    yield from ({"die_before_rename": number} for number in renames)
    draw = random.Random(name)
    for _ in range(NUM_KILLS - len(renames) if ALL else 0):
        yield {"kill_after": draw.uniform(0, unharmed.ended.seconds)}


def harm_done(bench, name, when):
    """What is wrong after a command was killed, and after it was given again."""
    unharmed = bench.unharmed(name)
    place = bench.fresh()
    killed = bench.run(name, **when)
    if killed.status != -signal.SIGKILL:
        assert killed.status == 0, killed.err
        assert "kill_after" in when, "it makes fewer renames than it did"
        return None  # it was faster than the kill
    if broken := half_written(place):
        return f"half-written: {broken}"
    ran = bench.run(name)
    if ran.status != 0:
        return f"given again: status {ran.status}: {ran.err.strip()[-300:]}"
    after = tree(place)
    if litter := [path for path in after if is_litter(path)]:
        return f"left behind: {litter}"
    if differing := changes(unharmed.after, after):
        return f"not as undisturbed: {differing}"
    return None


@pytest.mark.parametrize("name", SHORT)
def test_killed_and_given_again_it_leaves_what_it_would_have_left(name, bench, tally):
    problems = []
    for when in moments(name, bench.unharmed(name)):
        problem = harm_done(bench, name, when)
        tally("kills", problem is None)
        problems += [f"{when}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", LONG)
def test_a_long_command_goes_on_after_kills_in_its_first_seconds(name, bench, tally):
    """Not to the end, which is minutes away; its parts are commands that the test above ends."""
    last = 12 if ALL else 7
    place = bench.fresh()
    assert bench.run(name, die_before_rename=last).status == -signal.SIGKILL
    reference = {p: c for p, c in tree(place).items() if not any(map(is_litter, p.split("/")))}
    problems = []
    for first in spread(last - 1, NUM_KILLS) if ALL else [5]:
        bench.fresh()
        for before in (first, last - first + 1):  # the second life goes on where the first ended
            ran = bench.run(name, die_before_rename=before)
            problem = None if ran.status == -signal.SIGKILL else f"status {ran.status}: {ran.err}"
            problem = problem or ", ".join(half_written(place))
        there = tree(place)
        # A later life may not have come as far, or further.
        differing = [p for p in reference if p in there and there[p] != reference[p]]
        problem = problem or ", ".join(p for p in differing if not p.endswith("metrics.jsonl"))
        tally("kills", not problem)
        problems += [f"before rename {first}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)


def test_every_command_that_writes_has_a_moment_to_be_killed_in(bench):
    writers = [name for name in SHORT if CASES[name].writes]
    assert all(bench.unharmed(name).ended.renames for name in writers)
