"""A private trainer in processes that can be killed, without importing torch for each of them.

One process imports everything and starts no thread; for each line that it is told, a fork of it trains
in FOLDER, or goes on, and counts its updates in FOLDER/applied.

python lives.py FOLDER
"""

import gc
import os
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainingArguments

from tightlip.trainer import PrivacySpec, PrivateTrainer
from trainer.private_runs import small

ROWS = [{"input_ids": [0, 5, 6, 7], "labels": [-100, 5, 6, 7], "user": f"u{n}"} for n in range(8)]
PLANNED, SAVED = 16, 4


class Counts(TrainerCallback):
    def __init__(self, path):
        self._path = path

    def on_optimizer_step(self, args, state, control, **rest):
        with self._path.open("ab") as applied:
            applied.write(b".")


def train(folder):
    args = TrainingArguments(
        str(folder), max_steps=PLANNED, per_device_train_batch_size=4, save_strategy="steps", save_steps=SAVED,
        use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = PrivateTrainer(
        small(), args, train_dataset=ROWS, user_column="user",
        privacy=PrivacySpec(noise_multiplier=1.0), callbacks=[Counts(folder / "applied")],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))


def main(folder):
    torch.set_num_threads(1)
    gc.freeze()  # a trainer goes through everything for what is no longer used
    for _ in sys.stdin:
        life = os.fork()
        if life == 0:
            status = 1
            os.dup2(2, 1)  # what a trainer prints
            try:
                train(folder)
                status = 0
            finally:
                os._exit(status)
        print(life, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(life, 0)[1]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
