"""Private fine-tunes as somebody's script makes them, small enough for a test."""

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from finetunes.people import chats, tokenizer
from privacy.oracles import clipped_one
from tightlip.trainer import PrivacySpec, PrivateSFTTrainer

QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "bf16": False}


def small(**changes):
    """A model that never learnt anything, of one layer."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(tokenizer()), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**shape | changes))


def several(rows, times=2):
    """So many rows of each of the eight people, no two the same."""
    return [
        {**row, "messages": [*row["messages"], {"role": "user", "content": "x" * number}]}
        if "messages" in row
        else {**row, "completion": row["completion"] + "x" * number}
        for row in rows
        for number in range(1, times + 1)
    ]


def settings(folder, **changes):
    how = {"max_steps": 2, "per_device_train_batch_size": 8, "save_strategy": "no", "gradient_checkpointing": False, **QUIET}  # fmt: skip
    return trl.SFTConfig(output_dir=str(folder), **how | changes)


def lora(**changes):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], **changes})


def private_sft(
    folder, *, rows=None, model=None, privacy=None, callbacks=None, given=(), **changes
):
    """A private SFTTrainer; `given` are its own arguments, `changes` those of its SFTConfig."""
    own = {
        "model": model or small(),
        "args": settings(folder, **changes),
        "train_dataset": Dataset.from_list(rows or several(chats())),
        "processing_class": tokenizer(),
        "peft_config": lora(),
        "callbacks": callbacks,
        "privacy": privacy or PrivacySpec(noise_multiplier=1.0),
        "user_column": "user",
    }
    return PrivateSFTTrainer(**own | dict(given))


class Gradients(TrainerCallback):
    """Keeps what the optimizer is given."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **rest):
        self.steps.append(
            {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}
        )  # fmt: skip


def users_gradients(model, rows_by_user, collate):
    """Oracle: each user's gradient of the mean of their rows' losses, as transformers computes them."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = {}
    for user, rows in rows_by_user.items():
        losses = [model(**collate([row]), use_cache=False).loss for row in rows]
        own = torch.autograd.grad(torch.stack(losses).mean(), [*trained.values()])
        found[user] = dict(zip(trained, own, strict=True))
    return found


def mean_of_clipped(gradients, clip_norm):
    """The sum of all users' clipped gradients, over their number."""
    clipped = [clipped_one(each, clip_norm) for each in gradients.values()]
    return {name: sum(each[name] for each in clipped) / len(clipped) for name in clipped[0]}
