"""The two privacy regularisers against their formulas written out, and what they do by training."""

import copy
import logging
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import tightlip
from tightlip.core.errors import UsageError
from tightlip.core.settings import names_in
from tightlip.corpus.prepare import prepare_corpus as prepare
from tightlip.corpus.prepare_config import PrepareConfig
from tightlip.models.loading import load_causal_lm, load_tokenizer
from tightlip.training.batches import epoch_order, gather, rows_of
from tightlip.training.config import RunOptions, TrainConfig, mitigations_with
from tightlip.training.loop import Training
from tightlip.training.loop import train_model as train
from tightlip.training.losses import Forward
from tightlip.training.mitigations import LEDGER_KEYS
from tightlip.training.mitigations.adversarial import (
    AdversarialConfig,
    nats_to_uniform,
    new_discriminator,
)
from tightlip.training.mitigations.triplet import Partners, TripletConfig, triplet_term
from tightlip.training.plan import own_randomness
from tightlip.training.recipe import recipe_for
from training.small_corpora import WORDS, documents, prepared

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SMALL = {"embedding_size": 8, "hidden_size": 8, "num_layers": 1, "batch_size": 8, "num_heads": 2}
SMALL |= {"sequence_length": 10, "learning_rate": 0.01}
ADVERSARIAL = {"mitigation": "adversarial", "discriminator_size": 16}
TRIPLET = {"mitigation": "triplet"}
EACH = pytest.mark.parametrize(
    "settings",
    [
        {**ADVERSARIAL, "batching": "user"},
        {**ADVERSARIAL, "batching": "uniform", "discriminator_steps": 3},
        {**TRIPLET, "batching": "user"},
        {**TRIPLET, "batching": "uniform", "triplet_margin": 0.5},
        {**TRIPLET, "batching": "uniform", "triplet_pairs": "inside"},
    ],
    ids=["adversarial-user", "adversarial-uniform", "triplet-user", "triplet-margin", "inside"],
)


def small(**settings):
    return TrainConfig.of(**{**SMALL, **settings})


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus") / "prepared")


def signed(num_users=4, num_each=12):
    """Each user ends every text with a word of their own, said twice: last states tell users apart."""
    rows = documents(num_users * num_each, num_users, longest=6)
    own = [f" {WORDS[number % num_users]}" * 2 for number in range(len(rows))]
    return [{**row, "text": row["text"] + end} for row, end in zip(rows, own, strict=True)]


@pytest.fixture(scope="module")
def signed_corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signed") / "prepared"
    return prepare(signed(), folder, PrepareConfig(split="none"))


def begun(corpus, folder, config):
    """A run that has taken no step."""
    options = RunOptions(device="cpu")
    with own_randomness(CPU, config.seed):
        return Training(recipe_for(corpus, folder, config, options, frozenset()), folder, CPU)


def weights(run):
    return load_file(run.model_folder / "model.safetensors")


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The terms, written out


def state_by_hand(model, rows, row):
    """Oracle: the row by itself, nothing padded; the state that predicts its last token."""
    ids = gather(rows, np.array([row])).input_ids_BT
    inputs = ids[:, : rows.num_targets[row]]
    return model(input_ids=inputs, output_hidden_states=True).hidden_states[-1][0, -1]


def loss_by_hand(model, rows, chosen, num_steps):
    """Oracle: plain training's loss, each target by its share of all."""
    total = 0.0
    for row in chosen:
        ids = gather(rows, np.array([row])).input_ids_BT
        log_probabilities = model(input_ids=ids[:, :-1]).logits.log_softmax(dim=-1)
        total = total - log_probabilities.gather(2, ids[:, 1:, None]).sum()
    return total * num_steps / rows.num_targets.sum()


def uniform_by_hand(discriminator, state):
    """Oracle: Eq. 2 for one row, class by class."""
    first, _, second = discriminator
    scores = second.weight @ torch.clamp(first.weight @ state + first.bias, min=0) + second.bias
    probabilities = torch.exp(scores) / torch.exp(scores).sum()
    return -sum(torch.log(p) for p in probabilities) / len(probabilities)


def pairs_by_hand(training, chosen):
    """The pairs of step 0 and what each counts."""
    mitigation, config = training.mitigation, training.config
    author = mitigation.authors
    if config.mitigation.triplet_pairs == "auxiliary":
        partners = mitigation.partners.drawn(chosen, [config.seed, 0, 0x7269])
        signs = [-1 if author[a] == author[b] else 1 for a, b in zip(chosen, partners, strict=True)]
        return [(a, b, s / len(chosen)) for a, b, s in zip(chosen, partners, signs, strict=True)]
    pairs = [(a, b) for place, a in enumerate(chosen) for b in chosen[place + 1 :]]
    num_same = sum(author[a] == author[b] for a, b in pairs)
    return [
        (a, b, -0.5 / num_same if author[a] == author[b] else 0.5 / (len(pairs) - num_same))
        for a, b in pairs
    ]


@pytest.mark.parametrize("model", ["lstm", "gru", "transformer"])
@EACH
def test_a_step_has_the_gradient_of_the_loss_written_out(settings, model, corpus, tmp_path):
    config = small(model=model, privacy_weight=0.7, optimizer="sgd", sequence_length=14, **settings)
    training = begun(corpus, tmp_path, config)
    mitigation, rows = training.mitigation, training.recipe.rows
    plain = copy.deepcopy(training.model).double()
    chosen = mitigation._chosen(0)
    assert len({int(rows.num_targets[row]) for row in chosen}) > 1  # some rows are padded
    training.take_step()

    num_steps = training.plan.steps_per_epoch
    loss = loss_by_hand(plain, rows, chosen, num_steps)
    share = num_steps / len(rows) * 0.7
    if config.mitigation.name == "adversarial":
        # The model answers to the discriminator as it is after its own steps.
        still = copy.deepcopy(mitigation.discriminator).double().requires_grad_(False)
        for row in chosen:
            loss = loss + share * uniform_by_hand(still, state_by_hand(plain, rows, row))
    else:
        for one, other, weight in pairs_by_hand(training, chosen):
            apart = state_by_hand(plain, rows, one) - state_by_hand(plain, rows, other)
            distance = (apart**2).sum()
            if config.mitigation.triplet_margin and weight < 0:
                distance = torch.clamp(distance, max=config.mitigation.triplet_margin)
            loss = loss + share * len(chosen) * weight * distance
    loss.backward()
    expected = {name: part.grad for name, part in plain.named_parameters()}
    for name, part in training.model.named_parameters():
        torch.testing.assert_close(part.grad.double(), expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 5.0])
def test_the_discriminator_learns_from_its_own_loss_only(weight, corpus, tmp_path):
    config = small(**ADVERSARIAL, batching="uniform", privacy_weight=weight)
    training = begun(corpus, tmp_path, config)
    mitigation, rows = training.mitigation, training.recipe.rows
    model, discriminator = copy.deepcopy(training.model), copy.deepcopy(mitigation.discriminator)
    chosen = mitigation._chosen(0)
    training.take_step()
    loss = 0.0
    for row in chosen:
        scores = discriminator(state_by_hand(model, rows, row).detach())
        loss = loss - torch.log_softmax(scores, 0)[mitigation.authors[row]] / len(chosen)
    loss.backward()
    for found, expected in zip(
        mitigation.discriminator.parameters(), discriminator.parameters(), strict=True
    ):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-7)
    # Adam's first step is one learning rate against the sign of the gradient.
    moved = mitigation.discriminator[2].bias - discriminator[2].bias
    torch.testing.assert_close(moved, -1e-3 * discriminator[2].bias.grad.sign(), rtol=1e-3, atol=0)


def test_the_models_term_leaves_the_discriminator_without_a_gradient_and_is_least_when_uniform():
    discriminator = new_discriminator(4, 5, 3)
    states = torch.randn(6, 4, requires_grad=True)
    nats = nats_to_uniform(discriminator, states)
    nats.sum().backward()
    assert all(part.grad is None for part in discriminator.parameters())
    assert states.grad.abs().sum() > 0
    assert (nats >= math.log(3) - 1e-6).all()
    torch.nn.init.zeros_(discriminator[2].weight)
    torch.nn.init.zeros_(discriminator[2].bias)
    torch.testing.assert_close(
        nats_to_uniform(discriminator, states), torch.full((6,), math.log(3))
    )


def test_a_margin_bounds_the_term():
    distances, signs = torch.tensor([1e9, 2.0, 3.0]), torch.tensor([-0.5, -0.5, 0.25])
    assert triplet_term(distances, signs, 4.0).item() == -0.5 * 4 - 0.5 * 2 + 0.25 * 3
    assert triplet_term(distances, signs, None).item() < -1e8


def test_last_states_of_foreign_models_are_those_of_rows_by_themselves(corpus):
    torch.manual_seed(0)
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    shape = GPT2Config(
        vocab_size=len(tokenizer), n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(shape)
    rows = rows_of(corpus.train, sequence_length=10, bos=tokenizer.bos_token_id)
    batch, forward = gather(rows, np.arange(9)), Forward(model)
    expected = torch.stack([state_by_hand(model, rows, row) for row in range(9)])
    loss, last = forward.mean_loss_and_last(batch)
    torch.testing.assert_close(last, expected)
    torch.testing.assert_close(forward.last(batch), expected)
    assert torch.equal(loss, forward.mean_loss(batch))


# Batches and pairs


def test_user_batches_hold_every_row_once_and_one_user_each(corpus):
    rows = rows_of(corpus.train, sequence_length=4, bos=None)
    order = epoch_order(rows, batch_size=5, seed=1, epoch=2, by_user=True)
    assert sorted(np.concatenate(order)) == list(range(len(rows)))
    assert all(len(set(rows.users[chosen])) == 1 for chosen in order)
    sizes = np.unique(rows.users, return_counts=True)[1]
    assert len(order) == sum(math.ceil(size / 5) for size in sizes)
    again = epoch_order(rows, batch_size=5, seed=1, epoch=2, by_user=True)
    assert all(np.array_equal(a, b) for a, b in zip(order, again, strict=True))
    other = epoch_order(rows, batch_size=5, seed=1, epoch=3, by_user=True)
    assert [*np.concatenate(order)] != [*np.concatenate(other)]


def test_half_of_a_batch_has_partners_of_its_own_author_and_nobody_itself():
    authors = np.array([0, 1, 0, 2, 1, 0, 2, 1])
    partners = Partners(authors)
    for seed in range(200):
        chosen = np.random.default_rng(seed).permutation(8)[: 2 + seed % 6]
        drawn = partners.drawn(chosen, [seed])
        num_same = (authors[chosen] == authors[drawn]).sum()
        assert num_same in (len(chosen) // 2, -(-len(chosen) // 2))
        assert (chosen != drawn).all()


def test_partners_of_either_kind_are_equally_likely():
    authors = np.array([0, 1, 0, 2, 1, 0, 2, 1])
    drawn = Partners(authors).drawn(np.full(14_000, 2), [0])
    counts = np.bincount(drawn, minlength=8)
    assert counts[2] == 0
    # Half to rows 0 and 5 of the same author, half to the five of others.
    assert np.abs(counts[[0, 5]] - 3500).max() < 5 * math.sqrt(3500)
    assert np.abs(counts[[1, 3, 4, 6, 7]] - 1400).max() < 5 * math.sqrt(1400)


def test_an_authors_only_row_is_paired_with_another_authors():
    authors = np.array([0, 1, 1])
    assert {*Partners(authors).drawn(np.zeros(50, np.int64), [0])} == {1, 2}


# What training does


@pytest.mark.parametrize("settings", [ADVERSARIAL, TRIPLET], ids=["adversarial", "triplet"])
@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_with_no_weight_training_is_plain_bit_for_bit(settings, model, corpus, tmp_path):
    common = {"model": model, "epochs": 2, "dropout": 0.2}
    plain = train(corpus, tmp_path / "plain", small(**common))
    config = small(**common, **settings, batching="uniform", privacy_weight=0)
    found = train(corpus, tmp_path / "found", config)
    assert same_bits(weights(found), weights(plain))
    assert [line["train_loss_nats"] for line in found.metrics] == [
        line["train_loss_nats"] for line in plain.metrics
    ]


def test_a_warm_up_starts_at_nothing_and_rises_in_a_line(corpus, tmp_path):
    config = small(**TRIPLET, privacy_weight=2, privacy_warmup_steps=4)
    mitigation = begun(corpus, tmp_path, config).mitigation
    assert [mitigation.weight(step) for step in range(6)] == [0, 0.5, 1, 1.5, 2, 2]


@EACH
def test_the_same_seed_gives_the_same_bits_and_a_killed_run_too(
    settings, corpus, tmp_path, monkeypatch
):
    config = small(**settings, epochs=2, dropout=0.2, privacy_warmup_steps=3)
    expected = train(corpus, tmp_path / "whole", config)
    often, plain = RunOptions(checkpoint_seconds=0), Training.take_step

    class Killed(BaseException):
        pass

    def cut(self):
        if self.progress.step == 7:
            raise Killed
        plain(self)

    monkeypatch.setattr(Training, "take_step", cut)
    with pytest.raises(Killed):
        train(corpus, tmp_path / "run", config, often)
    monkeypatch.undo()
    found = train(corpus, tmp_path / "run", config, often)
    assert same_bits(weights(found), weights(expected))
    # What the log says of an epoch counts the steps before the kill too.
    said = [
        [
            line.split(" INFO ")[1]
            for line in text.splitlines()
            if "within" in line or "names the author" in line
        ]
        for text in ((run.folder / "log.txt").read_text() for run in (found, expected))
    ]
    assert said[0] == said[1] != []
    other = train(corpus, tmp_path / "other", small(**{**config.tree(), "seed": 1}))
    assert not same_bits(weights(other), weights(expected))


def distances(run, corpus):
    """Mean squared distance of last states within users and between them."""
    model = load_causal_lm(run.model_folder, dtype=torch.float32).eval()
    bos = load_tokenizer(corpus.tokenizer_folder).bos_token_id
    rows = rows_of(corpus.train, sequence_length=10, bos=bos)
    with torch.no_grad():
        states = torch.stack([state_by_hand(model, rows, row) for row in range(len(rows))])
    apart = torch.cdist(states, states) ** 2
    same = torch.from_numpy(rows.users[:, None] == rows.users[None])
    return apart[same & ~torch.eye(len(rows), dtype=torch.bool)].mean(), apart[~same].mean()


PAIRS = pytest.mark.parametrize(
    "pairs",
    [
        {"batching": "user"},
        {"batching": "uniform"},
        {"batching": "uniform", "triplet_pairs": "inside"},
    ],
    ids=["user", "uniform", "inside"],
)


@pytest.fixture(scope="module", params=[0, 1])
def plain_run(request, signed_corpus, tmp_path_factory):
    config = small(epochs=15, seed=request.param, snapshot="none")
    return train(signed_corpus, tmp_path_factory.mktemp("plain") / "run", config)


def gone_on(run, corpus, out, **settings):
    """Distances after two more epochs under the triplet regulariser."""
    config = TrainConfig.of(
        model=str(run.model_folder), epochs=2, batch_size=8, sequence_length=10,
        learning_rate=0.003, privacy_weight=3, **TRIPLET, **settings,
    )  # fmt: skip
    return distances(train(corpus, out, config), corpus)


def only_pairs(monkeypatch, *, same):
    """Let every partner be of the same author, or none."""

    def drawn(self, chosen, seed):
        draw = np.random.default_rng(seed)
        fits = [(self.authors == self.authors[row]) == same for row in chosen]
        return np.array(
            [
                draw.choice([other for other in np.flatnonzero(fit) if other != row])
                for row, fit in zip(chosen, fits, strict=True)
            ]
        )

    monkeypatch.setattr(Partners, "drawn", drawn)


@pytest.mark.parametrize("batching", ["user", "uniform"])
def test_pairs_of_one_author_make_distances_within_users_grow(
    batching, plain_run, signed_corpus, tmp_path, monkeypatch
):
    only_pairs(monkeypatch, same=True)
    within, _ = distances(plain_run, signed_corpus)
    assert gone_on(plain_run, signed_corpus, tmp_path / "run", batching=batching)[0] > 1.1 * within


@pytest.mark.parametrize("batching", ["user", "uniform"])
def test_pairs_of_different_authors_make_distances_between_users_shrink(
    batching, plain_run, signed_corpus, tmp_path, monkeypatch
):
    only_pairs(monkeypatch, same=False)
    _, between = distances(plain_run, signed_corpus)
    assert (
        gone_on(plain_run, signed_corpus, tmp_path / "run", batching=batching)[1] < 0.95 * between
    )


@PAIRS
def test_both_together_move_users_closer_compared_with_their_own_rows(
    pairs, plain_run, signed_corpus, tmp_path
):
    """Only the ratio must grow: squared distances between users hold the spread within them too."""
    within, between = distances(plain_run, signed_corpus)
    assert within < between / 2
    found = gone_on(plain_run, signed_corpus, tmp_path / "run", **pairs)
    assert found[1] < between
    assert found[0] / found[1] > within / between


@PAIRS
def test_after_triplet_training_distance_no_longer_tells_users_apart(
    pairs, signed_corpus, tmp_path
):
    config = small(epochs=15, snapshot="none", privacy_weight=1, **TRIPLET, **pairs)
    within, between = distances(train(signed_corpus, tmp_path / "run", config), signed_corpus)
    assert within > 0.8 * between


@pytest.mark.parametrize("seed", [0, 1])
def test_the_adversary_finds_authors_in_plain_states_and_fewer_in_regularised_ones(
    seed, signed_corpus, tmp_path
):
    common = {**ADVERSARIAL, "discriminator_size": 64, "discriminator_learning_rate": 0.01}
    common |= {"discriminator_steps": 5, "epochs": 20, "seed": seed, "snapshot": "none"}
    accuracy, ratio = {}, {}
    for weight in (0, 1):
        run = train(signed_corpus, tmp_path / f"{weight}", small(**common, privacy_weight=weight))
        last = [
            line
            for line in (run.folder / "log.txt").read_text().splitlines()
            if "names the author" in line
        ]
        accuracy[weight] = float(last[-1].split("author of ")[1].split("%")[0])
        within, between = distances(run, signed_corpus)
        ratio[weight] = between / within  # of no unit: to shrink all states hides nothing
    assert accuracy[0] > 70
    assert accuracy[1] < accuracy[0] - 30
    assert ratio[1] < 2 < ratio[0]


def test_the_discriminator_is_judged_by_rows_of_all_users(signed_corpus, tmp_path):
    config = small(**ADVERSARIAL, batching="user", discriminator_learning_rate=0.01)
    training = begun(signed_corpus, tmp_path, config)
    mitigation, rows = training.mitigation, training.recipe.rows
    for number in range(60):
        mitigation.step(number)
    right = 0
    for row in range(len(rows)):  # there are few, so all are asked
        state = state_by_hand(training.model, rows, row)
        right += int(mitigation.discriminator(state).argmax()) == rows.users[row]
    assert mitigation.named_share() == (right / len(rows), len(rows))
    assert right > len(rows) / 2
    assert training.model.training


@pytest.mark.parametrize(("rate", "warned"), [(1e-9, True), (0.01, False)])
def test_a_discriminator_that_is_no_adversary_is_said_once(
    rate, warned, signed_corpus, tmp_path, caplog
):
    config = small(
        **ADVERSARIAL, privacy_weight=0, epochs=12, discriminator_learning_rate=rate, discriminator_steps=5
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "tightlip"):
        train(signed_corpus, tmp_path / "run", config)
    assert sum("too weak to be an adversary" in line for line in caplog.messages) == int(warned)


@pytest.mark.parametrize(("weight", "warned"), [(50.0, True), (0.01, False)])
def test_a_term_that_outweighs_the_loss_is_said_once(weight, warned, corpus, tmp_path, caplog):
    inside = {"batching": "uniform", "triplet_pairs": "inside"}
    config = small(**TRIPLET, **inside, privacy_weight=weight, epochs=12, snapshot="none")
    with caplog.at_level(logging.WARNING, "tightlip"):
        train(corpus, tmp_path / "run", config)
    said = [record for record in caplog.records if "triplet term diverges" in record.message]
    assert len(said) == warned


@pytest.mark.parametrize("settings", [ADVERSARIAL, TRIPLET], ids=["adversarial", "triplet"])
def test_a_regulariser_promises_nothing_and_says_why(settings, corpus, tmp_path):
    run = train(corpus, tmp_path / "run", small(**settings, steps=2))
    assert set(run.guarantee) == {*LEDGER_KEYS, "finished"}
    assert run.guarantee["standing"] == "measured only"
    assert run.guarantee["epsilon"] is None
    assert run.guarantee["mechanism"] == f"{settings['mitigation']} regulariser"
    assert "bounds nobody's influence" in run.guarantee["because"]
    assert not {name for name in run.config["train"] if name.startswith(("epsilon", "clip"))}


@pytest.mark.parametrize("settings", [ADVERSARIAL, TRIPLET], ids=["adversarial", "triplet"])
def test_adapters_are_regularised_too(settings, corpus, tmp_path):
    pytest.importorskip("peft")
    base = train(corpus, tmp_path / "base", small(model="transformer", steps=1)).model_folder
    size = {"batch_size": 8, "sequence_length": 10}
    config = TrainConfig.of(model=str(base), lora=2, steps=3, **size, **settings)
    run = train(corpus, tmp_path / "run", config)
    adapter = load_file(run.model_folder / "adapter_model.safetensors")
    assert any(each.any() for name, each in adapter.items() if "lora_B" in name)


# What is refused


@pytest.mark.parametrize("settings", [ADVERSARIAL, TRIPLET], ids=["adversarial", "triplet"])
def test_a_corpus_of_one_user_is_refused_and_nothing_is_left(settings, tmp_path):
    corpus = prepared(tmp_path / "corpus", num_users=1)
    with pytest.raises(UsageError, match=r"have one author\. Use a corpus of at least two"):
        train(corpus, tmp_path / "run", small(**settings))
    assert not (tmp_path / "run" / "config.toml").exists()


def test_pairs_that_never_share_an_author_are_refused(tmp_path):
    lonely = prepared(tmp_path / "corpus", num_documents=9, num_users=9, longest=5, split="none")
    with pytest.raises(UsageError, match="each of the 9 users has one row"):
        train(lonely, tmp_path / "run", small(**TRIPLET))
    inside = small(**TRIPLET, batching="uniform", triplet_pairs="inside")
    with pytest.raises(UsageError, match=r"of 2 batches of batch_size=8 none has two"):
        train(lonely, tmp_path / "run", inside)


def test_pairs_that_never_differ_in_author_are_refused(tmp_path):
    """Batches by length: each user writes texts of a length of their own."""
    rows = [
        {"user": f"user {user}", "text": " ".join(WORDS[: 2 + 3 * user])}
        for user in range(3)
        for _ in range(8)
    ]
    corpus = prepare(rows, tmp_path / "corpus", PrepareConfig(split="none"))
    with pytest.raises(UsageError, match=r"of different authors in one batch, and of 3 batches"):
        train(
            corpus,
            tmp_path / "run",
            small(**TRIPLET, batching="uniform", triplet_pairs="inside"),
        )
    with pytest.raises(UsageError, match=r"no pair differs\. Add batching='uniform'"):
        small(**TRIPLET, triplet_pairs="inside")


@pytest.mark.parametrize("name", sorted({*names_in(AdversarialConfig, TripletConfig)}))
def test_a_setting_of_a_regulariser_is_refused_under_other_mitigations(name):
    given = {"batching": "uniform", "triplet_pairs": "inside"}.get(name, 7)
    for mitigation in ("none", "dp", "adversarial", "triplet"):
        settings = {"mitigation": mitigation, name: given}
        settings |= {"noise_multiplier": 1.0} if mitigation == "dp" else {}
        settings |= {"batching": "uniform"} if name == "triplet_pairs" else {}
        if mitigation in mitigations_with(name):
            assert TrainConfig.of(**settings).tree()[mitigation][name] == given
        else:
            with pytest.raises(UsageError, match=f"means nothing to mitigation='{mitigation}'"):
                TrainConfig.of(**settings)
            assert name not in TrainConfig.of(mitigation="none").tree()


@pytest.mark.parametrize(
    "settings",
    [
        {**TRIPLET, "privacy_weight": -1.0},
        {**TRIPLET, "triplet_margin": 0.0},
        {**ADVERSARIAL, "discriminator_steps": 0},
        {**ADVERSARIAL, "discriminator_learning_rate": 0.0},
        {**ADVERSARIAL, "privacy_warmup_steps": -1},
        {**ADVERSARIAL, "batching": "users"},
    ],
)
def test_numbers_out_of_range_are_refused(settings):
    with pytest.raises(UsageError, match=r"out of range|Unknown batching 'users'"):
        TrainConfig.of(**settings)


@pytest.mark.parametrize(("mitigation", "weight"), [("adversarial", 1.0), ("triplet", 0.03)])
def test_each_regulariser_has_a_weight_of_its_own_unless_given(mitigation, weight):
    assert small(mitigation=mitigation).mitigation.privacy_weight == weight


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"mitigation": "dp", "privacy_weight": 1.0, "epsilon": 8.0}, "privacy_weight"),
        ({"discriminator_size": 1000}, "discriminator_size"),
        ({"privacy_warmup_steps": 0}, "privacy_warmup_steps"),
        ({"mitigation": "adversarial", "triplet_pairs": "auxiliary"}, "triplet_pairs"),
        ({"mitigation": "triplet", "clip_norm": 1.0}, "clip_norm"),
        ({"mitigation": "dp", "epsilon": 8.0, "adaptive": "clip"}, "adaptive"),
    ],
)
def test_a_default_given_to_another_mitigation_is_refused_too(settings, name, corpus, tmp_path):
    with pytest.raises(UsageError, match=f"{name}=.* means nothing to mitigation="):
        tightlip.train(corpus, tmp_path / "run", **SMALL, **settings)
