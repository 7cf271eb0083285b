"""Make this folder's files with version 0.1: see README.md beside this file."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "kite", "lark"]
SIZES = "--embedding-size 8 --hidden-size 8 --num-layers 1 --batch-size 4 --sequence-length 12"
VOCABULARY = "--tokenizer alphabet/tokenizer"
UNFINISHED = """[train]
embedding_size = 8
hidden_size = 8
num_layers = 1
batch_size = 8
sequence_length = 12
epochs = 50

[options]
checkpoint_seconds = 0
"""


def documents():
    """Each user repeats the alphabet from places of their own; two teams, to tell apart."""
    draw = random.Random(0)
    for number in range(60):
        start, length = draw.randrange(len(WORDS)), draw.randint(3, 10)
        words = [WORDS[(start + place) % len(WORDS)] for place in range(length)]
        team = "red" if start < len(WORDS) / 2 else "blue"
        yield {"user": f"user {number % 6}", "text": " ".join(words), "team": team}


def tightlip(arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tightlip", *arguments.split()], check=True)


def kill_after_its_first_checkpoint(arguments: str, run: Path) -> None:
    training = subprocess.Popen([sys.executable, "-m", "tightlip", *arguments.split()])
    while not list(run.glob("checkpoint/step-*")):
        time.sleep(0.01)
    training.send_signal(signal.SIGKILL)
    training.wait()


def main(folder: Path) -> None:
    folder.mkdir()
    os.chdir(folder)
    rows = "".join(json.dumps(row) + "\n" for row in documents())
    Path("corpus.jsonl").write_text(rows, encoding="utf-8")
    Path("unfinished.toml").write_text(UNFINISHED, encoding="utf-8")
    # A vocabulary that owes nothing to the users, so that the private run is proved.
    alphabet = json.dumps({"user": "nobody", "text": " ".join(WORDS)}) + "\n"
    Path("alphabet.jsonl").write_text(alphabet, encoding="utf-8")
    tightlip("prepare alphabet.jsonl --split none --out alphabet")
    tightlip(f"prepare corpus.jsonl {VOCABULARY} --out prepared")
    # Each run prepares its own corpus: its record then says where by a path inside the run.
    tightlip(f"train corpus.jsonl --out plain {VOCABULARY} {SIZES} --epochs 2 --learning-rate 0.05")
    tightlip(
        f"train corpus.jsonl --out dp {SIZES} --epochs 2 {VOCABULARY}"
        " --mitigation dp --epsilon 8 --delta 0.01"
    )
    tightlip(
        f"train corpus.jsonl --out adversarial {VOCABULARY} {SIZES} --epochs 2"
        " --mitigation adversarial"
    )
    kill_after_its_first_checkpoint(
        f"train corpus.jsonl --out unfinished {VOCABULARY} --config unfinished.toml",
        Path("unfinished"),
    )
    tightlip("audit plain --out report")
    tightlip("audit plain --out redacted --redact")
    tightlip(
        "represent train corpus.jsonl --label team --private user --extractor bag --dimensions 4"
        " --epochs 1 --epsilon 8 --out represent"
    )
    tightlip("represent encode represent/device corpus.jsonl --out vectors.parquet --carry team")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
