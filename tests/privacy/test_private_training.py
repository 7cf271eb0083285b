"""The object that trains privately: its draws, its noise, its steps and what it refuses."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.privacy import PrivateTraining, promised, rows_alone
from tightlip.privacy.accounting import Mechanism, epsilon_spent
from tightlip.privacy.ledger import read_ledger
from tightlip.privacy.private_training import SHAPES
from tightlip.privacy.promised import rounded_together

pytestmark = pytest.mark.slow

VOCABULARY = 20


def lstm():
    torch.manual_seed(0)
    return LSTMForCausalLM(
        LSTMConfig(vocab_size=VOCABULARY, embedding_size=6, hidden_size=6, num_layers=1)
    )


def documents(count=60, seed=0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=draw).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=draw) for length in lengths]


def private(tmp_path, model=None, optimizer=None, texts=None, **settings):
    model = lstm() if model is None else model
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    given = {
        "noise_multiplier": 1.0, "expected_batch": 10, "steps": 20, "insecure_seed": 7, **settings,
    }  # fmt: skip
    return PrivateTraining(
        model,
        optimizer,
        documents() if texts is None else texts,
        ledger=tmp_path / "ledger.json",
        **given,
    )


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class OneToken(nn.Module):
    """Somebody's own model, no Hugging Face in it: words in, logits out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adamax"])
def test_any_optimizer_trains_somebodys_own_model_in_an_ordinary_loop(kind, tmp_path):
    model = OneToken()
    before = flat(model).clone()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    training = PrivateTraining(
        model, optimizer, documents(), users=[number % 12 for number in range(60)], epsilon=8.0,
        expected_batch=4, steps=5, ledger=tmp_path / "ledger.json",
    )  # fmt: skip
    while training.has_budget():
        training.step()
    record = training.guarantee()
    assert record["steps"] == 5
    assert record["unit"] == "user"
    assert record["num_units"] == 12
    assert 7 < record["epsilon"] <= 8
    assert not torch.equal(flat(model), before)
    assert read_ledger(tmp_path / "ledger.json") == record


def test_without_noise_and_clip_it_is_plain_training_on_the_mean_of_row_means(tmp_path):
    texts = [text for text in documents(30) if len(text) > 1]
    model, twin = lstm().double(), lstm().double()
    training = private(
        tmp_path, model, texts=texts, noise_multiplier=0.0, clip_norm=math.inf,
        expected_batch=len(texts),
    )  # fmt: skip
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    for _ in range(3):
        training.step()  # everybody is drawn: the rate is 1
        losses = [  # transformers would take its own in float32
            nn.functional.cross_entropy(twin(text[None]).logits[0, :-1], text[1:]) for text in texts
        ]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-9, atol=1e-12)
    assert training.guarantee()["epsilon"] is None


def noise_of_steps(tmp_path, monkeypatch, *, factor=1.0, steps=6):
    """All updates of a run whose documents have nothing to predict: noise and nothing else."""
    from tightlip.privacy.noise_schedules import CPUNoise

    plain = CPUNoise.add

    def off(self, tensors, *, scale, share):
        plain(self, tensors, scale=factor * scale, share=share)

    monkeypatch.setattr(CPUNoise, "add", off)
    model = lstm()
    texts = [torch.zeros(1, dtype=torch.long) for _ in range(60)]
    training = private(
        tmp_path, model, texts=texts, noise_multiplier=1.5, clip_norm=0.2, insecure_seed=3
    )
    updates = []
    for _ in range(steps):
        before = flat(model).clone()
        training.step()
        updates.append((before - flat(model)).numpy())
    return np.concatenate(updates)


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (0.8, False), (1.25, False)])
def test_the_noise_has_the_right_scale_and_a_wrong_one_is_found_out(
    factor, fits, tmp_path, monkeypatch
):
    updates = noise_of_steps(tmp_path, monkeypatch, factor=factor)
    # σ·C over the expected batch, whatever was drawn.
    scaled = updates * 10 / (1.5 * 0.2)
    assert (stats.kstest(scaled, "norm").pvalue > 1e-3) == fits


def test_every_trainable_entry_gets_noise_unused_rows_included(tmp_path, monkeypatch):
    """On a grid one entry in some 400 stays where it is in a step; none does in three."""
    updates = noise_of_steps(tmp_path, monkeypatch, steps=3).reshape(3, -1)
    assert updates.any(0).all()
    assert np.count_nonzero(updates) > 0.98 * updates.size


def test_two_runs_never_share_noise_and_a_resumed_run_draws_anew(tmp_path):
    models = [lstm() for _ in range(2)]
    for number, model in enumerate(models):
        private(tmp_path / str(number), model, insecure_seed=None).step()
    assert not torch.equal(flat(models[0]), flat(models[1]))
    resumed = lstm()
    training = private(tmp_path / "0", resumed, insecure_seed=None)
    assert training.ledger.steps == 1
    training.step()
    assert training.ledger.steps == 2
    assert not torch.equal(flat(models[0]), flat(resumed))


def drawn(training, monkeypatch, steps):
    """Which units each of some steps saw."""
    seen = []
    plain = training._drawn
    monkeypatch.setattr(training, "_drawn", lambda units: seen.append(units) or plain(units))
    for _ in range(steps):
        training.step()
    return seen


def test_every_unit_is_drawn_as_often_as_the_accounting_assumes(tmp_path, monkeypatch):
    training = private(tmp_path, OneToken(), steps=300, expected_batch=6)
    seen = drawn(training, monkeypatch, 300)
    counts = np.bincount(np.concatenate(seen), minlength=60)
    assert stats.chisquare(counts).pvalue > 1e-3
    assert stats.binomtest(int(counts.sum()), 300 * 60, 0.1).pvalue > 1e-3


def test_an_empty_draw_is_a_step_that_spends_and_adds_noise(tmp_path, monkeypatch):
    model = lstm()
    training = private(tmp_path, model)
    monkeypatch.setattr(training._sampler, "draw", lambda: np.empty(0, np.int64))
    before = flat(model).clone()
    step = training.step()
    assert training.ledger.steps == 1
    assert not torch.equal(before, flat(model))
    assert (float(step.loss), step.num_targets) == (0.0, 0)


def gradient_of(tmp_path, physical_rows, users=None):
    model = lstm().double()
    training = private(
        tmp_path, model, noise_multiplier=0.0, physical_rows=physical_rows, expected_batch=1,
        users=users, clip_norm=0.3, rows_per_unit=8,
    )  # fmt: skip
    everybody = np.arange(training.num_units)
    training._sampler.draw = lambda: everybody
    before = flat(model).clone()
    training.step()
    return before - flat(model)


@pytest.mark.parametrize("users", [None, [number % 9 for number in range(60)]])
def test_an_oversized_draw_is_split_and_nobody_is_cut(users, tmp_path):
    whole = gradient_of(tmp_path / "whole", 1000, users)
    for rows in (1, 3, 16):
        split = gradient_of(tmp_path / str(rows), rows, users)
        torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)


def test_a_user_gives_at_most_so_many_documents_and_each_gets_a_turn(tmp_path):
    users = ["one"] * 59 + ["other"]
    training = private(tmp_path, users=users, expected_batch=2, rows_per_unit=4, physical_rows=100)
    seen, sizes = set(), set()
    for _ in range(200):
        ((batch, _),) = [
            each
            for each in training.physical_batches(*training._drawn(np.array([0])))
            if each[0].layout.num_units
        ]
        given = batch.ids_BT[(batch.weights_BT > 0).any(1)]
        sizes.add(len(given))  # a document of one token has nothing to predict
        seen |= {tuple(row.tolist()) for row in given}
    assert max(sizes) == 4
    assert len(seen) > 20


def test_two_trainings_on_one_ledger_are_refused_until_one_is_closed(tmp_path):
    first = private(tmp_path)
    first.step()
    with pytest.raises(GuaranteeError, match="is being charged by another training"):
        private(tmp_path)
    first.close()
    second = private(tmp_path)
    second.step()
    assert second.ledger.steps == 2
    with pytest.raises(GuaranteeError, match="was closed here"):
        first.step()


def test_a_ledger_behind_a_link_is_charged_where_it_lies(tmp_path):
    training = private(tmp_path)
    training.close()
    link = tmp_path / "link" / "ledger.json"
    link.parent.mkdir()
    link.symlink_to(training.ledger.path)
    again = private(link.parent)
    again.step()
    assert link.is_symlink()
    assert read_ledger(training.ledger.path)["steps"] == 1
    with pytest.raises(GuaranteeError, match="another training"):
        private(tmp_path)


def test_rounding_is_measured_of_rows_that_share_a_pass_where_single_ones_do_not(
    tmp_path, monkeypatch
):
    def of_one_row(passes, shape, moves):
        return "a last bit" if shape.rows_per_unit == 1 else None

    monkeypatch.setattr(rows_alone, "_changes", of_one_row)
    training = private(tmp_path, OneToken())
    assert training._batches.usual().num_units == 1
    assert training._batches.usual(4).num_units > 1
    seen = rounded_together(training._passes, training._batches)
    assert training.arithmetic.charged >= 10 * seen > 0
    assert f"measured {seen:.1e} C" in training.arithmetic.words


def test_another_model_that_goes_on_with_a_ledger_is_measured_by_itself(tmp_path, monkeypatch):
    measured, measures = [], promised._measured

    def noting(passes, *given, **named):
        measured.append(type(passes.model))
        return measures(passes, *given, **named)

    monkeypatch.setattr(promised, "_measured", noting)
    for model in (OneToken(), OneToken(), lstm()):
        private(tmp_path, model).close()
    assert measured == [OneToken, LSTMForCausalLM]


def test_a_promise_that_is_taken_back_stays_so_in_a_process_that_is_killed_then(tmp_path):
    training = private(tmp_path)
    training.step()
    training._take_back("Rows move each other.")
    assert read_ledger(training.ledger.path)["standing"] == "measured only"


def test_the_ledger_tells_nothing_of_how_long_texts_are(tmp_path, monkeypatch):
    monkeypatch.setattr(
        rows_alone,
        "_changes",
        lambda passes, shape, moves: "a last bit" if shape.width > 8 else None,
    )
    told = []
    for number, length in enumerate((5, 20)):
        texts = [*documents(), torch.arange(length) % 7]
        training = private(tmp_path / str(number), texts=texts)
        training.step()
        told.append(training.ledger.record())
        training.close()
    assert bool(training._apart)
    assert [name for name in told[0] if told[0][name] != told[1].get(name)] == ["run"]
    again = private(tmp_path / "1", texts=texts)
    assert again.ledger.record()["standing"] == told[1]["standing"]
    again.close()
    (tmp_path / "1" / SHAPES).unlink()  # then nobody knows whether they always took a pass each
    assert private(tmp_path / "1", texts=texts).ledger.record()["epsilon"] is None


def test_a_refused_start_leaves_the_ledger_free(tmp_path):
    private(tmp_path).close()
    with pytest.raises(GuaranteeError, match="was begun with noise_multiplier") as kept:
        private(tmp_path, noise_multiplier=2.0)
    assert kept.value is not None
    assert private(tmp_path).ledger.steps == 0


class WithDropout(OneToken):
    def forward(self, ids):
        hidden = nn.functional.dropout(self.embedding(ids), 0.5, training=self.training)
        return self.head(self.norm(hidden))


def test_one_unit_more_moves_the_sum_by_at_most_the_clip_also_for_a_model_with_dropout(tmp_path):
    texts = [text for text in documents(40) if len(text) > 1]
    model = WithDropout().train()
    training = private(tmp_path, model, texts=texts, noise_multiplier=0.0, clip_norm=0.1)
    sums = []
    for units in (np.arange(1, len(texts)), np.arange(len(texts))):
        torch.manual_seed(0)  # as whoever knows the seed can repeat it
        training._sampler.draw = lambda units=units: units
        before = flat(model).clone()
        training.step()
        sums.append((before - flat(model)) * 10)
        with torch.no_grad():
            for parameter, old in zip(
                model.parameters(),
                before.split([each.numel() for each in model.parameters()]),
                strict=True,
            ):
                parameter.copy_(old.view(parameter.shape))
    assert float((sums[0] - sums[1]).norm()) <= 0.1 * (1 + 1e-4)


class SeesEverything(OneToken):
    def forward(self, ids):
        hidden = self.embedding(ids)
        return self.head(self.norm(hidden + hidden.mean(1, keepdim=True)))


class SeesTheBeginning(OneToken):
    """Looks both ways, but only among the first four positions."""

    def forward(self, ids):
        hidden = self.embedding(ids)
        first = hidden[:, :4].mean(1, keepdim=True).expand(-1, min(4, ids.shape[1]), -1)
        return self.head(
            self.norm(hidden + nn.functional.pad(first, (0, 0, 0, ids.shape[1] - first.shape[1])))
        )


class Counts(OneToken):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(VOCABULARY))

    def forward(self, ids):
        self.seen += torch.bincount(ids.flatten(), minlength=VOCABULARY)
        return super().forward(ids)


class NotWhole(OneToken):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.head.weight[0, 0] = float("nan")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (SeesEverything, "depend on what stands to the right"),
        (SeesTheBeginning, "depend on what stands to the right"),
        (Counts, "seen is a buffer that a pass over text changes"),
        (NotWhole, r"head\.weight is not all finite numbers"),
    ],
)
def test_a_model_that_the_proof_does_not_fit_is_refused(model, words, tmp_path):
    with pytest.raises((GuaranteeError, UsageError), match=words):
        private(tmp_path, model())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"unit": "user"}, "with no users given"),
        ({"unit": "example", "users": ["a"] * 60}, "with users given"),
        ({"unit": "planet"}, "Unknown unit 'planet'"),
        ({"epsilon": math.inf}, "epsilon=inf is out of range"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0 is out of range"),
    ],
)
def test_a_promise_that_means_something_else_is_refused(settings, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        private(tmp_path, **settings)


def test_a_frozen_weight_with_an_old_gradient_stays_where_it_is(tmp_path):
    model = OneToken()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    model.embedding.weight.requires_grad_(False)
    before = model.embedding.weight.clone()
    private(tmp_path, model, optimizer).step()
    assert torch.equal(model.embedding.weight, before)


def test_documents_of_one_id_or_none_predict_nothing(tmp_path):
    texts = [torch.zeros(0, dtype=torch.long), torch.ones(1, dtype=torch.long), *documents(20)]
    training = private(tmp_path, texts=texts, expected_batch=22)
    assert torch.isfinite(training.step().loss)


def test_training_stops_before_the_target_is_passed(tmp_path):
    training = private(tmp_path, epsilon=3.0, noise_multiplier=1.0, steps=1000)
    assert training.most_steps < 1000
    mechanism = Mechanism(noise_multiplier=1.0, sampling_rate=10 / 60)
    assert epsilon_spent(mechanism, training.most_steps, training.delta) <= 3.0
    assert epsilon_spent(mechanism, training.most_steps + 1, training.delta) > 3.0
    while training.has_budget():
        training.step()
    with pytest.raises(GuaranteeError, match="another would pass epsilon=3"):
        training.step()


def test_a_step_is_on_record_before_it_changes_a_weight(tmp_path):
    model = lstm()

    class Watched(torch.optim.SGD):
        def step(self):
            seen.append(json.loads((tmp_path / "ledger.json").read_text())["steps"])
            super().step()

    seen = []
    training = private(tmp_path, model, Watched(model.parameters(), lr=0.1))
    for _ in range(3):
        training.step()
    assert seen == [1, 2, 3]


def test_an_optimizer_that_changes_other_weights_is_refused(tmp_path):
    model, other = lstm(), nn.Linear(2, 2)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    with pytest.raises(GuaranteeError, match="changes 2 tensors that are no parameters"):
        private(tmp_path, model, both)
    part = torch.optim.SGD([model.lm_head.weight], lr=1.0)
    with pytest.raises(UsageError, match=r"does not hold model\.embed_tokens\.weight"):
        private(tmp_path, model, part)


def test_noise_without_a_bound_on_anybody_is_refused(tmp_path):
    with pytest.raises(GuaranteeError, match="clip_norm=inf bounds nobody"):
        private(tmp_path, clip_norm=math.inf)


def test_a_poisoned_document_contributes_nothing_and_nobody_notices(tmp_path):
    texts = documents(20)
    model, twin = lstm().double(), lstm().double()
    clean = [text.clamp(max=VOCABULARY - 2) for text in texts]
    poison = torch.full((6,), VOCABULARY - 1)
    settings = {"noise_multiplier": 0.0, "clip_norm": 0.5}
    one = private(tmp_path / "a", model, texts=clean, expected_batch=20, **settings)
    other = private(tmp_path / "b", twin, texts=[*clean, poison], expected_batch=21, **settings)
    with torch.no_grad():
        for each in (model, twin):
            each.model.embed_tokens.weight[VOCABULARY - 1] = float("nan")
    one.step()
    step = other.step()
    assert torch.isfinite(step.loss)
    moved = [
        (each.lm_head.weight - lstm().double().lm_head.weight).detach() for each in (model, twin)
    ]
    torch.testing.assert_close(moved[0] * 20, moved[1] * 21)


def test_a_ledger_that_is_opened_again_gives_no_steps_beyond_the_plan(tmp_path):
    training = private(tmp_path, lstm(), noise_multiplier=1.5, steps=3, insecure_seed=3)
    for _ in range(3):
        training.step()
    spent = training.guarantee()["epsilon"]
    training.close()
    again = private(tmp_path, lstm(), noise_multiplier=1.5, steps=3, insecure_seed=3)
    assert not again.has_budget()
    with pytest.raises(GuaranteeError, match="All 3 planned steps are taken"):
        again.step()
    assert again.guarantee()["epsilon"] == spent


def test_a_step_of_so_many_passes_that_rounding_is_no_trifle_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tightlip.privacy.promised.rounded_together", lambda *_: 1e-3)
    with pytest.raises(GuaranteeError, match="Add exact_sums=True"):
        private(tmp_path, lstm(), expected_batch=50, noise_multiplier=1.5)
    monkeypatch.undo()
    private(tmp_path, lstm(), expected_batch=50, noise_multiplier=1.5, exact_sums=True)


class Turned(nn.Module):
    """Weights that lie transposed in memory, as one taken over from a layer of another kind; one is
    never used."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
        self.head.weight = nn.Parameter(0.1 * torch.randn(64, VOCABULARY).t())
        self.unused = nn.Parameter(torch.randn(40, 50).t())

    def forward(self, ids):
        return self.head(self.embedding(ids))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("way", "expected_batch"), [("eager", 10), ("slow", 10), ("eager", 0.01)])
def test_noise_is_on_weights_that_lie_transposed_in_memory(way, expected_batch, exact, tmp_path):
    torch.manual_seed(0)
    model = Turned()
    fused = torch.optim.Adam(model.parameters(), lr=0.0, fused=True)
    training = private(
        tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.0) if exact else fused,
        expected_batch=expected_batch, noise_multiplier=100.0, exact_sums=exact,
    )  # fmt: skip
    training._passes.way = way
    training.step()
    for name, each in model.named_parameters():
        if each.numel() > 1000:
            noise = each.grad.numpy() * expected_batch / 100
            assert each.grad.stride() == each.stride()
            assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3, name


@pytest.mark.parametrize("trains", [True, False])
def test_weights_that_are_frozen_or_thawed_on_the_way_are_refused_before_anything_is_charged(
    trains, tmp_path
):
    model = OneToken()
    model.norm.weight.requires_grad_(not trains)
    training = private(tmp_path, model)
    training.step()
    model.norm.weight.requires_grad_(trains)
    with pytest.raises(GuaranteeError, match="Put requires_grad back as it was"):
        training.step()
    assert training.ledger.steps == 1
    model.norm.weight.requires_grad_(not trains)
    training.step()
    assert training.guarantee()["standing"] == "as published"  # of a known seed


def test_an_optimizer_that_asks_for_the_loss_itself_is_refused(tmp_path):
    model = OneToken()
    with pytest.raises(UsageError, match="LBFGS asks for the loss"):
        private(tmp_path, model, torch.optim.LBFGS(model.parameters()))


def test_gradients_that_noise_does_not_cover_are_refused(tmp_path):
    model = OneToken()
    model.embedding.sparse = True
    with pytest.raises(UsageError, match="embedding gives sparse gradients"):
        private(tmp_path, model)
    model.embedding.sparse = False
    model.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(UsageError, match="turn is complex"):
        private(tmp_path, model)


def test_a_model_with_fewer_positions_than_are_tried_says_what_to_give(tmp_path):
    class Short(OneToken):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(16, 8)

        def forward(self, ids):
            places = self.places(torch.arange(ids.shape[1]))
            return self.head(self.norm(self.embedding(ids) + places))

    with pytest.raises(UsageError, match=r"rows of 32 positions .* widths=\(7,\)"):
        private(tmp_path, Short())
    private(tmp_path, Short(), widths=(7,)).step()


def test_a_model_under_torch_compile_is_trained_as_what_it_is(tmp_path):
    private(tmp_path, torch.compile(OneToken(), backend="eager")).step()


@pytest.mark.parametrize("wrong", [-1, -100, VOCABULARY, 2**32 + 5])
def test_words_that_the_model_does_not_have_are_refused_before_somebody_is_drawn(wrong, tmp_path):
    with pytest.raises(UsageError, match=rf"id {wrong}, .* has 20"):
        private(tmp_path, texts=[*documents(), torch.tensor([1, wrong, 2])])


def test_texts_may_be_rows_of_a_tensor_and_one_in_two_dimensions_is_refused(tmp_path):
    private(tmp_path, texts=torch.stack([torch.arange(6)] * 40)).step()
    with pytest.raises(UsageError, match=r"shape \(1, 3\).*encoded\[0\]"):
        private(tmp_path / "other", texts=[*documents(), torch.tensor([[1, 2, 3]])])


def test_somebodys_autocast_around_the_start_is_not_taken_for_looking_ahead(tmp_path):
    with torch.autocast("cpu", torch.bfloat16):
        training = private(tmp_path, lstm())
    training.step()


def test_torchs_newer_switches_of_precision_are_no_errors(tmp_path):
    before = torch.backends.fp32_precision
    torch.backends.fp32_precision = "tf32"
    try:
        private(tmp_path, lstm()).step()
    finally:
        torch.backends.fp32_precision = before
        torch.set_float32_matmul_precision("highest")  # or nobody may read the older switch again
