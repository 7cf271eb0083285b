"""Validation under DP that may be told: on public text, or with noise that is charged."""

import itertools
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tightlip
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.privacy.accounting import Mechanism, epsilon_spent
from tightlip.training.batches import rows_of
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.loop import Training
from tightlip.training.loop import train_model as train
from tightlip.training.losses import Forward, losses_by_unit
from training.small_corpora import documents, other_peoples_documents

pytestmark = pytest.mark.slow

SMALL = {
    "embedding_size": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 8, "sequence_length": 10,
    "mitigation": "dp", "noise_multiplier": 1.0, "epochs": 3.0, "snapshot": "none",
}  # fmt: skip


def private(**settings):
    return TrainConfig.of(**{**SMALL, **settings})


def people(num_users=40):
    return documents(num_documents=5 * num_users, num_users=num_users)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("public") / "p"
    return str(prepare(other_peoples_documents(), folder, PrepareConfig()).tokenizer_folder)


@pytest.fixture(scope="module")
def public_file(tmp_path_factory):
    """Texts of others, without users."""
    path = tmp_path_factory.mktemp("public") / "public.parquet"
    rows = [{"text": row["text"]} for row in other_peoples_documents(seed=5)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def beside_public(tmp_path_factory, tokenizer, public_file):
    config = PrepareConfig(tokenizer=tokenizer, public_validation=str(public_file))
    return prepare(people(), tmp_path_factory.mktemp("corpus") / "c", config)


@pytest.fixture(scope="module")
def split(tmp_path_factory, tokenizer):
    config = PrepareConfig(tokenizer=tokenizer, split="text")
    return prepare(people(), tmp_path_factory.mktemp("corpus") / "c", config)


# Public text


def test_a_private_run_may_stop_by_public_text_and_tells_of_it(
    beside_public, public_file, tmp_path
):
    run = train(beside_public, tmp_path / "run", private(until_perplexity=1e6))
    assert run.stop == "target perplexity"
    assert run.guarantee["standing"] == "proved"
    words = f"the validation text {public_file}, which you declared public"
    assert words in run.guarantee["outside"]
    # Of all planned steps, though training ended after the first epoch.
    mechanism = Mechanism(noise_multiplier=1.0, sampling_rate=8 / 40)
    assert run.metrics[-1]["step"] == 5
    assert run.guarantee["epsilon"] == pytest.approx(epsilon_spent(mechanism, 15, 1e-5))
    (line,) = run.metrics
    assert f"validation {line['validation_perplexity']:.1f}" in (run.folder / "log.txt").read_text()
    told = {"validation_loss_nats", "validation_perplexity", "validation_accuracy"}
    assert all(line[name] is not None for name in {*told, "validation_perplexity_at_start"})
    # The frequencies are those of the private text.
    assert line["validation_perplexity_by_frequency"] is None
    assert all(line[name] is None for name in ("train_loss_nats", "train_perplexity", "seconds"))


def test_public_perplexity_is_that_of_the_released_weights(beside_public, public_file, tmp_path):
    run = train(beside_public, tmp_path / "run", private(steps=2, epochs=None, early_stop=1))
    model, tokenizer = load_causal_lm(run.model_folder), load_tokenizer(run.model_folder)
    nats = num = 0
    for text in pq.read_table(public_file)["text"].to_pylist():
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0].tolist()
        for start in range(
            0, len(ids), 10
        ):  # rows of the run's length, the token before as context
            context = [tokenizer.bos_token_id] if start == 0 else [ids[start - 1]]
            row = torch.tensor([[*context, *ids[start : start + 10]]])
            with torch.no_grad():
                log_p = model(input_ids=row[:, :-1]).logits.log_softmax(-1)
            nats -= float(log_p[0].gather(1, row[0, 1:, None]).double().sum())
            num += row.shape[1] - 1
    perplexity = run.metrics[-1]["validation_perplexity"]
    assert perplexity == pytest.approx(math.exp(nats / num), rel=1e-4)


def test_text_that_is_not_public_is_refused_as_such(split, tokenizer, tmp_path):
    mine = tmp_path / "mine.parquet"
    pq.write_table(pa.Table.from_pylist(people()[:100]), mine)
    of_the_same_people = split.folder / "validation.parquet"
    for path in (mine, of_the_same_people):
        config = PrepareConfig(tokenizer=tokenizer, public_validation=str(path))
        with pytest.raises(UsageError, match="is not public"):
            prepare(people(), tmp_path / "c", config)
        assert not (tmp_path / "c").exists()


def test_the_same_file_in_another_place_is_the_same_public_text(
    beside_public, public_file, tmp_path
):
    moved = tmp_path / public_file.name
    moved.write_bytes(public_file.read_bytes())
    settings = private(steps=1, epochs=None).tree()
    given = {"public_validation": str(moved)}
    run = tightlip.train(beside_public.folder, tmp_path / "run", prepare=given, **settings)
    assert run.metrics[-1]["validation_perplexity"] is not None
    with pytest.raises(UsageError, match="prepared with other settings, so validation"):
        tightlip.train(
            beside_public.folder,
            tmp_path / "other",
            prepare={"validation": str(split_file(tmp_path))},
            **settings,
        )


def split_file(folder):
    path = folder / "some.parquet"
    pq.write_table(pa.Table.from_pylist(other_peoples_documents(seed=7)), path)
    return path


def test_held_out_text_of_two_kinds_is_refused():
    with pytest.raises(UsageError, match="are both held-out text"):
        PrepareConfig(validation="a", public_validation="b")


# With noise


def test_the_loss_of_a_unit_is_that_of_its_own_rows_whoever_else_is_there(split):
    tokenizer = load_tokenizer(split.tokenizer_folder)
    rows = rows_of(split.validation, sequence_length=10, bos=tokenizer.bos_token_id, pad=0)
    torch.manual_seed(0)
    model = tightlip_model(len(tokenizer))
    seen = losses_by_unit(Forward(model), rows, rows.users)
    users, few = np.unique(rows.users), np.unique(rows.users)[::3]
    assert len(seen) == len(users)
    only = rows.only(np.isin(rows.users, few))
    assert (losses_by_unit(Forward(model), only, only.users) == seen[::3]).all()
    for user, loss in zip(users[:5], seen[:5], strict=True):
        assert loss == pytest.approx(loss_by_hand(model, rows, user), rel=1e-5)


def tightlip_model(vocabulary):
    from tightlip.models.configurations import LSTMConfig
    from tightlip.models.recurrent import LSTMForCausalLM

    shape = LSTMConfig(vocab_size=vocabulary, embedding_size=8, hidden_size=8, num_layers=1)
    return LSTMForCausalLM(shape).eval()


def loss_by_hand(model, rows, user):
    """One row after the other, token by token."""
    nats = num = 0
    for row in np.flatnonzero(rows.users == user):
        ids = [rows.bos] if rows.begins[row] else []
        start = rows.starts[row]
        ids += rows.tokens[start : start + rows.lengths[row]].tolist()
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([ids[:-1]])).logits.log_softmax(-1)[0]
        for place, target in enumerate(ids[1:]):
            nats -= float(log_p[place, target])
            num += 1
    return nats / num


@pytest.fixture(scope="module")
def told(split, tmp_path_factory):
    config = private(noisy_validation=5.0, early_stop=1, until_perplexity=1.01)
    return train(split, tmp_path_factory.mktemp("told") / "run", config)


def test_a_noisy_loss_is_told_charged_and_gone_by(told):
    (release,) = told.guarantee["releases"]
    assert release["noise_multiplier"] == pytest.approx(5 / math.sqrt(3 + 1))
    assert told.guarantee["standing"] == "proved"
    mechanism = Mechanism.of_record(told.guarantee)
    assert mechanism.noise_multiplier == 1.0
    assert told.guarantee["epsilon"] == pytest.approx(epsilon_spent(mechanism, 15, 1e-5))
    without = Mechanism(noise_multiplier=1.0, sampling_rate=8 / 40)
    assert told.guarantee["epsilon"] > epsilon_spent(without, 15, 1e-5)

    figures = [line["noisy_validation_perplexity"] for line in told.metrics]
    losses = [nats for _, nats in told.guarantee["noisy_validation"]["losses"]]
    assert figures == pytest.approx([math.exp(nats) for nats in losses])
    assert all(line["validation_perplexity"] is None for line in told.metrics)
    # It stopped at the first figure that was no better, which only the noisy ones tell.
    worse = [after >= before for before, after in itertools.pairwise(figures)]
    assert worse == [False] * (len(worse) - 1) + [told.stop == "early stop"]


def test_noise_that_drowns_so_few_users_is_warned_of_before_the_first_step(split, tmp_path, caplog):
    """By the docs' formula, over forty users; none where Z is what the warning advises."""
    vocabulary = len(load_tokenizer(split.tokenizer_folder))
    config = private(noisy_validation=5.0, steps=1, epochs=None)
    train(split, tmp_path / "loud", config)
    error = 5.0 * math.log(vocabulary) / 2 / 40
    words = f"of about 40 users with an error of about {error:.2g} nats"
    lines = [record.message for record in caplog.records]
    (warned,) = [place for place, line in enumerate(lines) if words in line]
    assert not any(line.startswith("Done") for line in lines[:warned])
    advised = float(lines[warned].split("--noisy-validation ")[1].split(",")[0])
    assert advised == pytest.approx(0.1 * 40 * 2 / math.log(vocabulary), rel=0.05)
    caplog.clear()
    train(split, tmp_path / "low", private(noisy_validation=0.95 * advised, steps=1, epochs=None))
    assert "with an error of about" not in caplog.text


def test_the_last_line_names_the_file_that_may_be_told(told, beside_public, tmp_path):
    run = train(beside_public, tmp_path / "run", private(steps=1, epochs=None))
    where = run.where_learning_shows
    assert f"{run.folder / 'metrics.jsonl'}, which may be told" in where
    assert f"(by frequency: in {run.folder / 'private.jsonl'}, which is private)" in where
    told_in = f"noisy_validation_perplexity in {told.folder / 'metrics.jsonl'} may be told."
    assert told.where_learning_shows.startswith(told_in)
    assert (
        f"stands in {told.folder / 'private.jsonl'}, which is private" in told.where_learning_shows
    )


def test_noise_for_a_target_leaves_room_for_what_is_told(split, tmp_path):
    settings = {"noise_multiplier": None, "epsilon": 8.0, "steps": 4, "epochs": None}
    runs = [
        train(split, tmp_path / str(noise), private(**settings, noisy_validation=noise))
        for noise in (None, 2.0)
    ]
    plain, telling = (run.guarantee for run in runs)
    assert telling["noise_multiplier"] > plain["noise_multiplier"]
    assert 7.5 < telling["epsilon"] <= 8.0


def interrupted(split, out, config, name, cut):
    """Train with a method of the loop replaced by one that ends it, and no checkpoint but its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, name, cut)
        with pytest.raises(KeyboardInterrupt):
            train(split, out, config, RunOptions(checkpoint_seconds=1e6))


def test_a_run_killed_after_it_told_something_tells_the_same_again(split, tmp_path):
    """Killed between the release and the record of it, then between that and the next checkpoint."""
    config, step = private(noisy_validation=5.0, epochs=2.0), Training.take_step

    def at_once(self, line):
        raise KeyboardInterrupt

    interrupted(split, tmp_path / "run", config, "reason_to_stop", at_once)
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    ((steps, first),) = ledger["noisy_validation"]["losses"]
    assert steps == ledger["steps"] == 5

    def after_seven(self):
        if self.progress.step == 7:
            raise KeyboardInterrupt
        step(self)

    interrupted(split, tmp_path / "run", config, "take_step", after_seven)
    run = train(split, tmp_path / "run", config, RunOptions(checkpoint_seconds=1e6))
    assert run.guarantee["steps"] == 12  # seven, and the last five from the fifth on
    told = run.guarantee["noisy_validation"]["losses"]
    assert [steps for steps, _ in told] == [5, 12]
    assert run.metrics[0]["noisy_validation_perplexity"] == math.exp(first)
    assert run.metrics[1]["noisy_validation_perplexity"] == math.exp(told[1][1])


def test_noise_is_refused_where_nobody_of_the_corpus_holds_out_anything(
    beside_public, split, tmp_path
):
    with pytest.raises(UsageError, match="split='none' holds out nothing of the kind"):
        train(beside_public, tmp_path / "run", private(noisy_validation=5.0))
    with pytest.raises(UsageError, match="noisy_validation_bound=3 is about noisy validation"):
        private(noisy_validation_bound=3.0)
    with pytest.raises(GuaranteeError, match="public_validation=FILE"):
        train(split, tmp_path / "run", private(early_stop=1))
