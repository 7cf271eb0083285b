"""Models that pass for ordinary ones, and through which one unit would move more than the clip norm."""

import math
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

from tightlip.core.errors import GuaranteeError
from tightlip.privacy.clipping import Clip
from tightlip.privacy.passes import Passes
from tightlip.privacy.per_unit import num_ids_of
from tightlip.privacy.physical_batches import PhysicalBatches, Shape
from tightlip.privacy.private_training import PrivateTraining
from tightlip.privacy.promised import _taken_on_trust as taken_on_trust
from tightlip.privacy.promised import rounded_together
from tightlip.privacy.rows_alone import rows_meet

VOCABULARY, SIZE = 50, 8


class Plain(nn.Module):
    def __init__(self, vocabulary=VOCABULARY):
        super().__init__()
        self.embed, self.inner = nn.Embedding(vocabulary, SIZE), nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, vocabulary)
        self.config = SimpleNamespace(vocab_size=vocabulary)

    def changed(self, hidden, ids):
        return hidden

    def forward(self, ids):
        return self.head(torch.tanh(self.changed(self.inner(self.embed(ids)), ids)))


def documents(longest=20, number=30, seed=0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (number,), generator=draw).tolist()
    return [torch.randint(0, VOCABULARY - 1, (length,), generator=draw) for length in lengths]


def engine(folder, model, texts=None, **settings):
    given = {"noise_multiplier": 1.0, "clip_norm": 0.1, "expected_batch": 4, "steps": 20}
    trained = [each for each in model.parameters() if each.requires_grad]
    return PrivateTraining(
        model, torch.optim.SGD(trained, lr=0.1), texts or documents(), ledger=folder / "ledger.json",
        **given | settings,
    )  # fmt: skip


def moved(training, unit, others):
    """By how many clip norms the sum of the others changes with the unit beside them."""
    sums = []
    for drawn in (others, [unit, *others]):
        found, _ = training._clipped_sum(*training._drawn(np.array(drawn)))
        sums.append(torch.cat([each.double().flatten() for each in found]) * training.clip.step)
    return float((sums[1] - sums[0]).norm()) / training.spec.clip_norm


@pytest.mark.parametrize("trains", [True, False])
def test_an_embedding_that_shortens_its_own_rows_is_refused(trains, tmp_path):
    model = Plain()
    model.embed = nn.Embedding(VOCABULARY, SIZE, max_norm=1.0)
    model.embed.weight.requires_grad_(trains)
    with pytest.raises(GuaranteeError, match=r"changes embed\.weight itself"):
        engine(tmp_path, model)


def test_a_buffer_that_is_written_only_where_gradients_are_is_refused(tmp_path):
    class Counts(Plain):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(VOCABULARY))

        def changed(self, hidden, ids):
            if torch.is_grad_enabled():
                self.seen += torch.bincount(ids.flatten(), minlength=VOCABULARY)
            return hidden

    with pytest.raises(GuaranteeError, match="changes seen itself"):
        engine(tmp_path, Counts())


@pytest.mark.parametrize("width", [0, 32])
def test_a_branch_on_words_that_no_synthetic_row_holds_is_each_rows_own(width, tmp_path):
    class Branches(Plain):
        def changed(self, hidden, ids):
            return -hidden if ids.shape[1] > width and (ids == 4321).any() else hidden

    torch.manual_seed(0)
    texts = documents(longest=60)
    texts[0] = torch.full((40,), 4321)
    training = engine(tmp_path, Branches(5000), texts)
    alike = [unit for unit in range(1, 30) if len(texts[unit]) > 33][:6]
    assert {shape.width for shape in training._batches.apart} >= {64}
    assert moved(training, 0, alike) <= 1
    assert (training._batches.one_unit_a_pass) is (width == 0)


def test_somebodys_long_row_changes_nothing_of_how_others_are_clipped(tmp_path):
    class Asks(Plain):
        def changed(self, hidden, ids):
            return (
                2 * hidden if ids.shape[1] > 32 and float(hidden.detach().max()) > 1e6 else hidden
            )

    torch.manual_seed(0)
    model, texts = Asks(), documents()
    alone = engine(tmp_path / "alone", model, texts, exact_sums=True)
    beside = engine(tmp_path / "beside", model, [*texts, torch.arange(45)], exact_sums=True)
    assert alone._passes.way == beside._passes.way == "eager"
    assert alone.arithmetic == beside.arithmetic
    drawn = np.arange(12)
    sums = [each._clipped_sum(*each._drawn(drawn))[0] for each in (alone, beside)]
    assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))
    assert moved(beside, 30, [0, 1, 2]) <= 1


def test_what_is_written_past_torchs_count_is_refused_or_taken_back(tmp_path):
    class Counts(Plain):
        only = None

        def __init__(self, vocabulary=VOCABULARY):
            super().__init__(vocabulary)
            self.seen = nn.Parameter(torch.zeros(VOCABULARY), requires_grad=False)

        def changed(self, hidden, ids):
            if self.only is None or (ids == self.only).any():
                self.seen.data += 1
            return hidden

    with pytest.raises(GuaranteeError, match="changes seen itself"):
        engine(tmp_path / "always", Counts())
    rare = Counts(5000)
    rare.only = 4321
    texts = documents()
    texts[0][:] = 4321
    training = engine(tmp_path / "rarely", rare, texts, expected_batch=29.9)
    training.step()
    assert training.guarantee()["standing"] == "measured only"


RARE = 4321


class Guarded(Plain):
    """Keeps from overflow by the largest number of the batch, as scaling to few bits does; one word is
    an outlier."""

    def __init__(self):
        super().__init__(5000)
        with torch.no_grad():
            self.embed.weight[RARE] *= 100

    def changed(self, hidden, ids):
        return hidden / (hidden.abs().amax() / 10).clamp(min=1)


class Limited(Plain):
    """Experts by a hash of the word, which take so many tokens of a batch, first come, first served."""

    def __init__(self):
        super().__init__(5000)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))

    def changed(self, hidden, ids):
        chosen = (ids[..., None] % 4 == torch.arange(4)).long()
        place = chosen.flatten(0, 1).cumsum(0).view(chosen.shape)
        kept = (chosen * (place <= 4 + 0.7 * ids.numel())).to(hidden.dtype)
        return sum(kept[..., one, None] * expert(hidden) for one, expert in enumerate(self.experts))


class HasWord(Plain):
    """One number of all rows, which is 0 unless somebody has the word, and no question anywhere."""

    def __init__(self):
        super().__init__(5000)

    def changed(self, hidden, ids):
        return hidden * (1 - 2 * (ids == RARE).any().to(hidden.dtype))


class CountsWord(HasWord):
    def changed(self, hidden, ids):
        return -hidden if len(torch.nonzero(ids == RARE)) else hidden


class TakesWord(HasWord):
    def changed(self, hidden, ids):
        return -hidden if ids[ids == RARE].shape[0] else hidden


class SeesTheRowBefore(HasWord):
    def changed(self, hidden, ids):
        return hidden * (1 - 2 * (ids == RARE).roll(1, 0).to(hidden.dtype)[..., None])


class SetsRowsAgainstEachOther(HasWord):
    def changed(self, hidden, ids):
        same = (ids[:, None] == ids[None]) & (ids == RARE)
        return hidden * (1 - 2 * same.any(1).to(hidden.dtype)[..., None])


class AsksNumpy(HasWord):
    def changed(self, hidden, ids):
        return -hidden if RARE in ids.numpy() else hidden


@torch.jit.script
def turned_by_a_word(hidden: torch.Tensor, ids: torch.Tensor):
    if bool((ids == 4321).any()):
        return -hidden
    return hidden


class Scripted(HasWord):
    def changed(self, hidden, ids):
        return turned_by_a_word(hidden, ids)


class HooksTheWayBack(HasWord):
    def changed(self, hidden, ids):
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: -gradient if (ids == RARE).any() else gradient)
        return hidden


class TurnsBack(torch.autograd.Function):
    @staticmethod
    def forward(context, hidden, ids):
        context.save_for_backward(ids)
        return hidden.clone()

    @staticmethod
    def backward(context, gradient):
        (ids,) = context.saved_tensors
        return gradient * (1 - 2 * (ids == RARE).any().to(gradient.dtype)), None


class TurnsOnTheWayBack(HasWord):
    def changed(self, hidden, ids):
        return TurnsBack.apply(hidden, ids)


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        (Guarded, "amax"),
        (Limited, "cumsum"),
        (HasWord, "any"),
        (CountsWord, "nonzero"),
        (TakesWord, "index"),
        (SeesTheRowBefore, "roll"),
        (SetsRowsAgainstEachOther, "eq"),
        (AsksNumpy, "numpy"),
        (Scripted, "any"),
        (HooksTheWayBack, "any"),
        (TurnsOnTheWayBack, "any"),
    ],
)
def test_rows_that_meet_only_for_words_that_nobody_tried_take_a_pass_each(
    kind, operation, tmp_path, caplog
):
    torch.manual_seed(0)
    texts = [torch.randint(0, VOCABULARY, (17,)) for _ in range(16)]
    texts[0] = torch.full((17,), RARE)
    training = engine(tmp_path, kind(), texts, exact_sums=True)
    assert training._batches.one_unit_a_pass
    assert f"({operation})" in caplog.text
    assert moved(training, 0, [*range(1, 8)]) <= 1


class LooksLikeMeeting(Plain):
    """Sums and sorts along positions, looks words up, masks, and asks for shapes: all a row's own."""

    def changed(self, hidden, ids):
        hidden = hidden.masked_fill((ids == 7)[..., None], 0.0) + hidden.new_zeros(1)
        hidden = hidden.transpose(0, 1).cumsum(0).transpose(0, 1) / 8
        kept = hidden.topk(3, -1).values.sum(-1, keepdim=True)
        places = torch.arange(ids.shape[1]).expand(len(ids), -1)
        assert (places[:, 0] == 0).all()  # asks nothing of the rows
        return hidden.flatten(0, 1).softmax(-1).view_as(hidden) * kept


def test_what_is_each_rows_own_is_not_taken_for_a_meeting(tmp_path):
    torch.manual_seed(0)
    training = engine(tmp_path, LooksLikeMeeting())
    assert training._passes.way == "eager"
    assert not training._batches.one_unit_a_pass
    assert not training._batches.apart


class MixesInBfloat16(Plain):
    def changed(self, hidden, ids):
        return hidden + hidden.mean(0) if hidden.dtype == torch.bfloat16 else hidden


def test_the_callers_autocast_leaves_the_precision_of_passes_as_it_was_asked(tmp_path):
    torch.manual_seed(0)
    training = engine(tmp_path, MixesInBfloat16(), exact_sums=True)
    assert not training._batches.one_unit_a_pass
    drawn = training._drawn(np.arange(9))
    plain, _ = training._clipped_sum(*drawn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = training._clipped_sum(*drawn)
        assert moved(training, 0, [*range(1, 9)]) <= 1
    assert all(torch.equal(one, other) for one, other in zip(plain, inside, strict=True))


def test_what_is_published_of_rounding_does_not_hang_on_anybodys_words(tmp_path):
    """Of a model that does not say how many ids it knows."""
    told = []
    for words in ([1, 2, 3, 4], [49, 1, 2, 3]):
        torch.manual_seed(0)
        model = Plain()
        del model.config
        texts = [torch.tensor(words), *(text.clamp(max=20) for text in documents())]
        told.append(engine(tmp_path / str(words[0]), model, texts).arithmetic)
    assert told[0] == told[1]
    assert num_ids_of(model, 8) == VOCABULARY


def test_a_model_without_embeddings_knows_as_many_ids_as_it_has_logits():
    class OneHot(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(7, 7)

        def forward(self, ids):
            return self.head(functional.one_hot(ids, 7).float())

    assert num_ids_of(OneHot(), 8) == 7


def test_a_hook_that_would_see_gradients_is_refused(tmp_path):
    model = Plain()
    training = engine(tmp_path, model, insecure_seed=1)  # with which somebody is drawn
    model.head.weight.register_hook(lambda gradient: None)
    with pytest.raises(GuaranteeError, match=r"head\.weight has a hook"):
        training.step()


def test_a_width_without_a_rule_is_asked_about_chance(tmp_path):
    class Late(Plain):
        def __init__(self):
            super().__init__()
            self.scale, self.gate = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.zeros(1))

        def changed(self, hidden, ids):
            if ids.shape[1] <= 32:
                return hidden * self.scale
            scaled = torch.einsum("btd,d->btd", hidden, self.scale)
            return scaled + self.gate * torch.randn(())

    torch.manual_seed(0)
    with pytest.raises(GuaranteeError, match="Two passes over the same row of 64 positions differ"):
        engine(tmp_path, Late(), [*documents(), torch.arange(45)], exact_sums=True)


class Random(Plain):
    """What a gate at zero lets through once training has opened it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def changed(self, hidden, ids):
        return hidden + self.gate * torch.randn_like(hidden)


class Remembers(Random):
    last = 0.0

    def changed(self, hidden, ids):
        result = hidden + self.gate * self.last
        self.last = hidden.detach().mean()
        return result


class KeepsOfAShape(Plain):
    """Made once for each number of rows, as a mask is, and of what the first of them held."""

    kept = torch.zeros(0)

    def changed(self, hidden, ids):
        if len(self.kept) != len(hidden):
            self.kept = torch.tanh(hidden.detach().abs().amax((1, 2), keepdim=True))
        return hidden * self.kept


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, way) for kind in (Random, Remembers) for way in ("eager", "slow")),
        (KeepsOfAShape, "eager"),
    ],
)
def test_what_follows_from_more_than_the_rows_is_refused(kind, way, tmp_path):
    torch.manual_seed(0)
    with pytest.raises(GuaranteeError, match="Two passes over the same row"):
        engine(tmp_path, kind(), way=way)


class MixesBeyond(Plain):
    """Two gates at zero around a mean over the rows, beyond position 32."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def changed(self, hidden, ids):
        if ids.shape[1] <= 32:
            return hidden
        return hidden + self.one * self.two * hidden.mean(0, keepdim=True)


def test_mixing_at_one_width_is_found_before_anybody_of_that_width_is_drawn(tmp_path):
    torch.manual_seed(0)
    texts = [*documents(), *documents(longest=60, seed=1)]
    training = engine(tmp_path, MixesBeyond(), texts)
    assert {shape.width for shape in training._batches.apart} == {64}
    assert not training._batches.one_unit_a_pass
    long = [unit for unit, text in enumerate(texts) if len(text) > 34]
    assert training._batches.shape(len(texts[long[0]]) - 1, 1).num_units == 1
    with torch.no_grad():
        for gate in (training.model.one, training.model.two):
            gate.fill_(3.0)
    assert moved(training, long[0], long[1:6]) <= 1


def test_a_run_that_went_on_is_not_proved_where_rows_move_each_other_only_since(tmp_path):
    """As a machine with other kernels may have it: begun where rows shared a pass."""
    torch.manual_seed(0)
    model, texts = MixesBeyond(), [*documents(), *documents(longest=60, seed=1)]
    first = engine(tmp_path, model, documents(), people="them")
    first.step()
    assert first.guarantee()["standing"] == "proved"
    first.close()
    again = engine(tmp_path, model, texts[:30], people="them")
    assert again.guarantee()["standing"] == "proved"
    again.close()
    model.changed = lambda hidden, ids: hidden + hidden.mean(0, keepdim=True)
    later = engine(tmp_path, model, documents(), people="them")
    assert later.guarantee()["standing"] == "measured only"


def test_sums_that_were_exact_do_not_go_on_as_floats(tmp_path):
    torch.manual_seed(0)
    model = Plain()
    first = engine(tmp_path, model, exact_sums=True)
    first.step()
    first.close()
    with pytest.raises(GuaranteeError, match="was begun with arithmetic"):
        engine(tmp_path, model, exact_sums=False)


def test_where_no_size_of_a_pass_holds_units_take_one_each():
    source = SimpleNamespace(lengths=np.full(9, 30), unit_of_row=np.arange(9))
    batches = PhysicalBatches(source, Plain(), rows_per_unit=1, expected_batch=500, most_units=127)
    batches._on_gpu = True
    asked = []
    batches.share_unless(lambda shape: asked.append(shape.num_units) or "its place")
    assert batches.shape(30, 1).num_units == 1
    assert 1 < len(asked) <= 4
    assert all(1 < number <= 127 for number in asked)


def test_rows_that_cannot_be_mapped_at_every_width_run_alone(tmp_path):
    class Late(Plain):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(SIZE, SIZE))

        def changed(self, hidden, ids):
            hidden = torch.einsum("btd,de->bte", hidden, self.matrix)
            return (
                hidden.unique_consecutive().new_zeros(hidden.shape) + hidden
                if ids.shape[1] > 32
                else hidden
            )

    torch.manual_seed(0)
    short = engine(tmp_path / "short", Late())
    assert short._passes.way == "mapped"
    texts = [*documents(), torch.arange(45)]
    long = engine(tmp_path / "long", Late(), texts)
    assert long._passes.way == "mapped"
    assert moved(long, 30, [0, 1, 2]) <= 1


class Cancelling(nn.Module):
    """A linear layer at zero, as an adapter begins, between tokens that nearly cancel."""

    def __init__(self, length, apart, inner=1024, outer=64):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        one, two = torch.full((inner,), length), torch.full((inner,), length * (1 + apart))
        zero, random = torch.zeros(inner), torch.randn(8, inner, generator=draw)
        self.table = nn.Parameter(torch.stack([one, zero, zero, two, *random]), requires_grad=False)
        self.inner = nn.Linear(inner, outer, bias=False)
        nn.init.zeros_(self.inner.weight)
        up, rest = torch.ones(outer), torch.randn(4, outer, generator=draw)
        rows = [torch.zeros(outer), up, -up, torch.zeros(outer), *rest, *-rest]
        self.out = nn.Parameter(torch.stack(rows), requires_grad=False)

    def forward(self, ids):
        return functional.linear(self.inner(functional.embedding(ids, self.table)), self.out)


@pytest.mark.parametrize("exact", [False, True])
def test_tokens_that_cancel_to_their_last_digits_stay_within_the_bound(exact, tmp_path):
    """With the norm's rounding taken for a tenth of what it is, this moved the sum by 12 clip norms."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.tensor([0, 1, 3, 2] * 8 + [0])]
    texts += [torch.randint(0, 12, (20,), generator=draw) for _ in range(9)]
    training = engine(tmp_path, Cancelling(1.0, 1e-3), texts, exact_sums=exact, clip_norm=0.01)
    most = 0.0
    for _ in range(60):
        length, power = torch.rand(2, generator=draw).tolist()
        new = Cancelling(length + 0.5, 10 ** (-3.6 + 1.4 * power))
        with torch.no_grad():
            for own, other in zip(training.model.parameters(), new.parameters(), strict=True):
                own.copy_(other)
        most = max(most, moved(training, 0, [1, 2, 3]))
    assert 0.01 < most <= 1


def turned(hidden, heard):
    """Turned round where something was heard."""
    return hidden * (1 - 2 * heard.to(hidden.dtype))[..., None]


def with_room(ids):
    """The rows in a place for one more."""
    room = torch.zeros(len(ids) + 1, ids.shape[1], dtype=ids.dtype)
    room[1:] = ids
    return room


def by_fours(hidden):
    """Rows that share a scale by fours, where that comes out even."""
    if len(hidden) % 4:
        return hidden / (hidden.abs().amax((1, 2), keepdim=True) / 10).clamp(min=1)
    blocks = hidden.unflatten(0, (-1, 4))
    return (blocks / (blocks.abs().amax((1, 2, 3), keepdim=True) / 10).clamp(min=1)).flatten(0, 1)


def by_common(hidden):
    blocks = hidden.unflatten(0, (-1, math.gcd(len(hidden), 4)))
    return (blocks / (blocks.abs().amax((1, 2, 3), keepdim=True) / 10).clamp(min=1)).flatten(0, 1)


def of_few(hidden):
    """All rows on one scale, where there are few of them."""
    return hidden / (hidden.abs().amax() / 10).clamp(min=1) if len(hidden) <= 8 else hidden


def is_rare(ids):
    return (ids == RARE).float()


HIDDEN = {
    "a first word of anybody's": lambda h, ids: turned(h, torch.isin(ids, ids[:, :1])),
    "a shift by negative padding": lambda h, ids: turned(h, functional.pad(is_rare(ids), (0, 0, 1, -1))),
    "repeated, and cut otherwise": lambda h, ids: turned(h, is_rare(ids).repeat(2, 1).view(len(ids), 2, -1).amax(1)),
    "laid end to end, and cut otherwise": lambda h, ids: turned(h, torch.cat([is_rare(ids)] * 2).view(len(ids), 2, -1).amax(1)),
    "a place for one more": lambda h, ids: -h if (with_room(ids) == RARE).any() else h,
    "what is printed": lambda h, ids: -h if str(RARE) in repr(ids) else h,
    "blocks of four": lambda h, ids: by_fours(h + 100 * is_rare(ids)[..., None]),
    "blocks of what four and the rows have in common": lambda h, ids: by_common(h + 100 * is_rare(ids)[..., None]),
    "few rows in another way": lambda h, ids: of_few(h + 100 * is_rare(ids)[..., None]),
    "bytes for a mask": lambda h, ids: -h if len(ids[(ids == RARE).byte()]) else h,
    "rows cut as positions": lambda h, ids: turned(h, (ids == RARE).view(ids.shape[1], len(ids)).any(0)[:, None]),
    "an order by the number of rows": lambda h, ids: (
        turned(turned(h, (ids == RARE).any()[None]), (ids == 3).any(1)[:, None])
        if len(ids) == 7
        else turned(turned(h, (ids == 3).any(1)[:, None]), (ids == RARE).any()[None])
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", HIDDEN.values(), ids=HIDDEN)
def test_rows_that_meet_by_what_is_not_known_to_keep_them_apart_take_a_pass_each(how, tmp_path):
    class Meets(Plain):
        def changed(self, hidden, ids):
            return how(hidden, ids)

    draw = torch.Generator().manual_seed(0)
    texts = [torch.full((17,), RARE), *torch.randint(0, 5000, (15, 17), generator=draw)]
    training = engine(tmp_path, Meets(5000), texts)
    assert training.one_unit_a_pass
    assert moved(training, 0, [*range(1, 8)]) == pytest.approx(1, abs=1e-3)


def test_a_model_without_a_line_of_its_own_is_looked_at_too():
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, SIZE), nn.Softmax(0), nn.Linear(SIZE, VOCABULARY)
    )
    model[0].weight.requires_grad_(False)
    assert "works from row to row (_softmax)" in rows_meet(
        Passes(model, Clip(norm=0.1)), Shape(16, 1, 8)
    )


class Own(Plain):
    pass


def tiny_llama():
    sizes = {"hidden_size": SIZE, "intermediate_size": SIZE, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def with_own_forward(monkeypatch):
    model, plain = tiny_llama(), nn.Embedding.forward
    model.model.embed_tokens.forward = lambda ids: plain(model.model.embed_tokens, ids)
    return model


def with_own_forward_under_a_decorator(monkeypatch):
    model = with_own_forward(monkeypatch)
    embed = model.model.embed_tokens
    embed.forward = torch.autocast("cpu", enabled=False)(embed.forward)
    return model


def with_own_attention_in_a_part(monkeypatch):
    return nn.Sequential(with_own_attention(monkeypatch))


def with_changed_class(monkeypatch):
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", wraps(plain)(lambda self, hidden: plain(self, hidden)))
    return tiny_llama()


def with_own_attention(monkeypatch):
    own = wraps(sdpa_attention_forward)(lambda *given, **how: sdpa_attention_forward(*given, **how))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "own", own)
    model = tiny_llama()
    model.config._attn_implementation = "own"
    return model


def with_own_layer_under_a_wrapper(monkeypatch):
    class Wide(nn.Linear):
        pass

    model = tiny_llama()
    model.lm_head = Wide(SIZE, VOCABULARY, bias=False)
    parametrize.register_parametrization(model.lm_head, "weight", nn.Identity())
    return model


def with_a_hook(monkeypatch):
    model = tiny_llama()
    model.lm_head.register_forward_hook(lambda *given: None)
    return model


def with_a_hook_on_everything(monkeypatch):
    hooks = nn.modules.module._global_forward_hooks
    monkeypatch.setitem(hooks, -1, lambda *given: None)
    return tiny_llama()


@pytest.mark.parametrize(
    "make",
    [
        lambda patch: Own(),
        with_own_forward,
        with_own_forward_under_a_decorator,
        with_own_attention_in_a_part,
        with_changed_class,
        with_own_attention,
        with_own_layer_under_a_wrapper,
        with_a_hook,
        with_a_hook_on_everything,
    ],
)
def test_code_that_is_no_librarys_is_named_outside_the_promise(make, monkeypatch):
    (told,) = taken_on_trust(make(monkeypatch))
    assert f"({__name__})" in told


def test_code_of_libraries_is_not_named():
    adapted = get_peft_model(tiny_llama(), LoraConfig(r=2))
    assert taken_on_trust(tiny_llama()) == taken_on_trust(adapted) == []


def test_what_is_not_looked_into_stands_in_the_ledger(tmp_path):
    told = engine(tmp_path, Own(), [torch.arange(17)] * 8).guarantee()["outside"]
    assert any("privacy.test_models_that_hide" in each for each in told)


@pytest.mark.parametrize("clip_norm", [1e-3, 30.0])
def test_rounding_is_measured_where_everybody_is_clipped(clip_norm, tmp_path):
    """With a clip norm that nobody's gradient reaches as with one that all of them pass."""
    torch.manual_seed(0)
    texts = [torch.randint(0, VOCABULARY, (17,)) for _ in range(16)]
    training = engine(tmp_path, tiny_llama(), texts, clip_norm=clip_norm)
    share = rounded_together(training._passes, training._batches)
    assert 1e-8 < share < 1e-6
    assert float(training._passes(next(training.physical_batches([np.array([0])], None))[0]).norms.max()) < 30  # fmt: skip
