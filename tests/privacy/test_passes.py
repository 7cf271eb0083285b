"""Every way to run a physical batch gives the sums that plain autograd gives."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    masking_utils,
)

from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.models.configurations import GRUConfig, TransformerConfig
from tightlip.models.recurrent import GRUForCausalLM
from tightlip.models.transformer import TransformerForCausalLM
from tightlip.privacy import layers, watching
from tightlip.privacy.clipping import Clip
from tightlip.privacy.layers import Layout
from tightlip.privacy.passes import Passes, Physical, _no_waiting, never_packed

VOCABULARY = 30


def transformer():
    return TransformerForCausalLM(
        TransformerConfig(
            vocab_size=VOCABULARY, hidden_size=8, num_heads=2, num_layers=2,
            max_position_embeddings=12,
        )
    )  # fmt: skip


MODELS = {
    "lstm": lambda: LSTMForCausalLM(
        LSTMConfig(vocab_size=VOCABULARY, embedding_size=6, hidden_size=7, num_layers=2)
    ),
    "gru": lambda: GRUForCausalLM(
        GRUConfig(vocab_size=VOCABULARY, embedding_size=6, hidden_size=7, num_layers=1)
    ),
    "transformer": transformer,
    "adapters": lambda: get_peft_model(
        transformer(), LoraConfig(r=2, target_modules="all-linear")
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=8, n_head=2, n_layer=1, n_positions=12, resid_pdrop=0,
            embd_pdrop=0, attn_pdrop=0,
        )
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=12,
        )
    ),
}  # fmt: skip


def batch(seed, *, num_units=3, rows_per_unit=2, width=5):
    draw = torch.Generator().manual_seed(seed)
    shape = (num_units * rows_per_unit, width)
    ids = torch.randint(0, VOCABULARY, shape, generator=draw)
    targets = torch.randint(0, VOCABULARY, shape, generator=draw)
    targets[0, 2:] = -100
    targets[-1] = -100  # the last unit has one row fewer
    own = torch.full((num_units,), rows_per_unit)
    own[-1] -= 1
    return Physical.of(ids, targets, own, Layout(num_units=num_units, rows_per_unit=rows_per_unit))


@pytest.mark.parametrize("name", MODELS)
def test_the_compiled_pass_is_the_eager_one_also_on_other_batches_and_weights(name, monkeypatch):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    # The traced graph itself; what a compiler makes of it is the compiler's own affair.
    monkeypatch.setattr(torch, "compile", lambda traced, **options: traced)
    clip = Clip(norm=0.05)
    eager, compiled = Passes(model, clip), Passes(model, clip, way="compile")
    for seed in range(3):
        one, other = eager(batch(seed)), compiled(batch(seed))
        torch.testing.assert_close(other.norms, one.norms)
        torch.testing.assert_close(other.gradients, one.gradients)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))


@pytest.mark.parametrize("name", ["lstm", "gru", "transformer", "llama"])
@pytest.mark.parametrize("way", ["eager", "compile"])
def test_without_a_clip_the_pass_is_plain_training(name, way, monkeypatch):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    monkeypatch.setattr(torch, "compile", lambda traced, **options: traced)
    given = batch(0)
    logits = model(given.ids_BT, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), given.targets_BT.flatten(), reduction="none", ignore_index=-100
    )
    (losses * given.weights_BT.flatten()).sum().backward()
    found = Passes(model, None, way=way)(given)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[parameter_name], parameter.grad)


@pytest.mark.parametrize("name", MODELS)
def test_the_slow_pass_agrees_with_the_fast_one(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    clip = Clip(norm=0.05)
    fast, slow = Passes(model, clip)(batch(0)), Passes(model, clip, way="slow")(batch(0))
    torch.testing.assert_close(fast.norms, slow.norms)
    torch.testing.assert_close(fast.gradients, slow.gradients)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("way", ["eager", "compile"])
def test_gradients_of_small_weights_written_out_as_they_come_give_the_same_sum(
    way, exact, monkeypatch
):
    torch.manual_seed(0)
    adapters = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model, clip = get_peft_model(transformer(), adapters).double(), Clip(norm=0.05, exact=exact)
    slow, kinds = Passes(model, clip, way="slow")(batch(0)), set()
    monkeypatch.setattr(torch, "compile", lambda traced, **options: traced)
    monkeypatch.setattr(layers, "WRITES_OUT", {"cpu"})  # as on a GPU

    def seen(use, shape):
        kinds.add(type(written := layers.written_if_small(use, shape)))
        return written

    monkeypatch.setattr(watching, "written_if_small", seen)
    found = Passes(model, clip, way=way)(batch(0))
    assert kinds == {layers.Whole}
    torch.testing.assert_close(found.norms, slow.norms)
    # Exact sums are whole numbers of steps, of which rounding may cost one for each unit.
    torch.testing.assert_close(found.gradients, slow.gradients, rtol=1e-4, atol=3.0 * exact)


@pytest.mark.parametrize("way", ["eager", "compile"])
def test_a_frozen_head_with_columns_of_padding_gives_the_same_sum(way, monkeypatch):
    torch.manual_seed(0)
    adapters = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model, clip = get_peft_model(transformer(), adapters).double(), Clip(norm=0.05)
    slow, heads = Passes(model, clip, way="slow")(batch(0)), []

    def missing_columns(like, size):  # as on a GPU, for the vocabulary alone
        return 5 if size == VOCABULARY else 0

    def seen(watch, input, weight, bias, **order):
        heads.append(weight)
        return layers.linear_use(watch, input, weight, bias, **order)

    for module in (layers, watching):
        monkeypatch.setattr(module, "missing_columns", missing_columns)
    monkeypatch.setattr(watching, "linear_use", seen)
    monkeypatch.setattr(watching, "_HEAD", 1)
    monkeypatch.setattr(torch, "compile", lambda traced, **options: traced)
    found = Passes(model, clip, way=way)(batch(0))
    assert any(len(weight) == VOCABULARY and not weight.requires_grad for weight in heads)
    torch.testing.assert_close(found.norms, slow.norms)
    torch.testing.assert_close(found.gradients, slow.gradients)


@pytest.fixture
def sync_modes(monkeypatch):
    """How torch is told to treat waiting for a GPU, of which there is none here."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_a_pass_that_waits_for_the_gpu_is_not_captured_and_gives_the_same_sum(
    sync_modes, monkeypatch, caplog
):
    torch.manual_seed(0)
    model, clip = transformer().double(), Clip(norm=0.05)
    expected = Passes(model, clip)(batch(0))
    passes, runs = Passes(model, clip, way="graph"), []

    def waiting(*args, **options):
        runs.append(sync_modes[-1])
        if sync_modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return Passes._in_one_pass(passes, *args, **options)

    monkeypatch.setattr(passes, "_in_one_pass", waiting)
    found = passes(batch(0))
    assert runs[:2] == ["default", "error"]
    assert sync_modes[-1] == "default"
    assert passes.way == "eager"
    assert "cannot be captured" in caplog.text
    torch.testing.assert_close(found.gradients, expected.gradients)


def test_another_fault_while_nothing_may_wait_is_told_as_it_is(sync_modes):
    with pytest.raises(RuntimeError, match="shapes"), _no_waiting():
        raise RuntimeError("shapes do not fit")
    assert sync_modes == ["default", "error", "default"]


def test_a_weight_that_is_no_number_is_not_taken_for_one_that_was_written():
    torch.manual_seed(0)
    model = MODELS["lstm"]()
    with torch.no_grad():
        model.model.embed_tokens.weight[VOCABULARY - 1] = float("nan")
    given = batch(0)
    poisoned = given.ids_BT.clone().clamp(max=VOCABULARY - 2)
    poisoned[0] = VOCABULARY - 1  # in the first unit's first row
    own = torch.tensor([2, 2, 1])
    found = Passes(model, Clip(norm=0.1))(
        Physical.of(poisoned, given.targets_BT, own, given.layout)
    )
    assert (found.norms + found.losses).isfinite().tolist() == [False, True, True]


class Answers(TorchDispatchMode):
    """Counts the numbers that Python waits for, each of which would forbid a capture on a GPU."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += torch.Tag.data_dependent_output in func.tags
        return func(*args, **(kwargs or {}))


def asked_of(name, how):
    """How many answers a pass waits for, and the losses of its rows."""
    torch.manual_seed(0)
    passes = Passes(MODELS[name](), Clip(norm=0.1))
    with how(), Answers() as answers:
        watch, losses_B = passes.watched(*batch(0).tensors[:3], look=False)
    watch.forget()
    return answers.num, losses_B


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_rows_of_one_text_each_leave_transformers_nothing_more_to_wait_for(name):
    of_ours, _ = asked_of(
        "transformer", nullcontext
    )  # which is captured; of rows' losses, on a CPU
    (num, usual), (num_left, unpacked) = (
        asked_of(name, how) for how in (nullcontext, never_packed)
    )
    assert num > num_left == of_ours
    assert torch.equal(usual, unpacked)
    assert masking_utils.find_packed_sequence_indices(torch.tensor([[0, 1, 0, 1]])) is not None
