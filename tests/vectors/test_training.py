"""Training through noise: the same end however it got there, and the best epoch kept."""

import json
import signal

import numpy as np
import pytest
import torch

from tightlip.core.errors import UsageError
from tightlip.vectors import learning as training
from tightlip.vectors.batches import Batches, scores_of
from tightlip.vectors.data import load_examples, open_source, read_examples
from tightlip.vectors.encode import load_device
from tightlip.vectors.extractors import make_extractor
from tightlip.vectors.guarantees import VectorMechanism
from tightlip.vectors.halves import load_classifier, load_extractor, noise_classifier
from tightlip.vectors.learning import Training
from tightlip.vectors.run import represent_train
from tightlip.vectors.settings import RepresentOptions, RepresentSettings
from vectors.toy_corpora import tiny_encoder, toy_corpus

SMALL = {
    "label": "topic",
    "private": ("age",),
    "extractor": "bag",
    "dimensions": 8,
    "epochs": 3,
    "batch_size": 16,
}
CPU = RepresentOptions(device="cpu")


def trained(out, rows=None, options=CPU, **changed):
    settings = SMALL | {"epsilon": 50.0} | changed
    if settings.get("method", "dpnr") != "dpnr":
        settings["epsilon"] = None
    return represent_train(rows or toy_corpus(200), out, options=options, **settings)


def weights(run):
    found = load_extractor(run.device).state_dict()
    return found | load_classifier(run.server).state_dict()


def same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "changed", [{}, {"dropout": 0.3}, {"method": "adversarial"}, {"extractor": "lstm"}]
)
def test_the_same_seed_gives_the_same_halves_and_another_does_not(tmp_path, changed):
    one, other = (trained(tmp_path / name, **changed) for name in ("one", "other"))
    assert same(weights(one), weights(other))
    about = [json.loads((run.device / "device.json").read_text()) for run in (one, other)]
    assert about[0] == about[1]
    assert one.metrics["test_loss_nats"] == other.metrics["test_loss_nats"]
    assert not same(weights(one), weights(trained(tmp_path / "third", seed=1, **changed)))


@pytest.mark.parametrize("changed", [{}, {"dropout": 0.3}, {"method": "adversarial"}])
def test_a_training_stopped_at_any_step_goes_on_to_the_same_end(tmp_path, changed, monkeypatch):
    whole = trained(tmp_path / "whole", **changed)
    plain, stops = Training.take_step, iter([1, 4, 0, 9, 11])
    left = next(stops)

    def stopped_at_times(self, batch):
        nonlocal left
        if left == 0:
            left = next(stops, 10**6)
            raise KeyboardInterrupt
        left -= 1
        plain(self, batch)

    monkeypatch.setattr(Training, "take_step", stopped_at_times)
    often = RepresentOptions(device="cpu", checkpoint_seconds=0)
    num_stops = 0
    while True:
        try:
            run = trained(tmp_path / "stopped", options=often, **changed)
            break
        except KeyboardInterrupt:
            num_stops += 1
    assert num_stops == 5
    assert same(weights(whole), weights(run))
    assert [line["dev_loss_nats"] for line in run.metrics["epochs"]] == [
        line["dev_loss_nats"] for line in whole.metrics["epochs"]
    ]
    assert not (run.folder / "checkpoint").exists()


@pytest.mark.parametrize("step", [5, 10])  # within an epoch, and the last of one
def test_ctrl_c_saves_the_step_it_came_in_and_the_same_call_goes_on(tmp_path, monkeypatch, step):
    whole, plain = trained(tmp_path / "whole"), Training._update

    def interrupted(self, loss):
        if self.progress.step == step - 1:
            signal.raise_signal(signal.SIGINT)
        plain(self, loss)

    monkeypatch.setattr(Training, "_update", interrupted)
    with pytest.raises(KeyboardInterrupt, match=f"Stopped after step {step} of 30"):
        trained(tmp_path / "run")
    (state,) = (tmp_path / "run" / "checkpoint").glob("step-*/state.json")
    assert json.loads(state.read_text())["step"] == step
    monkeypatch.setattr(Training, "_update", plain)
    assert same(weights(whole), weights(trained(tmp_path / "run")))


def test_through_noise_of_scale_zero_it_learns_what_it_learns_without(tmp_path, monkeypatch):
    plain = trained(tmp_path / "plain", method="none")
    settings = {"mechanism": "laplace-as-published", "epsilon": 1.0}
    noisy = trained(tmp_path / "noisy", **settings)
    assert not same(weights(plain), weights(noisy))
    monkeypatch.setattr(VectorMechanism, "noise_scale", 0.0)
    assert same(weights(plain), weights(trained(tmp_path / "quiet", **settings)))


def test_the_weights_kept_are_those_of_the_best_epoch_on_dev(tmp_path, monkeypatch):
    """Oracle: every epoch's halves kept aside and scored again. A rate this high overshoots."""
    every, end = [], Training.end_epoch

    def kept(self, bar):
        end(self, bar)
        states = {name: tensor.clone() for name, tensor in self.extractor.state_dict().items()}
        states |= {name: tensor.clone() for name, tensor in self.classifier.state_dict().items()}
        every.append((self.progress.epochs[-1]["dev_loss_nats"], states))

    monkeypatch.setattr(Training, "end_epoch", kept)
    rows = toy_corpus(120)
    draw = np.random.default_rng(0)
    for row in rows:  # half the labels are wrong, so that learning on means learning them by heart
        row["topic"] = ["money", "sport"][draw.integers(2)] if draw.random() < 0.5 else row["topic"]
    run = trained(tmp_path / "run", rows, method="none", epochs=6, learning_rate=0.05)
    losses = [loss for loss, _ in every]
    best = int(np.argmin(losses))
    assert best < 5, "the last epoch is the best: nothing is tested"
    assert run.metrics["best_epoch"] == best + 1
    assert same(weights(run), every[best][1])
    mechanism = VectorMechanism(mechanism="none", dimensions=8, epsilon=None)
    scores = scores_of(
        load_extractor(run.device), load_classifier(run.server), mechanism,
        load_examples(run.folder).part("dev"), seed=0,
    )  # fmt: skip
    assert scores.loss_nats == pytest.approx(min(losses), rel=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_given_encoder_is_tuned_or_with_freeze_left_as_it_was(kind, tmp_path):
    folder = tiny_encoder(tmp_path / "given", kind)
    before = make_extractor(folder, []).state_dict()
    changed = {"extractor": str(folder), "dimensions": None, "method": "none", "epochs": 1}
    tuned = trained(tmp_path / "tuned", **changed)
    assert not same(before, load_extractor(tuned.device).state_dict())
    for dropout in (0.0, 0.4):
        frozen = trained(tmp_path / f"frozen-{dropout}", freeze=True, dropout=dropout, **changed)
        assert same(before, load_extractor(frozen.device).state_dict())


@pytest.mark.parametrize("freeze", [False, True])
def test_every_module_drops_out_in_every_step_unless_it_is_frozen(freeze, tmp_path, monkeypatch):
    """A loaded encoder starts in evaluation, and scoring an epoch puts it there again."""
    update, modes = Training._update, []

    def noted(self, loss):
        modes.append({module.training for module in self.extractor.model.modules()})
        update(self, loss)

    monkeypatch.setattr(Training, "_update", noted)
    folder = tiny_encoder(tmp_path / "given", "bert")
    changed = {"extractor": str(folder), "dimensions": None, "method": "none", "epochs": 2}
    trained(tmp_path / "run", dropout=0.2, freeze=freeze, **changed)
    assert len(modes) > 10
    assert all(each == {not freeze} for each in modes)


def test_seeding_a_step_is_what_torch_does_on_the_cpu():
    training.seed_step(3, 7, torch.device("cpu"))
    ours = torch.randn(5)
    seed = int(np.random.SeedSequence([3, 8, 0]).generate_state(1, np.uint64)[0]) >> 1
    torch.manual_seed(seed)
    assert torch.equal(ours, torch.randn(5))


def test_what_the_device_releases_the_server_tells_apart(tmp_path):
    """Trained through little noise, the two halves together find the label in fresh texts."""
    run = trained(tmp_path / "run", toy_corpus(400), epsilon=200.0, epochs=8)
    assert run.metrics["test_accuracy"] > 0.9
    fresh = toy_corpus(200, seed=9)
    vectors = load_device(run.device).encode([row["text"] for row in fresh])
    server = load_classifier(run.server)
    told = [server.labels[number] for number in server(torch.from_numpy(vectors)).argmax(dim=1)]
    assert np.mean([label == row["topic"] for label, row in zip(told, fresh, strict=True)]) > 0.9


def test_several_seeds_give_mean_and_spread(tmp_path):
    done = trained(tmp_path / "runs", seeds=3, epochs=1)
    found = done.summary["test_loss_nats"]
    values = [run.metrics["test_loss_nats"] for run in done.runs]
    assert found["values"] == values
    assert found["mean"] == pytest.approx(np.mean(values))
    assert found["spread"] == pytest.approx(np.std(values, ddof=1))
    assert len(set(values)) == 3
    assert values[1] == trained(tmp_path / "one", seed=1, epochs=1).metrics["test_loss_nats"]
    assert [run.folder.name for run in done.runs] == ["seed-0", "seed-1", "seed-2"]
    with pytest.raises(UsageError, match="several seeds"):
        trained(tmp_path / "runs", epochs=1)


def test_a_finished_run_is_returned_as_it_is_and_another_setting_is_refused(tmp_path, monkeypatch):
    run = trained(tmp_path / "run")
    monkeypatch.setattr(Training, "run", None)
    assert trained(tmp_path / "run").metrics == run.metrics
    with pytest.raises(UsageError, match=r"other settings \(epsilon\)"):
        trained(tmp_path / "run", epsilon=1.0)
    with pytest.raises(UsageError, match="fingerprint"):
        trained(tmp_path / "run", toy_corpus(201))


def test_test_texts_that_read_as_a_training_text_does_are_counted(tmp_path):
    rows = [row | {"split": "train"} for row in toy_corpus(60)]
    rows += [row | {"split": "dev"} for row in toy_corpus(20, seed=1)]
    rows += [row | {"split": "test", "text": f" {row['text'].upper()} "} for row in rows[:7]]
    rows += [row | {"split": "test", "text": f"{row['text']} again"} for row in rows[7:12]]
    run = trained(tmp_path / "run", rows, split="column", epochs=1)
    assert run.metrics["num_seen_in_train"] == 7
    examples = load_examples(run.folder)
    assert examples.seen_in_train().sum() == 7


def test_texts_in_memory_stay_with_the_run(tmp_path):
    rows = toy_corpus(200)
    run = trained(tmp_path / "run", rows)
    assert load_examples(run.folder).texts == [row["text"] for row in rows]
    assert load_examples(run.folder).users == [row["user"] for row in rows]
    nobodys = [{name: row[name] for name in ("text", "topic", "age")} for row in rows]
    assert load_examples(trained(tmp_path / "nobody", nobodys, epochs=1).folder).users is None


def test_a_refusal_leaves_the_folder_free(tmp_path):
    with pytest.raises(UsageError, match="Closest: lstm"):
        trained(tmp_path / "run", extractor="lsmt", dimensions=None)
    with pytest.raises(UsageError, match="no column 'nothing'"):
        trained(tmp_path / "run", label="nothing")
    with pytest.raises(UsageError, match="first token"):
        trained(tmp_path / "run", pooling="cls")
    trained(tmp_path / "run")


def test_every_text_comes_once_an_epoch_and_any_start_gives_the_same_batches():
    examples = read_examples(
        open_source(toy_corpus(90)), RepresentSettings(**(SMALL | {"method": "none"}))
    )
    extractor = make_extractor("bag", examples.texts, dimensions=4)
    batches = Batches(extractor, examples, batch_size=8, dropout=0.5, seed=3)
    every = list(batches.from_step(0, 2 * batches.steps_per_epoch))
    for epoch in (every[: batches.steps_per_epoch], every[batches.steps_per_epoch :]):
        assert sorted(np.concatenate([batch.places for batch in epoch])) == list(range(90))
    later = list(batches.from_step(7, 2 * batches.steps_per_epoch))
    for one, other in zip(every[7:], later, strict=True):
        assert np.array_equal(one.places, other.places)
        assert torch.equal(one.tokens["input_ids"], other.tokens["input_ids"])


def test_half_the_words_are_masked_anew_at_each_step():
    examples = read_examples(
        open_source(toy_corpus(40)), RepresentSettings(**(SMALL | {"method": "none"}))
    )
    extractor = make_extractor("bag", examples.texts, dimensions=4)
    batches = Batches(extractor, examples, batch_size=40, dropout=0.5, seed=3)
    first, second = (batch.tokens["input_ids"] for batch in batches.from_step(0, 2))
    masks = first == extractor.tokenizer.mask_token_id
    assert (masks.sum(dim=1) == 4).all()  # of seven words
    assert not torch.equal(masks, second == extractor.tokenizer.mask_token_id)


def test_the_classifier_sees_vectors_of_about_unit_width():
    """Both ways: with the width of another mechanism they would not be."""
    torch.manual_seed(0)
    for name in ("laplace-as-published", "gaussian"):
        mechanism = VectorMechanism(mechanism=name, dimensions=8, epsilon=0.1)
        classifier = noise_classifier(["a", "b"], mechanism, hidden=0)
        vectors = training.normalised(torch.randn(4000, 8), mechanism)
        seen = (
            vectors + training.training_noise(vectors, mechanism) - classifier.center
        ) / classifier.width
        assert 0.9 < float(seen.std()) < 1.1


@pytest.mark.parametrize(
    ("device", "because"), [("gpu", "Unknown device"), ("cuda", "needs a GPU")]
)
def test_a_device_that_is_not_there_is_refused(device, because, tmp_path):
    if device == "cuda" and torch.cuda.is_available():
        return
    with pytest.raises(UsageError, match=because):
        trained(tmp_path / "run", options=RepresentOptions(device=device))
