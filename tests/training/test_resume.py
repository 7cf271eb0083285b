"""Killed at any moment and started again, a run ends with the same bits."""

import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tightlip
from by_hand import unlisted
from killable import begin_training
from tightlip.core.errors import UsageError
from tightlip.core.files import names_in
from tightlip.core.run_folder import open_run
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.loop import Training
from tightlip.training.loop import train_model as train
from training.small_corpora import hand_set_clock, prepared

pytestmark = pytest.mark.slow

CONFIG = TrainConfig.of(
    embedding_size=8, hidden_size=8, num_layers=2, dropout=0.2, batch_size=8, sequence_length=10,
    learning_rate=0.01, schedule="cosine", epochs=4, snapshot_steps=4, tie_word_embeddings=True,
)  # fmt: skip
EVERY_STEP = RunOptions(checkpoint_seconds=0)
RARELY = RunOptions(checkpoint_seconds=1e6)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the killed processes have: the order of sums is a matter of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus") / "prepared")


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    return train(corpus, tmp_path_factory.mktemp("undisturbed") / "run", CONFIG, RARELY)


def without_seconds(metrics):
    return [{name: line[name] for name in line if name != "seconds"} for line in metrics]


def assert_same_run(found, expected):
    assert found.finished
    assert without_seconds(found.metrics) == without_seconds(expected.metrics)
    assert [s.name for s in found.snapshots] == [s.name for s in expected.snapshots]
    folders = [(found.model_folder, expected.model_folder)]
    folders += [
        (a.folder, b.folder) for a, b in zip(found.snapshots, expected.snapshots, strict=True)
    ]
    for one, other in folders:
        assert (one / "model.safetensors").read_bytes() == (
            other / "model.safetensors"
        ).read_bytes()
    left = names_in(found.folder)
    assert left == {
        "config.toml",
        "ledger.json",
        "log.txt",
        "metrics.jsonl",
        "model",
        "snapshots",
    }


class Killed(BaseException):
    """Stands in for a kill: nothing of ours catches it."""


def test_an_unfinished_run_of_an_earlier_version_is_refused(corpus, tmp_path, monkeypatch):
    out = tmp_path / "run"

    def cut(self):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Training, "finish", cut)
        with pytest.raises(Killed):
            train(corpus, out, CONFIG, RARELY)
    config = out / "config.toml"
    written = f'tightlip = "{tightlip.__version__}"\n'
    assert written in config.read_text()
    unlisted(config).write_text(config.read_text().replace(written, ""))
    with pytest.raises(UsageError, match=r"unfinished run of tightlip 0\.1"):
        train(corpus, out, CONFIG, RARELY)


@pytest.mark.parametrize("options", [EVERY_STEP, RARELY], ids=["every-step", "rarely"])
@pytest.mark.parametrize("moment", ["take_step", "save", "measure", "finish"])
def test_a_run_cut_off_anywhere_goes_on_to_the_same_bits(
    moment, options, corpus, undisturbed, tmp_path, monkeypatch
):
    calls = {"left": 0}
    plain = getattr(Training, moment)

    def cut(self, *arguments):
        result = plain(self, *arguments)
        calls["left"] -= 1
        if calls["left"] == 0:
            raise Killed
        return result

    for after in (1, 5, 2):
        calls["left"] = after
        monkeypatch.setattr(Training, moment, cut)
        try:
            train(corpus, tmp_path / "run", CONFIG, options)
        except Killed:
            continue
        break
    monkeypatch.undo()
    assert_same_run(train(corpus, tmp_path / "run", CONFIG, options), undisturbed)


@pytest.mark.parametrize("after_files", ["tensors.safetensors", "state.json", None])
def test_a_checkpoint_is_whole_or_not_there(
    after_files, corpus, undisturbed, tmp_path, monkeypatch
):
    """Cut off while the fourth checkpoint is being written, or before the third is removed."""
    import safetensors.torch

    from tightlip.core import run_folder

    saved = {"count": 0}
    save_file, write_json, rmtree = (
        safetensors.torch.save_file,
        run_folder.write_json,
        run_folder.shutil.rmtree,
    )

    def counted_save(tensors, path):
        saved["count"] += 1
        save_file(tensors, path)
        if saved["count"] == 4 and after_files == "tensors.safetensors":
            raise Killed

    def counted_write(path, value):
        write_json(path, value)
        if saved["count"] == 4 and after_files == "state.json":
            raise Killed

    def counted_remove(path, *arguments, **more):
        if saved["count"] == 4 and after_files is None and "checkpoint" in Path(path).parts[-2]:
            raise Killed
        rmtree(path, *arguments, **more)

    monkeypatch.setattr(safetensors.torch, "save_file", counted_save)
    monkeypatch.setattr(run_folder, "write_json", counted_write)
    monkeypatch.setattr(run_folder.shutil, "rmtree", counted_remove)
    with pytest.raises(Killed):
        train(corpus, tmp_path / "run", CONFIG, EVERY_STEP)
    monkeypatch.undo()
    assert_same_run(train(corpus, tmp_path / "run", CONFIG, EVERY_STEP), undisturbed)


def last_step_saved(run):
    steps = [path.name for path in run.glob("checkpoint/step-*")]
    return max((int(name.split("-")[1]) for name in steps), default=0)


def test_a_run_killed_with_kill_9_again_and_again_ends_with_the_same_bits(
    command, corpus, undisturbed, tmp_path
):
    reached = [0]
    for _ in range(3):
        life = begin_training(command, corpus, tmp_path, CONFIG)
        life.kill_once(lambda: last_step_saved(tmp_path / "run") > reached[-1])
        reached.append(last_step_saved(tmp_path / "run"))
    # Killed at three moments, each time further on: the run was under way and went on.
    assert 0 < reached[1] < reached[2] < reached[3]
    found = train(corpus, tmp_path / "run", CONFIG, EVERY_STEP)
    assert_same_run(found, undisturbed)


def test_ctrl_c_saves_where_it_was_and_the_same_command_goes_on(
    corpus, undisturbed, tmp_path, monkeypatch
):
    plain, handler = Training.take_step, signal.getsignal(signal.SIGINT)

    def interrupted(self):
        if self.progress.step == 5:
            signal.raise_signal(signal.SIGINT)  # within a step
        plain(self)

    monkeypatch.setattr(Training, "take_step", interrupted)
    with pytest.raises(KeyboardInterrupt, match="Stopped after step 6 of"):
        train(corpus, tmp_path / "run", CONFIG, RARELY)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is handler
    assert [path.name for path in (tmp_path / "run/checkpoint").iterdir()] == ["step-6"]
    assert not open_run(tmp_path / "run").finished
    assert_same_run(train(corpus, tmp_path / "run", CONFIG, RARELY), undisturbed)


def test_a_second_ctrl_c_is_not_held_back(corpus, tmp_path, monkeypatch):
    def twice(self):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Training, "take_step", twice)
    with pytest.raises(KeyboardInterrupt):
        train(corpus, tmp_path / "run", CONFIG, RARELY)


def test_training_works_outside_the_main_thread(corpus, undisturbed, tmp_path):
    thread = threading.Thread(target=train, args=(corpus, tmp_path / "run", CONFIG, RARELY))
    thread.start()
    thread.join()
    assert_same_run(open_run(tmp_path / "run"), undisturbed)


def test_an_unfinished_run_refuses_other_settings_too(corpus, tmp_path, monkeypatch):
    def cut(self):
        raise Killed

    monkeypatch.setattr(Training, "take_step", cut)
    with pytest.raises(Killed):
        train(corpus, tmp_path / "run", CONFIG, RARELY)
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"other settings \(epochs\)"):
        train(corpus, tmp_path / "run", TrainConfig.of(**{**CONFIG.tree(), "epochs": 5}), RARELY)


@pytest.mark.parametrize("optimizer", ["adamw", "adamax", "sgd"])
def test_every_optimizer_resumes_to_the_same_bits(optimizer, corpus, tmp_path, monkeypatch):
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    config = TrainConfig.of(**{**CONFIG.tree(), "optimizer": optimizer, **momentum})
    expected = train(corpus, tmp_path / "whole", config, RARELY)
    plain = Training.take_step

    def cut(self):
        if self.progress.step == 9:
            raise Killed
        plain(self)

    monkeypatch.setattr(Training, "take_step", cut)
    with pytest.raises(Killed):
        train(corpus, tmp_path / "run", config, EVERY_STEP)
    monkeypatch.undo()
    assert_same_run(train(corpus, tmp_path / "run", config, EVERY_STEP), expected)


def test_seconds_go_on_counting_after_a_resumption(corpus, tmp_path, monkeypatch):
    hand_set_clock(monkeypatch, seconds_per_step=1)
    timed = Training.take_step

    def cut_after_two(self):
        if self.progress.step == 2:
            raise Killed
        timed(self)

    with monkeypatch.context() as cut:
        cut.setattr(Training, "take_step", cut_after_two)
        with pytest.raises(Killed):
            train(corpus, tmp_path / "run", CONFIG, EVERY_STEP)
    run = train(corpus, tmp_path / "run", CONFIG, EVERY_STEP)
    assert run.metrics[0]["step"] > 2
    assert run.metrics[0]["seconds"] == run.metrics[0]["step"]


def test_nothing_in_a_checkpoint_can_run(corpus, tmp_path, monkeypatch):
    def stop(self):
        raise Killed

    monkeypatch.setattr(Training, "finish", stop)
    with pytest.raises(Killed):
        train(corpus, tmp_path / "run", CONFIG, RARELY)
    (kept,) = (tmp_path / "run/checkpoint").iterdir()
    assert sorted(names_in(kept)) == ["state.json", "tensors.safetensors"]
    # A random state on disk would let its reader take noise away again.
    names = load_file(kept / "tensors.safetensors").keys()
    assert {name.split(".")[0] for name in names} == {"model", "optimizer"}
