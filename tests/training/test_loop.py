import json
import logging
import math
import stat

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tightlip.core.errors import UsageError
from tightlip.core.registry import names_of
from tightlip.core.run_folder import open_run
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.training.batches import epoch_order, gather, rows_of
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.loop import Training
from tightlip.training.loop import train_model as train
from tightlip.training.mitigations import LEDGER_KEYS
from tightlip.training.mitigations.none import NoMitigation
from tightlip.training.plan import Plan
from tightlip.training.starting import starting_model
from training.small_corpora import hand_set_clock, prepared

SMALL = {"embedding_size": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 8, "num_heads": 2}
SMALL |= {"sequence_length": 10, "learning_rate": 0.01}


def small(**settings):
    return TrainConfig.of(**{**SMALL, **settings})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus") / "prepared")


@pytest.fixture(scope="module")
def corpus_without_validation(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus") / "prepared", split="none")


def weights(folder):
    return load_file(folder / "model.safetensors")


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def weights_by_hand(corpus, config):
    """Oracle: Adam as its paper writes it, over rows scored one at a time."""
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    torch.manual_seed(config.seed)
    model = starting_model(config, tokenizer).double()
    rows = rows_of(corpus.train, sequence_length=config.sequence_length, bos=tokenizer.bos_token_id)
    parameters = list(model.parameters())
    mean = [torch.zeros_like(p) for p in parameters]
    square = [torch.zeros_like(p) for p in parameters]
    step = 0
    for epoch in range(int(config.epochs)):
        order = epoch_order(rows, batch_size=config.batch_size, seed=config.seed, epoch=epoch)
        for chosen in order:
            step += 1
            model.zero_grad()
            for row in chosen:
                ids = gather(rows, np.array([row])).input_ids_BT
                log_probabilities = model(input_ids=ids[:, :-1]).logits.log_softmax(dim=-1)
                loss = -log_probabilities.gather(2, ids[:, 1:, None]).sum()
                (loss * len(order) / rows.num_targets.sum()).backward()
            for p, m, s in zip(parameters, mean, square, strict=True):
                m.mul_(0.9).add_(0.1 * p.grad)
                s.mul_(0.999).add_(0.001 * p.grad**2)
                move = (m / (1 - 0.9**step)) / ((s / (1 - 0.999**step)).sqrt() + 1e-8)
                p.data -= config.learning_rate * move
    return model.state_dict()


@pytest.mark.parametrize("model", ["lstm", "gru", "transformer"])
def test_training_gives_the_weights_of_a_loop_written_out_by_hand(model, corpus, tmp_path):
    config = small(model=model, epochs=2)
    run = train(corpus, tmp_path / "run", config)
    found, expected = weights(run.model_folder), weights_by_hand(corpus, config)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        # Adam divides by gradients near 0, which magnifies the last bits of a float32.
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-3, atol=2e-4)


def test_the_same_settings_give_the_same_bits_and_another_seed_others(corpus, tmp_path):
    config = small(epochs=2, dropout=0.3, num_layers=2)
    one = weights(train(corpus, tmp_path / "one", config).model_folder)
    torch.rand(3)  # what else the process draws is of no matter
    assert same_bits(one, weights(train(corpus, tmp_path / "two", config).model_folder))
    other = small(epochs=2, dropout=0.3, num_layers=2, seed=1)
    assert not same_bits(one, weights(train(corpus, tmp_path / "three", other).model_folder))


def test_training_leaves_the_random_state_of_the_process_alone(corpus, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(corpus, tmp_path / "run", small(epochs=1, dropout=0.3))
    assert torch.equal(before, torch.get_rng_state())


def test_a_run_leaves_everything_a_later_stage_reads(corpus, tmp_path):
    run = train(corpus, tmp_path / "run", small(epochs=2, first_quarter=True, snapshot_steps=4))
    assert run.finished
    assert run.stop == "epochs"
    assert run.corpus_folder == corpus.folder.resolve()
    assert [s.name for s in run.snapshots] == [
        "epoch-0.25",
        "step-4",
        "epoch-1",
        "step-12",
        "epoch-2",
    ]
    assert same_bits(weights(run.snapshots[-1].folder), weights(run.model_folder))
    assert not same_bits(weights(run.snapshots[0].folder), weights(run.model_folder))
    for snapshot in run.snapshots:
        tokenizer = AutoTokenizer.from_pretrained(snapshot.folder)
        config = AutoModelForCausalLM.from_pretrained(snapshot.folder).config
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (
            tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id,
        )  # fmt: skip
    assert not (tmp_path / "run/checkpoint").exists()
    assert "Training lstm" in (tmp_path / "run/log.txt").read_text()
    assert TrainConfig.of(**run.config["train"]) == small(
        epochs=2, first_quarter=True, snapshot_steps=4
    )


def test_only_the_owner_can_read_what_a_run_leaves(corpus, tmp_path):
    train(corpus, tmp_path / "run", small(epochs=1))
    for path in (tmp_path / "run").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def perplexity_by_hand(model, tokenizer, corpus):
    """Oracle: every document whole, one at a time; rows of 100 tokens cut none of them."""
    total, first, count = 0.0, 0, 0
    for number in range(corpus.num_documents):
        document = corpus.document(number).tolist()
        ids = torch.tensor([[tokenizer.bos_token_id, *document]])
        with torch.no_grad():
            log_probabilities = model(input_ids=ids).logits[0].double().log_softmax(dim=-1)
        for place, token in enumerate(document):
            total -= log_probabilities[place, token].item()
            first += int(log_probabilities[place].argmax() == token)
            count += 1
    return math.exp(total / count), first / count


def test_the_metrics_are_what_scoring_whole_documents_gives(corpus, tmp_path):
    config = small(epochs=2, sequence_length=100, batch_size=1000, dropout=0.0)
    run = train(corpus, tmp_path / "run", config)
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    for snapshot, line in zip(run.snapshots, run.metrics, strict=True):
        model = load_causal_lm(snapshot.folder)
        found = perplexity_by_hand(model, tokenizer, corpus.validation)
        assert found == pytest.approx((line["validation_perplexity"], line["validation_accuracy"]))
    # One batch is the whole corpus: the second epoch's loss is that of the first snapshot.
    model = load_causal_lm(run.snapshots[0].folder)
    before, _ = perplexity_by_hand(model, tokenizer, corpus.train)
    assert run.metrics[1]["train_perplexity"] == pytest.approx(before, rel=1e-5)


def test_training_learns(corpus, tmp_path):
    run = train(corpus, tmp_path / "run", small(epochs=12, learning_rate=0.05))
    perplexities = [line["validation_perplexity"] for line in run.metrics]
    assert perplexities[-1] < 4 < perplexities[0]


def test_metrics_have_one_line_per_epoch_with_the_rates_they_were_made_with(corpus, tmp_path):
    run = train(corpus, tmp_path / "run", small(epochs=2, schedule="linear", snapshot="none"))
    written = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in written]
    assert lines == run.metrics
    per_epoch = lines[0]["step"]
    assert [(line["step"], line["epoch"]) for line in lines] == [(per_epoch, 1), (2 * per_epoch, 2)]
    assert lines[1]["learning_rate"] == pytest.approx(0.01 / (2 * per_epoch))
    assert run.snapshots == []


def test_seconds_count_training_and_not_validation(corpus, tmp_path, monkeypatch):
    clock = hand_set_clock(monkeypatch, seconds_per_step=1)
    plain = Training.measure
    monkeypatch.setattr(Training, "measure", lambda self: (clock.pass_by(1000), plain(self))[1])
    run = train(corpus, tmp_path / "run", small(epochs=2, snapshot_steps=4))
    per_epoch = next(line["step"] for line in run.metrics if line["epoch"] == 1)
    expected = [(line["step"] - 1) % per_epoch + 1 for line in run.metrics]
    assert [line["seconds"] for line in run.metrics] == expected


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "adamax", "sgd"])
def test_every_optimizer_moves_the_weights(optimizer, corpus, tmp_path):
    extra = {"momentum": 0.9} if optimizer == "sgd" else {}
    config = small(optimizer=optimizer, steps=3, gradient_clip=0.5, weight_decay=0.01, **extra)
    run = train(corpus, tmp_path / "run", config)
    assert run.stop == "steps"
    assert run.metrics[-1]["step"] == 3


def test_clipping_bounds_a_step_of_gradient_descent(corpus, tmp_path):
    torch.manual_seed(0)
    start = starting_model(small(), load_tokenizer(corpus.tokenizer_folder)).state_dict()
    config = small(optimizer="sgd", steps=1, gradient_clip=1e-3, learning_rate=1.0)
    found = weights(train(corpus, tmp_path / "run", config).model_folder)
    moved = math.sqrt(sum(float(((found[name] - start[name]) ** 2).sum()) for name in found))
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_training_stops_at_a_target_perplexity(corpus, tmp_path):
    config = small(epochs=50, until_perplexity=6.0, learning_rate=0.05)
    run = train(corpus, tmp_path / "run", config)
    found = [line["validation_perplexity"] for line in run.metrics]
    assert run.stop == "target perplexity"
    assert found[-1] <= 6.0 < min(found[:-1])


def test_training_stops_when_validation_no_longer_improves(corpus, tmp_path):
    config = small(epochs=200, early_stop=2, learning_rate=0.3)
    run = train(corpus, tmp_path / "run", config)
    found = [line["validation_perplexity"] for line in run.metrics]
    assert run.stop == "early stop"
    assert found.index(min(found)) == len(found) - 3


@pytest.mark.parametrize("setting", [{"early_stop": 2}, {"until_perplexity": 5.0}])
def test_stopping_by_validation_needs_text_held_out(setting, corpus_without_validation, tmp_path):
    with pytest.raises(UsageError, match="holds nothing out"):
        train(corpus_without_validation, tmp_path / "run", small(**setting))
    assert not (tmp_path / "run").exists()


def test_without_validation_text_its_metrics_are_null(corpus_without_validation, tmp_path):
    run = train(corpus_without_validation, tmp_path / "run", small(epochs=1))
    assert run.metrics[0]["validation_perplexity"] is None
    assert run.metrics[0]["train_perplexity"] > 1


def test_users_left_out_are_not_trained_on_and_not_named(corpus, tmp_path):
    everyone = frozenset(range(corpus.train.num_users))
    with pytest.raises(UsageError, match="6 users are left out"):
        train(corpus, tmp_path / "run", small(epochs=1), without_users=everyone)
    run = train(corpus, tmp_path / "run", small(epochs=1), without_users=frozenset({1, 2}))
    kept = ~np.isin(corpus.train.users, [1, 2])
    targets = int(np.diff(corpus.train.bounds)[kept].sum())
    assert f"{targets:,} targets" in (tmp_path / "run/log.txt").read_text()
    assert run.config["corpus"]["num_users_left_out"] == 2
    with pytest.raises(UsageError, match=r"rows_fingerprint"):
        train(corpus, tmp_path / "run", small(epochs=1), without_users=frozenset({1, 3}))


def test_a_finished_run_is_returned_untouched_and_other_settings_are_refused(corpus, tmp_path):
    run = train(corpus, tmp_path / "run", small(epochs=1))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert train(corpus, tmp_path / "run", small(epochs=1)) == run == open_run(tmp_path / "run")
    assert before == {path: path.stat().st_mtime_ns for path in files}
    with pytest.raises(UsageError, match=r"other settings \(epochs, hidden_size\)"):
        train(corpus, tmp_path / "run", small(epochs=2, hidden_size=4))


def test_another_corpus_is_refused(corpus, tmp_path):
    train(corpus, tmp_path / "run", small(epochs=1))
    other = prepared(tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match="corpus_fingerprint"):
        train(other, tmp_path / "run", small(epochs=1))


def test_a_run_that_diverges_says_where_and_keeps_its_last_good_snapshot(
    corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(Plan, "learning_rate", lambda self, step: 1e38 if step >= 12 else 0.01)
    with pytest.raises(UsageError, match=r"step 1\d.*diverged.*gradient_clip=1\.0.*epoch-1"):
        train(corpus, tmp_path / "run", small(epochs=3, optimizer="sgd"))
    run = open_run(tmp_path / "run")
    assert not run.finished
    assert [snapshot.name for snapshot in run.snapshots] == ["epoch-1"]
    assert all(t.isfinite().all() for t in weights(run.snapshots[0].folder).values())


def test_training_goes_on_from_a_model_folder(corpus, tmp_path):
    first = train(corpus, tmp_path / "first", small(epochs=4, learning_rate=0.05))
    config = TrainConfig.of(
        model=str(first.model_folder), epochs=1, sequence_length=10, batch_size=8
    )
    second = train(corpus, tmp_path / "second", config)
    start = first.metrics[-1]["validation_perplexity"]
    assert second.metrics[0]["validation_perplexity"] == pytest.approx(start, rel=0.2)


def test_a_model_that_reads_other_tokens_than_the_corpus_is_refused(corpus, tmp_path):
    first = train(corpus, tmp_path / "first", small(epochs=1))
    other = prepared(tmp_path / "other", longest=2, num_documents=12, split="none")
    with pytest.raises(UsageError, match="prepared with another tokenizer"):
        train(other, tmp_path / "second", TrainConfig.of(model=str(first.model_folder)))


def test_rows_longer_than_a_model_has_positions_are_refused(corpus, tmp_path):
    first = train(corpus, tmp_path / "first", small(model="transformer", epochs=1))
    config = TrainConfig.of(model=str(first.model_folder), sequence_length=11)
    with pytest.raises(UsageError, match=r"sequence_length=11 is more than the 10 positions"):
        train(corpus, tmp_path / "second", config)


def test_tied_weights_are_saved_once_and_stay_tied(corpus, tmp_path):
    run = train(corpus, tmp_path / "run", small(epochs=1, tie_word_embeddings=True))
    model = load_causal_lm(run.model_folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_gpu_that_is_not_there_is_a_usage_error(corpus, tmp_path):
    with pytest.raises(UsageError, match="Unknown device 'quantum'"):
        train(corpus, tmp_path / "run", small(), RunOptions(device="quantum"))


def test_bfloat16_on_a_cpu_is_refused_because_an_lstm_crashes_on_some(corpus, tmp_path):
    with pytest.raises(UsageError, match="bf16=True is for GPUs"):
        train(corpus, tmp_path / "run", small(), RunOptions(device="cpu", bf16=True))


def test_plain_training_promises_nothing_under_every_key_of_the_ledger(corpus, tmp_path):
    run = train(corpus, tmp_path / "run", small(steps=3))
    assert run.guarantee == NoMitigation().guarantee(3) | {"finished": True}
    assert set(run.guarantee) == {*LEDGER_KEYS, "finished"}
    assert run.guarantee["standing"] == "measured only"
    assert run.guarantee["epsilon"] is None
    assert "none" in names_of("mitigation")


def test_the_log_leaves_the_level_of_the_logger_as_it_was(corpus, tmp_path):
    logger = logging.getLogger("tightlip")
    level, handlers = logger.level, list(logger.handlers)
    train(corpus, tmp_path / "run", small(steps=1))
    assert logger.level == level
    assert logger.handlers == handlers
