"""Several processes train what one process trains, and no more than one of them writes.

The truth is the run of one process, which other tests compare with loops by hand.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tightlip
from models.tiny_finetunes import save_base
from tightlip.core.run_folder import open_run
from tightlip.corpus.prepare import prepare_corpus
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.training.config import RunOptions
from tightlip.training.loop import Training
from training.small_corpora import documents

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("several_processes.py")
# 41 rows: the last batch of an epoch has one, and so some process has none.
ROWS = documents(num_documents=51, num_users=6, longest=9)
PLAIN = {
    "embedding_size": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 8, "epochs": 2,
    "sequence_length": 10, "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1,
}  # fmt: skip
BLOCKS = PLAIN | {"model": "transformer", "num_heads": 2, "num_layers": 2}
del BLOCKS["embedding_size"]
TIED = BLOCKS | {"tie_word_embeddings": True, "gradient_clip": 0.2}
ADAPTED = {name: PLAIN[name] for name in ("batch_size", "epochs", "sequence_length")} | {"lora": 2}
UNIFORM = {"batching": "uniform"}
# Each by what it adds to a plain run, and by what it asks of the machine.
KINDS = {
    "plain": (PLAIN | {"gradient_clip": 0.2}, {}),
    "adam": (PLAIN | {"optimizer": "adam", "learning_rate": 0.01, "momentum": 0.0}, {}),
    "adversarial": (PLAIN | {"mitigation": "adversarial", "discriminator_size": 6}, {}),
    "adversarial-blocks": (BLOCKS | {"mitigation": "adversarial"} | UNIFORM, {}),
    "triplet": (PLAIN | {"mitigation": "triplet"}, {}),
    "triplet-inside": (
        PLAIN
        | {"mitigation": "triplet", "triplet_pairs": "inside", "privacy_weight": 0.5}
        | UNIFORM,
        {},
    ),
    "blocks": (TIED, {}),
    "split": (TIED, {"fsdp": True}),
    "adapted": (ADAPTED, {}),
    "adapted-split": (ADAPTED, {"fsdp": True, "merge": True}),
}


class Launched:
    """What one launch of several processes left: how each job ended for each, and the runs."""

    def __init__(self, size, folder, jobs):
        self.size, self.folder = size, folder
        (folder / "jobs.json").write_text(json.dumps(jobs))
        self.done = launch(size, SCRIPT, folder / "jobs.json").communicate(timeout=300)
        answers = [folder / f"answers-{rank}.json" for rank in range(size)]
        assert all(path.exists() for path in answers), self.done[1]
        self.answers = [json.loads(path.read_text()) for path in answers]

    def of(self, job):
        return [answers[job] for answers in self.answers]


def launch(size, *command):
    """torchrun, by another name; nothing of pytest's own environment tells of ranks."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        + ["--nproc-per-node", str(size), *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def corpora(base, tmp_path_factory):
    """The same text by a vocabulary of its own, and by the base's."""
    folder = tmp_path_factory.mktemp("corpora")
    own = prepare_corpus(ROWS, folder / "own", PrepareConfig(split="document"))
    for_base = PrepareConfig(split="document", tokenizer=str(base))
    return {"own": own, "base": prepare_corpus(ROWS, folder / "for-base", for_base)}


@pytest.fixture(scope="module")
def one_process(corpora, base, tmp_path_factory):
    """The runs of one process, trained when they are first asked for."""
    folder, made = tmp_path_factory.mktemp("one"), {}

    def run_of(kind):
        if kind not in made:
            settings, options = KINDS[kind]
            corpus, settings = for_kind(kind, corpora, base)
            made[kind] = tightlip.train(
                corpus.folder,
                folder / kind,
                options=RunOptions(device="cpu", **options),
                **settings,
            )
        return made[kind]

    return run_of


def for_kind(kind, corpora, base):
    settings, _ = KINDS[kind]
    if kind.startswith("adapted"):
        return corpora["base"], settings | {"model": str(base)}
    return corpora["own"], settings


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def several(request, corpora, base, tmp_path_factory):
    """All jobs of several processes, in one launch."""
    folder = tmp_path_factory.mktemp(f"of-{request.param}")
    jobs = {}
    for kind, (_, options) in KINDS.items():
        corpus, settings = for_kind(kind, corpora, base)
        jobs[kind] = {"corpus": str(corpus.folder), "out": str(folder / kind)}
        jobs[kind] |= {"settings": settings, "options": options}
    return Launched(request.param, folder, jobs)


def weights_in(folder):
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def assert_close(one, other, *, tolerance=2e-5):
    mine, theirs = weights_in(one), weights_in(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_train_what_one_trains(kind, several, one_process):
    run, alone = open_run(several.folder / kind), one_process(kind)
    assert several.of(kind) == [{"step": alone.metrics[-1]["step"]}] * several.size
    assert_close(run.model_folder, alone.model_folder)
    for snapshot, same in zip(run.snapshots, alone.snapshots, strict=True):
        assert_close(snapshot.folder, same.folder)
    if kind == "adapted-split":
        assert_close(run.folder / "merged", alone.folder / "merged")
