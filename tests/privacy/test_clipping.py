import gc
import random
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from opacus.layers import DPGRU, DPLSTM
from torch import nn
from torch.nn import functional

from privacy import tiny_models
from privacy.oracles import check_equal, unit_gradients
from privacy.tiny_models import LAYERS, SIZE, UNCOVERED, VOCABULARY, Chain
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.privacy import norms
from tightlip.privacy.clipping import Clip
from tightlip.privacy.passes import Passes
from tightlip.privacy.per_unit import (
    can_be_mapped,
    clipped_gradients,
    groups_of_rows,
    no_rule_for,
    rows_of,
    synthetic_rows,
)


def built(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def some_rows(seed, num_rows=None, length=None, vocabulary=VOCABULARY):
    """Ids, labels with holes, a row without any, and units of several rows in any order."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_rows, length = num_rows or draw.randint(1, 7), length or draw.randint(2, 9)
    ids = torch.randint(vocabulary, (num_rows, length))
    labels = torch.where(torch.rand(num_rows, length) < 0.2, -100, ids)
    labels[draw.randrange(num_rows)] = -100
    units = torch.tensor([draw.choice([-4, 0, 7, 10**12]) for _ in range(num_rows)])
    return ids, labels, draw.choice([None, units])


def fit_length(name):
    """Positions without rows are clear only where there are not as many as rows."""
    return 11 if name.startswith("positions T") else None


def check_fast(model, ids, labels, *, clip_norm, **options):
    """Equal to the oracle, by the rules and not by the fallback, which would warn."""
    own = {name: options[name] for name in ("units",) if name in options}
    every = unit_gradients(model, ids, labels, mask=options.get("attention_mask"), **own)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = clipped_gradients(model, ids, labels, clip_norm=clip_norm, **options)
    check_equal(found, every, clip_norm, per_layer=options.get("per_layer", False))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_clipped_as_autograd_would(name, seed):
    ids, labels, units = some_rows(seed + 100 * len(name), length=fit_length(name))
    clip_norm = random.Random(seed).choice([0.05, 0.4, 1e6])
    check_fast(built(LAYERS[name], seed), ids, labels, clip_norm=clip_norm, units=units)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([*LAYERS]),
    seed=st.integers(0, 10**6),
    clip_norm=st.floats(1e-3, 10),
    per_layer=st.booleans(),
)
def test_random_shapes_units_and_bounds_agree_with_autograd(name, seed, clip_norm, per_layer):
    ids, labels, units = some_rows(seed, length=fit_length(name))
    model = built(LAYERS[name], seed)
    check_fast(model, ids, labels, clip_norm=clip_norm, units=units, per_layer=per_layer)


@pytest.mark.parametrize("name", ["wide linear", "LSTM of 2", "GRU", "tied", "linear twice"])
def test_norms_of_a_few_units_at_a_time_are_the_same(name, monkeypatch):
    monkeypatch.setattr(norms, "MOST_NUMBERS", 60)
    ids, labels, _ = some_rows(5, num_rows=6, length=4)
    units = torch.tensor([1, 0, 1, 2, 3, 3])
    check_fast(built(LAYERS[name]), ids, labels, clip_norm=0.3, units=units)


@pytest.mark.parametrize("name", ["wide linear", "tied", "LSTM", "linear twice"])
@pytest.mark.parametrize("length", [2, 30])
def test_norms_are_exact_whether_gradients_are_written_out_or_not(name, length):
    ids, labels, units = some_rows(6, num_rows=5, length=length)
    check_fast(built(LAYERS[name]), ids, labels, clip_norm=0.3, units=units)


def steady_dropout(x, p=0.5, training=True, inplace=False):
    """Stands in for dropout: the same places of every row are left out."""
    if not training:
        return x
    places = torch.arange(x[0].numel(), dtype=x.dtype).view(x[0].shape)
    return x * (torch.sin(places * 12.9898) > 2 * p - 1).to(x.dtype) / (1 - p)


class LayerByLayer(nn.Module):
    """Oracle: a recurrent stack as single layers, with dropout between them."""

    def __init__(self, chain):
        super().__init__()
        self.chain = chain

    def named_parameters(self):
        return self.chain.named_parameters()

    def forward(self, ids):
        (rnn,) = self.chain.layers
        hidden, weights = self.chain.embed(ids), rnn.all_weights
        run = torch.lstm if isinstance(rnn, nn.LSTM) else torch.gru
        for number, own in enumerate(weights):
            zeros = torch.zeros(1, len(ids), rnn.hidden_size, dtype=hidden.dtype)
            start = (zeros, zeros) if run is torch.lstm else zeros
            hidden = run(hidden, start, own, rnn.bias, 1, 0.0, True, False, True)[0]
            if number + 1 < len(weights):
                hidden = steady_dropout(hidden, rnn.dropout)
        return self.chain.head(hidden)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_recurrent_layers_is_differentiated(kind, bias, monkeypatch):
    rnn = {"batch_first": True, "dropout": 0.3, "bias": bias}
    model = built(lambda: Chain(kind(SIZE, 4, 3, **rnn), out_size=4)).train()
    ids, labels, units = some_rows(3, num_rows=5, length=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        clipped_gradients(model, ids, labels, clip_norm=0.2)
        monkeypatch.setattr(functional, "dropout", steady_dropout)
        found = clipped_gradients(model, ids, labels, clip_norm=0.2, units=units)
    check_equal(found, unit_gradients(LayerByLayer(model), ids, labels, units=units), 0.2)


def test_dropout_of_one_pass_is_real():
    model = built(lambda: Chain(nn.Dropout(0.5), nn.Linear(SIZE, SIZE))).train()
    ids, labels, _ = some_rows(4, num_rows=4, length=8)
    draws = [clipped_gradients(model, ids, labels, clip_norm=1.0).norms for _ in range(2)]
    assert not torch.equal(*draws)


def opacus_gradients(model, ids, labels):
    """Second oracle: each row's gradient as Opacus writes it out."""
    wrapped = GradSampleModule(model, loss_reduction="sum")
    targets = functional.pad(labels[:, 1:], (0, 1), value=-100)
    losses = functional.cross_entropy(wrapped(ids).transpose(1, 2), targets, reduction="none")
    (losses.sum(1) / (targets != -100).sum(1)).sum().backward()
    per_row = {name: each.grad_sample for name, each in model.named_parameters()}
    return [{name: each[row] for name, each in per_row.items()} for row in range(len(ids))]


def test_opacus_finds_the_same_gradients_of_rows():
    model = built(lambda: Chain(nn.Linear(SIZE, 8), nn.LayerNorm(8), nn.Linear(8, SIZE)))
    ids = torch.randint(VOCABULARY, (5, 7))
    found = clipped_gradients(model, ids, ids, clip_norm=0.3)
    check_equal(found, opacus_gradients(model, ids, ids), 0.3)


@pytest.mark.parametrize(("ours", "theirs"), [(nn.LSTM, DPLSTM), (nn.GRU, DPGRU)])
def test_opacus_finds_the_same_gradients_of_recurrent_layers(ours, theirs):
    model = built(lambda: Chain(ours(SIZE, 5, 2, batch_first=True), out_size=5))
    other = built(lambda: Chain(theirs(SIZE, 5, 2, batch_first=True), out_size=5))
    values = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        parameter.data.copy_(values[name])
    ids = torch.randint(VOCABULARY, (4, 6))
    every = opacus_gradients(other, ids, ids)
    found = clipped_gradients(model, ids, ids, clip_norm=0.3)
    check_equal(found, [{name: each[name] for name in values} for each in every], 0.3)


@pytest.mark.parametrize("name", UNCOVERED)
def test_a_parameter_that_no_rule_covers_is_named_and_clipped_exactly(name):
    model = built(UNCOVERED[name])
    # As many positions as rows: shapes alone do not tell time from rows.
    ids, labels, _ = some_rows(8, num_rows=5, length=5)
    units = torch.tensor([0, 1, 1, 2, 0])
    with pytest.warns(UserWarning, match=f"No fast rule covers {name} "):
        found = clipped_gradients(model, ids, labels, clip_norm=0.3, units=units)
    check_equal(found, unit_gradients(model, ids, labels, units=units), 0.3)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("name", [each for each in UNCOVERED if "weight_ih" not in each])
def test_what_no_rule_covers_is_clipped_exactly_a_whole_pass_at_once(name, per_layer):
    model = built(UNCOVERED[name])
    ids, labels, _ = some_rows(8, num_rows=6, length=5)
    units = torch.tensor([0, 0, 1, 1, 2, 2])
    assert no_rule_for(model, ids) is not None
    assert can_be_mapped(model, ids)
    rows = rows_of(next(groups_of_rows(units, 3)), ids, labels, None)
    found = Passes(model, Clip(norm=0.3, per_layer=per_layer), way="mapped")(rows)
    expected = unit_gradients(model, ids, labels, units=units)
    check_equal(found, expected, 0.3, per_layer=per_layer)


def test_rows_that_are_mapped_meet_nobody():
    """A model that mixes the rows of a batch has nothing to mix where each row is a batch."""
    model = built(
        lambda: Chain(nn.Linear(SIZE, SIZE), tiny_models.Centred(), nn.Linear(SIZE, SIZE))
    )
    ids, labels, units = some_rows(10, num_rows=4, length=6)
    units = torch.arange(4)
    rows = rows_of(next(groups_of_rows(units, 4)), ids, labels, None)
    found = Passes(model, Clip(norm=0.3), way="mapped")(rows)
    check_equal(found, unit_gradients(model, ids, labels, units=units), 0.3)


def test_a_model_that_vmap_cannot_run_is_not_mapped():
    """torch's own LSTM is one operation that vmap does not know."""
    ids, _, _ = some_rows(10, num_rows=4, length=6)
    assert not can_be_mapped(built(UNCOVERED["layers.0.layer.weight_ih_l0"]), ids)


def test_a_parameter_used_by_an_operation_nobody_sees_is_found_out():
    model = built(lambda: Chain(tiny_models.Hidden()))
    ids, labels, units = some_rows(9, num_rows=4, length=4)
    with pytest.warns(UserWarning, match=r"layers\.0\.scale"):
        found = clipped_gradients(model, ids, labels, clip_norm=0.3, units=units, per_layer=True)
    check_equal(found, unit_gradients(model, ids, labels, units=units), 0.3, per_layer=True)


@pytest.mark.parametrize("layer", [tiny_models.Centred, tiny_models.Generated, tiny_models.Experts])
def test_rows_that_meet_inside_the_model_are_run_alone(layer):
    model = built(lambda: Chain(nn.Linear(SIZE, SIZE), layer(), nn.Linear(SIZE, SIZE)))
    ids, labels, units = some_rows(10, num_rows=4, length=6)
    with pytest.warns(UserWarning, match="No fast rule covers"):
        found = clipped_gradients(model, ids, labels, clip_norm=0.3, units=units)
    check_equal(found, unit_gradients(model, ids, labels, units=units), 0.3)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("sorts", "moves rows or tokens about"),
        ("hides", r"hidden\.scale \(used by an operation that cannot be seen"),
        ("generates", r"generated\.bias \(it stands beside a weight that is computed"),
    ],
)
def test_a_path_that_only_real_tokens_take_is_found_out_when_it_is_taken(way, message):
    model = built(lambda: tiny_models.Rare(way))
    ids, labels, _ = some_rows(11, num_rows=4, length=4)
    made_up = synthetic_rows(model, ids).flatten().tolist()
    model.rare = next(token for token in range(VOCABULARY) if token not in made_up)
    ids[ids == model.rare] = made_up[0]
    check_fast(model, ids, labels, clip_norm=0.3)
    ids[2, 3] = model.rare
    with pytest.warns(UserWarning, match=message):
        found = clipped_gradients(model, ids, labels, clip_norm=0.3)
    check_equal(found, unit_gradients(model, ids, labels), 0.3)


@pytest.mark.parametrize("way", ["mixes", "sorts"])
def test_what_a_model_does_with_a_mask_is_checked_with_a_mask(way):
    model = built(lambda: tiny_models.Masked(way))
    ids, labels, _ = some_rows(12, num_rows=5, length=5)
    check_fast(model, ids, labels, clip_norm=0.3)
    mask = (torch.arange(5)[None] < torch.tensor([3, 5, 2, 4, 1])[:, None]).long()
    with pytest.warns(UserWarning, match="No fast rule covers"):
        found = clipped_gradients(model, ids, labels, clip_norm=0.3, attention_mask=mask)
    check_equal(found, unit_gradients(model, ids, labels, mask=mask), 0.3)


def test_a_mask_that_each_row_uses_for_itself_is_no_obstacle():
    model = built(lambda: tiny_models.Masked("multiplies"))
    ids, labels, units = some_rows(13, num_rows=5, length=5)
    mask = (torch.rand(5, 5) < 0.7).long()
    check_fast(model, ids, labels, clip_norm=0.3, attention_mask=mask, units=units)


def test_a_verdict_does_not_outlive_the_model_it_was_about():
    model = built(lambda: Chain(nn.Linear(SIZE, SIZE), nn.Identity()))
    ids, labels, _ = some_rows(14, num_rows=4, length=4)
    check_fast(model, ids, labels, clip_norm=0.3)
    model.layers[1] = tiny_models.Centred()
    with pytest.warns(UserWarning, match="No fast rule"):
        found = clipped_gradients(model, ids, labels, clip_norm=0.3)
    check_equal(found, unit_gradients(model, ids, labels), 0.3)
    model.layers[1] = tiny_models.Stretch().double().requires_grad_(False)
    check_fast(model, ids, labels, clip_norm=0.3)
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"layers\.1\.scale"):
        clipped_gradients(model, ids, labels, clip_norm=0.3)


def test_what_happens_in_training_only_is_checked_in_training():
    class CentredInTraining(tiny_models.Centred):
        def forward(self, x):
            return super().forward(x) if self.training else x

    model = built(lambda: Chain(CentredInTraining(), nn.Linear(SIZE, SIZE))).eval()
    ids, labels, _ = some_rows(15, num_rows=4, length=4)
    check_fast(model, ids, labels, clip_norm=0.3)
    model.train()
    with pytest.warns(UserWarning, match="No fast rule"):
        found = clipped_gradients(model, ids, labels, clip_norm=0.3)
    check_equal(found, unit_gradients(model, ids, labels), 0.3)


def test_a_hook_that_would_be_shown_a_gradient_is_refused():
    model = built(LAYERS["linear"])
    ids, labels, _ = some_rows(16, num_rows=4, length=4)
    check_fast(model, ids, labels, clip_norm=0.3)
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(GuaranteeError, match=r"head\.weight has a hook"):
        clipped_gradients(model, ids, labels, clip_norm=0.3)


def test_shapes_that_leave_it_open_whose_row_is_whose_are_not_guessed():
    model = built(LAYERS["positions T"])
    ids, labels, _ = some_rows(17, num_rows=6, length=6)
    check_fast(model, ids[:4], labels[:4], clip_norm=0.3)
    with pytest.warns(UserWarning, match=r"layers\.0\.table\.weight"):
        found = clipped_gradients(model, ids, labels, clip_norm=0.3)
    check_equal(found, unit_gradients(model, ids, labels), 0.3)
    check_fast(model, ids[:3], labels[:3], clip_norm=0.3)


def test_an_unused_parameter_is_zero_and_a_frozen_one_is_absent():
    model = built(LAYERS["tied"])
    model.spare = nn.Linear(3, 3).double()
    model.layers[0].bias.requires_grad_(False)
    ids, labels, _ = some_rows(18, num_rows=4)
    found = check_fast(model, ids, labels, clip_norm=0.3)
    assert [*found.gradients] == [
        "embed.weight", "layers.0.weight", "head.bias", "spare.weight", "spare.bias",
    ]  # fmt: skip
    assert not found.gradients["spare.weight"].any()


def test_bias_alone_may_be_trained():
    model = built(lambda: Chain(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    ids, labels, units = some_rows(19, num_rows=4)
    check_fast(model, ids, labels, clip_norm=0.1, units=units)


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        clipped_gradients(
            built(LAYERS["linear"]).requires_grad_(False),
            *[torch.ones(1, 2).long()] * 2,
            clip_norm=1,
        )


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_norm_is_refused_by_name(kind):
    model = Chain(nn.Linear(SIZE, SIZE), kind(SIZE))
    with pytest.raises(UsageError, match=r"layers\.1 is a .*BatchNorm.*LayerNorm"):
        clipped_gradients(model, *[torch.ones(2, 3).long()] * 2, clip_norm=1.0)


@pytest.mark.parametrize("name", ["LSTM", "tied", "layers.0.scale"])
def test_model_modes_and_gradients_stay_as_they_were(name):
    model = built({**LAYERS, **UNCOVERED}[name])
    model.train()
    model.head.eval()
    model.embed.weight.grad = torch.full_like(model.embed.weight, 7.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clipped_gradients(model, *[torch.ones(2, 3).long()] * 2, clip_norm=1.0)
    assert [module.training for module in (model, model.embed, model.head)] == [True, True, False]
    assert bool((model.embed.weight.grad == 7).all())
    assert all(each.grad is None for each in model.layers.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": torch.ones(2, 3).long()}, "labels"),
        ({"input_ids": torch.ones(4).long(), "labels": torch.ones(4).long()}, "input_ids"),
        ({"input_ids": torch.ones(0, 4).long(), "labels": torch.ones(0, 4).long()}, "input_ids"),
        ({"units": torch.zeros(3).long()}, "units has shape"),
        ({"attention_mask": torch.ones(2, 5)}, "attention_mask has shape"),
        ({"attention_mask": torch.ones(2, 4)}, "takes no attention_mask"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(changed, message):
    arguments = {"input_ids": torch.ones(2, 4).long(), "labels": torch.ones(2, 4).long()}
    with pytest.raises(UsageError, match=message):
        clipped_gradients(built(LAYERS["linear"]), **{**arguments, "clip_norm": 1.0, **changed})


def test_logits_of_another_shape_are_refused():
    model = built(lambda: nn.Sequential(nn.Embedding(VOCABULARY, SIZE), nn.Flatten()))
    with pytest.raises(UsageError, match="one row of numbers per id"):
        clipped_gradients(model, *[torch.ones(2, 4).long()] * 2, clip_norm=1.0)


@pytest.mark.parametrize("name", ["linear", "LSTM", "tied", "positions T", "layers.0.scale"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 1), (3, 2)])
def test_rows_of_one_token_and_batches_of_one_row_are_rows_like_others(name, shape):
    model = built({**LAYERS, **UNCOVERED}[name])
    ids = torch.randint(VOCABULARY, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = clipped_gradients(model, ids, ids, clip_norm=0.3)
    check_equal(found, unit_gradients(model, ids, ids), 0.3)
    assert shape[1] > 1 or not found.norms.any()


@pytest.mark.parametrize("name", ["linear", "layers.0.scale"])
def test_norms_and_losses_come_in_the_order_of_unit_ids(name):
    model = built({**LAYERS, **UNCOVERED}[name])
    ids, labels, _ = some_rows(20, num_rows=7, length=5)
    units = torch.tensor([10**15, -3, 5, 10**15, -(2**62), -3, 10**15])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = clipped_gradients(model, ids, labels, clip_norm=0.3, units=units)
        alone = [
            clipped_gradients(model, ids[own], labels[own], clip_norm=0.3, units=units[own])
            for own in (units == unit for unit in sorted({*units.tolist()}))
        ]
    assert torch.allclose(found.norms, torch.cat([each.norms for each in alone]))
    assert torch.allclose(found.losses, torch.cat([each.losses for each in alone]))


@pytest.mark.parametrize("name", ["tied", "LSTM of 2", "layers.0.scale"])
def test_nothing_of_a_batch_is_held_after_a_call(name):
    model = built({**LAYERS, **UNCOVERED}[name])
    seen = []
    hooks = [
        module.register_forward_hook(lambda _, __, output: seen.append(weakref.ref(output)))
        for module in (model.embed, model.head)
    ]
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clipped_gradients(model, *[torch.ones(3, 4).long()] * 2, clip_norm=1.0)
        assert len(seen) > 4
        assert not [each for each in seen if each() is not None]
    finally:
        gc.enable()
        [hook.remove() for hook in hooks]
