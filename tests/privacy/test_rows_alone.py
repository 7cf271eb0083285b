"""Who shares a pass with a unit leaves its loss and its gradient as they were, to the bit."""

import copy
import logging
import random

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from privacy.test_clipping_families import FAMILIES, GROUPED, stock
from tightlip.core.devices import deterministic
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.privacy import PrivateTraining, layers, per_unit, rows_alone, watching
from tightlip.privacy.clipping import Clip
from tightlip.privacy.ledger import read_ledger
from tightlip.privacy.passes import Passes
from tightlip.privacy.per_unit import no_rule_for
from tightlip.privacy.physical_batches import PhysicalBatches, Shape
from tightlip.privacy.rows_alone import first_change, perturbed, rows_meet, synthetic_units
from tightlip.privacy.sources import Documents

VOCABULARY, SIZE = 31, 8
NAMES = (
    *("GPT2LMHeadModel", "LlamaForCausalLM", "GemmaForCausalLM", "Qwen3ForCausalLM"),
    *("TransformerForCausalLM", "LSTMForCausalLM", "GRUForCausalLM", "GPTNeoXForCausalLM"),
)


def family(name):
    if name in FAMILIES:
        return stock(name).float()
    torch.manual_seed(0)
    config = transformers.GemmaConfig(**GROUPED, head_dim=4)
    return transformers.GemmaForCausalLM(config).eval()


def documents(count=40, longest=16, seed=0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=draw) for length in lengths]


def engine(tmp_path, model, texts=None, **settings):
    given = {"noise_multiplier": 0.0, "clip_norm": 0.1, "expected_batch": 1, "steps": 20}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return PrivateTraining(
        model, optimizer, texts or documents(), ledger=tmp_path / "ledger.json", **given | settings
    )


def seen_of(training, drawn, unit, text):
    """Loss and norm of one unit in a step of these, found by its own words."""
    for batch, _ in training.physical_batches(*training._drawn(np.array(drawn))):
        found = training._passes(batch)
        for slot in range(batch.layout.num_units):
            row = batch.ids_BT[slot * batch.layout.rows_per_unit]
            if torch.equal(row[: len(text) - 1], text[:-1]):
                return batch.ids_BT.shape, found.losses[slot].clone(), found.norms[slot].clone()
    raise AssertionError(f"unit {unit} is in no pass")


@pytest.mark.filterwarnings("ignore:No fast rule")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_units_loss_and_norm_are_bitwise_its_own_whoever_is_drawn(name, bf16, tmp_path):
    texts = documents()
    unit = max(range(len(texts)), key=lambda one: (len(texts[one]) == 12, one))
    others = [one for one in range(len(texts)) if one != unit]
    training = engine(tmp_path, family(name), texts, bf16=bf16)
    assert not training._batches.one_unit_a_pass
    alone = seen_of(training, [unit], unit, texts[unit])
    draw = np.random.default_rng(1)
    for size in (3, 9, 39):
        drawn = [*draw.choice(others, size, replace=False), unit]
        for order in (drawn, drawn[::-1]):
            shape, loss, norm = seen_of(training, order, unit, texts[unit])
            assert shape == alone[0]
            assert torch.equal(loss, alone[1])
            assert torch.equal(norm, alone[2])


class Gated(nn.Module):
    """Rows (or positions) that see their mean, between two gates that only noise will open: while
    both are zero, so are their gradients."""

    def __init__(self, along, *, covered=True):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, VOCABULARY)
        self.inward, self.outward = (nn.Parameter(torch.zeros(SIZE)) for _ in range(2))
        self.scale = nn.Parameter(torch.zeros(SIZE))
        self.along, self.covered = along, covered

    def forward(self, ids):
        hidden = self.embed(ids)
        mean = (self.inward * hidden).mean(self.along, keepdim=True).expand_as(hidden)
        hidden = hidden + self.outward * mean
        return self.head(hidden if self.covered else torch.maximum(hidden, self.scale - 1e9))

    def open(self):
        with torch.no_grad():
            self.inward.fill_(5.0), self.outward.fill_(5.0)


def sum_of(training, drawn):
    """The clipped sum of a step's units, and the weights as they were."""
    start = copy.deepcopy(training.model.state_dict())
    training._sampler.draw = lambda: np.array(drawn)
    before = torch.cat([each.detach().flatten().clone() for each in training.model.parameters()])
    training.step()
    after = torch.cat([each.detach().flatten() for each in training.model.parameters()])
    training.model.load_state_dict(start)
    return (before - after) / 1.0


def most_moved(training, texts):
    """How far one unit more moves the sum, at most, in clip norms."""
    draw, moved = np.random.default_rng(0), []
    for one in range(0, len(texts), 8):
        others = draw.choice([each for each in range(len(texts)) if each != one], 12, replace=False)
        apart = sum_of(training, others) - sum_of(training, [*others, one])
        moved.append(float(apart.norm()) / training.spec.clip_norm)
    return max(moved)


@pytest.mark.filterwarnings("ignore:No fast rule")
@pytest.mark.parametrize("covered", [True, False])
@pytest.mark.parametrize("along", [0, 1])
def test_a_gate_that_opens_in_training_lets_nobody_move_others(along, covered, tmp_path, caplog):
    torch.manual_seed(0)
    # A few are far longer than the rest: were rows padded to them, they would move everybody.
    texts = [documents(longest=6 if one % 8 else 99, seed=one)[-1] for one in range(40)]
    model = Gated(along, covered=covered)
    with caplog.at_level(logging.WARNING, logger="tightlip"):
        training = engine(tmp_path, model, texts, noise_multiplier=0.0)
    # Uncovered rows run alone anyway; positions are a unit's own.
    is_told = "Units take a pass each" in caplog.text
    assert is_told == training._batches.one_unit_a_pass == (along == 0 and covered)
    model.open()
    assert most_moved(training, texts) <= 1 + 1e-4


class OpensLate(Gated):
    """No operation across rows is there to be seen until a weight has grown."""

    def forward(self, ids):
        return (
            super().forward(ids)
            if float(self.scale.detach().max()) > 1
            else self.head(self.embed(ids))
        )

    def open(self):
        super().open()
        with torch.no_grad():
            self.scale.fill_(5.0)


def test_a_gate_that_opens_late_takes_the_promise_back(tmp_path):
    torch.manual_seed(0)
    model = OpensLate(0)
    training = engine(tmp_path, model, noise_multiplier=1.0, insecure_seed=1)
    assert not training._batches.one_unit_a_pass
    assert training.exact_record()["epsilon"] is not None
    training.step()
    model.open()
    record = training.guarantee()
    assert (record["standing"], record["epsilon"]) == ("measured only", None)
    assert "The trained model mixes rows" in record["because"]
    assert read_ledger(tmp_path / "ledger.json")["because"] == record["because"]


def test_weights_are_moved_and_put_back_to_the_bit_also_after_an_error():
    model = Gated(0)
    before = {name: each.clone() for name, each in model.state_dict().items()}

    def moved_and_stopped():
        with perturbed(dict(model.named_parameters()), 1.0):
            assert all(
                bool((each != before[name]).all()) for name, each in model.named_parameters()
            )
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        moved_and_stopped()
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


class MixesInBfloat16(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, VOCABULARY)

    def forward(self, ids):
        hidden = self.embed(ids)
        if torch.is_autocast_enabled("cpu"):
            hidden = torch.tanh(hidden - hidden.mean(0, keepdim=True))
        return self.head(hidden)


@pytest.mark.filterwarnings("ignore:No fast rule")
def test_the_rules_are_asked_in_the_precision_of_the_run():
    torch.manual_seed(0)
    model, ids = MixesInBfloat16(), torch.zeros(1, 9, dtype=torch.long) + VOCABULARY - 1
    assert no_rule_for(model, ids) is None
    assert "embed.weight" in str(no_rule_for(model, ids, bf16=True))


class RoundsByShape(nn.Module):
    """What a GPU does in few bits: other kernels for other numbers of rows, so other last bits; here by
    so much that no thirty layers are needed to tell."""

    def __init__(self, dtype):
        super().__init__()
        self.embed = nn.Embedding(9 * VOCABULARY, SIZE).to(dtype).requires_grad_(False)
        self.inner, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, VOCABULARY)

    def forward(self, ids):
        hidden = self.embed(ids).float() * (1.0 if len(ids) == 1 else 1.1)
        return self.head(torch.tanh(self.inner(hidden)))


@pytest.mark.parametrize(("dtype", "has_rules"), [(torch.bfloat16, True), (torch.float32, False)])
def test_bits_that_follow_from_a_pass_shape_are_no_missing_rule_where_bits_are_few(
    dtype, has_rules
):
    torch.manual_seed(0)
    model, ids = RoundsByShape(dtype), torch.zeros(1, 9, dtype=torch.long)
    assert (no_rule_for(model, ids, beside=True) is None) == has_rules
    # Who does not ask by other means whether rows meet gets the strict answer.
    assert no_rule_for(model, ids) is not None


def of_next_row(hidden):
    num_rows, width, _ = hidden.shape
    after = (torch.arange(num_rows) + 1).clamp(max=num_rows - 1)
    return nn.functional.embedding(
        after[:, None] * width + torch.arange(width), hidden.flatten(0, 1)
    )


def of_pair(hidden):
    """Of the other one of two rows; where a last one has none, of itself."""
    paired = hidden[: len(hidden) // 2 * 2].unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    return torch.cat([paired, hidden[len(paired) :]])


def pooled(pool):
    return lambda hidden: pool(hidden.permute(1, 2, 0)).permute(2, 0, 1)


MEETING = {
    "next row": of_next_row,
    "max pool": pooled(lambda x: nn.functional.max_pool1d(x, 3, 1, 1)),
    "average pool": pooled(lambda x: nn.functional.avg_pool1d(x, 3, 1, 1)),
    "larger": pooled(lambda x: nn.functional.interpolate(x, size=x.shape[2], mode="linear", align_corners=True)),
    "linear": lambda x: x + nn.functional.linear(x.flatten(0, 1).T, torch.ones(1, x.shape[0] * x.shape[1])).T,
}  # fmt: skip


class Hears(nn.Module):
    """Rows that hear of others, without a gradient, and of nothing where these are as they are."""

    def __init__(self, others_of):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, SIZE).bfloat16().requires_grad_(False)
        self.inner, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, VOCABULARY)
        self.others_of = others_of

    def forward(self, ids):
        hidden = self.embed(ids).float()
        with torch.no_grad():
            hidden = hidden + 5 * (self.others_of(hidden) - hidden)
        return self.head(torch.tanh(self.inner(hidden)))


@pytest.mark.parametrize("others_of", [of_next_row, of_pair])
def test_a_unit_that_hears_of_some_places_only_is_seen_whatever_is_drawn(others_of):
    torch.manual_seed(0)
    passes = Passes(Hears(others_of), Clip(norm=0.1, exact=True))
    for seed in range(40):
        passes.draws = random.Random(seed)
        for num_units in (2, 4, 8):
            assert first_change(passes, Shape(9, 1, num_units), VOCABULARY) is not None
    assert first_change(Passes(Hears(torch.clone), Clip(norm=0.1)), Shape(9, 1, 8), 31) is None


@pytest.mark.parametrize("how", MEETING)
def test_operations_along_rows_are_seen_as_such(how, monkeypatch):
    for module in (layers, watching):  # as on a GPU
        monkeypatch.setattr(module, "missing_columns", lambda like, size: -size % 64)
    torch.manual_seed(0)
    passes = Passes(Hears(MEETING[how]), Clip(norm=0.1))
    assert rows_meet(passes, Shape(9, 1, 8)) is not None
    assert rows_meet(Passes(Hears(torch.clone), Clip(norm=0.1)), Shape(9, 1, 8)) is None


@pytest.mark.parametrize("exact", [False, True])
def test_units_whose_sums_are_not_those_of_each_are_refused(exact, tmp_path, monkeypatch):
    """The last of several checks, which none but a model that got past the others meets."""
    torch.manual_seed(0)
    monkeypatch.setattr(rows_alone, "rows_meet", lambda *given: None)
    monkeypatch.setattr(rows_alone, "first_change", lambda *given: None)
    monkeypatch.setattr(per_unit, "no_rule_for", lambda *given, **how: None)
    model = Hears(of_pair)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with pytest.raises(GuaranteeError, match="as in a model that mixes rows"):
        PrivateTraining(
            *(model, optimizer, documents()),
            ledger=tmp_path / "ledger.json",
            noise_multiplier=1.0,
            expected_batch=8,
            steps=3,
            exact_sums=exact,
        )


@pytest.mark.parametrize("seed", range(5))
def test_shapes_are_a_units_own_and_nobody_is_left_out(seed):
    draw = np.random.default_rng(seed)
    texts = [torch.arange(n) for n in draw.integers(2, 100, 80)]
    source = Documents(texts, [int(each) for each in draw.integers(0, 25, 80)])
    batches = PhysicalBatches(
        source, nn.Linear(1, 1), rows_per_unit=int(draw.integers(1, 9)), widths=(20, 50)
    )
    shapes = {}
    for _ in range(6):
        rows_of = [
            np.flatnonzero(source.unit_of_row == unit)[:9]
            for unit in draw.permutation(source.unit_of_row.max() + 1)[: draw.integers(1, 20)]
        ]
        rows_of = [rows[: batches._rows_per_unit] for rows in rows_of]
        given = [(shape_of(batch), batch) for batch, _ in batches.of(rows_of)]
        for shape, batch in given:
            assert shape[2] * batch.layout.rows_per_unit == len(batch.ids_BT)
            assert shapes.setdefault(shape[:2], shape[2]) == shape[2]
        lengths = sorted(int(source.lengths[row]) for rows in rows_of for row in rows)
        found = [
            int((row != -100).sum()) for _, batch in given for row in batch.targets_BT
        ]  # rows without a target are empty places
        assert sorted(length for length in found if length) == lengths


def shape_of(batch):
    return batch.ids_BT.shape[1], batch.layout.rows_per_unit, batch.layout.num_units


class FewPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, VOCABULARY)
        self.positions = nn.Embedding(20, SIZE)

    def forward(self, ids):
        return self.head(self.embed(ids) + self.positions(torch.arange(ids.shape[1])))


def test_a_model_with_fewer_positions_than_the_padding_says_what_to_do(tmp_path):
    texts = [torch.arange(20) for _ in range(9)]
    with pytest.raises(UsageError, match=r"rows of 32 positions.*widths=\(19,\)"):
        engine(tmp_path, FewPositions(), texts)
    engine(tmp_path, FewPositions(), texts, widths=(19,)).step()


def test_the_deterministic_setting_is_put_back_and_raises_nothing():
    fills = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), fills.fill_uninitialized_memory

    def set_and_stopped():
        with deterministic("cuda"):
            mode = torch.get_deterministic_debug_mode()
            assert (mode, fills.fill_uninitialized_memory) == (1, False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        set_and_stopped()
    assert (torch.get_deterministic_debug_mode(), fills.fill_uninitialized_memory) == before


class OneSided(nn.Module):
    """A gate at zero that opens on one side only, and hides there from weights moved to the other."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, SIZE)
        self.gate = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(SIZE, VOCABULARY)

    def forward(self, ids):
        hidden = self.inner(self.embed(ids))
        return self.head(hidden + torch.relu(self.gate) * hidden.mean(0, keepdim=True))


@pytest.mark.filterwarnings("ignore:No fast rule")
@pytest.mark.parametrize("seed", range(4))
def test_a_gate_that_opens_on_one_side_is_found_on_either(seed, tmp_path):
    torch.manual_seed(seed)
    training = engine(tmp_path, OneSided(), noise_multiplier=1.0)
    assert training._batches.one_unit_a_pass or training._passes.way in ("mapped", "slow")


def test_what_is_asked_does_not_hang_on_the_text(tmp_path):
    torch.manual_seed(0)
    short = engine(tmp_path / "a", Gated(1), documents(longest=6, seed=1), noise_multiplier=1.0)
    long = engine(tmp_path / "b", Gated(1), documents(longest=90, seed=1), noise_multiplier=1.0)
    assert short._batches.asked() == long._batches.asked()
    assert short._passes.way == long._passes.way


@pytest.mark.parametrize("vocabulary", [97, 131])
@pytest.mark.parametrize("width", [3, 5])
def test_norms_do_not_hang_on_the_place_where_rows_begin_anywhere(width, vocabulary):
    """An odd vocabulary and odd widths: a unit's logits begin at any number of bytes."""
    torch.manual_seed(0)
    config = LSTMConfig(vocab_size=vocabulary, embedding_size=8, hidden_size=8, num_layers=1)
    passes = Passes(LSTMForCausalLM(config).eval(), Clip(norm=0.1))
    batch = synthetic_units(Shape(width, 1, 8), vocabulary, slice(None), torch.device("cpu"))
    for seed in range(40):
        with perturbed(passes.parameters, 1.0, seed):
            norms = passes(batch).norms
        assert (norms == norms[0]).all()
