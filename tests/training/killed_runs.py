"""A training that is killed again and again, in a process that imports torch once for all its lives."""

import os
import random
import signal
import subprocess
import sys
import time

PROGRAM = """
import os, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tightlip.corpus.prepare import open_prepared
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.loop import Training, train_model
plain = Training.take_step
def told(self):
    plain(self)
    print("updated", flush=True)
Training.take_step = told
for _ in sys.stdin:  # one life a line; importing torch once is enough
    if (life := os.fork()) == 0:
        print(os.getpid(), flush=True)
        train_model(open_prepared(Path(sys.argv[1])), Path(sys.argv[2]),
              TrainConfig.from_toml(Path(sys.argv[3])), RunOptions(checkpoint_seconds=0))
        os._exit(0)
    os.waitpid(life, 0)
    print("over", flush=True)
"""


def killed_again_and_again(corpus, folder, config, num_kills):
    """Train into FOLDER/run and kill it; after each death, how many updates were applied in all."""
    (folder / "config.toml").write_text(config.to_toml())
    arguments = [str(corpus.folder), str(folder / "run"), str(folder / "config.toml")]
    lives = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    applied, moments = 0, random.Random(0)
    for kill in range(num_kills):
        lives.stdin.write("another\n")
        lives.stdin.flush()
        life = int(lives.stdout.readline())
        for _ in range(1 + kill % 3):
            applied += lives.stdout.readline() == "updated\n"
        time.sleep(moments.random() * 0.05)  # somewhere in a later step, or in what follows it
        os.kill(life, signal.SIGKILL)
        while (line := lives.stdout.readline()) != "over\n":
            applied += line == "updated\n"
        yield applied
    lives.stdin.close()
    lives.wait()
