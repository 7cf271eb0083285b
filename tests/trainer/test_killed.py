"""kill -9 at any moment: no update goes uncharged, and what is repeated is paid again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dp_accounting.pld import PLDAccountant

from privacy.accounts import theirs
from tightlip.privacy.ledger import read_ledger
from trainer.lives import PLANNED, SAVED

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]


def test_killed_over_and_over_the_ledger_has_every_update(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    lives = subprocess.Popen(
        [sys.executable, TESTS / "trainer" / "lives.py", tmp_path],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    applied, ledger, moments = tmp_path / "applied", tmp_path / "ledger.json", random.Random(0)

    def updates():
        return applied.stat().st_size if applied.exists() else 0

    def begun():
        print(file=lives.stdin, flush=True)
        return int(lives.stdout.readline())

    try:
        for more in (SAVED + 1, 1, 2):  # so that each loses some
            life, least = begun(), updates() + more
            while updates() < least:
                assert not (ledger.exists() and read_ledger(ledger)["finished"])
                time.sleep(0.002)
            time.sleep(moments.random() * 0.02)
            os.kill(life, signal.SIGKILL)
            assert int(lives.stdout.readline()) == -signal.SIGKILL
            found = read_ledger(ledger)
            assert found["steps"] >= updates()
            assert not found["finished"]
        begun()
        assert int(lives.stdout.readline()) == 0
    finally:
        lives.stdin.close()
        lives.wait(timeout=60)
    found = read_ledger(ledger)
    assert found["finished"]
    assert found["steps"] >= updates() > PLANNED
    by_hand = theirs(PLDAccountant(), 1.0, 4 / 8, found["steps"]).get_epsilon(found["delta"])
    assert found["epsilon"] == pytest.approx(by_hand, rel=1e-3)
