"""Adapters on a frozen base of 4 or 8 bits: each person's gradient is clipped as plain autograd has it."""

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments

from finetunes.people import chats
from privacy.oracles import norm_of
from tightlip.core.errors import UsageError
from tightlip.privacy import PrivateTraining
from tightlip.privacy.clipping import Clip
from tightlip.privacy.ledger import read_ledger
from tightlip.privacy.passes import Passes
from tightlip.privacy.per_unit import check_model, keep_differentiable
from tightlip.privacy.physical_batches import Shape
from tightlip.privacy.rows_alone import rows_meet
from tightlip.trainer import PrivacySpec, PrivateTrainer
from trainer.private_runs import (
    Gradients,
    lora,
    mean_of_clipped,
    private_sft,
    several,
    small,
    users_gradients,
)

pytestmark = pytest.mark.slow
BITS = {
    "4bit": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "8bit": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
}
# As people write it: products in bfloat16, whatever the embedding is held in.
IN_BFLOAT16 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)


@pytest.fixture
def base(tmp_path):
    def load(bits, **shape):
        config = bits if isinstance(bits, BitsAndBytesConfig) else BITS[bits]
        small(**shape).save_pretrained(tmp_path / "base")
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=config, dtype=torch.float32
        )

    return load


def rows():
    draw = torch.Generator().manual_seed(0)
    found = []
    for number in range(10):
        ids = torch.randint(4, 60, (4 + number % 5,), generator=draw).tolist()
        found.append({"input_ids": ids, "labels": ids, "user": str(number % 5)})
    return found


def collated(row):
    return {name: torch.tensor([row[0][name]]) for name in ("input_ids", "labels")}


@pytest.mark.parametrize("bits", BITS)
def test_norms_of_adapters_on_few_bits_are_exact(bits, base, tmp_path):
    kept = Gradients()
    model = get_peft_model(prepare_model_for_kbit_training(base(bits)), lora())
    model.gradient_checkpointing_disable()
    draw = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=draw)
    by_user = {}
    for row in rows():
        by_user.setdefault(row["user"], []).append(row)
    alone = users_gradients(model.eval(), by_user, collated)
    norms = sorted(float(norm_of(each)) for each in alone.values())
    clip_norm = (norms[1] + norms[2]) / 2  # some are cut and some are not
    args = TrainingArguments(
        str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=5, use_cpu=True, report_to=[],
        max_grad_norm=0.0, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    privacy = PrivacySpec(noise_multiplier=0.0, clip_norm=clip_norm)
    PrivateTrainer(
        model, args, train_dataset=Dataset.from_list(rows()), privacy=privacy, user_column="user", start="public",
        callbacks=[kept],
    ).train()  # fmt: skip
    expected = mean_of_clipped(alone, clip_norm)
    assert kept.steps[0].keys() == expected.keys()
    for name, gradient in kept.steps[0].items():
        off = float((gradient - expected[name]).norm())
        assert off <= 1e-3 * float(norm_of(expected)), name


@pytest.mark.parametrize("bits", BITS)
def test_people_share_a_pass_on_few_bits(bits, base, tmp_path, caplog):
    model = get_peft_model(base(bits), lora())
    keep_differentiable(model)
    training = PrivateTraining(
        model, torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1),
        [torch.tensor(row["input_ids"]) for row in rows()], noise_multiplier=1.0, expected_batch=4, steps=1,
        ledger=tmp_path / "ledger.json",
    )  # fmt: skip
    training.step()
    assert "a pass each" not in caplog.text
    assert "No two" not in training.guarantee()["because"]


def test_a_base_that_takes_the_largest_numbers_of_all_rows_lets_nobody_share_a_pass(base):
    model = base(BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0))
    passes = Passes(get_peft_model(model, lora()), Clip(norm=1.0))
    assert "int8_vectorwise_quant" in str(rows_meet(passes, Shape(16, 1, 4)))


def test_products_in_bfloat16_are_not_taken_for_looking_ahead(base):
    model = base(IN_BFLOAT16, num_hidden_layers=4, hidden_size=128)
    check_model(model.eval(), torch.randint(300, (2, 32)))


def test_a_base_that_was_packed_for_inference_is_refused(base, tmp_path):
    model = base("4bit")
    model.model.layers[0].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UsageError, match="Load the model again"):
        private_sft(tmp_path / "out", model=model).train()


def test_qlora_in_trl_as_people_write_it(base, tmp_path):
    privacy = PrivacySpec(noise_multiplier=1.0)
    trainer = private_sft(
        tmp_path / "out", model=base("4bit"), rows=several(chats(), 1), privacy=privacy,
        max_steps=1, bf16=True, gradient_checkpointing=True, max_length=16,
    )  # fmt: skip
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    assert read_ledger(tmp_path / "out" / "ledger.json")["steps"] == 1
    for name, each in trainer.model.named_parameters():
        assert torch.equal(each, before[name]) == ("lora_" not in name), name
    trainer.save_model()
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert not list((tmp_path / "out").glob("model*.safetensors"))
