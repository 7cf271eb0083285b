"""Several processes train what one process trains, and no more than one of them writes or speaks.

The truth is the run of one process, which other tests compare with loops by hand.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tightlip
from models.tiny_finetunes import save_base
from tightlip.core.processes import Processes
from tightlip.core.run_folder import PRIVATE_METRICS, open_run
from tightlip.corpus.prepare import prepare_corpus
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.training.config import RunOptions
from tightlip.training.loop import Training
from tightlip.training.together import Part, add_up_step
from training.small_corpora import WORDS, documents

pytestmark = pytest.mark.slow

TESTS, SEVERAL = Path(__file__).parents[1], [2, 3]
SCRIPT = Path(__file__).with_name("several_processes.py")
# 41 of them are trained on: the last batch of an epoch has one row, so some process has none.
ROWS = documents(num_documents=51, num_users=13, longest=9)
LENGTH = {"batch_size": 8, "epochs": 2, "sequence_length": 10}
SMOOTH = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1}
PLAIN = LENGTH | SMOOTH | {"embedding_size": 8, "hidden_size": 8, "num_layers": 1}
BLOCKS = LENGTH | SMOOTH | {"model": "transformer", "hidden_size": 8, "num_heads": 2}
TIED = BLOCKS | {"tie_word_embeddings": True, "gradient_clip": 0.2}
ADAM = PLAIN | {"optimizer": "adam", "learning_rate": 0.01, "momentum": 0.0}
UNIFORM = {"batching": "uniform"}
INSIDE = UNIFORM | {"triplet_pairs": "inside", "privacy_weight": 0.5}
# Units and their order from a known seed, and no noise.
SAMPLED = {"noise_multiplier": 0.0, "insecure_seed": 1}
EXACT = SAMPLED | {"exact_sums": True}
# What each run is asked for, and how its work is done.
KINDS = {
    "plain": (PLAIN | {"gradient_clip": 0.2}, {}),
    "adam": (ADAM, {}),
    "adversarial": (ADAM | {"mitigation": "adversarial", "discriminator_size": 6}, {}),
    "adversarial-blocks": (BLOCKS | {"mitigation": "adversarial"} | UNIFORM, {}),
    "triplet": (PLAIN | {"mitigation": "triplet"}, {}),
    "triplet-inside": (PLAIN | {"mitigation": "triplet"} | INSIDE, {}),
    "split": (TIED, {"fsdp": True}),
    "adapted": (LENGTH | {"lora": 2}, {}),
    "adapted-split": (LENGTH | {"lora": 2}, {"fsdp": True, "merge": True}),
    "dp": (PLAIN | {"mitigation": "dp"} | SAMPLED, {}),
    "dp-exact": (PLAIN | {"mitigation": "dp"} | EXACT, {}),
    "dp-split": (BLOCKS | {"mitigation": "dp"} | EXACT, {"fsdp": True}),
    "dp-adapted-split": (LENGTH | SMOOTH | {"lora": 2, "mitigation": "dp"} | EXACT, {"fsdp": True}),
    "adaptive-dp": (PLAIN | {"mitigation": "adaptive-dp"} | EXACT, {}),
}
NOT_COMPARED = {
    "dp-noisy": (PLAIN | {"mitigation": "dp", "epsilon": 8.0}, {"checkpoint_seconds": 0.0}),
}
BIT_FOR_BIT = {"dp-exact", "dp-split", "dp-adapted-split", "adaptive-dp"}
RESUMED = ("plain", "adversarial", "split")
# What three processes are asked for beside what two are: of each way to share work one.
BY_THREE = ("plain", "adversarial", "triplet-inside", "split", "dp-exact", "dp-adapted-split")
CASES = [*((2, kind) for kind in KINDS), *((3, kind) for kind in BY_THREE)]
GOING_ON = [*((2, kind) for kind in RESUMED), (3, "split")]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def corpus(base, tmp_path_factory):
    """By the base's tokenizer, which is public, and with privacy weights."""
    folder = tmp_path_factory.mktemp("corpus")
    config = PrepareConfig(split="document", tokenizer=str(base))
    made, draw = prepare_corpus(ROWS, folder / "prepared", config), random.Random(3)
    lines = [" ".join(draw.choices(WORDS, k=12)) for _ in range(150)]
    (folder / "public.csv").write_text("text\n" + "\n".join(lines) + "\n")
    tightlip.weigh(made, public_corpus=folder / "public.csv")
    return made.folder


@pytest.fixture(scope="module")
def job_of(base, corpus):
    """What a process is asked for to train a run of some kind."""

    def job(kind, out, **more):
        settings, options = (KINDS | NOT_COMPARED)[kind]
        settings = settings | ({"model": str(base)} if "lora" in settings else {})
        told = {"corpus": str(corpus), "out": str(out), "settings": settings, "options": options}
        return told | more

    return job


def by_one_process(job):
    options = RunOptions(device="cpu", **job["options"])
    return tightlip.train(job["corpus"], job["out"], options=options, **job["settings"])


@pytest.fixture(scope="module")
def one_process(job_of, tmp_path_factory):
    """The runs of one process, trained when they are first asked for."""
    folder, made = tmp_path_factory.mktemp("one"), {}

    def run_of(kind):
        if kind not in made:
            made[kind] = by_one_process(job_of(kind, folder / kind))
        return made[kind]

    return run_of


@pytest.fixture(scope="module")
def stopped_by_one(job_of, tmp_path_factory):
    """Runs that one process began and left after four steps."""
    folder, plain = tmp_path_factory.mktemp("stopped"), Training.take_step

    def take_step(self):
        plain(self)
        if self.progress.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    Training.take_step = take_step
    try:
        for kind in RESUMED:
            with pytest.raises(KeyboardInterrupt):
                by_one_process(job_of(kind, folder / kind))
    finally:
        Training.take_step = plain
    return folder


@pytest.fixture(scope="module")
def left(corpus, job_of, stopped_by_one, tmp_path_factory):
    """The folder in which all groups of processes have left their runs and their answers."""
    folder = tmp_path_factory.mktemp("several")
    for size in SEVERAL:
        jobs = jobs_of(folder / f"of-{size}-runs", size, corpus, job_of, stopped_by_one)
        (folder / f"of-{size}.json").write_text(json.dumps({"size": size, "jobs": jobs}))
    jobs = {"killed": job_of("dp-noisy", folder / "killed-run", killed=[1, 3])}
    (folder / "killed.json").write_text(json.dumps({"size": 2, "jobs": jobs}))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    script = [sys.executable, "-W", "ignore", SCRIPT, folder]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


def jobs_of(folder, size, corpus, job_of, stopped_by_one):
    """Every kind; runs that several begin and that they go on with; and what is refused."""
    folder.mkdir()
    jobs = {kind: job_of(kind, folder / kind) for number, kind in CASES if number == size}
    for kind in (kind for number, kind in GOING_ON if number == size):
        begun, gone_on = folder / f"begun-{kind}", folder / f"gone-on-{kind}"
        jobs[begun.name] = job_of(kind, begun, interrupted=[size - 1, 4])
        shutil.copytree(stopped_by_one / kind, gone_on)
        jobs[gone_on.name] = job_of(kind, gone_on)
    (folder / "foreign").mkdir()
    (folder / "foreign" / "letter.txt").touch()
    for name, words in refused(folder).items():
        jobs[name] = {"out": name, "command": ["train", str(corpus), *words, "--device", "cpu"]}
    alone = ["train", str(corpus), "--out", str(folder / "alone"), "--device", "cpu"]
    jobs["alone"] = {"out": "alone", "command": alone, "failing": [1, 2]}  # last: it parts them
    return jobs


class Group:
    """What processes that trained together have left: their runs, and how each job ended for each."""

    def __init__(self, folder, size):
        self.folder, self.size = folder, size
        self.runs = folder.with_name(f"{folder.name}-runs")

    def of(self, job):
        assert not (errors := [path.read_text() for path in self.folder.glob("error-*")]), errors
        answers = [self.folder / f"answers-{rank}.json" for rank in range(self.size)]
        return [json.loads(path.read_text())[job] for path in answers]

    def num_steps(self, out, rank=0):
        """How many updates one of them made in a run."""
        lines = (self.folder / f"events-{rank}").read_text().splitlines()
        return sum(line.rpartition(" ")[0] == str(out) for line in lines)


@pytest.fixture(params=SEVERAL, ids=["two", "three"])
def several(request, left):
    return Group(left / f"of-{request.param}", request.param)


def refused(folder):
    """By the first process, by a guarantee, by all alike, and before anybody met."""
    fresh = ["--out", str(folder / "fresh")]
    return {
        "foreign": ["--out", str(folder / "foreign")],
        "unproved": [*fresh, "--mitigation", "dp", "--epsilon", "8", "--early-stop", "2"],
        "small": [*fresh, "--fsdp"],
        "twice": [*fresh, "--steps", "5", "--epochs", "2"],
    }


def assert_same_weights(one, other, *, bits=False):
    mine, theirs = (load_file(next(folder.glob("*.safetensors"))) for folder in (one, other))
    assert mine.keys() == theirs.keys()
    off = {"rtol": 0, "atol": 0} if bits else {"rtol": 2e-5, "atol": 2e-5}
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], **off)


def measured(run):
    """Its metrics but for the time they took; of a private run those that its owner keeps."""
    private = run.folder / PRIVATE_METRICS
    lines = run.metrics
    if private.exists():
        lines = [json.loads(line) for line in private.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def assert_same_run(run, alone, *, bits=False):
    for one, other in zip(measured(run), measured(alone), strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            close = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert one[name] == close
    assert_same_weights(run.model_folder, alone.model_folder, bits=bits)
    for one, other in zip(run.snapshots, alone.snapshots, strict=True):
        assert_same_weights(one.folder, other.folder, bits=bits)


# The same run


@pytest.mark.parametrize(("several", "kind"), CASES, indirect=["several"])
def test_several_processes_train_what_one_trains(kind, several, one_process):
    run, alone = open_run(several.runs / kind), one_process(kind)
    assert several.of(kind) == [{"step": alone.metrics[-1]["step"]}] * several.size
    assert_same_run(run, alone, bits=kind in BIT_FOR_BIT)


def test_a_run_does_not_tell_how_many_processes_trained_it(several, one_process):
    for kind in (kind for number, kind in CASES if number == several.size):
        run, alone = open_run(several.runs / kind), one_process(kind)
        assert run.config == alone.config
        names = [sorted(path.name for path in one.folder.iterdir()) for one in (run, alone)]
        assert names[0] == names[1]


@pytest.mark.parametrize("several", [2], indirect=True)
def test_adapters_of_split_weights_are_merged(several, one_process):
    merged = one_process("adapted-split").folder / "merged"
    assert_same_weights(several.runs / "adapted-split" / "merged", merged)


# Going on


@pytest.mark.parametrize(("several", "kind"), GOING_ON, indirect=["several"])
def test_one_process_goes_on_with_what_several_left(kind, several, one_process, job_of):
    begun = f"begun-{kind}"
    assert several.of(begun) == [{"stopped": True}] * several.size
    assert several.num_steps(several.runs / begun) == 4
    run = by_one_process(job_of(kind, several.runs / begun) | {"options": {}})
    assert_same_run(run, one_process(kind))


@pytest.mark.parametrize(("several", "kind"), GOING_ON, indirect=["several"])
def test_several_processes_go_on_with_what_one_left(kind, several, one_process):
    run = open_run(several.runs / f"gone-on-{kind}")
    assert several.num_steps(run.folder) == run.metrics[-1]["step"] - 4
    assert_same_run(run, one_process(kind))


# What goes wrong


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("foreign", 2, "holds letter.txt and no run"),
        ("unproved", 3, "early_stop stops by looking at private validation text"),
        ("small", 2, "Leave fsdp out: every process then has the whole model."),
        ("twice", 2, "both say how long to train"),
    ],
)
def test_a_refusal_is_said_once_and_ends_all(name, code, words, several):
    first, *others = several.of(name)
    (line,) = [line for line in first["said"].splitlines() if line.startswith("tightlip: ")]
    assert words in line
    assert [each["code"] for each in (first, *others)] == [code] * several.size
    assert [each["said"] for each in others] == [""] * len(others)
    assert not (several.runs / "fresh").exists()


@pytest.mark.usefixtures("register_of_processes")
def test_a_killed_process_ends_the_run_and_undercounts_nothing(left, job_of, monkeypatch):
    """Updates as they were made, in two lives, against what the ledger has; nobody else ended the
    other process."""
    group, out = Group(left / "killed", 2), left / "killed-run"
    assert json.loads((group.folder / "codes.json").read_text()) == [0, -signal.SIGKILL]
    answer = json.loads((group.folder / "answers-0.json").read_text())["killed"]
    assert "Another process of this run ended" in answer["refused"]
    made, run = group.num_steps(out, rank=1), open_run(out)
    assert made == 3
    assert not run.finished
    assert run.guarantee["steps"] >= made
    counted, plain = [], Training.take_step
    monkeypatch.setattr(Training, "take_step", lambda self: counted.append(plain(self)))
    run = by_one_process(job_of("dp-noisy", out))
    assert run.finished
    assert run.guarantee["steps"] >= made + len(counted)


def test_a_process_that_fails_alone_says_why_and_ends_the_others(several):
    first, *others = several.of("alone")
    assert [each["code"] for each in (first, *others)] == [2] * several.size
    assert "Another process of this run ended" in first["said"]
    assert "Process 1: This process alone cannot go on. Look at it." in others[0]["said"]


def test_torchrun_takes_the_command(tmp_path):
    """From a raw corpus, which the first process prepares; one of them prints."""
    raw = tmp_path / "corpus.jsonl"
    raw.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shape = ["--hidden-size", "8", "--embedding-size", "8", "--steps", "3", "--batch-size", "8"]
    words = ["train", raw, "--out", tmp_path / "run", "--device", "cpu", *shape]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, *launcher, "tightlip", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The run:") == 1
    assert open_run(tmp_path / "run").finished
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert sum("Done after step 3" in line for line in lines) == 1


def test_a_weight_that_no_process_uses_is_left_without_a_gradient():
    """Were its gradient 0, weight decay would move it, as it moves nothing in one process."""

    class Twins(Processes):
        """Two processes with the same rows."""

        def add_up(self, tensors):
            for tensor in tensors:
                tensor *= 2

    model = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)])
    loss = model[0](torch.ones(1, 2)).sum()
    loss.backward()
    nats = loss.detach().clone()
    add_up_step(Twins(0, 2), model, nats)
    assert nats == 2 * loss
    assert torch.equal(model[0].weight.grad, torch.full((3, 2), 2.0))
    assert model[1].weight.grad is None


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8])
def test_every_row_is_run_once_and_every_process_runs(num_rows):
    parts = [Part.of(num_rows, Processes(rank, 3)) for rank in range(3)]
    assert sorted(np.concatenate([part.places for part in parts])) == list(range(num_rows))
    assert all(len(part.run) for part in parts)
