"""Runs of adapters that are killed and started again."""

import pytest

from killable import train_and_kill
from models.tiny_finetunes import save_base
from tightlip.core.run_folder import open_run
from tightlip.corpus.prepare import prepare_corpus
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.loop import Training
from tightlip.training.loop import train_model as train
from training.by_peft import WEIGHTS
from training.small_corpora import documents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def corpus(base, tmp_path_factory):
    rows, config = (
        documents(num_documents=24, longest=9),
        PrepareConfig(tokenizer=str(base), split="none"),
    )
    return prepare_corpus(rows, tmp_path_factory.mktemp("corpus") / "prepared", config)


def adapting(base, **settings):
    plain = {"lora": 2, "batch_size": 6, "sequence_length": 10, "learning_rate": 0.05}
    return TrainConfig.of(model=str(base), **{**plain, **settings})


class Killed(BaseException):
    """Stands in for a kill: nothing of ours catches it."""


@pytest.mark.parametrize("moment", ["take_step", "save", "drop_old_snapshots", "finish"])
def test_a_run_cut_off_anywhere_ends_with_the_same_bytes_and_the_last_snapshots(
    moment, base, corpus, tmp_path, monkeypatch
):
    config = adapting(base, epochs=3, snapshot_steps=3, lora_dropout=0.2)
    options = RunOptions(checkpoint_seconds=1e6, keep_snapshots=2)
    expected = train(corpus, tmp_path / "whole", config, options)
    calls, plain = {"left": 0}, getattr(Training, moment)

    def cut(self, *arguments):
        result = plain(self, *arguments)
        calls["left"] -= 1
        if calls["left"] == 0:
            raise Killed
        return result

    for after in (2, 4, 1):
        calls["left"] = after
        monkeypatch.setattr(Training, moment, cut)
        try:
            train(corpus, tmp_path / "run", config, options)
        except Killed:
            continue
        break
    monkeypatch.undo()
    found = train(corpus, tmp_path / "run", config, options)
    assert [one.name for one in found.snapshots] == ["step-9", "epoch-3"]
    assert {path.name for path in (found.folder / "snapshots").iterdir()} == {"step-9", "epoch-3"}
    folders = [(found.model_folder, expected.model_folder)]
    folders += [(a.folder, b.folder) for a, b in zip(found.snapshots, expected.snapshots)]  # noqa: B905
    for one, other in folders:
        for name in (WEIGHTS, "adapter_config.json"):
            assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.usefixtures("register_of_processes")
def test_a_private_run_that_is_killed_charges_every_step_it_took(command, base, corpus, tmp_path):
    config = adapting(base, mitigation="dp", epsilon=8.0, steps=12, batch_size=3)
    for applied in train_and_kill(command, corpus, tmp_path, config, num_kills=2):
        assert open_run(tmp_path / "run").guarantee["steps"] >= applied
    run = train(corpus, tmp_path / "run", config)
    assert run.guarantee["steps"] == 12
    assert run.guarantee["epsilon"] <= 8.0
    assert {path.name for path in run.model_folder.iterdir()} >= {WEIGHTS, "guarantee.json"}
