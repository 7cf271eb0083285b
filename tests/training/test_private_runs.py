"""Private runs from the outside: what is refused, what is written, what a resumption spends."""

import json
import math
import shutil
import stat
from collections import Counter

import numpy as np
import pytest
import torch

import tightlip
from killable import train_and_kill
from tightlip.core.checksums import LIST
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.run_folder import open_run, write_ledger
from tightlip.corpus.prepare import open_prepared
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.privacy.accounting import Mechanism, epsilon_spent
from tightlip.privacy.ledger import read_ledger
from tightlip.training.batches import TokenRows, rows_of
from tightlip.training.config import RunOptions, TrainConfig
from tightlip.training.loop import Training
from tightlip.training.loop import train_model as train
from tightlip.training.mitigations import LEDGER_KEYS
from tightlip.training.mitigations.dp import PrivateMitigation, noise_to_signal
from training.small_corpora import documents, other_peoples_documents

pytestmark = pytest.mark.slow

SMALL = {
    "embedding_size": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 8, "num_heads": 2,
    "sequence_length": 10, "mitigation": "dp", "epsilon": 8.0, "insecure_seed": 1,
}  # fmt: skip


def private(**settings):
    return TrainConfig.of(**{**SMALL, **settings})


@pytest.fixture(scope="module")
def public_tokenizer(tmp_path_factory):
    """A tokenizer learnt from other people's text."""
    made = prepare(
        other_peoples_documents(), tmp_path_factory.mktemp("public") / "p", PrepareConfig()
    )
    return made.tokenizer_folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, public_tokenizer):
    config = PrepareConfig(tokenizer=str(public_tokenizer))
    rows = documents(num_documents=200, num_users=40)
    return prepare(rows, tmp_path_factory.mktemp("corpus") / "prepared", config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, public_tokenizer):
    """The same with nothing held out, as a document's privacy asks for."""
    config = PrepareConfig(tokenizer=str(public_tokenizer), split="none")
    rows = documents(num_documents=200, num_users=40)
    return prepare(rows, tmp_path_factory.mktemp("whole") / "prepared", config)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    config = private(steps=12, insecure_seed=None, snapshot_steps=5)
    return train(corpus, tmp_path_factory.mktemp("run") / "run", config)


def test_a_private_run_ends_within_its_target_and_says_so_everywhere(run):
    record = run.guarantee
    assert {*LEDGER_KEYS} <= {*record}
    mechanism = Mechanism(
        noise_multiplier=record["noise_multiplier"], sampling_rate=record["sampling_rate"]
    )
    assert record["epsilon"] == pytest.approx(epsilon_spent(mechanism, 12, record["delta"]))
    assert 7.5 < record["epsilon"] <= 8.0 < record["epsilon_rdp"]
    assert record["steps"] == 12
    assert record["standing"] == "proved"
    assert record["unit"] == "user"
    assert record["num_units"] == 40
    assert record["sampling_rate"] == 8 / 40
    assert record["delta"] == 1e-5
    assert "ε = " in (run.model_folder / "README.md").read_text()
    assert json.loads((run.model_folder / "guarantee.json").read_text())["steps"] == 12


def test_a_snapshot_carries_the_epsilon_of_the_whole_plan(run):
    """Who takes the snapshot and not the end has looked at both."""
    (early,) = [each for each in run.snapshots if each.name == "epoch-1"]
    said = json.loads((early.folder / "guarantee.json").read_text())
    assert (said["steps"], said["planned_steps"]) == (5, 12)
    assert said["epsilon"] == run.guarantee["epsilon"]
    assert "epsilon_so_far" not in said


def test_losses_of_a_private_run_are_in_an_owner_only_file_and_nowhere_else(run):
    lines = [json.loads(line) for line in (run.folder / "private.jsonl").read_text().splitlines()]
    assert all(line["private"] and line["train_loss_nats"] > 0 for line in lines)
    assert stat.S_IMODE((run.folder / "private.jsonl").stat().st_mode) == 0o600
    assert all(line["train_loss_nats"] is None for line in run.metrics)
    assert all(line["validation_perplexity"] is None for line in run.metrics)
    private_figure = f"{lines[-1]['train_perplexity']:.1f}"
    assert private_figure not in (run.folder / "log.txt").read_text()
    assert private_figure not in (run.folder / "ledger.json").read_text()


def private_lines(run):
    return [json.loads(line) for line in (run.folder / "private.jsonl").read_text().splitlines()]


def test_the_private_file_says_what_had_to_be_beaten(corpus, tmp_path):
    run = train(corpus, tmp_path / "run", private(steps=2, learning_rate=1e-12))
    (*_, last) = private_lines(run)
    # Steps of no length leave the model that training started from.
    assert last["validation_perplexity"] == pytest.approx(last["validation_perplexity_at_start"])

    ids = [each.tokens.tolist() for each in (corpus.train, corpus.validation)]
    counts, vocabulary = Counter(ids[0]), len(load_tokenizer(corpus.tokenizer_folder))
    shares = [(counts[each] + 1) / (len(ids[0]) + vocabulary) for each in ids[1]]
    by_frequency = math.exp(-sum(map(math.log, shares)) / len(shares))
    assert last["validation_perplexity_by_frequency"] == pytest.approx(by_frequency)
    assert run.metrics[-1]["validation_perplexity_at_start"] is None
    assert str(run.folder / "private.jsonl") in run.where_learning_shows


def test_a_resumed_run_remembers_where_it_started(corpus, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(3, corpus, tmp_path / "run", private(steps=6))
    runs = [train(corpus, tmp_path / name, private(steps=6)) for name in ("run", "at once")]
    starts = [private_lines(run)[-1]["validation_perplexity_at_start"] for run in runs]
    assert starts[0] == starts[1]


def test_without_held_out_text_nothing_is_said_to_tell(whole, tmp_path):
    run = train(whole, tmp_path / "run", private(steps=1, unit="example"))
    assert "without held-out text" in run.where_learning_shows
    assert "validation_perplexity_at_start" not in private_lines(run)[-1]


@pytest.mark.parametrize(("noise", "learns"), [(0.5, True), (40.0, False)])
def test_a_warning_comes_before_a_run_that_cannot_learn(noise, learns, corpus, tmp_path, caplog):
    config = private(
        epsilon=None,
        noise_multiplier=noise,
        steps=60,
        learning_rate=0.03,
        batch_size=20,
        model="gru",
        snapshot="none",
    )
    run = train(corpus, tmp_path / "run", config)
    assert ("too few for this much noise" in caplog.text) is not learns
    last = private_lines(run)[-1]
    to_beat = last["validation_perplexity_by_frequency"]
    assert (last["validation_perplexity"] < to_beat) is learns


def test_noise_is_weighed_against_users_who_all_agree():
    """Oracle: add up the steps' noise, and the steps of units that all pull one way."""
    noise_multiplier, batch, num_weights, steps = 0.8, 16, 4_000, 50
    draw = np.random.default_rng(0)
    noise = draw.normal(0, noise_multiplier / batch, (steps, num_weights)).sum(0)
    one_way = np.zeros(num_weights)
    one_way[0] = steps
    ratio = np.linalg.norm(noise) / np.linalg.norm(one_way)
    # The norm of so many draws is within a part in a hundred of its mean.
    assert noise_to_signal(noise_multiplier, batch, num_weights, steps) == pytest.approx(
        ratio, rel=0.05
    )


def test_no_randomness_and_no_member_of_a_batch_is_on_disk(corpus, tmp_path):
    cut = private(steps=6, insecure_seed=None)
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(3, corpus, tmp_path / "run", cut)
    names = {path.name for path in (tmp_path / "run" / "checkpoint").rglob("*") if path.is_file()}
    assert names == {"tensors.safetensors", "state.json", LIST}
    state = json.loads(next((tmp_path / "run").rglob("state.json")).read_text())
    assert not any("random" in name or "generator" in name or "batch" in name for name in state)


def interrupted_after(steps, corpus, out, config):
    """A run that stops for good after `steps` steps, its last checkpoint just before."""
    plain = Training.take_step

    def cut(self):
        if self.progress.step == steps:
            self.save()
            raise KeyboardInterrupt
        plain(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "take_step", cut)
        train(corpus, out, config, RunOptions(checkpoint_seconds=1e6))


@pytest.mark.parametrize("noise", [{}, {"epsilon": None, "noise_multiplier": 0.0}])
def test_a_resumed_run_goes_on_and_counts_every_step_once(corpus, tmp_path, noise):
    config = private(steps=6, **noise)
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(3, corpus, tmp_path / "run", config)
    assert open_run(tmp_path / "run").guarantee["steps"] == 3
    run = train(corpus, tmp_path / "run", config)
    assert run.guarantee["steps"] == 6
    assert run.stop == "steps"


def test_steps_that_are_repeated_are_charged_again_and_the_budget_still_holds(corpus, tmp_path):
    config = private(steps=6)
    plain = Training.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Training, "save", lambda self: plain(self) if self.progress.step < 2 else None
        )
        with pytest.raises(KeyboardInterrupt):
            interrupted_after(4, corpus, tmp_path / "run", config)
    run = train(corpus, tmp_path / "run", config)
    # Four steps were charged and lost, so only two more fit; then the budget ends the run.
    assert run.guarantee["steps"] == 6
    assert run.guarantee["epsilon"] <= 8.0
    assert run.stop == "privacy budget"
    assert run.metrics[-1]["step"] == 2


def test_a_checkpoint_without_its_ledger_is_refused(corpus, tmp_path):
    config = private(steps=6)
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(3, corpus, tmp_path / "run", config)
    (tmp_path / "run" / "ledger.json").unlink()
    with pytest.raises(GuaranteeError, match=r"ledger.json is missing"):
        train(corpus, tmp_path / "run", config)


def test_a_unit_is_padded_with_nobody_elses_words(corpus):
    rows = rows_of(corpus.train, sequence_length=10, bos=2, pad=0)
    ids, targets = TokenRows(rows, rows.users).gather(np.array([3, -1, -1]), 10)
    assert (ids[1:] == rows.pad).all()
    assert (targets[1:] == -100).all()
    assert (targets[0] >= 0).sum() == rows.num_targets[3]


def test_nobodys_length_widens_a_pass_that_is_not_full(corpus):
    """Row 0 once stood for padding, and a pass with an empty place was as wide as it was long."""
    rows = rows_of(corpus.train, sequence_length=10, bos=2, pad=0)
    longest_first = rows.only(np.argsort(-rows.num_inputs, kind="stable"))
    short = len(rows) - 1
    width = int(longest_first.num_inputs[short])
    assert width < longest_first.num_inputs[0]
    for places in ([short, short], [short, -1], [-1, -1]):
        source = TokenRows(longest_first, longest_first.users)
        ids, targets = source.gather(np.array(places), width)
        assert ids.shape == targets.shape == (2, width)


def test_private_losses_neither_end_a_run_nor_reach_its_log(corpus, tmp_path, monkeypatch):
    huge = torch.tensor(1e6)
    plain = PrivateMitigation.step
    monkeypatch.setattr(
        PrivateMitigation, "step", lambda self, number: (huge, plain(self, number)[1])
    )
    run = train(corpus, tmp_path / "run", private(steps=6))
    assert run.stop == "steps"
    assert "e+06" not in (run.folder / "log.txt").read_text()


def test_a_ledger_that_is_behind_its_checkpoint_is_refused(corpus, tmp_path):
    config = private(steps=6)
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(3, corpus, tmp_path / "run", config)
    write_ledger(tmp_path / "run", read_ledger(tmp_path / "run/ledger.json") | {"steps": 2})
    with pytest.raises(GuaranteeError, match="2 steps on record and the checkpoint holds 3"):
        train(corpus, tmp_path / "run", config)


@pytest.mark.parametrize(("unit", "split"), [("example", "document"), ("user", "user")])
def test_a_share_held_out_by_number_breaks_the_proof(unit, split, public_tokenizer, tmp_path):
    made = prepare(
        documents(num_users=40, num_documents=200), tmp_path / "p",
        PrepareConfig(tokenizer=str(public_tokenizer), split=split),
    )  # fmt: skip
    with pytest.raises(GuaranteeError, match="holds out by number"):
        train(made, tmp_path / "run", private(steps=2, unit=unit))


def test_weights_are_known_by_their_card_wherever_they_were_copied(corpus, run, tmp_path):
    shutil.copytree(run.model_folder, tmp_path / "elsewhere")
    config = TrainConfig.of(
        model=str(tmp_path / "elsewhere"), mitigation="dp", epsilon=8.0, steps=2, batch_size=8,
        sequence_length=10,
    )  # fmt: skip
    again = train(corpus, tmp_path / "run", config)
    assert [each["run"] for each in again.guarantee["before"]] == [run.guarantee["run"]]
    assert again.guarantee["people"]["epsilon"] > 8.5


def test_no_hash_of_the_text_is_published(corpus, run):
    for path in (run.folder / "ledger.json", run.model_folder / "guarantee.json"):
        assert corpus.train.corpus_fingerprint not in path.read_text()
        assert corpus.train.tokenizer_fingerprint not in path.read_text()


def test_without_noise_a_run_ends_and_promises_nothing(corpus, tmp_path):
    run = train(corpus, tmp_path / "run", private(steps=2, noise_multiplier=0.0, epsilon=None))
    assert run.guarantee["epsilon"] is None
    assert run.guarantee["standing"] == "measured only"


@pytest.mark.usefixtures("register_of_processes")
def test_killed_ten_times_it_never_counts_less_than_it_spent(command, corpus, tmp_path):
    config = private(noise_multiplier=1.0, epsilon=None, steps=40)
    applied = 0
    for applied in train_and_kill(command, corpus, tmp_path, config, num_kills=10):
        assert open_run(tmp_path / "run").guarantee["steps"] >= applied
    run = train(open_prepared(corpus.folder), tmp_path / "run", config)
    assert run.finished
    assert run.guarantee["steps"] >= 40
    mechanism = Mechanism(noise_multiplier=1.0, sampling_rate=8 / 40)
    spent = epsilon_spent(mechanism, max(applied, 40), run.guarantee["delta"])
    assert run.guarantee["epsilon"] >= spent


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"early_stop": 1, "epochs": 2.0},
            "early_stop stops by looking at private validation text",
        ),
        ({"until_perplexity": 5.0, "epochs": 2.0}, "until_perplexity stops by looking"),
    ],
)
def test_what_breaks_the_proof_is_refused_or_lowers_the_standing(changed, words, corpus, tmp_path):
    config = private(**changed)
    with pytest.raises(GuaranteeError, match=words):
        train(corpus, tmp_path / "run", config)
    assert not (tmp_path / "run").exists()
    run = train(corpus, tmp_path / "run", TrainConfig.of(**config.tree(), allow_unproved=True))
    assert run.guarantee["standing"] == "as published"
    assert words in run.guarantee["because"]


@pytest.mark.parametrize(
    ("prepared_with", "words"),
    [
        ({}, "vocabulary was learnt from this corpus"),
        ({"deduplicate": "sentences"}, "deduplicate='sentences' lets one user's text decide"),
    ],
)
def test_a_corpus_that_breaks_the_proof_is_refused_before_it_is_prepared(
    prepared_with, words, tmp_path
):
    with pytest.raises(GuaranteeError, match=words):
        tightlip.train(
            documents(), tmp_path / "run", prepare=prepared_with, **private(steps=2).tree()
        )
    assert not (tmp_path / "run").exists()


def test_a_noisy_vocabulary_keeps_the_proof_and_is_charged_to_the_same_ledger(tmp_path):
    made = prepare(
        documents(num_users=60), tmp_path / "p", PrepareConfig(vocabulary_noise=2.0, split="none")
    )
    by_user = train(made, tmp_path / "user", private(steps=3, insecure_seed=None))
    assert by_user.guarantee["standing"] == "proved"
    (release,) = by_user.guarantee["releases"]
    assert release["noise_multiplier"] == 2.0
    without = Mechanism(
        noise_multiplier=by_user.guarantee["noise_multiplier"],
        sampling_rate=by_user.guarantee["sampling_rate"],
    )
    assert by_user.guarantee["epsilon"] > epsilon_spent(without, 3, by_user.guarantee["delta"])
    assert by_user.guarantee["epsilon"] <= 8.0
    by_example = train(made, tmp_path / "example", private(steps=3, unit="example"))
    assert by_example.guarantee["releases"][0]["noise_multiplier"] == pytest.approx(2 / 2**0.5)


def test_weights_that_saw_this_corpus_without_privacy_are_no_public_start(corpus, tmp_path):
    shape = {name: SMALL[name] for name in SMALL if name not in ("mitigation", "epsilon")}
    shape.pop("insecure_seed")
    plain = train(corpus, tmp_path / "plain", TrainConfig.of(**shape, steps=2))
    config = TrainConfig.of(
        model=str(plain.model_folder), mitigation="dp", epsilon=8.0, steps=2, batch_size=8,
        sequence_length=10,
    )  # fmt: skip
    with pytest.raises(GuaranteeError, match="was trained without privacy on this very corpus"):
        train(corpus, tmp_path / "run", config)


def test_a_known_seed_is_marked_and_never_proved(corpus, tmp_path):
    run = train(corpus, tmp_path / "run", private(steps=2))
    assert run.guarantee["insecure_seed"] is True
    assert run.guarantee["standing"] == "as published"
    assert "known seed" in run.guarantee["because"]
    assert "hides nothing" in (run.model_folder / "README.md").read_text()


def test_the_same_insecure_seed_gives_the_same_weights_and_none_gives_others(corpus, tmp_path):
    def weights(name, **settings):
        model = load_causal_lm(
            train(corpus, tmp_path / name, private(steps=3, **settings)).model_folder
        )
        return torch.cat([each.flatten() for each in model.parameters()])

    assert torch.equal(weights("a"), weights("b"))
    assert not torch.equal(weights("c", insecure_seed=None), weights("d", insecure_seed=None))


@pytest.mark.parametrize("model", ["lstm", "gru", "transformer"])
@pytest.mark.parametrize("unit", ["user", "example"])
def test_every_built_in_model_trains_privately_under_both_units(model, unit, whole, tmp_path):
    run = train(whole, tmp_path / "run", private(model=model, unit=unit, steps=2))
    assert run.guarantee["unit"] == unit
    num_documents = len(whole.train.bounds) - 1
    assert run.guarantee["num_units"] == (40 if unit == "user" else num_documents)


def test_private_adapters_change_nothing_but_themselves(corpus, tmp_path):
    public = train(
        corpus, tmp_path / "public", TrainConfig.of(
            model="transformer", hidden_size=8, num_heads=2, num_layers=1, steps=1, sequence_length=10
        ),
    )  # fmt: skip
    elsewhere = tmp_path / "elsewhere"
    public.model_folder.rename(elsewhere)  # a moved model still tells what it was trained on
    config = TrainConfig.of(
        model=str(elsewhere), mitigation="dp", epsilon=8.0, lora=2, steps=3, batch_size=8,
        sequence_length=10, insecure_seed=1, allow_unproved=True,
    )  # fmt: skip
    run = train(corpus, tmp_path / "run", config, RunOptions(merge=True))
    before, after = load_causal_lm(elsewhere), load_causal_lm(run.folder / "merged")
    assert torch.equal(before.model.embed_tokens.weight, after.model.embed_tokens.weight)
    changed = before.model.blocks[0].widen.weight - after.model.blocks[0].widen.weight
    assert torch.linalg.matrix_rank(changed, rtol=1e-4) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta": 0.5}, r"delta=0.5 is looser than 1/num_users \(1/40\)"),
        ({"batch_size": 64}, "cannot be drawn from 40 units"),
        (
            {"noise_multiplier": 0.3, "epsilon": 0.1},
            "spends more than epsilon=0.1 in its first step",
        ),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused_and_leaves_nothing_behind(
    settings, words, corpus, tmp_path
):
    with pytest.raises(UsageError, match=words):
        train(corpus, tmp_path / "run", private(steps=4, **settings))
    assert not (tmp_path / "run" / "config.toml").exists()
    assert train(corpus, tmp_path / "run", private(steps=1)).finished


def test_a_loose_delta_needs_its_flag(corpus, tmp_path):
    config = private(steps=1, delta=0.5, allow_loose_delta=True, epsilon=None, noise_multiplier=1.0)
    run = train(corpus, tmp_path / "run", config)
    assert run.guarantee["delta"] == 0.5


def test_with_noise_and_target_training_stops_before_the_target(corpus, tmp_path):
    config = private(steps=400, noise_multiplier=2.0, epsilon=2.0)
    run = train(corpus, tmp_path / "run", config)
    assert run.stop == "privacy budget"
    assert run.guarantee["epsilon"] <= 2.0
    mechanism = Mechanism(noise_multiplier=2.0, sampling_rate=8 / 40)
    assert epsilon_spent(mechanism, run.guarantee["steps"] + 1, run.guarantee["delta"]) > 2.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mitigation": "none", "epsilon": 8.0}, "epsilon=8.0 means nothing to mitigation='none'"),
        ({"epsilon": None}, "needs a target: give epsilon"),
        ({"gradient_clip": 1.0}, "clips each user's gradient by clip_norm"),
        ({"unit": "family"}, "Unknown unit 'family'"),
        ({"dropout": 0.1}, "Private training goes without dropout"),
        ({"epsilon": 0.0}, "epsilon=0 is out of range"),
        ({"adam_correction": 1.0, "optimizer": "sgd"}, "adam_correction=1 is about .*'sgd'"),
        ({"adam_correction": 1.0, "optimizer": "adamax"}, "adam_correction=1 is about"),
        ({"adam_correction": 0.0}, "adam_correction=0 is out of range"),
        ({"average_weights": 1.0}, "average_weights=1 is out of range"),
        (
            {"mitigation": "none", "epsilon": None, "adam_correction": 1.0},
            "Add mitigation='(adaptive-)?dp'",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    fitting = {"insecure_seed": None, **settings}
    with pytest.raises(UsageError, match=words):
        private(**fitting)


@pytest.mark.parametrize("unit", ["user", "example"])
def test_held_out_text_of_its_own_keeps_the_proof_for_both_units(unit, public_tokenizer, tmp_path):
    rows = documents(num_documents=200, num_users=40)
    # The same people's text, which is the harder case: it must shape nothing all the same.
    held = documents(num_documents=20, num_users=40, seed=3)
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, held)))
    given = {"tokenizer": str(public_tokenizer), "validation": str(tmp_path / "held.jsonl")}

    def trained(name, seed, prepare):
        settings = private(steps=2, unit=unit, insecure_seed=seed).tree()
        return tightlip.train(rows, tmp_path / name, prepare=prepare, **settings)

    run = trained("run", None, given)
    assert run.guarantee["standing"] == "proved"
    assert run.guarantee["num_units"] == (40 if unit == "user" else 200)
    lines = [json.loads(line) for line in (run.folder / "private.jsonl").read_text().splitlines()]
    assert lines[-1]["validation_perplexity"] > 1
    without = {"tokenizer": str(public_tokenizer), "split": "none"}
    with_file, alone = (
        (trained(name, 1, prepare).model_folder / "model.safetensors").read_bytes()
        for name, prepare in (("a", given), ("b", without))
    )
    assert with_file == alone


def test_stopping_by_a_file_of_held_out_text_is_refused_too(public_tokenizer, tmp_path):
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, documents(seed=3))))
    given = {"tokenizer": str(public_tokenizer), "validation": str(tmp_path / "held.jsonl")}
    with pytest.raises(GuaranteeError, match="stops by looking at private validation text"):
        tightlip.train(
            documents(), tmp_path / "run", prepare=given, **private(early_stop=1, epochs=2.0).tree()
        )
    assert not (tmp_path / "run").exists()
