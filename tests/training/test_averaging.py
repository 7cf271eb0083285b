"""Averaged weights: the sum that the decays give, of weights that train on as though nobody averaged."""

import pytest
import torch
from safetensors.torch import load_file

from models.tiny_finetunes import save_base
from tightlip.core.run_folder import CHECKPOINT, TENSORS
from tightlip.corpus.prepare import prepare_corpus
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.training.checkpoints import AveragedWeights
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.loop import Training
from tightlip.training.loop import train_model as train
from tightlip.training.starting import starting_model
from training.small_corpora import documents, prepared
from training.test_loop import perplexity_by_hand

pytestmark = pytest.mark.slow

SMALL = {
    "embedding_size": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 8, "sequence_length": 100,
    "learning_rate": 0.02, "steps": 15, "snapshot": "none", "snapshot_steps": 1,
}  # fmt: skip
DECAY = 0.5  # low, so that both sides of the minimum are there: (1 + t) / (10 + t) passes it at 8


def small(**settings):
    return TrainConfig.of(**{**SMALL, **settings})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus") / "prepared")


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    return train(corpus, tmp_path_factory.mktemp("plain") / "run", small())


@pytest.fixture(scope="module")
def averaged(corpus, tmp_path_factory):
    config = small(average_weights=DECAY)
    return train(corpus, tmp_path_factory.mktemp("averaged") / "run", config)


def weights(folder):
    return load_file(folder / "model.safetensors")


def by_hand(weights_of_steps, decay):
    """Oracle: every step's share written out, in float64; they add up to 1."""
    decays = [min(decay, (1 + t) / (10 + t)) for t in range(1, len(weights_of_steps))]
    shares = []
    for step in range(len(weights_of_steps)):
        share = 1.0 if step == 0 else 1 - decays[step - 1]
        for later in decays[step:]:
            share *= later
        shares.append(share)
    assert sum(shares) == pytest.approx(1)
    return {
        name: sum(s * each[name].double() for s, each in zip(shares, weights_of_steps, strict=True))
        for name in weights_of_steps[0]
    }


def start_of(corpus):
    torch.manual_seed(0)
    model = starting_model(small(), load_tokenizer(corpus.tokenizer_folder))
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def test_every_snapshot_is_the_average_of_the_weights_so_far(corpus, plain, averaged):
    taken = [start_of(corpus), *(weights(each.folder) for each in plain.snapshots)]
    assert len(averaged.snapshots) == 15
    for number, snapshot in enumerate(averaged.snapshots, start=1):
        found, expected = weights(snapshot.folder), by_hand(taken[: number + 1], DECAY)
        for name, each in found.items():
            torch.testing.assert_close(each.double(), expected[name], rtol=1e-5, atol=1e-6)
    last = weights(averaged.model_folder)
    assert all(torch.equal(each, found[name]) for name, each in last.items())
    assert not torch.allclose(last["lm_head.weight"], taken[-1]["lm_head.weight"], atol=1e-3)


def test_weights_train_on_as_though_nobody_averaged(plain, averaged):
    for one, other in zip(plain.metrics, averaged.metrics, strict=True):
        assert one["train_loss_nats"] == other["train_loss_nats"]


def test_validation_is_of_the_averaged_weights(corpus, averaged):
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    for place in (2, 14):
        line = averaged.metrics[place]
        model = load_causal_lm(averaged.snapshots[place].folder)
        found = perplexity_by_hand(model, tokenizer, corpus.validation)
        assert found == pytest.approx((line["validation_perplexity"], line["validation_accuracy"]))


class Killed(BaseException):
    """Stands in for a kill: nothing of ours catches it."""


def cut_at(step, monkeypatch, corpus, out, config):
    """A run that ends in the middle of a step, with a checkpoint of the one before."""
    plain = Training.take_step

    def cut(self):
        if self.progress.step == step:
            raise Killed
        plain(self)

    monkeypatch.setattr(Training, "take_step", cut)
    with pytest.raises(Killed):
        train(corpus, out, config, RunOptions(checkpoint_seconds=0))
    monkeypatch.undo()


def tensors_kept(out):
    (latest,) = (out / CHECKPOINT).glob("step-*")
    return load_file(latest / TENSORS)


def test_a_run_cut_off_goes_on_to_the_same_bits(corpus, averaged, tmp_path, monkeypatch):
    config = small(average_weights=DECAY)
    for step in (4, 11):
        cut_at(step, monkeypatch, corpus, tmp_path / "run", config)
    kept = tensors_kept(tmp_path / "run")
    number_of_weights = len(weights(averaged.model_folder))
    assert len([name for name in kept if name.startswith("average.")]) == number_of_weights
    resumed = train(corpus, tmp_path / "run", config)
    for one, other in zip(resumed.snapshots, averaged.snapshots, strict=True):
        same = [(path / "model.safetensors").read_bytes() for path in (one.folder, other.folder)]
        assert same[0] == same[1]


def test_without_averaging_a_checkpoint_holds_no_average(corpus, tmp_path, monkeypatch):
    cut_at(4, monkeypatch, corpus, tmp_path / "run", small())
    assert not any(name.startswith("average") for name in tensors_kept(tmp_path / "run"))


def test_adapters_are_averaged_and_go_on_to_the_same_bits(tmp_path, monkeypatch):
    base = save_base(tmp_path / "llama")
    rows = documents(num_documents=24, longest=9)
    settings = PrepareConfig(tokenizer=str(base), split="none")
    corpus = prepare_corpus(rows, tmp_path / "prepared", settings)
    shape = {"lora": 2, "batch_size": 6, "sequence_length": 10, "learning_rate": 0.05}
    shape |= {"model": str(base), "steps": 6, "snapshot": "none", "snapshot_steps": 1}
    config = TrainConfig.of(average_weights=DECAY, **shape)
    whole = train(corpus, tmp_path / "whole", config)
    cut_at(3, monkeypatch, corpus, tmp_path / "run", config)
    resumed = train(corpus, tmp_path / "run", config)
    file = "adapter_model.safetensors"
    last = load_file(resumed.model_folder / file)
    assert (resumed.model_folder / file).read_bytes() == (whole.model_folder / file).read_bytes()
    raw = train(corpus, tmp_path / "raw", TrainConfig.of(**shape))
    taken = [load_file(each.folder / file) for each in raw.snapshots]
    # LoRA starts at what its seed draws, and B at 0, so of B the start needs no weight.
    start = {name: torch.zeros_like(each) for name, each in taken[0].items()}
    expected = by_hand([start, *taken], DECAY)
    names = [name for name in last if "lora_B" in name]
    assert names
    for name in names:
        torch.testing.assert_close(last[name].double(), expected[name], rtol=1e-4, atol=1e-6)


def test_inside_the_model_is_the_average_and_afterwards_itself_to_the_bit():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average = AveragedWeights(model, 0.9)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    now, address = model.weight.detach().clone(), model.weight.data_ptr()
    with average.in_place():
        assert torch.equal(model.weight, before)
        assert model.weight.data_ptr() == address  # where captured passes read it
    assert torch.equal(model.weight, now)
    with pytest.raises(ZeroDivisionError), average.in_place():
        1 / 0  # noqa: B018
    assert torch.equal(model.weight, now)
    assert len(average.average) == 1  # one more copy of what is trained, of nothing else
    assert AveragedWeights(model, None).average == []


def test_a_private_run_is_charged_the_same_with_averaged_weights_and_a_corrected_adam(tmp_path):
    rows = documents(num_users=12)
    corpus = prepare_corpus(rows, tmp_path / "prepared", PrepareConfig(split="none"))
    dp = {"mitigation": "dp", "epsilon": 8.0, "insecure_seed": 1, "allow_unproved": True}
    runs = [
        train(corpus, tmp_path / name, small(sequence_length=10, steps=4, **dp, **more))
        for name, more in [("plain", {}), ("both", {"average_weights": 0.9, "adam_correction": 1})]
    ]
    same = ("epsilon", "delta", "steps", "noise_multiplier", "standing", "mechanism")
    assert [runs[1].guarantee[name] for name in same] == [runs[0].guarantee[name] for name in same]
    one, other = (weights(run.model_folder) for run in runs)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
